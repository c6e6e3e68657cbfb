"""Statistics for people and programs: the bottleneck with a hint, Prometheus text, scalars for TensorBoard, a live line."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, Protocol, TextIO, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.loader.statistics import LoaderStatistics

LoaderPart: TypeAlias = Literal["consumer", "store", "parse", "decode"]

LINE_S_MIN = 0.5  # how often a live line is drawn on a terminal, where it overwrites itself...
LINE_PLAIN_S_MIN = 30.0  # ...and in a log file
_HINTS: dict[LoaderPart, str] = {
    "consumer": "the training loop sets the pace: nothing to change here",
    "store": "use more lanes, larger shards, a nearer store, or a cache on this node; look at the store's own statistics",
    "parse": "use fewer, larger members per sample, or processes=, which parse in parallel",
    "decode": "use more threads or processes, up to the number of cores; Image(height=, width=) scales while it decodes",
}
_CONTENDED = (
    "the loop's own Python and the loader's threads compete for one interpreter: in a step of {step_ms:.1f} ms, the loop ran "
    "for {own_ms:.1f} ms, and the threads ran for {threads_ms:.1f} ms after waiting for {waited_ms:.1f} ms; processes=1 moves "
    "them to a process of their own"
)
_GAUGES = ("threads_count", "slots_count", "stall_p50_s", "stall_p99_s")
_HELP = {
    "stall_s": "Seconds that the training loop waited for a batch.",
    "samples": "Samples handed out.",
    "bytes": "Bytes that arrived from the store.",
    "cache_hit_bytes": "Bytes that were read from the cache on this node's disk.",
    "cache_fetched_bytes": "Bytes that were requested from the store to fill the cache.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """The part that sets the pace, and the evidence for it. ``str`` of it is one line for people."""

    part: LoaderPart
    """The part. ``"consumer"`` is the training loop itself, as it should be."""
    stall_ratio: float
    """Share of the time that the training loop waited, in [0, 1]."""
    seconds: Mapping[str, float]
    """The evidence: seconds that the training loop waited (``stalled``); seconds that the reader waited for the store,
    parsed, and waited for decoding or the training loop; seconds that all decode threads decoded; CPU seconds of the
    training loop (``step``) and of the loader's threads (``threads``), and how long these threads waited for their turn
    (``contended``)."""
    hint: str
    """What to change."""

    def __str__(self) -> str:
        spent = ", ".join(f"{name} {value:.1f} s" for name, value in self.seconds.items())
        return f"{self.part}: the training loop waited {self.stall_ratio:.0%} of the time ({spent}). Hint: {self.hint}"


def bottleneck_of(statistics: LoaderStatistics) -> Bottleneck:
    """The part that sets the pace, with the evidence and a hint."""
    part = statistics.bottleneck
    seconds = {
        "stalled": statistics.stall_s,
        "store": statistics.store_s,
        "parse": statistics.parse_s,
        "decode": statistics.decode_s,
        "waited": statistics.wait_s,
        "step": statistics.step_cpu_s,
        "threads": statistics.threads_cpu_s,
        "contended": statistics.threads_wait_s,
    }
    hint = _contended(statistics) if statistics.contends and part != "store" else _HINTS[part]
    return Bottleneck(part=part, stall_ratio=statistics.stall_ratio, seconds=seconds, hint=hint)


def _contended(statistics: LoaderStatistics) -> str:
    """The hint for a loop that computes in Python beside the loader's threads, with its milliseconds per step."""
    ms = 1e3 / max(1, statistics.batches)
    return _CONTENDED.format(
        step_ms=statistics.elapsed_s * ms,
        own_ms=statistics.step_cpu_s * ms,
        threads_ms=statistics.threads_cpu_s * ms,
        waited_ms=statistics.threads_wait_s * ms,
    )


