"""What benchmarks share: clients that take turns, medians and spreads, tables, and a line of JSON.

Clients take turns repetition by repetition within one run against one server, because on a shared machine two runs
differ more than two clients do. Ratios are medians of the ratios within each turn, for the same reason. Each turn begins with
another client, because the first one of a turn may find the machine in another state than those that follow.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.table import Table

from penstock.bench.process import BenchError
from penstock.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


def touch_memory(size_bytes: int) -> None:
    """Have a process write to this much memory and end.

    A virtual machine gives free memory back to its host after two seconds, and pays a second or two per GB to get it again.
    Without this, clients that take much memory are measured by how long ago another one gave as much free.
    """
    subprocess.run([sys.executable, "-c", "import sys; b'1' * int(sys.argv[1])", str(size_bytes)], check=True)


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
        """``target``, ``pass`` or ``FAIL``, by the median."""
        value, sign = statistics.median(self.values), -1 if self.less else 1
        if sign * value >= sign * self.target:
            return "target"
        return "pass" if sign * value >= sign * self.limit else "FAIL"

    def record(self) -> dict[str, Any]:
        """Return the row as JSON has it."""
        return {
            "row": self.text, "value": rounded(statistics.median(self.values)), "min": rounded(min(self.values)),
            "max": rounded(max(self.values)), "limit": self.limit, "target": self.target, "verdict": self.verdict,
        }  # fmt: skip


@dataclass
class Run:
    """Clients that take turns against one origin. Use it as a context manager: it starts the clients and ends them.

    Attributes:
        question: The title of the tables.
        origin: The server, which ``start`` of each client gets.
        clients: Objects with ``name``, ``options``, ``versions``, ``start(origin)`` and ``close()``.
        metrics: Functions of one answer, by the names of the columns.
        repetitions: Number of turns.
        tolerates: Says whether a client that fails is only removed from the run.
        answers: Answers of each client, one for each turn.
        failures: Reasons of the clients that were removed.
    """

    question: str
    origin: Any
    clients: list[Any]
    metrics: dict[str, Callable[[dict[str, Any]], float]]
    repetitions: int = 5
    tolerates: Callable[[Any], bool] = lambda _client: False
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
        """Call `measure` for each client in turn, `repetitions` times, after one uncounted call of `warm` for each.

        `touched_bytes` is how much memory every client finds ready at the beginning of its turn; see ``touch_memory``.
        """
        self.answers = {client.name: [] for client in self.clients}
        for client in list(self.clients):
            if warm and getattr(client, "is_warmed", True):
                with self._sitting_out(client):
                    warm(client)
        for turn in range(self.repetitions):
            for client in self.clients[turn % len(self.clients) :] + self.clients[: turn % len(self.clients)]:
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
        """Return a metric of each answer of a client."""
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
            metrics = {name: spread(self.values(client.name, name)) for name in self.metrics}
            table.append([client.name, *(f"{m['median']:g} ({m['min']:g}..{m['max']:g})" for m in metrics.values())])
            record["clients"][client.name] = {"options": client.options, "versions": client.versions, **metrics}
        print_report(self.question, table, [row for row in rows if row.values], record)


def print_report(question: str, table: list[list[str]], rows: list[Row], record: dict[str, Any]) -> None:
    """Print the table and the verdicts, and as the last line `record` with them."""
    print_table(f"{question}  (median, min..max)", table)
    records = [row.record() for row in rows]
    if records:
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
        print_table("", [["row", "measured", "limit", "target", "verdict"], *lines])
    print("\n" + json.dumps({**record, "rows": records}), flush=True)


def print_table(title: str, lines: Sequence[Sequence[str]]) -> None:
    """Print lines of cells; the first line is the head, and the first column text."""
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for number, name in enumerate(lines[0]):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for line in lines[1:]:
        table.add_row(*line)
    console = Console(highlight=False, markup=False, emoji=False)
    console.width = max(console.width, 400 if not console.is_terminal else console.width)
    console.print(table)


def surroundings() -> dict[str, Any]:
    """Return the version and the machine to which the figures belong."""
    folder = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        except FileNotFoundError:  # slim images have no git
            return ""

    model = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine = {
        "cpu": model[1] if model else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory_bytes / (1 << 30)),
        "kernel": platform.release(),
        "load_1min": round(os.getloadavg()[0], 2),
    }
    is_ours = bool(
        git("ls-files", "--error-unmatch", str(Path(__file__).resolve()))
    )  # not a repository that holds a venv
    changed = "+" if is_ours and git("status", "--porcelain", "--untracked-files=no", "--", "..") else ""
    commit = git("rev-parse", "--short", "HEAD") + changed if is_ours else __version__
    return {"commit": commit, "machine": machine, "python": platform.python_version()}


def rounded(value: float) -> float:
    """Return the value with three significant digits, but never coarser than whole numbers."""
    return round(value, max(0, 2 - math.floor(math.log10(abs(value))))) if value else 0.0


def spread(values: list[float]) -> dict[str, float]:
    """Return median, minimum and maximum."""
    return {"median": rounded(statistics.median(values)), "min": rounded(min(values)), "max": rounded(max(values))}
