"""Parts of lanes: where in its samples, and in which run, a lane goes on from a position of the order."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.formats import FORMATS, without_content
from penstock.loader.lanes.first_batch import SampleAddress
from penstock.loader.lanes.segments import ShardSegment
from penstock.loader.position import RunStart
from penstock.sources.selecting import gap_bytes_of, may_pay, wanted_spans

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.index import IndexPlace, ShardIndex, ShardRow
    from penstock.order import IndexedOrder, MixOrder
    from penstock.order import Segment as Stored
    from penstock.sources.shards import Shard


class LanePart(NamedTuple):
    """Of a lane: one source's samples, from the run on in which the next one lies.

    Attributes:
        source: Number of the source.
        order: Of its current pass.
        lane: In that order.
        start: The run, or where nothing is permuted the sample itself.
        skip_count: Samples of the run that left already.
        left_count: Samples from there to the end of the pass.
        run_count: Samples of the run; 0 where nothing is permuted.
        stored: What to read.
    """

    source: int
    order: IndexedOrder
    lane: int
    start: RunStart
    skip_count: int
    left_count: int
    run_count: int
    stored: list[Stored]

    def leading(self, count: int) -> list[SampleAddress]:
        """The next `count` samples that leave."""
        taken = self.start.before_count + self.skip_count
        locations = self.order.locations(self.lane, taken, count)
        return [
            SampleAddress(self.source, *each)
            for each in zip(locations.shards.tolist(), locations.samples.tolist(), strict=True)
        ]


def parts_of(order: IndexedOrder | MixOrder, number: int, row: int) -> Iterator[LanePart]:
    """Of a lane from a row on, all sources that have something left."""
    for source, taken in enumerate(order.taken(number, row)):
        part = part_of(order, number, source, taken)
        if part.left_count:
            yield part


def part_of(order: IndexedOrder | MixOrder, number: int, source: int, taken: int) -> LanePart:
    """A lane's samples of one source, `taken` of which have left."""
    place = order.source_at(source, number, taken)
    lane, left_count = place.lane, place.order.lane_length(place.lane) - place.taken
    if place.order.shuffled and left_count > 0:
        run_index, skip_count = place.order.run_at(lane, place.taken)
        start = RunStart(run_index, None, 0, 0, place.order.run_start(lane, run_index))
    else:
        skip_count, start = 0, RunStart(0, None, 0, 0, place.taken)
    run_count = place.order.run_length(lane, start.run_index) if place.order.shuffled else 0
    stored = place.order.lane_segments(lane, start.before_count) if left_count > 0 else []
    return LanePart(source, place.order, lane, start, skip_count, left_count, run_count, stored)


def led_rows(led_count: int, order: IndexedOrder | MixOrder) -> int:
    """Samples of each lane that lead, for so many positions."""
    return -(-led_count // order.lanes_count)


def positions_between(order: IndexedOrder | MixOrder, position: int, stop: int) -> range:
    """The rank's, of those in [position, stop)."""
    return range(position + (order.rank - position) % order.world_size, stop, order.world_size)


def row_of(lane: int, position: int, order: IndexedOrder | MixOrder) -> int:
    """Samples of a lane that have positions below `position`."""
    return max(0, -((lane - position) // order.lanes_count))


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
    """Where in its shard to read, in bytes where they are known, else from its head, as its format allows.

    Args:
        stored: The samples.
        number: Of the segment in its lane.
        shard: In which they lie.
        row: What the index of the data set says of it.
        place: Where that lies.
        known: The shard's own index, where somebody needed it.
        fields: That the pipeline looks at; None: all.
        source: Number of the source.
    """
    first, count = stored.first, stored.samples_count
    # the index knows where samples of its own format lie; what a job says of their content changes nothing in that
    is_of_index = shard.format is None or without_content(shard.format) == without_content(row.format)
    has_bounds = is_of_index and row.has_offsets and FORMATS[row.format].unit == "sample"
    made = ShardSegment(
        shard,
        number,
        count=count,
        bounds=partial(_bounds, place, row) if has_bounds and place is not None else None,
        format_name=row.format,
        source=source,
    )
    if not has_bounds or known is None or known.offsets is None:
        made.skip_count = first
        return made
    made.first_sample = first
    made.offset_bytes = int(known.offsets[first]) if first else 0
    made.end_bytes = int(known.offsets[first + count]) if first + count < row.samples_count else None
    if fields is not None and may_pay(shard, row, fields):
        made.spans = wanted_spans(known, first, count, fields=fields, gap_bytes=gap_bytes_of(shard))
    return made


def _bounds(place: IndexPlace, row: ShardRow) -> Any:
    """int64[samples + 1]: where the samples of a shard begin and end. Cost: a small read."""
    return place.load_shard(row).offsets
