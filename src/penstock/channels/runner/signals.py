"""Signals to the runner while no program runs: they end the run, but never interrupt steps that must be completed."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Iterator

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that end a run, or that its program gets while it runs."""


class Interruptions:
    """The effect of SIGTERM, SIGINT and SIGHUP on a run before its program starts and after it has ended. A context manager.

    The first signal does what it did before; if it would have ended the process, the run is interrupted and cleaned up, and the
    signal ends the process afterwards. Later ones are ignored, so a second Ctrl-C does not interrupt the cleaning. Signals that
    the process ignored, as under ``nohup``, stay ignored.

    Only the main thread can receive signals; elsewhere this does nothing.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._shields_count = 0
        self._noted: int | None = None
        self._is_interrupted = False
        self._fatal: int | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in FORWARDED:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._fatal is not None:
            os.kill(os.getpid(), self._fatal)

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Delay signals to the end of the block, which has to be short."""
        self._shields_count += 1
        try:
            yield
        finally:
            self._shields_count -= 1
        if not self._shields_count and self._noted is not None:
            self._deliver(self._noted)

    @contextmanager
    def cleanup(self) -> Iterator[ExitStack]:
        """Give a stack whose callbacks no signal interrupts."""
        stack = ExitStack()
        try:
            yield stack
        finally:
            with self.shielded():
                stack.close()

    def _on_signal(self, number: int, _frame: object) -> None:
        if self._shields_count:
            self._noted = self._noted or number
        else:
            self._deliver(number)

    def _deliver(self, number: int) -> None:
        self._noted = None
        if self._is_interrupted:
            return
        self._is_interrupted = True
        handler = self._before[number]
        if callable(handler):
            handler(number, None)
            self._is_interrupted = False  # the handler wants the run to go on
            return
        self._fatal = number
        raise KeyboardInterrupt
