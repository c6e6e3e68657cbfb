"""Batches filled by worker processes: the training process deals rows, waits, and does nothing else.

A worker owns lanes. Which rows of a batch are its samples follows from the order (``dealing.py``); it writes them into a
slot that all workers share, and a batch is complete when all have said so. A slot comes back when nothing refers to its
batch any more; while the training loop holds them all, one more is made.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import ClosedError, DataError, PenstockError
from penstock.loader.columns import Layout
from penstock.loader.dealing import Known
from penstock.loader.filling import said_layout
from penstock.loader.run import Delivery
from penstock.loader.shared import unpacked
from penstock.loader.slots import Slots
from penstock.loader.workers import EXIT_S_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.loader.dealing import Deal, Dealt
    from penstock.loader.run import RunPlan
    from penstock.loader.statistics import Meter
    from penstock.loader.told import ToldError, WorkerJob
    from penstock.loader.workers import Worker, Workers

_log = logging.getLogger("penstock.loader")

DEATHS_MAX = 3
"""Of processes in one worker's place without a batch done: one that dies again and again will not stop doing so."""


class _Part:
    """What one worker made of its rows, besides what is in the slot."""

    __slots__ = ("about", "cursor", "dropped", "packed")

    def __init__(self, about: Mapping[str, list[str]], packed: Any, dropped: list[int], cursor: Any) -> None:
        self.about = about
        self.packed = packed
        self.dropped = dropped
        self.cursor = cursor


class _Pending:
    """A batch on its way."""

    __slots__ = ("dealt", "error", "parts", "slot")

    def __init__(self, dealt: Dealt) -> None:
        self.dealt = dealt
        self.slot: int | None = None
        self.parts: dict[int, _Part] = {}
        self.error: BaseException | None = None


