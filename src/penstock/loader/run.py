"""One epoch on its way: a thread that reads and cuts, threads that decode into rows, a queue of batches in order.

::

    lanes ── reader thread ── rows of open batches ── decode threads ── batches, complete, in order ── training loop

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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.config import MIB
from penstock.errors import ClosedError
from penstock.loader.columns import Layout
from penstock.loader.lanes import Item, Lane, LaneReader, Pins
from penstock.loader.samples import SampleRandom, Steps
from penstock.order import RoundRobin

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.loader.lanes import ReadAhead
    from penstock.loader.shards import Shard
    from penstock.loader.statistics import Meter
    from penstock.order import StreamOrder

TASK_ROWS_MAX = 32
TASK_BYTES_MAX = 4 * MIB  # a task pins the parts that its samples lie in
JOIN_S_MAX = 10.0  # a user's function that does not return must not hang close()


class _Row(NamedTuple):
    """A sample and its position; and its values, for the epoch's first, which is decoded ahead to fix the layout."""

    item: Item
    position: int
    values: Mapping[str, Any] | None


class _Batch:
    """A batch being filled. `missing` counts rows that are handed out and not yet written."""

    __slots__ = ("error", "error_row", "missing", "rows", "sealed", "values")

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.rows = 0
        self.missing = 0
        self.sealed = False
        self.error: BaseException | None = None
        self.error_row = -1


class _Task(NamedTuple):
    """Neighbouring rows of a batch, for one decode thread."""

    batch: _Batch
    first_row: int
    rows: list[_Row]


class RunPlan(NamedTuple):
    """What stays the same from epoch to epoch."""

    shards: Sequence[Shard]
    steps: Steps
    batch_size: int
    drop_last: bool
    threads_count: int
    prefetch_batches: int
    sizes: ReadAhead
    pinned_bytes_max: int


