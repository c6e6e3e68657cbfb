"""A worker process: ``python -m penstock.loader.workers.worker DESCRIPTOR PARENT``. It fetches, parses and decodes some lanes.

It runs the same feed and the same decode threads as a loader does, over its lanes alone. The loader says which rows of a
batch are the next samples of these lanes, and in which slot; they are written there, and a message says that they are.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import queue
import signal
import socket
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.config import share_machine
from penstock.fetch import set_process_budget
from penstock.loader.batches.building import RawBatchBuilder, RowBatchBuilder, without_lost
from penstock.loader.batches.run import Delivery, EpochRun, OpenBatch
from penstock.loader.lanes.feed import LanesFeed
from penstock.loader.lanes.lane import Lane
from penstock.loader.plan.loader_plan import is_plain
from penstock.loader.statistics import cache_sums
from penstock.loader.workers.remote_rebatching import OUTPUTS, ListTransform
from penstock.loader.workers.shared import INLINE_BYTES_MAX, Heaps, packed, pickled
from penstock.loader.workers.slots import SlotLayout, mapped
from penstock.loader.workers.wire import MessageChannel
from penstock.loader.workers.worker_job import RemoteError, WorkerJob
from penstock.samples.columns import Layout
from penstock.samples.tolerance import Tolerance
from penstock.samples.transform import SampleTransform

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from penstock.errors import DataError
    from penstock.loader.lanes.feed import Feed, SampleBlock
    from penstock.loader.position import Position
PR_SET_PDEATHSIG = 1

NICENESS = 10
"""Added to a worker's. One that a message wakes takes the core of the training loop that sent it in one of three to five times;
at this priority in one of twenty-five
(docs/development/experiments.md). A loop that waits for a batch leaves its core to the workers."""


class ForwardingTolerance(Tolerance):
    """Leaves it to the loader to count dropped samples, as it knows what all its workers dropped."""

    def __init__(self, source: int, events: deque[tuple[Any, ...]]) -> None:
        super().__init__()
        self._source = source
        self._events = events

    def drop(self, error: DataError, stage: str, max_errors: int, epoch: int) -> None:
        """See ``Tolerance``: what one worker drops is bounded here, the rest by the loader."""
        super().drop(error, stage, max_errors, epoch)
        self._events.append((self._source, RemoteError.of(error), stage, max_errors, epoch))

    def count(self, stage: str) -> None:
        """See ``Tolerance``."""
        self._events.append((self._source, None, stage, 0, 0))


class _Rows:
    """Some rows of a column, in any pattern: as an array of them, to be written by row."""

    __slots__ = ("_column", "_rows")

    def __init__(self, column: NDArray[Any], rows: list[int]) -> None:
        self._column = column
        self._rows = rows

    def __getitem__(self, row: int) -> Any:
        return self._column[self._rows[row]]

    def __setitem__(self, row: int, value: Any) -> None:
        self._column[self._rows[row]] = value


class SharedBatchBuilder(RowBatchBuilder):
    """``RowBatchBuilder`` whose columns are some rows of a shared batch.

    Args:
        run: That this fills.
        told: What to do.
        inbox: What the loader says meanwhile.
        send: Says that a batch is done. Called here where nobody decodes: to hand such a batch to another thread takes
            longer than to make it.
    """

    def __init__(
        self, run: EpochRun, feed: Feed, *, told: WorkerJob, inbox: Inbox, send: Callable[[Delivery], None]
    ) -> None:
        super().__init__(run, feed, epoch=told.epoch)
        self._send = send
        self._told = told
        self._inbox = inbox
        self._members = RawBatchBuilder(run, feed) if is_plain(told.pipeline) else None
        self._batch_index = -1
        self._rows: list[int] = []
        self._slots: SlotLayout | None = None

    def _next_size(self) -> int:
        """See ``RowBatchBuilder``. Batches in which this worker has no row are reported empty."""
        while (order := self._inbox.orders.get())[0] != "end":
            if order[0] == "want":
                self._tell(order[1])
                continue
            self._batch_index = order[1]
            self._rows = np.frombuffer(order[2], np.int64).tolist()
            if self._rows:
                return len(self._rows)
            empty = OpenBatch({}, None)
            empty.sealed = True
            empty.mark = self._feed.mark()
            self._queue(empty)
            self._sealed(empty)
        return 0

    def _queue(self, batch: OpenBatch) -> None:
        """See ``RowBatchBuilder``."""
        if self._members is None:
            self._run.append(batch)

    def _sealed(self, batch: OpenBatch) -> None:
        """No more rows come to a batch."""
        if self._members is None:
            return
        run = self._run
        with run.changed:
            run.changed.wait_for(lambda: batch.is_complete or run.stopping)
        if batch.error is not None:
            raise batch.error
        self._send(Delivery(batch.values, batch.rows, sorted(batch.dropped), batch.mark, batch.layout))

    def _tell(self, wanted: Mapping[int, int]) -> None:
        """Say of lanes how many samples of the epoch are known to be there: so many, if they have them."""
        feed = self._feed
        assert isinstance(feed, LanesFeed)
        lanes = {lane.number: lane for lane in feed.lanes if isinstance(lane, Lane) and lane.number in wanted}
        failed: dict[int, BaseException] = {}
        # one part of each lane in turn, so that all lanes' requests are used at once
        while waiting := [lane for lane in lanes.values() if lane.is_waiting and lane.number not in failed]:
            for lane in waiting:
                try:
                    lane.read_more()
                except Exception as error:
                    failed[lane.number] = error
        known = {}
        for number, lane in lanes.items():
            failure = failed.get(number) or _unprepared(lane, wanted[number])
            count = lane.taken_count + lane.prepare(0)
            told = None if failure is None else RemoteError.of(failure)
            known[number] = (count, failure is None and count < wanted[number], told)
        self._inbox.wire.send(("have", known))

    def _layout_of(self, values: Mapping[str, Any]) -> Layout:
        """All workers' columns are those of one sample: the first that the loader hears of."""
        for name, value in values.items():
            if not isinstance(value, int | float | bool) and not hasattr(value, "__array__"):
                packed(name, [value])  # refused here, where it need not be pickled
        self._inbox.wire.send(("first", dict(values)))
        return Layout(self._inbox.wait_layout(), self._run.plan.batch)

    def _hand_out(
        self, batch: OpenBatch, block: SampleBlock, known: Mapping[int, Mapping[str, Any] | None], *, seal: bool
    ) -> None:
        """See ``RowBatchBuilder``. Members as they are stored are put into columns by the block."""
        layout = self._layout  # None as long as every sample was dropped
        has_arrays = layout is None or any(column.dtype is not None for column in layout.columns.values())
        if self._members is None or has_arrays or without_lost(block) is not block:
            super()._hand_out(batch, block, known, seal=seal)
        else:
            first_row, count = batch.rows, len(block.samples)
            for name, column in self._members.columns(block).items():
                batch.values[name][first_row : first_row + count] = column
            batch.rows += count
            batch.sealed = seal
        if seal:
            self._sealed(batch)

    def _allocated(self, size: int) -> dict[str, Any]:
        if self._layout is None:
            return {}
        if self._slots is None:
            self._slots = SlotLayout(self._layout, self._run.plan.batch_size)
        arrays = self._slots.arrays(self._inbox.wait_slot(self._batch_index))
        rows, step = self._rows, self._rows[1] - self._rows[0] if len(self._rows) > 1 else 1
        values: dict[str, Any]
        if rows == list(range(rows[0], rows[0] + step * len(rows), step)):
            values = {name: array[rows[0] :: step][:size] for name, array in arrays.items()}
        else:
            values = {name: _Rows(array, rows) for name, array in arrays.items()}
        for name in self._slots.others:
            values[name] = [None] * size
        return values


