"""``Limited``: a bound on the operations in flight, first come, first served."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.errors import CancelledOperationError, ConfigError, as_completion_error
from penstock.store.base import OperationRelay, Store, Wrapper
from penstock.system import forks
from penstock.transport import engine
from penstock.types import Completion, Operation, Sink, Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitStatistics:
    """Counts of requests that had to wait for a permit.

    Attributes:
        in_flight_count: Requests that hold a permit now.
        waiting_count: Requests that wait for a permit now.
        waited_count: Requests that had to wait so far; if most of them did, the limit is the bottleneck.
        inner: Statistics of the store inside.
    """

    in_flight_count: int
    waiting_count: int
    waited_count: int
    inner: Any


class Limited(Wrapper):
    """Lets at most `requests_max` operations of the store inside be in flight; others wait, in order.

    Args:
        inner: The store.
        requests_max: Number of permits; at least 1. A request that backs off holds none, because ``Retrying`` is outside.
    """

    def __init__(self, inner: Store, *, requests_max: int = 1024) -> None:
        super().__init__(inner)
        if requests_max < 1:
            raise ConfigError(f"requests_max={requests_max!r} must be at least 1")
        self.requests_max = requests_max
        self._reset()
        forks.register(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Limited, requests_max=self.requests_max), (self.inner,)

    def _reset(self) -> None:
        self._lock = threading.RLock()  # reentrant, because a finaliser may cancel or submit while it is held
        self._in_flight = 0
        self._waited = 0
        self._waiting: deque[_LimitedOperation] = deque()

    def after_fork_in_child(self) -> None:
        """Forget the parent's requests; they hold none of the child's permits."""
        self._reset()

    def submit(self, operation: Operation, sink: Sink) -> Transfer:
        """Start `operation`, or let it wait for a permit; see ``Store.submit``."""
        permit = _LimitedOperation(self, operation, sink)
        with self._lock:
            if self._in_flight >= self.requests_max:
                self._waited += 1
                self._waiting.append(permit)
                return permit
            self._in_flight += 1
        try:
            permit.transfer = self.inner.submit(operation, permit)
        except BaseException:
            self.release()
            raise
        return permit

    def release(self) -> None:
        """Pass a permit on to the first operation that waits."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._in_flight -= 1
                    return
                permit = self._waiting.popleft()
            try:
                if permit.start():
                    return
            except BaseException:  # raised by its sink, which heard the end; the others must not wait for ever
                self.release()
                raise

    def withdraw(self, waiting: _LimitedOperation) -> bool:
        """Take an operation out of the queue; False if it no longer waits."""
        with self._lock:
            try:
                self._waiting.remove(waiting)
            except ValueError:
                return False
        return True

    def statistics(self) -> LimitStatistics:
        """Return how often requests had to wait so far."""
        return LimitStatistics(
            in_flight_count=self._in_flight,
            waiting_count=len(self._waiting),
            waited_count=self._waited,
            inner=self.inner.statistics(),
        )


class _LimitedOperation(OperationRelay[Limited]):
    """An operation that holds a permit, or waits for one."""

    __slots__ = ()

    def start(self) -> bool:
        """Use a permit; False if the operation needs none any more, because it was cancelled or failed."""
        if self.cancelled:
            self.sink.done(Completion(self.operation, error=CancelledOperationError("cancelled")))
            return False
        try:
            self.transfer = self.owner.inner.submit(self.operation, self)
        except Exception as error:
            self.sink.done(Completion(self.operation, error=as_completion_error(error)))
            return False
        if self._is_cancelled():  # another thread has cancelled it
            self.transfer.cancel()
        return True

    def done(self, completion: Completion) -> None:
        self.transfer = None  # without a cycle, buffers go back at once and not when the collector runs
        try:
            self.owner.release()
        finally:
            self.sink.done(completion)

    def cancel(self) -> None:
        self.cancelled = True
        if (transfer := self.transfer) is not None:
            transfer.cancel()
        else:
            engine.call_later(0.0, self._leave)  # because sinks are called on engine threads only

    def _leave(self) -> None:
        """Give up waiting for a permit."""
        if self.owner.withdraw(self):  # else it was just started, and start() saw the flag or will see it
            self.sink.done(Completion(self.operation, error=CancelledOperationError("cancelled")))

    def _is_cancelled(self) -> bool:
        return self.cancelled
