"""Requests of one reading in flight: started while window, budget and consumer allow, and settled as they end.

Bytes are reserved before a request is sent; a consumer that waits for an item nothing is in flight for gets it beyond the
budget, so there is no deadlock, whoever else holds the bytes.

Objects of unknown size are asked for whole: most are small, and only an unranged answer carries the object's checksum.
If the head of the answer says that the object is large, its first part lands, the connection is dropped, and the rest
goes in parts. After one such object a HEAD asks for the size of the next ones, a few objects ahead.

A range of several parts in an object of unknown size begins with its first part, too. The head of the answer says where
the object ends, and the rest of the range is asked for up to there: no request ever begins past the end.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from penstock.config import MIB, FetchConfig
from penstock.errors import CancelledOperationError, ConfigError, PenstockError, ProtocolError, as_completion_error
from penstock.fetch.budget import POOLED_BYTES_MIN, Budget
from penstock.fetch.landings import LandingAllocator
from penstock.fetch.plan import cut, is_one_request, parts
from penstock.fetch.requests import HeadRequest, ObjectRead, PartRequest
from penstock.fetch.window import Window
from penstock.types import UNKNOWN_BYTES, ByteRange, Completion, Core, GrowingLanding, Head

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.fetch.plan import PlanItem
    from penstock.types import Landing, ObjectInfo

_SMALL_BYTES = 1 * MIB
_AHEAD = 1.5
"""Requests in flight and finished ones not yet delivered, per request that may be in flight..."""
_AHEAD_BYTES = 64 * MIB
"""...or as many more as make this: a consumer that pauses finds small objects waiting."""

_AHEAD_SLOTS_MAX = 2048
PARTS_PER_REQUEST = 3
"""Of the object that is being delivered part by part: one on its way, two waiting, per request that may be in flight."""
_IN_FLIGHT_BYTES = 512 * MIB
"""Of parts: 64 of 8 MiB cover 100 ms at 5 GB/s; more only spreads them over more memory."""
_ASKING_MAX = 4
"""Objects of several parts whose size is being asked, ahead of the one whose parts are being asked for."""
WAKE_BYTES = 4 * MIB
"""A waiting consumer is woken for this many bytes: waking it for each of 10 000 small objects a second had both threads
fight for the GIL, two context switches and 60 µs per object."""


class RequestScheduler:
    """What is planned, in flight, and here but not delivered. Its consumer is a ``ReadAhead``.

    Args:
        core: The store.
        config: See ``FetchConfig``.
        budget: What its bytes are charged to.
        whole: Items are delivered as one piece of memory each; else part by part.

    Attributes:
        lock: Over all of it.
        places: Where bodies land.
        changed: Told when what the consumer waits for may be here.
        planned: To be asked for, in order.
        items: Asked for and not yet delivered, in order.
        sent: Requests in flight.
        undelivered_count: Requests in flight, and ended ones whose bytes are here.
        waiting: Whether the consumer waits.
        window: How many requests may be in flight.
        closed: Nothing is sent, and what ends is dropped.
    """

    def __init__(self, core: Core, *, config: FetchConfig, budget: Budget, whole: bool) -> None:
        self._core = core
        self._config = config
        self._whole = whole
        self._budget = budget
        self.places = LandingAllocator(budget, whole=whole)
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.planned: deque[PlanItem] = deque()
        self.items: deque[ObjectRead] = deque()
        self.sent: set[PartRequest] = set()
        self.undelivered_count = 0
        self.waiting = False
        self.window = Window(limit=config.requests_min, limit_min=1, limit_max=config.requests_max, settles=whole)
        self.closed = False
        self.received_bytes = 0
        self.throttled_count = 0
        self._unsent: list[tuple[int, int, PartRequest]] = []  # a heap: by item, then by byte
        self._unannounced_bytes = 0
        self._planned_count = 0
        self._estimate_bytes = float(_SMALL_BYTES)
        # a reader of many has its share: so many small parts as make the few large ones that it was given
        given_bytes = PARTS_PER_REQUEST * config.requests_max * config.part_bytes
        self._ahead_bytes = min(_AHEAD_BYTES, budget.bytes_max // 4, given_bytes)
        self._large_expected = False
        self._asking_count = 0
        self._checksums_kept: bool | None = None

    @property
    def hungry(self) -> bool:
        """Whether half of the requests that may be in flight are not, and something could be sent."""
        return len(self.sent) <= self.window.limit // 2 and bool(self.planned or self._unsent)

    @property
    def has_more(self) -> bool:
        """Whether there is more to deliver. What is planned may wait for requests of items that failed to end."""
        with self.lock:
            return bool(self.items or self.planned)

    def close(self, taken: Iterable[ObjectRead]) -> None:
        """Cancel what is in flight, and give the bytes of everything back: also of the items that the consumer took."""
        with self.lock:
            self.closed = True
            self.planned.clear()
            sent = list(self.sent)
            items = [*taken, *self.items]
            self.items.clear()
            self._unsent.clear()
            self.changed.notify_all()
        for slot in sent:
            if slot.transfer is not None:
                slot.transfer.cancel()
        for item in items:
            for slot in item.slots:
                if slot not in self.sent:
                    self.places.release(slot)
                    slot.completion = slot.landing = slot.buffer = None

    # ── starting requests (under the lock) ─────────────────────────────────────────────────────────────────────────

    def pump(self) -> None:
        """Send what may be sent now."""
        limit = self.window.limit
        ahead_max = max(int(_AHEAD * limit), min(self._ahead_bytes // int(self._estimate_bytes), _AHEAD_SLOTS_MAX))
        while not self.closed and len(self.sent) < self.window.limit:
            if not self._unsent:
                if not self.planned or self.undelivered_count >= ahead_max or self._asking_count >= _ASKING_MAX:
                    return
                self._plan_next()
                continue
            slot = self._unsent[0][2]
            if self._is_far_ahead(slot, ahead_max):
                return
            heapq.heappop(self._unsent)
            if not self._prepared(slot):
                return
            self._send(slot)

    def _prepared(self, slot: PartRequest) -> bool:
        """Find memory for a slot that was taken out of the unsent ones; else it is put back."""
        force = self.waiting and not self.sent and slot.item is self.items[0]
        prepared = self.places.prepare(slot, max(int(self._estimate_bytes), slot.grown_bytes), force=force)
        if self.closed:  # by a finaliser that ran where memory was made, and dropped the iterator
            self.places.release(slot)
            slot.landing = slot.buffer = None
            return False
        if not prepared:
            heapq.heappush(self._unsent, (slot.item.sequence, slot.start, slot))
        return prepared

    def _is_far_ahead(self, slot: PartRequest, ahead_max: int) -> bool:
        """Whether a part has to wait until others were delivered; never the one that the consumer needs next."""
        item = slot.item
        if item is not self.items[0]:
            return self.undelivered_count >= ahead_max
        if self._whole or slot is item.slots[item.delivered_count]:
            return False
        return item.sent_count - item.delivered_count >= PARTS_PER_REQUEST * self.window.limit

    def _plan_next(self) -> None:
        """Take the next item of the plan apart into slots."""
        item = ObjectRead(self.planned.popleft(), self._planned_count)
        self._planned_count += 1
        self.items.append(item)
        try:
            span = item.span()
            if item.size_bytes is not None:
                self._refuse_oversize(item, span)
        except PenstockError as error:
            item.error = error
            return
        if span is not None:
            if item.sequence == 0 and self._whole and span.length_bytes < _SMALL_BYTES:
                self.window.begin_small()
            self._cut(item, span)
            if len(item.slots) > 1 and item.plan.span is None and self._checksums_kept is not False:
                self._ask(item)
        elif self._large_expected:
            self._ask(item)
        else:
            self._add_slots(item, [(0, None)])

    def _cut(self, item: ObjectRead, span: ByteRange) -> None:
        """The requests for a span; where the object's size is not known, only the first of several."""
        part_bytes = self._config.part_bytes
        held_max = self._budget.bytes_max // 2
        if item.size_bytes is None and not (is_one_request(span, part_bytes) and self._held_bytes(span) <= held_max):
            first_bytes = max(1, min(part_bytes, held_max))
            item.rest = ByteRange(span.start + first_bytes, span.end)
            self._add_slots(item, [(span.start, first_bytes)])
            return
        pieces = cut(span, part_bytes)
        if len(pieces) > 1:
            self._expect_large()
        self._add_slots(item, pieces)

    def _cut_rest(self, item: ObjectRead) -> None:
        """The object's size is known now: the requests for what follows the first part of a range."""
        rest, item.rest = item.rest, None
        if rest is None:
            return
        span = item.span()
        assert span is not None  # a whole object has no rest
        self._refuse_oversize(item, span)
        if rest.start < span.end:
            self._expect_large()
            self._add_slots(item, parts(ByteRange(rest.start, span.end), self._config.part_bytes))
            self.pump()

    def _ask(self, item: ObjectRead) -> None:
        """HEAD a whole object: for its size, so that it can be cut, and for the checksum that the store may keep of it."""
        item.asking = True
        self._asking_count += 1
        try:
            self._core.submit(Head(item.plan.key), HeadRequest(self, item))
        except Exception as error:
            item.asking = False
            self._asking_count -= 1
            item.error = _refusal(error)

    def on_asked(self, item: ObjectRead, completion: Completion) -> None:
        """A HEAD ended. Beside parts already asked for its failure is no error: their own checks remain."""
        with self.lock:
            item.asking = False
            self._asking_count -= 1
            if self.closed or item.error is not None:
                return
            info = completion.info
            try:
                if info is not None:
                    self._checksums_kept = bool(info.checksums)
                    item.pin(info)
                if not item.slots:
                    self._cut_asked(item, completion)
            except PenstockError as error:
                item.error = error
                self._abandon(item)
            if self.waiting:
                self.changed.notify()
            self.pump()

    def _cut_asked(self, item: ObjectRead, completion: Completion) -> None:
        if completion.error is not None:
            if not isinstance(completion.error, ProtocolError):
                raise completion.error
            self._add_slots(item, [(0, None)])  # its size is told by nobody, or to a GET alone
            return
        span = item.span()
        assert span is not None  # its size is known now
        self._refuse_oversize(item, span)
        self._cut(item, span)

    def _add_slots(self, item: ObjectRead, pieces: list[tuple[int, int | None]]) -> None:
        item.pending_count += len(pieces)
        for start, length in pieces:
            slot = PartRequest(self, item, start, length)
            item.slots.append(slot)
            heapq.heappush(self._unsent, (item.sequence, start, slot))

    def _held_bytes(self, span: ByteRange | None) -> int:
        """What has to be in memory together to deliver `span`, beside parts that are delivered one by one."""
        return span.length_bytes if self._whole and span is not None else 0

    def _refuse_oversize(self, item: ObjectRead, span: ByteRange | None) -> None:
        held = self._held_bytes(span)
        if held > self._budget.bytes_max // 2:
            raise ConfigError(
                f"{self._core.describe(item.plan.key)}: a read of {held} bytes is more than half of the budget of "
                f"{self._budget.bytes_max} bytes",
                hint="stream it with read_parts() or open(), or raise FetchConfig(budget_bytes_max=...)",
            )

    def _send(self, slot: PartRequest) -> None:
        if not self.sent:
            self.window.started(time.monotonic())
        self.sent.add(slot)
        slot.item.sent_count += 1
        self.undelivered_count += 1
        try:
            slot.transfer = self._core.submit(slot.operation(), slot)
        except Exception as error:  # refused before it was sent: a bad key, a closed store
            self.sent.discard(slot)
            slot.item.pending_count -= 1
            slot.item.error = _refusal(error)
            self.places.release(slot)
            self._abandon(slot.item)

    # ── engine threads ─────────────────────────────────────────────────────────────────────────────────────────────

    def on_head(self, slot: PartRequest, info: ObjectInfo, span: ByteRange) -> Landing | None:
        """An answer begins: pin the version, and find a place for a body whose size was not known."""
        with self.lock:
            item = slot.item
            if span.end == UNKNOWN_BYTES and slot.landing is None:
                return GrowingLanding(partial(self._make_room, slot))  # the version is pinned when its size is known
            try:
                if span.end != UNKNOWN_BYTES:
                    item.pin(info)
                    self._cut_rest(item)
                if slot.length_bytes is None:
                    self._refuse_oversize(item, span)
            except ConfigError as error:
                item.error = error
                raise CancelledOperationError("refused") from error
            if slot.length_bytes is None and slot.landing is None:
                return self._place_unknown(slot, span)
            if slot.landing is None and slot.buffer is not None:
                self.places.land(slot)
            if slot.landing is not None:
                slot.landing.position = slot.landing.start
            return slot.landing

    def _place_unknown(self, slot: PartRequest, span: ByteRange) -> Landing | None:
        """A whole object, now of known size: all of it here, or its first part here and the rest beside it."""
        item, size_bytes, part_bytes = slot.item, span.length_bytes, self._config.part_bytes
        if self._checksums_kept is None and item.info is not None:
            self._checksums_kept = bool(item.info.checksums)
        if size_bytes < POOLED_BYTES_MIN:
            slot.length_bytes = size_bytes
            return None
        several = size_bytes > 2 * part_bytes
        if several:
            self._expect_large()
            self._add_slots(item, parts(ByteRange(part_bytes, size_bytes), part_bytes))
        slot.length_bytes = part_bytes if several else size_bytes
        # the first part of several lands by itself: the one buffer of its object is made when the others' turn comes
        first = bool(self.items) and item is self.items[0]
        if not self.places.take_buffer(slot, slot.length_bytes, force=first):
            raise _LaterError("no bytes in the budget yet")
        return slot.landing

    def _make_room(self, slot: PartRequest, length_bytes: int) -> None:
        """Charge the budget for a body whose length nobody told, while it comes; it is collected whole."""
        if length_bytes <= slot.reserved_bytes:
            return
        with self.lock:
            item, half_bytes = slot.item, self._budget.bytes_max // 2
            if length_bytes > half_bytes:
                item.error = ConfigError(
                    f"{self._core.describe(item.plan.key)}: a body of unknown length has {length_bytes} bytes or more, "
                    f"which is more than half of the budget of {self._budget.bytes_max} bytes",
                    hint="raise FetchConfig(budget_bytes_max=...)",
                )
                raise CancelledOperationError("refused") from item.error
            wanted_bytes = min(2 * length_bytes, half_bytes)
            first = bool(self.items) and item is self.items[0]
            if not self._budget.reserve(wanted_bytes - slot.reserved_bytes, force=first):
                slot.grown_bytes = wanted_bytes
                raise _LaterError("no bytes in the budget yet")
            slot.reserved_bytes = wanted_bytes

    def on_done(self, slot: PartRequest, completion: Completion) -> None:
        """A request ended."""
        try:
            self._on_end(slot, completion)
        except Exception as error:
            self._fail(as_completion_error(error))

    def _fail(self, error: PenstockError) -> None:
        """A defect here: whatever is in flight fails by it, for nobody knows what was left undone."""
        with self.lock:
            for item in self.items:
                item.error = item.error or error
            self.changed.notify_all()

    def _on_end(self, slot: PartRequest, completion: Completion) -> None:
        now_s = time.monotonic()
        with self.lock:
            self.sent.discard(slot)
            slot.transfer = None
            throttled = False
            for attempt in completion.attempts:
                throttled = throttled or attempt.throttled
            self.throttled_count += throttled
            if isinstance(completion.error, _LaterError) and not self.closed:
                slot.item.sent_count -= 1
                self.undelivered_count -= 1
                self.places.release(slot)
                heapq.heappush(self._unsent, (slot.item.sequence, slot.start, slot))
                self.pump()
                return
            received_bytes = completion.received_bytes
            self.received_bytes += received_bytes
            if self.waiting:
                self.window.starving()
            self.window.completed(received_bytes, now_s, throttled=throttled)
            self._learn_size(received_bytes)
            slot.completion = completion
            item = slot.item
            item.pending_count -= 1
            if self.closed or item.error is not None:
                self.places.release(slot)
            else:
                self._settle(slot, completion)
            self._wake(received_bytes)
            self.pump()

    def _wake(self, received_bytes: int) -> None:
        """Wake the waiting consumer once there is a batch worth waking for, or nothing more on its way."""
        if not self.waiting:
            return
        self._unannounced_bytes += received_bytes
        if self._unannounced_bytes >= WAKE_BYTES or not self.sent or self._whole_item_waits():
            self._unannounced_bytes = 0
            self.changed.notify()

    def _whole_item_waits(self) -> bool:
        """Whether the consumer waits for one failed item: errors are told at once."""
        return bool(self.items) and self.items[0].error is not None

    def _settle(self, slot: PartRequest, completion: Completion) -> None:
        """Take a finished request into its item: errors, the version, a size learned."""
        item, error = slot.item, completion.error
        try:
            if error is not None:
                raise error
            if completion.info is not None:
                item.pin(completion.info)
                self._cut_rest(item)  # where the answer began without telling the size
        except PenstockError as failure:
            item.error = failure
            self._abandon(item)
            return
        self.places.join_first(item)

    def _abandon(self, item: ObjectRead) -> None:
        """An item failed: its other requests are of no use."""
        if self._unsent:  # first, as a cancelled request may end, and have others sent, before `cancel` returns
            self._unsent = [entry for entry in self._unsent if entry[2].item is not item]
            heapq.heapify(self._unsent)
        for slot in item.slots:
            if slot.transfer is not None:
                slot.transfer.cancel()
            elif slot.completion is not None:
                self.places.release(slot)

    def _expect_large(self) -> None:
        """The plan holds objects of several parts: ask for parts at once, and for no more than memory likes."""
        self._large_expected = True
        self.window.limit_max = min(self._config.requests_max, max(1, _IN_FLIGHT_BYTES // self._config.part_bytes))
        self.window.limit = min(self.window.limit, self.window.limit_max)

    def _learn_size(self, size_bytes: int) -> None:
        self._estimate_bytes += 0.1 * (1.25 * size_bytes - self._estimate_bytes)
        self._estimate_bytes = min(max(self._estimate_bytes, 4096.0), float(2 * self._config.part_bytes))


def _refusal(error: Exception) -> PenstockError:
    """Why a store did not take an operation; a defect as an error that names it."""
    return error if isinstance(error, PenstockError) else as_completion_error(error)


class _LaterError(CancelledOperationError):
    """The body is larger than was reserved for it, and the budget has no more: ask again later."""
