"""One fetch of a missing block for all who want it: the other reads of this process, and the other processes.

A claim is a lease (see ``leases``) and those in this process who wait for what it covers. Reads that come while it is held
line up behind it, and get the bytes from memory when they are there. Where another process has the lease, a thread looks now
and then whether it was given back, by being done or by dying; then the waiting reads look at the disk again.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Protocol

from penstock import forks

if TYPE_CHECKING:
    from penstock.cache.leases import Leases
    from penstock.cache.statistics import Counts

_LOOK_S_MIN = 0.002
_LOOK_S_MAX = 0.05


class Waiter(Protocol):
    """A read that waits. Its methods do not block.

    Attributes:
        cancelled: Whether it was given up.
    """

    cancelled: bool

    def resume(self, block_index: int, *, expired: bool) -> None:
        """What was waited for is there, or nobody fetches it any more: look again."""

    def give(self, block_index: int, data: memoryview) -> None:
        """What was waited for: uint8[block]."""

    def fail(self, error: Exception) -> None:
        """What was waited for cannot be had."""


class Claim:
    """What is being fetched, here or elsewhere.

    Attributes:
        token: Name of what it covers.
        number: Of its lease.
        leased: Whether this process holds the lease.
        waiters: Reads of this process, and which block each waits for.
        look_s: When to look for another process's lease again.
        pause_s: Between two looks.
        until_s: When waiting for another process ends.
    """

    __slots__ = ("leased", "look_s", "number", "pause_s", "token", "until_s", "waiters")

    def __init__(self, token: str, number: int) -> None:
        self.token = token
        self.number = number
        self.leased = False
        self.waiters: list[tuple[Waiter, int]] = []
        self.pause_s = _LOOK_S_MIN
        self.look_s = 0.0
        self.until_s = 0.0


class Claims:
    """The claims of one cache in this process. Safe from any thread.

    Args:
        leases: Of the cache.
        wait_s_max: For another process.
        counts: Told who waited.
    """

    def __init__(self, leases: Leases, wait_s_max: float, counts: Counts) -> None:
        self._leases = leases
        self._wait_s_max = wait_s_max
        self._counts = counts
        self._reset()
        forks.register(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, Claim] = {}
        self._elsewhere: list[Claim] = []
        self._looking: threading.Thread | None = None
        self._ended = threading.Event()

    def after_fork_in_child(self) -> None:
        """The parent's claims stay the parent's."""
        self._reset()

    def take(self, token: str, number: int, waiter: Waiter, block_index: int, *, patient: bool) -> Claim | None:
        """Claim what `token` names; None where somebody has it: then `waiter` is resumed.

        Args:
            token: Name of what is to be fetched.
            number: Of its lease.
            waiter: Who wants it.
            block_index: Which it is told when it is resumed.
            patient: Whether to wait for another process.
        """
        with self._lock:
            claim = self._held.get(token)
            if claim is not None:
                claim.waiters.append((waiter, block_index))
                self._counts.shared_count += 1
                return None
            claim = self._held[token] = Claim(token, number)
        taken = self._leases.try_take(number)
        if taken is False and patient:
            self._counts.waited_count += 1
            self._watch(claim, waiter, block_index)
            return None
        claim.leased = bool(taken)
        return claim

    def release(self, claim: Claim) -> list[tuple[Waiter, int]]:
        """Give a claim back, once; those who waited for it."""
        with self._lock:
            if self._held.get(claim.token) is claim:
                del self._held[claim.token]
            waiters, claim.waiters = claim.waiters, []
            leased, claim.leased = claim.leased, False
        if leased:
            self._leases.release(claim.number)
        return waiters

    def close(self) -> None:
        """End the thread; those who wait are resumed to find the store closed. Idempotent."""
        self._ended.set()
        thread = self._looking
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _watch(self, claim: Claim, waiter: Waiter, block_index: int) -> None:
        now_s = time.monotonic()
        claim.until_s = now_s + self._wait_s_max
        claim.look_s = now_s + claim.pause_s
        with self._lock:
            claim.waiters.append((waiter, block_index))
            self._elsewhere.append(claim)
            if self._looking is None:
                self._looking = threading.Thread(target=self._look, name="penstock-cache-look", daemon=True)
                self._looking.start()

    def _look(self) -> None:
        """The thread's loop; it ends when nothing is waited for."""
        while True:
            self._ended.wait(_LOOK_S_MIN)
            now_s = time.monotonic()
            for claim in list(self._elsewhere):
                expired = now_s >= claim.until_s
                if now_s >= claim.look_s or self._ended.is_set() or _is_given_up(claim):
                    self._look_at(claim, now_s, expired=expired)
            with self._lock:
                if not self._elsewhere:
                    self._looking = None
                    return

    def _look_at(self, claim: Claim, now_s: float, *, expired: bool) -> None:
        taken = self._leases.try_take(claim.number)
        if taken is False and not expired and not self._ended.is_set() and not _is_given_up(claim):
            claim.pause_s = min(_LOOK_S_MAX, 1.5 * claim.pause_s)
            claim.look_s = now_s + claim.pause_s
            return
        with self._lock:
            self._elsewhere.remove(claim)
        claim.leased = bool(taken)
        late = expired and taken is False
        self._counts.wait_expired_count += late
        for waiter, block_index in self.release(claim):
            waiter.resume(block_index, expired=late)


def _is_given_up(claim: Claim) -> bool:
    return all(waiter.cancelled for waiter, _ in claim.waiters)
