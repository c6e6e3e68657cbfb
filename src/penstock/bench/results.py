"""What a record says: a summary of each client, and what limits the training loop."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.bench.clients import DECODING, PROBES, RAW, STEP_ALONE, UNDECODED, WARM
from penstock.text.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from penstock.bench.record import BenchRecord

WINDOW_BATCHES = 100
"""Batches of a window, as published measurements of training loops have them."""
AHEAD_RATIO = 0.1
"""Part of a turn that no rate counts: batches that were read ahead come at once."""
NEARLY = 0.9
"""A rate that is this share of another one is as fast, on a machine that does other things, too."""
OUTRUN_RATIO = 1.5
"""A rate that is so many times that of raw reading shows that the latter was not measured long enough."""
STORE_RATIO = 0.8
"""A client that takes this share of raw reading's bytes is limited by the store: it parses and makes batches, too."""
ROUGH_S = 2.0
"""Figures of less time are rough: a second is four samples of the processors' load, and a pause of 0.1 s matters."""
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
        samples_per_s: Samples per second, without the first batches, which were read ahead while the data set was made.
        bytes_per_s: Bytes of the largest field per second, in the same time; of decoded pictures and of the samples of a
            pipeline, as they are stored; of raw reading, bytes of shards.
        measured_s: Seconds of that time in all rounds.
        first_batch_s: Seconds until the first batch, from before the data set is made.
        window_s: Seconds for 100 batches: the mean of all complete windows but the first. If there are no two of them, 100
            times the mean batch.
        window_variance_s2: Variance between windows in square seconds; 0 if there are no two.
        stall_ratio: Share of the time in which the loop waited for batches.
        step_s: Mean seconds of a step.
        cpu_cores: CPU that the client and its processes used: 1 is one core.
        host_cores: CPU that the whole machine used; None if the turns were too short to say.
        peak_bytes: Largest memory of them, PSS in bytes.
        busy_ratio: Share of the time in which the GPU was busy; without one, that of the steps; None without steps.
        is_gpu_measured: Whether NVML measured that share.
        requests: Requests to the store; None if the client does not say.
        fetched_ratio: Bytes that came from the store for each byte that was used; None if the client does not say.
    """

    name: str
    settings: dict[str, Any]
    is_ours: bool
    samples_per_s: Spread
    bytes_per_s: Spread
    measured_s: float
    first_batch_s: Spread
    window_s: float
    window_variance_s2: float
    stall_ratio: Spread
    step_s: float
    cpu_cores: Spread
    host_cores: float | None
    peak_bytes: int
    busy_ratio: float | None
    is_gpu_measured: bool
    requests: int | None
    fetched_ratio: float | None

    @property
    def label(self) -> str:
        """Name and settings, for tables and plots."""
        settings = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{self.name} ({settings})" if settings else self.name

    @property
    def is_probe(self) -> bool:
        """Whether it is no client, but says what a part allows."""
        return self.name in _PROBES


def grouped_turns(record: BenchRecord) -> list[list[dict[str, Any]]]:
    """Return the turns that delivered something, those of one client and combination of settings together."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for turn in record.turns:
        if turn["batches"]:
            groups.setdefault((turn["name"], str(turn["settings"])), []).append(turn)
    return list(groups.values())


def summarise(record: BenchRecord) -> list[ClientSummary]:
    """Return a summary of each client and combination of settings, the fastest first, and then the probes, each by itself."""
    is_changed = is_decoded(record) or has_pipeline(record)
    stored_bytes = record.run["data"]["sample_bytes"] if is_changed else None
    found = [_summary(turns, stored_bytes) for turns in grouped_turns(record)]
    return sorted(found, key=lambda each: (each.is_probe, each.is_probe and each.name, -each.samples_per_s.median))


def best_settings(found: Iterable[ClientSummary]) -> list[ClientSummary]:
    """Return the clients without the probes, each with the settings of a sweep with which it is the fastest."""
    best: dict[str, ClientSummary] = {}
    for each in found:  # the fastest first
        if not each.is_probe:
            best.setdefault(each.name, each)
    return list(best.values())


