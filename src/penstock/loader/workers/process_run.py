"""The run of an epoch in worker processes: the training process assigns rows, waits, and collects the filled rows.

A worker owns lanes. Which rows of a batch hold its samples follows from the order (``row_assignment.py``); it writes them
into a slot that all workers share, and the batch is complete when all of them have reported their rows. A slot is free again
when nothing refers to its batch any more; while the training loop holds all batches, another slot is created.

No thread listens to the workers: their messages wait in the sockets until the training loop asks for a batch. A thread
that woke up for each message would take the interpreter from the loop several times a step
(docs/development/measurements.md).
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import ClosedError, DataError, PenstockError
from penstock.fetch import process_budget
from penstock.loader.batches.building import declared_layout
from penstock.loader.batches.threads import SMALL_BATCHES_MAX, Delivery
from penstock.loader.workers.messages import (
    AddSlot,
    EndJob,
    FillRows,
    FindSamples,
    FirstSample,
    FixLayout,
    RowsDone,
    SamplesFound,
    UseSlot,
    WorkerFailed,
    WorkerJob,
)
from penstock.loader.workers.row_assignment import LaneProgress
from penstock.loader.workers.shared_memory import Anchors, Slots, unpacked
from penstock.samples.columns import Layout

if TYPE_CHECKING:
    import mmap
    from collections.abc import Mapping, Sequence

    from penstock.loader.options import BatchPlan
    from penstock.loader.statistics import Meter
    from penstock.loader.workers.messages import DroppedSample, LaneReport
    from penstock.loader.workers.process_pool import Worker, WorkerPool
    from penstock.loader.workers.row_assignment import Assignment, Division, RowAssigner
    from penstock.pipeline import Pipeline

_log = logging.getLogger("penstock.loader")

ALIVE_MS = 1000
"""Milliseconds to wait for messages before looking whether the workers are alive."""


def worker_jobs(
    division: Division,
    *,
    pipeline: Pipeline,
    batch_plan: BatchPlan,
    epoch: int,
    rebatches: bool,
    threads_count: int | None = None,
) -> list[WorkerJob]:
    """The job of each worker: its part of the lanes, an equal share of memory, and of threads if their number is not given."""
    count = len(division.inputs)
    plan = batch_plan._replace(
        transforms=(),  # a worker makes its own
        drop_last=False,
        threads_count=threads_count or max(1, batch_plan.threads_count // count),
        prefetch_batches=batch_plan.prefetch_batches + 1,
        prefetch_bytes=0,
    )
    return [
        WorkerJob(
            input=each,
            pipeline=pipeline,
            plan=plan,
            epoch=epoch,
            first_batch=0,
            number=number,
            workers_count=count,
            budget_bytes=process_budget().bytes_max // count,
            rebatches=rebatches,
        )
        for number, each in enumerate(division.inputs)
    ]


@dataclass(slots=True)
class PendingBatch:
    """A batch that workers are filling.

    Attributes:
        assignment: Assigns rows to workers.
        slot: Slot of the batch; None if it has no columns of arrays, or they are not known yet.
        results: Report of each worker on its rows, by number of the worker.
        error: Error that the batch raises in place of being handed out.
        last_node: Node of a cluster whose rows came last; "" without a cluster.
    """

    assignment: Assignment
    slot: int | None = None
    results: dict[int, RowsDone] = field(default_factory=dict)
    error: BaseException | None = None
    last_node: str = ""


class ProcessBackend:
    """The counterpart of ``ThreadBackend`` for worker processes. ``close()`` ends their jobs, at any time.

    Args:
        plan: The plan of the batches.
        assigner: Assigns the rows of the rank's batches.
        jobs: The job of each worker.
        pool: Gives the processes, and keeps them between epochs.
        restarts: Whether a worker that dies is replaced.
        meter: Counts bytes, seconds and samples.
        counts_samples: Whether the samples are counted when a batch is complete; not if it is rebatched.
    """

    def __init__(
        self,
        plan: BatchPlan,
        *,
        assigner: RowAssigner,
        jobs: Sequence[WorkerJob],
        pool: WorkerPool,
        restarts: bool,
        meter: Meter,
        counts_samples: bool = True,
    ) -> None:
        self.plan = plan
        self._assigner = assigner
        self._pool = pool
        self._restarts = restarts
        self._meter = meter
        self._counts_samples = counts_samples
        self._process_id = os.getpid()
        self._lock = threading.RLock()  # held by the thread that iterates, and by one that closes
        self._closing = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # wakes the thread that iterates
        self._layout = declared_layout(plan)
        self._first: Mapping[str, Any] | None = None
        self._slots: Slots | None = None
        self._pending: dict[int, PendingBatch] = {}
        self._assigned_count = 0
        self._given_count = 0
        self._failure: BaseException | None = None  # raised after all batches that have been assigned
        self._anchors = Anchors()
        self._closed = False
        self._workers: list[Worker] = []
        try:
            for job in jobs:
                self._workers.append(pool.take(job))
            self._go_on()
        except BaseException:
            self.close()
            raise

    def next_batch(self) -> Delivery | None:
        """The next batch; None at the end of the epoch. Blocks until it is complete.

        Raises:
            WorkerDiedError: A worker died.
            PenstockError: A worker failed; a note has its traceback.
            ClosedError: The run was closed, or this process inherited it through ``fork``.
        """
        self._check_process()
        with self._lock:
            index = self._given_count
            began_s = time.perf_counter()
            while not self._is_complete(index):
                if self._is_ended():
                    return None
                self._listen()
            spent_s = time.perf_counter() - began_s
            self._meter.wait_s += spent_s
            pending = self._pending[index]
            if pending.last_node:
                self._meter.on_node(pending.last_node, wait_s=spent_s)
            if pending.error is not None:
                raise pending.error
            del self._pending[index]
            self._given_count += 1
            values = self._values(pending)
            self._go_on()
            return self._delivery(pending, values)

    def has_next(self) -> bool:
        """Whether another batch or an error follows. Blocks until that is known, but not until the batch is complete.

        Raises:
            ClosedError: The run was closed, or this process inherited it through ``fork``.
        """
        self._check_process()
        with self._lock:
            while not self._pending and self._failure is None:
                self._check_open()
                if self._is_ended():
                    return False
                if any(worker.failure is not None for worker in self._workers):
                    return True  # no batch can be assigned any more, and `next_batch` raises the error
                self._listen()
        return True

    def close(self) -> None:
        """End the jobs, and wait for the workers; idempotent. Batches that were handed out stay valid."""
        if os.getpid() != self._process_id or (self._closed and not self._workers):
            return
        self._closed = True
        os.eventfd_write(self._closing, 1)
        self._pool.interrupt()
        with self._lock:
            if self._closing < 0:
                return
            workers, self._workers = self._workers, []
            done = [worker for worker in workers if self._has_done_job(worker)]
            for worker in done:
                worker.send(EndJob())
            for worker in workers:
                if worker in done and worker.wait_ended():
                    self._pool.give_back(worker)
                else:
                    worker.close()
            if self._slots is not None:
                self._slots.close()
            os.close(self._closing)
            self._closing = -1

    def _has_done_job(self, worker: Worker) -> bool:
        """Whether a worker has done all of its job, and can do another."""
        return self._is_ended() and worker.failure is None and worker.is_alive()

    # ── where the run is ───────────────────────────────────────────────────────────────────────────────────────────

    def _check_process(self) -> None:
        if os.getpid() != self._process_id:
            raise ClosedError("this loader's workers belong to the parent process", hint="make a Loader in the child")

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the loader was closed while it was being iterated")

    def _is_complete(self, index: int) -> bool:
        """Whether a batch can be handed out.

        Raises:
            PenstockError: The batch can never be handed out, because the run failed or was closed.
        """
        self._check_open()
        pending = self._pending.get(index)
        if pending is not None and len(pending.results) == len(self._workers):
            return True
        for worker in self._workers:
            if worker.failure is not None and worker.done_count <= index:
                raise worker.failure
        if pending is None and self._failure is not None:
            raise self._failure
        return False

    def _is_ended(self) -> bool:
        return self._assigner.is_ended and not self._pending

    # ── assigning ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _go_on(self) -> None:
        """Assign as many batches as may be under way, and ask the workers for the samples of the next ones."""
        while self._failure is None and self._assigned_count < self._given_count + self._ahead_count():
            try:
                assignment = self._assigner.next()
            except Exception as error:
                self._failure = error
                break
            if assignment is None:
                break
            pending = self._pending[self._assigned_count] = PendingBatch(assignment)
            self._take_slot(pending)
            for worker in self._workers:
                self._send_rows(worker, self._assigned_count, pending)
            self._assigned_count += 1
        for number, counts in self._assigner.wants().items():
            self._workers[number].send(FindSamples(counts))

    def _ahead_count(self) -> int:
        """Number of batches that may be under way or wait: more than asked for while they are small enough for the pool."""
        if self._slots is None:
            return self.plan.prefetch_batches + 1
        fitting = self._pool.ahead_bytes // self._slots.layout.size_bytes
        return max(self.plan.prefetch_batches, min(SMALL_BATCHES_MAX, fitting)) + 1

    def _take_slot(self, pending: PendingBatch) -> int | None:
        """Give a batch its slot, once the columns are known."""
        if self._layout is None:
            return None
        if self._slots is None:
            self._slots = Slots(self._layout, self.plan.batch_size, prefetch_count=self.plan.prefetch_batches)
            self._slots.enough_count += self._ahead_count() - self.plan.prefetch_batches - 1
        pending.slot = self._slots.take()
        self._meter.slots_count = self._slots.count
        return pending.slot

    def _take_late_slots(self) -> None:
        """Give slots to the batches that were assigned before the columns were known."""
        for index, pending in sorted(self._pending.items()):
            if pending.slot is None and len(pending.results) < len(self._workers):
                slot = self._take_slot(pending)
                for worker in self._workers:
                    if slot is not None and worker.number not in pending.results:
                        self._send_slot(worker, slot)
                        worker.send(UseSlot(index, slot))

    def _send_rows(self, worker: Worker, index: int, pending: PendingBatch) -> None:
        """Tell a worker which rows it fills, and where, if that is known."""
        if pending.slot is not None:
            self._send_slot(worker, pending.slot)
        worker.send(FillRows(index, pending.assignment.rows[worker.number].tobytes(), pending.slot))

    def _send_slot(self, worker: Worker, slot: int) -> None:
        assert self._slots is not None
        memory = self._slots.memory(slot)
        if worker.slots.get(slot) is not memory:
            worker.slots[slot] = memory
            worker.send(AddSlot(slot), memory=memory)

    # ── messages of workers ────────────────────────────────────────────────────────────────────────────────────────

    def _listen(self) -> None:
        """Wait for workers, and take one message from each that has sent something."""
        for worker in self._pool.misplaced(self._workers):
            self._restart(worker, has_died=False)
        poll = select.poll()
        poll.register(self._closing, select.POLLIN)
        senders = {worker.channel.fileno(): worker for worker in self._workers if worker.failure is None}
        for descriptor in senders:
            poll.register(descriptor, select.POLLIN)
        ready = poll.poll(ALIVE_MS)
        for descriptor, _ in ready:
            if descriptor in senders and not self._closed:
                self._receive(senders[descriptor])
        if not ready:  # a channel ends with its process, unless a child of that process holds the other end, too
            for worker in self._workers:
                if not worker.is_alive():
                    worker.channel.end()

    def _receive(self, worker: Worker) -> None:
        try:
            message, heap = worker.channel.receive()
        except (EOFError, OSError):
            self._note_death(worker)
            return
        except Exception as error:  # the message has arrived, but cannot be read
            worker.failure = error
            return
        try:
            self._note(worker, message, heap)
        except Exception as error:
            worker.failure = error

    def _note(self, worker: Worker, message: Any, heap: mmap.mmap | None) -> None:
        match message:
            case FirstSample(values):
                if self._first is None:
                    self._first = values
                    self._layout = Layout(values, self.plan.batch)
                worker.send(FixLayout(self._first))
                self._take_late_slots()
                self._go_on()
            case SamplesFound(lanes):
                self._assigner.note({number: _progress(worker, report) for number, report in lanes.items()})
                self._go_on()
            case RowsDone():
                self._note_rows(worker, message, heap)
            case WorkerFailed(error):
                worker.failure = worker.explained(error.revived(worker.described()))

    def _note_rows(self, worker: Worker, done: RowsDone, heap: mmap.mmap | None) -> None:
        worker.done_count = done.batch_index + 1
        worker.position = done.position if done.position is not None else worker.position
        worker.deaths_count = 0
        self._meter.add(done.sums, worker.sums)
        if worker.node:
            self._meter.on_node(worker.node, decode_s=done.sums["decode_s"] - worker.sums.get("decode_s", 0.0))
        worker.sums = done.sums
        pending = self._pending[done.batch_index]
        if heap is not None:
            assert pending.slot is not None
            worker.heaps[pending.slot] = heap
        pending.results[worker.number] = done
        pending.last_node = worker.node
        try:
            for sample in done.dropped_samples:
                self._count_dropped(worker, sample)
        except DataError as error:
            pending.error = pending.error or error

    def _count_dropped(self, worker: Worker, sample: DroppedSample) -> None:
        """Count a sample that a worker dropped.

        Raises:
            DataError: The stage may not drop another sample in this epoch.
        """
        tolerance = self.plan.transforms[sample.source].tolerance
        if sample.error is None:
            tolerance.count(sample.stage)
        else:
            error: Any = sample.error.revived(worker.described())
            tolerance.drop(error, sample.stage, sample.max_errors, sample.epoch)

    def _note_death(self, worker: Worker) -> None:
        """A worker's channel has ended: replace the worker, or raise an error where its rows are missing."""
        if self._closed:
            return
        death = worker.death()
        if not self._restarts or worker.deaths_count >= self._pool.deaths_max:
            death.hint = "did it run out of memory? Loader(restart_workers=True) replaces a worker that dies"
            if self._restarts:
                death.hint = (
                    f"{self._pool.deaths_max} replacements in a row died without finishing a batch: do they run out of "
                    "memory, or does a sample crash the decoder?"
                )
            worker.failure = death
            return
        _log.warning("%s; it is restarted at batch %d", death.what, worker.done_count)
        self._restart(worker, has_died=True)

    def _restart(self, worker: Worker, *, has_died: bool) -> None:
        """Have another process go on with the batches that a worker has not finished."""
        try:
            worker.restart(has_died=has_died)
        except PenstockError as error:
            worker.failure = error
            return
        if self._first is not None:
            worker.send(FixLayout(self._first))
        for index, pending in sorted(self._pending.items()):
            if worker.number not in pending.results:
                self._send_rows(worker, index, pending)
        self._assigner.forget_wants(worker.number)
        self._go_on()

    # ── a complete batch ───────────────────────────────────────────────────────────────────────────────────────────

    def _values(self, pending: PendingBatch) -> dict[str, Any]:
        """The columns. Arrays stay in the slot; values in heaps are copied before the slot can be given away."""
        size, arrays = self.plan.batch_size, {}
        if pending.slot is not None:
            assert self._slots is not None
            memory = self._slots.lease(pending.slot)
            arrays = self._slots.layout.arrays(memory)
        others = self._slots.layout.others if self._slots is not None else ()
        arrays.update(gather(pending, self._workers, size=size, lists=[*others, "__key__", "__shard__"]))
        self._anchors.keep(arrays.values())
        order = [*(self._layout.columns if self._layout is not None else ()), "__key__", "__shard__", "__position__"]
        return {name: arrays[name] for name in order if name in arrays}

    def _delivery(self, pending: PendingBatch, values: dict[str, Any]) -> Delivery | None:
        assignment, results = pending.assignment, pending.results
        if not assignment.rows_count:
            return None
        dropped = [int(rows[row]) for number, rows in enumerate(assignment.rows) for row in results[number].dropped]
        if self._counts_samples:
            self._meter.samples += assignment.rows_count - len(dropped)
        reported = {number: result.position for number, result in results.items()}
        position = self._assigner.position_of(assignment.position, reported)
        return Delivery(values, assignment.rows_count, sorted(dropped), position, self._layout)


