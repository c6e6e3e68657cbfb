"""``MappedResult``: a result whose ranges the transform produces by themselves, so nothing is kept."""

from __future__ import annotations

import secrets
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from penstock.gateway.objects import ObjectHead, ResultWriter
    from penstock.gateway.results.plan import ResultPlan
    from penstock.gateway.results.results import Results
    from penstock.types import Buffer


class MappedResult:
    """A result that is being read, range by range. Each range is a run of its own, and none is kept.

    Args:
        head: Attributes of the result, including its size.
        plan: The result as a whole.
        results: The results of this process.
        produce: Returns what writes a range.
    """

    def __init__(
        self,
        head: ObjectHead,
        *,
        plan: ResultPlan,
        results: Results,
        produce: Callable[[ByteRange], Callable[[ResultWriter], Awaitable[None]]],
    ) -> None:
        assert head.size_bytes is not None
        self.head = head
        self._size_bytes = head.size_bytes
        self._plan = plan
        self._results = results
        self._produce = produce

    async def wait_size_bytes(self) -> int:
        """Return the result's size in bytes."""
        return self._size_bytes

    def read(self, span: ByteRange | None) -> AsyncIterator[Buffer]:
        """Iterate over the bytes of a range; None reads to the end."""
        return self._read(span or ByteRange(0, self._size_bytes))

    async def _read(self, span: ByteRange) -> AsyncIterator[Buffer]:
        name = self._plan.name
        unique = name._replace(etag=f"{name.etag} {span.start}-{span.end} {secrets.token_hex(8)}")
        plan = replace(self._plan, name=unique, produce=self._produce(span), size_bytes=span.end - span.start)
        shared = self._results.private(plan)
        async with aclosing(shared.pieces(None)) as pieces:
            async for piece in pieces:
                if (headers := shared.headers) is not None:
                    self.head = replace(self.head, headers=headers)
                yield piece

    async def close(self) -> None:
        """End reading; idempotent."""
