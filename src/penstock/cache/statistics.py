"""What a cache did in this process, and how full it is."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStatistics:
    """Counts of this process since the store was made; ``used_bytes`` is the whole directory's.

    Attributes:
        hit_bytes: Read from the disk.
        hit_count: Blocks read from the disk.
        miss_count: Blocks that were not there and were fetched here.
        fetched_bytes: Asked of the store to fill what was missing. Far above the bytes delivered: reads are much smaller than
            ``block_bytes``.
        stored_bytes: Written to the disk, headers included.
        stored_count: Blocks written.
        refused_count: Blocks not written: the disk, or the limit, had no room or the directory cannot be written.
        shared_count: Blocks that another read of this process was fetching already.
        waited_count: Blocks that another process was fetching.
        wait_expired_count: Of those, fetched here as well because the other took longer than ``wait_s_max``.
        verified_count: Blocks held against their checksum: once each, at their first read here.
        corrupt_count: Blocks that were not what they should be; removed and fetched again.
        uncacheable_count: Reads of objects without an ETag, or with a weak one: they are never kept.
        evicted_count: Entries removed by this process to stay inside the limits.
        evicted_bytes: What they took.
        metadata_hit_count: Listings, stats and misses answered without a request.
        used_bytes: What all entries take now, as far as counted.
        bytes_max: The limit.
        troubles: Failures of the disk by what and why: ``{"write ENOSPC": 3}``. Empty when all is well.
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
    """The numbers behind ``CacheStatistics``. Threads add without a lock: lossy only under contention."""

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
        """All of them by name."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}
