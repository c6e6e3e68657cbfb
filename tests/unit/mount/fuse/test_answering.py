"""Which signals end a thread, from its entry in /proc."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from penstock.mount.fuse.answering import is_dying, is_fatal


def status(**masks: list[int]) -> bytes:
    """The lines of ``/proc/ID/status`` that matter, among others; each mask is given by its signals."""
    lines = ["Name:\tSigPnd: 0000000000000100", "SigQ:\t0/7866"]
    for name in ("SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt"):
        lines.append(f"{name}:\t{sum(1 << (number - 1) for number in masks.get(name, [])):016x}")
    return "\n".join([*lines, "Seccomp:\t0", ""]).encode()


@pytest.mark.parametrize(
    ("masks", "expected"),
    [
        ({}, False),
        ({"SigPnd": [signal.SIGKILL]}, True),
        ({"ShdPnd": [signal.SIGKILL]}, True),
        ({"SigPnd": [signal.SIGTERM]}, True),
        ({"ShdPnd": [signal.SIGQUIT]}, True),
        ({"ShdPnd": [signal.SIGRTMAX]}, True),
        ({"ShdPnd": [signal.SIGTERM], "SigCgt": [signal.SIGTERM]}, False),
        ({"ShdPnd": [signal.SIGINT], "SigIgn": [signal.SIGINT]}, False),
        ({"SigPnd": [signal.SIGALRM], "SigBlk": [signal.SIGALRM]}, False),
        ({"SigPnd": [signal.SIGCHLD]}, False),
        ({"SigPnd": [signal.SIGTSTP, signal.SIGCONT, signal.SIGURG]}, False),
        ({"SigPnd": [signal.SIGCHLD, signal.SIGKILL], "SigBlk": [signal.SIGCHLD]}, True),
    ],
)
def test_fatal_signals(masks: dict[str, list[int]], expected: bool) -> None:
    """A pending signal is fatal unless it is blocked, ignored, caught or harmless; SIGKILL always is."""
    assert is_fatal(status(**masks)) is expected


def test_threads() -> None:
    """This thread lives, a thread that has ended counts as dying, and one that cannot be seen does not."""
    assert not is_dying(os.getpid())
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    assert is_dying(ended.pid)
    assert not is_dying(0)
