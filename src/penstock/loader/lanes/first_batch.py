"""``FirstBatchPrefetch``: reads the samples of the first batch by themselves, so that it does not wait for complete runs.

An index says which samples of a run are handed out first, and where they lie. They are all requested together, before the
rest of their runs. The order is the same, and the first batch is complete after a round trip; its bytes are read twice. An
epoch that is resumed within its runs begins in the same way.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from itertools import chain, groupby
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.config import MIB
from penstock.errors import ClosedError, DataError
from penstock.formats import FORMATS, joined, narrowed, parser_of, with_fields, without_content
from penstock.loader.lanes.segments import ShardSegment
from penstock.loader.position import RunStart
from penstock.memory.ranges import REQUEST_COST_BYTES, near_groups
from penstock.sources.shards import gap_bytes_of, may_pay, wanted_spans
from penstock.store.inflight import perform_many
from penstock.types import ByteRange, Get

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from penstock.formats import Sample
    from penstock.index import ShardIndex
    from penstock.loader.lanes.lane import Lane
    from penstock.loader.lanes.segments import ReadOptions, SampleSource, SourcedSamples
    from penstock.order import IndexedOrder, MixOrder
    from penstock.order import Segment as Stored
    from penstock.sources.shards import DataSource, Shard
    from penstock.types import Buffer


class LanePart(NamedTuple):
    """The rest of one source in a lane, from the run on that holds its next sample.

    Attributes:
        source: Number of the source.
        order: The order of its current pass.
        lane: Number of the lane in that order.
        start: The run; if nothing is permuted, the sample itself.
        given_count: Number of samples of the run that were handed out before.
        remaining_count: Number of samples from there to the end of the pass.
        run_count: Number of samples in the run; 0 if nothing is permuted.
        stored: The samples to read, as runs of samples in shards.
    """

    source: int
    order: IndexedOrder
    lane: int
    start: RunStart
    given_count: int
    remaining_count: int
    run_count: int
    stored: list[Stored]

    @property
    def taken_count(self) -> int:
        """Number of samples of the lane that were handed out before in this pass."""
        return self.start.before_count + self.given_count


def parts_of(order: IndexedOrder | MixOrder, number: int, round_index: int) -> Iterator[LanePart]:
    """The rest of each source in a lane after its first `round_index` samples; sources without further samples are left out."""
    for source, taken in enumerate(order.taken(number, round_index)):
        part = part_of(order, number, source, taken)
        if part.remaining_count:
            yield part


def part_of(order: IndexedOrder | MixOrder, number: int, source: int, taken: int) -> LanePart:
    """The rest of one source in a lane, after the first `taken` samples that the lane takes from it."""
    place = order.source_at(source, number, taken)
    lane, remaining_count = place.lane, place.order.lane_length(place.lane) - place.taken
    if place.order.shuffled and remaining_count > 0:
        run_index, given_count = place.order.run_at(lane, place.taken)
        start = RunStart(run_index, None, 0, 0, place.order.run_start(lane, run_index))
    else:
        given_count, start = 0, RunStart(0, None, 0, 0, place.taken)
    run_count = place.order.run_length(lane, start.run_index) if place.order.shuffled else 0
    stored_count = place.order.lane_length(lane) - start.before_count
    stored = place.order.segments(lane, start.before_count, stored_count) if remaining_count > 0 else []
    return LanePart(source, place.order, lane, start, given_count, remaining_count, run_count, stored)


def passes_of(order: IndexedOrder | MixOrder, number: int, source: int, needed: int) -> Iterator[tuple[LanePart, int]]:
    """The parts of a source that a lane opens for its first `needed` samples, and how many of them each may give."""
    taken = 0
    while (part := part_of(order, number, source, taken)).remaining_count:
        yield part, needed - taken
        taken += part.remaining_count
        if taken >= needed:
            return


def positions_between(order: IndexedOrder | MixOrder, position: int, stop: int) -> range:
    """The rank's positions in [position, stop)."""
    return range(position + (order.rank - position) % order.world_size, stop, order.world_size)


