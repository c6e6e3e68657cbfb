"""Code that runs in a process of its own, with a bound on the memory that it may touch."""

from __future__ import annotations

import subprocess
import sys
import textwrap

_HEAD = """
import resource

def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

def begin():
    global began_bytes
    began_bytes = peak_bytes()

"""


def run_bounded(code: str, *, memory_bytes_max: int, timeout_s: float = 100) -> str:
    """What `code` prints.

    Args:
        code: Indented as a whole if you like. It calls ``begin()`` once everything that it needs is imported.
        memory_bytes_max: By which its memory may grow from there on, at its peak.
        timeout_s: Seconds until it is killed.

    Raises:
        AssertionError: It failed, or took more memory.
    """
    tail = "\nimport sys; print(peak_bytes() - began_bytes, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", _HEAD + textwrap.dedent(code) + tail],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    grown_bytes = int(done.stderr.split()[-1])
    assert grown_bytes <= memory_bytes_max, f"{grown_bytes} bytes, and {memory_bytes_max} are allowed"
    return done.stdout
