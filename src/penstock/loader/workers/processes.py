"""Batches filled by worker processes: the training process deals rows, waits, and does nothing else.

A worker owns lanes. Which rows of a batch are its samples follows from the order (``row_assignment.py``); it writes them into a
slot that all workers share, and a batch is complete when all have said so. A slot comes back when nothing refers to its
batch any more; while the training loop holds them all, one more is made.

No thread listens to the workers: what they say waits in their sockets until the training loop asks for a batch. A thread
that woke up for each message took the interpreter from a loop that holds it, several times a step
(docs/development/experiments.md).
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from typing import TYPE_CHECKING, Any

from penstock.errors import ClosedError, DataError, WorkerDiedError
from penstock.loader.batches.building import declared_layout
from penstock.loader.batches.run import Delivery
from penstock.loader.workers.children import EXIT_S_MAX
from penstock.loader.workers.gathering import PendingBatch, WorkerResult, gathered
from penstock.loader.workers.row_assignment import LaneProgress
from penstock.loader.workers.shared import Anchors
from penstock.loader.workers.slots import Slots
from penstock.samples.columns import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.loader.batches.run import RunPlan
    from penstock.loader.position import FeedPosition
    from penstock.loader.statistics import Meter
    from penstock.loader.workers.children import ProcessPool, WorkerProcess
    from penstock.loader.workers.row_assignment import RowAssigner
    from penstock.loader.workers.worker_job import RemoteError, WorkerJob

_log = logging.getLogger("penstock.loader")

ALIVE_MS = 1000
"""Of waiting in vain, after which workers are looked for."""

DEATHS_MAX = 3
"""Of processes in one worker's place without a batch done: one that dies again and again will not stop doing so."""


