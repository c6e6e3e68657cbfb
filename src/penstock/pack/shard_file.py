"""One shard being written: its bytes to the store, its index beside it once it is there.

A shard counts as finished when its index says so of the version that lies there. The index is written after the shard
was committed, so whatever moment a packing is killed at, a shard is finished or is written again, byte for byte.
"""

from __future__ import annotations

import json
import tempfile
from functools import partial
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from penstock.config import KIB, MIB
from penstock.crc import sample_crc
from penstock.errors import ConfigError, DataError
from penstock.formats import RESERVED_FIELDS, JsonLinesWriter, RecordIOWriter, TarWriter, TFRecordWriter
from penstock.formats.compressors import COMPRESSORS
from penstock.formats.mds_writer import MdsWriter
from penstock.formats.tar_header import BLOCK_BYTES
from penstock.formats.tar_writer import headers
from penstock.index import ShardIndex, ShardRow
from penstock.index.members import members_of
from penstock.pack.fields import as_bytes
from penstock.pack.parquet_writer import CODECS, COPIES, ROW_GROUP_BYTES, ParquetWriter
from penstock.pack.shelf import ENTRIES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from penstock.pack.shelf import Shelf
    from penstock.types import Buffer

BLOCK_WRITE_BYTES = 1 * MIB
"""Small pieces are collected to this size before the store hears of them."""

PIECE_WRITE_BYTES = 32 * KIB
"""Larger pieces are handed on by themselves: a call costs as much as copying 20 KB."""


SPOOL_BYTES = 8 * MIB
"""Of a shard whose head can be written last; what is larger lies in a temporary file meanwhile."""


class Written(NamedTuple):
    """A format as it is written.

    Attributes:
        writer: ``writer(write)`` with ``add(sample)`` and ``finish()``; with ``head()`` where a shard begins with what
            is known at its end.
        suffix: Of names.
        read_as: The format by which it is read.
        holds_numbers: Whether numbers stay numbers; else they become text.
        holds_keys: Whether a sample keeps its key.
        has_offsets: Whether a sample lies in one place, which the index says; else the index has its count alone.
        compression: Of the shard as a whole, a key of ``COMPRESSORS``; None: none.
        held_bytes: That one open shard holds: the parts of ``store.writer``, and what its format collects.
    """

    writer: Callable[[Callable[[Buffer], object]], Any]
    suffix: str
    read_as: str
    holds_numbers: bool
    holds_keys: bool
    has_offsets: bool = True
    compression: str | None = None
    held_bytes: int = 5 * 8 * MIB


_PLAIN = {
    "tar": Written(TarWriter, ".tar", "tar", holds_numbers=False, holds_keys=True),
    "tfrecord": Written(TFRecordWriter, ".tfrecord", "tfrecord", holds_numbers=True, holds_keys=False),
    "recordio": Written(RecordIOWriter, ".rec", "recordio", holds_numbers=False, holds_keys=False),
    "jsonl": Written(JsonLinesWriter, ".jsonl", "jsonl", holds_numbers=True, holds_keys=True),
    "mds": Written(MdsWriter, ".mds", "mds", holds_numbers=True, holds_keys=False),
}
_PARQUET = Written(
    ParquetWriter, ".parquet", "parquet", holds_numbers=True, holds_keys=True, has_offsets=False,
    held_bytes=5 * 8 * MIB + COPIES * ROW_GROUP_BYTES,
)  # fmt: skip


def _compressed() -> dict[str, Written]:
    table = {}
    for name, written in _PLAIN.items():
        for kind in COMPRESSORS:
            suffix = ".zstd" if (name, kind) == ("mds", "zst") else f".{kind}"  # as MosaicML calls it
            table[f"{name}.{kind}"] = written._replace(
                suffix=written.suffix + suffix, read_as=f"{name}.{kind}", has_offsets=False, compression=kind
            )
    for kind, codec in CODECS.items():  # inside the shard: its pages
        table[f"parquet.{kind}"] = _PARQUET._replace(writer=partial(ParquetWriter, codec=codec))
    return table


FORMATS_WRITTEN: dict[str, Written] = {**_PLAIN, "parquet": _PARQUET, **_compressed()}
"""Formats that can be written, by name; ``tar.gz`` and the like are compressed."""

