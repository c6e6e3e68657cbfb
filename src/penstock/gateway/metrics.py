"""Counters and gauges of one gateway process. ``serving/`` adds up those of all processes and shows them."""

from __future__ import annotations

from collections import defaultdict

LabelledName = tuple[str, tuple[tuple[str, str], ...]]


class Metrics:
    """Numbers by name and labels. Only the event loop's thread changes them, so nothing is locked.

    Attributes:
        counters: Sums that only grow; their names end with ``_total``.
        gauges: Values that rise and fall, such as requests in flight.
    """

    def __init__(self) -> None:
        self.counters: defaultdict[LabelledName, float] = defaultdict(float)
        self.gauges: defaultdict[LabelledName, float] = defaultdict(float)

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Add to a counter, e.g. ``add("penstock_gateway_transforms_total", access_point="train", outcome="ok")``."""
        self.counters[name, tuple(labels.items())] += value

    def move(self, name: str, value: float, **labels: str) -> None:
        """Add to a gauge; `value` may be negative."""
        self.gauges[name, tuple(labels.items())] += value