class ProcessRun:
    """As ``EpochRun``, by processes.

    Args:
        plan: See ``RunPlan``.
        assigner: Of the rank's batches.
        told: What each worker is to do.
        workers: Where they come from, and wait between epochs.
        restarts: Whether a worker that dies is replaced.
        meter: Told of bytes and seconds, and of samples.
        counts: Whether its samples are those that are handed out, to be counted.
    """

    def __init__(
        self,
        plan: RunPlan,
        *,
        assigner: RowAssigner,
        told: Sequence[WorkerJob],
        workers: ProcessPool,
        restarts: bool,
        meter: Meter,
        counts: bool = True,
    ) -> None:
        self.plan = plan
        self._assigner = assigner
        self._pool = workers
        self._restarts = restarts
        self._meter = meter
        self._counts = counts
        self._process_id = os.getpid()
        self._lock = threading.RLock()  # of who iterates, and of who closes, who may be another
        self._closing = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # wakes who iterates
        self._layout = declared_layout(plan)
        self._first: Mapping[str, Any] | None = None
        self._slots: Slots | None = None
        self._pending: dict[int, PendingBatch] = {}
        self._assigned_count = 0
        self._given_count = 0
        self._failure: BaseException | None = None  # behind all that was dealt
        self._anchors = Anchors()
        self._closed = False
        self._workers: list[WorkerProcess] = []
        self._ended: set[int] = set()
        try:
            for each in told:
                self._workers.append(workers.take(each))
            self._go_on()
        except BaseException:
            self.close()
            raise

    def next_batch(self) -> Delivery | None:
        """As ``EpochRun.next_batch``.

        Raises:
            WorkerDiedError: a worker died.
            PenstockError: what failed in one, with its traceback as a note.
        """
        self._check_process()
        with self._lock:
            index = self._given_count
            began_s = time.perf_counter()
            while not self._is_complete(index):
                if self._is_ended():
                    return None
                self._listen()
            self._meter.wait_s += time.perf_counter() - began_s
            pending = self._pending[index]
            if pending.error is not None:
                raise pending.error
            del self._pending[index]
            self._given_count += 1
            values = self._values(pending)
            self._go_on()
            return self._delivered(pending, values)

    def has_next(self) -> bool:
        """As ``EpochRun.has_next``."""
        self._check_process()
        with self._lock:
            while not self._pending and self._failure is None:
                self._check_open()
                if self._is_ended():
                    return False
                self._listen()
        return True

    def close(self) -> None:
        """End the workers, and wait for them; idempotent. Batches handed out stay valid."""
        if os.getpid() != self._process_id or (self._closed and not self._workers):
            return
        self._closed = True
        os.eventfd_write(self._closing, 1)
        with self._lock:
            if self._closing < 0:
                return
            workers, self._workers = self._workers, []
            left = [worker for worker in workers if self._can_go_on(worker)]
            for worker in left:
                worker.send(("end",))
            for worker in workers:
                if worker in left and _says_ended(worker):
                    self._pool.give_back(worker)
                else:
                    worker.close()
            if self._slots is not None:
                self._slots.close()
            os.close(self._closing)
            self._closing = -1

    def _can_go_on(self, worker: WorkerProcess) -> bool:
        """Whether it did all of its job, and can do another."""
        return (
            self._assigner.is_ended and not self._pending and worker.failure is None and worker.process.poll() is None
        )

    # ── where it is ───────────────────────────────────────────────────────────────────────────────

    def _check_process(self) -> None:
        if os.getpid() != self._process_id:
            raise ClosedError("this loader's workers are the parent process's", hint="make a Loader in the child")

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the loader was closed while it was iterated")

    def _is_complete(self, index: int) -> bool:
        """Whether a batch can be handed out.

        Raises:
            PenstockError: what keeps it from ever being.
        """
        self._check_open()
        pending = self._pending.get(index)
        if pending is not None and len(pending.parts) == len(self._workers):
            return True
        for worker in self._workers:
            if worker.failure is not None and worker.done_count <= index:
                raise worker.failure
        if pending is None and self._failure is not None:
            raise self._failure
        return False

    def _is_ended(self) -> bool:
        return self._assigner.is_ended and not self._pending

    # ── dealing ───────────────────────────────────────────────────────────────────────────────────

    def _go_on(self) -> None:
        """Assign as many batches as may be under way, and ask workers for what the next ones need."""
        while self._failure is None and self._assigned_count < self._given_count + self.plan.prefetch_batches + 1:
            try:
                assignment = self._assigner.next()
            except Exception as error:
                self._failure = error
                break
            if assignment is None:
                break
            pending = self._pending[self._assigned_count] = PendingBatch(assignment)
            self._give_slot(pending)
            for worker in self._workers:
                self._send_rows(worker, self._assigned_count, pending)
            self._assigned_count += 1
        for number, wanted in self._assigner.wants().items():
            self._workers[number].send(("want", wanted))

    def _give_slot(self, pending: PendingBatch) -> int | None:
        """Memory for a batch, once the columns are known."""
        if self._layout is None:
            return None
        if self._slots is None:
            self._slots = Slots(self._layout, self.plan.batch_size, prefetch_count=self.plan.prefetch_batches)
        pending.slot = self._slots.take()
        self._meter.slots_count = self._slots.count
        return pending.slot

    def _give_late_slots(self) -> None:
        """Memory for the batches that were dealt before the columns were known."""
        for index, pending in sorted(self._pending.items()):
            if pending.slot is None and len(pending.parts) < len(self._workers):
                slot = self._give_slot(pending)
                for worker in self._workers:
                    if slot is not None and worker.number not in pending.parts:
                        self._send_slot(worker, slot)
                        worker.send(("fill", index, slot))

    def _send_rows(self, worker: WorkerProcess, index: int, pending: PendingBatch) -> None:
        """Say which rows are a worker's, and where, as far as that is known."""
        if pending.slot is not None:
            self._send_slot(worker, pending.slot)
        rows = pending.assignment.rows[worker.number].tobytes()  # an array takes longer to pickle
        worker.send(("rows", index, rows, pending.slot))

    def _send_slot(self, worker: WorkerProcess, slot: int) -> None:
        assert self._slots is not None
        if slot not in worker.slots:
            worker.slots.add(slot)
            worker.send(("slot", slot, self._slots.size_bytes), descriptor=self._slots.descriptor(slot))

    # ── what workers say ──────────────────────────────────────────────────────────────────────────────

    def _listen(self) -> None:
        """Wait for workers, and hear one message of each that has something to say."""
        poll = select.poll()
        poll.register(self._closing, select.POLLIN)
        said = {worker.wire.fileno(): worker for worker in self._workers if worker.failure is None}
        for descriptor in said:
            poll.register(descriptor, select.POLLIN)
        ready = poll.poll(ALIVE_MS)
        for descriptor, _ in ready:
            if descriptor in said and not self._closed:
                self._hear(said[descriptor])
        if not ready:  # a wire ends with its process, but for one whose children hold the other end, too
            for worker in self._workers:
                if not worker.is_alive():
                    worker.wire.end()

    def _hear(self, worker: WorkerProcess) -> None:
        try:
            message, descriptor = worker.wire.receive()
        except (EOFError, OSError):
            self._died(worker)
            return
        try:
            self._heard(worker, message, descriptor)
        except Exception as error:
            worker.failure = error

    def _heard(self, worker: WorkerProcess, message: tuple[Any, ...], descriptor: int | None) -> None:
        kind, *rest = message
        if kind == "first":
            if self._first is None:
                self._first = rest[0]
                self._layout = Layout(rest[0], self.plan.batch)
            worker.send(("layout", self._first))
            self._give_late_slots()
            self._go_on()
        elif kind == "have":
            self._assigner.heard({number: self._known(worker, *each) for number, each in rest[0].items()})
            self._go_on()
        elif kind == "done":
            self._done(worker, *rest, descriptor=descriptor)
        else:
            worker.failure = rest[0].revived(worker.described())

    def _known(self, worker: WorkerProcess, count: int, is_ended: bool, error: RemoteError | None) -> LaneProgress:
        return LaneProgress(count, is_ended, None if error is None else error.revived(worker.described()))

    def _done(
        self,
        worker: WorkerProcess,
        index: int,
        about: Mapping[str, list[str]],
        packed: Any,
        dropped: list[int],
        position: FeedPosition | None,
        counted: tuple[Any, ...],
        heap_bytes: int | None,
        *,
        descriptor: int | None,
    ) -> None:
        sums, events = counted
        worker.done_count = index + 1
        worker.position = position if position is not None else worker.position
        worker.deaths_count = 0
        self._meter.add(sums, worker.sums)
        worker.sums = sums
        pending = self._pending[index]
        if descriptor is not None and heap_bytes is not None:
            assert pending.slot is not None
            worker.add_heap(pending.slot, descriptor, heap_bytes)
        pending.parts[worker.number] = WorkerResult(about, packed, dropped, position)
        try:
            for source, error, stage, max_errors, epoch in events:
                tolerance = self.plan.transforms[source].tolerance
                if error is None:
                    tolerance.count(stage)
                else:
                    tolerance.drop(error.revived(worker.described()), stage, max_errors, epoch)
        except DataError as error:
            pending.error = pending.error or error

    def _died(self, worker: WorkerProcess) -> None:
        """A worker's wire ended: so did the worker, or it is replaced."""
        if self._closed:
            return
        said = worker.described_end()
        if not self._restarts or worker.deaths_count >= DEATHS_MAX:
            worker.failure = WorkerDiedError(
                said,
                hint="was it out of memory? Loader(restart_workers=True) starts another in its place",
                worker=worker.number,
                process_id=worker.process.pid,
                exit_code=worker.process.returncode,
            )
            return
        _log.warning("%s; it is restarted at batch %d", said, worker.done_count)
        worker.restart()
        if self._first is not None:
            worker.send(("layout", self._first))
        for index, pending in sorted(self._pending.items()):
            if worker.number not in pending.parts:
                self._send_rows(worker, index, pending)
        self._assigner.forget_asked(worker.number)
        self._go_on()

    # ── a complete batch ───────────────────────────────────────────────────────────────────────────────────────────

    def _values(self, pending: PendingBatch) -> dict[str, Any]:
        """The columns. What lies in a slot stays there; it is not given away while this reads heaps of it."""
        size, arrays = self.plan.batch_size, {}
        if pending.slot is not None:
            assert self._slots is not None
            memory = self._slots.lease(pending.slot)
            arrays = self._slots.arrays(memory)
        others = self._slots.others if self._slots is not None else ()
        arrays.update(gathered(pending, self._workers, size=size, lists=[*others, "__key__", "__shard__"]))
        self._anchors.keep(arrays.values())
        order = [*(self._layout.columns if self._layout is not None else ()), "__key__", "__shard__", "__position__"]
        return {name: arrays[name] for name in order if name in arrays}

    def _delivered(self, pending: PendingBatch, values: dict[str, Any]) -> Delivery | None:
        assignment = pending.assignment
        if not assignment.rows_count:
            return None
        dropped = [
            int(rows[row]) for number, rows in enumerate(assignment.rows) for row in pending.parts[number].dropped
        ]
        if self._counts:
            self._meter.samples += assignment.rows_count - len(dropped)
        mark = self._assigner.position_of(
            assignment.mark, {number: part.position for number, part in pending.parts.items()}
        )
        return Delivery(values, assignment.rows_count, sorted(dropped), mark, self._layout)


def _says_ended(worker: WorkerProcess) -> bool:
    """Whether a worker that was told to end its job did, soon."""
    poll = select.poll()
    poll.register(worker.wire.fileno(), select.POLLIN)
    try:
        while poll.poll(EXIT_S_MAX * 1000):
            if worker.wire.receive()[0][0] == "ended":
                return True
    except (EOFError, OSError):
        return False
    return False
