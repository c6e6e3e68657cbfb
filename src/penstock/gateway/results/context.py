"""Shared parts of all results in a process: storage, threads, memory, counters, and the records of known results."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from penstock.config import KIB, MIB
from penstock.gateway.results.identity import ResultName
from penstock.gateway.results.memory import BlockPool, RecentBlocks
from penstock.gateway.results.run import Run
from penstock.memory.buffers import small_buffer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from penstock.gateway.metrics import Metrics
    from penstock.gateway.results.config import ResultsConfig
    from penstock.gateway.results.cursor import Cursor
    from penstock.gateway.results.plan import ResultPlan
    from penstock.gateway.results.record import ResultRecord
    from penstock.gateway.results.storage import ResultStorage, RunBlocks

T = TypeVar("T")

_TOUCH_S = 600.0
_SMALL_BYTES_MAX = 256 * KIB
"""Results up to this size are read on the event loop if the page cache has them: that takes less than asking a thread."""

_PIECE_BYTES_MIN = 64 * KIB
_PIECE_BYTES_MAX = 1 * MIB


class ResultsContext:
    """The parts that the results of one process share. All methods run on the event loop.

    Args:
        storage: Keeps the results.
        config: The limits.
        metrics: Takes the counters.

    Attributes:
        storage: Keeps the results.
        config: The limits.
        metrics: Takes the counters.
        records: Records of complete results, the last used one last.
    """

    def __init__(self, storage: ResultStorage, *, config: ResultsConfig, metrics: Metrics) -> None:
        self.storage = storage
        self.config = config
        self.metrics = metrics
        self.records: OrderedDict[ResultName, ResultRecord] = OrderedDict()
        self._pool = BlockPool(storage.block_bytes)
        self._recent = RecentBlocks(config.recent_bytes_max)
        self._executor = ThreadPoolExecutor(config.threads_max, thread_name_prefix="penstock-results")
        self._turns = asyncio.Semaphore(config.runs_max)
        self._touched_s: dict[ResultName, float] = {}
        self._reading_count = 0
        self._closed = False

    # ── what is kept ───────────────────────────────────────────────────────────────────────────────────────────────

    async def find(self, name: ResultName) -> ResultRecord | None:
        """Return the record of a complete result; None if it is not kept.

        Cost: nothing if this process has used the result before; otherwise one lookup on the disk, on a thread.
        """
        known = self.records.get(name)
        if known is not None:
            self.records.move_to_end(name)
            return known
        if self.storage.unused_s(name) is None:  # asking a thread would cost more than this system call
            return None
        record = await self.on_thread(self.storage.find, name)
        if record is None or not record.is_complete:
            return None
        self.remember(record)
        return record

    def remember(self, record: ResultRecord) -> None:
        """Note that a result is kept."""
        name = ResultName(record.scope, record.key, record.etag)
        self.records[name] = record
        self.records.move_to_end(name)
        while len(self.records) > self.config.records_max:
            self.records.popitem(last=False)

    def forget(self, record: ResultRecord) -> None:
        """Remove a result that lacks a block."""
        self.records.pop(ResultName(record.scope, record.key, record.etag), None)
        if not self._closed:
            self._executor.submit(self.storage.remove, record)

    def touch(self, name: ResultName) -> None:
        """Mark the record of a result as used, at most once in 10 minutes. Its blocks are marked when they are read."""
        now_s = time.monotonic()
        if now_s - self._touched_s.get(name, -_TOUCH_S) >= _TOUCH_S:
            if len(self._touched_s) >= self.config.records_max:
                self._touched_s.clear()
            self._touched_s[name] = now_s
            self.storage.mark_used(name)

    def remove_soon(self, name: ResultName) -> None:
        """Remove the record of a name on a thread."""

        def remove() -> None:
            record = self.storage.find(name)
            if record is not None:
                self.storage.remove(record)

        if not self._closed:
            self._executor.submit(remove)

    # ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────

    def piece_at_once(self, blocks: RunBlocks, position: int, end: int, *, size_bytes: int | None) -> memoryview | None:
        """Return bytes that need no waiting: of a block that was produced lately, or of a small result in the page cache.

        Args:
            blocks: The blocks of a run.
            position: First byte wanted, counted in the result.
            end: End of what is wanted.
            size_bytes: Bytes that are stored; None if that is not known.

        Returns:
            The bytes from `position` on, as many as are there; None if a thread must look for them.
        """
        index, start = divmod(position, self.storage.block_bytes)
        block = self._recent.get(blocks.digest, index)
        small_bytes_max = min(_SMALL_BYTES_MAX, self.storage.block_bytes)
        if block is None and size_bytes is not None and size_bytes <= small_bytes_max:
            block = self.storage.read_at_once(blocks, size_bytes)
        return block[start : end - position + start] if block is not None and start < len(block) else None

    def read_stored(
        self, blocks: RunBlocks, position: int, end: int, *, size_bytes: int | None
    ) -> asyncio.Future[memoryview | None]:
        """Read a piece of a stored block.

        Args:
            blocks: The blocks of a run.
            position: First byte wanted, counted in the result.
            end: End of what is wanted.
            size_bytes: Bytes that are stored; None if only full blocks are.

        Returns:
            The bytes from `position` on, at most a block or this reader's share of ``reading_bytes_max``; None if the block is
            missing or corrupt.
        """
        block_bytes = self.storage.block_bytes
        index, start = divmod(position, block_bytes)
        stored_bytes = block_bytes if size_bytes is None else min(block_bytes, size_bytes - index * block_bytes)
        share_bytes = self.config.reading_bytes_max // (2 * max(1, self._reading_count))
        piece_bytes = min(max(share_bytes, _PIECE_BYTES_MIN), _PIECE_BYTES_MAX, stored_bytes - start, end - position)
        return self.on_thread(self._read_now, blocks, index, stored_bytes, start, piece_bytes)

    def _read_now(
        self, blocks: RunBlocks, index: int, stored_bytes: int, start: int, piece_bytes: int
    ) -> memoryview | None:
        view = small_buffer(piece_bytes)[:piece_bytes]
        return view if self.storage.read(blocks, index, stored_bytes, start, view) else None

    def blocks_for(self, record: ResultRecord) -> Callable[[int], memoryview | None]:
        """Return a function that reads a block of a complete result on a thread, or returns None if the block is gone."""
        blocks = self.storage.blocks_of(ResultName(record.scope, record.key, record.etag), record.run)

        def read(index: int) -> memoryview | None:
            size_bytes = record.block_size_bytes(index)
            return self._read_now(blocks, index, size_bytes, 0, size_bytes)

        return read

    def on_thread(self, function: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        """Call a function on a thread that may wait for the disk."""
        return asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    # ── producing ──────────────────────────────────────────────────────────────────────────────────────────────────

    def new_run(
        self, plan: ResultPlan, *, cursors: set[Cursor], is_size_wanted: Callable[[], bool], stores: bool
    ) -> Run:
        """Return a run that has not begun."""
        return Run(
            plan,
            storage=self.storage,
            executor=self._executor,
            pool=self._pool,
            recent=self._recent,
            config=self.config,
            cursors=cursors,
            is_size_wanted=is_size_wanted,
            stores=stores,
        )

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until another transform may run."""
        async with self._turns:
            self.metrics.move("penstock_gateway_result_runs_in_flight", 1)
            try:
                yield
            finally:
                self.metrics.move("penstock_gateway_result_runs_in_flight", -1)

    def count_run(self, run: Run, *, outcome: str, seconds: float) -> None:
        """Count a run that has ended."""
        name = run.plan.access_point
        self.metrics.add("penstock_gateway_result_runs_total", access_point=name, outcome=outcome)
        self.metrics.add("penstock_gateway_result_run_seconds_total", seconds, access_point=name)
        self.metrics.add("penstock_gateway_result_produced_bytes_total", run.produced_bytes, access_point=name)

    def count_reader(self, count: int) -> None:
        """Count a reader that has come (1) or left (-1)."""
        self._reading_count += count
        self.metrics.move("penstock_gateway_result_readers", count)

    def count_shared(self, plan: ResultPlan) -> None:
        """Count a wait for a result that somebody else has begun to produce."""
        self.metrics.add("penstock_gateway_result_waits_total", access_point=plan.access_point)

    async def close(self) -> None:
        """End the threads, and close the storage; idempotent."""
        self._closed = True
        self._recent.clear()
        await asyncio.to_thread(self._executor.shutdown)
        self.storage.close()
