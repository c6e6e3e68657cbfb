"""Recording an index as a by-product of a pass over a shard, and storing the indexes of finished shards.

A checksum covers an extent, whose end is known only when its sample is complete, perhaps in a later chunk: a sample of a
tar ends where another key begins. Therefore the last bytes of each chunk are copied and kept, so that no chunk stays in
memory, and the checksum already covers the bytes before them. If the end of a sample is known only more than
``TAIL_BYTES`` after it (because a large member that belongs to no sample follows), its shard gets offsets, but no checksums.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np

from penstock.checksums.crc32c import crc32c
from penstock.errors import ChecksumError, ConfigError
from penstock.formats import FORMATS
from penstock.index.shard_index import ShardIndex, ShardRow, members_of
from penstock.types import lasting_etag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.formats import Sample
    from penstock.index.dataset_index import DatasetIndex
    from penstock.index.place import IndexPlace, VersionedShard
    from penstock.types import Buffer

TAIL_BYTES = 64 * 1024
"""Bytes kept of each chunk: more than the headers that a parser may read before it knows that a sample is complete."""

WRITERS_MAX = 4
"""Threads that write shards' indexes: about 130 shards per second if a write takes 30 ms."""

WRITES_MAX = 16
"""Indexes of shards, of about 100 KB each, that may wait to be written; a killed build has to make them again."""


class IndexedVersion(Protocol):
    """One version of a shard, as its row names it; a ``VersionedShard`` is one."""

    @property
    def key(self) -> str:
        """Key relative to the data set's base URL."""

    @property
    def size_bytes(self) -> int:
        """Size of the shard in bytes."""

    @property
    def etag(self) -> str:
        """ETag of the version."""


class ShardRecorder:
    """Takes one shard's bytes and samples, from its first byte to its last, and makes its ``ShardIndex``.

    Args:
        shard: The shard and its version.
        format_name: Name of its format, as detected from its first bytes.

    Cost: 64 KiB, and 16 bytes and the key of each sample; about 1 µs per sample and 55 µs per MB.
    """

    def __init__(self, shard: IndexedVersion, format_name: str) -> None:
        self._shard = shard
        self._format = format_name
        self._has_offsets = FORMATS[format_name].unit == "sample"
        self._in_head = FORMATS[format_name].head is not None  # no sample has come yet, and the head belongs to none
        self._offset = 0  # offset in the shard of the byte after the last chunk
        self._tail = b""  # bytes before it that the checksum does not cover yet
        self._first = 0  # start of the first extent
        self._crc = 0  # checksum of the current extent so far
        self._has_crc = self._has_offsets
        self._ends: list[int] = []  # ends of the extents
        self._crcs: list[int] = []
        self._keys: list[str] = []
        self._fields: tuple[str, ...] | None = None  # field names that all samples so far share; () if they differ
        self._values: list[list[int]] = []  # sizes of each sample's values
        self._sizes: list[int] = []  # size of each sample

    def feed(self, data: Buffer, samples: Sequence[Sample]) -> None:
        """Take the next bytes of the shard, and the samples that they completed."""
        self._keys += [sample.key for sample in samples]
        if not self._has_offsets:
            return
        if self._format == "tar" and samples:
            self._note_members(samples)
        view = memoryview(data)
        at = 0  # offset in the view of the first byte that no checksum covers
        offset, ends, crcs = self._offset, self._ends, self._crcs
        for sample in samples:
            if sample.size_bytes is None:
                self._has_offsets = self._has_crc = False
                return
            if self._in_head:
                at = self._drop_head(sample.offset_bytes)
            end = sample.offset_bytes + sample.size_bytes
            ends.append(end)
            end -= offset
            if end <= 0:
                crcs.append(self._cut_tail(len(self._tail) + end))
                continue
            if self._tail:
                self._crc = crc32c(self._tail, self._crc)
                self._tail = b""
            crcs.append(crc32c(view[at:end], self._crc))
            self._crc = 0
            at = end
        self._keep_tail(view[at:])
        self._offset += len(view)

    def finish(self, samples: Sequence[Sample] = (), *, decided: str | None = None) -> ShardIndex:
        """Return the index of the shard after its last byte.

        Args:
            samples: Samples that its end completed.
            decided: The parser's ``decided_format``.

        Raises:
            ConfigError: Not all bytes of the shard were fed.
        """
        self.feed(b"", samples)
        if self._has_offsets and self._offset != self._shard.size_bytes:
            raise ConfigError(
                f"{self._offset} of {self._shard.size_bytes} bytes of {self._shard.key} were recorded",
                hint="feed the whole shard to the recorder, or discard the recorder",
            )
        shard = self._shard
        name = decided or self._format
        etag = lasting_etag(shard.etag) or ""
        row = ShardRow(shard.key, shard.size_bytes, etag, len(self._keys), name, self._has_offsets)
        offsets = np.array([self._first, *self._ends], np.int64) if self._has_offsets else None
        crcs = np.array(self._crcs, np.uint32) if self._has_crc else None
        members = members_of(self._fields, self._values, self._sizes) if self._fields else None
        return ShardIndex(row, offsets=offsets, crc32c=crcs, keys=self._keys, members=members)

    def _note_members(self, samples: Sequence[Sample]) -> None:
        if self._fields is None:
            self._fields = tuple(samples[0].fields)
        fields = list(self._fields)
        for sample in samples:
            if list(sample.fields) != fields:
                self._fields = ()
                return
            self._values.append([len(value) for value in sample.fields.values()])
            self._sizes.append(sample.size_bytes or 0)

    def _drop_head(self, first: int) -> int:
        """Start the first extent at `first`; return its offset in the chunk, or 0 if it lies before."""
        self._in_head = False
        self._first = first
        tail_start = self._offset - len(self._tail)
        self._tail = self._tail[max(0, first - tail_start) :]
        return max(0, first - self._offset)

    def _cut_tail(self, length: int) -> int:
        """Return the checksum of the extent that ends after `length` bytes of the tail; the rest begins the next extent."""
        if length < 0:
            self._has_crc = False
            return 0
        crc: int = crc32c(self._tail[:length], self._crc)
        self._tail, self._crc = self._tail[length:], 0
        return crc

    def _keep_tail(self, rest: memoryview) -> None:
        if self._in_head:
            self._tail += bytes(rest)  # until the first sample shows where the head ends
            return
        if len(rest) >= TAIL_BYTES:
            self._crc = crc32c(self._tail, self._crc)
            self._crc = crc32c(rest[:-TAIL_BYTES], self._crc)
            self._tail = bytes(rest[-TAIL_BYTES:])
            return
        self._tail += bytes(rest)
        if (over := len(self._tail) - TAIL_BYTES) > 0:
            self._crc = crc32c(self._tail[:over], self._crc)
            self._tail = self._tail[over:]


