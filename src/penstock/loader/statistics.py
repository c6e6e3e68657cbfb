"""The statistics of a loader: ``Meter`` counts, and ``LoaderStatistics`` is the record that users read."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TextIO, TypeAlias

from penstock.system.quantiles import Recent
from penstock.text.html_text import table
from penstock.text.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.formats import Parser, RangedReader
    from penstock.store import Store


_log = logging.getLogger("penstock.loader")
STALLS_KEPT = 1024
STALL_RATIO_OK = 0.05  # below this the training loop, not the data, sets the pace

STEP_CPU_RATIO_MIN = 0.25
"""Share of the time. A loop that computes less waits for something else, and other threads can use the interpreter."""
THREADS_CPU_RATIO_MIN = 0.05
"""Share of the time. Threads that run less can hardly delay the loop."""
THREADS_WAIT_RATIO_MIN = 1.0
"""Share of the time that threads run. Beside a loop of pure Python they wait 6 to 12 times as long as they run
(docs/development/measurements.md)."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LoaderStatistics:
    """Statistics of a loader since it was made. Time between epochs, and from ``break`` to the next ``iter``, is not counted.

    Look at ``stall_ratio`` first. If it is close to 0, the training loop never waits, and nothing needs tuning. Otherwise
    ``bottleneck`` names the part to make faster.
    """

    samples: int
    """Number of samples given to the training loop."""
    batches: int
    """Number of batches given to the training loop."""
    bytes: int
    """Bytes of shards that arrived from the store. Reading ahead makes them a little more than the samples needed."""
    saved_bytes: int
    """Bytes of shards that were not fetched, because the pipeline uses none of the fields in them."""
    elapsed_s: float
    """Seconds of iterating: the steps of the training loop, and its waits."""
    stall_s: float
    """Seconds that the training loop waited for batches: the time that a faster loader could save."""
    stall_p50_s: float
    """Median wait of the last 1 024 steps; 0 before the first."""
    stall_p99_s: float
    """Wait that one in a hundred of these steps exceeds. If it is far above the median, something is late now and then."""
    store_s: float
    """Seconds that the reader waited for bytes. If it is large and the loop stalls, the store or the network limits."""
    parse_s: float
    """Seconds that the reader spent cutting shards into samples, on one thread."""
    decode_s: float
    """Seconds in ``decode`` and ``map``, summed over the decode threads."""
    wait_s: float
    """Seconds that the reader waited because enough batches were being made. If it is large and the loop does not stall, the
    training loop limits, as it should. If the loop stalls, decoding limits."""
    skipped_samples: int
    """Number of corrupt samples that ``on_corrupt="skip_sample"`` or ``"skip_shard"`` left out, at least."""
    skipped_bytes: int
    """Bytes of shards that were skipped with them."""
    slots_count: int
    """Number of shared batches that were made for worker processes. The loop holds those beyond ``prefetch_batches`` + 3."""
    oversize_count: int
    """Number of samples that ``batch_by_size(oversize="drop")`` left out."""
    threads_count: int
    """Number of decode threads."""
    step_cpu_s: float = 0.0
    """Seconds of CPU that the iterating thread used in its own steps."""
    threads_cpu_s: float = 0.0
    """Seconds of CPU of the reading and decode threads of this process; almost none with ``processes=``."""
    threads_wait_s: float = 0.0
    """Seconds that these threads waited for the interpreter or a core while they parsed and decoded."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Number of samples that ``max_errors=`` and ``join(missing="drop")`` left out, by stage."""

    unreachable_s: float = 0.0
    """Seconds in which requests waited because a store did not answer; with ``processes=``, the mean of the workers."""
    cache_hit_count: int = 0
    """Number of blocks that were read from the cache of ``Loader(cache=)``."""
    cache_hit_bytes: int = 0
    """Bytes that were read from this cache."""
    cache_miss_count: int = 0
    """Number of blocks that were not in the cache, and were fetched."""
    cache_fetched_bytes: int = 0
    """Bytes that were requested from the store to fill the cache."""
    cluster_workers_count: int = 0
    """Number of workers that the cluster has given to ``Loader(workers=)``."""
    node_decode_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds in ``decode`` and ``map`` on each node of the cluster."""
    node_wait_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that the training loop waited for each node of the cluster: for the one whose rows came last."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """The record with these values, as a state holds them. Names of another version are ignored."""
        return cls(**{entry.name: values[entry.name] for entry in fields(cls) if entry.name in values})

    def __repr__(self) -> str:
        shown = [
            f"{entry.name}={value:.3g}" if isinstance(value, float) else f"{entry.name}={value}"
            for entry in fields(self)
            if (value := getattr(self, entry.name))
        ]
        head = f"{self.samples_per_s:,.0f} samples/s, stalled {self.stall_ratio:.0%}, bottleneck {self.bottleneck}"
        return f"<LoaderStatistics: {'; '.join([head, ', '.join(shown)])}>"

    def _repr_html_(self) -> str:
        """Return what notebooks show: rates, the bottleneck, and all values that are not zero."""
        head = [
            ("samples/s", f"{self.samples_per_s:,.0f}"),
            ("bytes/s", format_bytes(self.bytes_per_s)),
            ("stalled", f"{self.stall_ratio:.0%}"),
            ("bottleneck", self.bottleneck),
        ]
        values = ((entry.name, getattr(self, entry.name)) for entry in fields(self))
        return table(
            [
                *head,
                *((name, f"{value:,.6g}" if isinstance(value, float) else value) for name, value in values if value),
            ]
        )

    @property
    def cache_hit_ratio(self) -> float:
        """Share of the requested blocks that were in the cache, in [0, 1]; 0 without a cache."""
        asked_count = self.cache_hit_count + self.cache_miss_count
        return self.cache_hit_count / asked_count if asked_count else 0.0

    @property
    def samples_per_s(self) -> float:
        """Samples given per second of iterating; 0 before the first."""
        return self.samples / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def bytes_per_s(self) -> float:
        """Bytes that arrived per second of iterating; 0 before the first."""
        return self.bytes / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def stall_ratio(self) -> float:
        """Share of the time that the training loop waited, in [0, 1]: 0 is perfect, 1 is starving."""
        return self.stall_s / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def contends(self) -> bool:
        """Whether the training loop's own Python and the loader's threads compete for the interpreter.

        They do if both run, and the threads wait for their turn longer than they run.
        """
        return (
            self.step_cpu_s >= STEP_CPU_RATIO_MIN * self.elapsed_s > 0
            and self.threads_cpu_s >= THREADS_CPU_RATIO_MIN * self.elapsed_s
            and self.threads_wait_s >= THREADS_WAIT_RATIO_MIN * self.threads_cpu_s
        )

    @property
    def bottleneck(self) -> LoaderPart:
        """The part that sets the pace. ``"consumer"`` is the training loop itself, as it should be."""
        if self.stall_ratio < STALL_RATIO_OK:
            return "consumer"
        if self.node_wait_s:  # its workers together fetch, parse and decode: more of them do all of it faster
            return "preprocessing cluster"
        held_s: dict[Literal["store", "parse", "decode"], float] = {
            "store": self.store_s,
            "parse": self.parse_s,
            "decode": self.wait_s,  # the loop stalls while enough batches are being made: they wait for decoding
        }
        return max(held_s, key=held_s.__getitem__)


_OF_WORKERS = ("bytes", "decode_s", "parse_s", "saved_bytes", "skipped_bytes", "skipped_samples", "store_s")
_OF_CACHE = ("hit_count", "hit_bytes", "miss_count", "fetched_bytes")


def store_sums(stores: Iterable[Store]) -> dict[str, float]:
    """Return the sums of what some stores counted in this process, by their names in ``LoaderStatistics``."""
    sums = {f"cache_{name}": 0.0 for name in _OF_CACHE}
    unreachable_s: dict[object, float] = {}  # by endpoint, which several stores may share
    for store in stores:
        counts = getattr(store, "counts", None)  # a ``Cached`` store has them
        if counts is not None:
            for name in _OF_CACHE:
                sums[f"cache_{name}"] += getattr(counts, name)
        layer: Any = store
        while layer is not None:
            endpoint = getattr(layer, "reachability", None)  # a ``Retrying`` store has it
            if endpoint is not None:
                unreachable_s[endpoint] = max(unreachable_s.get(endpoint, 0.0), layer.unreachable_s)
            layer = getattr(layer, "inner", None)
    return {**sums, "unreachable_s": sum(unreachable_s.values())}


@dataclass(slots=True, eq=False, repr=False)
class Meter:
    """Running sums. Each is written by one thread, or under the lock of the backend; any thread may read them."""

    samples: int = 0
    batches: int = 0
    bytes: int = 0
    saved_bytes: int = 0
    elapsed_s: float = 0.0
    stall_s: float = 0.0
    store_s: float = 0.0
    parse_s: float = 0.0
    decode_s: float = 0.0
    wait_s: float = 0.0
    step_cpu_s: float = 0.0
    threads_cpu_s: float = 0.0
    threads_wait_s: float = 0.0
    oversize_count: int = 0
    slots_count: int = 0
    stalls: Recent = field(default_factory=lambda: Recent(STALLS_KEPT))
    skipped_samples: int = 0
    skipped_bytes: int = 0
    unreachable_s: float = 0.0  # this and what follows: of worker processes, and of stores that were closed
    cache_hit_count: int = 0
    cache_hit_bytes: int = 0
    cache_miss_count: int = 0
    cache_fetched_bytes: int = 0
    cluster_workers_count: int = 0
    node_decode_s: dict[str, float] = field(default_factory=dict)
    node_wait_s: dict[str, float] = field(default_factory=dict)

    def sums(self) -> dict[str, float]:
        """The sums that a worker process counts for its loader."""
        return {name: getattr(self, name) for name in _OF_WORKERS}

    def add(self, sums: Mapping[str, float], before: Mapping[str, float]) -> None:
        """Add the counts of a worker since `before`."""
        for name, value in sums.items():
            setattr(self, name, getattr(self, name) + value - before.get(name, 0))

    def on_node(self, node: str, *, decode_s: float = 0.0, wait_s: float = 0.0) -> None:
        """Count seconds of a node of a cluster."""
        self.node_decode_s[node] = self.node_decode_s.get(node, 0.0) + decode_s
        self.node_wait_s[node] = self.node_wait_s.get(node, 0.0) + wait_s

    def stepped(self, previous_s: float, asked_s: float, got_s: float, *, cpu_s: float = 0.0) -> None:
        """Count one step of the training loop.

        Args:
            previous_s: Time at which the loop got the previous batch.
            asked_s: Time at which it came back for the next batch.
            got_s: Time at which it got this batch.
            cpu_s: CPU seconds of its thread in the step between.
        """
        self.stall_s += got_s - asked_s
        self.step_cpu_s += min(max(0.0, cpu_s), asked_s - previous_s)  # another thread may have asked
        self.elapsed_s += got_s - previous_s
        self.stalls.add(got_s - asked_s)

    def skipped(self, url: str, parser: Parser | RangedReader) -> None:
        """Count and log the samples that the parser of a shard skipped as corrupt; called once for each such shard."""
        self.skipped_samples += parser.skipped_samples
        self.skipped_bytes += parser.skipped_bytes
        _log.warning(
            "%s: %d samples, %d bytes skipped: %s",
            url,
            parser.skipped_samples,
            parser.skipped_bytes,
            parser.skipped_error,
        )

    def read(
        self, *, threads_count: int, dropped: Mapping[str, int], of_stores: Mapping[str, float] | None = None
    ) -> LoaderStatistics:
        """The statistics up to now.

        Args:
            threads_count: Number of decode threads.
            dropped: Number of samples that were left out, by stage.
            of_stores: Counts of stores that are still open: ``store_sums``.
        """
        sums = {name: getattr(self, name) for name in self.__slots__ if name != "stalls"}
        for name, count in (of_stores or {}).items():
            sums[name] += count
        sums |= {"node_decode_s": dict(self.node_decode_s), "node_wait_s": dict(self.node_wait_s)}
        return LoaderStatistics(
            **sums,
            stall_p50_s=self.stalls.quantile(0.5) if len(self.stalls) else 0.0,
            stall_p99_s=self.stalls.quantile(0.99) if len(self.stalls) else 0.0,
            threads_count=threads_count,
            dropped=dropped,
        )


class ThreadMeter:
    """Adds the work of one thread to ``threads_cpu_s`` and ``threads_wait_s``. It is made and called on that thread."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._cpu_s = time.thread_time()

    def worked(self, spent_s: float) -> None:
        """Count that the thread had work for `spent_s` seconds since the last call."""
        before_s, self._cpu_s = self._cpu_s, time.thread_time()
        ran_s = self._cpu_s - before_s
        self._meter.threads_cpu_s += ran_s
        self._meter.threads_wait_s += max(0.0, spent_s - ran_s)


