"""Eviction: removes the least recently used entries of a full cache, without scanning the whole tree to find them.

File names are hashes, so a few folders are a fair sample of the whole cache. A process that needs room scans folders in
random order until it has seen enough entries, and keeps the oldest quarter of them as candidates. It removes candidates as long
as they last, except those that were used meanwhile. In a cache of 200 000 entries, it scans about 2 000 for every 500 that
it removes, which takes 5 ms. A small cache is scanned completely, so its order of use is exact. If several processes need
room together, the process that gets the lease makes more room than it needs itself; the others make only what they need.
"""

from __future__ import annotations

import os
import random
import threading
import time
from typing import TYPE_CHECKING

from penstock.cache.directory import folders
from penstock.cache.entry import allotted_bytes
from penstock.system import forks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.cache.config import CacheConfig
    from penstock.cache.directory import CacheDirectory
    from penstock.cache.entry import EntryName
    from penstock.cache.statistics import Counts

_SAMPLE_COUNT = 2048
_OLDEST = 4  # one entry of this many in a sample becomes a candidate
_SLACK = 128  # this fraction of the cache is freed at once beyond the need
_LEASE = (1 << 60) - 1
_FUTURE_S = 86_400.0
"""An entry whose last use lies more than a day ahead was marked by a wrong clock, and counts as the oldest."""


class Evictor:
    """Keeps a cache within its limits. All threads may use it.

    Args:
        directory: The entries.
        config: The limits.
        counts: Counters to update.
    """

    def __init__(self, directory: CacheDirectory, config: CacheConfig, counts: Counts) -> None:
        self._directory = directory
        self._config = config
        self._counts = counts
        self._reset()
        forks.register(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._candidates: list[tuple[float, int, EntryName]] = []  # the oldest is the last
        self._recount_after = 64
        self._stored_since = 0
        self._folders: Iterator[int] = iter(())

    def after_fork_in_child(self) -> None:
        """Replace the lock, which another thread of the parent may have held."""
        self._reset()

    def room_bytes(self) -> int:
        """Return the bytes that may be added now; negative if the cache exceeds its limits."""
        free_bytes = self._directory.free_bytes(self._config.free_ratio_min)
        return min(self._config.bytes_max - self._directory.usage.total_bytes(), free_bytes)

    def reserve(self, sizes_bytes: Mapping[int, int]) -> bool:
        """Make room for entries that are about to be written, and count them.

        Args:
            sizes_bytes: Bytes that the entries take in each folder.

        Returns:
            False if there is no room, and nothing can be evicted.

        Raises:
            OSError: The directory cannot be read.

        Cost: five system calls if there is room.
        """
        self._recount()
        if not self._directory.is_full and self._counted(sizes_bytes):
            return True
        with self._lock:
            self._directory.count_unknown()  # in case the file with the numbers was lost
            # Another thread may have made room in the meantime.
            if not self._directory.is_full and self._counted(sizes_bytes):
                return True
            is_only_evictor = self._directory.leases.try_take(_LEASE)
            try:
                slack_bytes = self._directory.usage.total_bytes() // _SLACK if is_only_evictor else 0
                room_bytes = min(0, self.room_bytes()) if self._directory.is_full else self.room_bytes()
                self._directory.is_full = False
                self.evict(sum(sizes_bytes.values()) - room_bytes + slack_bytes)
            finally:
                if is_only_evictor:
                    self._directory.leases.release(_LEASE)
        if self._counted(sizes_bytes):
            return True
        ratio = self._config.free_ratio_min
        if ratio and self._directory.free_bytes(ratio) < sum(sizes_bytes.values()):
            self._directory.failures.warn_of_space(ratio)
        return False

    def _counted(self, sizes_bytes: Mapping[int, int]) -> bool:
        return self._directory.count(sizes_bytes, self._config.bytes_max, free_ratio_min=self._config.free_ratio_min)

    def evict(self, wanted_bytes: int) -> int:
        """Remove the least recently used entries that together take `wanted_bytes`, and return the bytes removed."""
        freed_bytes = 0
        samples_count = 0  # since an entry was last removed
        while freed_bytes < wanted_bytes and self._directory.failures.writable():
            if not self._candidates:
                samples_count += 1
                if samples_count > 2 or not self._sample():
                    break  # no entry is left, or none can be removed
                continue
            gone = self._directory.remove_all(self._victims(wanted_bytes - freed_bytes))
            if gone:
                samples_count = 0
            self._counts.evicted_count += len(gone)
            freed_bytes += sum(allotted_bytes(size_bytes) for _, size_bytes in gone)
        self._counts.evicted_bytes += freed_bytes
        return freed_bytes

    def _victims(self, wanted_bytes: int) -> list[tuple[EntryName, int]]:
        """Take candidates that together take `wanted_bytes`, except those that were used or removed in the meantime."""
        found: list[tuple[EntryName, int]] = []
        while wanted_bytes > 0 and self._candidates:
            used_s, size_bytes, name = self._candidates.pop()
            try:
                now = os.stat(self._directory.entries + name.path)  # noqa: PTH116
            except OSError:
                continue  # another process removed it
            if now.st_mtime == used_s:
                found.append((name, size_bytes))
                wanted_bytes -= allotted_bytes(size_bytes)
        return found

    def _sample(self) -> bool:
        """Find new candidates, and return whether there are any."""
        found: list[tuple[float, int, EntryName]] = []
        for folder in random.sample(folders(), len(folders())):
            found += self._directory.scan(folder)
            if len(found) >= _SAMPLE_COUNT:
                break
        future_s = time.time() + _FUTURE_S
        found.sort(key=lambda entry: (entry[0] if entry[0] < future_s else 0.0, entry[2].file), reverse=True)
        self._candidates = found[-max(1, len(found) // _OLDEST) :] if found else []
        return bool(found)

    def _recount(self) -> None:
        """Scan one folder now and then, which corrects numbers that a killed process left wrong."""
        self._stored_since += 1
        if self._stored_since < self._recount_after:
            return
        self._stored_since = 0
        folder = next(self._folders, None)
        if folder is None:
            self._folders = iter(random.sample(folders(), len(folders())))
            folder = next(self._folders)
        self._recount_after = max(64, len(self._directory.scan(folder)))
