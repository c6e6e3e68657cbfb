"""``run_benchmark``: the clients take turns on one data set, within a given time."""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import psutil

from penstock.bench.clients import ANONYMOUS_VARIABLE, DECODING, ENTRIES, PROBES, RAW, STEP_ALONE, UNDECODED, Entry
from penstock.bench.measuring import Monitor, RequestLog
from penstock.bench.process import BenchError, ClientProcess, client_command, client_environment
from penstock.bench.turns import surroundings
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.bench.data import DataFacts
    from penstock.bench.record import BenchRecord

CORES = os.cpu_count() or 1
ROUNDS = 2
MEMORY_PERCENT_MAX = 75
"""Share of the host's memory that is used when clients between their turns are in the way."""
TURN_S_MIN = 1.0
ANSWER_S_MAX = 120.0
STARTING_RATIO = 0.35
"""Share of the time that is left for starting clients, by which turns are shorter."""

SWEPT = ("workers", "batch", "shuffle", "processes", "prefetch", "cache", "chunk_bytes")
"""Settings that a sweep can change in a run. Sizes of shards are runs of their own."""
_LOADER = {"processes": "processes", "prefetch": "prefetch_batches", "cache": "cache"}
"""Settings that only ``Loader`` has, and what it calls them."""

Progress = Callable[[str, int, int], object]
"""Is told what runs now, the number of turns that are done, and that of all turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What a run measures, and for how long.

    Attributes:
        clients: Beginnings of names of clients; empty: all.
        batch: Samples of a batch.
        decode: Whether pictures are decoded to 224 x 224.
        pixels: Whether pictures are delivered as pixels of their own size, by clients that can.
        step: The training step, see ``clients/steps.py``.
        seconds: Time for everything, in seconds. The first round is complete even if it takes longer.
        sweep: Values of settings, by name; each client runs with each combination.
        shuffle: Samples of the shuffle window; 0: none.
        batches_max: Batches after which a turn ends; None: only by its time.
        epochs: Epochs of a turn, one after another.
        pipeline: The user's pipeline as ``module:name``, which ways of penstock read instead of the fields of the data.
        origin_log: File in which ``penstock bench origin --log`` writes its answers, from which requests are counted.
        python: Interpreters of single modules of clients, whose environments are apart; others run in this one.
    """

    clients: Sequence[str] = ()
    batch: int = 128
    decode: bool = False
    pixels: bool = False
    step: str = "none"
    seconds: float = 120.0
    sweep: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    shuffle: int = 0
    batches_max: int | None = None
    epochs: int = 1
    pipeline: str | None = None
    origin_log: str | None = None
    python: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.sweep:
            if name not in SWEPT:
                near = get_close_matches(name, SWEPT, 1)
                raise ConfigError(
                    f"a sweep of {name!r} is not known", hint=f"did you mean {near[0]!r}?" if near else ", ".join(SWEPT)
                )

    def settings(self) -> dict[str, Any]:
        """Return the settings of all clients, for a record."""
        return {
            "batch": self.batch, "decode": self.decode, "pixels": self.pixels, "step": self.step, "shuffle": self.shuffle,
            "batches_max": self.batches_max, "epochs": self.epochs, "pipeline": self.pipeline,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Turn:
    """A client that reads once, with one combination of the values of a sweep, in the round `number`."""

    entry: Entry
    settings: dict[str, Any]
    number: int

    def is_done(self, record: BenchRecord) -> bool:
        """Return whether the record has it, or why the client cannot run."""
        return self.entry.name in record.not_run or record.has_turn(self.entry.name, self.settings, self.number)


def names_of(text: str) -> tuple[str, ...]:
    """Return the names in a list with commas, which names of clients may have, too."""
    if any(entry.name.lower().startswith(text.strip().lower()) for entry in ENTRIES):
        return (text.strip(),) if text.strip() else ()
    return tuple(filter(None, map(str.strip, text.split(","))))


def selected(names: Sequence[str]) -> list[Entry]:
    """Return the clients of these names, or whose names begin so; all that need not be asked for, if there are none.

    Raises:
        ConfigError: No client's name begins so.
    """
    found = {entry.name for entry in ENTRIES if not entry.is_asked} if not names else set[str]()
    for name in names:
        known = {entry.name.lower(): entry.name for entry in ENTRIES}
        whole = known.get(name.lower())
        beginning = {own for lower, own in known.items() if lower.startswith(name.lower())}
        if not beginning:
            near = get_close_matches(name.lower(), known, 1)
            hint = f"did you mean {known[near[0]]!r}?" if near else "; ".join(known.values())
            raise ConfigError(f"no client is called {name!r}", hint=hint)
        found |= {whole} if whole else beginning
    return [entry for entry in ENTRIES if entry.name in found]


def option_of(entry: Entry, setting: str) -> str | None:
    """Return which argument of a client's class a setting of a sweep is; None if it is none."""
    if setting == "workers":
        return entry.workers
    if setting == "processes" and entry.workers == "cluster":  # its workers are elsewhere
        return None
    return _LOADER.get(setting) if _is_loader(entry) else None


def _is_loader(entry: Entry) -> bool:
    return entry.module == "penstock" and entry.options.keys() <= {"processes", "cluster"}


def _applied(entry: Entry, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a sweep that this client has."""
    return {
        name: value
        for name, value in settings.items()
        if name in ("batch", "shuffle")
        or option_of(entry, name) is not None
        or (name == "chunk_bytes" and entry.reads_chunks)
    }


def _reason_not_run(entry: Entry, data: DataFacts, options: BenchOptions) -> str | None:
    if entry not in PROBES:
        if options.pipeline and not _is_loader(entry):
            return "reads its own pipeline"
        if options.pixels and entry.module not in ("penstock", "tensorflow"):
            return "does not deliver pixels"
        if "chunk_bytes" in options.sweep and not entry.reads_chunks:
            return "does not read at random places"
    format_name = min(entry.formats) if "chunk_bytes" in options.sweep else data.format  # of which it takes any range
    reason = entry.reason_not_run(format_name, anonymous=data.is_anonymous)
    return None if reason and entry.module in options.python and "installed" in reason else reason


def check_same(record: BenchRecord, options: BenchOptions) -> None:
    """Check that a record, if it was begun, has these settings.

    Raises:
        ConfigError: It has others.
    """
    before, now = record.run.get("settings", {}), options.settings()
    if other := [name for name, value in now.items() if before and before.get(name) != value]:
        raise ConfigError(f"{record.path} holds a run with another {' and '.join(other)}", hint="another --out")


def run_benchmark(
    data: DataFacts, options: BenchOptions, record: BenchRecord, progress: Progress = lambda *_: None, **about: Any
) -> None:
    """Measure what is not in `record` yet, and add it.

    A client that cannot run, or fails, is recorded with the reason. Ctrl-C ends the clients; the record keeps what there is.

    Raises:
        ConfigError: The record has other settings, or no client has such a name.
    """
    check_same(record, options)
    if not record.run:
        settings = options.settings()
        settings |= {"clients": list(options.clients), "seconds": options.seconds, "sweep": dict(options.sweep)}
        record.add("run", settings=settings, data=data.record(), started=time.time(), **about, **surroundings())
    wanted = [RAW]
    if options.step != "none":
        wanted.append(STEP_ALONE)
    if options.decode and data.is_picture and not options.pipeline:
        wanted += [UNDECODED, DECODING]
    entries = []
    for entry in [*wanted, *selected(options.clients)]:
        if reason := _reason_not_run(entry, data, options):
            if entry.name not in record.not_run:
                record.add("not run", name=entry.name, reason=reason)
        else:
            entries.append(entry)
    turns = turns_of(entries, options)
    end_s = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch, ExitStack() as stack:
        runner = _Runner(data, options, record, stack, scratch)
        for done, turn in enumerate(turns):
            waiting = [each for each in turns[done:] if not each.is_done(record)]
            if turn not in waiting[:1] or (
                turn.number and time.monotonic() >= end_s
            ):  # a first round is always complete
                continue
            progress(turn.entry.name, done, len(turns))
            runner.start(waiting)
            if not turn.is_done(record):  # as it is if the client did not start
                left_s = end_s - time.monotonic()
                runner.run(turn, max(TURN_S_MIN, left_s * (1 - STARTING_RATIO) / (len(turns) - done)))
            runner.keep([each for each in waiting[1:] if not each.is_done(record)])
    record.add("end", ended=time.time())


def turns_of(entries: list[Entry], options: BenchOptions) -> list[Turn]:
    """Return the turns in their order. A client without a setting of the sweep has one turn for all its values."""
    combinations = [
        dict(zip(options.sweep, values, strict=True)) for values in itertools.product(*options.sweep.values())
    ]
    found: list[Turn] = []
    for number in range(ROUNDS):
        for settings in combinations:
            for entry in _rotated(entries, number):
                turn = Turn(entry, _applied(entry, settings), number)
                if turn not in found:
                    found.append(turn)
    return found


def _rotated(entries: list[Entry], number: int) -> list[Entry]:
    start = number % len(entries) if entries else 0
    return entries[start:] + entries[:start]


def _options(turn: Turn) -> dict[str, Any]:
    own = {option_of(turn.entry, name): value for name, value in turn.settings.items()}
    return {**turn.entry.options, **{name: value for name, value in own.items() if name is not None}}


def _process_key(turn: Turn) -> str:
    return f"{turn.entry.name} {sorted(_options(turn).items())}"


class _Runner:
    """Starts each client before its first turn, and ends it after the last one."""

    def __init__(
        self,
        data: DataFacts,
        options: BenchOptions,
        record: BenchRecord,
        stack: ExitStack,
        scratch: str,
    ) -> None:
        self._data, self._options, self._record, self._stack = data, options, record, stack
        self._job = {
            "keys": list(data.keys), "prefix": data.prefix, "source": data.source, "batch": options.batch, "image": data.image,
            "label": data.label, "label_kind": data.label_kind, "format": data.format, "objects": data.format == "objects",
            "decode": options.decode and data.is_picture, "pixels": options.pixels, "shuffle": options.shuffle,
            "scratch": scratch,
            "step": options.step, "batches_max": options.batches_max, "epochs": options.epochs,
            "pipeline": options.pipeline,
        }  # fmt: skip
        self._log = RequestLog(options.origin_log) if options.origin_log else None
        self._pool = ThreadPoolExecutor(CORES, thread_name_prefix="penstock-bench")
        stack.callback(self._pool.shutdown, wait=False, cancel_futures=True)
        self._processes: dict[str, ClientProcess] = {}
        self._versions: dict[str, dict[str, str]] = {}

    def start(self, turns: list[Turn]) -> None:
        """Start clients side by side, one for each core, if that of the first turn has not started: they import for seconds.

        Those that do not start are added to the record, with the reason.
        """
        if _process_key(turns[0]) not in self._processes:
            clients = {_process_key(turn): turn for turn in turns}
            chosen = [turn for key, turn in clients.items() if key not in self._processes][:CORES]
            for error, turn in zip(self._pool.map(self._start, chosen), chosen, strict=True):
                if error is not None:
                    self._fail(turn, error)

    def run(self, turn: Turn, seconds: float) -> None:
        """Measure one turn of about so many seconds and add it to the record, or the reason why it failed."""
        entry, key = turn.entry, _process_key(turn)
        process = self._processes[key]
        try:
            if self._log:
                self._log.counted()
            with Monitor(process.pid, self._log) as monitor:
                answer = process.ask(
                    {"do": "epoch", "job": {**self._job, "seconds_max": seconds, **entry.job, **turn.settings}}
                )
        except BenchError as error:
            self._fail(turn, error)
            return
        if self._log:
            answer |= self._log.counted()
        self._record.add(
            "turn", name=entry.name, round=turn.number, settings=turn.settings, is_ours=entry.is_ours,
            versions=self._versions[key], pss_bytes=monitor.peak_pss_bytes, monitor=monitor.series, **answer,
        )  # fmt: skip

    def _fail(self, turn: Turn, error: BenchError) -> None:
        self._record.add("not run", name=turn.entry.name, reason=f"failed: {str(error).splitlines()[0]}")

    def keep(self, turns: list[Turn]) -> None:
        """End the clients that have none of these turns; all of them, which start again, if memory is short."""
        is_short = psutil.virtual_memory().percent > MEMORY_PERCENT_MAX
        wanted = set() if is_short else {_process_key(turn) for turn in turns}
        for key in self._processes.keys() - wanted:
            self._processes.pop(key).close()

    def _start(self, turn: Turn) -> BenchError | None:
        entry, key = turn.entry, _process_key(turn)
        python = self._options.python.get(entry.module)
        module = "pipeline" if self._options.pipeline and entry.name != RAW.name else entry.module
        command = client_command(module, python) if python else client_command(module)
        data = self._data
        environment = client_environment(AWS_REGION=data.region, AWS_DEFAULT_REGION=data.region)
        if data.endpoint_url:
            environment["AWS_ENDPOINT_URL"] = data.endpoint_url
        if data.is_anonymous:
            environment[ANONYMOUS_VARIABLE] = "1"
        process = ClientProcess(entry.name, command, environment=environment, answer_s_max=ANSWER_S_MAX)
        self._stack.callback(process.close)
        opening = {"do": "open", "url": data.endpoint_url, "bucket": data.bucket, "options": _options(turn)}
        try:
            self._versions[key] = process.ask(opening)["versions"]
        except BenchError as error:
            process.close()
            return error
        self._processes[key] = process
        return None
