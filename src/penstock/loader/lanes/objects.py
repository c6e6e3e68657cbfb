"""Samples that are objects, or that a user's function reads. They are read in the order in which they are handed out.

Each sample can be read separately, so the whole permutation of an epoch costs nothing and no window is held. Requests run
ahead of the consumer, across batches.
"""

from __future__ import annotations

import time
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from penstock.loader.lanes.feed import SampleBlock
from penstock.loader.position import IndexPosition

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.formats import Sample
    from penstock.loader.lanes.segments import SampleSource, SourcedSamples
    from penstock.loader.statistics import Meter
    from penstock.order import IndexedOrder
    from penstock.sources.readers import SampleReader, SampleStream

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
        """Cancel what is being read; from any thread, idempotent."""
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
        """Cancel what is being read; idempotent."""
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
        """Cancel what is being read; idempotent."""
        self._stream.close()