def gather(pending: PendingBatch, workers: Sequence[Worker], *, size: int, lists: Sequence[str]) -> dict[str, Any]:
    """The columns of a batch that are lists, and its positions.

    Args:
        pending: A batch that all workers have filled.
        workers: The workers, whose heaps hold values of variable length.
        size: Number of rows of each column; rows that no worker fills hold None.
        lists: Names of the columns that are there in any case.
    """
    columns: dict[str, Any] = {name: [None] * size for name in lists}
    for worker in workers:
        done, own = pending.results[worker.number], pending.assignment.rows[worker.number].tolist()
        dropped = set(done.dropped)
        kept = [row for index, row in enumerate(own) if index not in dropped] if dropped else own
        memory = done.inline if done.inline is not None else worker.heaps[pending.slot or 0]
        for name, values in zip(done.names, unpacked(done.columns, memory), strict=True):
            _put_rows(columns.setdefault(name, [None] * size), kept, values)
        for name, labels in done.labels.items():
            _put_rows(columns[name], own, labels)
    positions = pending.assignment.positions
    if len(positions) < size:
        positions = np.concatenate([positions, np.zeros(size - len(positions), np.int64)])
    columns["__position__"] = positions
    return columns


def _put_rows(column: list[Any], rows: Sequence[int], values: Sequence[Any]) -> None:
    """Write values to rows of a list, which ascend and usually are equally far apart."""
    count = len(rows)
    if not count:
        return
    first, step = rows[0], rows[1] - rows[0] if count > 1 else 1
    if rows == list(range(first, first + step * count, step)):
        column[first : first + step * count : step] = values
        return
    for row, value in zip(rows, values, strict=True):
        column[row] = value


def _progress(worker: Worker, report: LaneReport) -> LaneProgress:
    error = None if report.error is None else report.error.revived(worker.described())
    return LaneProgress(report.samples_count, report.is_ended, error)
