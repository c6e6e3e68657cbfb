"""Threads that read from the page cache need a slot."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path

import pytest

from penstock.cache.cpu_slots import CpuSlots, is_in_memory


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


@pytest.mark.skipif(not Path("/dev/shm").is_mount(), reason="there is no file system in memory")
def test_a_file_system_in_memory_is_always_at_hand() -> None:
    """The kernel refuses to say what it has of a file in tmpfs, but all of it is in memory; a short file is still noticed."""
    slots, head, view = CpuSlots(), bytearray(4), memoryview(bytearray(100))
    counts: list[int] = []
    with tempfile.TemporaryFile(dir="/dev/shm", buffering=0) as file:
        file.write(b"head" + b"x" * 100)
        assert is_in_memory(file.fileno())
        for _ in range(2):
            view[:] = bytes(100)
            assert slots.read_cached(file.fileno(), head, view, 4, counts.append)
            assert (bytes(head), bytes(view)) == (b"head", b"x" * 100)
        assert not slots.read_cached(file.fileno(), head, view, 5, counts.append)
    assert counts == [100, 100]


def test_other_file_systems_are_not_in_memory() -> None:
    """A file of which the table of mounts says nothing, such as a pipe, counts as one that may have to be waited for."""
    reader, writer = os.pipe()
    try:
        assert not is_in_memory(reader)
    finally:
        os.close(reader)
        os.close(writer)
