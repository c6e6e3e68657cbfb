"""Ordered read-ahead: reads a plan ahead of one consumer.

The consumer's thread pulls the plan, which may be a user's generator, a little ahead. A ``RequestScheduler`` sends what was
pulled as other requests end, on engine threads, so that requests stay in flight while the consumer computes. What is
delivered in order is requested in order.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from penstock.fetch.landings import LandingAllocator
from penstock.fetch.plan import Request, as_item, coalesce
from penstock.fetch.scheduler import RequestScheduler
from penstock.system import forks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.config import FetchConfig
    from penstock.fetch.budget import Budget
    from penstock.fetch.plan import PlanItem
    from penstock.fetch.requests import ObjectRead, PartRequest
    from penstock.fetch.scheduler import FetchStatistics
    from penstock.types import Core

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
        """Release what was reserved for a delivered part; a ``PartBuffer`` returns itself."""
        self._landings.release(part)

    def statistics(self) -> FetchStatistics:
        """What was read so far."""
        return self._scheduler.statistics()

    def close(self) -> None:
        """Cancel what is in flight and release every reserved byte. Idempotent; does nothing in a forked child."""
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
        """Add as much of the plan as may soon be in flight, and send what may be sent; False at the plan's end."""
        requests = self._requests
        if requests is None:
            self._scheduler.add(())
            return False
        # There may be no room: a window that shrank had planned for more.
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
