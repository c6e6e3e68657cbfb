"""A result as an ``OpenObject``."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from penstock.gateway.objects import ObjectHead
    from penstock.gateway.results.shared_result import SharedResult
    from penstock.types import Buffer, ByteRange


class OpenResult:
    """A result that is being read. Nothing is produced before its size or its first byte is requested.

    Args:
        shared: The result.
        head: Description of the result.
        spools: Whether reading waits until the length is known.
        hides_size: Whether `head` leaves the size out until ``wait_size_bytes`` is called.
    """

    def __init__(
        self, shared: SharedResult, head: ObjectHead, *, spools: bool = False, hides_size: bool = False
    ) -> None:
        self._shared = shared
        self._spools = spools
        self._hides_size = hides_size
        self.head = head
        self._learn()

    def _learn(self, size_bytes: int | None = None) -> None:
        if size_bytes is None and not self._hides_size:
            size_bytes = self._shared.size_bytes
        headers = self._shared.headers
        self.head = replace(
            self.head,
            size_bytes=self.head.size_bytes if size_bytes is None else size_bytes,
            headers=self.head.headers if headers is None else headers,
        )

    async def wait_size_bytes(self) -> int:
        """Return the result's size in bytes; if it is not known, the result is produced."""
        size_bytes = await self._shared.wait_size_bytes()
        self._learn(size_bytes)
        return size_bytes

    def read(self, span: ByteRange | None) -> AsyncIterator[Buffer]:
        """Iterate over the bytes of a range; None reads to the end."""
        return self._read(span)

    async def _read(self, span: ByteRange | None) -> AsyncIterator[Buffer]:
        if self._spools:
            await self.wait_size_bytes()
        async with aclosing(self._shared.pieces(span)) as pieces:
            is_first = True
            async for piece in pieces:
                if is_first:
                    self._learn()
                    is_first = False
                yield piece
        if is_first:
            self._learn()

    async def close(self) -> None:
        """End reading; idempotent."""
