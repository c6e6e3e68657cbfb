"""``Retrying`` around stores that are closed, or refuse, while it waits."""

from __future__ import annotations

import threading

import pytest

from penstock.config import RetryConfig
from penstock.errors import CancelledOperationError, StoreError, UnavailableError
from penstock.store.faulty import Faulty
from penstock.store.inflight import WaitingSink, perform
from penstock.store.memory import MemoryStore
from penstock.store.retrying import Retrying
from penstock.types import Completion, Get, Operation, Sink, Transfer
from store_contract.support import WatchingSink


def test_a_store_that_is_closed_inside_a_backoff_is_an_error() -> None:
    """Whoever waits hears of it, and other stores' backoffs, which share the loop, still end."""
    memory = MemoryStore({"k": b"x"})
    broken = Faulty(memory, ratio=1.0, error=UnavailableError("503"))
    store = Retrying(broken, config=RetryConfig(attempts_max=1000, backoff_s=0.01, backoff_s_max=0.01))
    closer = threading.Timer(0.1, memory.close)
    closer.start()
    with pytest.raises(StoreError, match="was closed"):
        perform(store, Get("k"))
    closer.join()
    other = Retrying(Faulty(MemoryStore({"k": b"x"}), fail_at_call=1), config=RetryConfig(backoff_s=0.01))
    assert bytes(other.read("k").data) == b"x"
    assert other.retried_count == 1


def test_cancelling_behind_an_attempt_that_ended_at_once() -> None:
    """An attempt that failed before ``submit`` returned its transfer leaves that one behind; the backoff ends all the same."""

    class AtOnce(MemoryStore):
        def submit(self, operation: Operation, sink: Sink) -> Transfer:
            completion = Completion(operation)
            completion.error = UnavailableError("503", retryable=True)
            sink.done(completion)
            return super().submit(operation, WaitingSink())

    store = Retrying(AtOnce(), config=RetryConfig(backoff_s=20.0, backoff_s_max=20.0))
    sink = WatchingSink()
    store.submit(Get("k"), sink).cancel()
    assert sink.wait(5).error is not None


def test_cancelling_reaches_the_second_attempt_of_one_that_failed_at_once() -> None:
    """The second attempt may be under way before ``submit`` has returned the first one's transfer: it is cancelled."""

    class Second:
        def __init__(self, sink: Sink) -> None:
            self.sink = sink

        def cancel(self) -> None:
            self.sink.done(Completion(Get("k"), error=CancelledOperationError("cancelled")))

        def unanswered_s(self) -> float:
            return 0.0

    class AtOnce(MemoryStore):
        again = threading.Event()

        def submit(self, operation: Operation, sink: Sink) -> Transfer:
            if self.again.is_set():
                raise AssertionError("a third attempt")
            if threading.current_thread() is not threading.main_thread():
                threading.Timer(0.0, self.again.set).start()  # once `Retrying` has this attempt's transfer
                return Second(sink)
            sink.done(Completion(operation, error=UnavailableError("503", retryable=True)))
            assert self.again.wait(10)
            return super().submit(Get("other"), WaitingSink())

    store = Retrying(AtOnce({"other": b""}), config=RetryConfig(backoff_s=0.0))
    sink = WatchingSink()
    store.submit(Get("k"), sink).cancel()
    assert isinstance(sink.wait().error, CancelledOperationError)