def _summary(turns: list[dict[str, Any]], stored_bytes: float | None) -> ClientSummary:
    windows = [seconds for turn in turns for seconds in windows_s(turn)]
    steady = [_steady(turn) for turn in turns]
    used_bytes = sum(turn["bytes"] for turn in turns)
    if stored_bytes and turns[0]["name"] not in (RAW.name, UNDECODED.name):
        steady = [each._replace(size_bytes=each.samples * stored_bytes) for each in steady]
        used_bytes = stored_bytes * sum(turn["samples"] for turn in turns)
    rows = [row for turn in turns for row in turn["monitor"] if row[0] >= turn["first_s"]]
    gpu_ratios = [row[5] for row in rows if row[5] is not None]
    looping_s = sum(max(1e-9, turn["seconds"] - turn["first_s"]) for turn in turns)
    step_s = sum(turn["step_s"] for turn in turns)
    requests = [count for turn in turns for count in turn.get("requests", {}).values()]
    fetched = sum(turn.get("fetched_bytes", 0) for turn in turns)
    return ClientSummary(
        name=turns[0]["name"],
        settings=turns[0]["settings"],
        is_ours=turns[0]["is_ours"],
        samples_per_s=Spread.of(each.samples / each.seconds for each in steady),
        bytes_per_s=Spread.of(each.size_bytes / each.seconds for each in steady),
        measured_s=sum(each.seconds for each in steady),
        first_batch_s=Spread.of(turn["first_s"] for turn in turns),
        window_s=statistics.mean(windows or [WINDOW_BATCHES * each.seconds / each.batches for each in steady]),
        window_variance_s2=statistics.variance(windows) if len(windows) > 1 else 0.0,
        stall_ratio=Spread.of(
            min(1.0, turn["stall_s"] / max(1e-9, turn["seconds"] - turn["first_s"])) for turn in turns
        ),
        step_s=step_s / sum(turn["batches"] for turn in turns),
        cpu_cores=Spread.of(turn["cpu_s"] / turn["seconds"] for turn in turns),
        host_cores=statistics.mean(row[2] for row in rows) if rows else None,
        peak_bytes=max(turn["pss_bytes"] for turn in turns),
        busy_ratio=statistics.mean(gpu_ratios) if gpu_ratios else min(1.0, step_s / looping_s) if step_s else None,
        is_gpu_measured=bool(gpu_ratios),
        requests=sum(requests) if requests else None,
        fetched_ratio=fetched / used_bytes if fetched else None,
    )


def windows_s(turn: Mapping[str, Any]) -> list[float]:
    """Return the seconds of a turn's complete windows of 100 batches but the first."""
    ends = turn["times_s"][WINDOW_BATCHES - 1 :: WINDOW_BATCHES]
    return [later - earlier for earlier, later in pairwise(ends)]


class Steady(NamedTuple):
    """What came in the time that a rate is taken of."""

    samples: int
    size_bytes: float
    seconds: float
    batches: int


def _steady(turn: dict[str, Any]) -> Steady:
    """Return what came after the first tenth of the time since the first batch, in which what was read ahead comes.

    Of a single batch, it is the whole turn.
    """
    times_s = turn["times_s"]
    begin = bisect_right(times_s, times_s[0] + AHEAD_RATIO * (times_s[-1] - times_s[0])) - 1
    seconds = times_s[-1] - times_s[begin]
    if seconds <= 0:
        return Steady(turn["samples"], turn["bytes"], turn["seconds"], turn["batches"])
    samples, size_bytes = turn["samples"] - turn["counts"][begin], turn["bytes"] - turn["sizes"][begin]
    return Steady(samples, size_bytes, seconds, turn["batches"] - 1 - begin)