PLAIN_FORMATS = (*_PLAIN, "parquet")
"""Those without compression."""


KEY = "__key__"
"""As the name of the field that takes the keys: where the reader finds them again."""


def written_as(format_name: str, key_field: str | None) -> Written:
    """A format as it is written when `key_field` takes the samples' keys.

    Raises:
        ConfigError: The keys shall be read back, and this format cannot hold them.
    """
    written = FORMATS_WRITTEN[format_name]
    if key_field != KEY or written.holds_keys:
        return written
    if written.writer is not TFRecordWriter:
        raise ConfigError(
            f"key_field={KEY!r}: {format_name} has no place for a key that is read back", hint="--key-field id"
        )
    return written._replace(writer=partial(TFRecordWriter, keeps_key=True), holds_keys=True)


def with_key(sample: Mapping[str, Any], key_field: str | None) -> Mapping[str, Any]:
    """`sample` with its key in `key_field` too.

    Raises:
        DataError: It has such a field already.
    """
    if key_field in (None, KEY):
        return sample
    if key_field in sample:
        raise DataError(f"it has a field {key_field!r} already", sample_key=sample[KEY], field=key_field)
    return {**sample, key_field: sample[KEY]}


class ShardFile:
    """Writes one shard and its index. A context manager: leaving it by an exception leaves nothing.

    Args:
        shelf: Where it goes.
        name: Key of the shard, relative to the store and to the index.
        format_name: A key of ``FORMATS_WRITTEN``.
        key_field: ``__key__``: keys are stored so that they are read back, see ``written_as``. Others: nothing here.

    Cost: five parts of 8 MiB, and 20 bytes and the key of each sample. MDS lies in a temporary file of its size until
        it is complete, for its head says where all samples lie.
    """

    def __init__(self, shelf: Shelf, name: str, *, format_name: str, key_field: str | None = None) -> None:
        self._shelf = shelf
        self._store = shelf.store
        self._name = name
        self._written = written_as(format_name, key_field)
        self._writer = shelf.store.writer(name)
        self._note_key: str | None = None  # of the note that parts are going up
        self._shard = self._written.writer(self._put)
        self._spool: IO[bytes] | None = None
        if hasattr(self._shard, "head"):
            self._spool = tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES)  # noqa: SIM115 - closed by _end
        self._compressor = COMPRESSORS[self._written.compression]() if self._written.compression else None
        self._stored_bytes = 0
        self._buffer = memoryview(bytearray(BLOCK_WRITE_BYTES))  # one for all: fresh memory costs more than filling it
        self._filled = 0
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
        """Bytes written so far, before compression."""
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
        self._note(prepared, key)

    def _note(self, prepared: dict[str, Any], key: str) -> None:
        read_as = self._written.read_as
        if read_as.startswith("jsonl") and "json" in prepared:
            self._keys = None  # the line may say another one
        if self._keys is not None:
            self._keys.append(key)
        if read_as != "tar" or self._names == ():
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
            ConfigError: another run writes here now.
            StoreError: either failed; without the index the shard is written again by the next run.
        """
        size_bytes = self._shard.finish()
        self._flush()
        if self._spool is not None:
            head = self._shard.head()
            size_bytes += len(head)
            self._bounds = [bound + len(head) for bound in self._bounds]
            self._send(head)
            self._spool.seek(0)
            while block := self._spool.read(BLOCK_WRITE_BYTES):
                self._send(block)
        if self._compressor is not None:
            self._store_bytes(self._compressor.finish())
        self._shelf.check_run()
        self._writer.close()
        self._end()
        if self._note_key is not None:
            self._store.delete(self._note_key)
        info = self._writer.info
        if info is None or info.etag is None:
            info = self._store.stat(self._name)
        etag = info.etag or f"{info.size_bytes}-{info.last_modified_s}"
        written = self._written
        name = (getattr(self._shard, "decided_format", None) if written.has_offsets else None) or written.read_as
        row = ShardRow(self._name, self._stored_bytes, etag, len(self._crcs), name, written.has_offsets)
        if isinstance(self._shard, MdsWriter):
            self._save_entry(self._shard, size_bytes)
        self._shelf.place.save_shard(self._index(row))
        return row

    def _index(self, row: ShardRow) -> ShardIndex:
        keys = self._keys
        if not self._written.holds_keys:
            keys = [f"{start:012d}" for start in self._bounds[:-1]]
        if not self._written.has_offsets:
            return ShardIndex(row, keys=keys if self._written.compression else None)
        bounds = np.array(self._bounds, np.int64)
        members = members_of(self._names, self._sizes, np.diff(bounds).tolist()) if self._names else None
        crcs = np.array(self._crcs, np.uint32)
        return ShardIndex(row, offsets=bounds, crc32c=crcs, keys=keys, members=members)

    def _save_entry(self, shard: MdsWriter, size_bytes: int) -> None:
        basename = self._name.rpartition("/")[2]
        plain = basename[: basename.rfind(".mds") + 4]
        entry = shard.entry(
            plain, size_bytes=size_bytes, stored_bytes=self._stored_bytes, compression=self._written.compression
        )
        self._store.write(f"{ENTRIES}{self._name}.json", json.dumps(entry, sort_keys=True).encode())

    def abort(self) -> None:
        """Leave nothing; idempotent."""
        self._writer.abort()
        self._end()

    def _end(self) -> None:
        self._filled = 0
        self._buffer = memoryview(b"")
        if self._spool is not None:
            self._spool.close()

    # ── bytes of the format, through the buffer, the spool and the compression, to the store ─────────────────────────

    def _put(self, data: Buffer) -> None:
        length = len(data)
        self._crc = sample_crc(data, self._crc)
        end = self._filled + length
        if length < PIECE_WRITE_BYTES and end <= BLOCK_WRITE_BYTES:
            self._buffer[self._filled : end] = data
            self._filled = end
            return
        self._flush()
        self._spooled(data)

    def _flush(self) -> None:
        if self._filled:
            self._spooled(self._buffer[: self._filled])
            self._filled = 0

    def _spooled(self, data: Buffer) -> None:
        if self._spool is None:
            self._send(data)
        else:
            self._spool.write(data)

    def _send(self, data: Buffer) -> None:
        self._store_bytes(data if self._compressor is None else self._compressor.compress(data))

    def _store_bytes(self, data: Buffer) -> None:
        self._writer.write(data)
        self._stored_bytes += len(data)
        if self._note_key is None and (upload_id := self._writer.upload_id) is not None:
            self._note_key = self._shelf.note_upload(self._name, upload_id)


def checksum(sample: Mapping[str, Any], written: Written) -> int:
    """CRC32C of the bytes that `sample` takes in a shard, wherever in it."""
    crc = 0

    def put(data: Buffer) -> None:
        nonlocal crc
        crc = sample_crc(data, crc)

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
    if hasattr(value, "dtype") or (isinstance(value, memoryview) and value.format not in {"B", "b", "c"}):
        numbers = value.tolist()
        return numbers[0] if isinstance(numbers, list) and len(numbers) == 1 else numbers
    if isinstance(value, bytes | bytearray | memoryview):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError:
            raise DataError("JSON holds text, and these bytes are none", sample_key=key, field=name) from None
    return value


def stored_bytes(key: str, sizes: Mapping[str, int], format_name: str) -> int:
    """Bytes that a sample takes in a shard before compression: exact for tar, an estimate else.

    Args:
        key: The sample's.
        sizes: Bytes of each field.
        format_name: A key of ``FORMATS_WRITTEN``.
    """
    plain = format_name.partition(".")[0]
    if plain == "tar":
        return sum(_member_bytes(f"{key}.{name}", size) for name, size in sizes.items())
    if plain == "tfrecord":
        return 16 + sum(size + len(name) + 16 for name, size in sizes.items())
    return 16 + sum(sizes.values())


def tail_bytes(format_name: str) -> int:
    """Bytes with which a shard ends: tar's end mark."""
    return 2 * BLOCK_BYTES if format_name.partition(".")[0] == "tar" else 0


def _member_bytes(name: str, size_bytes: int) -> int:
    head = BLOCK_BYTES if len(name) <= 100 and name.isascii() else len(headers(name, size_bytes))
    return head + -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
