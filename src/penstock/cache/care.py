"""Looking after a cache directory: what is in it, is it whole, make it smaller, empty it. For the command line and for tests.

All of it works beside processes that use the cache: entries are whole or absent, and readers keep their open files.
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
from penstock.cache.entry import (
    BLOCK,
    FIXED_BYTES,
    SUFFIXES,
    CorruptEntryError,
    Name,
    allotted_bytes,
    block_name,
    decode,
    digest_of,
    entry_name,
)
from penstock.cache.files import Files
from penstock.cache.folder import LAYOUT, TAG, TAG_NAME, folders
from penstock.cache.statistics import Counts
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.cache.entry import Header


_LIMITLESS_BYTES = 1 << 62
_HEADER_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What one bucket, or other store, has in a cache.

    Attributes:
        namespace: See ``CacheConfig``.
        endpoint: Of the store; ``aws`` for Amazon's, empty where the name says it all.
        name: Of the bucket, or the store's URL.
        objects_count: Versions of objects of which there are blocks.
        blocks_count: Blocks.
        size_bytes: That they take on the disk.
    """

    namespace: str
    endpoint: str
    name: str
    objects_count: int
    blocks_count: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What is in a cache.

    Attributes:
        entries_count: Of all kinds.
        size_bytes: That they take on the disk.
        counts: By kind: block, stat, missing, page; corrupt headers.
        oldest_s: Seconds since the least recently used entry was used; 0 without entries.
        free_bytes: Of the file system, for this user.
        origins: By bucket, the largest first.
    """

    entries_count: int
    size_bytes: int
    counts: dict[str, int]
    oldest_s: float
    free_bytes: int
    origins: list[Origin]


@dataclass(slots=True)
class _Tally:
    objects: set[bytes] = field(default_factory=set)
    blocks_count: int = 0
    size_bytes: int = 0


KINDS = {1: "block", 2: "stat", 3: "missing", 4: "page"}


def opened(path: str | os.PathLike[str]) -> Files:
    """The entries of a cache directory that there is.

    Raises:
        ConfigError: there is none.
    """
    config = CacheConfig(path, _LIMITLESS_BYTES, free_ratio_min=0.0)
    tag = Path(config.path) / TAG_NAME
    try:
        ours = tag.read_bytes() == TAG
    except OSError:
        ours = False
    if not ours:
        raise ConfigError(
            f"{config.path} is not a penstock cache", hint=f"the directory of cache=PATH:SIZE has a {TAG_NAME}"
        )
    files = Files(config, Counts())
    files.prepare()
    return files


def survey(path: str | os.PathLike[str], *, progress: Callable[[int, int], None] = lambda *_: None) -> Survey:
    """Look at every entry's header. Cost: three system calls for each, about 20 µs.

    Raises:
        ConfigError: there is no cache at `path`.
    """
    files = opened(path)
    counts: Counter[str] = Counter()
    tallies: dict[tuple[str, ...], _Tally] = {}
    oldest_s, size_bytes = time.time(), 0
    for used_s, file_bytes, name in _all(files):
        oldest_s = min(oldest_s, used_s)
        size_bytes += allotted_bytes(file_bytes)
        header = _header(files, name)
        counts["corrupt" if header is None else KINDS.get(header.kind, "unknown")] += 1
        if header is not None and header.kind == BLOCK:
            *where, _key, _etag, _block_bytes = header.identity.decode(errors="replace").split("\0")
            tally = tallies.setdefault(tuple(where), _Tally())
            tally.objects.add(name.file.partition(".")[0].encode())
            tally.blocks_count += 1
            tally.size_bytes += allotted_bytes(file_bytes)
        progress(1, file_bytes)
    status = os.statvfs(files.top)
    return Survey(
        entries_count=sum(counts.values()),
        size_bytes=size_bytes,
        counts=dict(counts),
        oldest_s=max(0.0, time.time() - oldest_s) if counts else 0.0,
        free_bytes=status.f_bavail * status.f_frsize,
        origins=sorted(
            (
                Origin(
                    namespace=where[0],
                    endpoint=where[1],
                    name=where[2],
                    objects_count=len(tally.objects),
                    blocks_count=tally.blocks_count,
                    size_bytes=tally.size_bytes,
                )
                for where, tally in tallies.items()
            ),
            key=lambda origin: -origin.size_bytes,
        ),
    )


def verify(path: str | os.PathLike[str], *, progress: Callable[[int, int], None] = lambda *_: None) -> tuple[int, int]:
    """Read every entry, hold it against its checksums and name, remove what is corrupt: (looked at, removed).

    Raises:
        ConfigError: there is no cache at `path`.

    Cost: reads everything.
    """
    files = opened(path)
    counts = files.counts
    entries_count = 0
    for _, file_bytes, name in _all(files):
        found = files.read_entry(name)
        if found is not None and not _is_named(name, found[0]):
            files.remove(name, file_bytes)
            counts.corrupt_count += 1
        entries_count += 1
        progress(1, file_bytes)
    return entries_count, counts.corrupt_count


def trim(path: str | os.PathLike[str], bytes_max: int) -> tuple[int, int]:
    """Remove the least recently used entries until the rest takes `bytes_max`: (entries removed, bytes they took).

    Raises:
        ConfigError: there is no cache at `path`.

    Cost: one scan.
    """
    files = opened(path)
    files.remove_stale_temporaries()
    entries = sorted(_all(files), key=lambda entry: entry[0])
    used_bytes = sum(allotted_bytes(file_bytes) for _, file_bytes, _ in entries)
    removed_count = removed_bytes = 0
    for _, file_bytes, name in entries:
        if used_bytes - removed_bytes <= bytes_max:
            break
        if files.remove(name, file_bytes):
            removed_count += 1
            removed_bytes += allotted_bytes(file_bytes)
    return removed_count, removed_bytes


def clear(path: str | os.PathLike[str], *, every_layout: bool = True) -> int:
    """Remove everything that is a cache's below `path`, other layouts' too; what else is there stays. Bytes removed.

    Raises:
        ConfigError: there is no cache at `path`.
    """
    files = opened(path)
    removed_bytes = 0
    for _, file_bytes, name in _all(files):
        removed_bytes += allotted_bytes(file_bytes) * files.remove(name, file_bytes)
    files.remove_stale_temporaries()
    if every_layout:
        for folder in Path(files.top).glob("v[0-9]*"):
            if folder.name != LAYOUT and (folder / "entries").is_dir():
                shutil.rmtree(folder, ignore_errors=True)
    return removed_bytes


def _all(files: Files) -> Iterator[tuple[float, int, Name]]:
    for folder in folders():
        yield from files.scan(folder)


def _header(files: Files, name: Name) -> Header | None:
    try:
        fd = os.open(files.entries + name.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        raw = os.pread(fd, _HEADER_BYTES_MAX, 0)
        return decode(raw) if len(raw) >= FIXED_BYTES else None
    except (OSError, CorruptEntryError):
        return None
    finally:
        os.close(fd)


def _is_named(name: Name, header: Header) -> bool:
    """Whether an entry lies where its header says that it belongs."""
    if header.kind == BLOCK:
        return block_name(digest_of(header.identity), header.block_index) == name
    return header.kind in SUFFIXES and entry_name(header.kind, header.identity) == name
