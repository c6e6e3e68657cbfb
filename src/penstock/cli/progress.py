"""How a long command goes: a bar on a terminal, JSON lines for machines, one line at the end for everybody else.

Of the JSON lines nothing else may come in between: while the work is done, what anybody prints (a transform, Ray's
messages of its machines) goes to stderr.
"""

from __future__ import annotations

import json
import sys
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack, redirect_stdout
from typing import Any, Self


class Report(ABC):
    """Counts, prints and shows progress; what it hears and says at the end belongs to each command.

    Args:
        as_json: JSON lines on stdout, and no bar.
        has_bar: Whether there is a bar on a terminal.
    """

    def __init__(self, *, as_json: bool, has_bar: bool = True) -> None:
        self.as_json = as_json
        self._has_bar = has_bar and not as_json
        self.start_s = time.monotonic()
        self.bar: Any = None
        self._task: Any = None
        self._out = sys.stdout
        self._redirected = ExitStack()

    def __enter__(self) -> Self:
        if sys.stderr.isatty() and self._has_bar:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = [TextColumn("{task.description}"), BarColumn(), *self.columns()]
            self.bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self.bar.add_task("listing", total=None, rate="")
            self.bar.start()
        if self.as_json:
            self._redirected.enter_context(redirect_stdout(sys.stderr))
        return self

    def __exit__(self, *_: object) -> None:
        self._redirected.close()
        if self.bar is not None:
            self.bar.stop()

    @abstractmethod
    def columns(self) -> list[Any]:
        """What rich shows behind the bar."""

    def update(self, **values: Any) -> None:
        """Change what the bar shows: ``advance``, ``total``, ``description``, or a field of a column."""
        if self.bar is not None:
            self.bar.update(self._task, **values)

    def say(self, action: str, **values: Any) -> None:
        """One line for machines; nothing for others."""
        if self.as_json:
            print(json.dumps({"action": action, **values}), file=self._out, flush=True)

    @property
    def seconds(self) -> float:
        """Since the work began."""
        return time.monotonic() - self.start_s
