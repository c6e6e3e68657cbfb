"""One byte budget for all reading in this process, and the buffers it pays for.

A large part lands in an anonymous private ``mmap``: libcurl's pieces go to its C-level ``write``, fresh pages cost a
fault each, so it is used again once nothing refers to it any more (``penstock.buffers``). Leases end anywhere, so that
their homecoming only appends to a deque; the budget looks there when it is asked next.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from dataclasses import dataclass

from penstock import forks
from penstock.buffers import lease
from penstock.config import MIB, check_whole, default_budget_bytes

POOLED_BYTES_MIN = 1 * MIB
"""Bodies from this size on land in a ``PartBuffer``; a mapping for less costs more than ``malloc``."""

_GRAIN_BYTES = 256 * 1024


class PartBuffer:
    """uint8[capacity] for one part, or for one object of several.

    Attributes:
        view: Its memory, writable; the buffer is charged until every reference to it and to slices of it is gone.
        owner: The mmap below.
    """

    __slots__ = ("owner", "view")

    def __init__(self, owner: mmap.mmap, view: memoryview) -> None:
        self.owner = owner
        self.view = view

    def __len__(self) -> int:
        return len(self.owner)


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetStatistics:
    """Where the byte budget is.

    Attributes:
        bytes_max: The budget.
        used_bytes: Reserved, in flight, undelivered, or in parts still referred to, and free buffers kept.
        free_bytes: Of those, in buffers kept for reuse; given up when something else needs the bytes.
        refused_count: Requests that had to wait for bytes. Large, with a starving consumer: raise the budget.
        overdrawn_count: Times that a waiting consumer's next item was let in beyond the budget.
    """

    bytes_max: int
    used_bytes: int
    free_bytes: int
    refused_count: int
    overdrawn_count: int


class Budget:
    """Bytes that reading may hold. All methods may be called from any thread; none blocks.

    Args:
        bytes_max: The budget.
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
        self._lock = threading.RLock()  # a finaliser may end other reading in the midst of it
        forks.register(self)

    def after_fork_in_child(self) -> None:
        """See ``forks``: what the parent holds is not the child's."""
        self._lock = threading.RLock()  # a finaliser may end other reading in the midst of it
        self._free.clear()
        self._used = 0
        self._owned_elsewhere = set()
        self._released = deque()
        self._returned = deque()  # inherited leases still go to the old one, and with it

    def reserve(self, size_bytes: int, *, force: bool = False) -> bool:
        """Take `size_bytes` out of the budget; False where they are not there, unless `force`."""
        with self._lock:
            return self._reserve(size_bytes, force=force)

    def release(self, size_bytes: int) -> None:
        """Put reserved bytes back."""
        self._released.append(size_bytes)  # without the lock: finalisers release, inside any other code

    def acquire(self, size_bytes: int, *, force: bool = False) -> PartBuffer | None:
        """A buffer of at least `size_bytes`, charged until it is finalised; None where the budget lacks them."""
        with self._lock:
            self._collect()
            best = None
            for index in range(len(self._free) - 1, -1, -1):  # last in, first out: its pages are warm
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
        return PartBuffer(owner, lease(owner, self._returned.append))

    def disown(self, buffer: PartBuffer) -> None:
        """A caller owns `buffer` from now on: it is charged no longer."""
        with self._lock:
            self._used -= len(buffer)
            self._owned_elsewhere.add(id(buffer.owner))

    def statistics(self) -> BudgetStatistics:
        """See ``BudgetStatistics``."""
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
            self._drop(self._free.pop(0))
        if self._used + size_bytes > self.bytes_max:
            if not force:
                self._refused += 1
                return False
            self._overdrawn += 1
        self._used += size_bytes
        return True

    def _collect(self) -> None:
        """Take back what was released and finalised since the last look."""
        while self._released:
            self._used -= self._released.popleft()
        while self._returned:
            buffer = self._returned.popleft()
            if id(buffer) in self._owned_elsewhere:
                self._owned_elsewhere.discard(id(buffer))
                self._used += len(buffer)
            if self._used > self.bytes_max or sum(map(len, self._free)) + len(buffer) > self.bytes_max // 2:
                self._drop(buffer)
            else:
                self._free.append(buffer)

    def _drop(self, owner: mmap.mmap) -> None:
        size_bytes = len(owner)
        self._used -= size_bytes  # its memory goes with the last reference, which is the caller's


class _ProcessBudget:
    """The one budget of this process, and the largest number that a ``FetchConfig`` named for it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant, because a finaliser may read in the midst of it
        self._budget: Budget | None = None
        self._configured_bytes = 0  # 0: no configuration has named a number
        forks.register(self)

    def after_fork_in_child(self) -> None:
        """See ``forks``: the budget stays, but a child may be configured with less."""
        self._lock = threading.RLock()
        self._configured_bytes = 0

    def get(self) -> Budget:
        if self._budget is None:
            with self._lock:
                if self._budget is None:
                    self._budget = Budget(default_budget_bytes())
        return self._budget

    def configure(self, bytes_max: int) -> None:
        with self._lock:
            if bytes_max > self._configured_bytes:
                self._configured_bytes = self.get().bytes_max = bytes_max

    def set(self, bytes_max: int) -> None:
        with self._lock:
            self._configured_bytes = 0
            self.get().bytes_max = bytes_max


_process = _ProcessBudget()


def process_budget() -> Budget:
    """Return the budget of this process: ``default_budget_bytes()``, unless it was configured or set."""
    return _process.get()


def configure_process_budget(bytes_max: int) -> None:
    """Apply the ``budget_bytes_max`` of a ``FetchConfig`` that a caller passed in this process.

    The first number replaces the default. If others follow, the largest one counts, in whatever order they come, so that
    one part of a program cannot take from another the memory that it was promised.
    """
    _process.configure(bytes_max)


def set_process_budget(bytes_max: int) -> None:
    """Set the byte budget of this process, whatever was configured before.

    What is already held stays; new requests wait until they fit. The next ``FetchConfig`` that names a number counts again.

    Args:
        bytes_max: Bytes that all reading in this process may hold; at least 1.

    Raises:
        ConfigError: `bytes_max` is not a positive whole number.
    """
    check_whole("bytes_max", bytes_max, 1)
    _process.set(bytes_max)
