"""The mark of a run: a variable that all its processes inherit, by which those are found that nobody adopted."""

from __future__ import annotations

import os
import re
import secrets
import signal
import time
from contextlib import suppress
from pathlib import Path

MARK = "PENSTOCK_RUN_MARK"
END_S_MAX = 10.0
"""How long processes may take to vanish after SIGKILL; those in uninterruptible sleep are left to the kernel."""

_LENGTH = 32
_FORM = re.compile(f"[0-9a-f]{{{_LENGTH}}}")


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
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return True


def _marked(mark: str) -> list[int]:
    """Return the processes that have inherited a mark; those that have ended have no environment."""
    entry = f"{MARK}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if entry in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
    return found
