"""Stores small bodies after their readers were notified, several at a time.

A reader usually gets its bytes after their blocks were stored, because it may change the memory then. A sink that promises not
to change it (``Sink.leaves_body_alone``) gets them immediately. One thread stores its blocks soon afterwards, and reserves the
room for several of them together; until then the claim makes other reads of the same bytes wait.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from penstock.config import MIB
from penstock.system import forks

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cache.directory import CacheDirectory, NewEntry

BODY_BYTES_MAX = 1 * MIB
"""A larger body is stored by the thread of its own read: many of them at once keep a disk busier than one thread can."""

_WAITING_BYTES_MAX = 64 * MIB
_TOGETHER_COUNT = 16

log = logging.getLogger("penstock.cache")


class LateEntries(NamedTuple):
    """Entries that are stored after their reader was notified.

    Attributes:
        size_bytes: Bytes of memory that they keep alive.
        make: Returns the entries; called on a thread of the pool.
        ended: Called when they have been stored, or never will be.
    """

    size_bytes: int
    make: Callable[[], list[NewEntry]]
    ended: Callable[[], None]


class StoreQueue:
    """Bodies that wait to be stored. All threads may use it.

    Args:
        directory: The cache's directory, in which they are stored.
        run_on_pool: Runs a function on a thread that may write to the disk; see ``CacheContext.run_on_pool``.
    """

    def __init__(
        self,
        directory: CacheDirectory,
        run_on_pool: Callable[[Callable[[], None], Callable[[Exception], None]], None],
    ) -> None:
        self._directory = directory
        self._run_on_pool = run_on_pool
        self._reset()
        forks.register(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[LateEntries] = deque()
        self._waiting_bytes = 0
        self._is_running = False

    def after_fork_in_child(self) -> None:
        """Forget everything that the parent is storing."""
        self._reset()

    def put(self, late: LateEntries) -> bool:
        """Store entries soon.

        Returns:
            False if they are too large, or so much is waiting already that the reader should wait too.
        """
        if late.size_bytes > BODY_BYTES_MAX:
            return False
        with self._lock:
            if self._waiting_bytes + late.size_bytes > _WAITING_BYTES_MAX:
                return False
            self._waiting_bytes += late.size_bytes
            self._waiting.append(late)
            starts, self._is_running = not self._is_running, True
        if starts:
            self._run_on_pool(self._run, self._give_up)
        return True

    def _run(self) -> None:
        """Store waiting bodies until none is left."""
        while batch := self._take():
            try:
                self._store(batch)
            except Exception:
                log.exception("Storing blocks failed.")
            finally:
                self._end(batch)

    def _take(self) -> list[LateEntries]:
        with self._lock:
            batch = [self._waiting.popleft() for _ in range(min(_TOGETHER_COUNT, len(self._waiting)))]
            self._is_running = bool(batch)
        return batch

    def _store(self, batch: list[LateEntries]) -> None:
        entries = [entry for late in batch for entry in late.make()]
        if entries:
            self._directory.write(entries)

    def _end(self, batch: list[LateEntries]) -> None:
        with self._lock:
            self._waiting_bytes -= sum(late.size_bytes for late in batch)
        for late in batch:
            late.ended()

    def _give_up(self, _: Exception) -> None:
        """End waiting bodies without storing them, because the store was closed."""
        while batch := self._take():
            self._end(batch)
