"""``FirstBatchPrefetch``: the samples of the first batch, read by themselves, so that it does not wait for complete runs.

An index says which samples of a run are handed out first, and where they lie. They are all requested at once, before the
rest of their runs. The order is the same and the first batch is there after a round trip; its bytes are read twice. An epoch
that is resumed within its runs begins in the same way.
"""

from __future__ import annotations

import threading
from itertools import chain, groupby
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.config import MIB
from penstock.errors import ClosedError, DataError
from penstock.formats import FORMATS, joined, narrowed, parser_of, with_fields
from penstock.loader.lanes.segments import ShardSegment
from penstock.memory.ranges import REQUEST_COST_BYTES, near_groups
from penstock.store.inflight import perform_many
from penstock.types import ByteRange, Get

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from penstock.formats import Sample
    from penstock.index import ShardIndex
    from penstock.loader.lanes.lane import Lane
    from penstock.loader.lanes.lane_parts import LanePart, ShardIndexes
    from penstock.loader.lanes.segments import ReadOptions, SampleSource, SourcedSamples
    from penstock.order import IndexedOrder, MixOrder
    from penstock.sources.data_source import DataSource
    from penstock.sources.shards import Shard
    from penstock.types import Buffer

RUNS_BYTES_MIN = 8 * MIB
"""Runs of fewer bytes arrive as soon as single samples of them would."""

RUNS_PER_PREFETCH_MIN = 4
"""Runs have to be at least this many times as long as the first batch: else little is gained, and much is read twice."""

REQUESTS_MAX = 256


class SampleAddress(NamedTuple):
    """A stored sample: the number of its source, of the shard in the source, and of the sample in the shard."""

    source: int
    shard: int
    sample: int


class SampleRange(NamedTuple):
    """Consecutive samples of one shard, read by one request.

    Attributes:
        source: Number of the source.
        number: Number of the shard in the source.
        shard: The shard.
        known: The index of the shard.
        first: Number of the first sample.
        samples_count: Number of samples.
    """

    source: int
    number: int
    shard: Shard
    known: ShardIndex
    first: int
    samples_count: int

    @property
    def format(self) -> str:
        """The format of the shard: as the pipeline says it, else as the index does."""
        return narrowed(self.shard.format, self.known.row.format)

    @property
    def span(self) -> ByteRange:
        """The bytes of the samples."""
        offsets = self.known.offsets
        assert offsets is not None
        return ByteRange(int(offsets[self.first]), int(offsets[self.first + self.samples_count]))


class PrefetchedSamples(NamedTuple):
    """The samples that a lane hands out first, in this order, and where they came from."""

    samples: list[Sample]
    origins: list[SampleSource]


def is_enterable(format_name: str) -> bool:
    """Whether a sample of this format can be read from its own bytes alone."""
    form = FORMATS[format_name]
    return form.unit == "sample" and not form.head and not form.decide


