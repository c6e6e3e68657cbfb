"""Quantiles of recent measurements: cheap to update, and exact enough to read."""

from __future__ import annotations

import math


class Recent:
    """The most recent numbers, and their quantiles. Contention between threads may lose a few numbers.

    Args:
        count: Number of values to keep.

    Cost: about 0.1 µs for each number added.
    """

    __slots__ = ("_count", "_next", "_values")

    def __init__(self, count: int) -> None:
        self._count = count
        self._next = 0
        self._values: list[float] = []

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        """Add a number; it replaces the oldest one if there are `count` already."""
        values = self._values
        if len(values) < self._count:
            values.append(value)
        else:
            index = self._next % self._count
            values[index] = value
            self._next = index + 1

    def quantile(self, q: float) -> float:
        """Return the `q`-quantile by nearest rank, or ``nan`` if there are no numbers. Cost: sorting `count` numbers."""
        values = sorted(self._values)
        if not values:
            return math.nan
        return values[min(len(values) - 1, int(q * len(values)))]