def prometheus(statistics: LoaderStatistics, *, epoch: int, labels: Mapping[str, str]) -> str:
    """All numbers in Prometheus' text format, version 0.0.4. Their names begin with ``penstock_loader_``."""
    given = ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items())
    lines = []

    def add(name: str, kind: str, value: float, *, described: str, more: str = "") -> None:
        full = f"penstock_loader_{name}"
        head = f"# HELP {full} {described}\n# TYPE {full} {kind}\n"
        where = ",".join(part for part in (given, more) if part)
        if head not in lines:
            lines.append(head)
        lines.append(f"{full}{{{where}}} {value}\n" if where else f"{full} {value}\n")

    add("epoch", "gauge", epoch, described="The epoch being iterated, from 0.")
    for entry in fields(statistics):
        value = getattr(statistics, entry.name)
        if entry.name == "dropped":
            for stage, count in value.items():
                described = "Samples left out for an error, by stage."
                add("dropped_total", "counter", count, described=described, more=f'stage="{_escaped(stage)}"')
        elif entry.name in _GAUGES:
            add(_named(entry.name), "gauge", value, described=entry.name.replace("_", " ") + ".")
        else:
            described = _HELP.get(entry.name, f"LoaderStatistics.{entry.name}.")
            add(f"{_named(entry.name)}_total", "counter", value, described=described)
    return "".join(lines)


def _named(name: str) -> str:
    """The name with its unit spelled out, as Prometheus does."""
    return name[:-2] + "_seconds" if name.endswith("_s") else name


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class ScalarWriter(Protocol):
    """TensorBoard's ``SummaryWriter``, or anything else with this method."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> object:
        """Write one number."""


def write_scalars(statistics: LoaderStatistics, writer: ScalarWriter, *, step: int, prefix: str) -> None:
    """Write the rates and ratios that are worth a curve."""
    for name in ("samples_per_s", "bytes_per_s", "stall_ratio", "stall_p50_s", "stall_p99_s"):
        writer.add_scalar(f"{prefix}{name}", getattr(statistics, name), step)


class LiveLine:
    """A line on a terminal that overwrites itself; in a log file, a new line now and then.

    Args:
        stream: Stream to write to; None is standard error.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._overwrites = self._stream.isatty()
        self._drawn_s = time.monotonic()
        self._before: tuple[float, LoaderStatistics] | None = None
        self._epoch_began: tuple[float, LoaderStatistics] | None = None
        self._is_open = False

    def begin(self, statistics: LoaderStatistics, *, now_s: float) -> None:
        """Begin an epoch, or continue one. What happened before is not counted."""
        self._epoch_began = self._before = now_s, statistics

    def summarise(self, statistics: LoaderStatistics, *, epoch: int, batches: int, now_s: float) -> None:
        """Write the numbers of the whole epoch, and end the line."""
        self._before = self._epoch_began
        self.draw(statistics, epoch=epoch, batch=batches, batches=batches, now_s=now_s)
        self.end()

    def draw(self, statistics: LoaderStatistics, *, epoch: int, batch: int, batches: int | None, now_s: float) -> None:
        """Write the numbers since the last line."""
        then_s, then = self._before if self._before is not None else (self._drawn_s, None)
        spent_s = max(now_s - then_s, 1e-9)
        samples = statistics.samples - (then.samples if then is not None else 0)
        size_bytes = statistics.bytes - (then.bytes if then is not None else 0)
        stall_s = statistics.stall_s - (then.stall_s if then is not None else 0.0)
        hits = statistics.cache_hit_count - (then.cache_hit_count if then is not None else 0)
        misses = statistics.cache_miss_count - (then.cache_miss_count if then is not None else 0)
        cache = f"  cache {hits / (hits + misses):.0%}" if hits + misses else ""
        of = f"/{batches}" if batches is not None else ""
        text = (
            f"epoch {epoch}  batch {batch}{of}  {samples / spent_s:,.0f} samples/s  {size_bytes / spent_s / 1e6:,.1f} MB/s"
            f"{cache}  stalled {min(stall_s / spent_s, 1):.0%}  {statistics.bottleneck}"
        )
        self._stream.write(f"\r{text}\x1b[K" if self._overwrites else f"{text}\n")
        self._stream.flush()
        self._is_open = self._overwrites
        self._before = now_s, statistics
        self._drawn_s = now_s

    def is_due(self, now_s: float) -> bool:
        """Whether it is time for the next line."""
        return now_s - self._drawn_s >= (LINE_S_MIN if self._overwrites else LINE_PLAIN_S_MIN)

    def end(self) -> None:
        """End the line, so that what is printed next begins a new one."""
        if self._is_open:
            self._stream.write("\n")
            self._stream.flush()
            self._is_open = False
