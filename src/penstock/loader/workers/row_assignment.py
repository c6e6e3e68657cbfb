"""Which rows of the next batch are whose: the order of a rank, dealt out to its worker processes.

With an index it is arithmetic. Without one nobody knows how many samples a lane has before its end was read, and all rows
behind that depend on it: so the workers say how far they know their lanes, and a batch is dealt once its samples are known
to be there. The turns are those of ``StreamLanesFeed``, over lanes that are elsewhere.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from penstock.loader.lanes.feed import StreamLanesFeed
from penstock.loader.position import LANE_BEGIN, StreamPosition

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.loader.lanes.lane import ResumableLane
    from penstock.loader.position import FeedPosition, LanePosition
    from penstock.order import Batches, StreamOrder

BATCHES_AHEAD = 2
"""Whose samples workers are asked to have ready, besides those that are dealt."""


class Assignment(NamedTuple):
    """A batch of the rank.

    Attributes:
        positions: int64[B]: of its rows, those that only pad included.
        rows_count: Those that hold a sample.
        rows: By worker: int64[n], those that it fills, in the order in which its samples come.
        mark: Where the rank's feed is behind it, as far as it is known here.
    """

    positions: NDArray[np.int64]
    rows_count: int
    rows: list[NDArray[np.int64]]
    mark: FeedPosition | None


class RowAssigner(Protocol):
    """Deals an epoch, or the rest of one. Not thread-safe."""

    @property
    def is_ended(self) -> bool:
        """Whether there is no further batch."""

    def next(self) -> Assignment | None:
        """The next batch; None at the end, or while it is not known.

        Raises:
            StoreError, DataError: what kept a worker from reading a sample of it.
        """

    def heard(self, lanes: Mapping[int, LaneProgress]) -> None:
        """What a worker knows now of its lanes."""

    def wants(self) -> dict[int, dict[int, int]]:
        """By worker, what to ask of it: by lane, how many samples of the epoch to know of. Each is asked once."""

    def forget_asked(self, worker: int) -> None:
        """It is another process by now: ask again for what it has not answered."""

    def position_of(
        self, mark: FeedPosition | None, positions: Mapping[int, FeedPosition | None]
    ) -> FeedPosition | None:
        """The position behind a batch, from what its workers said of their lanes behind it."""


class LaneProgress(NamedTuple):
    """What is known of a lane.

    Attributes:
        samples_count: Of the epoch, that are known to be there.
        is_ended: Whether there are no more.
        error: Why there is no more to be known.
    """

    samples_count: int
    is_ended: bool
    error: BaseException | None


class IndexedRowAssigner:
    """By arithmetic.

    Args:
        batches: The rank's.
        workers_count: Among whom; they are ranks of a larger world.
    """

    def __init__(self, batches: Batches, *, workers_count: int) -> None:
        self._batches = batches
        self._workers_count = workers_count
        self._index = 0

    @property
    def is_ended(self) -> bool:
        """See ``RowAssigner``."""
        return self._index >= len(self._batches)

    def next(self) -> Assignment | None:
        """See ``RowAssigner``."""
        if self.is_ended:
            return None
        positions, count = self._batches.batch(self._index)
        self._index += 1
        positions = np.asarray(positions, np.int64)
        owners = positions[:count] // self._batches.world_size % self._workers_count
        rows = [np.flatnonzero(owners == worker) for worker in range(self._workers_count)]
        return Assignment(positions, count, rows, None)

    def heard(self, lanes: Mapping[int, LaneProgress]) -> None:
        """See ``RowAssigner``."""

    def wants(self) -> dict[int, dict[int, int]]:
        """See ``RowAssigner``."""
        return {}

    def forget_asked(self, worker: int) -> None:
        """See ``RowAssigner``."""

    def position_of(
        self, mark: FeedPosition | None, positions: Mapping[int, FeedPosition | None]
    ) -> FeedPosition | None:
        """See ``RowAssigner``: the numbers of the batches say it all."""
        del positions
        return mark


class RemoteLane:
    """A lane that a worker reads: as ``Lane``, but what it gives are only numbers."""

    def __init__(self, number: int, *, worker: int, taken: int) -> None:
        self.number = number
        self.worker = worker
        self.taken = taken
        self.asked = 0
        self.known = LaneProgress(taken, is_ended=False, error=None)

    @property
    def ready_count(self) -> int:
        """Samples that are known to be there and have not been dealt."""
        return self.known.samples_count - self.taken

    def prepare(self, count: int) -> int:
        """As ``Lane.prepare``, without waiting."""
        del count
        return self.ready_count

    def take(self, count: int) -> tuple[list[Any], list[Any]]:
        """As ``Lane.take``."""
        self.taken += count
        return [self] * count, [None] * count

    def mark(self) -> LanePosition:
        """Only its worker knows: ``StreamRowAssigner.position_of``."""
        return LANE_BEGIN

    @property
    def is_waiting(self) -> bool:
        """As ``Lane.is_waiting``: never here."""
        return False

    def read_more(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


class StreamRowAssigner:
    """By what the workers found.

    Args:
        order: Of the epoch.
        position: Where it begins; None is its beginning.
        take: Samples at most; None: all.
        size: Of a batch.
        drop_last: Whether what does not fill one is left out.
        workers_count: Among whom; the rank's lanes go to them in turn.
    """

    def __init__(
        self,
        order: StreamOrder,
        position: StreamPosition | None,
        *,
        take: int | None,
        size: int,
        drop_last: bool,
        workers_count: int,
    ) -> None:
        self._size = size
        self._drop_last = drop_last
        self._workers_count = workers_count
        self._left = take if position is None else position.left_count
        self._lanes: dict[int, RemoteLane] = {}
        for index, number in enumerate(order.lanes_owned):
            if position is None or number in position.lanes:
                start, emitted_count = LANE_BEGIN if position is None else position.lanes[number]
                taken = start.before_count + emitted_count
                self._lanes[number] = RemoteLane(number, worker=index % workers_count, taken=taken)
        lanes: Sequence[ResumableLane] = list(self._lanes.values())
        self._feed = StreamLanesFeed(
            lanes,
            lanes_count=order.lanes_count,
            round_count=0 if position is None else position.round_count,
            turn=0 if position is None else position.turn,
            count=self._left,
        )
        self.begin: FeedPosition = position or self._feed.mark()
        """The position in front of the first batch."""
        self._ended = False

    @property
    def is_ended(self) -> bool:
        """See ``RowAssigner``."""
        return self._ended

    def next(self) -> Assignment | None:
        """See ``RowAssigner``."""
        count = self._size if self._left is None else min(self._size, self._left)
        each = self._each(count)
        for lane in self._lanes.values():
            if lane.ready_count < each and not lane.known.is_ended:
                if lane.known.error is not None:
                    raise lane.known.error
                return None
        block = None if self._ended else self._feed.take(count)
        found = 0 if block is None else len(block.samples)
        self._ended = found < self._size
        if block is None or (self._ended and self._drop_last):
            return None
        if self._left is not None:
            self._left -= found
        owners = np.fromiter((lane.worker for lane in block.samples), np.int64, found)  # type: ignore[attr-defined]
        rows = [np.flatnonzero(owners == worker) for worker in range(self._workers_count)]
        return Assignment(block.positions, found, rows, self._feed.mark())

    def heard(self, lanes: Mapping[int, LaneProgress]) -> None:
        """See ``RowAssigner``."""
        for number, known in lanes.items():
            lane = self._lanes[number]
            if known.samples_count >= lane.known.samples_count:
                lane.known = known

    def wants(self) -> dict[int, dict[int, int]]:
        """See ``RowAssigner``."""
        wanted: dict[int, dict[int, int]] = {}
        one, ahead = self._each(self._size), self._each(BATCHES_AHEAD * self._size)
        for lane in self._lanes.values():
            known, total = lane.known, lane.taken + ahead
            if known.is_ended or known.error is not None or known.samples_count >= total:
                continue
            # asked anew only when the next batch needs it or the last answer is there: not for each sample
            if lane.asked < max(lane.taken + one, known.samples_count + 1):
                wanted.setdefault(lane.worker, {})[lane.number] = lane.asked = total
        return wanted

    def forget_asked(self, worker: int) -> None:
        """See ``RowAssigner``."""
        for lane in self._lanes.values():
            if lane.worker == worker:
                lane.asked = 0

    def position_of(
        self, mark: FeedPosition | None, positions: Mapping[int, FeedPosition | None]
    ) -> FeedPosition | None:
        """See ``RowAssigner``."""
        assert isinstance(mark, StreamPosition)
        lanes = {}
        for number in mark.lanes:
            own = positions[self._lanes[number].worker]
            assert isinstance(own, StreamPosition)
            lanes[number] = own.lanes[number]
        return replace(mark, lanes=lanes)

    def _each(self, count: int) -> int:
        """How many samples at most a lane gives to the next `count`: more, where others are at their ends."""
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
    """The position of one worker, in its own lanes alone.

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
