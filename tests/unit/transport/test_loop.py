"""Descriptors of others that an event loop watches."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from penstock.transport.loop import EventLoop

WAIT_S_MAX = 20


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    """An event loop that runs."""
    running = EventLoop(connections_max=4, name="penstock-test-loop")
    running.start()
    try:
        yield running
    finally:
        running.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe: the end to read from, and the end to write to."""
    ends = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)


def test_a_reader_is_called_while_its_descriptor_is_readable(loop: EventLoop, pipe: tuple[int, int]) -> None:
    """Each byte is read on the thread of the loop, one for each call, and none is called for after removal."""
    received: list[tuple[bytes, str]] = []
    has_all, is_removed = threading.Event(), threading.Event()

    def on_readable() -> None:
        received.append((os.read(pipe[0], 1), threading.current_thread().name))
        if len(received) == 3:
            watched.remove()
            has_all.set()

    watched = loop.add_reader(pipe[0], on_readable=on_readable, on_loop_end=lambda _: None)
    os.write(pipe[1], b"ab")
    os.write(pipe[1], b"cd")
    assert has_all.wait(WAIT_S_MAX)
    watched.call_later(0.0, is_removed.set)
    assert is_removed.wait(WAIT_S_MAX)
    assert received == [(bytes([letter]), "penstock-test-loop") for letter in b"abc"]
    assert os.read(pipe[0], 10) == b"d"


@pytest.mark.parametrize("by_defect", [False, True])
def test_a_reader_hears_the_end_of_the_loop(
    loop: EventLoop, pipe: tuple[int, int], *, by_defect: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told once whether the loop was closed, or a defect in a callback has ended it."""
    ends: list[bool] = []
    has_ended = threading.Event()

    def on_loop_end(failed: bool) -> None:
        ends.append(failed)
        has_ended.set()

    loop.add_reader(pipe[0], on_readable=lambda: 1 / 0, on_loop_end=on_loop_end)
    if by_defect:
        os.write(pipe[1], b"x")
        assert has_ended.wait(WAIT_S_MAX)
        assert "callback failed" in caplog.text
    loop.close()
    assert ends == [by_defect]


def test_a_loop_that_has_ended_tells_a_new_reader_at_once(loop: EventLoop, pipe: tuple[int, int]) -> None:
    """Nobody waits for a loop that is gone."""
    loop.close()
    ends: list[bool] = []
    loop.add_reader(pipe[0], on_readable=lambda: None, on_loop_end=ends.append)
    assert ends == [False]


def test_a_removed_reader_does_not_hear_the_end(loop: EventLoop, pipe: tuple[int, int]) -> None:
    """After removal nothing is called, and the descriptor may be closed."""
    ends: list[bool] = []
    is_removed = threading.Event()
    watched = loop.add_reader(pipe[0], on_readable=lambda: None, on_loop_end=ends.append)
    loop.call_soon(watched.remove)
    loop.call_soon(is_removed.set)
    assert is_removed.wait(WAIT_S_MAX)
    loop.close()
    assert not ends
