"""``run_benchmark``: the clients take turns on one data set, within a given time."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from penstock.bench.clients import ENTRIES, RAW, STEP_ALONE, UNDECODED, Entry
from penstock.bench.measuring import Monitor
from penstock.bench.process import BenchError, ClientProcess, client_command, client_environment
from penstock.bench.turns import surroundings
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.bench.data import DataFacts
    from penstock.bench.record import BenchRecord

ROUNDS = 2
TURN_S_MIN = 1.0
ANSWER_S_MAX = 120.0
STARTING_RATIO = 0.35
"""Share of the time that is left for starting clients, by which turns are shorter."""

Progress = Callable[[str, int, int], object]
"""Is told what runs now, the number of turns that are done, and that of all turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What a run measures, and for how long.

    Attributes:
        clients: Beginnings of names of clients; empty: all.
        batch: Samples of a batch.
        decode: Whether pictures are decoded to 224 x 224.
        step: The training step, see ``clients/steps.py``.
        seconds: Time for everything, in seconds.
        sweep: Values of settings, by name; each client runs with each combination.
        shuffle: Samples of the shuffle window; 0: none.
        python: Interpreters of single modules of clients, whose environments are apart; others run in this one.
    """

    clients: Sequence[str] = ()
    batch: int = 128
    decode: bool = False
    step: str = "none"
    seconds: float = 120.0
    sweep: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    shuffle: int = 0
    python: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Turn:
    entry: Entry
    settings: dict[str, Any]
    number: int

    def is_done(self, record: BenchRecord) -> bool:
        return self.entry.name in record.not_run or record.has_turn(self.entry.name, self.settings, self.number)


def selected(names: Sequence[str]) -> list[Entry]:
    """Return the clients whose names begin with one of `names`; all, if there are none.

    Raises:
        ConfigError: No client's name begins so.
    """
    for name in names:
        if not any(entry.name.lower().startswith(name.lower()) for entry in ENTRIES):
            known = [entry.name for entry in ENTRIES]
            near = get_close_matches(name, known, 1)
            raise ConfigError(
                f"no client is called {name!r}", hint=f"did you mean {near[0]!r}?" if near else "; ".join(known)
            )
    wanted = tuple(name.lower() for name in names)
    return [entry for entry in ENTRIES if not wanted or entry.name.lower().startswith(wanted)]


def run_benchmark(
    data: DataFacts, options: BenchOptions, record: BenchRecord, progress: Progress = lambda *_: None, **about: Any
) -> None:
    """Measure what is not in `record` yet, and add it.

    A client that cannot run, or fails, is recorded with the reason. Ctrl-C ends the clients; the record keeps what there is.

    Raises:
        ConfigError: The record is of another URL, batch, decoding, step or shuffle window, or no client has such a name.
    """
    settings = {"batch": options.batch, "decode": options.decode, "step": options.step, "shuffle": options.shuffle}
    if record.run:
        before, now = {**record.run["settings"], "url": record.run["data"]["url"]}, {**settings, "url": data.url}
        if other := [name for name, value in now.items() if before[name] != value]:
            raise ConfigError(f"{record.path} holds a run with another {' and '.join(other)}", hint="another --out")
    else:
        settings |= {"clients": list(options.clients), "seconds": options.seconds, "sweep": dict(options.sweep)}
        record.add("run", settings=settings, data=data.record(), started=time.time(), **about, **surroundings())
    entries = [RAW]
    if options.step != "none":
        entries.append(STEP_ALONE)
    if options.decode and data.is_picture:
        entries.append(UNDECODED)
    for entry in selected(options.clients):
        decode = options.decode and data.is_picture
        module_python = options.python.get(entry.module)
        if (reason := entry.reason_not_run(data.format, decode=decode)) and not (
            module_python and "installed" in reason
        ):
            if entry.name not in record.not_run:
                record.add("not run", name=entry.name, reason=reason)
        else:
            entries.append(entry)
    combinations = [
        dict(zip(options.sweep, values, strict=True)) for values in itertools.product(*options.sweep.values())
    ]
    turns = [
        _Turn(entry, settings, number)
        for number in range(ROUNDS)
        for settings in combinations
        for entry in _rotated(entries, number)
    ]
    seconds = max(TURN_S_MIN, options.seconds * (1 - STARTING_RATIO) / max(1, len(turns)))
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch, ExitStack() as stack:
        runner = _Runner(data, options, record, stack, scratch, seconds)
        for done, turn in enumerate(turns):
            progress(turn.entry.name, done, len(turns))
            if not turn.is_done(record):
                runner.run(turn)
    record.add("end", ended=time.time())


def _rotated(entries: list[Entry], number: int) -> list[Entry]:
    start = number % len(entries) if entries else 0
    return entries[start:] + entries[:start]


class _Runner:
    """Starts each client before its first turn, and keeps it."""

    def __init__(
        self,
        data: DataFacts,
        options: BenchOptions,
        record: BenchRecord,
        stack: ExitStack,
        scratch: str,
        seconds: float,
    ) -> None:
        self._data, self._options, self._record, self._stack = data, options, record, stack
        self._job = {
            "keys": list(data.keys), "prefix": data.prefix, "batch": options.batch, "image": data.image,
            "label": data.label, "label_kind": data.label_kind, "format": data.format, "objects": data.format == "objects",
            "decode": options.decode and data.is_picture, "shuffle": options.shuffle, "scratch": scratch,
            "seconds_max": seconds, "step": options.step,
        }  # fmt: skip
        self._processes: dict[str, ClientProcess] = {}

    def run(self, turn: _Turn) -> None:
        """Measure one turn and add it to the record, or the reason why it failed."""
        entry = turn.entry
        try:
            process, versions = self._started(entry, turn.settings)
            with Monitor(process.pid) as monitor:
                answer = process.ask({"do": "epoch", "job": {**self._job, **entry.job, **turn.settings}})
        except BenchError as error:
            self._record.add("not run", name=entry.name, reason=f"failed: {str(error).splitlines()[0]}")
            return
        self._record.add(
            "turn", name=entry.name, round=turn.number, settings=turn.settings, is_ours=entry.is_ours, versions=versions,
            pss_bytes=monitor.peak_pss_bytes, monitor=monitor.series, **answer,
        )  # fmt: skip

    def _started(self, entry: Entry, settings: Mapping[str, Any]) -> tuple[ClientProcess, dict[str, str]]:
        options = dict(entry.options)
        if "workers" in settings and entry.workers is not None:
            options[entry.workers] = settings["workers"]
        key = f"{entry.name} {sorted(options.items())}"
        python = self._options.python.get(entry.module)
        command = client_command(entry.module, python) if python else client_command(entry.module)
        data = self._data
        if key not in self._processes:
            environment = client_environment(AWS_REGION=data.region, AWS_DEFAULT_REGION=data.region)
            if data.endpoint_url:
                environment["AWS_ENDPOINT_URL"] = data.endpoint_url
            process = ClientProcess(entry.name, command, environment=environment, answer_s_max=ANSWER_S_MAX)
            self._stack.callback(process.close)
            self._processes[key] = process
            opening = {"do": "open", "url": data.endpoint_url, "bucket": data.bucket, "options": options}
            self._versions = {**getattr(self, "_versions", {}), key: process.ask(opening)["versions"]}
        return self._processes[key], self._versions[key]