def _unprepared(lane: Lane, total: int) -> BaseException | None:
    """Have samples of a lane ready, `total` since the epoch began; what was in the way."""
    try:
        lane.prepare(1)  # after this it knows how many left before it was entered
        lane.prepare(total - lane.taken_count)
    except Exception as error:
        return error
    return None


class Inbox:
    """What the loader says, kept by a thread that receives; it ends the process when the loader is gone."""

    def __init__(self, wire: MessageChannel) -> None:
        self.wire = wire
        self.jobs: queue.SimpleQueue[WorkerJob | BaseException] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._forget()
        threading.Thread(target=self._receive, name="penstock-inbox", daemon=True).start()

    def _forget(self) -> None:
        """Begin a job."""
        self.orders: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.slots: dict[int, int] = {}  # by batch
        self._layout: Mapping[str, Any] | None = None
        self._memories: dict[int, Any] = {}

    def wait_layout(self) -> Mapping[str, Any]:
        """The values that fix all columns."""
        with self._changed:
            self._changed.wait_for(lambda: self._layout is not None)
            assert self._layout is not None
            return self._layout

    def wait_slot(self, batch_index: int) -> Any:
        """The memory of a batch, once it has some."""
        with self._changed:
            self._changed.wait_for(lambda: batch_index in self.slots)
            return self._memories[self.slots[batch_index]]

    def _receive(self) -> None:
        try:
            while True:
                message, descriptor = self.wire.receive()
                if isinstance(message, WorkerJob):
                    self._forget()
                    self.jobs.put(message)
                    continue
                kind, *rest = message
                if kind == "rows" and rest[2] is not None:
                    with self._changed:
                        self.slots[rest[0]] = rest[2]
                if kind in ("rows", "want", "end"):
                    self.orders.put(message)
                    continue
                with self._changed:
                    if kind == "layout":
                        self._layout = rest[0]
                    elif kind == "slot":
                        assert descriptor is not None
                        self._memories[rest[0]] = mapped(descriptor, rest[1])
                    else:
                        self.slots[rest[0]] = rest[1]
                    self._changed.notify_all()
        except (EOFError, OSError):
            os._exit(0)  # the loader closed, or its process ended; nothing here outlives it
        except BaseException as error:  # a module that the pipeline's functions need is not there
            self.jobs.put(error)


