"""``Retrying``: tries a failed operation again, and continues a broken body where it broke.

A body that ended early is neither returned nor mixed with another version: the next attempt requests the missing bytes with
``If-Match`` on the ETag of the first answer, or starts again if there is no ETag. Backoff is exponential with full jitter
(Source: AWS Architecture Blog, "Exponential Backoff And Jitter", 2015) and respects the store's ``Retry-After``.
"""

from __future__ import annotations

import logging
import random
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from penstock.checksums.algorithms import verify
from penstock.config import RetryConfig
from penstock.errors import (
    ChecksumError,
    ClosedStoreError,
    ObjectChangedError,
    ProtocolError,
    ShortReadError,
    SpanError,
    StoreError,
    as_completion_error,
)
from penstock.store.base import Relay, Resent, Store, Wrapper
from penstock.transport import engine
from penstock.types import (
    UNKNOWN_BYTES,
    Attempt,
    ByteRange,
    Completion,
    Get,
    Landing,
    ObjectInfo,
    Operation,
    Sink,
    Transfer,
    same_version,
)

log = logging.getLogger("penstock.store")

_jitter = random.SystemRandom()
"""A generator of its own, because the state of the ``random`` module belongs to the user, who may have seeded it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryStatistics:
    """How often operations were tried again.

    Attributes:
        retried_count: Attempts beyond the first; near 0 is healthy.
        resumed_count: Attempts that continued inside a body.
        given_up_count: Operations that failed although their errors were retryable.
        inner: Statistics of the store inside.
    """

    retried_count: int
    resumed_count: int
    given_up_count: int
    inner: Any


class Retrying(Wrapper):
    """Tries operations of the store inside again, within the limits of ``RetryConfig``.

    Args:
        inner: The store.
        config: Bounds of attempts and waits; None means ``RetryConfig()``.
        attempts_max: The most attempts, the first included; None takes that of `config`.
    """

    def __init__(self, inner: Store, *, config: RetryConfig | None = None, attempts_max: int | None = None) -> None:
        super().__init__(inner)
        self.config = config or RetryConfig()
        if attempts_max is not None:
            self.config = replace(self.config, attempts_max=attempts_max)
        self.retried_count = 0
        self.resumed_count = 0
        self.given_up_count = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Retrying, config=self.config), (self.inner,)

    def submit(self, operation: Operation, sink: Sink) -> Transfer:
        """Start `operation`, and try it again if it fails; see ``Store.submit``."""
        entry = _RetriedOperation(self, operation, sink)
        entry.transfers.append(self.inner.submit(operation, entry))
        return entry

    def statistics(self) -> RetryStatistics:
        """Return how often operations were tried again so far."""
        return RetryStatistics(
            retried_count=self.retried_count,
            resumed_count=self.resumed_count,
            given_up_count=self.given_up_count,
            inner=self.inner.statistics(),
        )


def _located(error: StoreError) -> dict[str, Any]:
    """Return the fields of `error` that say where it happened, for another error."""
    return {name: getattr(error, name) for name in ("operation", "url", "span", "status", "code", "request_id")}


class _RetriedOperation(Resent, Relay):
    """One operation through all of its attempts."""

    __slots__ = (
        "attempts",
        "backoff",
        "begin",
        "cancelled",
        "info",
        "operation",
        "owner",
        "ranges_refused",
        "resuming",
        "span",
        "start_s",
        "target",
        "transfers",
        "tries_count",
        "unsound",
    )

    def __init__(self, owner: Retrying, operation: Operation, sink: Sink) -> None:
        self.owner = owner
        self.operation = operation
        self.sink = sink
        self.landing = sink.landing
        self.begin = sink.landing.position if sink.landing is not None else 0  # where the body's first byte belongs
        self.transfers: list[Transfer] = []
        self.cancelled = False
        self.tries_count = 0
        self.resuming = False  # whether this attempt requests the rest of a body that broke
        self.ranges_refused = False  # whether the store sent no such rest, so that the body begins anew
        self.unsound = False  # whether the body is complete, but does not have its checksum
        self.backoff: list[
            tuple[Completion, int]
        ] = []  # the thread that pops it sends the next attempt or ends the operation
        self.start_s = 0.0
        self.attempts: tuple[Attempt, ...] = ()
        self.info: ObjectInfo | None = None  # from the first answer; every later one must describe the same version
        self.span: ByteRange | None = None  # the bytes that the first answer began to send
        self.target: Landing | None = None  # where its body goes

    # ── Transfer ───────────────────────────────────────────────────────────────────────────────────────────────────

    def cancel(self) -> None:
        super().cancel()
        if self.backoff:
            engine.call_later(0.0, self._again)

    def _is_cancelled(self) -> bool:
        return self.cancelled

    # ── Sink ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def head(self, info: ObjectInfo, span: ByteRange) -> Landing | None:
        if self.target is None:
            self.info, self.span = info, span
            self.target = self.sink.head(info, span)
            self.begin = self.target.position if self.target is not None else 0
        return self.target

    def done(self, completion: Completion) -> None:
        try:
            over = self._is_over(completion)
        except Exception as error:
            self.backoff.clear()  # otherwise the operation would never end
            completion.error, over = as_completion_error(error), True
        if over:
            self.sink.done(completion)

    def _is_over(self, completion: Completion) -> bool:
        """Whether an attempt was the last one; if it was not, the next one follows after a backoff."""
        self.transfers.clear()
        if completion.error is None and self.tries_count:
            self._complete(completion)
        error = completion.error
        if error is not None and self._is_refused_resumption(error):
            error.retryable = self.ranges_refused = True
        elif isinstance(error, SpanError) and self.span is not None:  # the first answer promised the rest of the body
            what = "the object ends before the length that its first answer promised"
            error = completion.error = ShortReadError(what, retryable=False, **_located(error))
        if error is None:
            if self.attempts:
                completion.attempts = self.attempts + completion.attempts
            return True
        if not self.start_s and completion.attempts:
            self.start_s = completion.attempts[0].start_s
        self.start_s = self.start_s or time.monotonic()
        self.attempts += completion.attempts
        self.tries_count += 1
        config = self.owner.config
        elapsed_s = time.monotonic() - self.start_s
        error.attempts_count = self.tries_count
        error.elapsed_s = elapsed_s
        wait_s = self._wait_s(error)
        allowed = self.tries_count < config.attempts_max and elapsed_s + wait_s < config.total_s_max
        if self.cancelled or not error.retryable or not allowed:
            if error.retryable and not self.cancelled:
                self.owner.given_up_count += 1
            completion.attempts = self.attempts
            return True
        self._note(completion)
        self.owner.retried_count += 1
        log.debug("attempt %d failed, the next one begins in %.2f s: %s", self.tries_count, wait_s, error)
        self.backoff.append((completion, engine.closings))
        engine.call_later(wait_s, self._again)
        if self._is_cancelled():  # cancelled by another thread, which may have seen no backoff
            engine.call_later(0.0, self._again)
        return False

    def _is_refused_resumption(self, error: StoreError) -> bool:
        """Whether the store did not continue where the body broke, because it has no ranges or nothing was missing."""
        if not self.resuming or self.span is None:
            return False
        nothing_left = isinstance(error, SpanError) and self.span.end == UNKNOWN_BYTES
        return nothing_left or isinstance(error, ProtocolError)

    def _wait_s(self, error: StoreError) -> float:
        config = self.owner.config
        mean_s = min(config.backoff_s * 2 ** max(0, self.tries_count - 1), config.backoff_s_max)
        wait_s = _jitter.uniform(0, 2 * mean_s)
        if error.retry_after_s is not None:
            wait_s = max(wait_s, min(error.retry_after_s, config.backoff_s_max))
        return wait_s

    def _note(self, completion: Completion) -> None:
        """Remember what the first answer said, and how much of its body arrived."""
        if completion.landing is not None and completion.info is not None and self.target is None:
            self.info, self.span, self.target = completion.info, completion.span, completion.landing
            self.begin = self.begin if self.target is self.sink.landing else self.target.start
        self.unsound = isinstance(completion.error, ChecksumError)

    def _again(self) -> None:
        try:
            failed, closings = self.backoff.pop()
        except IndexError:
            return
        failed.attempts = self.attempts
        if closings != engine.closings:
            assert failed.error is not None
            what = "the transport was closed before the next attempt"
            failed.error = ClosedStoreError(what, **_located(failed.error))
        if self.cancelled or closings != engine.closings:
            self.sink.done(failed)
            return
        try:
            operation = self._remaining()
            transfer = self.owner.inner.submit(operation, self) if operation is not None else None
        except Exception as error:  # the store was closed, or this is a defect; the waiting caller must get an error
            failed.error = as_completion_error(error)
            self.sink.done(failed)
            return
        if transfer is None:
            self.done(Completion(self.operation))
            return
        self.transfers.append(transfer)
        if self._is_cancelled():  # another thread has cancelled it
            transfer.cancel()

    def _remaining(self) -> Operation | None:
        """Return the operation for what is missing; None if nothing is."""
        operation, target, info, span = self.operation, self.target, self.info, self.span
        self.resuming = False
        if not isinstance(operation, Get) or target is None or info is None or span is None:
            if self.landing is not None:
                self.landing.position = self.begin
            return operation
        received_bytes = target.position - self.begin
        if received_bytes == 0 or info.etag is None or self.unsound or self.ranges_refused:
            target.position = self.begin
            if info.etag is None:  # nothing pins the version, so what the first answer said no longer holds
                self.info = self.span = self.target = None
                return operation
            # Requested as at first: only then does the store send the checksum again, or a body without a range.
            if self.unsound or self.ranges_refused or span.end == UNKNOWN_BYTES:
                self.landing = target
                return operation._replace(if_match=info.etag)
        else:
            self.resuming = True
            self.owner.resumed_count += 1
        self.landing = target
        end = min(span.end, span.start + target.end - self.begin)
        if span.start + received_bytes >= end:
            return None
        return Get(operation.key, ByteRange(span.start + received_bytes, end), info.etag)

    def _complete(self, completion: Completion) -> None:
        """Make the last attempt's completion that of the whole operation, and check the body against its checksum."""
        completion.operation = operation = self.operation
        target, info, span = self.target, self.info, self.span
        if not isinstance(operation, Get) or target is None or info is None or span is None:
            return
        if (now := completion.info) is not None:
            if info.size_bytes == UNKNOWN_BYTES:
                info = info._replace(size_bytes=now.size_bytes)
            if not same_version(now, info):  # the store may have ignored If-Match
                what = f"the object is now {now.etag}, not {info.etag}"
                completion.error = ObjectChangedError(what, operation="GET", url=self.owner.describe(operation.key))
                return
            self.info = info = now if now.checksums else info
        completion.landing, completion.info = target, info
        completion.span = ByteRange(span.start, span.start + (target.position - self.begin))
        if completion.span.start == 0 and completion.span.end == info.size_bytes and info.checksums:
            try:
                completion.verified = verify(info.checksums, target.view)
            except ChecksumError as error:
                error.operation, error.url = "GET", self.owner.describe(operation.key)
                completion.error = error.with_traceback(None)  # whose frames refer to the completion: a cycle
