"""Signals to the runner while no program runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from penstock.channels.runner.signals import Interruptions


@pytest.fixture(autouse=True)
def _python_interrupts() -> Iterator[None]:
    """Have SIGINT raise ``KeyboardInterrupt`` as in any Python program, also where tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_cleaning_is_not_interrupted_again() -> None:
    """The first signal interrupts, those that come while the run cleans up do not, and the handler is given back."""
    steps: list[str] = []

    def interrupted_run() -> None:
        with Interruptions() as interruptions, interruptions.cleanup() as stack:
            stack.callback(steps.append, "last")
            stack.callback(interrupt)
            interrupt()
            steps.append("unreachable")

    with pytest.raises(KeyboardInterrupt):
        interrupted_run()
    assert steps == ["last"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_during_the_cleaning_comes_after_it() -> None:
    """A first signal that comes while a run ends by itself waits for the last callback, and is not lost."""
    steps: list[str] = []

    def interrupted_run() -> None:
        with Interruptions() as interruptions, interruptions.cleanup() as stack:
            stack.callback(steps.append, "last")
            stack.callback(interrupt)

    with pytest.raises(KeyboardInterrupt):
        interrupted_run()
    assert steps == ["last"]


def test_a_shield_delays_a_signal() -> None:
    """Nothing inside a shield is interrupted, and what follows it is."""
    steps: list[str] = []

    def interrupted_run() -> None:
        with Interruptions() as interruptions:
            with interruptions.shielded():
                interrupt()
                steps.append("made")
            steps.append("unreachable")

    with pytest.raises(KeyboardInterrupt):
        interrupted_run()
    assert steps == ["made"]


def test_a_handler_that_lets_the_run_go_on() -> None:
    """The handler of the program that uses penstock decides; each signal reaches it."""
    heard: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: heard.append(number))
    with Interruptions():
        interrupt()
        interrupt()
    assert heard == [signal.SIGINT, signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler


def test_an_ignored_signal_stays_ignored() -> None:
    """What the process ignores, as it does SIGHUP under ``nohup``, does not interrupt a run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Interruptions():
        interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