def number_text(value: float) -> str:
    """Return a number with three significant digits, but never coarser than whole numbers."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread_text(spread: Spread, unit: float = 1.0) -> str:
    """Return median (minimum..maximum) in units of `unit`; only the median if all are equal."""
    median, low, high = (number_text(value / unit) for value in spread)
    return median if low == high else f"{median} ({low}..{high})"


def _busy_text(each: ClientSummary) -> str:
    if each.busy_ratio is None:
        return ""
    return f"{each.busy_ratio:.0%}" + ("" if each.is_gpu_measured else " (emulated)")


_COLUMNS: tuple[tuple[str, Callable[[ClientSummary], str]], ...] = (
    ("client", lambda each: each.label),
    ("samples/s", lambda each: "" if each.name == RAW.name else spread_text(each.samples_per_s)),
    ("MB/s", lambda each: "" if each.name == STEP_ALONE.name else spread_text(each.bytes_per_s, 1e6)),
    ("first batch s", lambda each: f"{each.first_batch_s.median:.2f}"),
    ("s/100 batches", lambda each: "" if each.name == RAW.name else number_text(each.window_s)),
    ("stalled", lambda each: "" if each.is_probe else f"{each.stall_ratio.median:.0%}"),
    ("CPU cores", lambda each: f"{each.cpu_cores.median:.2f}"),
    ("memory", lambda each: format_bytes(each.peak_bytes)),
    (
        "variance s\N{SUPERSCRIPT TWO}",
        lambda each: number_text(each.window_variance_s2) if each.window_variance_s2 else "",
    ),
    ("host cores", lambda each: "" if each.host_cores is None else f"{each.host_cores:.2f}"),
    ("GPU busy", _busy_text),
    ("requests", lambda each: "" if each.requests is None else f"{each.requests:,}"),
    ("fetched/used", lambda each: "" if each.fetched_ratio is None else f"{each.fetched_ratio:.2f}"),
)
COLUMNS_COUNT_SHORT = 8
"""The columns that fit into a terminal."""


def table(found: Sequence[ClientSummary]) -> list[list[str]]:
    """Return the head and a row of cells for each summary; columns of which nothing is known are left out."""
    rows = [[cell(each) for _, cell in _COLUMNS] for each in found]
    shown = [number for number in range(len(_COLUMNS)) if any(row[number] for row in rows)]
    return [[row[number] for number in shown] for row in [[head for head, _ in _COLUMNS], *rows]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What limits the training loop.

    Attributes:
        limit: ``step``, ``contention``, ``store``, ``decoding``, ``reading``, ``pipeline`` (the user's own: reading or its
            stages), or ``unknown`` if too little was measured.
        evidence: The figures that show it, as sentences.
        advice: Sentences that say what to change.
    """

    limit: str
    evidence: str
    advice: str

    @property
    def sentence(self) -> str:
        """The limit in words."""
        return _LIMITS[self.limit]


_LIMITS = {
    "step": "The training step is the limit.",
    "contention": "The training step is the limit, and loading slows it down.",
    "store": "The store is the limit.",
    "decoding": "Decoding is the limit.",
    "reading": "Reading samples is the limit: neither the store nor the training step.",
    "pipeline": "Reading samples or the pipeline's stages are the limit: neither the store nor the training step.",
    "unknown": "The limit is not known.",
}


def best_of_ours(found: Sequence[ClientSummary]) -> ClientSummary | None:
    """Return the fastest way of penstock that reads from the store; None if none was measured."""
    return next((each for each in found if each.is_ours and not each.is_probe and each.name != WARM), None)


def allowed_by_parts(record: BenchRecord, found: Sequence[ClientSummary]) -> dict[str, float]:
    """Return the samples per second that single parts allow, by the names of the probes that were measured.

    Of a sweep, the probe with the settings of penstock's best way counts, and otherwise the best one. Raw reading is
    converted by the mean bytes that a sample takes in its shard.
    """
    best = best_of_ours(found)
    allowed: dict[str, float] = {}
    for each in found:  # the fastest first
        is_same = best is not None and each.settings == best.settings
        if each.name in (UNDECODED.name, DECODING.name, STEP_ALONE.name) and (is_same or each.name not in allowed):
            allowed[each.name] = each.samples_per_s.median
    raw = [each.bytes_per_s.median for each in found if each.name == RAW.name]
    if raw:
        allowed[RAW.name] = max(raw) / stored_bytes(record, best)
    return allowed


def stored_bytes(record: BenchRecord, best: ClientSummary | None) -> float:
    """Return the mean bytes that a sample takes in its shard, with the headers and the small fields beside the largest one."""
    data = record.run["data"]
    largest = data["sample_bytes"] if best is None else best.bytes_per_s.median / best.samples_per_s.median
    return float(largest + data["stored_bytes"] - data["sample_bytes"])


