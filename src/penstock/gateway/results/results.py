"""The results of one gateway process: which are being produced or read, and which are known to be kept."""

from __future__ import annotations

import asyncio
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from penstock.buffers import small_buffer
from penstock.config import KIB, MIB
from penstock.errors import ClosedError
from penstock.gateway.metrics import Metrics
from penstock.gateway.results.config import ResultsConfig
from penstock.gateway.results.held import HeldResults
from penstock.gateway.results.identity import ResultName
from penstock.gateway.results.memory import BlockPool, RecentBlocks
from penstock.gateway.results.run import Run
from penstock.gateway.results.shared_result import SharedResult

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

    from penstock.gateway.results.cursor import Cursor
    from penstock.gateway.results.plan import ResultPlan
    from penstock.gateway.results.record import ResultRecord
    from penstock.gateway.results.storage import ResultStorage, RunBlocks

T = TypeVar("T")

_PIECE_BYTES_MIN = 64 * KIB
_PIECE_BYTES_MAX = 1 * MIB
_UNKEPT_COUNT_MAX = 64


class Results:
    """Produces results once, and reads them. All methods run on the event loop of the process.

    Args:
        storage: Where results are kept; see ``open_storage``. It is closed with this object.
        config: The limits.
        metrics: Takes the counters.

    Cost: at most ``threads_max`` threads; memory up to ``recent_bytes_max`` and ``reading_bytes_max``, and for each run
        ``storing_blocks_max`` blocks.
    """

    def __init__(
        self, storage: ResultStorage, *, config: ResultsConfig | None = None, metrics: Metrics | None = None
    ) -> None:
        self.storage = storage
        self.config = config or ResultsConfig()
        self.metrics = metrics or Metrics()
        self._pool = BlockPool(storage.block_bytes)
        self._recent = RecentBlocks(self.config.recent_bytes_max)
        self._executor = ThreadPoolExecutor(self.config.threads_max, thread_name_prefix="penstock-results")
        self._turns = asyncio.Semaphore(self.config.runs_max)
        self._shared: weakref.WeakValueDictionary[ResultName, SharedResult] = weakref.WeakValueDictionary()
        self._alone: set[SharedResult] = set()  # nobody in this process reads them, but they are being produced
        self._unkept: OrderedDict[ResultName, SharedResult] = OrderedDict()
        self._records: OrderedDict[ResultName, ResultRecord] = OrderedDict()
        self._tasks: dict[asyncio.Task[None], SharedResult] = {}
        self._reading_count = 0
        self._closed = False
        self._is_shut = False
        self.held = HeldResults(self, self.config.hold_s)
        """Results of transforms that are not deterministic."""

    # ── finding ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def find(self, name: ResultName) -> ResultRecord | None:
        """Return the record of a complete result; None if it is not kept.

        Cost: nothing if this process has used it before; else a look at the disk, on a thread.
        """
        known = self._records.get(name)
        if known is not None:
            self._records.move_to_end(name)
            return known
        record = await self.on_thread(self.storage.find, name)
        if record is None or not record.is_complete:
            return None
        self.remember(record)
        return record

    async def exists(self, name: ResultName) -> bool:
        """Whether a result is kept, or is being produced by a process of this node."""
        if name in self._shared or name in self._records:
            return True
        return await self.on_thread(self.storage.find, name) is not None

    async def known_sizes_bytes(self, names: Sequence[ResultName]) -> dict[ResultName, int]:
        """Return the sizes of those results that are complete. Cost: as ``find`` for each, all on one thread."""
        sizes: dict[ResultName, int] = {}
        missing = []
        for name in names:
            shared, record = self._shared.get(name), self._records.get(name)
            run = shared.run if shared is not None else None
            if record is not None and record.size_bytes is not None:
                sizes[name] = record.size_bytes
            elif run is not None and run.is_done:
                sizes[name] = run.produced_bytes
            else:
                missing.append(name)
        if missing:
            records = await self.on_thread(lambda: [self.storage.find(each) for each in missing])
            for name, record in zip(missing, records, strict=True):
                if record is not None and record.is_complete and record.size_bytes is not None:
                    self.remember(record)
                    sizes[name] = record.size_bytes
        return sizes

    def shared(self, name: ResultName) -> SharedResult | None:
        """Return a result that somebody in this process reads or produces; None if nobody does."""
        return self._shared.get(name)

    def share(self, plan: ResultPlan, record: ResultRecord | None) -> SharedResult:
        """Return the result of a plan, which all its readers in this process share. It does not begin to produce it.

        Args:
            plan: What the result is.
            record: What ``find`` returned for it.

        Raises:
            ClosedError: The gateway is ending.
        """
        if self._closed:
            raise ClosedError("the gateway is ending")
        found = self._shared.get(plan.name)
        if found is None:
            found = self._shared[plan.name] = SharedResult(plan, results=self, record=record)
        return found

    def private(self, plan: ResultPlan) -> SharedResult:
        """Return a result that has one reader and is not kept.

        Raises:
            ClosedError: The gateway is ending.
        """
        if self._closed:
            raise ClosedError("the gateway is ending")
        return SharedResult(plan, results=self, record=None, is_storable=False)

    def remember(self, record: ResultRecord) -> None:
        """Note that a result is kept."""
        name = ResultName(record.scope, record.key, record.etag)
        self._records[name] = record
        self._records.move_to_end(name)
        while len(self._records) > self.config.records_max:
            self._records.popitem(last=False)

    def forget(self, record: ResultRecord) -> None:
        """Remove what is left of a result of which a block is missing."""
        self._records.pop(ResultName(record.scope, record.key, record.etag), None)
        if not self._closed:
            self._executor.submit(self.storage.remove, record)

    def retire(self, name: ResultName) -> None:
        """Forget a result, so that later requests do not find it. Those who read it go on."""
        self._records.pop(name, None)
        self._shared.pop(name, None)
        self._unkept.pop(name, None)

    def remove_soon(self, name: ResultName) -> None:
        """Remove the record of a name on a thread."""

        def remove() -> None:
            record = self.storage.find(name)
            if record is not None:
                self.storage.remove(record)

        if not self._closed:
            self._executor.submit(remove)

    # ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────

    def recent_piece(self, blocks: RunBlocks, position: int, end: int) -> memoryview | None:
        """Return bytes of a block that was produced lately; None if it is not in memory any more."""
        index, start = divmod(position, self.storage.block_bytes)
        block = self._recent.get(blocks.digest, index)
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

    def on_thread(self, function: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        """Call a function on a thread that may wait for the disk."""
        return asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    # ── producing ──────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, shared: SharedResult, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Start the task that produces a result; it ends with this object."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = shared
        task.add_done_callback(self._tasks.pop)
        return task

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
        transform = run.plan.transform
        self.metrics.add("penstock_gateway_result_runs_total", transform=transform, outcome=outcome)
        self.metrics.add("penstock_gateway_result_run_seconds_total", seconds, transform=transform)
        self.metrics.add("penstock_gateway_result_produced_bytes_total", run.produced_bytes, transform=transform)

    def count_reader(self, count: int) -> None:
        """Count a reader that has come (1) or left (-1)."""
        self._reading_count += count
        self.metrics.move("penstock_gateway_result_readers", count)

    def count_shared(self, plan: ResultPlan) -> None:
        """Count a wait for a result that somebody else has begun to produce."""
        self.metrics.add("penstock_gateway_result_waits_total", transform=plan.transform)

    def left(self, shared: SharedResult) -> None:
        """Decide what happens to a result that a reader has left: its run goes on alone, or is cancelled."""
        if shared.is_wanted or not shared.is_busy or shared in self._alone:
            return
        self._alone = {other for other in self._alone if other.is_busy and not other.is_wanted}
        if shared.goes_on_alone and len(self._alone) < self.config.background_runs_max:
            self._alone.add(shared)
        else:
            shared.cancel()

    def remember_unkept(self, shared: SharedResult) -> None:
        """Keep a small result that could not be stored in reach as long as its blocks are in memory."""
        run = shared.run
        if self._shared.get(shared.plan.name) is not shared or run is None:
            return
        if run.produced_bytes > self.config.recent_bytes_max // 4:
            return
        self._unkept[shared.plan.name] = shared
        self._unkept.move_to_end(shared.plan.name)
        while len(self._unkept) > _UNKEPT_COUNT_MAX:
            self._unkept.popitem(last=False)

    # ── the end ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def close(self) -> None:
        """Cancel all runs, store what is complete, and close the storage; idempotent."""
        self._closed = True
        while self._tasks:
            for shared in self._tasks.values():
                shared.cancel()
            await asyncio.wait(list(self._tasks))
        if not self._is_shut:
            self._is_shut = True
            await self.held.close()
        self._recent.clear()
        self._unkept.clear()
        await asyncio.to_thread(self._executor.shutdown)
        self.storage.close()
