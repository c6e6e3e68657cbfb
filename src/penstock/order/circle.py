"""Which source of a mix is next, in closed form: sources own arcs of a circle, and each lane walks around it in equal steps.

The circle has M = L * 2**24 units, 2**24 for each lane. The arcs of the sources lie end to end, and their lengths are the
weights. In round j (at its j-th sample, from 0) lane l stands at the point::

    phase(l) + j * STEP  mod M        phase(l) = (q * l mod L) * 2**24,   STEP = -q * 2**24 + GOLDEN

where q is coprime to L and near 0.618 L, and GOLDEN is 0.382 * 2**24, made odd. The source whose arc contains the point is
next.

*Rounds.* In any round the L lanes stand at L equally spaced points, so an arc of weight w contains floor or ceil of w * L of
them: in every round of L positions (from a multiple of L on) each source is within one sample of its weight. This holds for
any number of sources, and for adjacent sources together (a nested mix). GOLDEN turns the points against the arcs by an
irrational part of their distance, so that rounding alternates between up and down and does not add up.
*Lanes.* From one round to the next the whole circle is rotated by about 0.382, the golden angle, so a single lane keeps the
proportions too, within a few samples at any time (measured: 5).
*L positions across two rounds.* The point of lane l in round j + 1 is that of lane (l - 1) in round j, except for GOLDEN: from
round to round the points move up one lane. Such a window therefore has the L points except that one is missing, one occurs
twice, and all are shifted: within three samples. Permuted or golden phases are worse (docs/decisions/0008).

The number of visits of an arc before round j is the difference of two sums of floor((b + i * STEP) / M) over i < j, which
Euclid's algorithm computes in O(log M). Everything is exact: integers only, no floats.
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
"""Units of the circle per lane: weights are exact to 2**-24 / L, and M stays at or below 2**40 for 65 536 lanes."""

GOLDEN = int(UNITS * 0.381966011250105) | 1
CIRCLE_LANES_MAX = 1 << 16
_ROUNDS_PER_BLOCK = 1 << 20  # rounds * M <= 2**60 fits 64 bits


class Circle:
    """The circle of a job's lanes. It has no state: every method is a function of its arguments.

    Args:
        lanes_count: L, the number of lanes, in [1, 65 536].

    Attributes:
        units: M, the length of the circle.
    """

    __slots__ = ("_lane_step", "_lanes_count", "_step", "units")

    def __init__(self, lanes_count: int) -> None:
        self._lanes_count = lanes_count
        self._lane_step = _coprime_near(lanes_count)
        self.units = lanes_count * UNITS
        self._step = (GOLDEN - self._lane_step * UNITS) % self.units

    def arcs(self, weights: Sequence[Fraction]) -> tuple[int, ...]:
        """Return the ends of the arcs: source s owns ``[arcs[s], arcs[s + 1])``. The weights must add up to more than 0."""
        total = sum(weights)
        return (0, *(int(part * self.units / total) for part in accumulate(weights)))

    def sources(self, lane: int, round_index: int, arcs: Sequence[int], *, count: int) -> npt.NDArray[np.int64]:
        """Return the source of each of `count` rounds of a lane, from `round_index` on; int64[count]."""
        pieces = []
        for first in range(0, count, _ROUNDS_PER_BLOCK):
            rounds = np.arange(min(_ROUNDS_PER_BLOCK, count - first), dtype=np.int64)
            points = (self._point(lane, round_index + first) + rounds * self._step) % self.units
            pieces.append(np.searchsorted(arcs[1:], points, side="right"))
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def visits(self, lane: int, rounds: range, start: int, end: int) -> int:
        """Return how often a lane stands on the arc ``[start, end)`` in `rounds`. Cost: O(log M), about 20 µs."""
        if start == end or not rounds:
            return 0
        # floor((x - start) / M) - floor((x - end) / M) is 1 on the arc and 0 off it; M is added to keep b positive
        point = self._point(lane, rounds.start) + self.units
        count, units, step = len(rounds), self.units, self._step
        return floor_sum(count, units, step, point - start) - floor_sum(count, units, step, point - end)

    def round_after(self, lane: int, round_index: int, arc: tuple[int, int], *, visits: int) -> int:
        """Return the first round r such that a lane visits an arc `visits` times in the rounds [`round_index`, r).

        Args:
            lane: Number of the lane, from 0.
            round_index: Round from which visits count.
            arc: Start and end of the arc, which must not be empty.
            visits: Number of visits.

        Cost: about 10 times that of ``visits``.
        """
        start, end = arc

        def enough(rounds: int) -> bool:
            return self.visits(lane, range(round_index, round_index + rounds), start, end) >= visits

        guess = visits * self.units // (end - start)
        margin = 2 + 2 * self.units // (end - start)
        low = guess
        while low > 0 and enough(low):
            low, margin = max(0, low - margin), 2 * margin
        if low == 0 and enough(0):
            return round_index
        high = max(guess, low) + margin
        while not enough(high):
            low, high, margin = high, high + margin, 2 * margin
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if enough(middle) else (middle, high)
        return round_index + high

    def _point(self, lane: int, round_index: int) -> int:
        return (self._lane_step * lane % self._lanes_count * UNITS + round_index * self._step) % self.units


def floor_sum(count: int, modulus: int, step: int, start: int) -> int:
    """Return the sum of floor((start + i * step) / modulus) over i in [0, count).

    All arguments must be at least 0, and `modulus` at least 1.

    Cost: O(log modulus). Source: the number of lattice points below a line, reduced as in Euclid's algorithm.
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
    """Return the number coprime to L that is nearest to 0.618 L; 0 for one lane."""
    golden = round(lanes_count * 0.618033988749895)
    near = (q for away in range(lanes_count) for q in (golden + away, golden - away))
    return next(q for q in near if gcd(q, lanes_count) == 1) % lanes_count
