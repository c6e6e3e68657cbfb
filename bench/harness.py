"""What all benchmarks share: clients as subprocesses, turns in rotation, medians and spreads, a table, and a line of JSON.

Clients take turns repetition by repetition within one run against one server, because on a shared machine two runs
differ more than two clients do. Ratios are medians of the ratios within each turn, for the same reason.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Self

from clients import BUCKET, HERE, BenchError, Wrk
from origin.origin import Origin, shared_memory_folder
from peers._driver import fingerprint

MIB = 1 << 20


class Options(argparse.Namespace):
    """The options of the command line."""

    quick: bool
    repetitions: int | None
    only: str | None

    def turns(self, usual: int, quick: int) -> int:
        return self.repetitions or (quick if self.quick else usual)

    def select(self, clients: list[Any]) -> list[Any]:
        wanted = self.only.split(",") if self.only else []
        return [c for c in clients if not wanted or any(c.name.startswith(word) for word in wanted)]


def arguments(question: str, **extra: dict[str, Any]) -> Options:
    """Parse --quick, --repetitions, --only and the options that a benchmark adds."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # clean up, as after Ctrl-C
    parser = argparse.ArgumentParser(description=question, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small run that shows that it works: not for quoting")
    parser.add_argument("--repetitions", type=int, help="turns of each client")
    parser.add_argument("--only", help="comma-separated beginnings of clients' names; the rest sit out")
    for name, options in extra.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **options)
    return parser.parse_args(namespace=Options())


# ── data ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def memory_folder() -> Iterator[Path]:
    """Create a folder in /dev/shm that is removed at the end."""
    folder = shared_memory_folder("penstock-bench")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def touch_memory(size_bytes: int) -> None:
    """Have a process write to this much memory and end.

    A virtual machine gives free memory back to its host after two seconds, and pays a second or two per GB to get it again.
    Without this, clients that take much memory are measured by how long ago another one gave as much free.
    """
    subprocess.run([sys.executable, "-c", "import sys; b'1' * int(sys.argv[1])", str(size_bytes)], check=True)


@contextmanager
def objects(sizes: dict[str, tuple[int, int]]) -> Iterator[Path]:
    """Create a root folder in memory with one bucket of random objects, {prefix: (count, bytes each)}; removed at the end."""
    with memory_folder() as root:
        random = Random(0)
        for prefix, (count, size_bytes) in sizes.items():
            folder = root / BUCKET / prefix
            folder.mkdir(parents=True)
            block = random.randbytes(min(size_bytes, 4 * MIB))
            for index in range(count):
                with (folder / f"{index:06d}").open("wb") as file:
                    file.write(random.randbytes(64))  # makes the object differ from its neighbours at little cost
                    for start in range(64, size_bytes, len(block)):
                        file.write(block[: min(len(block), size_bytes - start)])
        yield root


def keys_of(prefix: str, count: int) -> list[str]:
    return [f"{prefix}/{index:06d}" for index in range(count)]


def expected(root: Path, keys: list[str]) -> dict[str, int]:
    """Return what a correct client answers for these keys."""
    found: dict[str, list[Any]] = {}
    check = total = 0
    for index, key in enumerate(keys):
        if key not in found:
            with (root / BUCKET / key).open("rb") as file:
                first, size_bytes = file.read(1), file.seek(0, os.SEEK_END)
                file.seek(size_bytes - 1)
                found[key] = [_Ends(first + file.read(1), size_bytes)]
        check += fingerprint(index, found[key])
        total += len(found[key][0])
    return {"objects": len(keys), "bytes": total, "check": check & 0xFFFFFFFFFFFFFFFF}


def verified(client: Any, answer: dict[str, Any], root: Path, keys: list[str]) -> dict[str, Any]:
    """Return `answer`. Raises ``BenchError`` if the client did not deliver exactly these objects."""
    wanted = expected(root, keys)
    if wrong := {name: answer[name] for name, value in wanted.items() if answer[name] != value}:
        raise BenchError(f"{client.name} delivered {wrong}, not {wanted}")
    return answer


class _Ends:
    """Represents a large object in ``fingerprint`` by its length, first byte and last byte."""

    def __init__(self, ends: bytes, size_bytes: int) -> None:
        self.ends, self.size_bytes = ends, size_bytes

    def __len__(self) -> int:
        return self.size_bytes

    def __getitem__(self, index: int) -> int:
        return self.ends[index]


# ── the run ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Row:
    """A comparison with a limit: `values` of each turn, the worst that is accepted, and what we would like to reach.

    More is better unless `less`.
    """

    text: str
    values: list[float]
    limit: float
    target: float
    less: bool = False

    @property
    def verdict(self) -> str:
        value, sign = statistics.median(self.values), -1 if self.less else 1
        if sign * value >= sign * self.target:
            return "target"
        return "pass" if sign * value >= sign * self.limit else "FAIL"

    def record(self) -> dict[str, Any]:
        return {
            "row": self.text, "value": _rounded(statistics.median(self.values)), "min": _rounded(min(self.values)),
            "max": _rounded(max(self.values)), "limit": self.limit, "target": self.target, "verdict": self.verdict,
        }  # fmt: skip


