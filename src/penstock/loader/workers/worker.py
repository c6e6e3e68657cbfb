"""A worker process: ``python -m penstock.loader.workers.worker DESCRIPTOR PARENT``. It fetches, parses and decodes some lanes.

It runs the same feed and the same decode threads as a loader does, over its own lanes. The loader tells it which rows of a
batch are the next samples of these lanes, and in which slot; the worker writes the rows there, and reports them. If its loader
is on another machine, it makes the rows in memory of its own, and sends them with the report.
"""

from __future__ import annotations

import itertools
import os
import queue
import signal
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.config import share_machine
from penstock.fetch import set_process_budget
from penstock.loader.batches.building import RawBatchBuilder, RowBatchBuilder, without_lost
from penstock.loader.batches.threads import Delivery, OpenBatch, ThreadBackend
from penstock.loader.lanes.feed import LanesFeed
from penstock.loader.lanes.lane import Lane
from penstock.loader.statistics import store_sums
from penstock.loader.workers.messages import (
    AddSlot,
    DroppedSample,
    EndJob,
    FillRows,
    FindSamples,
    FirstSample,
    FixLayout,
    JobEnded,
    JobTaken,
    LaneReport,
    MessageChannel,
    RemoteError,
    RowsDone,
    SamplesFound,
    UseSlot,
    WorkerFailed,
    WorkerJob,
)
from penstock.loader.workers.remote_rebatching import OUTPUTS, ListTransform
from penstock.loader.workers.shared_memory import INLINE_BYTES_MAX, Heaps, SlotLayout, packed, pickled
from penstock.processes.starting import connect_to_parent
from penstock.samples.columns import Layout
from penstock.samples.transform import SampleTransform, Tolerance, is_plain

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from penstock.errors import DataError
    from penstock.loader.lanes.feed import Feed, SampleBlock

NICENESS = 10
"""Added to the niceness of a worker. A worker that a message wakes takes the core of the training loop that sent the message
in one of three to five times; at this priority, in one of twenty-five (docs/development/measurements.md). A loop that waits
for a batch leaves its core to the workers."""


class ForwardingTolerance(Tolerance):
    """Forwards dropped samples to the loader, which counts them over all its workers.

    Args:
        source: Number of the source in a mix.
        dropped: Receives the samples to forward.
    """

    def __init__(self, source: int, dropped: deque[DroppedSample]) -> None:
        super().__init__()
        self._source = source
        self._dropped = dropped

    def drop(self, error: DataError, stage: str, max_errors: int, epoch: int) -> None:
        """Drop a sample for an error, if this worker may still drop one; the loader bounds all workers together."""
        super().drop(error, stage, max_errors, epoch)
        self._dropped.append(DroppedSample(self._source, stage, RemoteError.of(error), max_errors, epoch))

    def count(self, stage: str) -> None:
        """Drop a sample for no error."""
        self._dropped.append(DroppedSample(self._source, stage, None, 0, 0))


class _Rows:
    """Some rows of a column, in any pattern, for reading and writing by index."""

    __slots__ = ("_column", "_rows")

    def __init__(self, column: NDArray[Any], rows: list[int]) -> None:
        self._column = column
        self._rows = rows

    def __getitem__(self, row: int) -> Any:
        return self._column[self._rows[row]]

    def __setitem__(self, row: int, value: Any) -> None:
        self._column[self._rows[row]] = value