LoaderPart: TypeAlias = Literal["consumer", "store", "parse", "decode", "preprocessing cluster"]

LINE_S_MIN = 0.5  # how often a live line is drawn on a terminal, where it overwrites itself...
LINE_PLAIN_S_MIN = 30.0  # ...and in a log file
_HINTS: dict[LoaderPart, str] = {
    "consumer": "the training loop sets the pace: nothing to change here",
    "store": "use more lanes, larger shards, a nearer store, or a cache on this node; look at the store's own statistics",
    "parse": "use fewer, larger members per sample, or processes=, which parse in parallel",
    "decode": "use more threads or processes, up to the number of cores; Image(height=, width=) scales while it decodes",
    "preprocessing cluster": "use more workers, as Workers(max=) does while the loop stalls; a node that the loop waits for "
    "more than for the others is slow, or busy with something else",
}
_CONTENDED = (
    "the loop's own Python and the loader's threads compete for one interpreter: in a step of {step_ms:.1f} ms, the loop ran "
    "for {own_ms:.1f} ms, and the threads ran for {threads_ms:.1f} ms after waiting for {waited_ms:.1f} ms; processes=1 moves "
    "them to a process of their own"
)
_UNREACHABLE_RATIO_MIN = 0.5
"""Share of the loop's waits. If the store did not answer for so much of them, that is the cause, and no setting is."""
_GAUGES = ("threads_count", "slots_count", "cluster_workers_count", "stall_p50_s", "stall_p99_s")
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
    (``contended``); if there were any, seconds in which the store did not answer (``unreachable``), and seconds that the loop
    waited for each node of a cluster (``waited for NODE``)."""
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
    if statistics.unreachable_s:
        seconds["unreachable"] = statistics.unreachable_s
    for node, wait_s in sorted(statistics.node_wait_s.items()):
        seconds[f"waited for {node}"] = wait_s
    if part == "store" and statistics.unreachable_s >= _UNREACHABLE_RATIO_MIN * statistics.stall_s:
        hint = f"the store was unreachable for {statistics.unreachable_s:.0f} s; the log says when, and why"
        return Bottleneck(part=part, stall_ratio=statistics.stall_ratio, seconds=seconds, hint=hint)
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
        elif isinstance(value, dict):
            for node, spent_s in value.items():
                described = f"LoaderStatistics.{entry.name}."
                add(
                    f"{_named(entry.name)}_total",
                    "counter",
                    spent_s,
                    described=described,
                    more=f'node="{_escaped(node)}"',
                )
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
        """Begin an epoch, or continue one. Earlier events are not counted."""
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
        waited_s = statistics.unreachable_s - (then.unreachable_s if then is not None else 0.0)
        unreachable = f"  store unreachable for {waited_s:.0f} s" if waited_s else ""
        of = f"/{batches}" if batches is not None else ""
        text = (
            f"epoch {epoch}  batch {batch}{of}  {samples / spent_s:,.0f} samples/s  {size_bytes / spent_s / 1e6:,.1f} MB/s"
            f"{cache}{unreachable}  stalled {min(stall_s / spent_s, 1):.0%}  {statistics.bottleneck}"
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
        """End the line, so that the next output begins a new one."""
        if self._is_open:
            self._stream.write("\n")
            self._stream.flush()
            self._is_open = False