def main(descriptor: int, parent: int) -> None:
    """Do job after job, epoch after epoch, until the loader is gone or one fails."""
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the loader decides
    if parent:  # of a main thread: the kernel minds the thread that started this process
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return
    os.set_inheritable(descriptor, False)
    wire = MessageChannel(socket.socket(fileno=descriptor))
    inbox = Inbox(wire)
    try:
        while True:
            told = inbox.jobs.get()
            if isinstance(told, BaseException):
                raise told
            work(told, inbox)
            del told
            wire.send(("ended",))
    except BaseException as error:
        try:
            wire.send(("error", RemoteError.of(error)))
        except OSError:
            os._exit(0)  # nobody is left to be told
    threading.Event().wait()  # until the loader says that it needs nothing more, by closing


def work(told: WorkerJob, inbox: Inbox) -> None:
    """Fill this worker's rows of every batch, and say when each is done."""
    set_process_budget(told.budget_bytes)
    share_machine(told.workers_count)
    begun = told.meter.sums()  # what the loader counted before
    stores = {id(shard.store): shard.store for source in told.job.sources for shard in source.shards}.values()
    cached = cache_sums(stores)
    dropped: deque[tuple[Any, ...]] = deque()
    transforms: list[Any] = []
    for source, leaf in enumerate(told.pipeline.flat().leaves):
        transform = SampleTransform(leaf)
        transform.tolerance = ForwardingTolerance(source, dropped)
        transforms.append(ListTransform(transform) if told.carries else transform)
    heaps = Heaps()
    numbers = itertools.count(told.first_batch)

    def send(delivery: Delivery) -> None:
        events = [dropped.popleft() for _ in range(len(dropped))]
        sums = {name: value - begun[name] for name, value in told.meter.sums().items()}
        sums |= {name: value - cached[name] for name, value in cache_sums(stores).items()}
        position = delivery.mark if not told.global_size else None
        _send_done(inbox, heaps, next(numbers), delivery, position, (sums, events))

    feed = told.feed()
    run = EpochRun(
        told.plan._replace(transforms=tuple(transforms)),
        reads=feed,
        builder=lambda run: SharedBatchBuilder(run, feed, told=told, inbox=inbox, send=send),
        meter=told.meter,
    )
    while (delivery := run.next_batch()) is not None:
        send(delivery)
    run.close()


def _send_done(
    inbox: Inbox, heaps: Heaps, index: int, delivery: Delivery, position: Position | None, counted: tuple[Any, ...]
) -> None:
    """Say that a batch's rows are written; what are no arrays goes with it."""
    dropped = set(delivery.dropped)
    kept = [row for row in range(delivery.rows) if row not in dropped]
    names, columns, buffers = [], [], []
    lists = {name: column for name, column in delivery.values.items() if isinstance(column, list)}
    about = {name: lists.pop(name) for name in ("__key__", "__shard__") if name in lists}
    for name, column in lists.items():
        if kept:
            values = [column[row] for row in kept] if dropped else column[: delivery.rows]
            found, parts = pickled(values) if name == OUTPUTS else packed(name, values)
            names.append(name)
            columns.append(found)
            buffers += parts
    size_bytes = sum(column.size_bytes for column in columns)
    inline = b"".join(bytes(part) for part in buffers) if size_bytes <= INLINE_BYTES_MAX else None
    slot = inbox.slots.pop(index, -1)
    heap = heaps.write(slot, buffers, size_bytes) if inline is None else None
    message = ("done", index, about, (names, columns, inline), delivery.dropped, position, counted, heap and heap[1])
    inbox.wire.send(message, descriptor=heap[0] if heap is not None else None)
    if heap is not None:
        os.close(heap[0])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
