"""Where a lane continues from a position of an indexed order, and which parts of the shards it reads from there.

An index describes a data set: which shards it has, how many samples they hold and, for each shard, where its samples lie.
The last is loaded only for shards that a lane does not read from end to end.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.formats import FORMATS, without_content
from penstock.loader.lanes.segments import ShardSegment
from penstock.loader.position import RunStart
from penstock.sources.selecting import gap_bytes_of, may_pay, wanted_spans

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from penstock.index import IndexPlace, ShardIndex, ShardRow
    from penstock.order import IndexedOrder, MixOrder
    from penstock.order import Segment as Stored
    from penstock.sources.data_source import DataSource
    from penstock.sources.shards import Shard


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
    stored = place.order.lane_segments(lane, start.before_count) if remaining_count > 0 else []
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
        """What to read of shards for a part, by the indexes that were loaded.

        Args:
            part: Part that a lane is going to read.
            fields: Fields to read; None: all.
        """
        return [self._segment(part.source, stored, number, fields) for number, stored in enumerate(part.stored)]

    def _segment(self, source: int, stored: Stored, number: int, fields: frozenset[str] | None) -> ShardSegment:
        data = self._sources[source]
        shard = stored.shard % len(data.shards)
        return segment_of(
            stored,
            number,
            shard=data.shards[shard],
            row=data.rows[shard],
            place=data.place,
            known=self._loaded.get((source, shard)),
            fields=fields,
            source=source,
        )


def segment_of(
    stored: Stored,
    number: int,
    *,
    shard: Shard,
    row: ShardRow,
    place: IndexPlace | None,
    known: ShardIndex | None,
    fields: frozenset[str] | None,
    source: int,
) -> ShardSegment:
    """What to read of a shard for some of its samples: a range of bytes if the index knows it, else the shard from its head.

    Args:
        stored: The samples.
        number: Number of the segment in its lane.
        shard: The shard that holds them.
        row: The row of the shard in the index.
        place: Where the index of the shard lies.
        known: Index of the shard, if it was loaded.
        fields: Fields to read; None: all.
        source: Number of the source.
    """
    first, count = stored.first, stored.samples_count
    # the offsets in an index hold for its own format; a job that says more about the content of records changes none
    is_of_index = shard.format is None or without_content(shard.format) == without_content(row.format)
    has_bounds = is_of_index and row.has_offsets and FORMATS[row.format].unit == "sample"
    segment = ShardSegment(
        shard,
        number,
        count=count,
        bounds=partial(_bounds, place, row) if has_bounds and place is not None else None,
        format_name=row.format,
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


def _bounds(place: IndexPlace, row: ShardRow) -> Any:
    """int64[samples + 1]: where the samples of a shard begin and end. Cost: a small read."""
    return place.load_shard(row).offsets
