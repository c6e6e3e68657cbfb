"""Progress of a long command: a bar on a terminal, JSON lines for machines, and one summary line otherwise.

No other output may come between JSON lines: while the work is done, everything that other code prints (a transform, or
Ray's messages about its machines) goes to stderr.
"""

from __future__ import annotations

import json
import sys
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack, redirect_stdout
from typing import Any, Self

from penstock.cli.output import print_message
from penstock.redaction import printable


class ProgressReport(ABC):
    """Counts, prints and shows progress; each command adds its events and its summary. A context manager.

    Args:
        as_json: Whether to print JSON lines on stdout; there is no bar then.
        has_bar: Whether to show a bar on a terminal.
        flushes: Whether each JSON line is flushed; for a line per small object, that costs more than the line.
    """

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
            from rich.progress import Progress, TextColumn

            columns = [TextColumn("{task.description}"), *self.columns()]
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

    @abstractmethod
    def columns(self) -> list[Any]:
        """Return the columns that rich shows after the description."""

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
