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

_LOOK_S_MIN = 0.004
_LOOK_S_MAX = 0.05
"""Between two looks at another process's lease: 64 reads that wait for 50 ms each cost 1% of a core."""


class Waiter(Protocol):
    """A read that waits. Its methods do not block.

    Attributes:
        cancelled: Whether it was given up.
    """

    cancelled: bool

    def resume(self, indices: tuple[int, ...], *, expired: bool) -> None:
        """These blocks are there, or nobody fetches them any more: look again."""

    def give(self, block_index: int, data: memoryview) -> None:
        """What was waited for: uint8[block]."""

    def fail(self, error: Exception) -> None:
        """What was waited for cannot be had."""


class Claim:
    """What this process is fetching.

    Attributes:
        token: Name of what it covers.
        number: Of its lease.
        leased: Whether this process holds the lease; it fetches without one where there are none.
        waiters: Other reads of this process, and which block each waits for.
    """

    __slots__ = ("leased", "number", "token", "waiters")

    def __init__(self, token: str, number: int) -> None:
        self.token = token
        self.number = number
        self.leased = False
        self.waiters: list[tuple[Waiter, int]] = []


class _Watch:
    """A read that waits for another process's lease, and since when."""

    __slots__ = ("indices", "look_s", "number", "pause_s", "until_s", "waiter")

    def __init__(self, number: int, waiter: Waiter, indices: tuple[int, ...], until_s: float) -> None:
        self.number = number
        self.waiter = waiter
        self.indices = indices
        self.until_s = until_s
        self.pause_s = _LOOK_S_MIN
        self.look_s = 0.0


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
        self._watches: list[_Watch] = []
        self._looking: threading.Thread | None = None
        self._ended = threading.Event()

    def after_fork_in_child(self) -> None:
        """The parent's claims stay the parent's."""
        self._reset()

    def take(self, token: str, number: int, waiter: Waiter, index: int, *, patient: bool) -> Claim | bool:
        """Claim what `token` names.

        Args:
            token: Name of what is to be fetched.
            number: Of its lease.
            waiter: Who wants it.
            index: Which block of `waiter`'s it is.
            patient: Whether another process's lease counts.

        Returns:
            The claim; or True where a read of this process has it, and `waiter` will be told; or False where another process
            has it, see ``watch``.
        """
        with self._lock:
            claim = self._held.get(token)
            if claim is not None:
                claim.waiters.append((waiter, index))
                self._counts.shared_count += 1
                return True
            claim = self._held[token] = Claim(token, number)
        taken = self._leases.try_take(number)
        if taken is False and patient:
            for other, other_index in self.release(claim):
                other.resume((other_index,), expired=False)
            return False
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

    def watch(self, number: int, waiter: Waiter, indices: tuple[int, ...]) -> None:
        """Resume `waiter` when the lease of `number`, the last of these blocks, is free: the others are free by then."""
        watch = _Watch(number, waiter, indices, time.monotonic() + self._wait_s_max)
        self._counts.waited_count += len(indices)
        with self._lock:
            self._watches.append(watch)
            if self._looking is None:
                self._looking = threading.Thread(target=self._look, name="penstock-cache-look", daemon=True)
                self._looking.start()

    def close(self) -> None:
        """End the thread; those who wait are resumed, to find the store closed. Idempotent."""
        self._ended.set()
        thread = self._looking
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _look(self) -> None:
        """The thread's loop; it ends when nothing is waited for."""
        while True:
            self._ended.wait(_LOOK_S_MIN)
            now_s = time.monotonic()
            for watch in list(self._watches):
                if self._over(watch, now_s):
                    with self._lock:
                        self._watches.remove(watch)
            with self._lock:
                if not self._watches:
                    self._looking = None
                    return

    def _over(self, watch: _Watch, now_s: float) -> bool:
        """Look, and resume the read if its waiting is over."""
        given_up = self._ended.is_set() or watch.waiter.cancelled
        expired = now_s >= watch.until_s
        if not given_up and not expired:
            if now_s < watch.look_s:
                return False
            taken = self._leases.try_take(watch.number)
            if taken is False:
                watch.look_s = now_s + watch.pause_s
                watch.pause_s = min(_LOOK_S_MAX, 1.5 * watch.pause_s)
                return False
            if taken:
                self._leases.release(watch.number)
        late = expired and not given_up
        self._counts.wait_expired_count += late
        watch.waiter.resume(watch.indices, expired=late)
        return True
