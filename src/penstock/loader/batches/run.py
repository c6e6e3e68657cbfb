"""One epoch on its way: a thread that reads and cuts, threads that decode into rows, a queue of batches in order.

::

    feed ── reader thread ── rows of open batches ── decode threads ── batches, complete, in order ── training loop

The reader owns the order: it opens batch after batch, gives each sample its row, and hands rows to the decode threads
a few at a time. Which thread fills a row, and when, changes nothing in the batch. At most ``prefetch_batches`` lie
between the reader and the training loop, besides the one being filled.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from penstock.buffers import give_back_free_memory
from penstock.errors import ClosedError
from penstock.fetch import process_budget
from penstock.loader.statistics import ThreadMeter

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.loader.lanes.feed import Feed
    from penstock.loader.position import Position
    from penstock.loader.statistics import Meter
    from penstock.pipeline import Batch, BatchBySize
    from penstock.samples.columns import Layout
    from penstock.samples.transform import SampleTransform

SMALL_BATCHES_MAX = 15
JOIN_S_MAX = 10.0  # a user's function that does not return must not hang close()


class OpenBatch:
    """A batch being filled.

    Attributes:
        values: Columns by name, of the full size.
        layout: That they were allocated by; None where no sample has fixed it yet, or nothing is left to be done.
        rows: Given to samples so far.
        missing: Rows that are handed out and not yet written.
        sealed: Whether no more rows come.
        dropped: Rows whose sample was filtered out.
        error: What failed in the first row in order that did.
        error_row: That row.
        mark: Where the feed is behind this batch.
        number: In the run, from 0.
        charged_bytes: Taken out of the process's budget for it, until it is handed out.
    """

    __slots__ = (
        "charged_bytes",
        "dropped",
        "error",
        "error_row",
        "layout",
        "mark",
        "missing",
        "number",
        "rows",
        "sealed",
        "values",
    )

    def __init__(self, values: dict[str, Any], layout: Layout | None) -> None:
        self.values = values
        self.layout = layout
        self.rows = 0
        self.missing = 0
        self.sealed = False
        self.dropped: list[int] = []
        self.error: BaseException | None = None
        self.error_row = -1
        self.mark: Position | None = None
        self.number = -1
        self.charged_bytes = 0

    def charge(self) -> None:
        """Count its columns against the process's budget: reading ahead has what they leave."""
        self.charged_bytes = sum(map(_column_bytes, self.values.values()))
        process_budget().reserve(self.charged_bytes, force=True)

    def discharge(self) -> None:
        """It is somebody else's now, or nobody's."""
        process_budget().release(self.charged_bytes)

    @property
    def is_complete(self) -> bool:
        """Whether every row is written."""
        return self.sealed and not self.missing


class Delivery(NamedTuple):
    """A complete batch.

    Attributes:
        values: Columns by name, of the full size; those of `rows` on are undefined.
        rows: Samples that were given one.
        dropped: Those of them whose sample was filtered out.
        mark: Where the feed is behind it.
        layout: What finishes it; None: it is finished.
        number: In the run, from 0.
    """

    values: dict[str, Any]
    rows: int
    dropped: list[int]
    mark: Position | None
    layout: Layout | None
    number: int = -1

    @property
    def is_empty(self) -> bool:
        """Whether no sample of it was kept."""
        return len(self.dropped) == self.rows


class RunPlan(NamedTuple):
    """What stays the same from epoch to epoch."""

    transforms: tuple[SampleTransform, ...]  # by source
    batch: Batch | BatchBySize
    batch_size: int
    drop_last: bool
    threads_count: int
    prefetch_batches: int
    prefetch_bytes: int  # small batches wait in greater number, up to so many bytes in all
    seed: int
    in_order: bool = True


class BatchBuilder(Protocol):
    """How samples become batches."""

    def fill(self) -> None:
        """The reader thread: everything until the feed ends or the run stops."""

    def work(self, task: Any) -> None:
        """A decode thread: one task of those that ``fill`` handed out."""


