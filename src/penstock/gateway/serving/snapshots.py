"""The numbers of one process at a moment, as JSON, and the sums over all processes."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from penstock.gateway.metrics import BOUNDS_S, LabelledName

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.gateway.metrics import Metrics

Snapshot = dict[str, Any]
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def take_snapshot(
    metrics: Metrics,
    *,
    counters: Mapping[LabelledName, float],
    gauges: Mapping[LabelledName, float],
    details: Mapping[str, Any],
) -> Snapshot:
    """Return the numbers of this process.

    Args:
        metrics: Counts of the parts of the gateway.
        counters: Counters that other parts of the package keep, e.g. the cache.
        gauges: Numbers that are read only now, e.g. the bytes in use of the budget.
        details: The facts that only the status page shows: live requests, errors.
    """
    return {
        "pid": os.getpid(),
        "counters": [[name, labels, value] for (name, labels), value in (*metrics.counters.items(), *counters.items())],
        "gauges": [[name, labels, value] for (name, labels), value in (*metrics.gauges.items(), *gauges.items())],
        "histograms": [[name, labels, each.counts, each.sum_s] for (name, labels), each in metrics.histograms.items()],
        **details,
    }


def memory_bytes() -> int:
    """Return the resident memory of this process."""
    with open("/proc/self/statm", "rb") as stream:  # noqa: PTH123 - no need of a Path for each look
        return int(stream.read().split()[1]) * _PAGE_BYTES


@dataclass(slots=True)
class Totals:
    """Sums over the processes of a gateway.

    Attributes:
        counters: Sums of the counters.
        gauges: Sums of the gauges.
        histograms: Sums of the histograms: numbers in each bucket of ``BOUNDS_S``, and the sum of durations.
        snapshots: The last snapshot of each living process.
        restarts: Number of processes that ended and were started again.
    """

    counters: dict[LabelledName, float] = field(default_factory=dict)
    gauges: dict[LabelledName, float] = field(default_factory=dict)
    histograms: dict[LabelledName, tuple[list[int], float]] = field(default_factory=dict)
    snapshots: list[Snapshot] = field(default_factory=list)
    restarts: int = 0

    def counter(self, name: str, **labels: str) -> float:
        """Return the sum of a counter over all labels that are not named."""
        wanted = set(labels.items())
        return sum(value for (each, given), value in self.counters.items() if each == name and wanted <= set(given))

    def gauge(self, name: str) -> float:
        """Return the sum of a gauge over all labels."""
        return sum(value for (each, _), value in self.gauges.items() if each == name)


class Peers(Protocol):
    """The processes of a gateway, as one of them sees them."""

    async def totals(self) -> Totals:
        """Return the sums over all processes. Raises ``TimeoutError`` if they do not answer in time."""


def add_up(snapshots: Iterable[Snapshot], *, ended: Iterable[Snapshot] = ()) -> Totals:
    """Return the sums over processes.

    Args:
        snapshots: The last snapshot of each living process.
        ended: The last snapshots of processes that ended. Their counters remain in the sums, so that counters only grow.
    """
    counters: defaultdict[LabelledName, float] = defaultdict(float)
    gauges: defaultdict[LabelledName, float] = defaultdict(float)
    histograms: dict[LabelledName, tuple[list[int], float]] = {}
    living, gone = list(snapshots), list(ended)
    for snapshot in (*living, *gone):
        for name, labels, value in snapshot["counters"]:
            counters[_key(name, labels)] += value
        for name, labels, counts, sum_s in snapshot["histograms"]:
            before, before_s = histograms.get(_key(name, labels), ([0] * (len(BOUNDS_S) + 1), 0.0))
            histograms[_key(name, labels)] = [a + b for a, b in zip(before, counts, strict=True)], before_s + sum_s
    for snapshot in living:
        for name, labels, value in snapshot["gauges"]:
            gauges[_key(name, labels)] += value
    return Totals(dict(counters), dict(gauges), histograms, living)


def fold(ended: Snapshot | None, last: Snapshot) -> Snapshot:
    """Return one snapshot that stands for several processes that ended: their counters and histograms."""
    totals = add_up([], ended=[last] if ended is None else [ended, last])
    return {
        "counters": [[name, labels, value] for (name, labels), value in totals.counters.items()],
        "gauges": [],
        "histograms": [[name, labels, *value] for (name, labels), value in totals.histograms.items()],
    }


def _key(name: str, labels: Iterable[Iterable[str]]) -> LabelledName:
    return name, tuple((each[0], each[1]) for each in map(tuple, labels))
