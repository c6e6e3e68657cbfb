"""``Feed``: the samples of a rank in the order of the job, a block at a time, from the lanes in turn."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from penstock.fetch import process_budget
from penstock.formats import interleaved
from penstock.loader.lanes.lane import ResumableLane
from penstock.loader.position import IndexPosition, StreamPosition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.formats import Sample
    from penstock.loader.lanes.lane import SampleLane
    from penstock.loader.lanes.segments import SampleSource, SourcedSamples
    from penstock.loader.position import FeedPosition
    from penstock.loader.statistics import Meter
    from penstock.order import IndexedOrder
    from penstock.sources.readers import SampleReader, SampleStream


AnyLane = TypeVar("AnyLane", bound="SampleLane")


class SampleBlock(NamedTuple):
    """Consecutive samples of a rank.

    Attributes:
        samples: The samples, in order.
        segments: The segment of each sample.
        positions: int64[n]: their positions in the order of the job.
    """

    samples: Sequence[Sample]
    segments: Sequence[SampleSource]
    positions: NDArray[np.int64]


class Feed(Protocol):
    """Gives the samples of a rank in order. One thread takes them; any thread may close."""

    def take(self, count: int) -> SampleBlock | None:
        """The next `count` samples, fewer only at the end; None if there are no more. Blocks for bytes."""

    def position(self) -> FeedPosition:
        """The position after the samples that were taken. Cost: below 1 µs per lane."""

    def close(self) -> None:
        """Cancel the reads in progress; idempotent."""


def charge(window_bytes: int) -> int:
    """Take a window out of the process's budget, so that reading ahead has the rest.

    Args:
        window_bytes: Number of bytes that the window holds.

    Returns:
        Number of bytes taken: an eighth of the budget is left in any case, so that reading can go on.
    """
    budget = process_budget()
    free_bytes = budget.bytes_max * 7 // 8 - budget.statistics().used_bytes + budget.statistics().free_bytes
    charged_bytes = max(0, min(window_bytes, free_bytes))
    budget.reserve(charged_bytes, force=True)
    return charged_bytes


class LanesFeed(Generic[AnyLane]):
    """Takes samples from lanes in turn, one from each; a lane that is empty is left out. A ``Feed``.

    Args:
        lanes: The lanes of this rank that are not empty yet, by ascending number.
        lanes_count: Number of lanes of the job: the sample of lane l in round r has position r * lanes_count + l.
        round_count: Number of complete rounds.
        turn: Number of lanes that have had their turn in the current round.
        count: Number of samples to give; None: all.
        prefetched_count: Number of samples at the beginning that the lanes have without waiting for their runs.
        window_bytes: Returns the number of bytes that all runs hold, or refuses to go on. It is called once, when the first
            runs are here; the bytes are charged to the process's budget until the feed is closed.

    Attributes:
        lanes: All lanes, empty ones included.
    """

    def __init__(
        self,
        lanes: Sequence[AnyLane],
        *,
        lanes_count: int,
        round_count: int = 0,
        turn: int = 0,
        count: int | None = None,
        prefetched_count: int = 0,
        window_bytes: Callable[[], int] | None = None,
    ) -> None:
        self.lanes = list(lanes)
        self._lanes = list(lanes)
        self._numbers = np.array([lane.number for lane in lanes], dtype=np.int64)
        self._lanes_count = lanes_count
        self._round_count = round_count
        self._turn = turn
        self._remaining_count = count
        self._prefetched_count = prefetched_count
        self._window_bytes = window_bytes
        # a charge is taken out before it is given back, because any thread may close
        self._charged: deque[int] = deque()
        self._filled = False

    def take(self, count: int) -> SampleBlock | None:
        """The next `count` samples; see ``Feed``."""
        if not self._filled and count > self._prefetched_count:
            self._filled = True
            # one part of each lane in turn, so that the requests of all lanes are used at once
            while waiting := [lane for lane in self._lanes if lane.is_waiting]:
                for lane in waiting:
                    lane.read_more()
            if self._window_bytes is not None:
                self._charged.append(charge(self._window_bytes()))
        self._prefetched_count -= count
        if self._remaining_count is not None:
            count = min(count, self._remaining_count)
            self._remaining_count -= count
        lanes_count = len(self._lanes)
        if not lanes_count or not count:
            return None
        turn = self._turn
        lanes = self._lanes[turn:] + self._lanes[:turn]
        each, more = divmod(count, lanes_count)
        lanes = lanes[:count]
        for index, lane in enumerate(lanes):
            wanted = each + (index < more)
            if lane.prepare(wanted) < wanted:
                return self._take_singly(count)
        parts: list[Any] = [None] * len(lanes)
        segments: list[Any] = [None] * count
        for index, lane in enumerate(lanes):
            parts[index], segments[index::lanes_count] = lane.take(each + (index < more))
        turns = np.arange(turn, turn + count, dtype=np.int64)
        positions = (self._round_count + turns // lanes_count) * self._lanes_count
        positions += self._numbers[turns % lanes_count]
        rounds, self._turn = divmod(turn + count, lanes_count)
        self._round_count += rounds
        return SampleBlock(interleaved(parts, count), segments, positions)

    def position(self) -> FeedPosition:
        """The position after the samples that were taken."""
        number = self._lanes[self._turn].number if self._lanes else 0
        return IndexPosition(self._round_count * self._lanes_count + number)

    def close(self) -> None:
        """Cancel the reads in progress; idempotent."""
        for lane in self.lanes:
            lane.close()
        while self._charged:
            with contextlib.suppress(IndexError):  # another thread closes too
                process_budget().release(self._charged.popleft())

    def _take_singly(self, count: int) -> SampleBlock | None:
        """A block in which a lane becomes empty: one sample at a time."""
        samples: list[Sample] = []
        segments: list[SampleSource] = []
        positions: list[int] = []
        while len(samples) < count and self._lanes:
            lane = self._lanes[self._turn]
            if lane.prepare(1):
                taken, taken_from = lane.take(1)
                samples += taken
                segments += taken_from
                positions.append(self._round_count * self._lanes_count + lane.number)
                self._turn += 1
            else:
                del self._lanes[self._turn]
                self._numbers = np.delete(self._numbers, self._turn)
            if self._turn >= len(self._lanes):
                self._turn = 0
                self._round_count += 1
        if not samples:
            return None
        return SampleBlock(samples, segments, np.array(positions, dtype=np.int64))


class StreamLanesFeed(LanesFeed[ResumableLane]):
    """``LanesFeed`` over lanes whose positions do not follow from the number of samples taken."""

    def position(self) -> StreamPosition:
        """The position after the samples that were taken. Cost: 0.3 µs per lane."""
        lanes = {lane.number: lane.position() for lane in self._lanes}
        return StreamPosition(self._round_count, self._turn, self._remaining_count, lanes)


class SelectedBatchesFeed:
    """Some batches of a feed. The others are read and passed over, and nothing of them is decoded.

    Args:
        feed: Gives the samples of all batches.
        size: Number of samples in a batch.
        first_batch: Number of the batch with which `feed` begins.
        chosen: Says whether the batch with a given number is wanted.
    """

    def __init__(self, feed: Feed, *, size: int, first_batch: int, chosen: Callable[[int], bool]) -> None:
        self._feed = feed
        self._size = size
        self._batch = first_batch
        self._chosen = chosen
        self._remaining_count = 0  # samples of the current batch

    def take(self, count: int) -> SampleBlock | None:
        """The next `count` samples, but never beyond the end of a batch; see ``Feed``."""
        if not self._remaining_count:
            while not self._chosen(self._batch):
                if self._feed.take(self._size) is None:
                    return None
                self._batch += 1
            self._batch += 1
            self._remaining_count = self._size
        block = self._feed.take(min(count, self._remaining_count))
        if block is not None:
            self._remaining_count -= len(block.samples)
        return block

    def position(self) -> FeedPosition:
        """The position after the samples that were taken."""
        return self._feed.position()

    def close(self) -> None:
        """Cancel the reads in progress; idempotent."""
        self._feed.close()


LOCATED_COUNT = 4096
"""Number of positions that the order locates at once."""


class SampleOrigin(NamedTuple):
    """Where a separately read sample came from; a ``SampleSource``."""

    url: str
    source: int


class PositionSequence(Protocol):
    """The positions of the samples of a feed, ascending."""

    @property
    def stop(self) -> int:
        """A position after all of them."""

    def __len__(self) -> int:
        """Number of positions."""

    def chunk(self, start: int, stop: int) -> NDArray[np.int64]:
        """The positions with indexes in [start, stop); fewer at the end."""


class RankPositions:
    """The positions of a rank, which are a range; a ``PositionSequence``."""

    def __init__(self, positions: range) -> None:
        self._positions = positions
        self.stop = positions.stop

    def __len__(self) -> int:
        return len(self._positions)

    def chunk(self, start: int, stop: int) -> NDArray[np.int64]:
        """The positions with indexes in [start, stop); fewer at the end."""
        part = self._positions[start:stop]
        return np.arange(part.start, part.stop, part.step, dtype=np.int64)


class _MeteredStream:
    """A stream of samples; counts bytes and the seconds that it blocks.

    Args:
        stream: The stream.
        source: Number of its source.
        meter: Counts bytes and seconds.
    """

    def __init__(self, stream: SampleStream, *, source: int, meter: Meter) -> None:
        self._stream = stream
        self._source = source
        self._meter = meter

    def take(self, count: int) -> tuple[list[Sample], list[SampleSource]]:
        """The next `count` samples, fewer only at the end, and where they came from."""
        source = self._source
        samples: list[Sample] = []
        origins: list[SampleSource] = []
        size_bytes = 0
        began_s = time.perf_counter()
        for _, sample, url in islice(self._stream, count):
            samples.append(sample)
            origins.append(SampleOrigin(url, source))
            size_bytes += sample.size_bytes or 0
        self._meter.store_s += time.perf_counter() - began_s
        self._meter.bytes += size_bytes
        return samples, origins

    def close(self) -> None:
        """Cancel the reads in progress; from any thread, idempotent."""
        self._stream.close()


class ObjectsFeed:
    """A rank's samples if all are read by number: one stream for all lanes, in the order of positions; a ``Feed``.

    Args:
        reader: Reads the samples.
        order: The order of the epoch.
        positions: Positions of the samples.
        meter: Counts bytes and seconds.
        threads_count: Number of threads that call a user's function.
    """

    def __init__(
        self,
        reader: SampleReader,
        *,
        order: IndexedOrder,
        positions: PositionSequence,
        meter: Meter,
        threads_count: int,
    ) -> None:
        self._positions = positions
        self._given_count = 0
        stream = reader.stream(located(order, positions), threads_count=threads_count)
        self._stream = _MeteredStream(stream, source=0, meter=meter)

    def take(self, count: int) -> SampleBlock | None:
        """Up to `count` samples; see ``Feed``."""
        samples, origins = self._stream.take(count)
        if not samples:
            return None
        first = self._given_count
        self._given_count += len(samples)
        return SampleBlock(samples, origins, self._positions.chunk(first, self._given_count))

    def position(self) -> IndexPosition:
        """The position after the samples that were taken."""
        next_position = self._positions.chunk(self._given_count, self._given_count + 1)
        return IndexPosition(int(next_position[0]) if len(next_position) else self._positions.stop)

    def close(self) -> None:
        """Cancel the reads in progress; idempotent."""
        self._stream.close()


def located(order: IndexedOrder, positions: PositionSequence) -> Iterator[int]:
    """The number of the sample at each position, in an order whose shards are samples of their own."""
    lanes_count = order.lanes_count
    for begin in range(0, len(positions), LOCATED_COUNT):
        part = positions.chunk(begin, begin + LOCATED_COUNT)
        rounds, lanes = np.divmod(part, lanes_count)
        numbers = np.empty_like(part)
        for lane in np.unique(lanes).tolist():
            in_lane = np.flatnonzero(lanes == lane)
            first = int(rounds[in_lane[0]])
            locations = order.locations(lane, first, int(rounds[in_lane[-1]]) - first + 1)
            numbers[in_lane] = locations.shards[rounds[in_lane] - first]
        yield from numbers.tolist()


class ObjectLane:
    """One lane of objects, for a mix with other sources; a ``SampleLane``.

    Args:
        reader: Reads the samples.
        source: Number of the source in the mix.
        order: The order of the source's current pass.
        lane: Number of the lane in that order.
        taken: Number of samples that were taken from the lane before.
        meter: Counts bytes and seconds.
        threads_count: Number of threads that call a user's function.
    """

    is_waiting = False
    """There is no run to be filled."""

    def __init__(
        self,
        reader: SampleReader,
        *,
        source: int,
        order: IndexedOrder,
        lane: int,
        taken: int,
        meter: Meter,
        threads_count: int,
    ) -> None:
        self.number = lane
        parts = (order.locations(lane, first, 64).shards for first in range(taken, order.lane_length(lane), 64))
        numbers = (number % len(reader) for number in chain.from_iterable(part.tolist() for part in parts))
        self._stream = _MeteredStream(reader.stream(numbers, threads_count=threads_count), source=source, meter=meter)
        self._samples: list[Sample] = []
        self._origins: list[SampleSource] = []

    def prepare(self, count: int) -> int:
        """Have `count` samples ready; how many are, fewer only at the lane's end."""
        missing_count = count - len(self._samples)
        if missing_count > 0:
            samples, origins = self._stream.take(missing_count)
            self._samples += samples
            self._origins += origins
        return len(self._samples)

    def take(self, count: int) -> SourcedSamples:
        """The next `count` samples, which ``prepare`` has made ready."""
        taken = self._samples[:count], self._origins[:count]
        self._samples, self._origins = self._samples[count:], self._origins[count:]
        return taken

    def read_more(self) -> None:
        """Nothing waits for more."""

    def close(self) -> None:
        """Cancel the reads in progress; idempotent."""
        self._stream.close()