class SharedBatchBuilder(RowBatchBuilder):
    """Builds batches whose columns are some rows of a batch in shared memory.

    Args:
        run: Run whose batches this builder makes.
        feed: Samples of the worker's lanes.
        job: The job of the worker.
        inbox: Messages of the loader.
        send: Tells the loader that a batch is done. It is called here, in the reader thread, for batches that need no
            decoding: handing such a batch to another thread takes longer than making it.
    """

    def __init__(
        self, run: ThreadBackend, feed: Feed, *, job: WorkerJob, inbox: Inbox, send: Callable[[Delivery], None]
    ) -> None:
        super().__init__(run, feed, epoch=job.epoch)
        self._send = send
        self._inbox = inbox
        self._members = RawBatchBuilder(run, feed) if is_plain(job.pipeline) else None
        self._batch_index = -1
        self._rows: list[int] = []
        self._slots: SlotLayout | None = None

    def _next_size(self) -> int:
        """Number of this worker's rows in the next batch. Batches in which it has none are reported empty."""
        while not isinstance(order := self._inbox.orders.get(), EndJob):
            if isinstance(order, FindSamples):
                self._find_samples(order.counts)
                continue
            self._batch_index = order.batch_index
            self._rows = np.frombuffer(order.rows, np.int64).tolist()
            if self._rows:
                return len(self._rows)
            empty = OpenBatch({}, None)
            empty.sealed = True
            empty.position = self._feed.position()
            self._queue(empty)
            self._note_sealed(empty)
        return 0

    def _queue(self, batch: OpenBatch) -> None:
        """Append a new batch to the queue of the run, unless ``send`` is called for it here."""
        if self._members is None:
            self._backend.append(batch)

    def _note_sealed(self, batch: OpenBatch) -> None:
        """No more rows of a batch will be given to samples: wait for the last of them, and send the batch."""
        if self._members is None:
            return
        run = self._backend
        with run.changed:
            run.changed.wait_for(lambda: batch.is_complete or run.stopping)
        if batch.error is not None:
            raise batch.error
        self._send(Delivery(batch.values, batch.rows, sorted(batch.dropped), batch.position, batch.layout))

    @property
    def parts(self) -> dict[str, tuple[int, int]]:
        """Where the rows of each column of arrays belong in a slot, if they are sent; by name."""
        return {} if self._slots is None or self._inbox.channel.shares_memory else self._slots.parts

    def _find_samples(self, counts: Mapping[int, int]) -> None:
        """Read until the lanes have the wanted number of samples of the epoch, or have ended, and report the found samples."""
        feed = self._feed
        assert isinstance(feed, LanesFeed)
        lanes = {lane.number: lane for lane in feed.lanes if isinstance(lane, Lane) and lane.number in counts}
        failed: dict[int, BaseException] = {}
        # one part of each lane in turn, so that all lanes' requests are used at once
        while waiting := [lane for lane in lanes.values() if lane.is_waiting and lane.number not in failed]:
            for lane in waiting:
                try:
                    lane.read_more()
                except Exception as error:
                    failed[lane.number] = error
        reports = {}
        for number, lane in lanes.items():
            failure = failed.get(number) or _prepare(lane, counts[number])
            count = lane.taken_count + lane.prepare(0)
            is_ended = failure is None and count < counts[number]
            reports[number] = LaneReport(count, is_ended, None if failure is None else RemoteError.of(failure))
        self._inbox.channel.send(SamplesFound(reports))

    def _layout_of(self, values: Mapping[str, Any]) -> Layout:
        """The layout of all workers, which is fixed by the first sample that the loader receives."""
        for name, value in values.items():
            if not isinstance(value, int | float | bool) and not hasattr(value, "__array__"):
                packed(name, [value])  # raises for a value that cannot cross, before it would have to be pickled
        self._inbox.channel.send(FirstSample(dict(values)))
        return Layout(self._inbox.wait_layout(), self._backend.plan.batch)

    def _hand_out(
        self, batch: OpenBatch, block: SampleBlock, known: Mapping[int, Mapping[str, Any] | None], *, seal: bool
    ) -> None:
        """Give the samples of a block their rows. Members as they are stored are put into columns by the block."""
        layout = self._layout  # None as long as every sample has been dropped
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
            self._note_sealed(batch)

    def _allocated(self, size: int) -> dict[str, Any]:
        if self._layout is None:
            return {}
        if self._slots is None:
            self._slots = SlotLayout(self._layout, self._backend.plan.batch_size)
        if not self._inbox.channel.shares_memory:
            columns = self._layout.allocate(size)
            return {**columns, **{name: [None] * size for name in self._slots.others}}
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


