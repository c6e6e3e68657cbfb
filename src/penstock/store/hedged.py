"""``Hedged``: if an answer is later than nearly all recent ones, send a second request and take whichever answers first.

Object stores have long tails: one request in a hundred takes many times the median because one server is slow, and a batch
waits for its slowest sample. A second request usually reaches another server. Only GET and HEAD are hedged, each at most
once, and a token bucket bounds the extra load to 5%. Source: Dean and Barroso, "The Tail at Scale", CACM 56 (2013).

If the caller named the landing beforehand, the first request writes there, and the second has a buffer of its own. The
request that answers first wins, and the other is cancelled. The operation ends only when both have ended, so that no late byte
is ever written into a buffer that was passed on. If the second request won, its body is then copied to the landing.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.config import HedgeConfig
from penstock.errors import CancelledOperationError, StoreError
from penstock.memory.buffers import small_buffer
from penstock.store.base import Relay, Store, Wrapper
from penstock.system import forks
from penstock.system.quantiles import Recent
from penstock.transport import engine
from penstock.types import ByteRange, Completion, Get, Head, Landing, ObjectInfo, Operation, Sink, Transfer

_SAMPLES_MIN = 64
_RELEARN_COUNT = 64
_TOKENS_MAX = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HedgeStatistics:
    """Counts of second requests.

    Attributes:
        hedged_count: Second requests that were sent.
        won_count: Second requests that answered first. If only few do, the network or this process is slow, and not one
            server.
        wait_s: Seconds that an answer may take at present before a second request is sent; nan before that is known.
        inner: Statistics of the store inside.
    """

    hedged_count: int
    won_count: int
    wait_s: float
    inner: Any


class Hedged(Wrapper):
    """Sends late GETs and HEADs of the store inside a second time.

    Args:
        inner: The store.
        config: When a request counts as late, and how many may be hedged; None means ``HedgeConfig()``.

    Attributes:
        config: When a request counts as late, and how many may be hedged.
        hedged_count: Second requests that were sent.
        won_count: Second requests that answered first.
        lock: Held while an operation decides which of its requests wins.
    """

    def __init__(self, inner: Store, *, config: HedgeConfig | None = None) -> None:
        super().__init__(inner)
        self.config = config or HedgeConfig()
        self.hedged_count = 0
        self.won_count = 0
        self._recent_s = Recent(512)
        self._reset()
        forks.register(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Hedged, config=self.config), (self.inner,)

    def _reset(self) -> None:
        self.lock = threading.RLock()  # reentrant, because a finaliser may cancel or submit while it is held
        self._outstanding: dict[HedgedOperation, float] = {}
        self._tokens = _TOKENS_MAX
        self._wait_s = float("inf")
        self._learned = 0
        self._ticking = False

    def after_fork_in_child(self) -> None:
        """Forget the parent's requests."""
        self._reset()

    def submit(self, operation: Operation, sink: Sink) -> Transfer:
        """Start `operation`, and watch it if it is a GET or HEAD; see ``Store.submit``."""
        if not isinstance(operation, (Get, Head)) or self.config.ratio_max == 0:
            return self.inner.submit(operation, sink)
        entry = HedgedOperation(self, operation, sink)
        self._outstanding[entry] = time.monotonic()
        try:
            entry.first = self.inner.submit(operation, entry)
        except BaseException:
            self._outstanding.pop(entry, None)
            raise
        if entry.cancelled:
            entry.first.cancel()
        self._tokens = min(_TOKENS_MAX, self._tokens + self.config.ratio_max)
        if not self._ticking and self._wait_s < float("inf"):
            self._tick_later(self._wait_s)
        return entry

    def forget(self, entry: HedgedOperation, completion: Completion) -> None:
        """Stop watching an operation that has ended, and learn from its times."""
        self._outstanding.pop(entry, None)
        for attempt in completion.attempts:
            if attempt.first_byte_s and not attempt.throttled:
                self._recent_s.add(attempt.first_byte_s)
        self._learned += 1
        if self._learned >= _RELEARN_COUNT and len(self._recent_s) >= _SAMPLES_MIN:
            self._learned = 0
            # Twice the quantile: most requests that are merely among the slowest percent answer within that time.
            self._wait_s = max(self.config.wait_s_min, 2 * self._recent_s.quantile(self.config.quantile))

    def _tick_later(self, delay_s: float) -> None:
        self._ticking = True
        closings = engine.closings
        engine.call_later(max(delay_s, 0.005), lambda: self._tick(closings))

    def _tick(self, closings: int) -> None:
        """Hedge late requests; the dict is in order of submission, so the first young operation ends the search."""
        if closings != engine.closings:  # an engine that was closed is not started again for this
            self._ticking = False
            return
        now_s = time.monotonic()
        next_s: float | None = None
        # Nothing interrupts the copy of a dict; making a list of pairs could run finalisers and let other threads in.
        for entry, submitted_s in self._outstanding.copy().items():
            if now_s - submitted_s < self._wait_s:
                next_s = self._wait_s - (now_s - submitted_s)
                break
            if entry.second is None and self._tokens >= 1 and entry.is_late(self._wait_s):
                self._tokens -= 1
                entry.hedge()
        if self._outstanding:
            self._tick_later(next_s if next_s is not None else self._wait_s / 4)
        else:
            self._ticking = False

    def statistics(self) -> HedgeStatistics:
        """Return how often a second request was sent so far."""
        return HedgeStatistics(
            hedged_count=self.hedged_count,
            won_count=self.won_count,
            wait_s=self._wait_s if self._wait_s < float("inf") else float("nan"),
            inner=self.inner.statistics(),
        )


