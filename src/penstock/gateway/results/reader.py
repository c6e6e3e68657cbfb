"""A result that is being read: an ``OpenObject``, and its readers, which take pieces from memory or from the disk."""

from __future__ import annotations

import secrets
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.gateway.objects import S3Error
from penstock.gateway.results.run import STOPPED, as_refusal
from penstock.types import ByteRange

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Awaitable, Callable

    from penstock.gateway.objects import ObjectHead, ResultWriter
    from penstock.gateway.results.identity import ResultPlan
    from penstock.gateway.results.results import Results
    from penstock.gateway.results.run import Cursor, Run
    from penstock.gateway.results.shared_result import SharedResult
    from penstock.gateway.results.storage import RunBlocks
    from penstock.types import Buffer

_FRUITLESS_RUNS_MAX = 3


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

    async def read(self, span: ByteRange | None) -> AsyncIterator[Buffer]:
        """Iterate over the bytes of a range; None reads to the end."""
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


class MappedResult:
    """A result whose ranges the transform produces by themselves: each range is a run of its own, and none is kept.

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

    async def read(self, span: ByteRange | None) -> AsyncIterator[Buffer]:
        """Iterate over the bytes of a range; None reads to the end."""
        span = span or ByteRange(0, self._size_bytes)
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


class ResultReader:
    """Reads one range of a result. All methods run on the event loop.

    Each piece comes from the memory of a run in this process, from the recent blocks, or from the disk. If it is nowhere,
    because nobody has produced it, or it was evicted, or its checksum is wrong, the reader asks for a run, and waits for it.

    Args:
        result: The result.
        cursor: The range, and how far the reader has come.
    """

    def __init__(self, result: SharedResult, cursor: Cursor) -> None:
        self._result = result
        self._context = result.context
        self._cursor = cursor
        self._run: Run | None = None  # the run that this reader saw last
        self._attempts_count = result.attempts_count
        self._fruitless_count = 0
        self._ahead: tuple[int, asyncio.Future[memoryview | None]] | None = None

    async def next_piece(self) -> memoryview | None:
        """Return the bytes at the reader's offset, as many as there are; None at the end of the range or the result.

        Raises:
            S3Error: They cannot be produced.
            PenstockError: The same.
        """
        cursor = self._cursor
        while cursor.offset < cursor.end:
            run = self._result.run or self._run
            if run is not None and self._is_over_for_others(run):
                await self._result.wait(None)
                continue
            if run is not None:
                self._follow(run)
                if (piece := await self._from_run(run)) is not None:
                    self._fruitless_count = 0
                    return piece
                if run.is_done and cursor.offset >= run.produced_bytes:
                    return None
                if self._result.run is run:
                    await self._wait_for(run)
                    continue
                self._run = None
            record = self._result.record
            if record is not None:
                size_bytes = record.size_bytes if record.is_complete else None
                if size_bytes is not None and cursor.offset >= size_bytes:
                    return None
                blocks = self._context.storage.blocks_of(record.name, record.run)
                if (piece := await self._from_disk(blocks, size_bytes=size_bytes)) is not None:
                    self._fruitless_count = 0
                    return piece
                if record.is_complete:
                    self._result.lost(record)
            self._result.ensure_produced(self._attempts_count)
            await self._result.wait(self._result.run)
        return None

    def _is_over_for_others(self, run: Run) -> bool:
        """Whether a run has failed before this reader came, or was abandoned, and only remains to be cleaned up."""
        if run.error is None or self._result.run is not run:
            return False
        return run is not self._run or isinstance(run.error, STOPPED)

    def _follow(self, run: Run) -> None:
        """Remember a run, and raise its error."""
        if run is not self._run:
            self._run = run
            self._fruitless_count += 1
            if self._fruitless_count > _FRUITLESS_RUNS_MAX:
                raise S3Error("SlowDown", "The result is evicted faster than it can be sent.")
        if run.error is not None and not isinstance(run.error, STOPPED):
            raise as_refusal(run.error, what=f"transform {run.plan.transform}")

    async def _from_run(self, run: Run) -> memoryview | None:
        cursor = self._cursor
        piece = run.piece(cursor.offset, cursor.end)
        if piece is not None:
            self._count(piece, "memory")
            return piece
        if cursor.offset >= run.readable_bytes:
            return None
        piece = await self._from_disk(run.blocks, size_bytes=run.produced_bytes)
        if piece is None and run.error is None and self._result.run is run:
            self._result.block_gone(run)
        return piece

    async def _wait_for(self, run: Run) -> None:
        """Wait until the run has made progress; if it is over and the block is gone, let the result be produced again."""
        if run.is_done and not self._result.is_busy:
            self._result.drop(run)
        else:
            await self._result.wait(run)

    async def _from_disk(self, blocks: RunBlocks, *, size_bytes: int | None) -> memoryview | None:
        """Return a piece of a block that was produced; None if it is missing or corrupt.

        Args:
            blocks: The blocks of the run that produced it.
            size_bytes: Bytes that are there; None if only full blocks of a run in another process are.
        """
        cursor, ahead = self._cursor, self._ahead
        if ahead is not None and ahead[0] == cursor.offset:
            self._ahead = None
            piece = await ahead[1]
        elif (
            piece := self._context.piece_at_once(blocks, cursor.offset, cursor.end, size_bytes=size_bytes)
        ) is not None:
            self._count(piece, "memory")
            return piece
        elif size_bytes is None and not self._has_full_block(blocks):
            return None
        else:
            piece = await self._context.read_stored(blocks, cursor.offset, cursor.end, size_bytes=size_bytes)
        if piece is None:
            return None
        self._count(piece, "disk")
        following = cursor.offset + len(piece)
        if size_bytes is not None and following < min(cursor.end, size_bytes):
            future = self._context.read_stored(blocks, following, cursor.end, size_bytes=size_bytes)
            self._ahead = (following, future)
        return piece

    def _has_full_block(self, blocks: RunBlocks) -> bool:
        storage = self._context.storage
        return storage.has_block(blocks, self._cursor.offset // storage.block_bytes)

    def _count(self, piece: memoryview, place: str) -> None:
        self._context.metrics.add("penstock_gateway_result_bytes_total", len(piece), place=place)

    def close(self) -> None:
        """Drop the read-ahead; idempotent."""
        if self._ahead is not None:
            future, self._ahead = self._ahead[1], None
            future.cancel()
