"""Statistics of a cache in this process, and its failures of the disk.

A failure of the disk never fails a read. It is counted, and the first of each kind is logged as a warning.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger("penstock.cache")

PAUSE_S = 5.0
"""Seconds without writes after a failed one, so that a full disk is tried again, but not with every block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStatistics:
    """Counts of this process since the store was created; only ``used_bytes`` counts the whole directory.

    Attributes:
        hit_bytes: Bytes read from the disk.
        hit_count: Blocks read from the disk.
        miss_count: Blocks that were missing and that this process fetched.
        fetched_bytes: Bytes requested from the store for missing blocks. If it is far above the bytes delivered, reads
            are much smaller than ``block_bytes``.
        stored_bytes: Bytes written to the disk, including headers.
        stored_count: Blocks written to the disk.
        refused_count: Blocks not written, because the limit or the disk left no room or the directory is not writable.
        shared_count: Blocks that another read of this process was already fetching.
        waited_count: Blocks that another process was fetching.
        wait_expired_count: Blocks among these that this process fetched as well, because the other process took longer than
            ``wait_s_max``.
        verified_count: Blocks compared with their checksums, once each, at the first read in this process.
        corrupt_count: Blocks that did not match their checksums, and were removed and fetched again.
        uncacheable_count: Reads of objects that have no ETag or a weak one, and are never kept.
        evicted_count: Entries that this process removed to stay within the limits.
        evicted_bytes: Disk space that these entries took.
        metadata_hit_count: Listings, stats and misses answered without a request.
        used_bytes: Disk space that all entries counted so far take now.
        bytes_max: The limit.
        troubles: Number of failures of the disk by operation and error, e.g. ``{"write ENOSPC": 3}``; normally empty.
        inner: Statistics of the store inside.
    """

    hit_bytes: int
    hit_count: int
    miss_count: int
    fetched_bytes: int
    stored_bytes: int
    stored_count: int
    refused_count: int
    shared_count: int
    waited_count: int
    wait_expired_count: int
    verified_count: int
    corrupt_count: int
    uncacheable_count: int
    evicted_count: int
    evicted_bytes: int
    metadata_hit_count: int
    used_bytes: int
    bytes_max: int
    troubles: Mapping[str, int]
    inner: Any


@dataclass(slots=True)
class Counts:
    """The counters behind ``CacheStatistics``. Threads add without a lock, so contention may lose a few counts."""

    hit_bytes: int = 0
    hit_count: int = 0
    miss_count: int = 0
    fetched_bytes: int = 0
    stored_bytes: int = 0
    stored_count: int = 0
    refused_count: int = 0
    shared_count: int = 0
    waited_count: int = 0
    wait_expired_count: int = 0
    verified_count: int = 0
    corrupt_count: int = 0
    uncacheable_count: int = 0
    evicted_count: int = 0
    evicted_bytes: int = 0
    metadata_hit_count: int = 0

    def values(self) -> dict[str, int]:
        """Return all counters by name."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}


class DiskFailures:
    """Counts failures of the disk, logs the first of each kind, and pauses writing after a failed write.

    All threads may use it.

    Args:
        path: The cache's directory, for messages.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._counts: Counter[str] = Counter()
        self._has_warned_of_space = False
        self._paused_until_s = 0.0
        self._lock = threading.Lock()

    def after_fork_in_child(self) -> None:
        """Replace the lock, which another thread of the parent may have held."""
        self._lock = threading.Lock()

    def note(self, what: str, error: Exception) -> None:
        """Count a failed operation, and log a warning if it is the first of its kind.

        Args:
            what: The operation: ``"write"``, ``"read"``, ``"lock"``, ``"record"`` or ``"evict"``.
            error: Why it failed.
        """
        number = getattr(error, "errno", None)
        kind = errno.errorcode.get(number, str(number)) if number is not None else type(error).__name__
        # A directory that was removed is created again at once. A disk that became read-only also refuses to evict.
        if (what == "write" and number != errno.ENOENT) or (what == "evict" and number == errno.EROFS):
            self._paused_until_s = time.monotonic() + PAUSE_S
        reason = getattr(error, "strerror", None) or str(error)
        self._count(f"{what} {kind}", f"{what} failed: {reason}; {_CONSEQUENCES.get(what, '')}")

    def warn_of_space(self, free_ratio_min: float) -> None:
        """Log a warning, once, that nothing is kept because the disk is nearly full, which is not a failure.

        Args:
            free_ratio_min: Share of the file system that must remain free.
        """
        with self._lock:
            is_first, self._has_warned_of_space = not self._has_warned_of_space, True
        if is_first:
            log.warning(
                "cache: %g%% of %s's disk must remain free, and less is: what is read is not kept (logged once). Free "
                "some space, or allow less, e.g. %s:10GB,free_ratio_min=0.01",
                100 * free_ratio_min,
                self._path,
                self._path,
            )

    def note_corrupt(self, text: str) -> None:
        """Count a corrupt entry, and log `text` as a warning if it is the first."""
        self._count("corrupt", text)

    def _count(self, kind: str, text: str) -> None:
        with self._lock:
            self._counts[kind] += 1
            is_first = self._counts[kind] == 1
        if is_first:
            log.warning("cache %s: %s (logged once)", self._path, text)

    def writable(self) -> bool:
        """Whether a write is worth trying now."""
        return time.monotonic() >= self._paused_until_s

    def counts(self) -> Mapping[str, int]:
        """Return the number of failures by operation and error: ``{"write ENOSPC": 12}``."""
        with self._lock:
            return dict(self._counts)


_CONSEQUENCES = {
    "write": "what is read is not kept, and the job continues",
    "read": "the block is fetched from the store",
    "lock": "several processes may fetch the same block",
    "record": "reads are not recorded",
    "evict": "the cache may grow beyond its limit",
}