class FirstBatchPrefetch:
    """Chooses and reads the samples of the first batch.

    Args:
        sources: The sources.
        indexes: Says where samples lie.
        reading: How lanes read.
        positions_count: Number of positions of the first batch, of all ranks.
    """

    def __init__(
        self,
        sources: Sequence[DataSource],
        *,
        indexes: ShardIndexes,
        reading: ReadOptions,
        positions_count: int,
    ) -> None:
        self._sources = sources
        self._indexes = indexes
        self._reading = reading
        self._positions_count = positions_count
        self._sample_bytes = [source.sample_bytes for source in sources]

    def rounds_count(self, order: IndexedOrder | MixOrder) -> int:
        """Number of samples that each lane gives to the first batch."""
        return -(-self._positions_count // order.lanes_count)

    def choose(
        self, order: IndexedOrder | MixOrder, rounds: Mapping[int, int], parts: Sequence[tuple[int, LanePart]]
    ) -> dict[tuple[int, int], list[SampleAddress]]:
        """The samples to read, by lane and source; none if it does not pay.

        Args:
            order: The order of the epoch.
            rounds: By lane, the number of samples that it has handed out before.
            parts: Numbers of lanes, and the rest of each source in them.
        """
        sources = self._sources
        parts = [(number, part) for number, part in parts if sources[part.source].objects is None]
        index_rows = chain.from_iterable(sources[source].rows for source in {part.source for _, part in parts})
        if not all(is_enterable(name) and has for name, has in {(row.format, row.has_offsets) for row in index_rows}):
            return {}
        count = self.rounds_count(order)
        chosen: dict[tuple[int, int], list[SampleAddress]] = {}
        runs_bytes = chosen_bytes = 0.0
        for number, part in parts:
            turns = order.sources_of(number, rounds[number], count)
            addresses = _next_to_leave(part, int(np.count_nonzero(turns == part.source)))
            sample_bytes = self._sample_bytes[part.source]
            runs_bytes += part.run_count * sample_bytes
            chosen_bytes += len(addresses) * sample_bytes
            if addresses:
                chosen[number, part.source] = addresses
        pays = runs_bytes >= max(RUNS_BYTES_MIN, RUNS_PER_PREFETCH_MIN * chosen_bytes)
        return chosen if pays and chosen_bytes <= self._reading.pinned_bytes_max else {}

    def read(
        self, chosen: Mapping[tuple[int, int], Sequence[SampleAddress]]
    ) -> dict[tuple[int, int], PrefetchedSamples]:
        """Read the samples that were chosen. If one is corrupt, none are given: its lane reports it when its turn comes.

        Raises:
            StoreError: One cannot be read.
        """
        arrived: dict[SampleAddress, tuple[Sample, SampleSource]] = {}
        try:
            for samples, data in _bytes_of(self.ranges(chosen)):
                self._reading.meter.bytes += len(data)
                arrived.update(_parsed(samples, data, self._reading.fields[samples.source]))
            return {
                key: PrefetchedSamples(
                    [arrived[each][0] for each in addresses], [arrived[each][1] for each in addresses]
                )
                for key, addresses in chosen.items()
            }
        except (DataError, KeyError):
            return {}

    def ranges(self, chosen: Mapping[tuple[int, int], Sequence[SampleAddress]]) -> Iterator[SampleRange]:
        """What to request for the samples that were chosen, shard by shard, as the indexes of the shards arrive."""
        by_source: dict[int, dict[int, list[int]]] = {}
        for address in chain.from_iterable(chosen.values()):
            by_source.setdefault(address.source, {}).setdefault(address.shard, []).append(address.sample)
        for source, wanted in by_source.items():
            shards = self._sources[source].shards
            arriving = self._indexes.load(source, [number % len(shards) for number in wanted])
            for number, known in zip(wanted, arriving, strict=True):
                shard = shards[number % len(shards)]
                yield from _near_ranges(shard, known, sorted(wanted[number]), source=source, number=number)


def _next_to_leave(part: LanePart, count: int) -> list[SampleAddress]:
    locations = part.order.locations(part.lane, part.taken_count, count)
    pairs = zip(locations.shards.tolist(), locations.samples.tolist(), strict=True)
    return [SampleAddress(part.source, shard, sample) for shard, sample in pairs]


def _near_ranges(
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


def _bytes_of(ranges: Iterable[SampleRange]) -> Iterator[tuple[SampleRange, Buffer]]:
    """The bytes of each range, as they arrive; each is requested as soon as `ranges` gives it.

    Raises:
        StoreError: One cannot be read.
        ChecksumError: One is not what was indexed.
    """
    for store, group in groupby(ranges, key=attrgetter("shard.store")):
        from penstock.index import Verifier  # imported here, because most epochs prefetch nothing

        operations = ((each, Get(each.shard.key, each.span, each.shard.etag)) for each in group)
        for samples, completion in perform_many(store, operations, requests_max=REQUESTS_MAX):
            Verifier(samples.known, first_sample=samples.first, url=samples.shard.url).feed(completion.body)
            yield samples, completion.body


def _parsed(
    samples: SampleRange, data: Buffer, fields: frozenset[str] | None
) -> dict[SampleAddress, tuple[Sample, SampleSource]]:
    """The samples of a range, and the segment that stands for where they came from.

    Raises:
        DataError: They are corrupt.
    """
    shard = samples.shard
    origin = ShardSegment(shard, -1, format_name=samples.format, source=samples.source)
    parser = parser_of(with_fields(samples.format, fields), shard=shard.url, start_offset_bytes=samples.span.start)
    parsed = [*parser.feed(data), *parser.finish()]
    return {
        SampleAddress(samples.source, samples.number, number): (sample, origin)
        for number, sample in enumerate(parsed, samples.first)
    }


class PrefetchedLane:
    """A lane whose next samples are here already; a ``SampleLane``.

    The rest of it is opened when it is needed: until then, it takes neither the network nor the interpreter from the
    first batch.

    Args:
        number: Number of the lane.
        prefetched: The samples that it hands out first.
        open_rest: Opens the lane after them.
    """

    def __init__(self, number: int, prefetched: PrefetchedSamples, open_rest: Callable[[], Lane]) -> None:
        self.number = number
        self._samples, self._origins = prefetched
        self._open_rest = open_rest
        self._lane: Lane | None = None
        self._opening = threading.Lock()
        self._closed = False

    def prepare(self, count: int) -> int:
        """Have `count` samples ready to be taken; how many are, fewer only at the lane's end."""
        here = len(self._samples)
        return here if count <= here else here + self._rest().prepare(count - here)

    def take(self, count: int) -> SourcedSamples:
        """The next `count` samples, which ``prepare`` has made ready."""
        samples, self._samples = self._samples[:count], self._samples[count:]
        origins, self._origins = self._origins[:count], self._origins[count:]
        if len(samples) < count:
            more, more_origins = self._rest().take(count - len(samples))
            return joined(samples, more), origins + more_origins
        return samples, origins

    @property
    def is_waiting(self) -> bool:
        """Whether no sample after those that are here can be taken before more bytes have arrived."""
        return self._rest().is_waiting

    def read_more(self) -> None:
        """Take in one more part after the samples that are here."""
        self._rest().read_more()

    def close(self) -> None:
        """Cancel what is being read; from any thread, idempotent."""
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