class ProcessRun:
    """As ``EpochRun``, by processes.

    Args:
        plan: See ``RunPlan``.
        deal: Of the rank's batches.
        told: What each worker is to do.
        workers: Where they come from, and wait between epochs.
        restarts: Whether a worker that dies is replaced.
        meter: Told of samples, bytes and seconds.
    """

    def __init__(
        self, plan: RunPlan, *, deal: Deal, told: Sequence[WorkerJob], workers: Workers, restarts: bool, meter: Meter
    ) -> None:
        self.plan = plan
        self._deal = deal
        self._pool = workers
        self._restarts = restarts
        self._meter = meter
        self._process_id = os.getpid()
        self._changed = threading.Condition()
        self._layout = said_layout(plan)
        self._first: Mapping[str, Any] | None = None
        self._slots: Slots | None = None
        self._pending: dict[int, _Pending] = {}
        self._dealt_count = 0
        self._given_count = 0
        self._failure: BaseException | None = None  # behind all that was dealt
        self._closed = False
        self._workers: list[Worker] = []
        self._ended: set[int] = set()
        self._threads: list[threading.Thread] = []
        try:
            for each in told:
                self._workers.append(workers.take(each))
            with self._changed:
                self._go_on()
            for worker in self._workers:
                name = f"penstock-read-worker-{worker.number}"
                thread = threading.Thread(target=self._listen, args=(worker,), name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.close()
            raise

    def next_batch(self) -> Delivery | None:
        """As ``EpochRun.next_batch``.

        Raises:
            PenstockError: a worker died, or what failed in one, with its traceback as a note.
        """
        self._check_process()
        with self._changed:
            index = self._given_count
            began_s = time.perf_counter()
            while not self._is_complete(index):
                if self._is_ended():
                    return None
                self._changed.wait()
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
        with self._changed:
            while not self._pending and self._failure is None:
                if self._is_ended():
                    return False
                self._changed.wait()
        return True

    def close(self) -> None:
        """End the workers, and wait for them; idempotent. Batches handed out stay valid."""
        if os.getpid() != self._process_id:
            return
        with self._changed:
            was_closed, self._closed = self._closed, True
            self._changed.notify_all()
            ends = [self._ends(worker) for worker in self._workers]
        for worker, goes_on in zip(self._workers, ends, strict=True):
            if goes_on:
                worker.send(("end",))
            elif not was_closed:
                worker.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(EXIT_S_MAX)
        for worker, goes_on in zip(self._workers, ends, strict=True):
            if goes_on and worker.number in self._ended:
                self._pool.give_back(worker)
            elif goes_on:
                worker.close()
        self._workers = []
        if self._slots is not None:
            self._slots.close()

    def _ends(self, worker: Worker) -> bool:
        """Whether it did all of its job, and can do another."""
        return self._deal.is_ended and not self._pending and worker.failure is None and worker.process.poll() is None

    # ── where it is (under the lock) ───────────────────────────────────────────────────────────────────────────────

    def _check_process(self) -> None:
        if os.getpid() != self._process_id:
            raise ClosedError("this loader's workers are the parent process's", hint="make a Loader in the child")

    def _is_complete(self, index: int) -> bool:
        """Whether a batch can be handed out.

        Raises:
            PenstockError: what keeps it from ever being.
        """
        if self._closed:
            raise ClosedError("the loader was closed while it was iterated")
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
        return self._deal.is_ended and not self._pending

    # ── dealing (under the lock) ───────────────────────────────────────────────────────────────────────────────────

    def _go_on(self) -> None:
        """Deal as many batches as may be under way, and ask for what the next ones need."""
        while self._failure is None and self._dealt_count < self._given_count + self.plan.prefetch_batches + 1:
            try:
                dealt = self._deal.next()
            except Exception as error:
                self._failure = error
                break
            if dealt is None:
                break
            pending = self._pending[self._dealt_count] = _Pending(dealt)
            self._give_slot(pending)
            for worker in self._workers:
                self._send_rows(worker, self._dealt_count, pending)
            self._dealt_count += 1
        for number, wanted in self._deal.wants().items():
            self._workers[number].send(("want", wanted))

    def _give_slot(self, pending: _Pending) -> int | None:
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

    def _send_rows(self, worker: Worker, index: int, pending: _Pending) -> None:
        """Say which rows are a worker's, and where, as far as that is known."""
        if pending.slot is not None:
            self._send_slot(worker, pending.slot)
        rows = pending.dealt.rows[worker.number].tobytes()  # an array takes longer to pickle
        worker.send(("rows", index, rows, pending.slot))

    def _send_slot(self, worker: Worker, slot: int) -> None:
        assert self._slots is not None
        if slot not in worker.slots:
            worker.slots.add(slot)
            worker.send(("slot", slot, self._slots.size_bytes), descriptor=self._slots.descriptor(slot))

    # ── workers' threads ───────────────────────────────────────────────────────────────────────────────────────────

    def _listen(self, worker: Worker) -> None:
        while True:
            try:
                message, descriptor = worker.wire.receive()
            except (EOFError, OSError):
                if not self._died(worker):
                    return
                continue
            if message[0] == "ended":
                self._ended.add(worker.number)
                return
            with self._changed:
                try:
                    self._heard(worker, message, descriptor)
                except Exception as error:
                    worker.failure = error
                self._changed.notify_all()

    def _heard(self, worker: Worker, message: tuple[Any, ...], descriptor: int | None) -> None:
        kind, *rest = message
        if kind == "first":
            if self._first is None:
                self._first = rest[0]
                self._layout = Layout(rest[0], self.plan.batch)
            worker.send(("layout", self._first))
            self._give_late_slots()
            self._go_on()
        elif kind == "have":
            self._deal.heard({number: self._known(worker, *each) for number, each in rest[0].items()})
            self._go_on()
        elif kind == "done":
            self._done(worker, *rest, descriptor=descriptor)
        else:
            worker.failure = rest[0].revived(worker.described())

    def _known(self, worker: Worker, count: int, is_ended: bool, error: ToldError | None) -> Known:
        return Known(count, is_ended, None if error is None else error.revived(worker.described()))

    def _done(
        self,
        worker: Worker,
        index: int,
        about: Mapping[str, list[str]],
        packed: Any,
        dropped: list[int],
        cursor: Any,
        counted: tuple[Any, ...],
        heap_bytes: int | None,
        *,
        descriptor: int | None,
    ) -> None:
        sums, events = counted
        worker.done_count = index + 1
        worker.cursor = cursor if cursor is not None else worker.cursor
        worker.deaths_count = 0
        self._meter.add(sums, worker.sums)
        worker.sums = sums
        pending = self._pending[index]
        if descriptor is not None and heap_bytes is not None:
            assert pending.slot is not None
            worker.add_heap(pending.slot, descriptor, heap_bytes)
        pending.parts[worker.number] = _Part(about, packed, dropped, cursor)
        try:
            for source, error, stage, errors_max, epoch in events:
                tolerance = self.plan.steps[source].tolerance
                if error is None:
                    tolerance.count(stage)
                else:
                    tolerance.drop(error.revived(worker.described()), stage, errors_max, epoch)
        except DataError as error:
            pending.error = pending.error or error

    def _died(self, worker: Worker) -> bool:
        """A worker's wire ended; whether another process listens there now."""
        with self._changed:
            if self._closed or worker.failure is not None:
                return False
            said = worker.described_end()
            if not self._restarts or worker.deaths_count >= DEATHS_MAX:
                worker.failure = PenstockError(
                    said, hint="was it out of memory? Loader(restart_workers=True) starts another in its place"
                )
                self._changed.notify_all()
                return False
            _log.warning("%s; it is restarted at batch %d", said, worker.done_count)
            worker.restart()
            if self._first is not None:
                worker.send(("layout", self._first))
            for index, pending in sorted(self._pending.items()):
                if worker.number not in pending.parts:
                    self._send_rows(worker, index, pending)
            self._deal.forget_asked(worker.number)
            self._go_on()
            return True

    # ── a complete batch ───────────────────────────────────────────────────────────────────────────────────────────

    def _values(self, pending: _Pending) -> dict[str, Any]:
        """The columns. What lies in a slot stays there; it is not given away while this reads heaps of it."""
        arrays: dict[str, Any] = {}
        if pending.slot is not None:
            assert self._slots is not None
            memory = self._slots.lease(pending.slot)
            arrays.update(self._slots.arrays(memory))
        size, rows = self.plan.batch_size, pending.dealt.rows
        for worker in self._workers:
            part, own = pending.parts[worker.number], rows[worker.number].tolist()
            dropped = set(part.dropped)
            kept = [row for index, row in enumerate(own) if index not in dropped] if dropped else own
            names, columns, inline = part.packed
            found = unpacked(columns, inline if inline is not None else worker.heaps[pending.slot or 0])
            for name, values in [*zip(names, found, strict=True), *part.about.items()]:
                column = arrays.setdefault(name, [None] * size)
                for row, value in zip(own if name in part.about else kept, values, strict=True):
                    column[row] = value
        for name in self._slots.others if self._slots is not None else ():
            arrays.setdefault(name, [None] * size)
        arrays["__position__"] = np.zeros(size, np.int64)
        arrays["__position__"][: len(pending.dealt.positions)] = pending.dealt.positions
        order = [*(self._layout.columns if self._layout is not None else ()), "__key__", "__shard__", "__position__"]
        return {name: arrays[name] for name in order if name in arrays}

    def _delivered(self, pending: _Pending, values: dict[str, Any]) -> Delivery | None:
        dealt = pending.dealt
        if not dealt.rows_count:
            return None
        dropped = [int(rows[row]) for number, rows in enumerate(dealt.rows) for row in pending.parts[number].dropped]
        self._meter.samples += dealt.rows_count - len(dropped)
        self._meter.batches += 1
        mark = self._deal.mark_of(dealt.mark, {number: part.cursor for number, part in pending.parts.items()})
        return Delivery(values, dealt.rows_count, sorted(dropped), mark, self._layout)
