"""``Retrying``: tries a failed operation again, and continues a broken body where it broke.

A body that ended early is neither returned nor mixed with another version: the next attempt requests the missing bytes with
``If-Match`` on the ETag of the first answer, or starts again if there is no ETag. Backoff is exponential with full jitter
(Source: AWS Architecture Blog, "Exponential Backoff And Jitter", 2015) and respects the store's ``Retry-After``.

A store that restarts must not end a training run. If its endpoint has answered this process before, operations that it does
not answer any more wait for it, in ``Reachability``. Whether this is the endpoint's failure or that of one request shows in
the others: as long as they are answered, an operation that fails has spent its attempts and ends.
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
    ThrottledError,
    UnavailableError,
    as_completion_error,
)
from penstock.store.answers import THROTTLES
from penstock.store.base import Relay, Resent, Store, Wrapper, innermost
from penstock.store.reachability import reachability
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

_UNREACHED_S_MAX = 4.0
"""Time in which attempts may start while an endpoint has never answered. With the 5 s that a connection may take, a wrong name,
port or proxy is an error within 10 s."""
_SERVER_FAILURES = (500, 502, 503, 504)
_THROTTLES = THROTTLES - {"ServiceUnavailable"}

_jitter = random.SystemRandom()
"""A generator of its own, because the state of the ``random`` module belongs to the user, who may have seeded it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryStatistics:
    """How often operations were tried again.

    Attributes:
        retried_count: Attempts beyond the first; near 0 is healthy.
        resumed_count: Attempts that continued inside a body.
        given_up_count: Operations that failed although their errors were retryable.
        unreachable_s: Seconds in which operations of this process waited because the endpoint did not answer.
        inner: Statistics of the store inside.
    """

    retried_count: int
    resumed_count: int
    given_up_count: int
    unreachable_s: float
    inner: Any


class Retrying(Wrapper):
    """Tries operations of the store inside again, within the limits of ``RetryConfig``.

    Args:
        inner: The store.
        config: Bounds of attempts and waits; None means ``RetryConfig()``.
        attempts_max: The most attempts, the first included; None takes that of `config`.

    Attributes:
        config: Bounds of attempts and waits.
        reachability: The process's record of the endpoint; None if the store inside has none, or if
            `config` allows only one attempt.
        closed: Whether ``close()`` was called.
    """

    def __init__(self, inner: Store, *, config: RetryConfig | None = None, attempts_max: int | None = None) -> None:
        super().__init__(inner)
        self.config = config or RetryConfig()
        if attempts_max is not None:
            self.config = replace(self.config, attempts_max=attempts_max)
        self.retried_count = 0
        self.resumed_count = 0
        self.given_up_count = 0
        self.closed = False
        address = getattr(innermost(inner), "address", None)
        self.reachability = reachability(address) if address and self.config.attempts_max > 1 else None
        self._unreachable_before_s = self.reachability.unreachable_s if self.reachability is not None else 0.0

    def __reduce__(self) -> tuple[Any, ...]:
        is_reached = self.reachability is not None and self.reachability.is_reached
        return partial(_rebuild, config=self.config, is_reached=is_reached), (self.inner,)

    def close(self) -> None:
        """Close the store inside; operations that wait for the endpoint end."""
        super().close()
        self.closed = True

    @property
    def unreachable_s(self) -> float:
        """Seconds since the store was made in which operations of this process waited for its endpoint."""
        return self.reachability.unreachable_s - self._unreachable_before_s if self.reachability is not None else 0.0

    def submit(self, operation: Operation, sink: Sink) -> Transfer:
        """Start `operation`, and try it again if it fails; see ``Store.submit``."""
        entry = RetriedOperation(self, operation, sink)
        entry.transfers.append(self.inner.submit(operation, entry))
        return entry

    def statistics(self) -> RetryStatistics:
        """Return how often operations were tried again so far."""
        return RetryStatistics(
            retried_count=self.retried_count,
            resumed_count=self.resumed_count,
            given_up_count=self.given_up_count,
            unreachable_s=self.unreachable_s,
            inner=self.inner.statistics(),
        )


def _rebuild(inner: Store, *, config: RetryConfig, is_reached: bool) -> Retrying:
    """Unpickle a store; a worker process knows from its parent that the endpoint was reached."""
    store = Retrying(inner, config=config)
    if is_reached and store.reachability is not None:
        store.reachability.note_reached()
    return store