class HedgedOperation(Relay):
    """An operation and its requests, of which there may be two: the first one's sink, and the caller's transfer."""

    __slots__ = (
        "answered",
        "cancelled",
        "ended",
        "first",
        "first_done",
        "operation",
        "owner",
        "second",
        "second_done",
        "start",
        "winner",
    )

    def __init__(self, owner: Hedged, operation: Get | Head, sink: Sink) -> None:
        self.owner = owner
        self.operation = operation
        self.sink = sink
        self.landing = sink.landing
        self.start = sink.landing.offset if sink.landing is not None else 0  # where the body's first byte belongs
        self.first: Transfer | None = None
        self.second: Transfer | SecondRequest | None = None
        self.first_done: Completion | None = None
        self.second_done: Completion | None = None
        self.winner = 0
        self.cancelled = False
        self.ended = False
        self.answered = (
            False  # whether the first request's body has its landing; a resumed attempt continues to write there
        )

    def is_late(self, wait_s: float) -> bool:
        """Whether its first request was sent at least `wait_s` seconds ago and has no answer."""
        first = self.first
        if first is None or self.ended or self.cancelled or self.answered:
            return False
        return first.unanswered_s() >= wait_s

    def hedge(self) -> None:
        """Send the second request."""
        second = SecondRequest(self)
        with self.owner.lock:
            if self.ended or self.winner:
                return
            self.second = second
        self.owner.hedged_count += 1
        try:
            transfer = self.owner.inner.submit(self.operation, second)
        except Exception:  # the first request fails with the same error, and reports it
            self.request_ended(2, Completion(self.operation, error=CancelledOperationError("cancelled")))
            return
        second.transfer = transfer
        if self._needs_no_second():
            transfer.cancel()

    def _needs_no_second(self) -> bool:
        """Whether the operation has already been cancelled, ended or answered, perhaps by another thread."""
        return self.cancelled or self.ended or self.winner == 1

    # ── Transfer ───────────────────────────────────────────────────────────────────────────────────────────────────

    def cancel(self) -> None:
        """Cancel both requests."""
        self.cancelled = True
        for transfer in (self.first, self.second):
            if transfer is not None:
                transfer.cancel()

    def unanswered_s(self) -> float:
        """Return how long the first request has waited for its answer, in seconds."""
        first = self.first
        return first.unanswered_s() if first is not None else 0.0

    # ── Sink of the first request ──────────────────────────────────────────────────────────────────────────────────

    def head(self, info: ObjectInfo, span: ByteRange) -> Landing | None:
        """Let the first request win if the second has not, and ask the caller's sink for the landing."""
        if self.second is not None and not self._let_win(1):
            raise CancelledOperationError("the other request answered first")
        self.answered = True
        return self.sink.head(info, span)

    def done(self, completion: Completion) -> None:
        """Take the end of the first request."""
        if self.second is None:
            with self.owner.lock:
                self.ended = self.second is None
            if self.ended:
                self._finish(completion)
                return
        self.request_ended(1, completion)

    # ── both ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _let_win(self, request: int) -> bool:
        """Let request 1 or 2 win and cancel the other one; False if the other one has won already."""
        with self.owner.lock:
            if self.winner == 0:
                self.winner = request
            elif self.winner != request:
                return False
        other = self.second if request == 1 else self.first
        if other is not None:
            other.cancel()
        return True

    def head_of_second(self, info: ObjectInfo, span: ByteRange) -> Landing | None:
        """Let the second request win, if the first one has still not answered."""
        first = self.first
        if self.winner == 0 and first is not None and first.unanswered_s() == 0.0 and self.first_done is None:
            raise CancelledOperationError("the other request answered first")
        if not self._let_win(2):
            raise CancelledOperationError("the other request answered first")
        if self.landing is None:
            return self.sink.head(info, span)
        length_bytes = min(span.length_bytes, self.landing.end - self.start)
        return Landing(small_buffer(length_bytes), 0, length_bytes)  # the first request may still write to the landing

    def request_ended(self, request: int, completion: Completion) -> None:
        """Note that request 1 or 2 has ended; the operation ends when both have."""
        if completion.error is None:
            self._let_win(request)
        with self.owner.lock:
            if request == 1:
                self.first_done = completion
            else:
                self.second_done = completion
            if self.first_done is None or self.second_done is None or self.ended:
                return
            self.ended = True
        chosen, other = self.first_done, self.second_done
        if self.winner == 2:
            chosen, other = other, chosen
            self.owner.won_count += 1
        if chosen.error is not None and (other.error is None or _cancelled(chosen)):
            chosen = other
        if chosen is self.second_done and self.landing is not None:
            self._move(chosen, self.landing)
        self._finish(chosen)

    def _finish(self, completion: Completion) -> None:
        self.first = self.second = self.first_done = self.second_done = None
        try:
            self.owner.forget(self, completion)
        finally:
            self.sink.done(completion)

    def _move(self, completion: Completion, landing: Landing) -> None:
        """Copy the received part of the second request's body to the caller's landing, where nothing else writes any more."""
        body = completion.body[: landing.end - self.start]
        landing.offset = self.start
        try:
            landing.append(body)
        except StoreError as error:
            completion.error = error.with_traceback(None)  # whose frames refer to the completion: a cycle
        completion.landing = landing


def _cancelled(completion: Completion) -> bool:
    return isinstance(completion.error, CancelledOperationError)


class SecondRequest:
    """The second request: its sink, and its transfer as soon as there is one."""

    __slots__ = ("entry", "landing", "transfer")

    def __init__(self, entry: HedgedOperation) -> None:
        self.entry = entry
        self.landing: Landing | None = None
        self.transfer: Transfer | None = None

    def cancel(self) -> None:
        """Cancel the request."""
        if self.transfer is not None:
            self.transfer.cancel()

    def head(self, info: ObjectInfo, span: ByteRange) -> Landing | None:
        """Return the landing that the operation chooses for the second request."""
        return self.entry.head_of_second(info, span)

    def done(self, completion: Completion) -> None:
        """Take the end of the second request."""
        self.entry.request_ended(2, completion)
