"""Ordered read-ahead: reads a plan ahead of one consumer.

The consumer's thread pulls items of the plan, which may be a user's generator, a little ahead. A ``RequestScheduler`` sends
them as other requests end, on engine threads, so that requests stay in flight while the consumer computes. Items that are
delivered in order are requested in order.
"""

from __future__ import annotations

import threading
from collections import deque
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from penstock.errors import CancelledOperationError, ConfigError
from penstock.fetch.budget import POOLED_BYTES_MIN
from penstock.fetch.plan import Request, as_item, coalesce, is_one_request
from penstock.fetch.requests import LandingAllocator, ObjectRead, PartRequest
from penstock.fetch.scheduler import SMALL_BYTES, RequestScheduler, refusal
from penstock.system import forks
from penstock.types import UNKNOWN_BYTES, GrowingLanding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.config import FetchConfig
    from penstock.fetch.budget import Budget
    from penstock.fetch.plan import PlanItem
    from penstock.fetch.scheduler import FetchStatistics
    from penstock.types import ByteRange, Completion, Core, Landing, ObjectInfo


_PULL_COUNT = 64
"""Items to pull at a time while something waits to be delivered: a slow generator must not hold it back for long."""


class ReadAhead:
    """The consumer's side of read-ahead. For one thread at a time; only ``wait_read`` and ``wait_part`` block.

    Args:
        core: The store.
        requests: The plan; pulled lazily, by the consumer's thread.
        config: Sizes of parts, bounds of requests and the gap to read through; see ``FetchConfig``.
        budget: The budget that bodies are charged to.
        whole: True delivers each item as one piece of memory, False part by part.

    Attributes:
        budget: The budget that bodies are charged to.
    """

    def __init__(
        self, core: Core, requests: Iterable[Request], *, config: FetchConfig, budget: Budget, whole: bool
    ) -> None:
        self.budget = budget
        self._requests: Iterator[Request] | None = iter(requests)
        self._config = config
        self._whole = whole
        self._landings = LandingAllocator(core, budget, whole=whole)
        self._scheduler = RequestScheduler(core, self._landings, config=config, budget=budget, whole=whole)
        self._taken: deque[ObjectRead] = deque()  # taken from the scheduler, not yet delivered
        self._pulled_count = 0
        self._generation = forks.generation()

    def start(self) -> None:
        """Send the first requests now and not at the first wait, for programs that open many readers and use them in turn."""
        self._refill()

    def wait_read(self, *, ordered: bool = True) -> ObjectRead | None:
        """Wait for a finished read; None at the end of the plan.

        Args:
            ordered: True takes the next one of the plan, False any.

        Raises:
            ClosedError: The read-ahead was closed during the call, or this is a forked child.
        """
        forks.check(self._generation, "this iterator")
        while not self._taken:
            self._scheduler.take_finished(self._taken, ordered=ordered)
            if self._taken:
                self._keep_full()
            elif self._refill() or self._scheduler.has_more():
                self._scheduler.wait_finished(ordered=ordered)
            else:
                return None
        return self._taken.popleft()

    def wait_part(self) -> tuple[ObjectRead, PartRequest | None] | None:
        """Wait for the next part in order: its read and the part; None at the end of the plan.

        The part is None if the read failed.

        Raises:
            ClosedError: The read-ahead was closed during the call, or this is a forked child.
        """
        forks.check(self._generation, "this iterator")
        while True:
            taken = self._scheduler.take_part()
            if taken is not None:
                self._keep_full()
                return taken
            if not self._refill() and not self._scheduler.has_more():
                return None
            self._scheduler.wait_part()

    def release(self, part: PartRequest) -> None:
        """Release the bytes reserved for a delivered part; a ``PartBuffer`` returns itself."""
        self._landings.release(part)

    def statistics(self) -> FetchStatistics:
        """Statistics so far."""
        return self._scheduler.statistics()

    def close(self) -> None:
        """Cancel the requests in flight and release every reserved byte. Idempotent; does nothing in a forked child."""
        if self._scheduler.closed or self._generation != forks.generation():
            return
        self._requests = None
        taken, self._taken = self._taken, deque()
        self._scheduler.close(taken)

    def join(self, wait_s_max: float) -> bool:
        """Block until no request is in flight; see ``RequestScheduler.join``. Returns True at once in a forked child."""
        return self._generation != forks.generation() or self._scheduler.join(wait_s_max)

    def _keep_full(self) -> None:
        if self._scheduler.keep_full(may_add=self._requests is not None):
            self._refill()

    def _refill(self) -> bool:
        """Add as much of the plan as may soon be in flight, and send requests; False at the plan's end."""
        requests = self._requests
        if requests is None:
            self._scheduler.add(())
            return False
        # There may be no room: the limit of requests may have shrunk since more was planned.
        wanted = max(0, self._scheduler.room_count()) if not self._taken else _PULL_COUNT
        pulled: list[PlanItem] = []
        for request in islice(requests, wanted):
            pulled.append(as_item(request, self._pulled_count))
            self._pulled_count += 1
        if len(pulled) < wanted:
            self._requests = None
        if len(pulled) > 1 and self._whole:
            pulled = coalesce(pulled, gap_bytes=self._config.gap_bytes_max, length_bytes_max=self._config.part_bytes)
        self._scheduler.add(pulled)
        return self._requests is not None or bool(pulled)


