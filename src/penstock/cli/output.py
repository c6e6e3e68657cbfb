"""Output of commands. Names in a store, and messages that quote them, must not control a terminal."""

from __future__ import annotations

import json
import logging
import sys
import time
from contextlib import ExitStack, redirect_stdout
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Self

from penstock.errors import PenstockError
from penstock.redaction import printable, public_text
from penstock.text.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NAMES_MAX = 10
"""Names of a list that are shown."""


def print_result(line: str) -> None:
    """Print one line of a command's result on stdout. On a terminal, control characters are escaped."""
    sys.stdout.write((printable(line) if sys.stdout.isatty() else line) + "\n")


def shortened(names: Sequence[str]) -> str:
    """Return the first names of a list, and how many more there are."""
    more = len(names) - NAMES_MAX
    return ", ".join(names[:NAMES_MAX]) + (f", ... {more} more" if more > 0 else "")


def shown_classes(classes: Sequence[str]) -> str:
    """Return a line that has the number and the name of the first classes."""
    return f"{len(classes)} classes: {shortened([f'{number} {name}' for number, name in enumerate(classes)])}"


def print_record(values: Mapping[str, Any], text: str, *, as_json: bool) -> None:
    """Print one line of a command's result on stdout: `values` as JSON, or the text."""
    print_result(json.dumps(values) if as_json else text)


def time_text(seconds: float | None) -> str | None:
    """Return a time in seconds since 1970 as a UTC text, e.g. ``2026-01-02T03:04:05Z``; None for None."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def print_message(line: str) -> None:
    """Print one line for people on stderr. Control characters are always escaped, because logs are read on terminals."""
    print(printable(line), file=sys.stderr)


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, which is in the singular for 1: ``1 shard``, ``2 shards``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def one_line(error: Exception) -> str:
    """Return an error's message as one line; for errors of the operating system, with the name of the file."""
    if isinstance(error, PenstockError) or not isinstance(error, OSError):
        return " ".join(str(error).split())
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"


class PrintableFormatter(logging.Formatter):
    """Formats log records for stderr. They may quote names in a store, and URLs that hold secrets."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's text with control characters escaped and without secrets."""
        return printable(public_text(super().format(record)), lines=True)


class ProgressReport:
    """Counts, prints and shows progress; each command adds its events and its summary. A context manager.

    Args:
        as_json: Whether to print JSON lines on stdout; there is no bar then.
        has_bar: Whether to show a bar on a terminal.
        flushes: Whether each JSON line is flushed; for a line per small object, that costs more than the line.

    Attributes:
        shown: Names of rich's columns in the bar after the description, and ``Rate`` for what ``update(rate=...)`` says.
    """

    shown: tuple[str, ...] = ("Bar", "TimeElapsed")

    def __init__(self, *, as_json: bool, has_bar: bool = True, flushes: bool = True) -> None:
        self.as_json = as_json
        self._flushes = flushes
        self._has_bar = has_bar and not as_json
        self.start_s = time.monotonic()
        self._bar: Any = None
        self._task: Any = None
        self._out = sys.stdout
        self._redirected = ExitStack()

    def __enter__(self) -> Self:
        if sys.stderr.isatty() and self._has_bar:
            from rich.console import Console
            from rich.progress import Progress, ProgressColumn, TextColumn
            from rich.text import Text

            from penstock.store.reachability import longest_wait_s

            class WaitColumn(ProgressColumn):
                """For how long the store has not answered."""

                def render(self, _task: Any) -> Text:
                    waited_s = longest_wait_s()
                    return Text(f"the store does not answer: {waited_s:.0f} s" if waited_s else "")

            columns = [TextColumn("{task.description}"), *self.columns(), WaitColumn()]
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("listing", total=None, rate="")
            self._bar.start()
        if self.as_json:
            self._redirected.enter_context(redirect_stdout(sys.stderr))
        return self

    def __exit__(self, *_: object) -> None:
        self._redirected.close()
        self.end_bar()

    def end_bar(self) -> None:
        """Remove the bar; idempotent."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()

    def columns(self) -> list[Any]:
        """Return the columns that rich shows after the description."""
        from rich import progress

        made = {
            "Download": progress.DownloadColumn(binary_units=True),
            "Rate": progress.TextColumn("{task.fields[rate]}"),
        }
        return [made.get(name) or getattr(progress, f"{name}Column")() for name in self.shown]

    @property
    def has_bar(self) -> bool:
        """Whether a bar is shown now."""
        return self._bar is not None

    @property
    def seconds(self) -> float:
        """Seconds since the work began."""
        return time.monotonic() - self.start_s

    def update(self, **values: Any) -> None:
        """Change what the bar shows: ``advance``, ``total``, ``description``, or a field of a column."""
        if self._bar is not None:
            self._bar.update(self._task, **values)

    def rate(self, size_bytes: int) -> str:
        """Return how many bytes a second these are, counted from the beginning of the work."""
        return f"{format_bytes(size_bytes / max(self.seconds, 1e-9))}/s"

    def print_summary(self, **values: Any) -> None:
        """Print the last JSON line, with the seconds since the work began."""
        self.print_json(action="summary", **values, seconds=round(self.seconds, 3))

    def print_json(self, **values: Any) -> None:
        """Print one JSON line if the report is for machines."""
        if self.as_json:
            print(json.dumps(values), file=self._out, flush=self._flushes)

    def print_message(self, line: str) -> None:
        """Print one line for people on stderr, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(printable(line), markup=False, highlight=False)
        else:
            print_message(line)
