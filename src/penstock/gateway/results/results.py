"""The results of one gateway process: which are being produced or read, and which are known to be stored."""

from __future__ import annotations

import asyncio
import weakref
from collections import OrderedDict
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.errors import ClosedError
from penstock.gateway.metrics import Metrics
from penstock.gateway.results.context import ResultsConfig, ResultsContext
from penstock.gateway.results.derived import DerivedProducer, DerivedResults, Kept, was_copied
from penstock.gateway.results.held import HeldResults
from penstock.gateway.results.shared_result import SharedResult

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from penstock.gateway.results.identity import ResultName, ResultPlan
    from penstock.gateway.results.record import ResultRecord
    from penstock.gateway.results.storage import ResultStorage
    from penstock.store.base import Store

_UNKEPT_COUNT_MAX = 64


class Results:
    """Produces results once, and reads them. All methods run on the event loop of the process.

    Args:
        storage: The storage of results, from ``open_storage``. It is closed with this object.
        config: The limits.
        metrics: Takes the counters.
        derived_store: Bucket or prefix in which finished results are kept as well; None for none. It is closed with this
            object.

    Attributes:
        derived: The results in the bucket; None if there is none.

    Cost: at most ``threads_max`` threads; memory up to ``recent_bytes_max`` and ``reading_bytes_max``, and for each run
        ``storing_blocks_max`` blocks.
    """

    def __init__(
        self,
        storage: ResultStorage,
        *,
        config: ResultsConfig | None = None,
        metrics: Metrics | None = None,
        derived_store: Store | None = None,
    ) -> None:
        self.config = config or ResultsConfig()
        self.storage = storage
        metrics = metrics or Metrics()
        self._context = ResultsContext(storage, config=self.config, metrics=metrics)
        self.derived = DerivedResults(derived_store, metrics=metrics) if derived_store is not None else None
        self._uploads: dict[ResultName, asyncio.Task[Kept]] = {}
        self._shared: weakref.WeakValueDictionary[ResultName, SharedResult] = weakref.WeakValueDictionary()
        self._alone: set[SharedResult] = set()  # nobody in this process reads them, but they are being produced
        self._unkept: OrderedDict[ResultName, SharedResult] = OrderedDict()
        self._tasks: dict[asyncio.Task[None], SharedResult] = {}
        self._closed = False
        self._is_shut = False
        self.held = HeldResults(self._context, is_wanted=self._is_wanted, retire=self.retire)
        """Results of transforms that are not deterministic."""

    # ── finding ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def find(self, name: ResultName) -> ResultRecord | None:
        """Return the record of a complete result; None if it is not kept.

        Cost: nothing if this process has used the result before; otherwise one lookup on the disk, on a thread.
        """
        return await self._context.find(name)

    def _is_wanted(self, name: ResultName) -> bool:
        shared = self._shared.get(name)
        return shared is not None and shared.is_wanted

    async def exists(self, name: ResultName) -> bool:
        """Whether a result is kept, or is being produced by a process of this node."""
        if name in self._shared or name in self._context.records:
            return True
        return await self._context.on_thread(self.storage.find, name) is not None

    async def known_sizes_bytes(self, names: Sequence[ResultName]) -> dict[ResultName, int]:
        """Return the sizes of those results that are complete. Cost: as ``find`` for each, all on one thread."""
        sizes: dict[ResultName, int] = {}
        missing = []
        for name in names:
            shared, record = self._shared.get(name), self._context.records.get(name)
            run = shared.run if shared is not None else None
            if record is not None and record.size_bytes is not None:
                sizes[name] = record.size_bytes
            elif run is not None and run.is_done:
                sizes[name] = run.produced_bytes
            else:
                missing.append(name)
        if missing:
            records = await self._context.on_thread(lambda: [self.storage.find(each) for each in missing])
            for name, record in zip(missing, records, strict=True):
                if record is not None and record.is_complete and record.size_bytes is not None:
                    self._context.remember(record)
                    sizes[name] = record.size_bytes
        return sizes

    def shared(self, name: ResultName) -> SharedResult | None:
        """Return a result that somebody in this process reads or produces; None if nobody does."""
        return self._shared.get(name)

    def share(self, plan: ResultPlan, record: ResultRecord | None) -> SharedResult:
        """Return the result of a plan, which all its readers in this process share. It does not begin to produce it.

        Args:
            plan: The result, and how it is produced.
            record: The record that ``find`` returned for it.

        Raises:
            ClosedError: The gateway is ending.
        """
        if self._closed:
            raise ClosedError("the gateway is ending")
        found = self._shared.get(plan.name)
        if found is None:
            if self.derived is not None and plan.is_deterministic:
                plan = replace(plan, produce=DerivedProducer(plan, self.derived))
            found = self._shared[plan.name] = SharedResult(plan, context=self._context, keeper=self, record=record)
        return found

    def private(self, plan: ResultPlan) -> SharedResult:
        """Return a result that has one reader and is not kept.

        Raises:
            ClosedError: The gateway is ending.
        """
        if self._closed:
            raise ClosedError("the gateway is ending")
        return SharedResult(plan, context=self._context, keeper=self, record=None, is_storable=False)

    def retire(self, name: ResultName) -> None:
        """Forget a result, so that later requests do not find it. Those who read it go on."""
        self._context.records.pop(name, None)
        self._shared.pop(name, None)
        self._unkept.pop(name, None)

    # ── producing ──────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, shared: SharedResult, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Start the task that produces a result; it ends with this object.

        Raises:
            ClosedError: The gateway is ending.
        """
        if self._closed:
            work.close()
            raise ClosedError("the gateway is ending")
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = shared
        task.add_done_callback(self._tasks.pop)
        return task

    def completed(self, shared: SharedResult, record: ResultRecord) -> None:
        """Store a result in the bucket of results too, if it did not come from there."""
        if self.derived is None or not shared.plan.is_deterministic or was_copied(shared.plan):
            return
        if len(self._uploads) >= self.config.uploads_max:
            self._context.metrics.add("penstock_gateway_derived_stores_total", outcome="too-many")
            return
        self._upload(self.derived, record)

    def _upload(self, derived: DerivedResults, record: ResultRecord) -> asyncio.Task[Kept]:
        """Begin to store a result in the bucket of results, unless that has begun."""
        name = record.name
        found = self._uploads.get(name)
        if found is not None:
            return found
        blocks = self._context.blocks_for(record)
        upload = self._uploads[name] = asyncio.get_running_loop().create_task(derived.keep(record, blocks))
        upload.add_done_callback(lambda _: self._uploads.pop(name, None))
        return upload

    async def ensure_derived(self, record: ResultRecord) -> Kept:
        """Store a complete result in the bucket of results unless it is there, and return the outcome."""
        return Kept("failed") if self.derived is None else await self._upload(self.derived, record)

    async def wait_uploads(self) -> None:
        """Wait until the bucket of results has everything that was produced so far."""
        while self._uploads:
            await asyncio.wait(list(self._uploads.values()))

    def left(self, shared: SharedResult) -> None:
        """Decide what happens to a result that a reader has left: its run goes on without readers, or is cancelled."""
        if shared.is_wanted or not shared.is_busy or shared in self._alone:
            return
        self._alone = {other for other in self._alone if other.is_busy and not other.is_wanted}
        if shared.goes_on_alone and len(self._alone) < self.config.background_runs_max:
            self._alone.add(shared)
        else:
            shared.cancel()

    def remember_unkept(self, shared: SharedResult) -> None:
        """Remember a small result that could not be stored, for as long as its blocks are in memory."""
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
        """Cancel all runs, store complete results, and close the storage; idempotent."""
        self._closed = True
        while self._tasks:
            for shared in self._tasks.values():
                shared.cancel()
            await asyncio.wait(list(self._tasks))
        if not self._is_shut:
            self._is_shut = True
            await self.held.close()
            if self.derived is not None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.config.upload_drain_s_max):
                        await self.wait_uploads()
                await self.derived.close()
        self._unkept.clear()
        await self._context.close()
