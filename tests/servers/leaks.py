"""Whether a piece of code leaves threads, descriptors or child processes behind."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SETTLE_S_MAX = 5.0
"""How long threads and processes that were told to end may take; waiting ends as soon as nothing is left."""


def threads() -> set[str]:
    """Living threads."""
    return {f"thread {thread.name} ({thread.ident})" for thread in threading.enumerate()}


def descriptors() -> set[str]:
    """Open descriptors and what they lead to."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            found.add(f"descriptor {entry} -> {os.readlink(f'/proc/self/fd/{entry}')}")
        except FileNotFoundError:  # the listing's own
            continue
    return found


def children() -> set[str]:
    """Child processes."""
    pids = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    return {f"child process {pid}" for pid in pids}


def has_ended(process_id: int) -> bool:
    """Whether a process, which need not be a child of this one, ends within ``SETTLE_S_MAX``."""
    deadline_s = time.monotonic() + SETTLE_S_MAX
    while time.monotonic() < deadline_s:
        try:
            state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        threading.Event().wait(0.01)
    return False


@contextmanager
def nothing_left() -> Iterator[None]:
    """Fail if the block leaves a thread, a descriptor or a child process that was not there before.

    Start what is meant to stay (the process's engine) before: ``with nothing_left()`` compares, it does not know.
    """
    gc.collect()
    before = threads() | descriptors() | children()
    yield
    deadline_s = time.monotonic() + SETTLE_S_MAX
    while True:
        gc.collect()
        left = (threads() | descriptors() | children()) - before
        if not left:
            return
        if time.monotonic() > deadline_s:
            raise AssertionError(f"left behind: {sorted(left)}")
        threading.Event().wait(0.01)
