"""Making room: the least recently used entries go, found without scanning the tree.

Names are hashes, so any few folders are a fair sample of the whole cache. Whoever needs room scans some folders in random
order, until it has seen enough entries, keeps the oldest quarter of them as candidates, and removes from those as long as they
last; a candidate that was used meanwhile is passed over. Of 200 000 entries that is the scan of some 2 000 for every 500
that go: 5 ms. A small cache is sampled whole, which makes it exact. Where several processes notice at once, the one
that has the lease makes room beyond its own need; the others only what they need.
"""

from __future__ import annotations

import os
import random
import threading
import time
from typing import TYPE_CHECKING

from penstock import forks
from penstock.cache.entry import allotted_bytes
from penstock.cache.folder import folders

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.cache.config import CacheConfig
    from penstock.cache.entry import Name
    from penstock.cache.folder import Folder
    from penstock.cache.statistics import Counts

_SAMPLE_COUNT = 2048
_OLDEST = 4  # one in so many of a sample is a candidate
_SLACK = 128  # one part in so many of what there is is freed at once beyond the need
_LEASE = (1 << 60) - 1
_FUTURE_S = 86_400.0
"""An entry used later than in a day from now was marked by a clock that was wrong: it counts as the oldest."""


class Evictor:
    """Keeps a cache inside its limits. Safe from any thread.

    Args:
        files: The directory.
        config: The limits.
        counts: Told of what goes.
    """

    def __init__(self, files: Folder, config: CacheConfig, counts: Counts) -> None:
        self._files = files
        self._config = config
        self._counts = counts
        self._reset()
        forks.register(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._candidates: list[tuple[float, int, Name]] = []  # oldest last
        self._recount_after = 64
        self._stored_since = 0
        self._folders: Iterator[int] = iter(())

    def after_fork_in_child(self) -> None:
        """The lock may have been held."""
        self._reset()

    def room_bytes(self) -> int:
        """What may be added now; negative where the cache is over its limits."""
        free_bytes = self._files.free_bytes(self._config.free_ratio_min)
        return min(self._config.bytes_max - self._files.usage.total_bytes(), free_bytes)

    def reserve(self, sizes_bytes: Mapping[int, int]) -> bool:
        """Have room for entries that are about to be written, and count them; False where there is none to be made.

        Args:
            sizes_bytes: By folder.

        Cost: five system calls where there is room.

        Raises:
            OSError: the directory cannot be looked at.
        """
        self._recount()
        if not self._files.is_full and self._counted(sizes_bytes):
            return True
        with self._lock:
            self._files.count_unknown()  # where the file was lost
            if not self._files.is_full and self._counted(sizes_bytes):  # another thread may have made some meanwhile
                return True
            alone = self._files.leases.try_take(_LEASE)
            try:
                slack_bytes = self._files.usage.total_bytes() // _SLACK if alone else 0
                room_bytes = min(0, self.room_bytes()) if self._files.is_full else self.room_bytes()
                self._files.is_full = False
                self.evict(sum(sizes_bytes.values()) - room_bytes + slack_bytes)
            finally:
                if alone:
                    self._files.leases.release(_LEASE)
        return self._counted(sizes_bytes)

    def _counted(self, sizes_bytes: Mapping[int, int]) -> bool:
        return self._files.count(sizes_bytes, self._config.bytes_max, free_ratio_min=self._config.free_ratio_min)

    def evict(self, wanted_bytes: int) -> int:
        """Remove the least recently used entries that take `wanted_bytes` together; bytes that went."""
        freed_bytes = 0
        samples_count = 0  # since something was removed
        while freed_bytes < wanted_bytes and self._files.troubles.writable():
            if not self._candidates:
                samples_count += 1
                if samples_count > 2 or not self._sample():
                    break  # nothing is left, or nothing can be removed
                continue
            gone = self._files.remove_all(self._victims(wanted_bytes - freed_bytes))
            if gone:
                samples_count = 0
            self._counts.evicted_count += len(gone)
            freed_bytes += sum(allotted_bytes(size_bytes) for _, size_bytes in gone)
        self._counts.evicted_bytes += freed_bytes
        return freed_bytes

    def _victims(self, wanted_bytes: int) -> list[tuple[Name, int]]:
        """Candidates that take so much, as far as they last, without those that were used meanwhile or are gone."""
        found: list[tuple[Name, int]] = []
        while wanted_bytes > 0 and self._candidates:
            used_s, size_bytes, name = self._candidates.pop()
            try:
                now = os.stat(self._files.entries + name.path)  # noqa: PTH116
            except OSError:
                continue  # another process was faster
            if now.st_mtime == used_s:
                found.append((name, size_bytes))
                wanted_bytes -= allotted_bytes(size_bytes)
        return found

    def _sample(self) -> bool:
        """Find new candidates; whether there are any."""
        found: list[tuple[float, int, Name]] = []
        for folder in random.sample(folders(), len(folders())):
            found += self._files.scan(folder)
            if len(found) >= _SAMPLE_COUNT:
                break
        future_s = time.time() + _FUTURE_S
        found.sort(key=lambda entry: (entry[0] if entry[0] < future_s else 0.0, entry[2].file), reverse=True)
        self._candidates = found[-max(1, len(found) // _OLDEST) :] if found else []
        return bool(found)

    def _recount(self) -> None:
        """Scan a folder now and then, so that numbers that a killed process left wrong become right."""
        self._stored_since += 1
        if self._stored_since < self._recount_after:
            return
        self._stored_since = 0
        folder = next(self._folders, None)
        if folder is None:
            self._folders = iter(random.sample(folders(), len(folders())))
            folder = next(self._folders)
        self._recount_after = max(64, len(self._files.scan(folder)))
