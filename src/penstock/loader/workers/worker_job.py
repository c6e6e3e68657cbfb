"""The job of a worker process for one epoch, and what it reads. A job is never changed: a restarted worker gets another one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.loader.batching import Batching
from penstock.loader.position import IndexPosition, feed_position

if TYPE_CHECKING:
    from penstock.loader.batches.run import RunPlan
    from penstock.loader.lanes.feed import Feed
    from penstock.loader.plan.indexed_read_plan import IndexedReadPlan
    from penstock.loader.plan.loader_plan import ReadPlan
    from penstock.loader.plan.streamed_read_plan import StreamedReadPlan
    from penstock.loader.position import FeedPosition, Position
    from penstock.loader.statistics import Meter
    from penstock.pipeline import Pipeline


class WorkerInput(Protocol):
    """What one worker reads: the lanes that it owns, from a position on."""

    @property
    def read_plan(self) -> ReadPlan:
        """How the rank reads."""

    def open(self, epoch: int, *, worker: int, workers_count: int) -> Feed:
        """The samples of a worker's lanes, in their order.

        Args:
            epoch: Epoch number, from 0.
            worker: Number of the worker, from 0.
            workers_count: Number of workers of the rank, each with an equal share of the memory.
        """

    def report(self, position: Position | None) -> FeedPosition | None:
        """What the loader has to hear of the position after a batch."""

    def remaining_after(self, batches_count: int, reported: FeedPosition | None) -> WorkerInput:
        """What is left to read.

        Args:
            batches_count: Number of batches of this input that are done.
            reported: The position that the worker reported last; None if it has not reported any.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedInput:
    """The input of a worker where an index counts the batches: positions follow from their numbers.

    Attributes:
        read_plan: How the rank reads.
        position: Position to begin at.
        stop: Position that ends the epoch.
        global_size: Number of samples in a batch of all ranks.
    """

    read_plan: IndexedReadPlan
    position: IndexPosition
    stop: int
    global_size: int

    def open(self, epoch: int, *, worker: int, workers_count: int) -> Feed:
        """The samples of the worker's lanes, in their order."""
        return self.read_plan.for_worker(worker, workers_count).feed_between(epoch, self.position.position, self.stop)

    def report(self, position: Position | None) -> None:
        """The loader knows all positions."""

    def remaining_after(self, batches_count: int, reported: FeedPosition | None) -> IndexedInput:
        """What is left to read."""
        del reported
        position = IndexPosition(self.position.position + batches_count * self.global_size)
        return replace(self, position=position)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedInput:
    """The input of a worker that reads whole shards, and reports where its lanes are.

    Attributes:
        read_plan: How the rank reads.
        position: Position to begin at, in the worker's lanes alone.
    """

    read_plan: StreamedReadPlan
    position: FeedPosition

    def open(self, epoch: int, *, worker: int, workers_count: int) -> Feed:
        """The samples of the worker's lanes, in their order; the position says which lanes these are."""
        del worker
        own = self.read_plan.for_worker(workers_count)
        return own.begin(epoch, self.position, batching=Batching(1, drop_last=False, take_count=None)).feed

    def report(self, position: Position | None) -> FeedPosition | None:
        """The position of the worker's lanes."""
        return feed_position(position)

    def remaining_after(self, batches_count: int, reported: FeedPosition | None) -> StreamedInput:
        """What is left to read."""
        del batches_count
        return self if reported is None else replace(self, position=reported)


class WorkerJob(NamedTuple):
    """What a worker process does in one epoch.

    Attributes:
        input: Samples that the worker reads.
        pipeline: The pipeline; what its stages hold (locks, tables) is made in the worker.
        plan: How to make batches; the worker makes the transforms itself, and ``batch_size`` is that of the whole rank.
        epoch: Epoch number, from 0.
        first_batch: Number, in the run, of the first batch that the worker fills.
        number: Number of the worker, from 0.
        workers_count: Number of workers of this rank.
        budget_bytes: Byte budget of the worker's process.
        rebatches: Whether the worker makes a list of outputs of each sample, which the loader rebatches.
    """

    input: WorkerInput
    pipeline: Pipeline
    plan: RunPlan
    epoch: int
    first_batch: int
    number: int
    workers_count: int
    budget_bytes: int
    rebatches: bool

    @property
    def meter(self) -> Meter:
        """Counts what the worker reads."""
        return self.input.read_plan.reading.meter

    def open(self) -> Feed:
        """The samples of the worker's lanes, in their order."""
        return self.input.open(self.epoch, worker=self.number, workers_count=self.workers_count)

    def remaining_after(self, done_count: int, reported: FeedPosition | None) -> WorkerJob:
        """What is left to do.

        Args:
            done_count: Number of batches of the run that are done.
            reported: The position that the worker reported last; None if it has not reported any.
        """
        rest = self.input.remaining_after(done_count - self.first_batch, reported)
        return self._replace(first_batch=done_count, input=rest)
