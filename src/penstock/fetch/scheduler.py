"""Keeps requests in flight: sends them while concurrency, budget and consumer allow, and records their ends on their reads.

Bytes are reserved before a request is sent. If a consumer waits for an item for which nothing is in flight, the item is
requested even beyond the budget, so there is no deadlock, whatever else holds the bytes.

Objects of unknown size are requested whole: most are small, and only an answer without a range carries the object's
checksum. If the head of the answer says that the object is large, its first part lands, the connection is dropped, and the
rest is requested in parts. After one such object a HEAD asks for the size of the next ones, a few objects ahead.

A range of several parts in an object of unknown size begins with its first part, too. The head of the answer says where
the object ends, and the rest of the range is requested up to there: no request ever begins past the end.

Sizes may be wrong where objects are transformed while they are read: a listing may tell the sizes of the stored objects. If an
answer tells another size of the same version, or the store sends no ranges, this object and the next ones are each requested
whole, without a range. A body of unknown length that is too long to be collected is requested in parts.

Not split because cutting, sending and recording ends share the queues, the concurrency and the lock; in two classes, each
would need most of the other's attributes.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from penstock.config import MIB, FetchConfig
from penstock.errors import (
    CancelledOperationError,
    ClosedError,
    ConfigError,
    PenstockError,
    ProtocolError,
    SpanError,
    as_completion_error,
)
from penstock.fetch.budget import POOLED_BYTES_MIN, Budget
from penstock.fetch.concurrency import Concurrency
from penstock.fetch.plan import cut, is_one_request, parts
from penstock.fetch.requests import HeadRequest, ObjectRead, PartRequest, Route
from penstock.system.conditions import Condition
from penstock.types import UNKNOWN_BYTES, ByteRange, Completion, Core, GrowingLanding, Head

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.fetch.plan import PlanItem
    from penstock.fetch.requests import LandingAllocator
    from penstock.types import Landing, ObjectInfo

SMALL_BYTES = 1 * MIB
"""Reserved for the first bodies of unknown length; a shorter first range tells that the objects are small."""
_AHEAD = 1.5
"""Requests in flight and finished ones not yet delivered, per request that may be in flight..."""
_AHEAD_BYTES = 64 * MIB
"""...or as many more as make this many bytes: a consumer that pauses finds small objects waiting."""
_AHEAD_PARTS_MAX = 2048
PARTS_PER_REQUEST = 3
"""Parts of the object that is being delivered part by part, per request that may be in flight: one on its way, two waiting."""
_IN_FLIGHT_BYTES = 512 * MIB
"""Bytes of parts in flight: 64 parts of 8 MiB cover 100 ms at 5 GB/s, and more only spreads them over more memory."""
_HEADS_MAX = 4
"""Objects of several parts for which a HEAD is under way, ahead of the one whose parts are being requested."""
_PLANNED_MIN = 64
"""Items of the plan to have ready, however low the concurrency is."""
_LINGER_S = 0.002
"""Seconds after which a waiting consumer looks again, even if nothing has woken it."""
WAKE_BYTES = 4 * MIB
"""A waiting consumer is woken for this many bytes: waking it for each of 10 000 small objects a second had both threads
fight for the GIL, two context switches and 60 µs per object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchStatistics:
    """Statistics of one read-ahead.

    Attributes:
        requests_in_flight: Requests in flight now.
        requests_limit: The most requests it would have in flight now; it rises while the consumer waits and throughput
            grows.
        received_bytes: Bytes that have arrived so far, delivered or waiting.
        stall_s: Seconds that the consumer waited for data: near 0 means that reading keeps up with it.
        stalls_count: Number of times that the consumer waited.
        throttled_count: Answers by which the store asked to slow down.
    """

    requests_in_flight: int
    requests_limit: int
    received_bytes: int
    stall_s: float
    stalls_count: int
    throttled_count: int