def _is_unanswered(error: StoreError, status: int) -> bool:
    """Whether an error may mean that the endpoint is down: no answer at all, or one of 5xx that does not ask to slow down."""
    if not isinstance(error, UnavailableError | ThrottledError) or error.code in _THROTTLES:
        return False
    return status == 0 or status in _SERVER_FAILURES


def _located(error: StoreError) -> dict[str, Any]:
    """Return the fields of `error` that say where it happened, for another error."""
    return {name: getattr(error, name) for name in ("operation", "url", "span", "status", "code", "request_id")}


class RetriedOperation(Resent, Relay):
    """One operation through all of its attempts."""

    __slots__ = (
        "attempts",
        "backoff",
        "begin",
        "cancelled",
        "deadline_s",
        "failed_s",
        "forgiven_count",
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
        self.begin = sink.landing.offset if sink.landing is not None else 0  # where the body's first byte belongs
        self.transfers: list[Transfer] = []
        self.cancelled = False
        self.tries_count = 0
        self.forgiven_count = 0  # tries that do not count, because the endpoint answered nobody
        self.failed_s = 0.0  # when the last attempt failed
        self.deadline_s = float("inf")  # until when attempts may start; known from the first failure on
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
        """Give the operation up, also while it waits; see ``types.Transfer.cancel``."""
        super().cancel()
        if self.backoff:
            engine.call_later(0.0, self.again)

    def _is_cancelled(self) -> bool:
        return self.cancelled

    # ── Sink ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def head(self, info: ObjectInfo, span: ByteRange) -> Landing | None:
        """Return where the body goes, the same place in each attempt; see ``types.Sink.head``."""
        if self.target is None:
            self.info, self.span = info, span
            self.target = self.sink.head(info, span)
            self.begin = self.target.offset if self.target is not None else 0
        reach = self.owner.reachability
        if reach is not None and reach.probe is self:  # its body may be long; the others need not wait for its end
            reach.answered(self, 0.0)
        return self.target

    def done(self, completion: Completion) -> None:
        """Take the end of an attempt; see ``types.Sink.done``."""
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
        reach = self.owner.reachability
        last = completion.attempts[-1] if completion.attempts else None
        unanswered = reach is not None and error is not None and _is_unanswered(error, last.status if last else 0)
        if reach is None:
            pass
        elif last is not None and last.status and not unanswered:
            if last.start_s > reach.answered_s:  # noqa: PLR1730 - without a call
                reach.answered_s = last.start_s
            if reach.since_s is not None:
                reach.answered(self, last.start_s)
        elif reach.probe is self:  # or it was cancelled, and another one is to follow
            reach.probe_failed()
        if error is None:
            if self.attempts:
                completion.attempts = self.attempts + completion.attempts
            return True
        return self._is_given_up(completion, error, unanswered=unanswered)

    def _is_given_up(self, completion: Completion, error: StoreError, *, unanswered: bool) -> bool:
        """Whether a failed attempt was the last one; if it was not, the next one follows."""
        config, reach = self.owner.config, self.owner.reachability
        now_s = time.monotonic()
        if not self.tries_count:
            self.start_s = self.failed_s = completion.attempts[0].start_s if completion.attempts else now_s
            self.deadline_s = now_s + config.total_s_max
        self.attempts += completion.attempts
        self.tries_count += 1
        previous_s, self.failed_s = self.failed_s, now_s
        error.attempts_count = self.tries_count
        error.elapsed_s = now_s - self.start_s
        counted = self.tries_count - self.forgiven_count
        wait_s = self._wait_s(error, counted)
        spent = counted >= config.attempts_max
        waits = False
        allowed = not spent and now_s + wait_s < self.deadline_s
        if reach is not None and unanswered:
            if not reach.is_reached:
                allowed = allowed and (error.status is not None or error.elapsed_s + wait_s < _UNREACHED_S_MAX)
            elif reach.since_s is not None or (spent and reach.answered_s <= previous_s):
                allowed = waits = now_s < self.deadline_s
            elif isinstance(error, UnavailableError) and error.is_unconnected:
                allowed = now_s + wait_s < self.deadline_s  # a server that ends answers on the connections that it has
        if self.cancelled or not error.retryable or not allowed:
            if error.retryable and not self.cancelled:
                self.owner.given_up_count += 1
            completion.attempts = self.attempts
            return True
        self._note(completion)
        self.owner.retried_count += 1
        self.backoff.append((completion, engine.closings))
        if waits and reach is not None:
            self.forgiven_count = self.tries_count
            reach.wait(self, error, wait_s_min=error.retry_after_s or 0.0)
        else:
            log.debug("attempt %d failed, the next one begins in %.2f s: %s", self.tries_count, wait_s, error)
            engine.call_later(wait_s, self.again)
        if self._is_cancelled():  # cancelled by another thread, which may have seen no backoff
            engine.call_later(0.0, self.again)
        return False

    def is_wait_over(self, now_s: float) -> bool:
        """Whether it must not wait for its endpoint any longer."""
        return not self.backoff or self.owner.closed or now_s >= self.deadline_s

    def _is_refused_resumption(self, error: StoreError) -> bool:
        """Whether the store did not continue where the body broke, because it has no ranges or nothing was missing."""
        if not self.resuming or self.span is None:
            return False
        nothing_left = isinstance(error, SpanError) and self.span.end == UNKNOWN_BYTES
        return nothing_left or isinstance(error, ProtocolError)

    def _wait_s(self, error: StoreError, tries_count: int) -> float:
        config = self.owner.config
        mean_s = config.backoff_s * 2 ** min(max(0, tries_count - 1), 30)
        wait_s = min(_jitter.uniform(0, 2 * mean_s), config.backoff_s_max)
        if error.retry_after_s is not None:
            wait_s = max(wait_s, min(error.retry_after_s, config.backoff_s_max))
        return wait_s

    def _note(self, completion: Completion) -> None:
        """Remember what the first answer said, and how much of its body arrived."""
        if completion.landing is not None and completion.info is not None and self.target is None:
            self.info, self.span, self.target = completion.info, completion.span, completion.landing
            self.begin = self.begin if self.target is self.sink.landing else self.target.start
        self.unsound = isinstance(completion.error, ChecksumError)

    def again(self) -> bool:
        """Send the next attempt, or end the operation if it is cancelled, closed or late; False if nothing was sent."""
        try:
            failed, closings = self.backoff.pop()
        except IndexError:
            return False
        failed.attempts = self.attempts
        if closings != engine.closings:
            assert failed.error is not None
            what = "the transport was closed before the next attempt"
            failed.error = ClosedStoreError(what, **_located(failed.error))
        if self.cancelled or closings != engine.closings:
            self.sink.done(failed)
            return False
        if time.monotonic() >= self.deadline_s and not self.owner.closed:
            self._give_up(failed)
            return False
        try:
            operation = self._remaining()
            transfer = self.owner.inner.submit(operation, self) if operation is not None else None
        except Exception as error:  # the store was closed, or this is a defect; the waiting caller must get an error
            failed.error = as_completion_error(error)
            self.sink.done(failed)
            return False
        if transfer is None:
            self.done(Completion(self.operation))
            return False
        self.transfers.append(transfer)
        if self._is_cancelled():  # another thread has cancelled it
            transfer.cancel()
        return True

    def _give_up(self, failed: Completion) -> None:
        """End an operation that has waited for its endpoint in vain."""
        assert failed.error is not None
        self.owner.given_up_count += 1
        failed.error.elapsed_s = time.monotonic() - self.start_s
        self.sink.done(failed)

    def _remaining(self) -> Operation | None:
        """Return the operation for what is missing; None if nothing is."""
        operation, target, info, span = self.operation, self.target, self.info, self.span
        self.resuming = False
        if not isinstance(operation, Get) or target is None or info is None or span is None:
            if self.landing is not None:
                self.landing.offset = self.begin
            return operation
        received_bytes = target.offset - self.begin
        if received_bytes == 0 or info.etag is None or self.unsound or self.ranges_refused:
            target.offset = self.begin
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
        completion.span = ByteRange(span.start, span.start + (target.offset - self.begin))
        if completion.span.start == 0 and completion.span.end == info.size_bytes and info.checksums:
            try:
                completion.verified = verify(info.checksums, target.view)
            except ChecksumError as error:
                error.operation, error.url = "GET", self.owner.describe(operation.key)
                completion.error = error.with_traceback(None)  # whose frames refer to the completion: a cycle
