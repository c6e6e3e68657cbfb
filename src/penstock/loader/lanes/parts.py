"""Parts of lanes: where in its samples, and in which run, a lane goes on from a position of the order."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.loader.lanes.lane import RunStart
from penstock.loader.lanes.leading import Place

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.order import IndexedOrder, Mix
    from penstock.order import Segment as Stored


class Part(NamedTuple):
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

    def leading(self, count: int) -> list[Place]:
        """The next `count` samples that leave."""
        taken = self.start.before_count + self.skip_count
        leaving = self.order.leaving(self.lane, taken, count)
        return [
            Place(self.source, *each) for each in zip(leaving.shards.tolist(), leaving.samples.tolist(), strict=True)
        ]


def parts_of(order: IndexedOrder | Mix, number: int, row: int) -> Iterator[Part]:
    """Of a lane from a row on, all sources that have something left."""
    for source, taken in enumerate(order.taken(number, row)):
        part = part_of(order, number, source, taken)
        if part.left_count:
            yield part


def part_of(order: IndexedOrder | Mix, number: int, source: int, taken: int) -> Part:
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
    return Part(source, place.order, lane, start, skip_count, left_count, run_count, stored)


def led_rows(led_count: int, order: IndexedOrder | Mix) -> int:
    """Samples of each lane that lead, for so many positions."""
    return -(-led_count // order.lanes_count)


def positions_between(order: IndexedOrder | Mix, position: int, stop: int) -> range:
    """The rank's, of those in [position, stop)."""
    return range(position + (order.rank - position) % order.world_size, stop, order.world_size)


def row_of(lane: int, position: int, order: IndexedOrder | Mix) -> int:
    """Samples of a lane that have positions below `position`."""
    return max(0, -((lane - position) // order.lanes_count))
