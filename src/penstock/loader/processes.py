"""Batches filled by worker processes: the training process waits, and does nothing else.

Every worker writes its rows of each batch into one shared slot; a batch is complete when all have said so. A slot comes
back when nothing refers to its batch any more; while the training loop holds them all, one more is made.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.buffers import lease
from penstock.config import default_budget_bytes
from penstock.errors import ClosedError, ConfigError, PenstockError
from penstock.loader.columns import Layout
from penstock.loader.filling import said_layout
from penstock.loader.run import Delivery
from penstock.loader.slots import SlotPlan, made
from penstock.loader.statistics import Meter
from penstock.loader.worker import WorkerJob
from penstock.loader.workers import EXIT_S_MAX, Worker

if TYPE_CHECKING:
    import mmap
    from collections.abc import Mapping

    from penstock.loader.indexed import IndexedJob
    from penstock.loader.run import RunPlan
    from penstock.order import Batches
    from penstock.pipeline import Pipeline

_log = logging.getLogger("penstock.loader")

RESTARTS_MAX = 3
"""Of one worker in one epoch: one that dies again and again will not stop doing so."""


class _Pending:
    """A batch on its way."""

    __slots__ = ("dropped", "lists", "missing", "slot")

    def __init__(self, workers_count: int) -> None:
        self.slot: int | None = None
        self.missing = workers_count
        self.lists: dict[int, Mapping[str, list[Any]]] = {}
        self.dropped: dict[int, list[int]] = {}


class ProcessRun:
    """As ``EpochRun``, by processes.

    Args:
        plan: See ``RunPlan``; its threads are divided among the workers.
        pipeline: What to do with samples.
        job: The rank's order, and how to read.
        batches: The rank's.
        epoch: Number.
        processes_count: Workers.
        restarts: Whether a worker that dies is replaced.
        meter: Told of samples, bytes and seconds.
    """

    def __init__(
        self,
        plan: RunPlan,
        *,
        pipeline: Pipeline,
        job: IndexedJob,
        batches: Batches,
        epoch: int,
        processes_count: int,
        restarts: bool,
        meter: Meter,
    ) -> None:
        self.plan = plan
        self._batches = batches
        self._restarts = restarts
        self._meter = meter
        self._process_id = os.getpid()
        self._changed = threading.Condition()
        self._layout = said_layout(plan)
        self._first: Mapping[str, Any] | None = None
        self._slot_plan: SlotPlan | None = None
        self._slots: dict[int, tuple[int, mmap.mmap]] = {}
        self._slots_free: list[int] = []
        self._returned: list[int] = []  # appended to by leases that end, in any thread
        self._pending: dict[int, _Pending] = {}
        self._asked_count = 0  # batches that have a slot
        self._given_count = 0
        self._closed = False
        self._workers: list[Worker] = []
        self._threads: list[threading.Thread] = []
        count = usable_count(job, processes_count)
        threads = max(1, plan.threads_count // count)
        try:
            for number in range(count):
                rank = job.order.rank + job.order.world_size * number
                told = WorkerJob(
                    job=job.divided(rank, job.order.world_size * count).with_meter(Meter()),
                    pipeline=pipeline,
                    plan=plan._replace(steps=(), threads_count=threads, prefetch_batches=plan.prefetch_batches + 1),
                    batches=batches,
                    epoch=epoch,
                    first_batch=0,
                    stride=count,
                    rank=rank,
                    budget_bytes=default_budget_bytes() // count,
                    meter=Meter(),
                )
                self._workers.append(Worker(number, told))
            for worker in self._workers:
                thread = threading.Thread(
                    target=self._listen, args=(worker,), name=f"penstock-read-worker-{worker.number}", daemon=True
                )
                thread.start()
                self._threads.append(thread)
            with self._changed:
                self._ask()
        except BaseException:
            self.close()
            raise

    def next_batch(self) -> Delivery | None:
        """As ``EpochRun.next_batch``.

        Raises:
            PenstockError: a worker died, or what failed in one, with its traceback as a note.
        """
        if os.getpid() != self._process_id:
            raise ClosedError("this loader's workers are the parent process's", hint="make a Loader in the child")
        with self._changed:
            index = self._given_count
            if index >= len(self._batches):
                return None
            began_s = time.perf_counter()
            while True:
                if self._closed:
                    raise ClosedError("the loader was closed while it was iterated")
                pending = self._pending.get(index)
                if pending is not None and not pending.missing:
                    break
                for worker in self._workers:
                    if worker.failure is not None and worker.done_count <= index:
                        raise worker.failure
                self._changed.wait()
            self._meter.wait_s += time.perf_counter() - began_s
            del self._pending[index]
            self._given_count += 1
            self._ask()
        return self._delivered(index, pending)

    def has_next(self) -> bool:
        """As ``EpochRun.has_next``."""
        return self._given_count < len(self._batches)

    def close(self) -> None:
        """End the workers, and wait for them; idempotent. Batches handed out stay valid."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for worker in self._workers:
            worker.wire.close()
        for worker in self._workers:
            worker.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(EXIT_S_MAX)
        slots, self._slots = self._slots, {}
        for descriptor, _ in slots.values():
            os.close(descriptor)

    # ── slots (under the lock) ─────────────────────────────────────────────────────────────────────────────────────

    def _ask(self) -> None:
        """Give slots to as many of the next batches as may be under way."""
        if self._layout is None:
            return
        if self._slot_plan is None:
            self._slot_plan = SlotPlan(self._layout, self.plan.batch_size)
        stop = min(self._given_count + self.plan.prefetch_batches + 1, len(self._batches))
        while self._asked_count < stop:
            slot = self._free_slot()
            self._pending_of(self._asked_count).slot = slot
            for worker in self._workers:
                self._send_fill(worker, self._asked_count, slot)
            self._asked_count += 1

    def _pending_of(self, index: int) -> _Pending:
        """A batch on its way; without a slot where a worker had no row of it, and was done before it had one."""
        pending = self._pending.get(index)
        if pending is None:
            pending = self._pending[index] = _Pending(len(self._workers))
        return pending

    def _free_slot(self) -> int:
        while self._returned:
            self._slots_free.append(self._returned.pop())
        if self._slots_free:
            return self._slots_free.pop()
        assert self._slot_plan is not None
        slot = len(self._slots)
        self._slots[slot] = made(self._slot_plan.size_bytes)
        self._meter.slots_count = len(self._slots)
        if slot == 2 * (self.plan.prefetch_batches + 2):
            _log.warning(
                "the training loop holds %d batches: more shared memory is made for it, %d bytes each",
                slot - self.plan.prefetch_batches - 1,
                self._slot_plan.size_bytes,
            )
        return slot

    def _send_fill(self, worker: Worker, index: int, slot: int) -> None:
        if worker.done_count > index:
            return
        try:
            if slot not in worker.slots:
                assert self._slot_plan is not None
                worker.wire.send(("slot", slot, self._slot_plan.size_bytes), descriptor=self._slots[slot][0])
                worker.slots.add(slot)
            worker.wire.send(("fill", index, slot))
        except OSError:
            return  # it died: who listens to it knows what to do

    # ── workers' threads ───────────────────────────────────────────────────────────────────────────────────────────

    def _listen(self, worker: Worker) -> None:
        while True:
            try:
                message, _ = worker.wire.receive()
            except (EOFError, OSError):
                if not self._died(worker):
                    return
                continue
            with self._changed:
                self._heard(worker, message)
                self._changed.notify_all()

    def _heard(self, worker: Worker, message: tuple[Any, ...]) -> None:
        kind, *rest = message
        if kind == "first":
            if self._first is None:
                self._first = rest[0]
                self._layout = Layout(rest[0], self.plan.batch)
            try:
                worker.wire.send(("layout", self._first))
            except OSError:
                return
            self._ask()
        elif kind == "done":
            index, lists, dropped, sums = rest
            worker.done_count = index + 1
            self._meter.add(sums, worker.sums)
            worker.sums = sums
            pending = self._pending_of(index)
            pending.lists[worker.number] = lists
            pending.dropped[worker.number] = dropped
            pending.missing -= 1
        else:
            error, trace = rest
            error.add_note(f"in worker process {worker.number} (pid {worker.process.pid}):\n{trace}")
            worker.failure = error

    def _died(self, worker: Worker) -> bool:
        """A worker's wire ended; whether another process listens there now."""
        with self._changed:
            if self._closed or worker.failure is not None:
                return False
            said = worker.described_end()
            if self._restarts and worker.restarts_count < RESTARTS_MAX:
                _log.warning("%s; it is restarted at batch %d", said, worker.done_count)
                worker.sums = {}
                worker.restart()
                for index, pending in sorted(self._pending.items()):
                    if pending.slot is not None:
                        self._send_fill(worker, index, pending.slot)
                return True
            worker.failure = PenstockError(
                said, hint="was it out of memory? Loader(restart_workers=True) starts another in its place"
            )
            self._changed.notify_all()
            return False

    # ── a complete batch ───────────────────────────────────────────────────────────────────────────────────────────

    def _delivered(self, index: int, pending: _Pending) -> Delivery | None:
        positions, valid_count = self._batches.batch(index)
        if not valid_count:
            if pending.slot is not None:
                self._returned.append(pending.slot)
            return None
        count = len(self._workers)
        first = int(positions[0])
        values: dict[str, Any] = {}
        dropped: list[int] = []
        begins = [self._first_row(worker, first, count) for worker in self._workers]
        if self._slot_plan is not None and pending.slot is not None:
            memory = lease(self._slots[pending.slot][1], self._home(pending.slot))
            values.update(self._slot_plan.arrays(memory))
        names = dict.fromkeys(name for lists in pending.lists.values() for name in lists)
        for name in names:
            column: list[Any] = [None] * self.plan.batch_size
            for begin, worker in zip(begins, self._workers, strict=True):
                part = pending.lists[worker.number].get(name, [])
                column[begin : begin + len(part) * count : count] = part
            values[name] = column
        for begin, worker in zip(begins, self._workers, strict=True):
            dropped += [begin + row * count for row in pending.dropped[worker.number]]
        values["__position__"] = np.zeros(self.plan.batch_size, np.int64)
        values["__position__"][: len(positions)] = positions
        order = [*(self._layout.columns if self._layout is not None else ()), "__key__", "__shard__", "__position__"]
        values = {name: values[name] for name in order if name in values}
        self._meter.samples += valid_count - len(dropped)
        self._meter.batches += 1
        return Delivery(values, valid_count, sorted(dropped), None, self._layout)

    def _first_row(self, worker: Worker, first: int, count: int) -> int:
        step = self._batches.world_size * count
        return (worker.told.rank - first) % step // self._batches.world_size

    def _home(self, slot: int) -> Any:
        """What runs when the last reference to a batch goes: in any thread, so it takes no lock."""
        returned = self._returned

        def home(owner: Any) -> None:
            del owner
            returned.append(slot)

        return home


def usable_count(job: IndexedJob, processes_count: int) -> int:
    """Workers among whom the rank's lanes can be divided evenly: at most as many as asked for."""
    lanes_count = job.order.lanes_count // job.order.world_size
    count = next(each for each in range(min(processes_count, lanes_count), 0, -1) if lanes_count % each == 0)
    if count < processes_count:
        _log.warning("%d of %d worker processes are used: a rank has %d lanes", count, processes_count, lanes_count)
    return count


def check_processes(*, carries: bool, is_indexed: bool) -> None:
    """Refuse what worker processes cannot do.

    Raises:
        ConfigError: no index, or stages that change how many samples there are.
    """
    if not is_indexed:
        raise ConfigError(
            "processes= needs an index: without one nobody knows which row of which batch a sample has",
            hint="run `penstock index`, or processes=0",
        )
    if carries:
        raise ConfigError("refill, flat_map and batch_by_size are not divided among processes", hint="processes=0")
