"""Ordered read-ahead: keep as many requests in flight as the consumer, the budget and the store justify.

The consumer's thread pulls the plan (it may be a user's generator) a little ahead; engine threads start what is pulled
as requests end (``RequestScheduler``), so that the pipe stays full while the consumer computes. Whatever is delivered in
order was asked for in order.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from penstock import forks
from penstock.errors import ClosedError
from penstock.fetch.plan import Request, as_item, coalesce
from penstock.fetch.scheduler import WAKE_BYTES, RequestScheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from penstock.config import FetchConfig
    from penstock.fetch.budget import Budget
    from penstock.fetch.plan import PlanItem
    from penstock.fetch.requests import ObjectRead, PartRequest
    from penstock.types import Core

_PULL_COUNT = 64
_LINGER_S = 0.002
"""A consumer that waits looks by itself after so long, whether it was woken or not."""


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
        self._requests: Iterator[Request] | None = iter(requests)
        self._config = config
        self._whole = whole
        self._flight = RequestScheduler(core, config=config, budget=budget, whole=whole)
        self._taken: deque[ObjectRead] = deque()  # the consumer's: finished, no longer counted as undelivered
        self._pulled_count = 0
        self._generation = forks.generation()
        self.stall_s = 0.0
        self.stalls_count = 0

    def start(self) -> None:
        """Send the first requests now, not at the first ``next()``: many readers are opened, then asked in turn."""
        self._refill()

    def wait_item(self, *, ordered: bool = True) -> ObjectRead | None:
        """The next finished item (the first, or any), removed; None at the end of the plan. Blocks."""
        self._check()
        while not self._taken:
            with self._flight.lock:
                self._take_finished(ordered=ordered)
            if self._taken:
                self._keep_full()
            elif self._refill() or self._flight.has_more:
                self._wait(lambda: self._finished(ordered=ordered) is not None)
            else:
                return None
        return self._taken.popleft()

    def _take_finished(self, *, ordered: bool) -> None:
        """Move finished items to the consumer's side: several small ones for one look at the lock."""
        taken_bytes = 0
        while taken_bytes < WAKE_BYTES and (item := self._finished(ordered=ordered)) is not None:
            if ordered:
                self._flight.items.popleft()
            else:
                self._flight.items.remove(item)
            self._flight.undelivered_count -= item.sent_count
            self._taken.append(item)
            taken_bytes += sum(slot.completion.received_bytes for slot in item.slots if slot.completion is not None)

    def wait_slot(self) -> tuple[ObjectRead, PartRequest | None] | None:
        """The next part in order: its item and slot (None for an item that failed or is empty). Blocks."""
        self._check()
        while True:
            found = None
            with self._flight.lock:
                if self._flight.items and self._part_ready():
                    found = self._take_part(self._flight.items[0])
            if found is not None:
                self._keep_full()
                return found
            if not self._refill() and not self._flight.has_more:
                return None
            self._wait(lambda: bool(self._flight.items) and self._part_ready())

    def _check(self) -> None:
        forks.check(self._generation, "this iterator")

    def _take_part(self, item: ObjectRead) -> tuple[ObjectRead, PartRequest | None]:
        if item.error is not None:
            self._flight.items.popleft()
            self._flight.undelivered_count -= item.sent_count - item.delivered_count
            return item, None
        slot = item.slots[item.delivered_count]
        item.delivered_count += 1
        self._flight.undelivered_count -= 1
        if item.delivered_count == len(item.slots):
            self._flight.items.popleft()
        return item, slot

    def _finished(self, *, ordered: bool) -> ObjectRead | None:
        if ordered:
            item = self._flight.items[0] if self._flight.items else None
            return item if item is not None and item.finished else None
        return next((item for item in self._flight.items if item.finished), None)

    def _part_ready(self) -> bool:
        item = self._flight.items[0]
        if item.error is not None:
            return True
        if item.asking:  # the first part waits for the checksum of the whole, so that all can be held against it
            return False
        return item.slots[item.delivered_count].completion is not None

    def _wait(self, ready: Callable[[], bool]) -> None:
        started_s, flight = time.monotonic(), self._flight
        with flight.lock:
            if ready():
                return
            flight.waiting = True
            flight.window.starving()
            flight.pump()
            try:
                while not ready():
                    if flight.closed:
                        raise ClosedError("the iterator was closed while it was waited for")
                    flight.changed.wait(_LINGER_S)
            finally:
                flight.waiting = False
        self.stall_s += time.monotonic() - started_s
        self.stalls_count += 1

    def _keep_full(self) -> None:
        """Something was delivered: pull more of the plan when little of it is left, send what waited for room."""
        limit = self._flight.window.limit
        if self._requests is not None and len(self._flight.planned) < max(limit, _PULL_COUNT):
            self._refill()
        elif self._flight.hungry:
            with self._flight.lock:
                self._flight.pump()

    def _refill(self) -> bool:
        """Pull as much of the plan as may soon be in flight; False at its end."""
        requests = self._requests
        if requests is None:
            with self._flight.lock:
                self._flight.pump()
            return False
        pulled: list[PlanItem] = []
        # with something to deliver, a slow generator must not hold it back for long
        room_count = max(2 * self._flight.window.limit, _PULL_COUNT) - len(self._flight.planned)
        wanted = max(0, room_count) if not self._taken else _PULL_COUNT  # a window that shrank has planned for more
        for request in islice(requests, wanted):
            pulled.append(as_item(request, self._pulled_count))
            self._pulled_count += 1
        if len(pulled) < wanted:
            self._requests = None
        if len(pulled) > 1 and self._whole:
            pulled = coalesce(pulled, gap_bytes=self._config.gap_bytes_max, length_bytes_max=self._config.part_bytes)
        with self._flight.lock:
            self._flight.planned.extend(pulled)
            self._flight.pump()
        return self._requests is not None or bool(pulled)

    def statistics(self) -> FetchStatistics:
        """See ``FetchStatistics``."""
        return FetchStatistics(
            requests_in_flight=len(self._flight.sent),
            requests_limit=self._flight.window.limit,
            received_bytes=self._flight.received_bytes,
            stall_s=self.stall_s,
            stalls_count=self.stalls_count,
            throttled_count=self._flight.throttled_count,
        )

    def close(self) -> None:
        """Cancel what is in flight and give every reserved byte back; idempotent."""
        if self._flight.closed or self._generation != forks.generation():
            return
        self._requests = None
        taken, self._taken = self._taken, deque()
        self._flight.close(taken)

    def release(self, slot: PartRequest) -> None:
        """Give back what was reserved for a delivered slot; a ``PartBuffer`` goes back by itself."""
        self._flight.places.release(slot)
