"""Stores whose operations another thread can end."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from penstock.channels.interruptible import Interruptible
from penstock.errors import CancelledOperationError, ClosedError, PenstockError
from penstock.store.base import OperationRelay, Wrapper
from penstock.store.memory import MemoryStore
from penstock.types import Completion


class Stalling(Wrapper):
    """A store that answers nothing until an operation is cancelled."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.began = threading.Event()

    def submit(self, operation: Any, sink: Any) -> Any:
        self.began.set()
        return _Stalled(self, operation, sink)


class _Stalled(OperationRelay[Stalling]):
    def cancel(self) -> None:
        self.sink.done(Completion(self.operation, error=CancelledOperationError("cancelled")))


def test_bytes_pass() -> None:
    """Until it is interrupted, the store is the one inside."""
    inner = MemoryStore()
    inner.write("a", b"12345")
    store = Interruptible(inner)
    assert bytes(store.read("a").data) == b"12345"
    assert [info.key for info in store.list()] == ["a"]


def test_an_interrupt_ends_what_waits() -> None:
    """A thread that waits for a store that stalls gets an error at once, and later operations are refused."""
    inner = Stalling(MemoryStore())
    store = Interruptible(inner)
    failures: list[Exception] = []

    def read() -> None:
        try:
            list(store.read_parts(["a", "b"]))
        except PenstockError as error:
            failures.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert inner.began.wait(10)
    store.interrupt()
    store.interrupt()
    thread.join(10)
    assert not thread.is_alive()
    assert len(failures) == 1
    with pytest.raises(ClosedError):
        store.read("a")
