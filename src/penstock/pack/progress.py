"""How a packing goes, told to whoever asks: from any of its threads, one at a time."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from penstock.index import ShardRow

SAMPLES_PER_WORD = 64
"""Samples that pass before a listener hears of them: a call under a lock each would cost as much as a header."""

BYTES_PER_WORD = 8 * 10**6
"""The same in bytes, for large samples."""


class Listener(Protocol):
    """Hears how a packing goes. Calls come from several threads, never two at a time."""

    def planned(self, shards_count: int, samples_count: int, source_bytes: int) -> None:
        """So much is left to do; of an iterable nobody knows, and all are 0."""

    def progressed(self, samples_count: int, source_bytes: int) -> None:
        """So many more samples, of so many bytes, were taken."""

    def finished(self, row: ShardRow, *, known: bool) -> None:
        """A shard is there with its index; `known`: an earlier run wrote it."""

    def verified(self, row: ShardRow) -> None:
        """A shard was read back and is what was written."""


class Silence:
    """A listener that does nothing."""

    def planned(self, shards_count: int, samples_count: int, source_bytes: int) -> None:
        """See ``Listener``."""

    def progressed(self, samples_count: int, source_bytes: int) -> None:
        """See ``Listener``."""

    def finished(self, row: ShardRow, *, known: bool) -> None:
        """See ``Listener``."""

    def verified(self, row: ShardRow) -> None:
        """See ``Listener``."""


class OneAtATime:
    """A listener that passes on to another, under a lock."""

    def __init__(self, inner: Listener) -> None:
        self._inner = inner
        self._lock = threading.Lock()

    def planned(self, shards_count: int, samples_count: int, source_bytes: int) -> None:
        """See ``Listener``."""
        with self._lock:
            self._inner.planned(shards_count, samples_count, source_bytes)

    def progressed(self, samples_count: int, source_bytes: int) -> None:
        """See ``Listener``."""
        with self._lock:
            self._inner.progressed(samples_count, source_bytes)

    def finished(self, row: ShardRow, *, known: bool) -> None:
        """See ``Listener``."""
        with self._lock:
            self._inner.finished(row, known=known)

    def verified(self, row: ShardRow) -> None:
        """See ``Listener``."""
        with self._lock:
            self._inner.verified(row)


class Packed(NamedTuple):
    """What a packing made.

    Attributes:
        url: Of the folder that holds the shards.
        rows: Of the index, one per shard, in the order of the plan.
        shards_written: Of these, by this run; an earlier one wrote the others.
        passed_over: Files of the source that belong to no sample.
    """

    url: str
    rows: tuple[ShardRow, ...]
    shards_written: int
    passed_over: int

    @property
    def samples_count(self) -> int:
        """In all shards."""
        return sum(row.samples_count for row in self.rows)

    @property
    def size_bytes(self) -> int:
        """Of all shards."""
        return sum(row.size_bytes for row in self.rows)
