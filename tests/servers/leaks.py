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


def is_alive(process_id: int) -> bool:
    """Whether a process has a thread that runs, and thus keeps its files open; one that only waits to be noted has none.

    The first thread may have ended before the others: the process is shown as a zombie while they still hold its files.
    """
    for thread in Path(f"/proc/{process_id}/task").glob("*/stat"):
        try:
            if thread.read_text().rpartition(")")[2].split()[0] not in "ZX":
                return True
        except OSError:
            continue
    return False


def has_ended(process_id: int, *, within_s: float = SETTLE_S_MAX) -> bool:
    """Whether a process, which need not be a child of this one, ends within a time."""
    deadline_s = time.monotonic() + within_s
    while is_alive(process_id):
        if time.monotonic() > deadline_s:
            return False
        threading.Event().wait(0.01)
    return True


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