class EpochRun:
    """Executes one epoch for one rank. ``close()`` ends its threads, at any time.

    Args:
        plan: See ``RunPlan``.
        order: Of this epoch.
        meter: Told of samples, bytes and seconds.
    """

    def __init__(self, plan: RunPlan, *, order: StreamOrder, meter: Meter) -> None:
        self._plan = plan
        self._order = order
        self._meter = meter
        self._process_id = os.getpid()
        self._changed = threading.Condition()
        self._batches: deque[_Batch] = deque()
        self._layout: Layout | None = None
        self._finished = False
        self._failure: BaseException | None = None
        self._stopping = False
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        pins = Pins(plan.pinned_bytes_max)
        self._readers: list[LaneReader] = []
        self._lanes: dict[int, Lane] = {}
        self._threads: list[threading.Thread] = []
        try:
            for number in order.lanes_owned:
                shards = [plan.shards[index] for index in order.shards_of(number)]
                reader = LaneReader(shards, sizes=plan.sizes, meter=meter)
                self._readers.append(reader)
                self._lanes[number] = Lane(number, order=order, reader=reader, pins=pins)
            self._start(self._read_loop, "penstock-read")
            for index in range(plan.threads_count):
                self._start(self._decode_loop, f"penstock-decode-{index}")
        except BaseException:
            self.close()
            raise

    def next_batch(self) -> dict[str, Any] | None:
        """The next batch, or None at the end of the epoch. Blocks until it is complete.

        Raises:
            StoreError, DataError: where the order reaches what failed; again at each further call.
            ClosedError: closed, or inherited through ``fork``.
        """
        if os.getpid() != self._process_id:
            raise ClosedError("this loader's threads stayed in the parent process", hint="make a Loader in the child")
        with self._changed:
            while True:
                if self._stopping:
                    raise ClosedError("the loader was closed while it was iterated")
                head = self._batches[0] if self._batches else None
                if head is not None and head.sealed and not head.missing:
                    if head.error is not None:
                        raise head.error
                    self._batches.popleft()
                    self._changed.notify_all()
                    return self._delivered(head)
                if head is None and self._finished:
                    if self._failure is not None:
                        raise self._failure
                    return None
                self._changed.wait()

    def close(self) -> None:
        """Stop reading, drop what is under way, and wait for the threads; idempotent."""
        with self._changed:
            self._stopping = True
            self._batches.clear()
            self._changed.notify_all()
        self._close_readers()
        for _ in self._threads:
            self._tasks.put(None)
        deadline_s = time.monotonic() + JOIN_S_MAX
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline_s - time.monotonic()))

    def _close_readers(self) -> None:
        for reader in self._readers:
            reader.close()

    def _start(self, target: Any, name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _delivered(self, batch: _Batch) -> dict[str, Any]:
        self._meter.samples += batch.rows
        self._meter.batches += 1
        if batch.rows == self._plan.batch_size:
            return batch.values
        return {name: column[: batch.rows] for name, column in batch.values.items()}

    # ── the reader ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _read_loop(self) -> None:
        failure: BaseException | None = None
        try:
            self._fill_batches()
        except BaseException as error:
            failure = error
        self._close_readers()
        with self._changed:
            if self._batches and not self._batches[-1].sealed:
                self._batches.pop()  # cut off by the failure, or the rest that drop_last leaves out
            self._failure = failure
            self._finished = True
            self._changed.notify_all()

    def _fill_batches(self) -> None:
        size = self._plan.batch_size
        task_rows_max = min(TASK_ROWS_MAX, max(1, size // (2 * self._plan.threads_count)))
        batch: _Batch | None = None
        rows: list[_Row] = []
        rows_bytes = 0
        for item, position in self._in_order():
            values = None if self._layout is not None else self._fixed_layout(item, position)
            if batch is None:
                batch = self._open()
            rows.append(_Row(item, position, values))
            rows_bytes += item.size_bytes
            filled = batch.rows + len(rows) == size
            if filled or len(rows) == task_rows_max or rows_bytes > TASK_BYTES_MAX:
                self._hand_out(batch, rows, seal=filled)
                rows, rows_bytes = [], 0
                batch = None if filled else batch
            if self._stopping:
                return
        if batch is not None and not self._plan.drop_last:
            self._hand_out(batch, rows, seal=True)

    def _in_order(self) -> Iterator[tuple[Item, int]]:
        """This rank's samples with their positions: lanes in turn, each dropped once it is empty."""
        turns = RoundRobin(self._order.lanes_owned)
        while (number := turns.next_lane()) is not None:
            lane = self._lanes[number]
            item = lane.take()
            if item is None:
                turns.drop(number)
            else:
                yield item, self._order.position(number, lane.taken_count - 1)

    def _fixed_layout(self, item: Item, position: int) -> Mapping[str, Any]:
        """The values of the epoch's first sample, which fix dtypes and shapes."""
        random = SampleRandom(seed=self._order.seed, epoch=self._order.epoch)
        values = self._plan.steps(item.sample, shard=item.shard.url, position=position, random=random)
        self._layout = Layout(values)
        return values

    def _open(self) -> _Batch:
        """A new batch at the end of the queue, once there is room."""
        assert self._layout is not None
        values = self._layout.allocate(self._plan.batch_size)
        values["__key__"] = [None] * self._plan.batch_size
        values["__shard__"] = [None] * self._plan.batch_size
        values["__position__"] = np.empty(self._plan.batch_size, dtype=np.int64)
        batch = _Batch(values)
        began_s = time.perf_counter()
        with self._changed:
            while len(self._batches) > self._plan.prefetch_batches and not self._stopping:
                self._changed.wait()
            self._batches.append(batch)
        self._meter.wait_s += time.perf_counter() - began_s
        return batch

    def _hand_out(self, batch: _Batch, rows: list[_Row], *, seal: bool) -> None:
        with self._changed:
            first_row = batch.rows
            batch.rows += len(rows)
            batch.missing += len(rows)
            batch.sealed = seal
            if not batch.missing:
                self._changed.notify_all()
        if rows:
            self._tasks.put(_Task(batch, first_row, rows))

    # ── the decode threads ─────────────────────────────────────────────────────────────────────────────────────────

    def _decode_loop(self) -> None:
        random = SampleRandom(seed=self._order.seed, epoch=self._order.epoch)
        while (task := self._tasks.get()) is not None and not self._stopping:
            began_s = time.perf_counter()
            row = task.first_row
            error: BaseException | None = None
            each: _Row | None = None
            try:
                for row, each in enumerate(task.rows, task.first_row):
                    self._decode_row(task.batch.values, row, each, random)
            except BaseException as failure:
                error = failure
            each = None
            self._finish(task.batch, len(task.rows), time.perf_counter() - began_s, error=error, row=row)
            del task, error  # a thread that waits keeps no parts and no batches alive

    def _decode_row(self, batch: dict[str, Any], row: int, each: _Row, random: SampleRandom) -> None:
        assert self._layout is not None
        item, position, values = each
        key, shard = item.sample.key, item.shard.url
        if values is None:
            values = self._plan.steps(item.sample, shard=shard, position=position, random=random)
        self._layout.put(batch, row, values, key=key, shard=shard)
        batch["__key__"][row] = key
        batch["__shard__"][row] = shard
        batch["__position__"][row] = position

    def _finish(self, batch: _Batch, rows_count: int, seconds: float, *, error: BaseException | None, row: int) -> None:
        with self._changed:
            self._meter.decode_s += seconds
            batch.missing -= rows_count
            if error is not None and (batch.error is None or row < batch.error_row):
                batch.error, batch.error_row = error, row  # the first in order, whichever thread was first in time
            if batch.sealed and not batch.missing:
                self._changed.notify_all()