def _prepare(lane: Lane, total: int) -> BaseException | None:
    """Prepare `total` samples of a lane, counted from the beginning of the epoch. Returns the error, if it fails."""
    try:
        lane.prepare(1)  # after this the lane knows how many samples left it before it was entered
        lane.prepare(total - lane.taken_count)
    except Exception as error:
        return error
    return None


class Inbox:
    """Keeps the messages of the loader. Its thread receives them, and ends the process when the loader is gone.

    The loader is told of a message that cannot be read; whoever waits for what it said waits until the loader closes.

    Args:
        channel: Connection to the loader.

    Attributes:
        jobs: Jobs to do.
        orders: ``FillRows``, ``FindSamples`` and ``EndJob``, in the order in which they came.
        slots: Slot of each batch, by number of the batch.
    """

    def __init__(self, channel: MessageChannel) -> None:
        self.channel = channel
        self.jobs: queue.SimpleQueue[WorkerJob] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._forget()
        threading.Thread(target=self._receive, name="penstock-inbox", daemon=True).start()

    def _forget(self) -> None:
        """Forget the messages of the job before."""
        self.orders: queue.SimpleQueue[FillRows | FindSamples | EndJob] = queue.SimpleQueue()
        self.slots: dict[int, int] = {}
        self._layout: Mapping[str, Any] | None = None
        self._memories: dict[int, Any] = {}

    def wait_layout(self) -> Mapping[str, Any]:
        """The values that fix all columns. Blocks until the loader has sent them."""
        with self._changed:
            self._changed.wait_for(lambda: self._layout is not None)
            assert self._layout is not None
            return self._layout

    def wait_slot(self, batch_index: int) -> Any:
        """The memory of a batch. Blocks until the loader has sent its slot."""
        with self._changed:
            self._changed.wait_for(lambda: batch_index in self.slots)
            return self._memories[self.slots[batch_index]]

    def _receive(self) -> None:
        while True:
            try:
                message, memory = self.channel.receive()
                if isinstance(message, WorkerJob):
                    self._forget()
                    self.jobs.put(message)
                    continue
                with self._changed:
                    self._note(message, memory)
                    self._changed.notify_all()
            except (EOFError, OSError):
                os._exit(0)  # the loader has closed, or its process has ended; nothing here outlives it
            except BaseException as error:  # e.g. a module that the pipeline's functions need is missing
                report_failure(self.channel, error)

    def _note(self, message: Any, memory: mmap.mmap | None) -> None:
        match message:
            case FixLayout(values):
                self._layout = values
            case AddSlot(slot):
                self._memories[slot] = memory
            case UseSlot(batch_index, slot):
                self.slots[batch_index] = slot
            case FillRows(batch_index, _, slot):
                if slot is not None:
                    self.slots[batch_index] = slot
                self.orders.put(message)
            case FindSamples() | EndJob():
                self.orders.put(message)


def main(descriptor: str, parent: str) -> None:
    """Do job after job until the loader is gone or a job fails; the arguments are those of ``connect_to_parent``."""
    os.nice(NICENESS)
    channel = MessageChannel(connect_to_parent(descriptor, parent, ignored=(signal.SIGINT,)))
    inbox = Inbox(channel)
    try:
        while True:
            job = inbox.jobs.get()
            if not channel.shares_memory:
                channel.send(JobTaken())
            work(job, inbox)
            del job
            channel.send(JobEnded())
    except BaseException as error:
        report_failure(channel, error)
    threading.Event().wait()  # until the loader closes the channel, because it needs nothing more


