"""A condition is what ``threading.Condition`` is, and an exception of a signal handler leaves it usable."""

from __future__ import annotations

import signal
import sys
import threading
import time

import pytest

from penstock.system.conditions import Condition

INTERRUPTS = 1500


class _Interrupted(Exception):
    """Raised by the handler of the signal."""


def test_a_thread_waits_until_it_is_notified() -> None:
    """The lock is free while a thread waits, and held again when the wait ends."""
    changed, values = Condition(), []

    def change() -> None:
        with changed:
            values.append(1)
            changed.notify_all()

    with changed:
        other = threading.Thread(target=change)
        other.start()
        changed.wait_for(lambda: bool(values))
        assert changed._is_owned()
    other.join()
    assert values == [1]


def test_a_wait_ends_with_its_time() -> None:
    """After the time is over, the lock is held again and the program goes on."""
    changed = Condition()
    began_s = time.monotonic()
    with changed:
        changed.wait(0.02)
        assert changed._is_owned()
    assert time.monotonic() - began_s >= 0.02


def test_interrupts_leave_the_lock_as_it_was() -> None:
    """However often a handler raises in a loop that waits, the lock is free afterwards, and no other error comes."""
    changed, stopped = Condition(), threading.Event()

    def notify() -> None:
        while not stopped.is_set():
            with changed:
                changed.notify_all()

    def interrupt(*_: object) -> None:
        raise _Interrupted

    def wait_until_interrupted() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0001)
        while True:
            with changed:
                changed.wait(1)

    before, interval_s = signal.signal(signal.SIGALRM, interrupt), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # more changes of the thread, so that fewer interrupts suffice
    other = threading.Thread(target=notify, daemon=True)
    other.start()
    try:
        for _ in range(INTERRUPTS):
            with pytest.raises(_Interrupted):
                wait_until_interrupted()
            assert not changed._is_owned()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.setswitchinterval(interval_s)
        stopped.set()
        other.join(10)
    assert not other.is_alive()
