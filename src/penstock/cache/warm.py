"""Fills a cache before a job needs it, and records the ranges that a job reads, to fill the cache of another node."""

from __future__ import annotations

import json
import os
import threading
from typing import TYPE_CHECKING, NamedTuple

from penstock.cache.statistics import CacheStatistics
from penstock.errors import ConfigError
from penstock.system import forks
from penstock.system.private import open_private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.cache.statistics import DiskFailures
    from penstock.fetch import Request
    from penstock.store.base import Store
    from penstock.types import ByteRange, Key

_LINES_MAX = 256


class Warmed(NamedTuple):
    """The result of ``warm``.

    Attributes:
        requests_count: Number of objects or ranges read.
        size_bytes: Bytes of these objects or ranges.
        fetched_bytes: Bytes among these that the store had to deliver; the cache had the rest.
        refused_count: Number of blocks that could not be kept because of the limit or the disk.
        evicted_bytes: Lower bound of the bytes that were evicted again, because the cache is too small for them.
    """

    requests_count: int
    size_bytes: int
    fetched_bytes: int
    refused_count: int
    evicted_bytes: int


def warm(
    store: Store, requests: Iterable[Request], *, progress: Callable[[int, int], None] = lambda *_: None
) -> Warmed:
    """Read requests through a cached store and drop the bytes. Blocks that the cache has already are verified.

    Args:
        store: A store from ``connect(..., cache=...)``.
        requests: Keys, (key, ByteRange) pairs, or ``PlanItem`` objects.
        progress: Called with the numbers of requests and bytes that have arrived since the previous call.

    Raises:
        ConfigError: The store has no cache.
        StoreError: The store failed; blocks that were read before remain in the cache.

    Cost: the same requests as reading: one for each part that is missing.
    """
    before = store.statistics()
    if not isinstance(before, CacheStatistics):
        raise ConfigError("there is nothing to warm: the store has no cache", hint="connect(url, cache='PATH:SIZE')")
    requests_count = size_bytes = 0
    for chunk in store.read_parts(requests):
        requests_count += chunk.last
        size_bytes += len(chunk.data)
        progress(chunk.last, len(chunk.data))
    after = store.statistics()
    return Warmed(
        requests_count,
        size_bytes,
        fetched_bytes=after.fetched_bytes - before.fetched_bytes,
        refused_count=after.refused_count - before.refused_count,
        evicted_bytes=max(0, size_bytes - after.used_bytes) if after.evicted_bytes > before.evicted_bytes else 0,
    )


class Recorder:
    """Appends a line ``{"key": ..., "start": ..., "end": ...}`` to a file for each read. Several processes may share the file.

    ``penstock cache warm --accesses`` reads it.

    Args:
        path: Path of the file, which is created if it does not exist.
        failures: Counts failures to write the file, which do not fail the reads.
    """

    def __init__(self, path: str, failures: DiskFailures) -> None:
        self._path = path
        self._failures = failures
        self._reset()
        forks.register(self)

    def _reset(self) -> None:
        self._lines: list[str] = []
        self._lock = threading.Lock()

    def after_fork_in_child(self) -> None:
        """Forget the lines, which the parent writes."""
        self._reset()

    def note(self, key: Key, span: ByteRange | None) -> None:
        """Record one read. Cost: 2 µs, and one write for every 256 reads."""
        row: dict[str, object] = {"key": key}
        if span is not None:
            row["start"], row["end"] = span
        line = json.dumps(row) + "\n"
        with self._lock:
            self._lines.append(line)
            full = len(self._lines) >= _LINES_MAX
        if full:
            self.flush()

    def flush(self) -> None:
        """Write the recorded lines with one call, so that lines of several processes do not mix."""
        with self._lock:
            lines, self._lines = self._lines, []
        if not lines:
            return
        try:
            fd = open_private(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                os.write(fd, "".join(lines).encode())
            finally:
                os.close(fd)
        except OSError as error:
            self._failures.note("record", error)