class SingleRead:
    """One item, delivered whole, for the thread that waits for it.

    The thread waits for nothing else, so the read may exceed the budget, as the next item of a read-ahead may.

    Args:
        core: The store.
        item: Object or range to read; ``fits`` must be true for it.
        config: Sizes of parts and bounds of requests, for an object that turns out to be large.
        budget: The budget that the body is charged to.

    Attributes:
        budget: The budget that the body is charged to.
    """

    def __init__(self, core: Core, item: PlanItem, *, config: FetchConfig, budget: Budget) -> None:
        self._core = core
        self._config = config
        self.budget = budget
        self._landings = LandingAllocator(core, budget, whole=True)
        self._read = read = ObjectRead(item, 0)
        span = item.span
        start, length = (span.start, span.length_bytes) if span is not None else (0, None)
        self._part = PartRequest(self, read, start, length)
        read.parts.append(self._part)
        read.pending_count = 1
        self._lock = threading.Lock()  # over the end of the request, and `_closed`
        self._closed = False
        self._ended = threading.Lock()  # released when the request has ended, or a scheduler has taken over
        self._ended.acquire()
        self._scheduler: RequestScheduler | None = None
        self._taken: deque[ObjectRead] = deque()

    @staticmethod
    def fits(item: PlanItem, *, config: FetchConfig, budget: Budget) -> bool:
        """Whether `item` begins as one request: a whole object of unknown size, or a range of about one part at most."""
        span = item.span
        if span is None:
            return item.size_bytes is None
        return is_one_request(span, config.part_bytes) and span.length_bytes <= budget.bytes_max // 2

    def wait_read(self) -> ObjectRead:
        """Send the request and wait for its end; Ctrl-C propagates, and ``close`` then cancels the request."""
        read, part = self._read, self._part
        self._landings.prepare(part, SMALL_BYTES, force=True)
        try:
            part.transfer = self._core.submit(part.operation(), part)
        except Exception as error:  # refused before it was sent: a bad key, a closed store
            read.error = refusal(error)
            return read
        self._ended.acquire()
        if self._scheduler is not None:
            self._scheduler.wait_finished(ordered=True)
            self._scheduler.take_finished(self._taken, ordered=True)
            read = self._taken[0]  # another one, if the scheduler had to start again
        part.transfer = None
        return read

    def release(self, part: PartRequest) -> None:
        """Release the bytes reserved for a delivered part; a ``PartBuffer`` returns itself."""
        self._landings.release(part)

    def close(self) -> None:
        """Cancel the requests in flight and release every reserved byte."""
        if self._scheduler is not None:
            self._scheduler.close(self._taken)
            return
        part = self._part
        with self._lock:
            self._closed = True
            if part.completion is not None or self._read.error is not None:
                self._landings.release(part)
        if (transfer := part.transfer) is not None:
            transfer.cancel()

    # ── engine threads ─────────────────────────────────────────────────────────────────────────────────────────────

    def on_head(self, part: PartRequest, info: ObjectInfo, span: ByteRange) -> Landing | None:
        """Pin the version and place the body; see ``Requester.on_head``."""
        read = part.read
        if span.end == UNKNOWN_BYTES and part.landing is None:
            return GrowingLanding(partial(self._make_room, part))  # the version is pinned when its size is known
        try:
            if span.end != UNKNOWN_BYTES:
                read.pin(info)
            if part.length_bytes is None:
                self._landings.refuse_oversize(read, span)
        except ConfigError as error:
            read.error = error
            raise CancelledOperationError("refused") from error
        if part.length_bytes is None and part.landing is None:
            size_bytes = span.length_bytes
            if size_bytes >= POOLED_BYTES_MIN and size_bytes > 2 * self._config.part_bytes:
                return self._hand_over(part, info, span)
            part.length_bytes = size_bytes
            if size_bytes >= POOLED_BYTES_MIN:
                self._landings.take_buffer(part, size_bytes, force=True)
        if part.landing is not None:
            part.landing.offset = part.landing.start
        return part.landing

    def _hand_over(self, part: PartRequest, info: ObjectInfo, span: ByteRange) -> Landing | None:
        """Let a scheduler read the rest of a large object, in parts, while the first part is on its way."""
        scheduler = RequestScheduler(self._core, self._landings, config=self._config, budget=self.budget, whole=True)
        with self._lock:
            if self._closed:
                raise CancelledOperationError("cancelled")
            self._scheduler = scheduler
        try:
            return scheduler.adopt(part, info, span)
        finally:
            self._ended.release()

    def _make_room(self, part: PartRequest, length_bytes: int) -> None:
        """Charge the budget for a body of unknown length while it arrives; it is collected whole."""
        if length_bytes <= part.reserved_bytes:
            return
        try:
            self._landings.reserve_growth(part, length_bytes, force=True)
        except ConfigError as error:
            part.read.error = error
            raise CancelledOperationError("refused") from error

    def on_done(self, part: PartRequest, completion: Completion) -> None:
        """Take the end of the request; see ``Requester.on_done``."""
        read = part.read
        with self._lock:
            part.completion = completion
            if self._closed:
                self._landings.release(part)
                return
            read.pending_count = 0
            try:
                if completion.error is not None:
                    raise completion.error
                if completion.info is not None:
                    read.pin(completion.info)
            except Exception as error:
                read.error = read.error or refusal(error)
        self._ended.release()

    def on_metadata(self, read: ObjectRead, completion: Completion) -> None:
        """Do nothing: only a scheduler sends a HEAD."""
