"""Counters, gauges and histograms of one gateway process. ``serving/`` adds up those of all processes and shows them."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

LabelledName = tuple[str, tuple[tuple[str, str], ...]]

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the buckets of every histogram, in seconds; the last bucket has none."""


class Histogram:
    """Counts durations in the buckets of ``BOUNDS_S``.

    Attributes:
        counts: Number of durations in each bucket.
        sum_s: Sum of all durations, in seconds.
    """

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, duration_s: float) -> None:
        """Add one duration."""
        self.counts[bisect_left(BOUNDS_S, duration_s)] += 1
        self.sum_s += duration_s


class Metrics:
    """Numbers by name and labels. Only the event loop's thread changes them, so nothing is locked.

    Attributes:
        counters: Sums that only grow; their names end with ``_total``.
        gauges: Values that rise and fall, such as requests in flight.
        histograms: Distributions of durations; their names end with ``_seconds``.
    """

    def __init__(self) -> None:
        self.counters: defaultdict[LabelledName, float] = defaultdict(float)
        self.gauges: defaultdict[LabelledName, float] = defaultdict(float)
        self.histograms: defaultdict[LabelledName, Histogram] = defaultdict(Histogram)

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Add to a counter, e.g. ``add("penstock_gateway_transforms_total", access_point="train", outcome="ok")``."""
        self.counters[name, tuple(labels.items())] += value

    def move(self, name: str, value: float, **labels: str) -> None:
        """Add to a gauge; `value` may be negative."""
        self.gauges[name, tuple(labels.items())] += value
