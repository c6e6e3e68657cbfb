"""A store whose operations another thread can end at once, so that a run that ends does not wait for a store that stalls."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from penstock.errors import ClosedStoreError
from penstock.store.base import OperationRelay, Store, Wrapper

if TYPE_CHECKING:
    from penstock.types import Completion, Operation, Sink, Transfer


class Interruptible(Wrapper):
    """Passes operations on to a store until it is interrupted.

    Args:
        inner: The store. ``close`` closes it; ``interrupt`` does not.

    Attributes:
        is_interrupted: Whether ``interrupt`` was called, which any thread may do at any time.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._in_flight: set[_InterruptibleOperation] = set()
        self.is_interrupted = False

    def submit(self, operation: Operation, sink: Sink) -> Transfer:
        """Start `operation`; see ``Store.submit``.

        Raises:
            ClosedStoreError: ``interrupt`` was called.
        """
        relay = _InterruptibleOperation(self, operation, sink)
        with self._lock:
            self._check()
            self._in_flight.add(relay)
        try:
            transfer = self.inner.submit(operation, relay)
        except BaseException:
            self.forget(relay)
            raise
        with self._lock:
            if relay in self._in_flight:  # an operation that has ended keeps nothing
                relay.transfer = transfer
        if self.is_interrupted:
            transfer.cancel()
        return relay

    def _check(self) -> None:
        if self.is_interrupted:
            raise ClosedStoreError("the run has ended")

    def forget(self, relay: _InterruptibleOperation) -> None:
        """Drop an operation that has ended."""
        with self._lock:
            self._in_flight.discard(relay)
            relay.transfer = None

    def interrupt(self) -> None:
        """Cancel all operations in flight, and refuse all others; idempotent. Any thread may call it."""
        with self._lock:
            self.is_interrupted = True
            in_flight = list(self._in_flight)
        for relay in in_flight:
            relay.cancel()


class _InterruptibleOperation(OperationRelay[Interruptible]):
    """An operation that can be interrupted."""

    __slots__ = ()

    def done(self, completion: Completion) -> None:
        try:
            self.owner.forget(self)
        finally:
            self.sink.done(completion)
