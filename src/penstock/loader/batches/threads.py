"""The threads of one epoch: one reads and parses, others decode into rows; and the queue of batches between them and the loop.

::

    feed ── reader thread ── rows of open batches ── decode threads ── complete batches, in order ── training loop

The reader thread owns the order: it opens one batch after the other, gives each sample its row, and hands a few rows at a
time to the decode threads. Which thread fills a row, and when, does not change the batch. At most ``prefetch_batches``
batches wait between the reader and the training loop, besides the one that is being filled; of small batches, more may wait.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from penstock.errors import ClosedError
from penstock.fetch import process_budget
from penstock.loader.statistics import ThreadMeter
from penstock.memory.buffers import give_back_free_memory
from penstock.system.conditions import Condition

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.loader.options import BatchPlan
    from penstock.loader.position import Position
    from penstock.loader.statistics import Meter
    from penstock.samples.columns import Layout

SMALL_BATCHES_MAX = 15
"""Batches that may wait in place of ``prefetch_batches``, as long as they hold fewer than ``prefetch_bytes`` bytes."""

JOIN_S_MAX = 10.0  # a user's function that does not return must not hang close()


@dataclass(slots=True, eq=False, repr=False)
class OpenBatch:
    """A batch that is being filled.

    Attributes:
        values: Columns by name, each with as many rows as a full batch.
        layout: Layout that the columns were allocated by; None until a sample has fixed it, and for batches that need no
            finishing.
        rows: Number of rows that have been given to samples.
        missing: Number of rows that have been given to samples and have not been written.
        sealed: Whether no more rows will be given to samples.
        dropped: Rows whose sample was dropped.
        error: Error of the first row, in order, that failed.
        error_row: Row of `error`; -1 if no row failed.
        position: Position of the feed after this batch.
        number: Number of the batch of this backend, from 0.
        charged_bytes: Bytes of the process's budget that this batch occupies until it is handed out.
    """

    values: dict[str, Any]
    layout: Layout | None
    rows: int = 0
    missing: int = 0
    sealed: bool = False
    dropped: list[int] = field(default_factory=list)
    error: BaseException | None = None
    error_row: int = -1
    position: Position | None = None
    number: int = -1
    charged_bytes: int = 0

    def charge(self) -> None:
        """Take the bytes of the columns out of the process's budget; reading ahead uses the rest."""
        self.charged_bytes = sum(map(_column_bytes, self.values.values()))
        process_budget().reserve(self.charged_bytes, force=True)

    def discharge(self) -> None:
        """Give the bytes back to the budget, when the batch is handed out or discarded."""
        process_budget().release(self.charged_bytes)

    @property
    def is_complete(self) -> bool:
        """Whether every row has been written."""
        return self.sealed and not self.missing


class Delivery(NamedTuple):
    """A complete batch.

    Attributes:
        values: Columns by name, each with as many rows as a full batch; from row `rows` on they are undefined.
        rows: Number of rows that were given to samples.
        dropped: Rows whose sample was dropped, ascending.
        position: Position of the feed after this batch.
        layout: Layout that finishes the batch; None if the batch needs no finishing.
        number: Number of the batch of its backend, from 0.
    """

    values: dict[str, Any]
    rows: int
    dropped: list[int]
    position: Position | None
    layout: Layout | None
    number: int = -1

    @property
    def is_empty(self) -> bool:
        """Whether every sample was dropped."""
        return len(self.dropped) == self.rows


class BatchBuilder(Protocol):
    """Makes batches of samples, in the threads of an ``ThreadBackend``."""

    def build(self) -> None:
        """Make all batches, in the reader thread, until the samples end or the backend stops.

        Work for the decode threads goes to ``ThreadBackend.tasks``.
        """


class BatchInput(Protocol):
    """The source of a builder: a ``Feed``, or the blocks that worker processes give."""

    def close(self) -> None:
        """Cancel the reads in progress; idempotent. May be called from any thread."""