def report_failure(channel: MessageChannel, error: BaseException) -> None:
    """Tell the loader that this worker cannot go on. The process ends if the loader is gone."""
    try:
        channel.send(WorkerFailed(RemoteError.of(error)))
    except OSError:
        os._exit(0)


def work(job: WorkerJob, inbox: Inbox) -> None:
    """Fill this worker's rows of every batch, and tell the loader when each batch is done."""
    set_process_budget(job.budget_bytes)
    share_machine(job.workers_count)
    meter = job.meter
    counted_before = meter.sums()  # the loader's counts before
    stores = {
        id(shard.store): shard.store for source in job.input.read_plan.sources for shard in source.shards
    }.values()
    stored_before = store_sums(stores)
    dropped: deque[DroppedSample] = deque()
    transforms: list[Any] = []
    for source, leaf in enumerate(job.pipeline.flat().leaves):
        transform = SampleTransform(leaf)
        transform.tolerance = ForwardingTolerance(source, dropped)
        transforms.append(ListTransform(transform) if job.rebatches else transform)
    heaps = Heaps()
    numbers = itertools.count(job.first_batch)

    def send(delivery: Delivery) -> None:
        sums = {name: value - counted_before[name] for name, value in meter.sums().items()}
        sums |= {name: value - stored_before[name] for name, value in store_sums(stores).items()}
        sums["unreachable_s"] /= job.workers_count  # all workers wait at the same time
        index = next(numbers)
        labels, names, columns, buffers = _packed_columns(delivery)
        size_bytes = sum(column.size_bytes for column in columns)
        inline = b"".join(bytes(part) for part in buffers) if size_bytes <= INLINE_BYTES_MAX else None
        slot = inbox.slots.pop(index, -1)
        is_shared = inbox.channel.shares_memory
        heap = heaps.write(slot, buffers, size_bytes) if inline is None and is_shared else None
        sent = {name: part for name, part in builder.parts.items() if name in delivery.values}
        data = [delivery.values[name].reshape(-1).view(np.uint8) for name in sent]
        done = RowsDone(
            batch_index=index,
            labels=labels,
            names=names,
            columns=columns,
            inline=inline,
            dropped=delivery.dropped,
            position=job.input.report(delivery.position),
            sums=sums,
            dropped_samples=[dropped.popleft() for _ in range(len(dropped))],
            parts=list(sent.values()),
        )
        if inline is None and not is_shared:
            data += buffers
        inbox.channel.send(done, memory=heap, data=data)
        if heap is not None:
            os.close(heap.descriptor)

    feed = job.open()
    builder: SharedBatchBuilder

    def begin(run: ThreadBackend) -> SharedBatchBuilder:
        nonlocal builder
        builder = SharedBatchBuilder(run, feed, job=job, inbox=inbox, send=send)
        return builder

    run = ThreadBackend(job.plan._replace(transforms=tuple(transforms)), reads=feed, builder=begin, meter=meter)
    while (delivery := run.next_batch()) is not None:
        send(delivery)
    run.close()


def _packed_columns(delivery: Delivery) -> tuple[dict[str, Any], list[str], list[Any], list[Any]]:
    """Values sent beside the slot: keys and shards of all rows; names, descriptions and buffers of the columns of lists."""
    dropped = set(delivery.dropped)
    kept = [row for row in range(delivery.rows) if row not in dropped]
    names, columns, buffers = [], [], []
    lists = {name: column for name, column in delivery.values.items() if isinstance(column, list)}
    labels: dict[str, Any] = {name: lists.pop(name) for name in ("__key__", "__shard__") if name in lists}
    for name, column in lists.items():
        if kept:
            values = [column[row] for row in kept] if dropped else column[: delivery.rows]
            found, parts = pickled(values) if name == OUTPUTS else packed(name, values)
            names.append(name)
            columns.append(found)
            buffers += parts
    return labels, names, columns, buffers


if __name__ == "__main__":
    main(*sys.argv[1:])
