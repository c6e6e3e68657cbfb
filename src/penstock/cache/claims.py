"""One fetch of a missing block for all who want it: the other reads of this process, and the other processes.

A claim is a lease (see ``leases``) and those in this process who wait for what it covers. Reads that come while it is held
line up behind it, and get the bytes from memory when they are there. Where another process has the lease, a thread looks now
and then whether it was given back, by being done or by dying; then the waiting reads look at the disk again.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock import forks

if TYPE_CHECKING:
    from collections.abc import Sequence

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


class Wanted(NamedTuple):
    """What a read would fetch.

    Attributes:
        token: Its name.
        number: Of its lease.
        block: Which block of the read's it is.
    """

    token: str
    number: int
    block: int


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

    def take(self, wanted: Sequence[Wanted], waiter: Waiter, *, patient: bool) -> list[Claim | bool]:
        """Claim what is to be fetched.

        Args:
            wanted: In the order of their numbers.
            waiter: Who wants it.
            patient: Whether another process's lease counts.

        Returns:
            For each the claim; or True where a read of this process has it, and `waiter` will be told; or False where
            another process has it, see ``watch``.

        Cost: one system call for neighbours that nobody has.
        """
        found: list[Claim | bool] = []
        with self._lock:
            for each in wanted:
                claim = self._held.get(each.token)
                if claim is not None:
                    claim.waiters.append((waiter, each.block))
                    self._counts.shared_count += 1
                    found.append(True)
                else:
                    claim = self._held[each.token] = Claim(each.token, each.number)
                    found.append(claim)
        lost: set[Claim] = set()
        for run in _neighbours([claim for claim in found if isinstance(claim, Claim)]):
            lost.update(self._lease(run, patient=patient))
        for waiters in self.release(list(lost)):
            for other, index in waiters:
                other.resume((index,), expired=False)
        return [False if claim in lost else claim for claim in found]

    def _lease(self, run: list[Claim], *, patient: bool) -> list[Claim]:
        """Take the leases of neighbours, at once where that goes; those that another process has, where that counts."""
        taken = self._leases.try_take(run[0].number, len(run))
        if taken is False and len(run) > 1:
            return [claim for each in run for claim in self._lease([each], patient=patient)]
        for claim in run:
            claim.leased = bool(taken)
        return run if taken is False and patient else []

    def release(self, claims: Sequence[Claim]) -> list[list[tuple[Waiter, int]]]:
        """Give claims back, in the order of their numbers; for each, those who waited for it.

        Cost: one system call for neighbours.
        """
        found: list[list[tuple[Waiter, int]]] = []
        leased: list[Claim] = []
        with self._lock:
            for claim in claims:
                if self._held.get(claim.token) is claim:
                    del self._held[claim.token]
                found.append(claim.waiters)
                claim.waiters = []
                if claim.leased:
                    leased.append(claim)
                    claim.leased = False
        for run in _neighbours(leased):
            self._leases.release(run[0].number, len(run))
        return found

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


def _neighbours(claims: list[Claim]) -> list[list[Claim]]:
    """Runs of consecutive numbers."""
    runs: list[list[Claim]] = []
    for claim in claims:
        if runs and claim.number == runs[-1][-1].number + 1:
            runs[-1].append(claim)
        else:
            runs.append([claim])
    return runs
