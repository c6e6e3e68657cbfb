"""Recording: the index as a by-product of a pass over a shard, and the builder that keeps what is finished.

A checksum covers an extent, whose end is known only once its sample is complete, perhaps in a later chunk: a tar's
sample ends where another key begins. So the last bytes of each chunk are kept (copied: no chunk is pinned), and what
lies before them is summed up already. A sample whose end is said later than ``TAIL_BYTES`` after it (a large member
that belongs to no sample follows it) costs its shard the checksums, not the offsets.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

import numpy as np

from penstock.crc import crc32c
from penstock.errors import ChecksumError, ConfigError
from penstock.formats import FORMATS
from penstock.index.members import members_of
from penstock.index.shard_index import ShardIndex, ShardRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.formats import Sample
    from penstock.index.dataset_index import DatasetIndex
    from penstock.index.place import Found, IndexPlace
    from penstock.types import Buffer

TAIL_BYTES = 64 * 1024
"""Kept of each chunk: more than the headers that a parser may read before it knows that a sample is complete."""

WRITERS_MAX = 4
"""Threads that write shards' indexes: 30 ms each in a store, so some 130 shards a second."""

WRITES_MAX = 16
"""Shards' indexes waiting to be written, some 100 KB each: what a killed build has to do again."""


class ShardRecorder:
    """Hears of one shard's bytes and samples, from its first byte to its last, and makes its ``ShardIndex``.

    Args:
        found: The shard, and its version.
        format_name: As found from its first bytes.

    Cost: 64 KiB, and 16 bytes and the key of each sample; about 1 µs per sample and 55 µs per MB.
    """

    def __init__(self, found: Found, format_name: str) -> None:
        self._found = found
        self._format = format_name
        self._has_offsets = FORMATS[format_name].unit == "sample"
        self._in_head = FORMATS[format_name].head is not None  # no sample came yet, and the head belongs to none
        self._position = 0  # in the shard, of the byte after the last chunk
        self._tail = b""  # bytes before it that are not summed up yet
        self._first = 0  # where the first extent begins
        self._crc = 0  # of the current extent, as far as it is summed up
        self._has_crc = self._has_offsets
        self._ends: list[int] = []  # of the extents, behind the start of the first
        self._crcs: list[int] = []
        self._keys: list[str] = []
        self._fields: tuple[str, ...] | None = None  # of every sample so far; () where they differ
        self._values: list[list[int]] = []  # bytes of each of them
        self._sizes: list[int] = []  # bytes of each sample

    def feed(self, data: Buffer, samples: Sequence[Sample]) -> None:
        """The next bytes of the shard, and the samples that they completed."""
        self._keys += [sample.key for sample in samples]
        if not self._has_offsets:
            return
        if self._format == "tar" and samples:
            self._note_members(samples)
        view = memoryview(data)
        at = 0  # in the view, of the first byte that is not summed up
        position, ends, crcs = self._position, self._ends, self._crcs
        for sample in samples:
            if sample.size_bytes is None:
                self._has_offsets = self._has_crc = False
                return
            if self._in_head:
                at = self._drop_head(sample.offset_bytes)
            end = sample.offset_bytes + sample.size_bytes
            ends.append(end)
            end -= position
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
        self._position += len(view)

    def finish(self, samples: Sequence[Sample] = (), *, decided: str | None = None) -> ShardIndex:
        """The shard ended, and these were its last samples.

        Args:
            samples: Those that its end completed.
            decided: The parser's ``decided_format``.

        Raises:
            ConfigError: it was not heard of from end to end.
        """
        self.feed(b"", samples)
        if self._has_offsets and self._position != self._found.size_bytes:
            raise ConfigError(
                f"{self._position} of {self._found.size_bytes} bytes of {self._found.key} were recorded",
                hint="a recorder hears of a whole shard, or is dropped",
            )
        found = self._found
        name = decided or self._format
        row = ShardRow(found.key, found.size_bytes, found.etag, len(self._keys), name, self._has_offsets)
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
        """The first extent begins at `first`; where in the chunk that is, if it is there."""
        self._in_head = False
        self._first = first
        tail_start = self._position - len(self._tail)
        self._tail = self._tail[max(0, first - tail_start) :]
        return max(0, first - self._position)

    def _cut_tail(self, length: int) -> int:
        """The sum of the extent that ends after `length` bytes of the tail; the rest begins the next one."""
        if length < 0:
            self._has_crc = False
            return 0
        crc: int = crc32c(self._tail[:length], self._crc)
        self._tail, self._crc = self._tail[length:], 0
        return crc

    def _keep_tail(self, rest: memoryview) -> None:
        if self._in_head:
            self._tail += bytes(rest)  # until the first sample says where it ends
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
    """Holds bytes read by range against a shard's index; for one range, fed in order.

    Args:
        index: Of the shard; without checksums nothing is held against anything.
        first_sample: With whose extent the range begins.
        url: For errors.
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
        """The next bytes of the range.

        Raises:
            ChecksumError: an extent that ends in them is not what was indexed.
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
                f"sample {self._sample} of the shard has CRC32C {self._crc:08x}, its index {expected:08x}",
                hint="the same version gave other bytes than when it was indexed; penstock index --again checks",
                operation="GET",
                url=self._url,
                span=span,
            )
        self._crc = 0
        self._sample += 1
        if self._sample < len(self._sizes):
            self._left_bytes = int(self._sizes[self._sample])


class IndexBuilder:
    """Collects the indexes of shards as they are finished, and writes them in the background.

    A context manager; a by-product of a first pass is made like this::

        with IndexBuilder(place) as builder:
            ...
            recorder = builder.recorder(found, "tar")
            ...                                    # for each chunk: recorder.feed(chunk.data, parser.feed(chunk.data))
            builder.add(recorder.finish(parser.finish()))

    Args:
        place: Where they are kept.
        index: The data set's index so far; default: as it lies there.

    Cost: up to four threads while it is open; one write per shard, and one of the data set's index at the end.
    """

    def __init__(self, place: IndexPlace, *, index: DatasetIndex | None = None) -> None:
        self.place = place
        self.index = index if index is not None else place.load_saved()  # a pass's has no keys and checksums
        self._pool = ThreadPoolExecutor(WRITERS_MAX, thread_name_prefix="penstock-index")
        self._writes: list[Future[None]] = []
        self._changed = False
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def has(self, found: Found) -> bool:
        """Whether this version of the shard is indexed."""
        return self.index.row_of(found.key, size_bytes=found.size_bytes, etag=found.etag) is not None

    def recorder(self, found: Found, format_name: str) -> ShardRecorder:
        """To hear of one shard."""
        return ShardRecorder(found, format_name)

    def add(self, index: ShardIndex) -> None:
        """A shard is finished: write its index, soon.

        Raises:
            StoreError: an earlier one could not be written.
        """
        while len(self._writes) >= WRITES_MAX or (self._writes and self._writes[0].done()):
            self._writes.pop(0).result()
        self._writes.append(self._pool.submit(self.place.save_shard, index))
        self.add_row(index.row)

    def add_row(self, row: ShardRow) -> None:
        """A shard whose index lies there already."""
        self.index.add(row)
        self._changed = True

    def close(self) -> None:
        """Write what is left, and the data set's index; idempotent.

        Raises:
            StoreError: something could not be written.
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