def round_of(lane: int, position: int, order: IndexedOrder | MixOrder) -> int:
    """The first round in which a lane has a position of at least `position`: so many of its samples lie before."""
    return max(0, -((lane - position) // order.lanes_count))


class ShardIndexes:
    """The indexes of shards that say where their samples lie; each is loaded once, when it is first needed.

    Args:
        sources: The sources.

    Cost: one small read, and 12 bytes for each sample, for each shard that is loaded.
    """

    def __init__(self, sources: Sequence[DataSource]) -> None:
        self._sources = sources
        self._loaded: dict[tuple[int, int], ShardIndex] = {}

    def load(self, source: int, shards: Sequence[int]) -> Iterator[ShardIndex]:
        """The indexes of some shards of a source, in order, as they arrive; all missing ones are requested at once."""
        loaded, rows, place = self._loaded, self._sources[source].rows, self._sources[source].place
        missing = [shard for shard in dict.fromkeys(shards) if (source, shard) not in loaded]
        assert place is not None
        arriving = zip(missing, place.load_shards([rows[shard] for shard in missing]), strict=True)
        for shard in shards:
            while (source, shard) not in loaded:
                arrived, index = next(arriving)
                loaded[source, arrived] = index
            yield loaded[source, shard]

    def load_for(self, parts: Iterable[LanePart], fields: Sequence[frozenset[str] | None]) -> None:
        """Load the indexes of shards that `parts` do not read whole: only some of their samples, or only some fields.

        Args:
            parts: Parts that lanes are going to read.
            fields: Fields to read, by source; None: all.
        """
        needed: dict[int, set[int]] = {}
        for part in parts:
            source = self._sources[part.source]
            for stored in part.stored if source.place is not None else ():
                shard = stored.shard % len(source.shards)
                row = source.rows[shard]
                is_part = row.has_offsets and stored.samples_count < row.samples_count
                if is_part or may_pay(source.shards[shard], row, fields[part.source]):
                    needed.setdefault(part.source, set()).add(shard)
        for number, shards in needed.items():
            for _ in self.load(number, sorted(shards)):
                pass

    def segments(self, part: LanePart, fields: frozenset[str] | None) -> list[ShardSegment]:
        """The ranges of shards to read for a part, by the indexes that were loaded.

        Args:
            part: Part that a lane is going to read.
            fields: Fields to read; None: all.
        """
        return [self._segment(part.source, stored, number, fields) for number, stored in enumerate(part.stored)]

    def _segment(self, source: int, stored: Stored, number: int, fields: frozenset[str] | None) -> ShardSegment:
        """The bytes of a shard to read for some of its samples: a range if the index knows it, else the shard from its head."""
        data = self._sources[source]
        shard_number = stored.shard % len(data.shards)
        shard, row, place = data.shards[shard_number], data.rows[shard_number], data.place
        known = self._loaded.get((source, shard_number))
        first, count = stored.first, stored.samples_count
        # the offsets in an index hold for its own format; a job that says more about the content of records changes none
        is_of_index = shard.format is None or without_content(shard.format) == without_content(row.format)
        has_bounds = is_of_index and row.has_offsets and FORMATS[row.format].unit == "sample"
        segment = ShardSegment(
            shard,
            number,
            count=count,
            bounds=(lambda: place.load_shard(row).offsets) if has_bounds and place is not None else None,
            format=row.format,
            source=source,
        )
        if not has_bounds or known is None or known.offsets is None:
            segment.skip_count = first
            return segment
        segment.first_sample = first
        segment.offset_bytes = int(known.offsets[first]) if first else 0
        segment.end_bytes = int(known.offsets[first + count]) if first + count < row.samples_count else None
        if fields is not None and may_pay(shard, row, fields):
            segment.spans = wanted_spans(known, first, count, fields=fields, gap_bytes=gap_bytes_of(shard))
        return segment


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


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstBatchPrefetch:
    """Chooses and reads the samples of the first batch.

    Attributes:
        sources: The sources.
        indexes: Says where samples lie.
        reading: Options of lanes for reading.
        positions_count: Number of positions of the first batch, of all ranks.
    """

    sources: Sequence[DataSource]
    indexes: ShardIndexes
    reading: ReadOptions
    positions_count: int

    def rounds_count(self, order: IndexedOrder | MixOrder) -> int:
        """Number of samples that each lane gives to the first batch."""
        return -(-self.positions_count // order.lanes_count)

    def choose(
        self, order: IndexedOrder | MixOrder, rounds: Mapping[int, int], parts: Sequence[tuple[int, LanePart]]
    ) -> dict[tuple[int, int], list[SampleAddress]]:
        """The samples to read, by lane and source; none if it does not pay.

        Args:
            order: The order of the epoch.
            rounds: By lane, the number of samples that it has handed out before.
            parts: Numbers of lanes, and the rest of each source in them.
        """
        sources, sizes = self.sources, [source.sample_bytes for source in self.sources]
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
            sample_bytes = sizes[part.source]
            runs_bytes += part.run_count * sample_bytes
            chosen_bytes += len(addresses) * sample_bytes
            if addresses:
                chosen[number, part.source] = addresses
        pays = runs_bytes >= max(RUNS_BYTES_MIN, RUNS_PER_PREFETCH_MIN * chosen_bytes)
        return chosen if pays and chosen_bytes <= self.reading.pinned_bytes_max else {}

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
                self.reading.meter.bytes += len(data)
                arrived.update(_parsed(samples, data, self.reading.fields[samples.source]))
            return {
                key: PrefetchedSamples(
                    [arrived[each][0] for each in addresses], [arrived[each][1] for each in addresses]
                )
                for key, addresses in chosen.items()
            }
        except (DataError, KeyError):
            return {}

    def ranges(self, chosen: Mapping[tuple[int, int], Sequence[SampleAddress]]) -> Iterator[SampleRange]:
        """The requests for the chosen samples, shard by shard, as the indexes of the shards arrive."""
        by_source: dict[int, dict[int, list[int]]] = {}
        for address in chain.from_iterable(chosen.values()):
            by_source.setdefault(address.source, {}).setdefault(address.shard, []).append(address.sample)
        for source, wanted in by_source.items():
            shards = self.sources[source].shards
            arriving = self.indexes.load(source, [number % len(shards) for number in wanted])
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
    """The ranges of a shard to read for some of its samples, given ascending: near ones together."""
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
        ChecksumError: A sample differs from the index.
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
    origin = ShardSegment(shard, -1, format=samples.format, source=samples.source)
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
        """Cancel the reads in progress; from any thread, idempotent."""
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
