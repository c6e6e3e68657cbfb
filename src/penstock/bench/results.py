"""What a record says: a summary of each client, and what limits the training loop."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.bench.clients import PROBES, RAW, STEP_ALONE, UNDECODED
from penstock.text.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.bench.record import BenchRecord

WINDOW_BATCHES = 100
"""Batches of a window, as published measurements of training loops have them."""
NEARLY = 0.9
"""A rate that is this share of another one is as fast, on a machine that does other things, too."""
_PROBES = frozenset(entry.name for entry in PROBES)


class Spread(NamedTuple):
    """Median, minimum and maximum over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of at least one value."""
        found = sorted(values)
        return cls(statistics.median(found), found[0], found[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSummary:
    """The figures of one client with one combination of settings.

    Attributes:
        name: Name of the client.
        settings: The values of a sweep.
        is_ours: Whether it is penstock.
        samples_per_s: Samples per second from the first batch to the last.
        bytes_per_s: Bytes of the largest field per second, in the same time; of raw reading, bytes of shards.
        first_batch_s: Seconds until the first batch, from before the data set is made.
        window_s: Seconds for 100 batches: the mean of all complete windows but the first. If there are no two of them, 100
            times the mean batch.
        window_variance_s2: Variance between windows in square seconds; 0 if there are no two.
        stall_ratio: Share of the time in which the loop waited for batches.
        step_s: Mean seconds of a step.
        cpu_cores: CPU that the client and its processes used: 1 is one core.
        peak_bytes: Largest memory of them, PSS in bytes.
    """

    name: str
    settings: dict[str, Any]
    is_ours: bool
    samples_per_s: Spread
    bytes_per_s: Spread
    first_batch_s: Spread
    window_s: float
    window_variance_s2: float
    stall_ratio: Spread
    step_s: float
    cpu_cores: Spread
    peak_bytes: int

    @property
    def label(self) -> str:
        """Name and settings, for tables and plots."""
        settings = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{self.name} ({settings})" if settings else self.name

    @property
    def is_probe(self) -> bool:
        """Whether it is no client, but says what a part allows."""
        return self.name in _PROBES


def summarise(record: BenchRecord) -> list[ClientSummary]:
    """Return a summary of each client and combination of settings, the fastest first, probes before clients."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for turn in record.turns:
        if turn["batches"]:
            groups.setdefault((turn["name"], str(turn["settings"])), []).append(turn)
    found = [_summary(turns) for turns in groups.values()]
    return sorted(found, key=lambda each: (not each.is_probe, -each.samples_per_s.median))


def _summary(turns: list[dict[str, Any]]) -> ClientSummary:
    windows = [seconds for turn in turns for seconds in _windows(turn["times_s"])]
    batches = [
        (turn["times_s"][-1] - turn["times_s"][0]) / (turn["batches"] - 1) for turn in turns if turn["batches"] > 1
    ]
    steady = [_steady(turn) for turn in turns]
    mean_s = statistics.mean(batches or [turn["seconds"] / turn["batches"] for turn in turns])
    return ClientSummary(
        name=turns[0]["name"],
        settings=turns[0]["settings"],
        is_ours=turns[0]["is_ours"],
        samples_per_s=Spread.of(samples / seconds for samples, _, seconds in steady),
        bytes_per_s=Spread.of(size / seconds for _, size, seconds in steady),
        first_batch_s=Spread.of(turn["first_s"] for turn in turns),
        window_s=statistics.mean(windows) if windows else WINDOW_BATCHES * mean_s,
        window_variance_s2=statistics.variance(windows) if len(windows) > 1 else 0.0,
        stall_ratio=Spread.of(
            min(1.0, turn["stall_s"] / max(1e-9, turn["seconds"] - turn["first_s"])) for turn in turns
        ),
        step_s=statistics.mean(turn["step_s"] / turn["batches"] for turn in turns),
        cpu_cores=Spread.of(turn["cpu_s"] / turn["seconds"] for turn in turns),
        peak_bytes=max(turn["pss_bytes"] for turn in turns),
    )


def _windows(times_s: list[float]) -> list[float]:
    """Return the seconds of complete windows of 100 batches but the first."""
    ends = times_s[WINDOW_BATCHES - 1 :: WINDOW_BATCHES]
    return [later - earlier for earlier, later in pairwise(ends)]


def _steady(turn: dict[str, Any]) -> tuple[int, int, float]:
    """Return samples, bytes and seconds after the first batch; of a single batch, those of the whole turn."""
    seconds = turn["times_s"][-1] - turn["times_s"][0]
    if turn["batches"] < 2 or seconds <= 0:
        return turn["samples"], turn["bytes"], turn["seconds"]
    return turn["samples"] - turn["counts"][0], turn["bytes"] - turn["sizes"][0], seconds


@dataclass(frozen=True, slots=True)
class Verdict:
    """What limits the training loop.

    Attributes:
        limit: ``step``, ``store``, ``decoding``, ``reading``, or ``unknown`` if penstock was not measured.
        evidence: The figures that show it, as a sentence.
        advice: Sentences that say what to change.
    """

    limit: str
    evidence: str
    advice: str


def verdict(record: BenchRecord) -> Verdict:
    """Return what limits this data set on this machine, when it is read by the fastest way of penstock that was measured."""
    found = summarise(record)
    probes = {each.name: each for each in found if each.is_probe}
    ours = [each for each in found if each.is_ours and not each.is_probe]
    if not ours:
        return Verdict("unknown", "No way of penstock was measured.", "Leave out --clients.")
    best = ours[0]
    rate = best.samples_per_s.median
    shown = f"{best.label} delivers {rate:,.0f} samples/s"
    if STEP_ALONE.name in probes and rate >= NEARLY * probes[STEP_ALONE.name].samples_per_s.median:
        alone = probes[STEP_ALONE.name].samples_per_s.median
        return Verdict(
            "step",
            f"{shown}, the step alone takes {alone:,.0f}.",
            "Data is not the bottleneck: nothing needs to change.",
        )
    if UNDECODED.name in probes and probes[UNDECODED.name].samples_per_s.median * NEARLY > rate:
        undecoded = probes[UNDECODED.name].samples_per_s.median
        return Verdict(
            "decoding",
            f"{shown}, and {undecoded:,.0f} if it does not decode.",
            "Decode in more processes or on hosts with more cores, or store smaller pictures: penstock pack --resize.",
        )
    if RAW.name in probes:
        raw = probes[RAW.name].bytes_per_s.median
        if best.bytes_per_s.median >= 0.8 * raw or record.run["settings"]["decode"]:
            return Verdict(
                "store",
                f"{shown}, which is {format_bytes(best.bytes_per_s.median)}/s of the {format_bytes(raw)}/s that the store "
                "gives to this machine.",
                "Keep the data closer: a cache on the node's disk (Loader(cache=)), a smaller format, or a faster store.",
            )
        return Verdict(
            "reading",
            f"{shown} or {format_bytes(best.bytes_per_s.median)}/s, and the store gives {format_bytes(raw)}/s.",
            "Pack samples into shards (penstock pack), or read in processes: Loader(processes=).",
        )
    return Verdict("unknown", f"{shown}.", "Leave out --clients, so that the store is measured alone, too.")
