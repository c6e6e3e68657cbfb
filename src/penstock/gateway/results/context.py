"""Shared parts of all results in a process: storage, threads, memory, counters, and the records of known results."""

from __future__ import annotations

import asyncio
import mmap
import time
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from penstock.config import KIB, MIB
from penstock.memory import buffers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from penstock.gateway.metrics import Metrics
    from penstock.gateway.results.identity import ResultName, ResultPlan
    from penstock.gateway.results.record import ResultRecord
    from penstock.gateway.results.storage import ResultStorage, RunBlocks

T = TypeVar("T")

_TOUCH_S = 600.0
_SMALL_BYTES_MAX = 256 * KIB
"""Results up to this size are read on the event loop if the page cache has them: that takes less than asking a thread."""

_PIECE_BYTES_MIN = 64 * KIB
_PIECE_BYTES_MAX = 1 * MIB

_FREE_BYTES_MAX = 32 * MIB
"""Memory that is kept for the next blocks. A new mmap costs a page fault per 4 KiB: 150 µs per MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultsConfig:
    """Limits of one gateway process.

    Attributes:
        recent_bytes_max: Memory in bytes for the blocks that were produced last, for readers that are a little behind.
        reading_bytes_max: Memory in bytes for all pieces that are being read or sent; each reader may use at least 64 KiB.
        runs_max: Largest number of transforms that run at the same time; further ones wait.
        background_runs_max: Largest number of runs that go on although all their readers have left.
        storing_blocks_max: Blocks of one run that may wait for the disk.
        held_blocks_max: Blocks of one run that are held in memory for readers if the disk does not take them.
        lag_s_max: Time in seconds for which the slowest reader of such a run may make no progress before it is left behind.
        hold_s: Seconds for which a result of a transform that is not deterministic is held after its last use.
        threads_max: Largest number of threads that read and write blocks.
        records_max: Number of records of results that are remembered.
        uploads_max: Largest number of results that wait to be stored in the bucket of results; further ones are not stored.
        upload_drain_s_max: The most seconds that closing waits for uploads.
    """

    recent_bytes_max: int = 64 * MIB
    reading_bytes_max: int = 64 * MIB
    runs_max: int = 64
    background_runs_max: int = 16
    storing_blocks_max: int = 8
    held_blocks_max: int = 8
    lag_s_max: float = 10.0
    hold_s: float = 10.0
    threads_max: int = 4
    records_max: int = 16_384
    uploads_max: int = 256
    upload_drain_s_max: float = 20.0


class BlockPool:
    """Memory for blocks, each at the start of a page, so that whole blocks can be written past the page cache.

    Args:
        block_bytes: Size of a block.
    """

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._free: deque[mmap.mmap] = deque(maxlen=max(1, _FREE_BYTES_MAX // block_bytes))

    def take(self) -> memoryview:
        """Return a block: uint8[block_bytes], writable, with undefined contents. It is free again when nothing refers to it."""
        try:
            owner = self._free.pop()
        except IndexError:
            owner = mmap.mmap(-1, self.block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return buffers.lease(owner, self._free, owner)


class BlockKey(NamedTuple):
    """A block of one run: the digest of the run's blocks, and the number of the block."""

    digest: str
    number: int


