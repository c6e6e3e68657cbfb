"""``Traced``: counts every operation of a store, and logs each one if the logger asks for it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.config import KIB
from penstock.store.base import Relay, Store, Wrapper
from penstock.system.quantiles import Recent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.types import Completion, Operation, Sink, Transfer

log = logging.getLogger("penstock.store")

BODY_BYTES_MIN = 256 * KIB
"""Size of the smallest body whose rate is measured: much of a smaller one lies in buffers when its head is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatistics:
    """The operations that a store received since it was made, and their results.

    Attributes:
        operations: Number of finished operations by kind: ``{"Get": 1200, "ListPage": 3}``.
        errors: Number of failed operations by class of error.
        received_bytes: Bytes of the bodies that arrived, including pieces that were retried.
        resent_count: Requests that were sent again at once because the kept-alive connection had died. If there are many,
            something on the way closes idle connections.
        in_flight_count: Operations in flight now.
        first_byte_p50_s: Median of the last 512 times from sending to the first byte of the answer, in seconds; nan if
            there are none.
        first_byte_p99_s: The 99th percentile of these times; if it is far above the median, hedging pays.
        body_p50_bytes_per_s: Median rate of one connection for bodies of 256 KiB and more, once they have begun; nan if
            there are none.
        inner: Statistics of the store inside.
    """

    operations: Mapping[str, int]
    errors: Mapping[str, int]
    received_bytes: int
    resent_count: int
    in_flight_count: int
    first_byte_p50_s: float
    first_byte_p99_s: float
    body_p50_bytes_per_s: float
    inner: Any


class Traced(Wrapper):
    """Counts operations; if the logger ``penstock.store`` is at DEBUG, it also logs one line for each."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._operations: Counter[type[Any]] = Counter()
        self._errors: Counter[str] = Counter()
        self._received_bytes = 0
        self._resent_count = 0
        self._started_count = 0
        self._ended_count = 0
        self._first_byte_s = Recent(512)
        self._bytes_per_s = Recent(512)

    def __reduce__(self) -> tuple[Any, ...]:
        return Traced, (self.inner,)

    def submit(self, operation: Operation, sink: Sink) -> Transfer:
        """Start `operation` and count it; see ``Store.submit``."""
        transfer = self.inner.submit(operation, _TracedOperation(self, sink))
        self._started_count += 1
        return transfer

    def note(self, completion: Completion) -> None:
        """Count one finished operation. Engine threads call it; if there are several, a count may be lost."""
        self._operations[type(completion.operation)] += 1
        self._ended_count += 1
        for attempt in completion.attempts:
            self._received_bytes += attempt.received_bytes
            self._resent_count += attempt.resent
            if attempt.first_byte_s:
                self._first_byte_s.add(attempt.first_byte_s)
                body_s = attempt.total_s - attempt.first_byte_s
                if attempt.received_bytes >= BODY_BYTES_MIN and body_s > 0:
                    self._bytes_per_s.add(attempt.received_bytes / body_s)
        if completion.error is not None:
            self._errors[type(completion.error).__name__] += 1
        if log.isEnabledFor(logging.DEBUG):
            self._log(completion)

    def _log(self, completion: Completion) -> None:
        first = completion.attempts[0].start_s if completion.attempts else time.monotonic()
        name = type(completion.operation).__name__
        key = getattr(completion.operation, "key", "")
        outcome = completion.error or f"{sum(attempt.received_bytes for attempt in completion.attempts)} bytes"
        log.debug("%s %s: %s in %.4f s", name, self.describe(key), outcome, time.monotonic() - first)

    def statistics(self) -> StoreStatistics:
        """Return the statistics so far. Cost: three quantiles of 512 numbers."""
        return StoreStatistics(
            operations={kind.__name__: count for kind, count in self._operations.items()},
            errors=dict(self._errors),
            received_bytes=self._received_bytes,
            resent_count=self._resent_count,
            in_flight_count=self._started_count - self._ended_count,
            first_byte_p50_s=self._first_byte_s.quantile(0.5),
            first_byte_p99_s=self._first_byte_s.quantile(0.99),
            body_p50_bytes_per_s=self._bytes_per_s.quantile(0.5),
            inner=self.inner.statistics(),
        )


class _TracedOperation(Relay):
    __slots__ = ("owner",)

    def __init__(self, owner: Traced, sink: Sink) -> None:
        self.owner = owner
        self.sink = sink
        self.landing = sink.landing

    def done(self, completion: Completion) -> None:
        try:
            self.owner.note(completion)
        finally:
            self.sink.done(completion)
