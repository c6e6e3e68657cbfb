"""Threads that read from the page cache need a slot."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from penstock.cache.cpu_slots import CpuSlots


def test_as_many_at_a_time_as_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of six threads on two processors, two have a slot at a time, even if an exception ends the use of a slot."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 7})
    slots, lock = CpuSlots(), threading.Lock()
    now, most = 0, 0

    def work() -> None:
        nonlocal now, most
        for number in range(20):
            try:
                with slots:
                    with lock:
                        now += 1
                        most = max(most, now)
                    time.sleep(0.001)
                    with lock:
                        now -= 1
                    if number % 3 == 0:
                        raise ValueError
            except ValueError:
                pass

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 2


def test_a_file_that_is_too_short(tmp_path: Path) -> None:
    """A file that ends early is read as far as it goes, after the page cache could not deliver all of the bytes."""
    (tmp_path / "f").write_bytes(b"head" + b"x" * 100)
    slots, head, view = CpuSlots(), bytearray(4), memoryview(bytearray(200))
    counts: list[int] = []
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    try:
        assert not slots.read_cached(fd, head, view, 4, counts.append)
        assert counts == []
        assert slots.read_waiting(fd, head, view, 4, counts.append)
    finally:
        os.close(fd)
    assert (bytes(head), counts, bytes(view[:101])) == (b"head", [100], b"x" * 100 + b"\0")
