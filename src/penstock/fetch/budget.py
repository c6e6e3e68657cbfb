"""One byte budget for all reading in this process, and the buffers it pays for.

A large part lands in an anonymous private ``mmap``: libcurl's pieces go to its C-level ``write``. Each fresh page costs a
fault, so a buffer is used again once nothing refers to it any more (``penstock.memory.buffers``). A lease may end in any
thread, inside any other code, so its end only appends to a deque, which the budget empties at its next use.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from dataclasses import dataclass

from penstock.config import MIB, check_whole, default_budget_bytes
from penstock.memory.buffers import lease
from penstock.system import forks

POOLED_BYTES_MIN = 1 * MIB
"""Bodies of at least this size land in a ``PartBuffer``; for smaller ones a mapping costs more than ``malloc``."""

_GRAIN_BYTES = 256 * 1024


class PartBuffer:
    """uint8[capacity] for one part, or for one object of several.

    Attributes:
        view: Writable view of the memory; the buffer is charged until every reference to it and to slices of it is gone.
        owner: The mmap that holds the memory.
    """

    __slots__ = ("owner", "view")

    def __init__(self, owner: mmap.mmap, view: memoryview) -> None:
        self.owner = owner
        self.view = view

    def __len__(self) -> int:
        return len(self.owner)


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetStatistics:
    """The use of the byte budget.

    Attributes:
        bytes_max: The budget, in bytes.
        used_bytes: Bytes that are reserved, in flight, undelivered or still referred to, and those in free buffers.
        free_bytes: The part of `used_bytes` in free buffers; they are dropped when something else needs the bytes.
        refused_count: Number of times that a request had to wait for bytes. If it is large while the consumer starves, raise
            the budget.
        overdrawn_count: Number of items that were admitted beyond the budget, because the consumer waited for them.
    """

    bytes_max: int
    used_bytes: int
    free_bytes: int
    refused_count: int
    overdrawn_count: int


class Budget:
    """Bytes that reading may hold. All methods may be called from any thread; none blocks.

    Args:
        bytes_max: The budget, in bytes.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._used = 0
        self._free: list[mmap.mmap] = []
        self._owned_elsewhere: set[int] = set()
        self._refused = 0
        self._overdrawn = 0
        self._returned: deque[mmap.mmap] = deque()
        self._released: deque[int] = deque()
        self._lock = threading.RLock()  # a finaliser may end other reading while the lock is held
        forks.register(self)

    def after_fork_in_child(self) -> None:
        """Forget the parent's buffers, which are not charged to the child."""
        self._lock = threading.RLock()  # a finaliser may end other reading while the lock is held
        self._free.clear()
        self._used = 0
        self._owned_elsewhere = set()
        self._released = deque()
        self._returned = deque()  # inherited leases still end in the old one, and are dropped with it

    def reserve(self, size_bytes: int, *, force: bool = False) -> bool:
        """Take `size_bytes` out of the budget; False if it lacks them and `force` is false."""
        with self._lock:
            return self._reserve(size_bytes, force=force)

    def release(self, size_bytes: int) -> None:
        """Put reserved bytes back."""
        self._released.append(size_bytes)  # without the lock, because finalisers release inside any other code

    def acquire(self, size_bytes: int, *, force: bool = False) -> PartBuffer | None:
        """Lease a buffer of at least `size_bytes`; None if the budget lacks them and `force` is false.

        It is charged until nothing refers to its memory any more.
        """
        with self._lock:
            self._collect()
            best = None
            for index in range(len(self._free) - 1, -1, -1):  # last in, first out: the newest pages are in the cache
                buffer = self._free[index]
                if size_bytes <= len(buffer) <= 2 * size_bytes and (
                    best is None or len(buffer) < len(self._free[best])
                ):
                    best = index
            if best is not None:
                return self._lease(self._free.pop(best))
            capacity = -(-size_bytes // _GRAIN_BYTES) * _GRAIN_BYTES
            if not self._reserve(capacity, force=force):
                return None
        owner = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        owner.madvise(mmap.MADV_HUGEPAGE)
        return self._lease(owner)

    def _lease(self, owner: mmap.mmap) -> PartBuffer:
        return PartBuffer(owner, lease(owner, self._returned, owner))

    def disown(self, buffer: PartBuffer) -> None:
        """Charge `buffer` no longer: a caller owns it from now on."""
        with self._lock:
            self._used -= len(buffer)
            self._owned_elsewhere.add(id(buffer.owner))

    def statistics(self) -> BudgetStatistics:
        """Return how the budget is used now."""
        with self._lock:
            self._collect()
            return BudgetStatistics(
                bytes_max=self.bytes_max,
                used_bytes=self._used,
                free_bytes=sum(len(buffer) for buffer in self._free),
                refused_count=self._refused,
                overdrawn_count=self._overdrawn,
            )

    def _reserve(self, size_bytes: int, *, force: bool) -> bool:
        self._collect()
        while self._used + size_bytes > self.bytes_max and self._free:
            self._used -= len(self._free.pop(0))  # the memory itself goes with the last reference
        if self._used + size_bytes > self.bytes_max:
            if not force:
                self._refused += 1
                return False
            self._overdrawn += 1
        self._used += size_bytes
        return True

    def _collect(self) -> None:
        """Take back the buffers that were released and finalised since the last call."""
        while self._released:
            self._used -= self._released.popleft()
        while self._returned:
            buffer = self._returned.popleft()
            if id(buffer) in self._owned_elsewhere:
                self._owned_elsewhere.discard(id(buffer))
                self._used += len(buffer)
            if self._used > self.bytes_max or sum(map(len, self._free)) + len(buffer) > self.bytes_max // 2:
                self._used -= len(buffer)
            else:
                self._free.append(buffer)


class _Process:
    """The one budget of this process, and the largest number that a ``FetchConfig`` named for it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # reentrant, because a finaliser may read while the lock is held
        self.budget: Budget | None = None
        self.configured_bytes = 0  # 0: no configuration has named a number
        forks.register(self)

    def after_fork_in_child(self) -> None:
        """Keep the budget, but let the child be configured with less."""
        self.lock = threading.RLock()
        self.configured_bytes = 0


_process = _Process()


def process_budget() -> Budget:
    """Return the budget of this process: ``default_budget_bytes()``, unless it was configured or set."""
    if _process.budget is None:
        with _process.lock:
            if _process.budget is None:
                _process.budget = Budget(default_budget_bytes())
    return _process.budget


def configure_process_budget(bytes_max: int) -> None:
    """Apply the ``budget_bytes_max`` of a ``FetchConfig`` that a caller passed in this process.

    The first number replaces the default. If others follow, the largest one counts, whatever their order, so that
    one part of a program cannot take from another the memory that it was promised.
    """
    with _process.lock:
        if bytes_max > _process.configured_bytes:
            _process.configured_bytes = process_budget().bytes_max = bytes_max


def set_process_budget(bytes_max: int) -> None:
    """Set the byte budget of this process, regardless of earlier settings.

    Held bytes stay; new requests wait until they fit. The next ``FetchConfig`` that names a number counts again.

    Args:
        bytes_max: Bytes that all reading in this process may hold; at least 1.

    Raises:
        ConfigError: `bytes_max` is not a positive whole number.
    """
    check_whole("bytes_max", bytes_max, 1)
    with _process.lock:
        _process.configured_bytes = 0
        process_budget().bytes_max = bytes_max