class Verifier:
    """Compares one range of a shard, which is fed in order, with the checksums in the shard's index.

    Args:
        index: Index of the shard; without checksums, nothing is compared.
        first_sample: Number of the sample with whose extent the range begins.
        url: URL of the shard, for errors.
    """

    def __init__(self, index: ShardIndex, *, first_sample: int, url: str) -> None:
        self._sizes = index.sizes if index.crc32c is not None else None
        self._crcs = index.crc32c
        self._offsets = index.offsets
        self._sample = first_sample
        self._url = url
        self._crc = 0
        self._left_bytes = int(self._sizes[first_sample]) if self._sizes is not None and len(index) else 0

    def feed(self, data: Buffer) -> None:
        """Take the next bytes of the range.

        Raises:
            ChecksumError: An extent that ends in them differs from the index.
        """
        if self._sizes is None or self._crcs is None:
            return
        view, at = memoryview(data), 0
        while at < len(view) and self._sample < len(self._sizes):
            piece = view[at : at + self._left_bytes]
            self._crc = crc32c(piece, self._crc)
            at += len(piece)
            self._left_bytes -= len(piece)
            if self._left_bytes == 0:
                self._end_extent(int(self._crcs[self._sample]))

    def _end_extent(self, expected: int) -> None:
        assert self._offsets is not None and self._sizes is not None  # noqa: PT018 - see feed
        if self._crc != expected:
            span = (int(self._offsets[self._sample]), int(self._offsets[self._sample + 1]))
            raise ChecksumError(
                f"sample {self._sample} of the shard has CRC32C {self._crc:08x}, but its index says {expected:08x}",
                hint="the bytes changed since it was indexed, but its ETag did not; penstock index --again reads it again",
                operation="GET",
                url=self._url,
                span=span,
            )
        self._crc = 0
        self._sample += 1
        if self._sample < len(self._sizes):
            self._left_bytes = int(self._sizes[self._sample])


class IndexBuilder:
    """Collects the indexes of finished shards and writes them in the background.

    A context manager. It makes an index as a by-product of a first pass like this::

        with IndexBuilder(place) as builder:
            ...
            recorder = ShardRecorder(shard, "tar")
            ...                                    # for each chunk: recorder.feed(chunk.data, parser.feed(chunk.data))
            builder.add(recorder.finish(parser.finish()))

    Args:
        place: Place of the index.
        index: The data set's index so far; None loads the one that is stored.

    Cost: up to four threads while it is open; one write per shard, and one of the data set's index at the end.
    """

    def __init__(self, place: IndexPlace, *, index: DatasetIndex | None = None) -> None:
        self.place = place
        self.index = index if index is not None else place.load_saved()  # rows of passes have no keys and checksums
        self._pool = ThreadPoolExecutor(WRITERS_MAX, thread_name_prefix="penstock-index")
        self._writes: list[Future[None]] = []
        self._changed = False
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def has(self, shard: VersionedShard) -> bool:
        """Return whether this version of the shard is indexed."""
        return self.index.row_of(shard.key, size_bytes=shard.size_bytes, etag=shard.etag) is not None

    def add(self, index: ShardIndex) -> None:
        """Add the index of a finished shard, which is written in the background.

        Raises:
            StoreError: An earlier index could not be written.
        """
        while len(self._writes) >= WRITES_MAX or (self._writes and self._writes[0].done()):
            self._writes.pop(0).result()
        self._writes.append(self._pool.submit(self.place.save_shard, index))
        self.add_row(index.row)

    def add_row(self, row: ShardRow) -> None:
        """Add the row of a shard whose index is stored already."""
        self.index.add(row)
        self._changed = True

    def close(self) -> None:
        """Write the remaining indexes and the data set's index; idempotent.

        Raises:
            StoreError: Something could not be written.
        """
        if self._closed:
            return
        self._closed = True
        try:
            while self._writes:
                self._writes.pop(0).result()
            if self._changed:
                self.place.save(self.index)
        finally:
            self._pool.shutdown()
