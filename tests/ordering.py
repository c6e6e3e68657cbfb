"""Orders written the simple way, for tests that compare the closed forms with them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.order import IndexedOrder, MixOrder, Segment, StreamOrder

Element = TypeVar("Element")


def round_robin(lanes: Iterable[Iterable[Element]]) -> Iterator[Element]:
    """Take one element of each lane in turn, until all lanes are exhausted."""
    waiting = deque(map(iter, lanes))
    while waiting:
        lane = waiting.popleft()
        for element in lane:
            yield element
            waiting.append(lane)
            break


def position_of(order: IndexedOrder | MixOrder | StreamOrder, lane: int, index: int) -> int:
    """Return the position in the job's order of the `index`-th sample that leaves `lane`."""
    return index * order.lanes_count + lane


def runs_count(order: IndexedOrder, lane: int) -> int:
    """Return the number of runs in a lane; 0 if the lane is empty."""
    length = order.lane_length(lane)
    return order.run_at(lane, length - 1)[0] + 1 if length else 0


def run_segments(order: IndexedOrder, lane: int, run_index: int) -> list[Segment]:
    """Return the segments of a run, in reading order."""
    return order.segments(lane, order.run_start(lane, run_index), order.run_length(lane, run_index))
