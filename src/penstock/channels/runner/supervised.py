"""The runner's side of the supervisor: it starts the program, passes signals on to it, and ends it when its time is over."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.channels.runner.base import MARK, end_marked
from penstock.channels.runner.signals import FORWARDED
from penstock.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.channels.runner.base import BaseDirectory

SUPERVISOR = Path(__file__).with_name("supervisor.py")
KILL = 0
"""What the supervisor is sent, in place of a signal, to end the program and everything that it has started."""
SIGNAL_BASE = 128
"""A program that a signal ended has this exit code plus the signal's number, as in a shell."""


STOP_S = 120.0
"""Seconds between the first signal and SIGKILL, as on SageMaker."""


class SupervisedProgram:
    """A program under a supervisor. ``close`` ends everything that it has started.

    It must be made in a thread that lives as long as the program, because the kernel ties them together.

    Args:
        command: The program and its arguments.
        environment: All variables of the program.
        base: Base directory of the run, which the supervisor cleans if the runner is killed.
        stop_s: Seconds that the program has after the first signal.
        runtime_s_max: Seconds after which it gets SIGTERM.

    Attributes:
        is_out_of_time: Whether it has got SIGTERM for that reason.

    Raises:
        ConfigError: There is no such program, or it cannot be executed.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        base: BaseDirectory,
        stop_s: float = STOP_S,
        runtime_s_max: float = math.inf,
    ) -> None:
        self._command = list(command)
        self._mark = base.mark
        self._stop_s = stop_s
        self._runtime_end_s = time.monotonic() + runtime_s_max
        self._deadline_s: float | None = None
        self.is_out_of_time = False
        control_r, self._control_fd = os.pipe2(os.O_CLOEXEC)
        self._status_fd, status_w = os.pipe2(os.O_CLOEXEC)
        self._line = b""
        settings = {
            "command": self._command,
            "control_fd": control_r,
            "status_fd": status_w,
            "stop_s": stop_s,
            "base": str(base.layout.base),
            "is_private": base.is_private,
        }
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(SUPERVISOR), json.dumps(settings)],
                env={**environment, MARK: self._mark},
                pass_fds=(control_r, status_w, base.lock_fd),  # the lock is held as long as the supervisor lives
            )
        except BaseException:
            os.close(self._control_fd)
            os.close(self._status_fd)
            raise
        finally:
            os.close(control_r)
            os.close(status_w)

    @contextlib.contextmanager
    def forwarding(self) -> Iterator[None]:
        """Pass signals on to the program inside the block, unless this process ignores them, as SIGHUP under ``nohup``.

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

    def _on_signal(self, number: int, _frame: object) -> None:
        self._begin_stopping()
        if number != signal.SIGINT or not _is_foreground():
            self._control(number)

    def stop(self) -> None:
        """Ask the program, but not its children, to end."""
        self._begin_stopping()
        self._control(signal.SIGTERM)

    def _begin_stopping(self) -> None:
        if self._deadline_s is None:
            self._deadline_s = time.monotonic() + self._stop_s

    def _check_time(self) -> None:
        """Ask the program to end if its time is over; end it and all that it started if it has not done so in time."""
        now_s = time.monotonic()
        if self._deadline_s is None and now_s >= self._runtime_end_s:
            self.is_out_of_time = True
            self.stop()
        if self._deadline_s is not None and now_s >= self._deadline_s:
            self._control(KILL)

    def wait_exit_code(self, wait_s_max: float) -> int | None:
        """Wait for the end of the program, for a while; None if it still runs. Ends it when its time is over.

        Raises:
            ConfigError: The program could not be started.
            PenstockError: The supervisor was killed.
        """
        poller = select.poll()
        poller.register(self._status_fd, select.POLLIN)
        if not poller.poll(max(0.0, wait_s_max) * 1000):
            self._check_time()
            return None
        self._line += os.read(self._status_fd, 64)
        kind, _, number = self._line.decode().strip().partition(" ")
        self._process.wait()
        if kind == "exit":
            return int(number)
        if kind == "signal":
            return SIGNAL_BASE + int(number)
        if kind == "error":
            hint = "is it on the PATH?" if int(number) == errno.ENOENT else "is it executable?"
            reason = os.strerror(int(number))
            raise ConfigError(f"cannot run {self._command[0]!r}: {reason}", hint=hint) from OSError(int(number), reason)
        end_marked(self._mark)
        raise PenstockError(f"the supervisor of {self._command[0]!r} was killed, and the program with it")

    def close(self) -> None:
        """End everything that still runs, and wait for its end; idempotent."""
        if self._control_fd < 0:
            return
        self._control(KILL)
        self._process.wait()
        os.close(self._control_fd)
        os.close(self._status_fd)
        self._control_fd = -1

    def _control(self, number: int) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._control_fd, bytes([number]))


def _is_foreground() -> bool:
    """Return whether this process is in the foreground of a terminal, so that Ctrl-C reaches the program, too."""
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
