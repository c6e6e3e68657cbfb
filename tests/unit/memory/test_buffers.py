"""Buffers: memory is reused each time, and never while anything refers to it."""

from __future__ import annotations

import sys
from collections import deque

import numpy as np

from penstock.memory.buffers import as_bytes, bytes_buffer, lease, small_buffer, whole_bytes


def test_memory_comes_home_each_time_not_only_the_first() -> None:
    """An owner is given back after each of many leases."""
    home: deque[bytearray] = deque()
    owner = bytearray(4096)
    for count in range(5):
        view = lease(owner, home, owner)
        assert len(home) == count
        del view
        assert len(home) == count + 1
    assert all(item is owner for item in home)


def test_a_view_of_a_view_keeps_memory_away_from_home() -> None:
    """Slices and numpy arrays keep a lease alive, and dropping the last of them gives the owner back."""
    home: deque[str] = deque()
    view = lease(bytearray(b"0123456789"), home, "slot")
    array = np.frombuffer(view[2:8], np.uint8)
    part = view[4:6]
    del view
    assert not home
    del part
    assert not home
    assert bytes(array) == b"234567"
    del array
    assert list(home) == ["slot"]


def test_no_signal_handler_runs_inside_the_end_of_a_lease() -> None:
    """The end of a lease runs no Python code, in which the exception of a signal handler (Ctrl-C) would be lost."""
    home: deque[str] = deque()
    calls: list[str] = []
    view = lease(bytearray(16), home, "slot")
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        del view
    finally:
        sys.setprofile(None)
    assert list(home) == ["slot"]
    assert not calls


def test_a_small_buffer_is_large_enough_and_used_again() -> None:
    """At most an eighth of a buffer is unused, and freed memory serves the next buffer of its size class."""
    for size_bytes in (0, 1, 16 * 1024, 100_000, 1_000_000, 2 * 1024 * 1024, 3_000_000):
        buffer = small_buffer(size_bytes)
        assert size_bytes <= len(buffer) <= size_bytes * 9 // 8 + 1
        if size_bytes:
            buffer[size_bytes - 1] = 1
    first = small_buffer(100_000)
    where = np.frombuffer(first, np.uint8).ctypes.data
    del first
    assert np.frombuffer(small_buffer(100_001), np.uint8).ctypes.data == where


def test_a_filled_buffer_is_its_bytes_without_a_copy() -> None:
    """The object from a bytes buffer has the bytes written to it, is the same each time, and hashes correctly."""
    for size_bytes in (0, 1, 2, 100_000, 3 << 20):
        view = bytes_buffer(size_bytes)
        assert len(view) == size_bytes
        body = (b"0123456789abcdef" * (size_bytes // 16 + 1))[:size_bytes]
        view[:] = body
        found = as_bytes(view)
        assert type(found) is bytes
        assert found == body
        assert hash(found) == hash(body)
        assert as_bytes(view) is found


def test_a_part_of_a_buffer_is_copied() -> None:
    """Only a view of the whole bytes buffer returns its object; slices and other views are copied."""
    view = bytes_buffer(10)
    view[:] = b"0123456789"
    assert as_bytes(view[2:5]) == b"234"
    assert as_bytes(view[:0]) == b""
    assert as_bytes(view[::-1]) == b"9876543210"
    assert as_bytes(memoryview(bytearray(b"abc"))) == b"abc"
    assert as_bytes(np.arange(3, dtype=np.uint8).data) == b"\0\1\2"
    assert as_bytes(b"xyz") == b"xyz"


def test_a_view_keeps_the_bytes_that_it_is_of() -> None:
    """Any slice keeps the object alive, and dropping the last one frees it."""
    view = bytes_buffer(4 << 20)
    view[-3:] = b"end"
    part = view[-3:]
    value = as_bytes(view)
    count = sys.getrefcount(value)
    del view
    assert sys.getrefcount(value) == count
    assert bytes(part) == b"end"
    del part
    assert sys.getrefcount(value) == count - 1


def test_only_all_of_an_object_in_its_order_is_the_object() -> None:
    """The object that libcurl gets in place of a view has exactly the bytes of that view."""
    data = bytes(range(24))
    table = np.frombuffer(data, np.uint8).reshape(4, 6)
    for view in (data, memoryview(data), memoryview(data).cast("B", (4, 6)), memoryview(data).cast("I")):
        assert whole_bytes(view) is data
        assert as_bytes(view) is data
    for other in (
        memoryview(data)[1:],
        memoryview(data)[:-1],
        memoryview(data)[::-1],
        memoryview(table.T),
        bytearray(data),
    ):
        assert whole_bytes(other) is None
        assert as_bytes(other) == bytes(other)
    made = bytes_buffer(24)
    made[:] = data
    assert whole_bytes(made) == data
    assert whole_bytes(made[:12]) is None
