"""One reader of a result: takes each piece from where it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.gateway.objects import S3Error
from penstock.gateway.results.run import STOPPED, as_refusal

if TYPE_CHECKING:
    import asyncio

    from penstock.gateway.results.cursor import Cursor
    from penstock.gateway.results.run import Run
    from penstock.gateway.results.shared_result import SharedResult
    from penstock.gateway.results.storage import RunBlocks

_FRUITLESS_RUNS_MAX = 3


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
        self._cursor = cursor
        self._run: Run | None = None  # the run that this reader saw last
        self._attempts_count = result.attempts_count
        self._fruitless_count = 0
        self._ahead: tuple[int, asyncio.Future[memoryview | None]] | None = None

    async def next_piece(self) -> memoryview | None:
        """Return the bytes at the reader's position, as many as are there; None at the end of the range or the result.

        Raises:
            S3Error: They cannot be produced.
            PenstockError: The same.
        """
        cursor = self._cursor
        while cursor.position < cursor.end:
            run = self._result.run or self._run
            if run is not None and self._is_over_for_others(run):
                await self._result.wait(None)
                continue
            if run is not None:
                self._follow(run)
                if (piece := await self._from_run(run)) is not None:
                    self._fruitless_count = 0
                    return piece
                if run.is_done and cursor.position >= run.produced_bytes:
                    return None
                if self._result.run is run:
                    await self._wait_for(run)
                    continue
                self._run = None
            record = self._result.record
            if record is not None:
                size_bytes = record.size_bytes if record.is_complete else None
                if size_bytes is not None and cursor.position >= size_bytes:
                    return None
                blocks = self._result.blocks_of(record)
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
                raise S3Error("SlowDown", "The result is evicted faster than it can be sent.", status=503)
        if run.error is not None and not isinstance(run.error, STOPPED):
            raise as_refusal(run.error, what=f"transform {run.plan.transform}")

    async def _from_run(self, run: Run) -> memoryview | None:
        cursor = self._cursor
        piece = run.piece(cursor.position, cursor.end)
        if piece is not None:
            self._result.count_bytes(len(piece), place="memory")
            return piece
        if cursor.position >= run.readable_bytes:
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
        if ahead is not None and ahead[0] == cursor.position:
            self._ahead = None
            piece = await ahead[1]
        elif (
            piece := self._result.piece_at_once(blocks, cursor.position, cursor.end, size_bytes=size_bytes)
        ) is not None:
            self._result.count_bytes(len(piece), place="memory")
            return piece
        elif size_bytes is None and not self._result.has_full_block(blocks, cursor.position):
            return None
        else:
            piece = await self._result.read_stored(blocks, cursor.position, cursor.end, size_bytes=size_bytes)
        if piece is None:
            return None
        self._result.count_bytes(len(piece), place="disk")
        following = cursor.position + len(piece)
        if size_bytes is not None and following < min(cursor.end, size_bytes):
            future = self._result.read_stored(blocks, following, cursor.end, size_bytes=size_bytes)
            self._ahead = (following, future)
        return piece

    def close(self) -> None:
        """Drop what is being read ahead; idempotent."""
        if self._ahead is not None:
            future, self._ahead = self._ahead[1], None
            future.cancel()
