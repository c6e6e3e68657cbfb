"""Ordered read-ahead: keep as many requests in flight as the consumer, the budget and the store justify.

The consumer's thread pulls the plan (it may be a user's generator) a little ahead; engine threads start what is pulled
as requests end, so that the pipe stays full while the consumer computes. Whatever is delivered in order was asked for in
order. Bytes are reserved before a request is sent; a consumer that waits for an item nothing is in flight for gets it
beyond the budget, so there is no deadlock, whoever else holds the bytes.

Objects of unknown size are asked for whole: most are small, and only an unranged answer carries the object's checksum.
If the head of the answer says that the object is large, its first part lands, the connection is dropped, and the rest
goes in parts. After one such object a HEAD asks for the size of the next ones, a few objects ahead.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock import forks
from penstock.config import MIB, FetchConfig
from penstock.errors import CancelledOperationError, ClosedError, ConfigError, PenstockError
from penstock.fetch.budget import POOLED_BYTES_MIN, Budget
from penstock.fetch.plan import Request, as_item, coalesce
from penstock.fetch.slots import AskingSink, Item, Slot
from penstock.fetch.window import Window
from penstock.types import ByteRange, Completion, Core, Head, Landing, ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from penstock.fetch.plan import PlanItem

_SMALL_BYTES = 1 * MIB
_AHEAD = 1.5
"""Requests in flight and finished ones not yet delivered, per request that may be in flight..."""
_AHEAD_BYTES = 64 * MIB
"""...or as many more as make this: a consumer that pauses finds small objects waiting."""

_AHEAD_SLOTS_MAX = 2048
_PARTS_PER_REQUEST = 3
_IN_FLIGHT_BYTES = 512 * MIB
"""Of parts: 64 of 8 MiB cover 100 ms at 5 GB/s; more only spreads them over more memory."""
_PULL_COUNT = 64
_ASKING_MAX = 4
"""Objects of several parts whose size is being asked, ahead of the one whose parts are being asked for."""
_WAKE_BYTES = 4 * MIB
_LINGER_S = 0.002
"""A waiting consumer is woken for this many bytes, or looks by itself after so long. Waking it for each of 10 000 small
objects a second had both threads fight for the GIL: two context switches and 60 µs per object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchStatistics:
    """What one read-ahead did.

    Attributes:
        requests_in_flight: Now.
        requests_limit: The most it would have in flight now; rises while the consumer starves and throughput rises.
        received_bytes: Delivered and waiting.
        stall_s: Seconds the consumer waited for data: near 0 means that reading keeps up with it.
        stalls_count: How often it waited.
        throttled_count: Answers that asked to slow down.
    """

    requests_in_flight: int
    requests_limit: int
    received_bytes: int
    stall_s: float
    stalls_count: int
    throttled_count: int


