"""Stores that say what was asked of them: for tests that count requests and bytes of shards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from penstock import compose
from penstock.store import Store, Wrapper
from penstock.types import ByteRange, Get, Head, Operation, Sink, Transfer


class Counted:
    """What was asked of all stores since ``clear()``.

    Attributes:
        spans: Of each GET; of whole objects up to 2**62.
        heads: Keys of each HEAD.
        bytes: That arrived.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: list[tuple[Store, Operation, Sink]] = []
        self._held_count = 0
        self._then: tuple[int, Callable[[], None]] | None = None
        self.clear()

    def clear(self) -> None:
        """Forget what was."""
        self.spans: list[ByteRange] = []
        self.heads: list[str] = []
        self.bytes = 0

    def after_gets(self, count: int, then: Callable[[], None]) -> None:
        """Call `then` before the GET after `count` ones is sent."""
        self._then = (count, then)

    def hold(self, count: int) -> None:
        """Hold GETs and HEADs back until there are `count` of them: without so many at a time nothing goes on."""
        self._held_count = count

    def asked(self, store: Store, operation: Operation, sink: Sink) -> Transfer:
        """Note an operation, and pass it on."""
        if not isinstance(operation, Get | Head) or operation.key.endswith(".index"):
            return store.submit(operation, sink)
        with self._lock:
            if isinstance(operation, Get):
                if self._then is not None and len(self.spans) >= self._then[0]:
                    then, self._then = self._then[1], None
                    then()
                self.spans.append(operation.span or ByteRange(0, 1 << 62))
            else:
                self.heads.append(operation.key)
            if not self._held_count:
                return store.submit(operation, _Sink(sink, self))
            self._held.append((store, operation, _Sink(sink, self)))
            if len(self._held) < self._held_count:
                return _HeldTransfer()
            held, self._held, self._held_count = self._held, [], 0
        for waiting in held[:-1]:
            waiting[0].submit(*waiting[1:])
        return store.submit(operation, held[-1][2])


class _HeldTransfer:
    def cancel(self) -> None:
        """It is sent later nevertheless."""


class _Sink:
    def __init__(self, inner: Sink, counted: Counted) -> None:
        self.inner = inner
        self.counted = counted

    @property
    def landing(self) -> Any:
        return self.inner.landing

    def head(self, info: Any, span: Any) -> Any:
        return self.inner.head(info, span)

    def done(self, completion: Any) -> None:
        self.counted.bytes += completion.received_bytes
        self.inner.done(completion)


class _CountedStore(Wrapper):
    def __init__(self, inner: Store, counted: Counted) -> None:
        super().__init__(inner)
        self.counted = counted

    def submit(self, operation: Operation, sink: Sink) -> Transfer:
        return self.counted.asked(self.inner, operation, sink)


def counted_stores(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Have all stores that are connected from now on counted."""
    counted = Counted()
    connect = compose.connect

    def connect_counted(*arguments: Any, **options: Any) -> Store:
        return _CountedStore(connect(*arguments, **options), counted)

    monkeypatch.setattr(compose, "connect", connect_counted)
    return counted


def counted_plans(monkeypatch: pytest.MonkeyPatch) -> list[Store]:
    """Filled with the store of each ``read_many`` from here on."""
    plans: list[Store] = []
    original = Store.read_many

    def read_many(self: Store, requests: Any, **options: Any) -> Any:
        plans.append(self)
        return original(self, requests, **options)

    monkeypatch.setattr(Store, "read_many", read_many)
    return plans