@dataclass
class Run:
    """Clients that take turns against one origin; `metrics` maps a name to a function of one answer.

    Use as a context manager: it starts the clients and ends them.
    """

    question: str
    origin: Origin | None
    clients: list[Any]
    metrics: dict[str, Callable[[dict[str, Any]], float]]
    repetitions: int = 5
    tolerates: Callable[[Any], bool] = lambda client: (
        False
    )  # whether a failure of this client only removes it from the run
    answers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        try:
            for client in self.clients:
                self._stack.callback(client.close)
                client.start(self.origin)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def turns(
        self,
        measure: Callable[[Any], dict[str, Any]],
        *,
        warm: Callable[[Any], object] | None = None,
        touched_bytes: int = 0,
    ) -> None:
        """Call `measure(client)` for each client in turn, `repetitions` times, after one uncounted `warm` for each.

        `touched_bytes` is how much memory every client finds ready at the beginning of its turn; see ``touch_memory``.
        """
        self.answers = {client.name: [] for client in self.clients}
        for client in list(self.clients):
            if warm and not isinstance(client, Wrk):
                with self._sitting_out(client):
                    warm(client)
        for turn in range(self.repetitions):
            for client in list(self.clients):
                with self._sitting_out(client):
                    touch_memory(touched_bytes)
                    self.answers[client.name].append(measure(client))
                    print(f"{self.question}: turn {turn + 1} of {self.repetitions}: {client.name}", file=sys.stderr)

    @contextmanager
    def _sitting_out(self, client: Any) -> Iterator[None]:
        """Remove a client that fails, if that is tolerated; the record then has the reason."""
        try:
            yield
        except BenchError as error:
            if not self.tolerates(client):
                raise
            print(f"{self.question}: {client.name} sits out: {error}", file=sys.stderr)
            self.failures[client.name] = str(error).splitlines()[0]
            self.clients = [other for other in self.clients if other is not client]
            del self.answers[client.name]

    def values(self, client: str, metric: str) -> list[float]:
        return [self.metrics[metric](answer) for answer in self.answers[client]]

    def ratios(self, metric: str, client: str, base: str) -> list[float]:
        """Return `client` / `base` for each turn; empty if one was left out."""
        if client not in self.answers or base not in self.answers:
            return []
        return [a / b for a, b in zip(self.values(client, metric), self.values(base, metric), strict=True)]

    def differences(self, metric: str, client: str, base: str) -> list[float]:
        """Return `client` - `base` for each turn; empty if one was left out."""
        if client not in self.answers or base not in self.answers:
            return []
        return [a - b for a, b in zip(self.values(client, metric), self.values(base, metric), strict=True)]

    def best(self, metric: str, *names: str, less: bool = False) -> str:
        """Return the configuration of a peer that did best, with which to compare."""
        there = [name for name in names if name in self.answers]
        return (min if less else max)(there, key=lambda name: statistics.median(self.values(name, metric)), default="")

    def report(self, rows: list[Row], **about: Any) -> None:
        """Print the tables and one line of JSON."""
        record: dict[str, Any] = {"bench": self.question, **about, **surroundings(), "repetitions": self.repetitions}
        record["clients"], record["failed"] = {}, self.failures
        table = [["client", *self.metrics]]
        for client in self.clients:
            metrics = {name: _spread(self.values(client.name, name)) for name in self.metrics}
            table.append([client.name, *(f"{m['median']:g} ({m['min']:g}..{m['max']:g})" for m in metrics.values())])
            record["clients"][client.name] = {"options": client.options, "versions": client.versions, **metrics}
        print_report(self.question, table, [row for row in rows if row.values], record)


def print_report(question: str, table: list[list[str]], rows: list[Row], record: dict[str, Any]) -> None:
    """Print the table and the verdicts, and as the last line `record` with them."""
    print(f"\n{question}  (median, min..max)")
    _print_table(table)
    records = [row.record() for row in rows]
    if records:
        print()
        lines = [
            [
                r["row"],
                f"{r['value']:g} ({r['min']:g}..{r['max']:g})",
                f"{r['limit']:g}",
                f"{r['target']:g}",
                r["verdict"],
            ]
            for r in records
        ]
        _print_table([["row", "measured", "limit", "target", "verdict"], *lines])
    print("\n" + json.dumps({**record, "rows": records}), flush=True)


def surroundings() -> dict[str, Any]:
    """Return the commit and the machine to which the numbers belong."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(HERE), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    model = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine = {
        "cpu": model[1] if model else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory_bytes / (1 << 30)),
        "kernel": platform.release(),
        "load_1min": round(os.getloadavg()[0], 2),
    }
    dirty = bool(git("status", "--porcelain", "--untracked-files=no", "--", "../src"))
    commit = git("rev-parse", "--short", "HEAD") + ("+" if dirty else "")
    return {"commit": commit, "machine": machine, "python": platform.python_version()}


def _rounded(value: float) -> float:
    """Round to three significant digits, but never coarser than whole numbers."""
    return round(value, max(0, 2 - math.floor(math.log10(abs(value))))) if value else 0.0


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": _rounded(statistics.median(values)), "min": _rounded(min(values)), "max": _rounded(max(values))}


def _print_table(lines: list[list[str]]) -> None:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for number, line in enumerate(lines):
        first, *rest = zip(line, widths, strict=True)
        print("  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]))
        if not number:
            print("  ".join("-" * width for width in widths))
