"""One shard being written: its bytes to the store, its index beside it once it is there.

A shard counts as finished when its index says so of the version that lies there. The index is written after the shard
was committed, so whatever moment a packing is killed at, a shard is finished or is written again, byte for byte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from crc32c import crc32c

from penstock.config import MIB
from penstock.errors import ConfigError, DataError
from penstock.formats import RESERVED_FIELDS, JsonLinesWriter, RecordIOWriter, TarWriter, TFRecordWriter
from penstock.formats.tar_header import BLOCK_BYTES
from penstock.formats.tar_writer import headers
from penstock.index import ShardIndex, ShardRow
from penstock.index.members import members_of
from penstock.pack.fields import as_bytes
from penstock.pack.parquet_writer import ParquetWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from penstock.index import IndexPlace
    from penstock.store import Store
    from penstock.types import Buffer

BLOCK_WRITE_BYTES = 1 * MIB
"""Small pieces are collected to this size before the store hears of them: a call costs as much as copying 20 KB."""


class Written(NamedTuple):
    """A format as it is written.

    Attributes:
        writer: ``writer(write)`` with ``add(sample)`` and ``finish()``.
        suffix: Of names.
        holds_numbers: Whether numbers stay numbers; else they become text.
        holds_keys: Whether a sample keeps its key.
        has_offsets: Whether a sample lies in one place, which the index says; else the index has its count alone.
    """

    writer: Callable[[Callable[[Buffer], object]], Any]
    suffix: str
    holds_numbers: bool
    holds_keys: bool
    has_offsets: bool = True


FORMATS_WRITTEN: dict[str, Written] = {
    "tar": Written(TarWriter, ".tar", holds_numbers=False, holds_keys=True),
    "tfrecord": Written(TFRecordWriter, ".tfrecord", holds_numbers=True, holds_keys=False),
    "recordio": Written(RecordIOWriter, ".rec", holds_numbers=False, holds_keys=False),
    "jsonl": Written(JsonLinesWriter, ".jsonl", holds_numbers=True, holds_keys=True),
    "parquet": Written(ParquetWriter, ".parquet", holds_numbers=True, holds_keys=True, has_offsets=False),
}
"""Formats that can be written, by name."""


class ShardFile:
    """Writes one shard and its index. A context manager: leaving it by an exception leaves nothing.

    Args:
        store: Of the shards.
        place: Of the index.
        name: Key of the shard, relative to the store and to the index.
        format_name: A key of ``FORMATS_WRITTEN``.

    Cost: five parts of 8 MiB, and 20 bytes and the key of each sample.
    """

    def __init__(self, store: Store, place: IndexPlace, name: str, *, format_name: str) -> None:
        self._store = store
        self._place = place
        self._name = name
        self._format = format_name
        self._written = FORMATS_WRITTEN[format_name]
        self._writer = store.writer(name)
        self._shard = self._written.writer(self._put)
        self._buffer = bytearray()
        self._crc = 0
        self._crcs: list[int] = []
        self._bounds: list[int] = [0]
        self._keys: list[str] | None = []
        self._names: tuple[str, ...] | None = None  # of the fields of every sample so far; () where they differ
        self._sizes: list[list[int]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()

    @property
    def offset_bytes(self) -> int:
        """Bytes written so far."""
        return self._bounds[-1]

    @property
    def samples_count(self) -> int:
        """Samples written so far."""
        return len(self._crcs)

    def add(self, sample: Mapping[str, Any]) -> None:
        """Append one sample with its ``__key__``.

        Raises:
            DataError: the format cannot hold it; nothing of it was written.
            StoreError: of writing; the shard is given up.
        """
        key = sample["__key__"]
        prepared = prepare(sample, self._written)
        try:
            span = self._shard.add(prepared)
        except ConfigError as error:
            raise DataError(
                error.what, hint=error.hint, sample_key=key, shard=self._store.describe(self._name)
            ) from error
        self._bounds.append(span.end)
        self._crcs.append(self._crc)
        self._crc = 0
        self._note(prepared, key, span.start)

    def _note(self, prepared: dict[str, Any], key: str, start: int) -> None:
        if self._format == "jsonl" and "json" in prepared:
            self._keys = None  # the line may say another one
        if self._keys is not None:
            self._keys.append(key if self._written.holds_keys else f"{start:012d}")
        if self._format != "tar" or self._names == ():
            return
        names = sorted(name for name in prepared if name not in RESERVED_FIELDS)
        if self._names is None:
            self._names = tuple(names)
        if names != list(self._names):
            self._names = ()
        else:
            self._sizes.append([len(prepared[name]) for name in names])

    def close(self) -> ShardRow:
        """Make the shard visible, then its index; the row of it.

        Raises:
            StoreError: either failed; without the index the shard is written again by the next run.
        """
        size_bytes = self._shard.finish()
        self._flush()
        self._writer.close()
        info = self._writer.info
        if info is None or info.etag is None:
            info = self._store.stat(self._name)
        etag = info.etag or f"{info.size_bytes}-{info.last_modified_s}"
        has_offsets = self._written.has_offsets
        row = ShardRow(self._name, size_bytes, etag, len(self._crcs), self._format, has_offsets)
        self._place.save_shard(self._index(row) if has_offsets else ShardIndex(row))
        return row

    def _index(self, row: ShardRow) -> ShardIndex:
        bounds = np.array(self._bounds, np.int64)
        members = members_of(self._names, self._sizes, np.diff(bounds).tolist()) if self._names else None
        crcs = np.array(self._crcs, np.uint32)
        return ShardIndex(row, offsets=bounds, crc32c=crcs, keys=self._keys, members=members)

    def abort(self) -> None:
        """Leave nothing; idempotent."""
        self._writer.abort()
        self._buffer = bytearray()

    def _put(self, data: Buffer) -> None:
        self._crc = crc32c(data, self._crc)
        if len(data) >= BLOCK_WRITE_BYTES:
            self._flush()
            self._writer.write(data)
            return
        self._buffer += data
        if len(self._buffer) >= BLOCK_WRITE_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._buffer:
            self._writer.write(self._buffer)
            self._buffer = bytearray()


def checksum(sample: Mapping[str, Any], format_name: str) -> int:
    """CRC32C of the bytes that `sample` takes in a shard, wherever in it."""
    written = FORMATS_WRITTEN[format_name]
    crc = 0

    def put(data: Buffer) -> None:
        nonlocal crc
        crc = crc32c(data, crc)

    written.writer(put).add(prepare(sample, written))
    return crc


def prepare(sample: Mapping[str, Any], written: Written) -> dict[str, Any]:
    """The sample as the format's writer takes it: bytes, and numbers where it holds numbers."""
    key = sample["__key__"]
    if not written.holds_numbers:
        return {name: value if name == "__key__" else as_bytes(name, value, key) for name, value in sample.items()}
    if written.writer is JsonLinesWriter:
        return {name: _for_json(name, value, key) for name, value in sample.items()}
    return dict(sample)


def _for_json(name: str, value: Any, key: str) -> Any:
    if isinstance(value, memoryview) and value.format not in {"B", "b", "c"}:
        numbers = value.tolist()
        return numbers[0] if isinstance(numbers, list) and len(numbers) == 1 else numbers
    if isinstance(value, bytes | bytearray | memoryview):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError:
            raise DataError("JSON holds text, and these bytes are none", sample_key=key, field=name) from None
    return value


def stored_bytes(key: str, sizes: Mapping[str, int], format_name: str) -> int:
    """Bytes that a sample takes in a shard: exact for tar, an estimate else.

    Args:
        key: The sample's.
        sizes: Bytes of each field.
        format_name: A key of ``FORMATS_WRITTEN``.
    """
    if format_name == "tar":
        return sum(_member_bytes(f"{key}.{name}", size) for name, size in sizes.items())
    if format_name == "tfrecord":
        return 16 + sum(size + len(name) + 16 for name, size in sizes.items())
    return 16 + sum(sizes.values())


def _member_bytes(name: str, size_bytes: int) -> int:
    head = BLOCK_BYTES if len(name) <= 100 and name.isascii() else len(headers(name, size_bytes))
    return head + -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
