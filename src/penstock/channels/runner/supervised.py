"""The runner's side of the supervisor: it starts the program, passes signals to it, and learns how it ended.

All processes of a run inherit its mark, a variable of the environment, by which those are found that nobody adopted.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SUPERVISOR = Path(__file__).with_name("supervisor.py")
SIGNAL_BASE = 128
"""A program that a signal ended has this exit code plus the signal's number, as in a shell."""


MARK = "PENSTOCK_RUN_MARK"
END_S_MAX = 10.0
"""How long processes may take to vanish after SIGKILL; those in uninterruptible sleep are left to the kernel."""

_LENGTH = 32
_FORM = re.compile(f"[0-9a-f]{{{_LENGTH}}}")


class SupervisedProgram:
    """A program under a supervisor. ``close`` ends everything that it has started.

    It must be made in a thread that lives as long as the program, because the kernel ties them together.

    Args:
        command: The program and its arguments.
        environment: All variables of the program.
        base: Base directory of the run.
        is_private: Whether the base directory is removed if the runner is killed.
        mark: The mark of the run, which its processes inherit.
        stop_s: Seconds between SIGTERM and SIGKILL if the runner is killed.
        pass_fds: Descriptors that the supervisor keeps open: the lock of the base directory.
        cwd: Working directory of the program.

    Raises:
        ConfigError: There is no such program, or it cannot be executed.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        base: Path,
        is_private: bool,
        mark: str,
        stop_s: float,
        pass_fds: Sequence[int] = (),
        cwd: Path | None = None,
    ) -> None:
        self.command = list(command)
        control_r, self._control_fd = os.pipe2(os.O_CLOEXEC)
        self.status_fd, status_w = os.pipe2(os.O_CLOEXEC)
        self._line = b""
        self._mark = mark
        settings = {
            "command": self.command,
            "control_fd": control_r,
            "status_fd": status_w,
            "stop_s": stop_s,
            "base": str(base),
            "is_private": is_private,
        }
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(SUPERVISOR), json.dumps(settings)],
                env={**environment, MARK: self._mark},
                pass_fds=(control_r, status_w, *pass_fds),
                cwd=cwd,
            )
        except BaseException:
            os.close(self._control_fd)
            os.close(self.status_fd)
            raise
        finally:
            os.close(control_r)
            os.close(status_w)

    def send(self, number: int) -> None:
        """Send a signal to the program, but not to its children; nothing if it has ended."""
        self._control(number)

    def kill(self) -> None:
        """End the program and everything that it has started, at once."""
        self._control(0)

    def wait_exit_code(self, wait_s_max: float) -> int | None:
        """Wait for the end of the program, for a while; None if it still runs.

        Raises:
            ConfigError: The program could not be started.
            PenstockError: The supervisor was killed.
        """
        poller = select.poll()
        poller.register(self.status_fd, select.POLLIN)
        if not poller.poll(max(0.0, wait_s_max) * 1000):
            return None
        self._line += os.read(self.status_fd, 64)
        kind, _, number = self._line.decode().strip().partition(" ")
        self._process.wait()
        if kind == "exit":
            return int(number)
        if kind == "signal":
            return SIGNAL_BASE + int(number)
        if kind == "error":
            hint = "is it on the PATH?" if int(number) == errno.ENOENT else "is it executable?"
            raise ConfigError(f"cannot run {self.command[0]!r}: {os.strerror(int(number))}", hint=hint)
        end_marked(self._mark)
        raise PenstockError(f"the supervisor of {self.command[0]!r} was killed, and the program with it")

    def close(self) -> None:
        """End everything that still runs, and wait for its end; idempotent."""
        if self._control_fd < 0:
            return
        self.kill()
        self._process.wait()
        os.close(self._control_fd)
        os.close(self.status_fd)
        self._control_fd = -1

    def _control(self, number: int) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._control_fd, bytes([number]))


def new_mark() -> str:
    """Return a mark that no other run has."""
    return secrets.token_hex(_LENGTH // 2)


def write_mark(fd: int, mark: str) -> None:
    """Write the mark of a run to its lock, an open file."""
    os.pwrite(fd, mark.encode(), 0)


def read_mark(fd: int) -> str:
    """Return the mark in the lock of a run, an open file; empty if there is none."""
    text = os.pread(fd, _LENGTH, 0).decode("ascii", "replace")
    return text if _FORM.fullmatch(text) else ""


def end_marked(mark: str) -> bool:
    """Kill every process that has the mark of a run in its environment, until there is none. An empty mark is nobody's.

    Returns:
        False if this process has the mark itself; it then ends nothing, because it would end itself.
    """
    if os.environ.get(MARK, "") == mark:
        return not mark
    deadline_s = time.monotonic() + END_S_MAX
    while mark and (found := _marked(mark)) and time.monotonic() < deadline_s:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return True


def _marked(mark: str) -> list[int]:
    """Return the processes that have inherited a mark; those that have ended have no environment."""
    entry = f"{MARK}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if entry in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
    return found
