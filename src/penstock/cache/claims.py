"""Claims: each missing block is fetched once, however many readers in this process and in others want it.

A claim is a lease (``shared_files``) and the reads of this process that wait for its blocks. They get the bytes from memory
as soon as these arrive. If another process has the lease, a thread checks from time to time whether that process is done or
has ended, and so released it. The waiting reads then look for the block on the disk again.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.system import forks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.cache.cached_read import CachedRead
    from penstock.cache.shared_files import Leases
    from penstock.cache.statistics import Counts

WHOLE_GET = -1
"""Stands for a block's number in the claim of a ``Get`` whose version is unknown."""

_CHECK_S_MIN = 0.004
_CHECK_S_MAX = 0.05
"""Time between two checks of another process's lease: with 64 waiting reads, a check every 50 ms takes 1% of a core."""


@dataclass(slots=True, eq=False)
class Claim:
    """The blocks that this process is fetching.

    Attributes:
        token: Name of the blocks that the claim covers.
        number: Number of its lease.
        leased: Whether this process holds the lease. Without a lease it fetches all the same.
        waiters: Other reads of this process, and the number of the block that each waits for.
    """

    token: str
    number: int
    leased: bool = False
    waiters: list[tuple[CachedRead, int]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Watch:
    """A read that waits until another process releases a lease."""

    number: int
    waiter: CachedRead
    indices: tuple[int, ...]
    until_s: float
    pause_s: float = _CHECK_S_MIN
    check_s: float = 0.0


class Claims:
    """The claims of one cache in this process. All threads may use it.

    Args:
        leases: The leases of the cache.
        wait_s_max: Longest time to wait for another process, in seconds.
        counts: Counters to update.
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
        self._watcher: threading.Thread | None = None
        self._ended = threading.Event()

    def after_fork_in_child(self) -> None:
        """Forget the claims, which remain the parent's."""
        self._reset()

    def take(
        self, digest: str, indices: Sequence[int], waiter: CachedRead, *, respects_leases: bool
    ) -> list[Claim | bool]:
        """Claim blocks that are to be fetched.

        Args:
            digest: Digest of the identity of the object.
            indices: Numbers of the blocks in ascending order, or only ``WHOLE_GET``.
            waiter: The read that wants them.
            respects_leases: Whether to respect the leases of other processes.

        Returns:
            For each block its claim; or True if another read of this process is fetching it and will notify `waiter`; or
            False if another process is fetching it, see ``watch``.

        Cost: one system call for each run of neighbouring blocks that are not being fetched.
        """
        found: list[Claim | bool] = []
        with self._lock:
            for index in indices:
                token = _token(digest, index)
                claim = self._held.get(token)
                if claim is not None:
                    claim.waiters.append((waiter, index))
                    self._counts.shared_count += 1
                    found.append(True)
                else:
                    claim = self._held[token] = Claim(token, lease_number(digest, index))
                    found.append(claim)
        lost: set[Claim] = set()
        for run in _neighbours([claim for claim in found if isinstance(claim, Claim)]):
            lost.update(self._lease(run, respects_leases=respects_leases))
        for waiters in self.release(list(lost)):
            for other, index in waiters:
                other.resume((index,), expired=False)
        return [False if claim in lost else claim for claim in found]

    def hold(self, digest: str, indices: Sequence[int]) -> list[Claim]:
        """Claim blocks that have arrived and are about to be stored, so that other reads of this process wait for that.

        Args:
            digest: Digest of the identity of their version.
            indices: Numbers of the blocks in ascending order.

        Returns:
            The claims, for ``release``. Blocks that another read is fetching are left to it, and no lease is taken: another
            process that wants them now fetches them itself.
        """
        held: list[Claim] = []
        with self._lock:
            for index in indices:
                token = _token(digest, index)
                if token not in self._held:
                    claim = self._held[token] = Claim(token, lease_number(digest, index))
                    held.append(claim)
        return held

    def _lease(self, run: list[Claim], *, respects_leases: bool) -> list[Claim]:
        """Take the leases of neighbours, all at once if possible.

        Returns:
            The claims whose lease another process has; none if the claims are not to respect it.
        """
        taken = self._leases.try_take(run[0].number, len(run))
        if taken is False and len(run) > 1:
            return [claim for each in run for claim in self._lease([each], respects_leases=respects_leases)]
        for claim in run:
            claim.leased = bool(taken)
        return run if taken is False and respects_leases else []

    def release(self, claims: Sequence[Claim]) -> list[list[tuple[CachedRead, int]]]:
        """Give claims back.

        Args:
            claims: The claims in ascending order of their lease numbers.

        Returns:
            For each claim the reads that waited for it, and the number of the block that each waits for.

        Cost: one system call for each run of neighbours.
        """
        found: list[list[tuple[CachedRead, int]]] = []
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

    def free(self, claim: Claim) -> None:
        """Give a claim back, and let the reads that waited for it look for the block again."""
        for waiter, index in self.release([claim])[0]:
            waiter.resume((index,), expired=False)

    def watch(self, digest: str, indices: tuple[int, ...], waiter: CachedRead) -> None:
        """Resume `waiter` when another process releases the lease of the last of these blocks.

        It has released the others by then, since it releases the last of several neighbours last.

        Args:
            digest: Digest of the identity of the object that the other process fetches.
            indices: Numbers of the blocks in ascending order, or only ``WHOLE_GET``.
            waiter: The read that wants them.
        """
        number = lease_number(digest, indices[-1])
        watch = _Watch(number, waiter, indices, time.monotonic() + self._wait_s_max)
        self._counts.waited_count += len(indices)
        with self._lock:
            self._watches.append(watch)
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._check_all, name="penstock-cache-look", daemon=True)
                self._watcher.start()

    def close(self) -> None:
        """End the thread, and resume the reads that wait, which then find the store closed. Idempotent."""
        self._ended.set()
        thread = self._watcher
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _check_all(self) -> None:
        """Run the thread's loop, which ends when no read is waiting."""
        while True:
            self._ended.wait(_CHECK_S_MIN)
            now_s = time.monotonic()
            for watch in list(self._watches):
                if self._is_over(watch, now_s):
                    with self._lock:
                        self._watches.remove(watch)
            with self._lock:
                if not self._watches:
                    self._watcher = None
                    return

    def _is_over(self, watch: _Watch, now_s: float) -> bool:
        """Check a lease, and resume the read if it has to wait no longer."""
        given_up = self._ended.is_set() or watch.waiter.cancelled
        expired = now_s >= watch.until_s
        if not given_up and not expired:
            if now_s < watch.check_s:
                return False
            taken = self._leases.try_take(watch.number)
            if taken is False:
                watch.check_s = now_s + watch.pause_s
                watch.pause_s = min(_CHECK_S_MAX, 1.5 * watch.pause_s)
                return False
            if taken:
                self._leases.release(watch.number)
        late = expired and not given_up
        self._counts.wait_expired_count += late
        watch.waiter.resume(watch.indices, expired=late)
        return True


def lease_number(digest: str, index: int) -> int:
    """Return the number of a block's lease; consecutive blocks have consecutive numbers."""
    return int(digest[:15], 16) + max(0, index)


def _token(digest: str, index: int) -> str:
    return f"{digest}.{index:x}"


def _neighbours(claims: list[Claim]) -> list[list[Claim]]:
    """Split claims into runs of consecutive lease numbers."""
    runs: list[list[Claim]] = []
    for claim in claims:
        if runs and claim.number == runs[-1][-1].number + 1:
            runs[-1].append(claim)
        else:
            runs.append([claim])
    return runs
