"""Leading: the samples of the first batch, each read by itself, so that it does not wait until the first runs are complete.

An index says which samples of a run leave first, and where they lie. They are asked for all at once, before the runs they
belong to, which then fill behind them: the order is the same, the first batch is there after a round trip, and its bytes
are read twice. The same where an epoch goes on inside its runs.
"""

from __future__ import annotations

import threading
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from penstock.config import MIB
from penstock.errors import ClosedError
from penstock.formats import FORMATS, joined, narrowed, parser_of
from penstock.loader.lanes.segments import ShardSegment
from penstock.ranges import REQUEST_COST_BYTES, near_groups
from penstock.store.inflight import InFlight
from penstock.types import ByteRange, Get

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.formats import Sample
    from penstock.index import ShardIndex
    from penstock.loader.lanes.lane import Lane
    from penstock.loader.lanes.segments import SampleSource, SourcedSamples
    from penstock.sources.shards import Shard
    from penstock.types import Buffer

RUNS_BYTES_MIN = 8 * MIB
"""Runs of fewer bytes than this are here as soon as single samples of them are."""

RUNS_PER_LED_MIN = 4
"""So many times as long as what would lead them: else little is gained, and much read twice."""

REQUESTS_MAX = 256


class SampleAddress(NamedTuple):
    """A stored sample: number of its source, of the shard there, and of the sample in it."""

    source: int
    shard: int
    sample: int


class SampleRange(NamedTuple):
    """Consecutive samples of one shard, to be read at once.

    Attributes:
        source: Number of the source.
        number: Of the shard in it.
        shard: The same.
        known: Where its samples lie.
        first: The first sample.
        samples_count: How many.
    """

    source: int
    number: int
    shard: Shard
    known: ShardIndex
    first: int
    samples_count: int

    @property
    def format(self) -> str:
        """As the pipeline says it, else the index."""
        return narrowed(self.shard.format, self.known.row.format)

    @property
    def span(self) -> ByteRange:
        """Their bytes."""
        offsets = self.known.offsets
        assert offsets is not None
        return ByteRange(int(offsets[self.first]), int(offsets[self.first + self.samples_count]))


def is_enterable(format_name: str) -> bool:
    """Whether a sample of this format is read from its own bytes alone."""
    form = FORMATS[format_name]
    return form.unit == "sample" and not form.head and not form.decide


def near_ranges(
    shard: Shard, index: ShardIndex, samples: Sequence[int], *, source: int, number: int
) -> list[SampleRange]:
    """What to read of a shard for some of its samples, given ascending: near ones together."""
    offsets = index.offsets
    assert offsets is not None
    spans = [(int(offsets[sample]), int(offsets[sample + 1])) for sample in samples]
    return [
        SampleRange(source, number, shard, index, samples[first], samples[stop - 1] + 1 - samples[first])
        for first, stop in near_groups(spans, gap_bytes=REQUEST_COST_BYTES)
    ]


def read(wanted: Iterable[SampleRange]) -> Iterator[tuple[SampleRange, Buffer]]:
    """The bytes of each stretch, as they arrive; each is asked for as soon as `wanted` gives it.

    Raises:
        StoreError: one cannot be read, or is not what was indexed.
    """
    for store, group in groupby(wanted, key=attrgetter("shard.store")):
        from penstock.index import Verifier  # here: most runs enter no shard inside

        in_flight: InFlight[SampleRange] = InFlight(store)
        try:
            while True:
                while len(in_flight) < REQUESTS_MAX and (stretch := next(group, None)) is not None:
                    in_flight.submit(Get(stretch.shard.key, stretch.span, stretch.shard.etag), stretch)
                if not in_flight:
                    break
                stretch, completion = in_flight.wait()
                if completion.error is not None:
                    raise completion.error
                Verifier(stretch.known, first_sample=stretch.first, url=stretch.shard.url).feed(completion.body)
                yield stretch, completion.body
        finally:
            in_flight.cancel()


def parsed(stretch: SampleRange, data: Buffer) -> dict[SampleAddress, tuple[Sample, SampleSource]]:
    """The samples of a stretch.

    Raises:
        DataError: they are corrupt.
    """
    shard = stretch.shard
    where = ShardSegment(shard, -1, format_name=stretch.format, source=stretch.source)
    parser = parser_of(stretch.format, shard=shard.url, start_offset_bytes=stretch.span.start)
    samples = [*parser.feed(data), *parser.finish()]
    return {
        SampleAddress(stretch.source, stretch.number, stretch.first + at): (sample, where)
        for at, sample in enumerate(samples)
    }


class PrefetchedSamples(NamedTuple):
    """Samples of a lane that are here before its runs, in the order in which they leave, and where they came from."""

    samples: list[Sample]
    segments: list[SampleSource]


class PrefetchedLane:
    """A lane whose next samples are here already.

    The rest of it is opened when it is asked for: the first batch shares neither the network nor the interpreter with it.

    Args:
        number: Of the lane.
        led: What leaves first.
        open_rest: Opens the lane behind that.
    """

    def __init__(self, number: int, led: PrefetchedSamples, open_rest: Callable[[], Lane]) -> None:
        self.number = number
        self._samples, self._segments = led
        self._open_rest = open_rest
        self._lane: Lane | None = None
        self._opening = threading.Lock()
        self._closed = False

    def prepare(self, count: int) -> int:
        """As ``Lane.prepare``."""
        here = len(self._samples)
        return here if count <= here else here + self._rest().prepare(count - here)

    def take(self, count: int) -> SourcedSamples:
        """As ``Lane.take``."""
        samples, self._samples = self._samples[:count], self._samples[count:]
        segments, self._segments = self._segments[:count], self._segments[count:]
        if len(samples) < count:
            more, more_from = self._rest().take(count - len(samples))
            return joined(samples, more), segments + more_from
        return samples, segments

    @property
    def is_waiting(self) -> bool:
        """As ``Lane.is_waiting``, of the samples behind those that are here."""
        return self._rest().is_waiting

    def read_more(self) -> None:
        """As ``Lane.read_more``."""
        self._rest().read_more()

    def close(self) -> None:
        """As ``Lane.close``."""
        with self._opening:
            self._closed = True
        if self._lane is not None:
            self._lane.close()

    def _rest(self) -> Lane:
        if self._lane is None:
            with self._opening:
                if self._closed:
                    raise ClosedError("the loader was closed while it was iterated")
                self._lane = self._open_rest()
        return self._lane