class ThreadBackend:
    """Runs the threads of one epoch for one rank. ``close()`` ends them, at any time.

    Args:
        plan: The plan of the batches.
        reads: Feed from which the builder reads; it is closed with the backend.
        builder: Makes the builder of this backend.
        meter: Counts samples, bytes and seconds.

    Attributes:
        plan: The plan of the batches.
        meter: Counts samples, bytes and seconds.
        stopping: Whether the backend is being closed; the builder then stops.
        tasks: Functions for the decode threads to call. They must not raise.
        changed: Guards all open batches, and is notified when one of them is complete.
    """

    def __init__(
        self, plan: BatchPlan, *, reads: BatchInput, builder: Callable[[ThreadBackend], BatchBuilder], meter: Meter
    ) -> None:
        self.plan = plan
        self._reads = reads
        self.meter = meter
        self.stopping = False
        self.tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.changed = Condition()
        self._process_id = os.getpid()
        self._batches: deque[OpenBatch] = deque()
        self._appended_count = 0
        self._finished = False
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._reader: ThreadMeter | None = None
        self._began_bytes = meter.bytes
        self._counted_bytes = meter.bytes  # bytes read when free memory was last given back
        self._parsed_s = meter.parse_s  # seconds of parsing when the reader's work was last counted
        try:
            self._builder = builder(self)
            for index in range(plan.threads_count):
                self._start(self._decode_loop, f"penstock-decode-{index}")
            # last: it takes the interpreter at once, and starting a thread waits until that thread has run
            self._start(self._read_loop, "penstock-read")
        except BaseException:
            self.close()
            raise

    def next_batch(self) -> Delivery | None:
        """The next batch, or None at the end of the epoch. Blocks until it is complete.

        Raises:
            StoreError, DataError: The next batch in order could not be made; raised again at each further call.
            ClosedError: The backend was closed, or this process inherited it through ``fork``.
        """
        self._check_process()
        with self.changed:
            while True:
                if self.stopping:
                    raise ClosedError("the loader was closed while it was iterated")
                head = self._ready()
                if head is not None:
                    if head.error is not None:
                        raise head.error
                    self._batches.remove(head)
                    head.discharge()
                    self.changed.notify_all()
                    self.meter.samples += head.rows - len(head.dropped)
                    return Delivery(
                        head.values, head.rows, sorted(head.dropped), head.position, head.layout, head.number
                    )
                if not self._batches and self._finished:
                    if self._failure is not None:
                        raise self._failure
                    return None
                self.changed.wait()

    def _ready(self) -> OpenBatch | None:
        """The batch to hand out now: the first one, or if the order does not matter, any that is complete."""
        first = self._batches[0] if self._batches else None
        if first is None or (first.is_complete and first.error is None):
            return first
        if not self.plan.in_order:
            for batch in self._batches:
                if batch.is_complete and batch.error is None:
                    return batch
        return first if first.is_complete else None

    def has_next(self) -> bool:
        """Whether another batch or an error follows. Blocks until that is known, but not until the batch is complete.

        Raises:
            ClosedError: The backend was closed, or this process inherited it through ``fork``.
        """
        self._check_process()
        with self.changed:
            while not self.stopping:
                if self._batches and (self._batches[0].sealed or not self.plan.drop_last):
                    return True
                if self._finished:
                    return bool(self._batches) or self._failure is not None
                self.changed.wait()
        raise ClosedError("the loader was closed while it was iterated")

    def close(self) -> None:
        """Stop reading, discard all batches, and wait for the threads; idempotent.

        A forked child does nothing: a thread of the parent may have held the lock at the fork, and threads, memory and
        requests are the parent's.
        """
        if os.getpid() != self._process_id:
            return
        with self.changed:
            self.stopping = True
            while self._batches:
                self._batches.pop().discharge()
            self.changed.notify_all()
        self._reads.close()
        for _ in self._threads:
            self.tasks.put(None)
        deadline_s = time.monotonic() + JOIN_S_MAX
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(0.0, deadline_s - time.monotonic()))
        read_bytes, self._counted_bytes = self.meter.bytes - self._counted_bytes, self.meter.bytes
        give_back_free_memory(read_bytes)

    # ── for the builder ────────────────────────────────────────────────────────────────────────────────────────────

    def append(self, batch: OpenBatch) -> None:
        """Put a batch at the end of the queue. Blocks until there is room."""
        began_s = time.perf_counter()
        with self.changed:
            while self._is_full() and not self.stopping:
                self.changed.wait()
            batch.number = self._appended_count
            self._appended_count += 1
            if not self.stopping:  # after close() nothing would discharge it
                batch.charge()
                self._batches.append(batch)
            # what the reader does not spend on parsing, it waits for the store and for room in the queue
            parsed_s, self._parsed_s = self.meter.parse_s - self._parsed_s, self.meter.parse_s
            if self._reader is not None:
                self._reader.worked(parsed_s)
            self.changed.notify_all()
        self.meter.wait_s += time.perf_counter() - began_s

    def _is_full(self) -> bool:
        waiting_count = len(self._batches)
        if waiting_count <= self.plan.prefetch_batches or waiting_count > SMALL_BATCHES_MAX:
            return waiting_count > self.plan.prefetch_batches
        read_bytes = (self.meter.bytes - self._began_bytes) / self._appended_count
        batch_bytes = max(read_bytes, self._batches[-1].charged_bytes)
        return (waiting_count + 1) * batch_bytes > self.plan.prefetch_bytes

    # ── threads ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _check_process(self) -> None:
        if os.getpid() != self._process_id:
            raise ClosedError("this loader's threads stayed in the parent process", hint="make a Loader in the child")

    def _start(self, target: Any, name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)  # first, so that close() ends it even if Ctrl-C interrupts start()
        thread.start()

    def _read_loop(self) -> None:
        failure: BaseException | None = None
        self._reader = ThreadMeter(self.meter)
        try:
            self._builder.build()
        except BaseException as error:
            failure = error
        self._reads.close()
        with self.changed:
            if self._batches and not self._batches[-1].sealed:
                self._batches.pop().discharge()  # cut off by the failure, or left out by drop_last
            self._failure = failure
            self._finished = True
            self.changed.notify_all()

    def _decode_loop(self) -> None:
        thread = ThreadMeter(self.meter)
        while (task := self.tasks.get()) is not None and not self.stopping:
            began_s = time.perf_counter()
            task()
            del task  # so that a waiting thread keeps no parts and no batches alive
            spent_s = time.perf_counter() - began_s
            with self.changed:
                self.meter.decode_s += spent_s
                thread.worked(spent_s)


def _column_bytes(column: Any) -> int:
    """Size in bytes of an array or of a list of ``bytes``. Other lists count as 0, because their values are small."""
    if isinstance(column, list):
        return sum(map(len, column)) if column and isinstance(column[0], bytes) else 0
    return int(getattr(column, "nbytes", 0))