class RequestScheduler:
    """Sends the requests of a plan, and holds finished items until the consumer takes them.

    One consumer adds items, takes finished items and waits; engine threads report answers, and send more as requests
    end. Each of them holds the scheduler's lock while it does so.

    Args:
        core: The store.
        landings: Gives requests their memory; the caller releases the parts that it took.
        config: Sizes of parts and bounds of requests; see ``FetchConfig``.
        budget: The budget that bodies are charged to.
        whole: True delivers each item as one piece of memory, False part by part.

    Attributes:
        closed: Whether nothing is sent any more, and what ends is dropped.
    """

    def __init__(
        self, core: Core, landings: LandingAllocator, *, config: FetchConfig, budget: Budget, whole: bool
    ) -> None:
        self._core = core
        self._config = config
        self._whole = whole
        self._budget = budget
        self._landings = landings
        self._lock = Condition()  # notified when the consumer's next item may have arrived
        self._planned: deque[PlanItem] = deque()  # to be requested, in order
        self._reads: deque[ObjectRead] = deque()  # requested and not yet taken, in order
        self._sent: set[PartRequest] = set()  # in flight
        self._unsent: list[tuple[int, int, PartRequest]] = []  # a heap: by read, then by byte
        self._undelivered_count = 0  # requests in flight, and ended ones whose bytes are here
        self._waiting = False  # whether the consumer waits
        self._concurrency = Concurrency(
            limit=config.requests_min, limit_min=1, limit_max=config.requests_max, waits_for_steady_rate=whole
        )
        self._unannounced_bytes = 0  # that arrived since the consumer was last woken
        self._planned_count = 0
        self._estimate_bytes = float(SMALL_BYTES)
        # A reader of many small parts gets its share: as many as make the few large parts that it was given.
        given_bytes = PARTS_PER_REQUEST * config.requests_max * config.part_bytes
        self._ahead_bytes = min(_AHEAD_BYTES, budget.bytes_max // 4, given_bytes)
        self._large_expected = False
        self._whole_route = Route.AS_PLANNED  # of whole objects; another one if a size in the plan was wrong
        self._heads_count = 0  # HEADs under way
        self._checksums_kept: bool | None = None  # whether the store tells checksums of whole objects; None: unknown
        self._received_bytes = 0
        self._throttled_count = 0
        self._stall_s = 0.0
        self._stalls_count = 0
        self.closed = False

    # ── the consumer ───────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, items: Sequence[PlanItem]) -> None:
        """Add items to the end of the plan, and send the requests that may be sent."""
        with self._lock:
            self._planned.extend(items)
            self._send_more()

    def adopt(self, part: PartRequest, info: ObjectInfo, span: ByteRange) -> Landing | None:
        """Adopt a read whose first request, in flight, turned out to be for a large object.

        The scheduler must be new.

        Args:
            part: The request, whose answer has begun; ``part.read`` has no other.
            info: Version, size and checksums of the object according to the answer.
            span: The bytes of the object that follow.

        Returns:
            Where the body goes; see ``types.Sink.head``.
        """
        with self._lock:
            part.requester = self
            self._planned_count = 1
            self._reads.append(part.read)
            self._sent.add(part)
            part.read.sent_count = self._undelivered_count = 1
            return self.on_head(part, info, span)

    def room_count(self) -> int:
        """Number of items to add so that the plan is long enough for the concurrency; 0 or less if it is."""
        return max(2 * self._concurrency.limit, _PLANNED_MIN) - len(self._planned)

    def keep_full(self, *, may_add: bool) -> bool:
        """Send what waited for room, after something was delivered.

        Args:
            may_add: Whether the consumer has more items to add.

        Returns:
            True if the consumer should add more items; nothing was sent then.
        """
        limit = self._concurrency.limit
        if may_add and len(self._planned) < max(limit, _PLANNED_MIN):
            return True
        if len(self._sent) <= limit // 2 and (self._planned or self._unsent):
            with self._lock:
                self._send_more()
        return False

    def has_more(self) -> bool:
        """Whether there is more to deliver. Planned items may wait until the requests of failed items have ended."""
        with self._lock:
            return bool(self._reads or self._planned)

    def take_finished(self, taken: deque[ObjectRead], *, ordered: bool) -> None:
        """Append finished reads to `taken`, several small ones at a time; it stays empty if there are none.

        Args:
            taken: The list to append to; when the scheduler is closed, the rest of it is passed to ``close``.
            ordered: True takes them in the order of the plan, False as they finished.
        """
        taken_bytes = 0
        with self._lock:
            while taken_bytes < WAKE_BYTES and (read := self._finished(ordered=ordered)) is not None:
                if ordered:
                    self._reads.popleft()
                else:
                    self._reads.remove(read)
                self._undelivered_count -= read.sent_count
                taken.append(read)
                taken_bytes += sum(part.completion.received_bytes for part in read.parts if part.completion is not None)

    def take_part(self) -> tuple[ObjectRead, PartRequest | None] | None:
        """Take the next part in order; None if it is not here yet.

        Returns:
            The read and its part, or the read and None if it failed.
        """
        with self._lock:
            if not self._part_ready():
                return None
            read = self._reads[0]
            if read.error is not None:
                self._reads.popleft().release_target()
                self._undelivered_count -= read.sent_count - read.delivered_count
                return read, None
            part = read.parts[read.delivered_count]
            read.delivered_count += 1
            self._undelivered_count -= 1
            if read.delivered_count == len(read.parts):
                self._reads.popleft().release_target()
            return read, part

    def wait_finished(self, *, ordered: bool) -> None:
        """Block until ``take_finished`` would take something.

        Raises:
            ClosedError: The scheduler was closed during the call.
        """
        self._wait(lambda: self._finished(ordered=ordered) is not None)

    def wait_part(self) -> None:
        """Block until ``take_part`` would take something.

        Raises:
            ClosedError: The scheduler was closed during the call.
        """
        self._wait(self._part_ready)

    def statistics(self) -> FetchStatistics:
        """Statistics so far."""
        return FetchStatistics(
            requests_in_flight=len(self._sent),
            requests_limit=self._concurrency.limit,
            received_bytes=self._received_bytes,
            stall_s=self._stall_s,
            stalls_count=self._stalls_count,
            throttled_count=self._throttled_count,
        )

    def close(self, taken: Sequence[ObjectRead]) -> None:
        """Cancel the requests in flight, and release the bytes of everything, including the reads that the consumer took."""
        with self._lock:
            self.closed = True
            self._planned.clear()
            sent = list(self._sent)
            reads = [*taken, *self._reads]
            self._reads.clear()
            self._unsent.clear()
            self._lock.notify_all()
        for part in sent:
            if part.transfer is not None:
                part.transfer.cancel()
        for read in reads:
            read.release_target()
            for part in read.parts:
                if part not in self._sent:
                    self._drop(part)

    def join(self, wait_s_max: float) -> bool:
        """Block until no request is in flight, so that none writes to the caller's memory any more.

        Args:
            wait_s_max: Longest wait in seconds; cancelled requests end soon.

        Returns:
            False if some are still in flight.
        """
        until_s = time.monotonic() + wait_s_max
        with self._lock:
            while self._sent and time.monotonic() < until_s:
                self._lock.wait(_LINGER_S)
            return not self._sent

    def _wait(self, ready: Callable[[], bool]) -> None:
        started_s = time.monotonic()
        with self._lock:
            if ready():
                return
            self._waiting = True
            self._concurrency.starving()
            self._send_more()
            try:
                while not ready():
                    if self.closed:
                        raise ClosedError("the iterator was closed while a thread waited for it")
                    self._lock.wait(_LINGER_S)
            finally:
                self._waiting = False
        self._stall_s += time.monotonic() - started_s
        self._stalls_count += 1

    def _finished(self, *, ordered: bool) -> ObjectRead | None:
        if ordered:
            read = self._reads[0] if self._reads else None
            return read if read is not None and read.finished else None
        return next((read for read in self._reads if read.finished), None)

    def _part_ready(self) -> bool:
        if not self._reads:
            return False
        read = self._reads[0]
        if read.error is not None:
            return True
        # Every part is checked against the checksum of the whole, so the first one waits for it.
        if read.awaits_metadata:
            return False
        return read.parts[read.delivered_count].completion is not None

    # ── sending (under the lock) ───────────────────────────────────────────────────────────────────────────────────

    def _send_more(self) -> None:
        """Send the requests that may be sent now."""
        limit = self._concurrency.limit
        ahead_max = max(int(_AHEAD * limit), min(self._ahead_bytes // int(self._estimate_bytes), _AHEAD_PARTS_MAX))
        while not self.closed and len(self._sent) < self._concurrency.limit:
            if not self._unsent:
                if not self._planned or self._undelivered_count >= ahead_max or self._heads_count >= _HEADS_MAX:
                    return
                self._plan_next()
                continue
            part = self._unsent[0][2]
            if self._is_far_ahead(part, ahead_max):
                return
            heapq.heappop(self._unsent)
            if not self._prepared(part):
                return
            self._send(part)

    def _prepared(self, part: PartRequest) -> bool:
        """Find memory for a part that was taken out of the unsent ones; it is put back if there is none."""
        force = self._waiting and not self._sent and part.read is self._reads[0]
        prepared = self._landings.prepare(part, max(int(self._estimate_bytes), part.grown_bytes), force=force)
        if self.closed:  # a finaliser ran while memory was made, and dropped the iterator
            self._landings.release(part)
            part.landing = part.buffer = None
            return False
        if not prepared:
            self._put_back(part)
        return prepared

    def _put_back(self, part: PartRequest) -> None:
        heapq.heappush(self._unsent, (part.read.sequence, part.start, part))

    def _is_far_ahead(self, part: PartRequest, ahead_max: int) -> bool:
        """Whether a part has to wait until others were delivered; never the one that the consumer needs next."""
        read = part.read
        if read is not self._reads[0]:
            return self._undelivered_count >= ahead_max
        if self._whole or part is read.parts[read.delivered_count]:
            return False
        return read.sent_count - read.delivered_count >= PARTS_PER_REQUEST * self._concurrency.limit

    def _plan_next(self) -> None:
        """Cut the next item of the plan into parts."""
        item, route = self._planned.popleft(), Route.AS_PLANNED
        if item.span is None:
            route = self._whole_route
        read = ObjectRead(item, self._planned_count, route=route)
        if route is not Route.AS_PLANNED:
            read.item = item._replace(size_bytes=None)
        self._planned_count += 1
        self._reads.append(read)
        try:
            span = read.span()
            if read.size_bytes is not None:
                self._landings.refuse_oversize(read, span)
        except PenstockError as error:
            read.error = error
            return
        if span is not None:
            if read.sequence == 0 and self._whole and span.length_bytes < SMALL_BYTES:
                self._concurrency.begin_small()
            self._cut(read, span)
            if len(read.parts) > 1 and read.item.span is None and self._checksums_kept is not False:
                self._request_metadata(read)
        elif self._large_expected and route is Route.AS_PLANNED:
            self._request_metadata(read)
        else:
            self._begin_whole(read)

    def _begin_whole(self, read: ObjectRead) -> None:
        """Request an object by one request without a range, after a HEAD if its route is this."""
        if read.route is Route.AS_HEAD_TELLS:
            self._request_metadata(read)
        else:
            self._add_parts(read, [(0, None)])

    def _cut(self, read: ObjectRead, span: ByteRange) -> None:
        """Add the requests for a span; if the object's size is unknown and there are several, only the first."""
        part_bytes = self._config.part_bytes
        held_max = self._budget.bytes_max // 2
        # If the caller has memory for the whole range, an object that ends before it is an error, so nothing is risked.
        if (
            read.size_bytes is None
            and read.item.target is None
            and not (is_one_request(span, part_bytes) and self._landings.held_bytes(read, span) <= held_max)
        ):
            first_bytes = max(1, min(part_bytes, held_max))
            read.rest = ByteRange(span.start + first_bytes, span.end)
            self._add_parts(read, [(span.start, first_bytes)])
            return
        pieces = cut(span, part_bytes)
        if len(pieces) > 1:
            self._expect_large()
        self._add_parts(read, pieces)

    def _cut_rest(self, read: ObjectRead) -> None:
        """Add the requests for the rest of a range after its first part, now that the object's size is known."""
        rest, read.rest = read.rest, None
        if rest is None:
            return
        span = read.span()
        assert span is not None  # a whole object has no rest
        self._landings.refuse_oversize(read, span)
        if rest.start < span.end:
            self._expect_large()
            self._add_parts(read, parts(ByteRange(rest.start, span.end), self._config.part_bytes))
            self._send_more()

    def _add_parts(self, read: ObjectRead, pieces: list[tuple[int, int | None]]) -> None:
        read.pending_count += len(pieces)
        for start, length in pieces:
            part = PartRequest(self, read, start, length)
            read.parts.append(part)
            heapq.heappush(self._unsent, (read.sequence, start, part))

    def _send(self, part: PartRequest) -> None:
        if not self._sent:
            self._concurrency.started(time.monotonic())
        self._sent.add(part)
        part.read.sent_count += 1
        self._undelivered_count += 1
        try:
            part.transfer = self._core.submit(part.operation(), part)
        except Exception as error:  # refused before it was sent: a bad key, a closed store
            self._sent.discard(part)
            part.read.pending_count -= 1
            part.read.error = refusal(error)
            self._landings.release(part)
            self._abandon(part.read)

    def _expect_large(self) -> None:
        """The plan holds objects of several parts: bound the concurrency by the memory that their parts take."""
        self._large_expected = True
        self._concurrency.limit_max = min(
            self._config.requests_max, max(1, _IN_FLIGHT_BYTES // self._config.part_bytes)
        )
        self._concurrency.limit = min(self._concurrency.limit, self._concurrency.limit_max)

    # ── the HEAD of a large object ─────────────────────────────────────────────────────────────────────────────────

    def _request_metadata(self, read: ObjectRead) -> None:
        """HEAD a whole object: for its size, so that it can be cut, and for the checksum that the store may keep of it."""
        read.awaits_metadata = True
        self._heads_count += 1
        try:
            self._core.submit(Head(read.item.key, read.etag, read.size_bytes), HeadRequest(self, read))
        except Exception as error:
            read.awaits_metadata = False
            self._heads_count -= 1
            read.error = refusal(error)

    def on_metadata(self, read: ObjectRead, completion: Completion) -> None:
        """Take in the answer to a HEAD; its failure is ignored if parts are requested already, which are checked too."""
        with self._lock:
            read.awaits_metadata = False
            self._heads_count -= 1
            if self.closed or read.error is not None:
                return
            info = completion.info
            try:
                if info is not None:
                    self._checksums_kept = bool(info.checksums)
                    read.pin(info)
                if not read.parts:
                    self._cut_described(read, completion)
            except PenstockError as error:
                self._fail_read(read, error)
            if self._waiting:
                self._lock.notify_all()
            self._send_more()

    def _cut_described(self, read: ObjectRead, completion: Completion) -> None:
        is_confirmed = read.route is Route.AS_HEAD_TELLS
        if completion.error is not None and (is_confirmed or not isinstance(completion.error, ProtocolError)):
            raise completion.error
        if completion.error is not None or is_confirmed:
            self._add_parts(read, [(0, None)])  # the store tells the size only to a GET, or not at all
            return
        span = read.span()
        assert span is not None  # its size is known now
        self._landings.refuse_oversize(read, span)
        self._cut(read, span)

    # ── engine threads ─────────────────────────────────────────────────────────────────────────────────────────────

    def on_head(self, part: PartRequest, info: ObjectInfo, span: ByteRange) -> Landing | None:
        """Pin the version, and find a place for a body whose size was not known; see ``Requester.on_head``."""
        with self._lock:
            read = part.read
            if span.end == UNKNOWN_BYTES and part.landing is None:
                return GrowingLanding(partial(self._make_room, part))  # the version is pinned when its size is known
            try:
                if span.end != UNKNOWN_BYTES:
                    read.pin(info)
                    self._cut_rest(read)
                if part.length_bytes is None:
                    self._landings.refuse_oversize(read, span)
            except (ConfigError, SpanError) as error:  # not the store's refusal, which a wrapper would try to mend
                read.error = error
                raise CancelledOperationError("refused") from error
            if part.length_bytes is None and part.landing is None:
                return self._place_unknown(part, span)
            if part.landing is None and part.buffer is not None:
                self._landings.land(part)
            if part.landing is not None:
                part.landing.offset = part.landing.start
            return part.landing

    def _place_unknown(self, part: PartRequest, span: ByteRange) -> Landing | None:
        """Place a whole object whose size is now known: all of it here, or its first part here and the rest beside it."""
        read, size_bytes, part_bytes = part.read, span.length_bytes, self._config.part_bytes
        if self._checksums_kept is None and read.info is not None:
            self._checksums_kept = bool(read.info.checksums)
        if size_bytes < POOLED_BYTES_MIN:
            part.length_bytes = size_bytes
            return None
        several = size_bytes > 2 * part_bytes and read.route not in (Route.IN_ONE, Route.AS_HEAD_TELLS)
        if several:
            self._expect_large()
            self._add_parts(read, parts(ByteRange(part_bytes, size_bytes), part_bytes))
        part.length_bytes = part_bytes if several else size_bytes
        # The first of several parts lands by itself: the object's one buffer is made when it is the others' turn.
        if not self._landings.take_buffer(part, part.length_bytes, force=self._is_next(read)):
            raise _LaterError("no bytes in the budget yet")
        return part.landing

    def _make_room(self, part: PartRequest, length_bytes: int) -> None:
        """Charge the budget for a body of unknown length while it arrives; it is collected whole."""
        if length_bytes <= part.reserved_bytes:
            return
        with self._lock:
            try:
                reserved = self._landings.reserve_growth(part, length_bytes, force=self._is_next(part.read))
            except ConfigError as error:
                if not self._whole:
                    raise _OvergrownError("the body is too long to be collected") from error
                part.read.error = error
                raise CancelledOperationError("refused") from error
            if not reserved:
                raise _LaterError("no bytes in the budget yet")

    def _is_next(self, read: ObjectRead) -> bool:
        """Whether the consumer takes `read` next: then it may exceed the budget."""
        return bool(self._reads) and read is self._reads[0]

    def on_done(self, part: PartRequest, completion: Completion) -> None:
        """Record the end of a request; see ``Requester.on_done``."""
        try:
            self._on_end(part, completion)
        except Exception as error:
            self._fail(as_completion_error(error))

    def _fail(self, error: PenstockError) -> None:
        """Fail everything in flight after a defect of this class, because the state is unknown."""
        with self._lock:
            for read in self._reads:
                read.error = read.error or error
            self._lock.notify_all()

    def _on_end(self, part: PartRequest, completion: Completion) -> None:
        now_s = time.monotonic()
        with self._lock:
            self._sent.discard(part)
            part.transfer = None
            throttled = False
            for attempt in completion.attempts:
                throttled = throttled or attempt.throttled
            self._throttled_count += throttled
            if isinstance(completion.error, _LaterError) and not self.closed:
                part.read.sent_count -= 1
                self._undelivered_count -= 1
                self._landings.release(part)
                self._put_back(part)
                self._send_more()
                return
            received_bytes = completion.received_bytes
            self._received_bytes += received_bytes
            if self._waiting:
                self._concurrency.starving()
            self._concurrency.completed(received_bytes, now_s, throttled=throttled)
            self._learn_size(received_bytes)
            part.completion = completion
            read = part.read
            read.pending_count -= 1
            if read.item.target is not None and self._whole and read.error is None:
                read.sent_count -= 1  # what has arrived in the caller's memory holds nothing that others wait for
                self._undelivered_count -= 1
            if self.closed or read.error is not None:
                self._drop(part)
            else:
                self._record_end(part, completion)
            self._begin_successor(read)
            self._wake(received_bytes)
            self._send_more()
            if self.closed and not self._sent:
                self._lock.notify_all()

    def _record_end(self, part: PartRequest, completion: Completion) -> None:
        """Record on the read how its request ended: its error, the version, a size learned."""
        read, error = part.read, completion.error
        try:
            if error is not None:
                raise error
            if completion.info is not None:
                read.pin(completion.info)
                self._cut_rest(read)  # if the answer began without telling the size
        except PenstockError as failure:
            self._fail_read(read, failure)
            return
        self._landings.join_first(read)

    def _fail_read(self, read: ObjectRead, failure: PenstockError) -> None:
        """Start a read again by its next route, or record that it failed."""
        route = self._next_route(read, failure)
        is_refused = isinstance(failure, ProtocolError) or read.is_misled
        read.error = read.refusal if read.refusal is not None and is_refused else failure
        self._abandon(read)
        if route is None:
            return
        # Late bytes of the requests that are given up may still reach a file, so the object must not land there again.
        if not self._whole:
            read.release_target()
        fresh = ObjectRead(read.item._replace(size_bytes=None), read.sequence, route=route)
        self._undelivered_count -= read.sent_count
        self._reads[self._reads.index(read)] = fresh
        if route is Route.IN_PARTS:
            fresh.refusal = failure.__cause__ if isinstance(failure.__cause__, PenstockError) else failure
            first_bytes = max(1, min(self._config.part_bytes, self._budget.bytes_max // 2))
            fresh.rest = ByteRange(first_bytes, UNKNOWN_BYTES)
            self._add_parts(fresh, [(0, first_bytes)])
        else:
            self._whole_route = route
            if route is Route.IN_ONE:
                fresh.claim = read.claim
            else:
                fresh.refusal = failure
            if read.item.target is not None and self._is_in_flight(read):
                fresh.pending_count = 1  # it is not finished before it has begun
                read.successor = fresh
            else:
                self._begin_whole(fresh)

    def _begin_successor(self, read: ObjectRead) -> None:
        """Request the read that waits until no request of `read` can write to their common memory any more."""
        fresh = read.successor
        if fresh is None or self.closed or self._is_in_flight(read):
            return
        read.successor = None
        fresh.pending_count = 0
        self._begin_whole(fresh)

    def _is_in_flight(self, read: ObjectRead) -> bool:
        return any(part in self._sent for part in read.parts)

    def _next_route(self, read: ObjectRead, failure: PenstockError) -> Route | None:
        """Return how to request a whole object instead; None if the failure is final."""
        if read.item.span is not None or read.delivered_count or read not in self._reads:
            return None
        if isinstance(failure, _OvergrownError):
            return Route.IN_PARTS if read.route < Route.IN_PARTS else None
        if read.is_contradicted:
            return Route.AS_HEAD_TELLS if read.route < Route.AS_HEAD_TELLS else None
        if read.route is not Route.AS_PLANNED:
            return None
        by_ranges = any(part.operation().span is not None for part in read.parts)
        return Route.IN_ONE if read.is_misled or (by_ranges and isinstance(failure, ProtocolError)) else None

    def _abandon(self, read: ObjectRead) -> None:
        """Give up the other requests of a read that failed."""
        if self._unsent:  # first, because a cancelled request may end, and have others sent, before `cancel` returns
            self._unsent = [entry for entry in self._unsent if entry[2].read is not read]
            heapq.heapify(self._unsent)
        for part in read.parts:
            if part.transfer is not None:
                part.transfer.cancel()
            elif part.completion is not None:
                self._drop(part)

    def _drop(self, part: PartRequest) -> None:
        """Release the memory of an ended part, although its read, whose error may be kept for long, still refers to it."""
        self._landings.release(part)
        part.completion = part.landing = part.buffer = None

    def _wake(self, received_bytes: int) -> None:
        """Wake the waiting consumer once enough has arrived, or if nothing more is on its way, or at once for an error."""
        if not self._waiting:
            return
        self._unannounced_bytes += received_bytes
        failed = bool(self._reads) and self._reads[0].error is not None
        if failed or self._unannounced_bytes >= WAKE_BYTES or not self._sent:
            self._unannounced_bytes = 0
            self._lock.notify_all()

    def _learn_size(self, size_bytes: int) -> None:
        self._estimate_bytes += 0.1 * (1.25 * size_bytes - self._estimate_bytes)
        self._estimate_bytes = min(max(self._estimate_bytes, 4096.0), float(2 * self._config.part_bytes))


def refusal(error: Exception) -> PenstockError:
    """Why a store did not take an operation; a defect becomes an error that names it."""
    return error if isinstance(error, PenstockError) else as_completion_error(error)


class _LaterError(CancelledOperationError):
    """The body is larger than what was reserved for it, and the budget has no more: request it again later."""


class _OvergrownError(CancelledOperationError):
    """The body, whose length nobody told, is too long to be collected whole, and need not be: request it in parts."""
