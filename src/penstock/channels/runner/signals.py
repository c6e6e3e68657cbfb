"""Signals to the runner: while a program runs they become signals to it; before and after they end the run.

They never interrupt what must not be left half-done.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.channels.runner.supervised import SupervisedProgram

STOP_S = 120.0
"""Seconds between the first signal and SIGKILL, as on SageMaker."""

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopping:
    """Passes signals on to a program, and says when its time is over.

    Args:
        program: The program.
        stop_s: Seconds that it has after the first signal.
        runtime_s_max: Seconds after which it gets SIGTERM.

    Attributes:
        is_out_of_time: Whether it has got SIGTERM for that reason.
    """

    def __init__(self, program: SupervisedProgram, *, stop_s: float = STOP_S, runtime_s_max: float = math.inf) -> None:
        self._program = program
        self._stop_s = stop_s
        self._runtime_end_s = time.monotonic() + runtime_s_max
        self.is_out_of_time = False
        self._deadline_s: float | None = None
        self.signal_number: int | None = None
        """The first signal that the runner has received; None if none came."""

    @contextmanager
    def forwarding(self) -> Iterator[None]:
        """Pass signals on inside the block, unless this process ignores them, as it does SIGHUP under ``nohup``.

        Only the main thread can do so; elsewhere nothing is passed on.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        heard = [number for number in FORWARDED if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._on_signal) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def stop(self) -> None:
        """Ask the program to end."""
        self._begin()
        self._program.send(signal.SIGTERM)

    def check(self) -> None:
        """Ask the program to end if its time is over; end it and all that it started if it has not done so in time."""
        now_s = time.monotonic()
        if self._deadline_s is None and now_s >= self._runtime_end_s:
            self.is_out_of_time = True
            self.stop()
        if self._deadline_s is not None and now_s >= self._deadline_s:
            self._program.kill()

    def _begin(self) -> None:
        if self._deadline_s is None:
            self._deadline_s = time.monotonic() + self._stop_s

    def _on_signal(self, number: int, _frame: object) -> None:
        self.signal_number = self.signal_number or number
        self._begin()
        if number != signal.SIGINT or not _is_foreground():
            self._program.send(number)


def _is_foreground() -> bool:
    """Whether this process is in the foreground of a terminal, so that Ctrl-C reaches the program, too."""
    try:
        fd = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(fd)


class Interruptions:
    """What SIGTERM, SIGINT and SIGHUP do to a run before its program starts and after it has ended. A context manager.

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
