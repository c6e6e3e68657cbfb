"""The processes that serve a program: those with the same BENCH_RUN in their environment, and what they use."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path


def processes() -> Iterator[tuple[Path, bytes]]:
    """Yield /proc/PID and the command of every process of this run, this one included."""
    mark = b"BENCH_RUN=" + os.environb[b"BENCH_RUN"]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                yield folder, (folder / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended meanwhile, or is another user's


def serving_bytes() -> int:
    """Return the proportional memory of this run's other processes that are penstock's."""
    found = 0
    for folder, command in processes():
        if int(folder.name) != os.getpid() and b"penstock" in command:
            try:
                text = (folder / "smaps_rollup").read_text()
            except OSError:
                continue
            found += int(re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)[1]) * 1024
    return found


def cpu_s() -> float:
    """Return user and system seconds of all processes of this run, with those of their children that have ended."""
    ticks = 0
    for folder, _ in processes():
        try:
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")
