"""Maintenance of a cache directory, for ``penstock cache``: survey, verify, trim and clear.

All functions work while processes use the cache: entries are complete or absent, and readers keep the files they have open.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cache.config import CacheConfig
from penstock.cache.directory import LAYOUT, TAG, TAG_NAME, CacheDirectory, folders
from penstock.cache.entry import (
    BLOCK,
    LISTING,
    MISSING,
    RESULT,
    STAT,
    SUFFIXES,
    EntryName,
    allotted_bytes,
    block_name,
    digest_of,
    entry_name,
)
from penstock.cache.statistics import Counts
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.cache.entry import EntryHeader

_LIMITLESS_BYTES = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSurvey:
    """The contents of a cache for one bucket or other store.

    Attributes:
        namespace: ``CacheConfig.namespace`` of the entries.
        endpoint: Endpoint of the store; ``aws`` for Amazon's, empty if the name is a URL.
        name: EntryName of the bucket, or URL of the store.
        objects_count: Number of versions of objects that have blocks in the cache.
        blocks_count: Number of these blocks.
        size_bytes: Disk space that the blocks take.
    """

    namespace: str
    endpoint: str
    name: str
    objects_count: int
    blocks_count: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The contents of a cache.

    Attributes:
        entries_count: Number of entries of all kinds.
        size_bytes: Disk space that the entries take.
        counts: Number of entries by kind: block, stat, missing, page, result; corrupt if the header is wrong.
        oldest_s: Seconds since the last use of the least recently used entry; 0 if there are no entries.
        free_bytes: Free space of the file system for this user.
        origins: Bytes and entries held of each bucket, the largest first.
    """

    entries_count: int
    size_bytes: int
    counts: dict[str, int]
    oldest_s: float
    free_bytes: int
    origins: list[BucketSurvey]


@dataclass(slots=True)
class _Tally:
    objects: set[bytes] = field(default_factory=set)
    blocks_count: int = 0
    size_bytes: int = 0


KINDS = {BLOCK: "block", STAT: "stat", MISSING: "missing", LISTING: "page", RESULT: "result"}


def open_directory(path: str | os.PathLike[str]) -> CacheDirectory:
    """Open an existing cache directory.

    Raises:
        ConfigError: `path` is not a cache directory.
    """
    config = CacheConfig(path, _LIMITLESS_BYTES, free_ratio_min=0.0)
    tag = Path(config.path) / TAG_NAME
    try:
        ours = tag.read_bytes() == TAG
    except OSError:
        ours = False
    if not ours:
        raise ConfigError(
            f"{config.path} is not a penstock cache", hint=f"the directory of a cache contains a file {TAG_NAME}"
        )
    directory = CacheDirectory(config, Counts())
    directory.prepare()
    return directory


def survey(path: str | os.PathLike[str], *, progress: Callable[[int, int], None] = lambda *_: None) -> Survey:
    """Read the header of every entry.

    Args:
        path: The cache directory.
        progress: Called with the number of entries and bytes read since the previous call.

    Raises:
        ConfigError: `path` is not a cache.

    Cost: four system calls for each entry, about 20 µs.
    """
    directory = open_directory(path)
    counts: Counter[str] = Counter()
    tallies: dict[tuple[str, ...], _Tally] = {}
    oldest_s, size_bytes = time.time(), 0
    for used_s, file_bytes, name in _all(directory):
        oldest_s = min(oldest_s, used_s)
        size_bytes += allotted_bytes(file_bytes)
        header = directory.read_header(name)
        counts["corrupt" if header is None else KINDS.get(header.kind, "unknown")] += 1
        if header is not None and header.kind == BLOCK:
            *where, _key, _etag, _block_bytes = header.identity.decode(errors="replace").split("\0")
            tally = tallies.setdefault(tuple(where), _Tally())
            tally.objects.add(name.file.partition(".")[0].encode())
            tally.blocks_count += 1
            tally.size_bytes += allotted_bytes(file_bytes)
        progress(1, file_bytes)
    status = os.statvfs(directory.top)
    return Survey(
        entries_count=sum(counts.values()),
        size_bytes=size_bytes,
        counts=dict(counts),
        oldest_s=max(0.0, time.time() - oldest_s) if counts else 0.0,
        free_bytes=status.f_bavail * status.f_frsize,
        origins=sorted(
            (
                BucketSurvey(
                    namespace=where[0],
                    endpoint=where[1],
                    name=where[2],
                    objects_count=len(tally.objects),
                    blocks_count=tally.blocks_count,
                    size_bytes=tally.size_bytes,
                )
                for where, tally in tallies.items()
            ),
            key=lambda bucket: -bucket.size_bytes,
        ),
    )


def verify(path: str | os.PathLike[str], *, progress: Callable[[int, int], None] = lambda *_: None) -> tuple[int, int]:
    """Read every entry, compare it with its checksums and its name, and remove it if it is corrupt.

    Args:
        path: The cache directory.
        progress: Called with the number of entries and bytes read since the previous call.

    Returns:
        The number of entries read, and the number of entries removed.

    Raises:
        ConfigError: `path` is not a cache.

    Cost: one read of everything.
    """
    directory = open_directory(path)
    counts = directory.counts
    entries_count = 0
    for _, file_bytes, name in _all(directory):
        found = directory.read_entry(name)
        if found is not None and not _is_named(name, found[0]):
            directory.remove(name, file_bytes)
            counts.corrupt_count += 1
        entries_count += 1
        progress(1, file_bytes)
    return entries_count, counts.corrupt_count


def trim(path: str | os.PathLike[str], bytes_max: int) -> tuple[int, int]:
    """Remove the least recently used entries until the others take at most `bytes_max`.

    Returns:
        The number of entries removed, and the disk space that they took in bytes.

    Raises:
        ConfigError: `path` is not a cache.

    Cost: one scan.
    """
    directory = open_directory(path)
    directory.remove_stale_temporaries()
    entries = sorted(_all(directory), key=lambda entry: entry[0])
    used_bytes = sum(allotted_bytes(file_bytes) for _, file_bytes, _ in entries)
    removed_count = removed_bytes = 0
    for _, file_bytes, name in entries:
        if used_bytes - removed_bytes <= bytes_max:
            break
        if directory.remove(name, file_bytes):
            removed_count += 1
            removed_bytes += allotted_bytes(file_bytes)
    return removed_count, removed_bytes


def clear(path: str | os.PathLike[str]) -> int:
    """Remove all entries of a cache, and the folders of other layouts. Files that do not belong to the cache remain.

    Returns:
        The disk space that the entries took in bytes.

    Raises:
        ConfigError: `path` is not a cache.
    """
    directory = open_directory(path)
    removed_bytes = 0
    for _, file_bytes, name in _all(directory):
        removed_bytes += allotted_bytes(file_bytes) * directory.remove(name, file_bytes)
    directory.remove_stale_temporaries()
    for folder in Path(directory.top).glob("v[0-9]*"):
        if folder.name != LAYOUT and (folder / "entries").is_dir():
            shutil.rmtree(folder, ignore_errors=True)
    return removed_bytes


def _all(directory: CacheDirectory) -> Iterator[tuple[float, int, EntryName]]:
    for folder in folders():
        yield from directory.scan(folder)


def _is_named(name: EntryName, header: EntryHeader) -> bool:
    """Whether the name of an entry is the one that its header implies."""
    if header.kind == BLOCK:
        return block_name(digest_of(header.identity), header.block_index) == name
    return header.kind in SUFFIXES and entry_name(header.kind, header.identity) == name
