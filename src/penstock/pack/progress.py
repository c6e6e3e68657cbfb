"""Progress of a packing, reported to a listener, and the result of a packing."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from penstock.index import ShardRow

SAMPLES_PER_REPORT = 64
"""Samples between two reports of progress: a call under a lock for each sample would cost as much as a tar header."""

BYTES_PER_REPORT = 8 * 10**6
"""Bytes between two reports of progress, for large samples."""


class PackListener(Protocol):
    """Receives the progress of a packing. Calls come from several threads, but never two at a time."""

    def planned(self, shards_count: int, samples_count: int, source_bytes: int) -> None:
        """This much is left to do. All three are 0 for an iterable, whose size is unknown."""

    def progressed(self, samples_count: int, source_bytes: int) -> None:
        """This many more samples, read from this many bytes, were taken."""

    def finished(self, row: ShardRow, *, known: bool) -> None:
        """A shard and its index are stored; if `known`, an earlier run wrote them."""

    def verified(self, row: ShardRow) -> None:
        """A shard was read back and equals what was written."""


class NullListener:
    """A listener that does nothing."""

    def planned(self, shards_count: int, samples_count: int, source_bytes: int) -> None:
        """Do nothing."""

    def progressed(self, samples_count: int, source_bytes: int) -> None:
        """Do nothing."""

    def finished(self, row: ShardRow, *, known: bool) -> None:
        """Do nothing."""

    def verified(self, row: ShardRow) -> None:
        """Do nothing."""


class LockedListener:
    """A listener that passes every call on to another one under a lock."""

    def __init__(self, inner: PackListener) -> None:
        self._inner = inner
        self._lock = threading.Lock()

    def planned(self, shards_count: int, samples_count: int, source_bytes: int) -> None:
        """Pass the call on."""
        with self._lock:
            self._inner.planned(shards_count, samples_count, source_bytes)

    def progressed(self, samples_count: int, source_bytes: int) -> None:
        """Pass the call on."""
        with self._lock:
            self._inner.progressed(samples_count, source_bytes)

    def finished(self, row: ShardRow, *, known: bool) -> None:
        """Pass the call on."""
        with self._lock:
            self._inner.finished(row, known=known)

    def verified(self, row: ShardRow) -> None:
        """Pass the call on."""
        with self._lock:
            self._inner.verified(row)


class Packed(NamedTuple):
    """The result of a packing.

    Attributes:
        url: URL of the folder that holds the shards.
        rows: Rows of the index, one per shard, in the order of the plan.
        shards_written: Number of shards that this run wrote; an earlier run wrote the others.
        passed_over: Number of files of the source that belong to no sample.
    """

    url: str
    rows: tuple[ShardRow, ...]
    shards_written: int
    passed_over: int

    @property
    def samples_count(self) -> int:
        """Number of samples in all shards."""
        return sum(row.samples_count for row in self.rows)

    @property
    def size_bytes(self) -> int:
        """Size of all shards in bytes."""
        return sum(row.size_bytes for row in self.rows)
