"""How the work of a rank is divided among its worker processes: who reads which lanes, and who fills which rows of a batch.

With an index, both are computed. Without one, the number of samples of a lane is not known before its end has been read,
and all rows after that end depend on it. So the workers report how many samples they have found in their lanes, and the
rows of a batch are assigned as soon as all its samples have been found. ``StreamLanesFeed`` takes from the lanes in turn
here, too; its lanes are ``RemoteLane``, which give no samples, only the number of the worker that has them.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.loader.lanes.feed import StreamLanesFeed
from penstock.loader.plan.indexed_read_plan import IndexedReadPlan
from penstock.loader.plan.streamed_read_plan import StreamedReadPlan
from penstock.loader.position import LANE_BEGIN, IndexPosition, StreamPosition
from penstock.loader.workers.messages import IndexedInput, StreamedInput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.loader.lanes.lane import ResumableLane
    from penstock.loader.options import Batching, BatchPlan
    from penstock.loader.plan.loader_plan import ReadPlan
    from penstock.loader.position import FeedPosition, LanePosition
    from penstock.loader.workers.messages import WorkerInput
    from penstock.order import Batches, StreamOrder

BATCHES_AHEAD = 2
"""Number of batches, after those that are assigned, whose samples workers are asked to find."""

_log = logging.getLogger("penstock.loader")


class Assignment(NamedTuple):
    """A batch of the rank, and who fills its rows.

    Attributes:
        positions: Positions of the rows in the order of the job, those of rows that only pad included; int64[B].
        rows_count: Number of rows that hold a sample.
        rows: For each worker the rows that it fills, in the order of its samples; int64[n].
        position: Position of the rank's feed after the batch, but without those of the lanes, which only the workers know;
            None if the number of the batch tells.
    """

    positions: NDArray[np.int64]
    rows_count: int
    rows: list[NDArray[np.int64]]
    position: FeedPosition | None


class LaneProgress(NamedTuple):
    """The loader's knowledge of a lane.

    Attributes:
        samples_count: Number of samples, from the beginning of the epoch, that are known to be there.
        is_ended: Whether the lane has no more samples.
        error: Error that keeps the worker from finding more.
    """

    samples_count: int
    is_ended: bool
    error: BaseException | None


class RowAssigner(ABC):
    """Assigns the rows of an epoch, or of the rest of one, batch after batch. Not thread-safe.

    An assigner that needs to hear nothing from the workers implements only ``is_ended`` and ``next``.
    """

    @property
    @abstractmethod
    def is_ended(self) -> bool:
        """Whether there is no further batch."""

    @abstractmethod
    def next(self) -> Assignment | None:
        """The next batch; None at the end, or if its samples have not all been found.

        Raises:
            StoreError, DataError: A worker could not read a sample of it.
        """

    def note(self, lanes: Mapping[int, LaneProgress]) -> None:
        """Record the samples that a worker has found in its lanes."""
        del lanes

    def wants(self) -> dict[int, dict[int, int]]:
        """The samples that workers must find for the next batches, each only once.

        Returns:
            For each worker: for each lane a number of samples, from the beginning of the epoch.
        """
        return {}

    def forget_wants(self, worker: int) -> None:
        """Ask a worker again for the samples that it has not found, because another process has taken its place."""
        del worker

    def position_of(
        self, position: FeedPosition | None, reported: Mapping[int, FeedPosition | None]
    ) -> FeedPosition | None:
        """The position after a batch; None if the number of the batch tells.

        Args:
            position: Position of the assignment.
            reported: For each worker the position that it reported after its rows of the batch.
        """
        return None


class IndexedRowAssigner(RowAssigner):
    """Assigns rows by arithmetic: to the order of an index, workers are ranks of a larger world.

    Args:
        batches: Batches of the rank.
        workers_count: Number of workers.
    """

    def __init__(self, batches: Batches, *, workers_count: int) -> None:
        self._batches = batches
        self._workers_count = workers_count
        self._index = 0

    @property
    def is_ended(self) -> bool:
        """Whether there is no further batch."""
        return self._index >= len(self._batches)

    def next(self) -> Assignment | None:
        """The next batch; None at the end."""
        if self.is_ended:
            return None
        positions, count = self._batches.batch(self._index)
        self._index += 1
        positions = np.asarray(positions, np.int64)
        owners = positions[:count] // self._batches.world_size % self._workers_count
        rows = [np.flatnonzero(owners == worker) for worker in range(self._workers_count)]
        return Assignment(positions, count, rows, None)


class RemoteLane:
    """A lane that a worker reads. ``take`` gives the lane itself in place of each sample.

    Args:
        number: Number of the lane.
        worker: Number of the worker that reads it.
        taken_count: Number of its samples, from the beginning of the epoch, that were assigned to a row.

    Attributes:
        wanted_count: Number of samples that the worker was last asked to find.
        known: Progress of the lane as the worker last reported it.
    """

    def __init__(self, number: int, *, worker: int, taken_count: int) -> None:
        self.number = number
        self.worker = worker
        self.taken_count = taken_count
        self.wanted_count = 0
        self.known = LaneProgress(taken_count, is_ended=False, error=None)

    @property
    def ready_count(self) -> int:
        """Number of samples that are known to be there and have not been assigned."""
        return self.known.samples_count - self.taken_count

    def prepare(self, count: int) -> int:
        """The number of samples that can be taken; does not wait for more."""
        del count
        return self.ready_count

    def take(self, count: int) -> tuple[list[Any], list[Any]]:
        """The lane itself, `count` times."""
        self.taken_count += count
        return [self] * count, [None] * count

    def position(self) -> LanePosition:
        """A placeholder: only the worker knows the position, and reports it (``StreamRowAssigner.position_of``)."""
        return LANE_BEGIN

    @property
    def is_waiting(self) -> bool:
        """Never: ``prepare`` does not wait."""
        return False

    def read_more(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


class StreamRowAssigner(RowAssigner):
    """Assigns rows by the samples that the workers have found in their lanes.

    Args:
        order: Order of the epoch.
        position: Position to begin at; None is the beginning of the epoch.
        take_count: Number of samples of the epoch at most; None is all.
        size: Number of rows of a full batch.
        drop_last: Whether the last batch is left out if it is not full.
        workers_count: Number of workers; the rank's lanes go to them in turn.

    Attributes:
        begin: Position before the first batch.
    """

    def __init__(
        self,
        order: StreamOrder,
        position: StreamPosition | None,
        *,
        take_count: int | None,
        size: int,
        drop_last: bool,
        workers_count: int,
    ) -> None:
        self._size = size
        self._drop_last = drop_last
        self._workers_count = workers_count
        self._remaining_count = take_count if position is None else position.remaining_count
        self._lanes: dict[int, RemoteLane] = {}
        for index, number in enumerate(order.lanes_owned):
            if position is None or number in position.lanes:
                start, given_count = LANE_BEGIN if position is None else position.lanes[number]
                taken = start.before_count + given_count
                self._lanes[number] = RemoteLane(number, worker=index % workers_count, taken_count=taken)
        lanes: Sequence[ResumableLane] = list(self._lanes.values())
        self._feed = StreamLanesFeed(
            lanes,
            lanes_count=order.lanes_count,
            round_count=0 if position is None else position.round_count,
            turn=0 if position is None else position.turn,
            count=self._remaining_count,
        )
        self.begin: FeedPosition = position or self._feed.position()
        self._ended = False

    @property
    def is_ended(self) -> bool:
        """Whether there is no further batch."""
        return self._ended

    def next(self) -> Assignment | None:
        """The next batch; None at the end, or if its samples have not all been found."""
        count = self._size if self._remaining_count is None else min(self._size, self._remaining_count)
        share_max = self._lane_share_max(count)
        for lane in self._lanes.values():
            if lane.ready_count < share_max and not lane.known.is_ended:
                if lane.known.error is not None:
                    raise lane.known.error
                return None
        block = None if self._ended else self._feed.take(count)
        found = 0 if block is None else len(block.samples)
        self._ended = found < self._size
        if block is None or (self._ended and self._drop_last):
            return None
        if self._remaining_count is not None:
            self._remaining_count -= found
        owners = np.fromiter((lane.worker for lane in block.samples), np.int64, found)  # type: ignore[attr-defined]
        rows = [np.flatnonzero(owners == worker) for worker in range(self._workers_count)]
        return Assignment(block.positions, found, rows, self._feed.position())

    def note(self, lanes: Mapping[int, LaneProgress]) -> None:
        """Record the samples that a worker has found in its lanes."""
        for number, known in lanes.items():
            lane = self._lanes[number]
            if known.samples_count >= lane.known.samples_count:
                lane.known = known

    def wants(self) -> dict[int, dict[int, int]]:
        """The samples that workers must find for the next batches, each only once."""
        wanted: dict[int, dict[int, int]] = {}
        one, ahead = self._lane_share_max(self._size), self._lane_share_max(BATCHES_AHEAD * self._size)
        for lane in self._lanes.values():
            known, total = lane.known, lane.taken_count + ahead
            if known.is_ended or known.error is not None or known.samples_count >= total:
                continue
            # asked again only when the next batch needs it or the last answer has arrived, not for each sample
            if lane.wanted_count < max(lane.taken_count + one, known.samples_count + 1):
                wanted.setdefault(lane.worker, {})[lane.number] = lane.wanted_count = total
        return wanted

    def forget_wants(self, worker: int) -> None:
        """Ask a worker again for the samples that it has not found."""
        for lane in self._lanes.values():
            if lane.worker == worker:
                lane.wanted_count = 0

    def position_of(self, position: FeedPosition | None, reported: Mapping[int, FeedPosition | None]) -> FeedPosition:
        """The position after a batch: that of the assignment, with the positions of the lanes."""
        assert isinstance(position, StreamPosition)
        lanes = {}
        for number in position.lanes:
            own = reported[self._lanes[number].worker]
            assert isinstance(own, StreamPosition)
            lanes[number] = own.lanes[number]
        return replace(position, lanes=lanes)

    def _lane_share_max(self, count: int) -> int:
        """Largest number of samples that one lane may have to give for the next `count`, if other lanes end before."""
        ended = sorted(lane.ready_count for lane in self._lanes.values() if lane.known.is_ended)
        rest, live_count = count, len(self._lanes)
        for ready in ended:
            if ready * live_count >= rest:
                break
            rest -= ready
            live_count -= 1
        return -(-rest // live_count) if live_count else 0


def worker_position(
    position: StreamPosition | None, lanes: Sequence[int], worker: int, workers_count: int
) -> StreamPosition:
    """The position of one worker, in its own lanes.

    Args:
        position: Position of the rank; None is the beginning of the epoch.
        lanes: Numbers of the rank's lanes, ascending.
        worker: Number of the worker, from 0.
        workers_count: Number of workers of the rank.
    """
    own = lanes[worker::workers_count]
    if position is None:
        return StreamPosition(0, 0, None, dict.fromkeys(own, LANE_BEGIN))
    before = set(sorted(position.lanes)[: position.turn])
    entries = {number: position.lanes[number] for number in own if number in position.lanes}
    turn, round_count = sum(number in before for number in entries), position.round_count
    if entries and turn == len(entries):
        turn, round_count = 0, round_count + 1
    return StreamPosition(round_count, turn, None, entries)


# ── lanes ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Division(NamedTuple):
    """The work of a rank, divided among its workers.

    Attributes:
        inputs: Input of each worker.
        assigner: Says which worker fills which rows.
        batches: Positions of the rank's batches; None if their number is known only after reading.
        begin: Position of the rank before the first batch.
    """

    inputs: Sequence[WorkerInput]
    assigner: RowAssigner
    batches: Batches | None
    begin: FeedPosition


def divide(
    read_plan: ReadPlan,
    position: FeedPosition | None,
    *,
    epoch: int,
    batching: Batching,
    batch_plan: BatchPlan,
    processes_count: int,
) -> Division:
    """Divide an epoch, or the rest of one, among worker processes.

    Args:
        read_plan: The rank's plan for reading.
        position: Position to begin at; None is the beginning of the epoch.
        epoch: Epoch number, from 0.
        batching: Size of the batches of all ranks, and how many samples are taken.
        batch_plan: Number of rows of this rank's batches, and whether the last one is left out if it is not full.
        processes_count: Number of processes to use at most; fewer are used if the rank has fewer lanes.
    """
    if isinstance(read_plan, IndexedReadPlan):
        count = usable_count(len(read_plan.order.lanes_owned), processes_count, evenly=True)
        begin = position or IndexPosition(0)
        assert isinstance(begin, IndexPosition)  # a state of another mode has been refused
        batches = read_plan.batches(epoch, batching=batching, origin=begin.position)
        indexed = IndexedInput(read_plan=read_plan, position=begin, stop=batches.stop, global_size=batching.global_size)
        return Division([indexed] * count, IndexedRowAssigner(batches, workers_count=count), batches, begin)
    assert isinstance(read_plan, StreamedReadPlan)
    assert not isinstance(position, IndexPosition)
    order = read_plan.order.at_epoch(epoch)
    count = usable_count(len(order.lanes_owned), processes_count, evenly=False)
    assigner = StreamRowAssigner(
        order,
        position,
        take_count=batching.take_count,
        size=batch_plan.batch_size,
        drop_last=batch_plan.drop_last,
        workers_count=count,
    )
    positions = [worker_position(position, order.lanes_owned, number, count) for number in range(count)]
    streamed = [StreamedInput(read_plan=read_plan, position=each) for each in positions]
    return Division(streamed, assigner, None, assigner.begin)


def usable_count(lanes_count: int, processes_count: int, *, evenly: bool) -> int:
    """Number of workers that can own lanes.

    Args:
        lanes_count: Number of lanes of the rank.
        processes_count: Number of workers that the user asked for.
        evenly: Whether all workers must own the same number of lanes.
    """
    count = min(processes_count, max(1, lanes_count))
    while evenly and lanes_count % count:
        count -= 1
    if count < processes_count:
        text = "%d of %d workers are used: each has lanes of its own, and this rank has %d; see Loader(lanes=)"
        _log.warning(text, count, processes_count, lanes_count)
    return count