class RecentBlocks:
    """The blocks that were produced last, up to `bytes_max` bytes. Only the event loop's thread uses it.

    Blocks are written past the page cache, so readers that are a little behind, and the next ranges of a client that reads in
    ranges, would otherwise read them back from the disk.

    Args:
        bytes_max: Largest memory of all blocks together.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._blocks: OrderedDict[BlockKey, memoryview] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, digest: str, index: int) -> memoryview | None:
        """Return a block as uint8[n], read-only; None if it is not here."""
        key = BlockKey(digest, index)
        block = self._blocks.get(key)
        if block is not None:
            self._blocks.move_to_end(key)
        return block

    def put(self, digest: str, index: int, block: memoryview) -> None:
        """Keep a block, and drop those that were used least recently."""
        self.drop(digest, index)
        self._blocks[BlockKey(digest, index)] = block
        self._bytes += _held_bytes(block)
        while self._bytes > self._bytes_max:
            _, oldest = self._blocks.popitem(last=False)
            self._bytes -= _held_bytes(oldest)

    def drop(self, digest: str, index: int) -> None:
        """Forget a block; nothing happens if it is not here."""
        block = self._blocks.pop(BlockKey(digest, index), None)
        if block is not None:
            self._bytes -= _held_bytes(block)

    def drop_run(self, digest: str) -> None:
        """Forget all blocks of a run."""
        for key in [key for key in self._blocks if key.digest == digest]:
            self.drop(*key)

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()
        self._bytes = 0


def _held_bytes(block: memoryview) -> int:
    """Return the memory that a block keeps alive: a small result is the beginning of a larger buffer."""
    return memoryview(block.obj).nbytes


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
        pool: Memory for blocks.
        recent: The blocks that were produced last.
    """

    def __init__(self, storage: ResultStorage, *, config: ResultsConfig, metrics: Metrics) -> None:
        self.storage = storage
        self.config = config
        self.metrics = metrics
        self.records: OrderedDict[ResultName, ResultRecord] = OrderedDict()
        self.pool = BlockPool(storage.block_bytes)
        self.recent = RecentBlocks(config.recent_bytes_max)
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
        name = record.name
        self.records[name] = record
        self.records.move_to_end(name)
        while len(self.records) > self.config.records_max:
            self.records.popitem(last=False)

    def forget(self, record: ResultRecord) -> None:
        """Remove a result that lacks a block."""
        self.records.pop(record.name, None)
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

    def piece_at_once(self, blocks: RunBlocks, offset: int, end: int, *, size_bytes: int | None) -> memoryview | None:
        """Return bytes that need no waiting: of a block that was produced lately, or of a small result in the page cache.

        Args:
            blocks: The blocks of a run.
            offset: First byte wanted, counted in the result.
            end: End of the wanted bytes.
            size_bytes: Bytes that are stored; None if that is not known.

        Returns:
            The bytes from `offset` on, as many as there are; None if a thread must look for them.
        """
        index, start = divmod(offset, self.storage.block_bytes)
        block = self.recent.get(blocks.digest, index)
        small_bytes_max = min(_SMALL_BYTES_MAX, self.storage.block_bytes)
        if block is None and size_bytes is not None and size_bytes <= small_bytes_max:
            block = self.storage.read_at_once(blocks, size_bytes)
        return block[start : end - offset + start] if block is not None and start < len(block) else None

    def read_stored(
        self, blocks: RunBlocks, offset: int, end: int, *, size_bytes: int | None
    ) -> asyncio.Future[memoryview | None]:
        """Read a piece of a stored block.

        Args:
            blocks: The blocks of a run.
            offset: First byte wanted, counted in the result.
            end: End of the wanted bytes.
            size_bytes: Bytes that are stored; None if only full blocks are.

        Returns:
            The bytes from `offset` on, at most a block or this reader's share of ``reading_bytes_max``; None if the block is
            missing or corrupt.
        """
        block_bytes = self.storage.block_bytes
        index, start = divmod(offset, block_bytes)
        stored_bytes = block_bytes if size_bytes is None else min(block_bytes, size_bytes - index * block_bytes)
        share_bytes = self.config.reading_bytes_max // (2 * max(1, self._reading_count))
        piece_bytes = min(max(share_bytes, _PIECE_BYTES_MIN), _PIECE_BYTES_MAX, stored_bytes - start, end - offset)
        return self.on_thread(self._read_now, blocks, index, stored_bytes, start, piece_bytes)

    def _read_now(
        self, blocks: RunBlocks, index: int, stored_bytes: int, start: int, piece_bytes: int
    ) -> memoryview | None:
        view = buffers.small_buffer(piece_bytes)[:piece_bytes]
        return view if self.storage.read(blocks, index, stored_bytes, start, view) else None

    def blocks_for(self, record: ResultRecord) -> Callable[[int], memoryview | None]:
        """Return a function that reads a block of a complete result on a thread, or returns None if the block is gone."""
        blocks = self.storage.blocks_of(record.name, record.run)

        def read(index: int) -> memoryview | None:
            size_bytes = record.block_size_bytes(index)
            return self._read_now(blocks, index, size_bytes, 0, size_bytes)

        return read

    def on_thread(self, function: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        """Call a function on a thread that may wait for the disk."""
        return asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    # ── producing ──────────────────────────────────────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until another transform may run."""
        async with self._turns:
            self.metrics.move("penstock_gateway_result_runs_in_flight", 1)
            try:
                yield
            finally:
                self.metrics.move("penstock_gateway_result_runs_in_flight", -1)

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
        self.recent.clear()
        await asyncio.to_thread(self._executor.shutdown)
        self.storage.close()