class EpochRun:
    """Executes one epoch for one rank. ``close()`` ends its threads, at any time.

    Args:
        plan: See ``RunPlan``.
        feed: Of this epoch; closed with the run.
        builder: Makes the ``BatchBuilder`` of this run.
        meter: Told of samples, bytes and seconds.
    """

    def __init__(self, plan: RunPlan, *, feed: Feed, builder: Callable[[EpochRun], BatchBuilder], meter: Meter) -> None:
        self.plan = plan
        self.feed = feed
        self.meter = meter
        self.stopping = False
        self.tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.changed = threading.Condition()
        self._process_id = os.getpid()
        self._batches: deque[OpenBatch] = deque()
        self._appended_count = 0
        self._finished = False
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._reader: ThreadMeter | None = None
        self._began_bytes = meter.bytes
        self._counted_bytes = meter.bytes  # read, when memory was last given back, or was to be
        self._parsed_s = meter.parse_s  # when the reader's work was last counted
        try:
            self._builder = builder(self)
            for index in range(plan.threads_count):
                self._start(self._decode_loop, f"penstock-decode-{index}")
            # last: it holds the interpreter at once, and whoever starts a thread waits until that one ran
            self._start(self._read_loop, "penstock-read")
        except BaseException:
            self.close()
            raise

    def next_batch(self) -> Delivery | None:
        """The next batch, or None at the end of the epoch. Blocks until it is complete.

        Raises:
            StoreError, DataError: where the order reaches what failed; again at each further call.
            ClosedError: closed, or inherited through ``fork``.
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
                    return Delivery(head.values, head.rows, sorted(head.dropped), head.mark, head.layout, head.number)
                if not self._batches and self._finished:
                    if self._failure is not None:
                        raise self._failure
                    return None
                self.changed.wait()

    def _ready(self) -> OpenBatch | None:
        """The batch to be handed out now: the first, or where order does not matter, any that is complete."""
        first = self._batches[0] if self._batches else None
        if first is None or (first.is_complete and first.error is None):
            return first
        if not self.plan.in_order:
            for batch in self._batches:
                if batch.is_complete and batch.error is None:
                    return batch
        return first if first.is_complete else None

    def has_next(self) -> bool:
        """Whether one more batch, or an error, is to come. Blocks until that is known; does not wait for the batch."""
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
        """Stop reading, drop what is under way, and wait for the threads; idempotent."""
        with self.changed:
            self.stopping = True
            while self._batches:
                self._batches.pop().discharge()
            self.changed.notify_all()
        self.feed.close()
        for _ in self._threads:
            self.tasks.put(None)
        deadline_s = time.monotonic() + JOIN_S_MAX
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline_s - time.monotonic()))
        read_bytes, self._counted_bytes = self.meter.bytes - self._counted_bytes, self.meter.bytes
        give_back_free_memory(read_bytes)

    # ── for the builder ────────────────────────────────────────────────────────────────────────────────────────────

    def append(self, batch: OpenBatch) -> None:
        """Put a batch at the end of the queue, once there is room."""
        began_s = time.perf_counter()
        with self.changed:
            while self._is_full() and not self.stopping:
                self.changed.wait()
            batch.number = self._appended_count
            self._appended_count += 1
            if not self.stopping:  # nobody would discharge it
                batch.charge()
                self._batches.append(batch)
            self._count_reader()
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
        thread.start()
        self._threads.append(thread)

    def _count_reader(self) -> None:
        """What the reader ran, and waited while it cut shards; its other waiting is for the store and for room."""
        before_s, self._parsed_s = self._parsed_s, self.meter.parse_s
        if self._reader is not None:
            self._reader.worked(self._parsed_s - before_s)

    def _read_loop(self) -> None:
        failure: BaseException | None = None
        self._reader = ThreadMeter(self.meter)
        try:
            self._builder.fill()
        except BaseException as error:
            failure = error
        self.feed.close()
        with self.changed:
            if self._batches and not self._batches[-1].sealed:
                self._batches.pop().discharge()  # cut off by the failure, or the rest that drop_last leaves out
            self._failure = failure
            self._finished = True
            self.changed.notify_all()

    def _decode_loop(self) -> None:
        thread = ThreadMeter(self.meter)
        while (task := self.tasks.get()) is not None and not self.stopping:
            began_s = time.perf_counter()
            self._builder.work(task)
            del task  # a thread that waits keeps no parts and no batches alive
            spent_s = time.perf_counter() - began_s
            with self.changed:
                self.meter.decode_s += spent_s
                thread.worked(spent_s)


def _column_bytes(column: Any) -> int:
    """Of an array, or of a list of buffers; what else lists hold is small."""
    if isinstance(column, list):
        return sum(map(len, column)) if column and isinstance(column[0], bytes) else 0
    return int(getattr(column, "nbytes", 0))
