"""A lane of a mix: the lanes of its sources, side by side, in the turns that the order gives."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from penstock.formats import Sample
    from penstock.loader.lanes.feed import AnyLane, Items, Where
    from penstock.loader.lanes.lane import RunStart
    from penstock.order import Mix

TURNS_COUNT = 512
"""Turns that are asked for at once: one answer costs as much as some hundred of them."""

OpenLane: TypeAlias = "Callable[[int, int], tuple[AnyLane, int]]"
"""``open_lane(source, taken)``: a source's own lane from its `taken`-th sample on, and how many samples it has from
there to the end of the source, or of that pass over it."""


class MixedLane:
    """One lane of a mix, from a row on.

    Args:
        number: Of the lane.
        order: Says whose turn it is.
        row: Samples of this lane that left before.
        open_lane: Opens the sources' lanes.
    """

    def __init__(self, number: int, *, order: Mix, row: int, open_lane: OpenLane) -> None:
        self.number = number
        self._order = order
        self._row = row
        self._open_lane = open_lane
        self._opened_to = list(order.taken(number, row))  # of each source: samples before those of lanes to be opened
        self._lanes: list[deque[_Pass]] = [deque() for _ in self._opened_to]
        self._turns: NDArray[np.int64] = np.empty(0, np.int64)  # from `_row` on
        try:
            for source in np.unique(self._turns_of(TURNS_COUNT)).tolist():
                self._open(source)
        except BaseException:
            self.close()
            raise

    def prepare(self, count: int) -> int:
        """As ``Lane.prepare``."""
        turns = self._turns_of(count)
        for source, wanted in enumerate(np.bincount(turns, minlength=len(self._lanes)).tolist()):
            if wanted:
                self._prepare(source, wanted)
        return len(turns)

    def take(self, count: int) -> Items:
        """As ``Lane.take``."""
        turns = self._turns_of(count).tolist()
        taken = {}
        for source in set(turns):
            samples, taken_from = self._take(source, turns.count(source))
            taken[source] = iter(samples), iter(taken_from)
        self._turns = self._turns[count:]
        self._row += count
        return [next(taken[source][0]) for source in turns], [next(taken[source][1]) for source in turns]

    def mark(self) -> tuple[RunStart, int]:
        """Refused: where a mix is follows from the position alone."""
        raise ConfigError("a mix is read with an index, where positions say it all")

    @property
    def is_waiting(self) -> bool:
        """As ``Lane.is_waiting``, of any source."""
        return any(each.lane.is_waiting for lanes in self._lanes for each in lanes)

    def read_more(self) -> None:
        """As ``Lane.read_more``, for each source that waits."""
        for lanes in self._lanes:
            for each in lanes:
                if each.lane.is_waiting:
                    each.lane.read_more()

    def close(self) -> None:
        """As ``Lane.close``."""
        for lanes in self._lanes:
            for each in list(lanes):
                each.lane.close()

    def _turns_of(self, count: int) -> NDArray[np.int64]:
        """Whose turns the next `count` are; fewer at the lane's end."""
        if len(self._turns) < count:
            self._turns = self._order.sources_of(self.number, self._row, max(count, TURNS_COUNT))
        return self._turns[:count]

    def _open(self, source: int) -> None:
        lane, left = self._open_lane(source, self._opened_to[source])
        self._lanes[source].append(_Pass(lane, left))
        self._opened_to[source] += left

    def _prepare(self, source: int, count: int) -> None:
        """Have `count` samples of a source ready, those of its next pass included where this one ends."""
        lanes = self._lanes[source]
        index = 0
        while count:
            if index == len(lanes):
                self._open(source)
            each = lanes[index]
            here = min(count, each.left)
            each.lane.prepare(here)
            count -= here
            index += 1

    def _take(self, source: int, count: int) -> Items:
        lanes = self._lanes[source]
        samples: list[Sample] = []
        taken_from: list[Where] = []
        while count:
            each = lanes[0]
            here = min(count, each.left)
            more, more_from = each.lane.take(here)
            samples += more
            taken_from += more_from
            each.left -= here
            count -= here
            if not each.left:
                lanes.popleft().lane.close()
        return samples, taken_from


class _Pass:
    """A lane of a source, in one pass over it, and what is left there."""

    __slots__ = ("lane", "left")

    def __init__(self, lane: AnyLane, left: int) -> None:
        self.lane = lane
        self.left = left