class ReadAhead:
    """Reads a plan ahead of one consumer. ``wait_item``/``wait_slot`` block; everything else runs on engine threads.

    Args:
        core: The store.
        requests: The plan; pulled lazily by the consumer's thread.
        config: See ``FetchConfig``.
        budget: What its bytes are charged to.
        whole: Items are delivered as one piece of memory each; else part by part.
    """

    def __init__(
        self, core: Core, requests: Iterable[Request], *, config: FetchConfig, budget: Budget, whole: bool
    ) -> None:
        self._core = core
        self._requests: Iterator[Request] | None = iter(requests)
        self._config = config
        self._budget = budget
        self._whole = whole
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._planned: deque[PlanItem] = deque()
        self._items: deque[Item] = deque()
        self._taken: deque[Item] = deque()  # the consumer's: finished, no longer counted as undelivered
        self._unsent: list[tuple[int, int, Slot]] = []  # a heap: by item, then by byte
        self._sent: set[Slot] = set()
        self._waiting = False
        self._undelivered_slots = 0
        self._unannounced_bytes = 0
        self._pulled_count = 0
        self._planned_count = 0
        self._estimate_bytes = float(_SMALL_BYTES)
        # a reader of many has its share: so many small parts as make the few large ones that it was given
        given_bytes = _PARTS_PER_REQUEST * config.requests_max * config.part_bytes
        self._ahead_bytes = min(_AHEAD_BYTES, budget.bytes_max // 4, given_bytes)
        self._large_expected = False
        self._asking_count = 0
        self._checksums_kept: bool | None = None
        self._window = Window(limit=config.requests_min, limit_min=1, limit_max=config.requests_max)
        self._closed = False
        self._generation = forks.generation()
        self.received_bytes = 0
        self.stall_s = 0.0
        self.stalls_count = 0
        self.throttled_count = 0

    def start(self) -> None:
        """Send the first requests now, not at the first ``next()``: many readers are opened, then asked in turn."""
        self._refill()

    # ── the consumer's thread ──────────────────────────────────────────────────────────────────────────────────────

    def wait_item(self, *, ordered: bool = True) -> Item | None:
        """The next finished item (the first, or any), removed; None at the end of the plan. Blocks."""
        self._check()
        while not self._taken:
            with self._lock:
                self._take_finished(ordered=ordered)
            if self._taken:
                self._keep_full()
            elif self._refill() or self._items:
                self._wait(lambda: self._finished(ordered=ordered) is not None)
            else:
                return None
        return self._taken.popleft()

    def _take_finished(self, *, ordered: bool) -> None:
        """Move finished items to the consumer's side: several small ones for one look at the lock."""
        taken_bytes = 0
        while taken_bytes < _WAKE_BYTES and (item := self._finished(ordered=ordered)) is not None:
            if ordered:
                self._items.popleft()
            else:
                self._items.remove(item)
            self._undelivered_slots -= item.sent_count
            self._taken.append(item)
            taken_bytes += sum(slot.completion.received_bytes for slot in item.slots if slot.completion is not None)

    def wait_slot(self) -> tuple[Item, Slot | None] | None:
        """The next part in order: its item and slot (None for an item that failed or is empty). Blocks."""
        self._check()
        while True:
            found = None
            with self._lock:
                if self._items and self._part_ready():
                    found = self._take_part(self._items[0])
            if found is not None:
                self._keep_full()
                return found
            if not self._refill() and not self._items:
                return None
            self._wait(lambda: bool(self._items) and self._part_ready())

    def _check(self) -> None:
        forks.check(self._generation, "this iterator")

    def _take_part(self, item: Item) -> tuple[Item, Slot | None]:
        if item.error is not None:
            self._items.popleft()
            self._undelivered_slots -= item.sent_count - item.delivered_count
            return item, None
        slot = item.slots[item.delivered_count]
        item.delivered_count += 1
        self._undelivered_slots -= 1
        if item.delivered_count == len(item.slots):
            self._items.popleft()
        return item, slot

    def _finished(self, *, ordered: bool) -> Item | None:
        if ordered:
            item = self._items[0] if self._items else None
            return item if item is not None and item.finished else None
        return next((item for item in self._items if item.finished), None)

    def _part_ready(self) -> bool:
        item = self._items[0]
        if item.error is not None:
            return True
        if item.asking:  # the first part waits for the checksum of the whole, so that all can be held against it
            return False
        return item.slots[item.delivered_count].completion is not None

    def _wait(self, ready: Callable[[], bool]) -> None:
        started_s = time.monotonic()
        with self._lock:
            if ready():
                return
            self._waiting = True
            self._window.starving()
            self._pump()
            try:
                while not ready():
                    if self._closed:
                        raise ClosedError("the iterator was closed while it was waited for")
                    self._changed.wait(_LINGER_S)
            finally:
                self._waiting = False
        self.stall_s += time.monotonic() - started_s
        self.stalls_count += 1

    def _keep_full(self) -> None:
        """Something was delivered: pull more of the plan when little of it is left, send what waited for room."""
        limit = self._window.limit
        if self._requests is not None and len(self._planned) < max(limit, _PULL_COUNT):
            self._refill()
        elif len(self._sent) <= limit // 2 and (self._planned or self._unsent):
            with self._lock:
                self._pump()

    def _refill(self) -> bool:
        """Pull as much of the plan as may soon be in flight; False at its end."""
        requests = self._requests
        if requests is None:
            with self._lock:
                self._pump()
            return False
        pulled: list[PlanItem] = []
        # with something to deliver, a slow generator must not hold it back for long
        wanted = max(2 * self._window.limit, _PULL_COUNT) - len(self._planned) if not self._taken else _PULL_COUNT
        for _ in range(wanted):
            request = next(requests, None)
            if request is None:
                self._requests = None
                break
            pulled.append(as_item(request, self._pulled_count))
            self._pulled_count += 1
        if len(pulled) > 1 and self._whole:
            pulled = coalesce(pulled, gap_bytes=self._config.gap_bytes_max, length_bytes_max=self._config.part_bytes)
        with self._lock:
            self._planned.extend(pulled)
            self._pump()
        return self._requests is not None or bool(pulled)

    def statistics(self) -> FetchStatistics:
        """See ``FetchStatistics``."""
        return FetchStatistics(
            requests_in_flight=len(self._sent),
            requests_limit=self._window.limit,
            received_bytes=self.received_bytes,
            stall_s=self.stall_s,
            stalls_count=self.stalls_count,
            throttled_count=self.throttled_count,
        )

    def close(self) -> None:
        """Cancel what is in flight and give every reserved byte back; idempotent."""
        if self._closed or self._generation != forks.generation():
            return
        with self._lock:
            self._closed = True
            self._requests = None
            self._planned.clear()
            sent = list(self._sent)
            items = [*self._taken, *self._items]
            self._taken.clear()
            self._items.clear()
            self._unsent.clear()
            self._changed.notify_all()
        for slot in sent:
            if slot.transfer is not None:
                slot.transfer.cancel()
        for item in items:
            for slot in item.slots:
                if slot not in self._sent:
                    self.release(slot)
                    slot.completion = slot.landing = slot.buffer = None

    def release(self, slot: Slot) -> None:
        """Give back what was reserved for a delivered slot; a ``PartBuffer`` goes back by itself."""
        if slot.reserved_bytes and self._generation == forks.generation():
            self._budget.release(slot.reserved_bytes)
            slot.reserved_bytes = 0

    # ── starting requests (under the lock) ─────────────────────────────────────────────────────────────────────────

    def _pump(self) -> None:
        """Send what may be sent now."""
        limit = self._window.limit
        ahead_max = max(int(_AHEAD * limit), min(self._ahead_bytes // int(self._estimate_bytes), _AHEAD_SLOTS_MAX))
        while not self._closed and len(self._sent) < self._window.limit:
            if not self._unsent:
                if not self._planned or self._undelivered_slots >= ahead_max or self._asking_count >= _ASKING_MAX:
                    return
                self._plan_next()
                continue
            slot = self._unsent[0][2]
            first = slot.item is self._items[0]
            if not first and self._undelivered_slots >= ahead_max:
                return
            if not self._prepare(slot, force=self._waiting and not self._sent and first):
                return
            heapq.heappop(self._unsent)
            self._send(slot)

    def _plan_next(self) -> None:
        """Take the next item of the plan apart into slots."""
        item = Item(self._planned.popleft(), self._planned_count)
        self._planned_count += 1
        self._items.append(item)
        try:
            span = item.span()
            self._refuse_oversize(item, span)
        except PenstockError as error:
            item.error = error
            return
        if span is not None:
            if item.sequence == 0 and self._whole and span.length_bytes < _SMALL_BYTES:
                self._window.begin_small()
            self._cut(item, span)
            if len(item.slots) > 1 and item.plan.span is None and self._checksums_kept is not False:
                self._ask(item)
        elif self._large_expected:
            self._ask(item)
        else:
            self._add_slots(item, [(0, None)])

    def _cut(self, item: Item, span: ByteRange) -> None:
        """The requests for a span of known length."""
        part_bytes = self._config.part_bytes
        if span.length_bytes == 0:
            self._add_slots(item, [(0, None)])
        elif span.length_bytes <= part_bytes + part_bytes // 2:
            self._add_slots(item, [(span.start, span.length_bytes)])
        else:
            self._expect_large()
            self._add_slots(item, _parts(span, part_bytes))

    def _ask(self, item: Item) -> None:
        """HEAD a whole object: for its size, so that it can be cut, and for the checksum that the store may keep of it."""
        item.asking = True
        self._asking_count += 1
        try:
            self._core.submit(Head(item.plan.key), AskingSink(self, item))
        except PenstockError as error:
            item.asking = False
            self._asking_count -= 1
            item.error = error

    def on_asked(self, item: Item, completion: Completion) -> None:
        """A HEAD ended. Beside parts already asked for its failure is no error: their own checks remain."""
        with self._lock:
            item.asking = False
            self._asking_count -= 1
            if self._closed or item.error is not None:
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
            if self._waiting:
                self._changed.notify()
            self._pump()

    def _cut_asked(self, item: Item, completion: Completion) -> None:
        if completion.error is not None:
            raise completion.error
        span = item.span()
        assert span is not None  # its size is known now
        self._refuse_oversize(item, span)
        self._cut(item, span)

    def _add_slots(self, item: Item, pieces: list[tuple[int, int | None]]) -> None:
        item.pending_count += len(pieces)
        for start, length in pieces:
            slot = Slot(self, item, start, length)
            item.slots.append(slot)
            heapq.heappush(self._unsent, (item.sequence, start, slot))

    def _refuse_oversize(self, item: Item, span: ByteRange | None) -> None:
        held = span.length_bytes if self._whole and span is not None else 0
        if held > self._budget.bytes_max // 2:
            raise ConfigError(
                f"{self._core.describe(item.plan.key)}: a read of {held} bytes is more than half of the budget of "
                f"{self._budget.bytes_max} bytes",
                hint="stream it with read_parts() or open(), or raise FetchConfig(budget_bytes_max=...)",
            )

    def _prepare(self, slot: Slot, *, force: bool) -> bool:
        """Reserve the slot's bytes and say where they land; False where the budget lacks them."""
        item, length = slot.item, slot.length_bytes
        if self._whole and slot is not item.slots[0]:  # also where it is small: one piece of memory for the object
            return self._prepare_shared(slot, force=force)
        if length is None or length < POOLED_BYTES_MIN:
            size_bytes = length if length is not None else int(self._estimate_bytes)
            if not self._budget.reserve(size_bytes, force=force):
                return False
            slot.reserved_bytes = size_bytes
            return True
        buffer = self._budget.acquire(length, force=force)
        if buffer is None:
            return False
        slot.buffer = buffer
        slot.landing = Landing(buffer.view, 0, length, direct=buffer.owner)
        return True

    def _prepare_shared(self, slot: Slot, *, force: bool) -> bool:
        """A part of an object that is delivered whole: its place in the object's one buffer."""
        item = slot.item
        span = item.span()
        assert span is not None
        assert slot.length_bytes is not None
        if item.buffer is None:
            item.buffer = self._budget.acquire(span.length_bytes, force=force)
            if item.buffer is None:
                return False
            self._join_first(item)
        offset = slot.start - span.start
        slot.landing = Landing(item.buffer.view, offset, offset + slot.length_bytes)
        return True

    def _send(self, slot: Slot) -> None:
        if not self._sent:
            self._window.started(time.monotonic())
        self._sent.add(slot)
        slot.item.sent_count += 1
        self._undelivered_slots += 1
        try:
            slot.transfer = self._core.submit(slot.operation(), slot)
        except PenstockError as error:  # refused before it was sent: a bad key, a closed store
            self._sent.discard(slot)
            slot.item.pending_count -= 1
            slot.item.error = error
            self.release(slot)
            self._abandon(slot.item)

    # ── engine threads ─────────────────────────────────────────────────────────────────────────────────────────────

    def on_head(self, slot: Slot, info: ObjectInfo, span: ByteRange) -> Landing | None:
        """An answer begins: pin the version, and find a place for a body whose size was not known."""
        with self._lock:
            item = slot.item
            item.pin(info)
            if slot.landing is not None:
                slot.landing.position = slot.landing.start
                return slot.landing
            if slot.length_bytes is not None:
                return None
            return self._place_unknown(slot, span)

    def _place_unknown(self, slot: Slot, span: ByteRange) -> Landing | None:
        """A whole object, now of known size: all of it here, or its first part here and the rest beside it."""
        item, size_bytes, part_bytes = slot.item, span.length_bytes, self._config.part_bytes
        try:
            self._refuse_oversize(item, span)
        except ConfigError as error:
            item.error = error
            raise CancelledOperationError("refused") from error
        if self._checksums_kept is None and item.info is not None:
            self._checksums_kept = bool(item.info.checksums)
        if size_bytes < POOLED_BYTES_MIN:
            slot.length_bytes = size_bytes
            return None
        several = size_bytes > 2 * part_bytes
        if several:
            self._expect_large()
            self._add_slots(item, _parts(ByteRange(part_bytes, size_bytes), part_bytes))
        slot.length_bytes = part_bytes if several else size_bytes
        # the first part of several lands by itself: the one buffer of its object is made when the others' turn comes
        buffer = self._budget.acquire(slot.length_bytes, force=bool(self._items) and item is self._items[0])
        if buffer is None:
            raise _LaterError("no bytes in the budget yet")
        slot.buffer = buffer
        slot.landing = Landing(buffer.view, 0, slot.length_bytes, direct=buffer.owner)
        return slot.landing

    def on_done(self, slot: Slot, completion: Completion) -> None:
        """A request ended."""
        now_s = time.monotonic()
        with self._lock:
            self._sent.discard(slot)
            slot.transfer = None
            throttled = False
            for attempt in completion.attempts:
                throttled = throttled or attempt.throttled
            self.throttled_count += throttled
            if isinstance(completion.error, _LaterError) and not self._closed:
                slot.item.sent_count -= 1
                self._undelivered_slots -= 1
                self.release(slot)
                heapq.heappush(self._unsent, (slot.item.sequence, slot.start, slot))
                self._pump()
                return
            received_bytes = completion.received_bytes
            self.received_bytes += received_bytes
            if self._waiting:
                self._window.starving()
            self._window.completed(received_bytes, now_s, throttled=throttled)
            self._learn_size(received_bytes)
            slot.completion = completion
            item = slot.item
            item.pending_count -= 1
            if self._closed or item.error is not None:
                self.release(slot)
            else:
                self._settle(slot, completion)
            self._wake(received_bytes)
            self._pump()

    def _wake(self, received_bytes: int) -> None:
        """Wake the waiting consumer once there is a batch worth waking for, or nothing more on its way."""
        if not self._waiting:
            return
        self._unannounced_bytes += received_bytes
        if self._unannounced_bytes >= _WAKE_BYTES or not self._sent or self._whole_item_waits():
            self._unannounced_bytes = 0
            self._changed.notify()

    def _whole_item_waits(self) -> bool:
        """Whether the consumer waits for one failed item: errors are told at once."""
        return bool(self._items) and self._items[0].error is not None

    def _settle(self, slot: Slot, completion: Completion) -> None:
        """Take a finished request into its item: errors, the version, a size learned, a hedge's own buffer."""
        item, error = slot.item, completion.error
        try:
            if error is not None:
                raise error
            if completion.info is not None:
                item.pin(completion.info)
        except PenstockError as failure:
            item.error = failure
            self._abandon(item)
            return
        self._join_first(item)
        landing = completion.landing
        if slot.landing is not None and landing is not None and landing.buffer is not slot.landing.buffer:
            target = memoryview(slot.landing.buffer)[slot.landing.start : slot.landing.end]
            target[: len(landing.view)] = landing.view
            slot.landing.position = slot.landing.start + len(landing.view)
            completion.landing = slot.landing

    def _join_first(self, item: Item) -> None:
        """Copy the first part, which landed by itself, to the head of its object's one buffer: one part per object."""
        first = item.slots[0]
        completion = first.completion
        if item.buffer is None or completion is None:
            return
        if first.landing is not None and first.landing.buffer is item.buffer.view:
            return  # done before
        body = completion.body
        first.landing = Landing(item.buffer.view, 0, len(body))
        first.landing.position = len(body)
        item.buffer.view[: len(body)] = body
        completion.landing = first.landing
        first.buffer = None

    def _abandon(self, item: Item) -> None:
        """An item failed: its other requests are of no use."""
        for slot in item.slots:
            if slot.transfer is not None:
                slot.transfer.cancel()
            elif slot.completion is not None:
                self.release(slot)
        if self._unsent:
            self._unsent = [entry for entry in self._unsent if entry[2].item is not item]
            heapq.heapify(self._unsent)

    def _expect_large(self) -> None:
        """The plan holds objects of several parts: ask for parts at once, and for no more than memory likes."""
        self._large_expected = True
        self._window.limit_max = min(self._config.requests_max, max(1, _IN_FLIGHT_BYTES // self._config.part_bytes))
        self._window.limit = min(self._window.limit, self._window.limit_max)

    def _learn_size(self, size_bytes: int) -> None:
        self._estimate_bytes += 0.1 * (1.25 * size_bytes - self._estimate_bytes)
        self._estimate_bytes = min(max(self._estimate_bytes, 4096.0), float(2 * self._config.part_bytes))


class _LaterError(CancelledOperationError):
    """The body is larger than was reserved for it, and the budget has no more: ask again later."""


def _parts(span: ByteRange, part_bytes: int) -> list[tuple[int, int | None]]:
    return [(start, min(part_bytes, span.end - start)) for start in range(span.start, span.end, part_bytes)]
