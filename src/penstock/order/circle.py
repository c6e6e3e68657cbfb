"""Whose turn it is, in closed form: sources own arcs of a circle, and a lane walks round it in equal steps.

The circle has M = L * 2**24 units, 2**24 for each lane. The sources' arcs lie end to end, as long as their weights. In its
row j (its j-th sample, from 0) lane l stands at::

    phase(l) + j * STEP  mod M        phase(l) = (q * l mod L) * 2**24,   STEP = -q * 2**24 + GOLDEN

where q is coprime to L and near 0.618 L, and GOLDEN is 0.382 * 2**24, made odd; the source whose arc it stands on is next.

*Rows.* In any row the L lanes stand at L equally spaced points, so an arc of weight w holds floor or ceil of w * L of them:
every row of L positions (from a multiple of L) has each source within one sample of its weight, for any number of
sources, and for any neighbouring ones together (a nested mix). GOLDEN turns the points against the arcs by an
irrational part of their distance, so rounding goes up and down in turn, and does not add up.
*Lanes.* From one row to the next the whole circle is rotated by about 0.382, the golden angle, so a single lane has the
proportions too, within a few samples at any time (measured: 5).
*L positions across two rows.* Lane l's point in row j + 1 is lane (l - 1)'s in row j, but for GOLDEN: from row to row the
points move up one lane. So such a window has the L points but for one that is missing and one that is double, and for
a shift: within three samples. Permuted or golden phases do worse (docs/decisions/0008).

How often an arc was visited before row j is the difference of two sums of floor((b + i * STEP) / M) over i < j, which
Euclid's algorithm gives in O(log M). All is exact: integers, no floats.
"""

from __future__ import annotations

from itertools import accumulate
from math import gcd
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from fractions import Fraction

    import numpy.typing as npt

UNITS = 1 << 24
"""Of the circle, per lane: a weight is held to 2**-24 / L, and M stays below 2**40 for 65 536 lanes."""

GOLDEN = int(UNITS * 0.381966011250105) | 1
CIRCLE_LANES_MAX = 1 << 16
_ROWS_PER_STRETCH = 1 << 20  # rows * M < 2**60 fits 64 bits


class Circle:
    """The circle of a job's lanes. Stateless: every method is a function of its arguments.

    Args:
        lanes_count: L, 1 to 65 536.
    """

    __slots__ = ("_lane_step", "_lanes_count", "_step", "units")

    def __init__(self, lanes_count: int) -> None:
        self._lanes_count = lanes_count
        self._lane_step = _coprime_near(lanes_count)
        self.units = lanes_count * UNITS
        self._step = (GOLDEN - self._lane_step * UNITS) % self.units

    def arcs(self, weights: Sequence[Fraction]) -> tuple[int, ...]:
        """Where the arcs end: source s owns ``[arcs[s], arcs[s + 1])``. Weights add up to more than 0."""
        total = sum(weights)
        return (0, *(int(part * self.units / total) for part in accumulate(weights)))

    def sources(self, lane: int, row: int, arcs: Sequence[int], *, count: int) -> npt.NDArray[np.int64]:
        """Whose turn it is in `count` rows of a lane, from `row` on; int64[count]."""
        pieces = []
        for first in range(0, count, _ROWS_PER_STRETCH):
            rows = np.arange(min(_ROWS_PER_STRETCH, count - first), dtype=np.int64)
            points = (self._point(lane, row + first) + rows * self._step) % self.units
            pieces.append(np.searchsorted(arcs[1:], points, side="right"))
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def visits(self, lane: int, rows: range, start: int, end: int) -> int:
        """How often a lane stands on the arc ``[start, end)`` in `rows`. Cost: O(log M), about 20 us."""
        if start == end or not rows:
            return 0
        # floor((x - start) / M) - floor((x - end) / M) is 1 on the arc and 0 off it; M is added to keep b positive
        point = self._point(lane, rows.start) + self.units
        count, units, step = len(rows), self.units, self._step
        return floor_sum(count, units, step, point - start) - floor_sum(count, units, step, point - end)

    def row_after(self, lane: int, row: int, arc: tuple[int, int], *, visits: int) -> int:
        """The first row at or after `row` before which the arc was visited `visits` times since `row`.

        The arc is not empty. Cost: about 10 times that of ``visits``.
        """
        start, end = arc

        def enough(rows: int) -> bool:
            return self.visits(lane, range(row, row + rows), start, end) >= visits

        guess = visits * self.units // (end - start)
        margin = 2 + 2 * self.units // (end - start)
        low = guess
        while low > 0 and enough(low):
            low, margin = max(0, low - margin), 2 * margin
        if low == 0 and enough(0):
            return row
        high = max(guess, low) + margin
        while not enough(high):
            low, high, margin = high, high + margin, 2 * margin
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if enough(middle) else (middle, high)
        return row + high

    def _point(self, lane: int, row: int) -> int:
        return (self._lane_step * lane % self._lanes_count * UNITS + row * self._step) % self.units


def floor_sum(count: int, modulus: int, step: int, start: int) -> int:
    """Sum of floor((start + i * step) / modulus) over i in [0, count); all at least 0, `modulus` at least 1.

    Cost: O(log modulus). Source: the lattice points below a line, reduced as in Euclid's algorithm.
    """
    total, sign = 0, 1
    while count:
        total += sign * ((count - 1) * count // 2 * (step // modulus) + count * (start // modulus))
        step, start = step % modulus, start % modulus
        top = step * count + start
        if top < modulus:
            break
        count, start, modulus, step = top // modulus, top % modulus, step, modulus
    return total


def _coprime_near(lanes_count: int) -> int:
    """The number coprime to L that is nearest to 0.618 L; 0 for one lane."""
    golden = round(lanes_count * 0.618033988749895)
    near = (q for away in range(lanes_count) for q in (golden + away, golden - away))
    return next(q for q in near if gcd(q, lanes_count) == 1) % lanes_count