def verdict(record: BenchRecord) -> Verdict:
    """Return what limits this data set on this machine, when it is read by the fastest way of penstock that was measured."""
    found = summarise(record)
    clients = [each for each in found if not each.is_probe]
    best = best_of_ours(found)
    if best is None:
        return Verdict(
            "unknown", "No way of penstock was measured.", "Leave out --clients, or see why clients did not run."
        )
    limit, evidence, advice = _limit(record, best, allowed_by_parts(record, found))
    cores = record.run["machine"]["cores"]
    evidence = f"{best.label} delivers {number_text(best.samples_per_s.median)} samples/s{evidence}"
    if best.host_cores is not None:
        evidence += (
            f" It used {best.cpu_cores.median:.2g} cores, and the whole machine {best.host_cores:.2g} of {cores}."
        )
    if clients[0] is not best:
        fastest = clients[0]
        evidence += f" {fastest.label} was faster: {number_text(fastest.samples_per_s.median)} samples/s."
    if throttled_count := sum(map(_throttled_count, record.turns)):
        evidence += f" The store asked {throttled_count:,} times to slow down: send fewer requests at once."
    if best.measured_s < ROUGH_S:
        evidence += f" The client was measured for only {best.measured_s:.2g} s, so these figures are rough."
    return Verdict(limit, evidence, advice)


def _throttled_count(turn: Mapping[str, Any]) -> int:
    """Return answers by which the store asked to slow down, by the log of the store or as raw reading counts them."""
    by_kind: Mapping[str, int] = turn.get("requests", {})
    counted: int = turn.get("throttled_count", 0)
    return max(counted, sum(count for kind, count in by_kind.items() if kind.endswith(" 503")))


def _limit(record: BenchRecord, best: ClientSummary, allowed: Mapping[str, float]) -> tuple[str, str, str]:
    """Return the limit, the rest of the sentence with its evidence, and the advice."""
    rate = best.samples_per_s.median
    alone = allowed.get(STEP_ALONE.name)
    if alone and rate >= NEARLY * alone:
        return (
            "step",
            f", and the step alone takes {number_text(alone)}.",
            "Data is not the bottleneck: nothing needs to change.",
        )
    if alone and (stall_ratio := best.stall_ratio.median) < 1 - NEARLY:
        return (
            "contention",
            f", and the step alone takes {number_text(alone)}; but it waits for data only {stall_ratio:.0%} of the time.",
            "Loading slows the step down: read in other processes (Loader(processes=)), or on a host with more cores.",
        )
    decoding = (
        f", and decodes {number_text(allowed[DECODING.name])} of a local copy" if DECODING.name in allowed else ""
    )
    undecoded, raw = allowed.get(UNDECODED.name), allowed.get(RAW.name)
    if undecoded and undecoded * NEARLY > rate:
        return (
            "decoding",
            f", and {number_text(undecoded)} if it does not decode{decoding}"
            + (f"; the store allows {number_text(raw)}." if raw else "."),
            "Decode in more processes or on hosts with more cores, or store smaller pictures: penstock pack --resize.",
        )
    if raw is None or (is_decoded(record) and undecoded is None):
        return "unknown", ".", "Leave out --clients and let the run end, so that each part is measured alone, too."
    size = stored_bytes(record, best)
    taken, given = number_text(rate * size / 1e6), number_text(raw * size / 1e6)
    compared = f" of {format_bytes(size)}, which is {taken} of the {given} MB/s that raw reading gets from the store."
    if rate > OUTRUN_RATIO * raw:
        return (
            "unknown",
            f"{compared} Only a cache gives more than the store; without one, there was too little data or time to measure it.",
            "Measure longer (--seconds), or more data.",
        )
    if rate >= STORE_RATIO * raw:
        return (
            "store",
            compared,
            "Keep the data closer: a cache on the node's disk (Loader(cache=)), a smaller format, or a faster store.",
        )
    if record.run["data"]["format"] == "objects":
        advice = "Pack samples into shards (penstock pack), so that one request brings many of them."
    elif (best.host_cores or 0.0) >= NEARLY * record.run["machine"]["cores"]:
        advice = "Read on a host with more cores, or on more hosts: the processors are busy."
    else:
        advice = "Read in more processes: Loader(processes=)."
    return "pipeline" if has_pipeline(record) else "reading", compared, advice


def is_decoded(record: BenchRecord) -> bool:
    """Return whether clients decoded pictures: where it was asked for, and the data has some."""
    return bool(record.run["settings"]["decode"] and record.run["data"]["is_picture"]) and not has_pipeline(record)


def has_pipeline(record: BenchRecord) -> bool:
    """Return whether clients read the user's own pipeline, whose samples may have any size."""
    return bool(record.run["settings"].get("pipeline"))
