"""``ShardIndex``: the extent and checksum of each sample of one shard; ``Members``: where a tar's fields lie in the samples.

The *extents* of the samples tile the shard: sample i is the bytes ``[offsets[i], offsets[i + 1])``, and a parser that starts
at its first byte yields that sample. Bytes that belong to no sample (a tar's directories, blank lines) are at the head of
the extent that follows, so any run of samples is one range, and no sample needs bytes of another.

The file is small because a data set's indexes are read at every start that needs more than counts. Extents are stored as
differences in the largest common unit (512 bytes in a tar, so 2 bytes per sample up to 32 MiB), checksums as 4 bytes, keys
compressed: about 9 bytes per sample in total. Layout, byte for byte: docs/development/index-files.md.

Members are stored only for shards whose samples all have the same fields in the same order, with headers of the same length, as
usual writers of data sets make them; then only the wanted fields need to be read. The offsets follow from the sizes: a member
is its headers and its value, padded to a block, and the last member ends where its sample ends.
"""

from __future__ import annotations

import json
import struct
import zlib
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.errors import ConfigError, DataError
from penstock.formats.sample import Sample, decode_name, split_name
from penstock.formats.tar_header import BLOCK_BYTES
from penstock.text.json_text import parse_json
from penstock.types import lasting_etag, strong_etag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.types import Buffer

MAGIC = b"\x89PSX\r\n\x1a\n"
"""First bytes of every shard index. Like PNG's, they show if a transfer changed line ends or the eighth bit."""

VERSION = 1

HEAD_BYTES_MAX = 4096
"""Bytes that always suffice for ``read_head``: a key has at most 1 024 bytes."""

ITEM_BYTES = (1, 2, 4, 8)
NAME_BYTES = 100
_PREFIX = 345  # offset of the first half of a long name in a header
_FIXED = struct.Struct("<8sHHIQQQHHHH")
_COLUMN = struct.Struct("<8sHHIQQQII")
_RAW, _ZLIB = 0, 1
_UNIT_MAX = (1 << 32) - 1
_STRING_BYTES_MAX = (1 << 16) - 1


class ShardRow(NamedTuple):
    """The row of one shard in a data set's index.

    Attributes:
        key: Key of the shard, relative to the data set's base URL.
        size_bytes: Size of the shard in bytes.
        etag: ETag of the version that was indexed, or the store's own pin if it has none.
        samples_count: Number of samples in the shard.
        format: A key of ``penstock.formats.FORMATS``, with the content of the records if the first record decided it.
        has_offsets: Whether its ``ShardIndex`` has the offsets of samples; formats with a footer have them themselves.
    """

    key: str
    size_bytes: int
    etag: str
    samples_count: int
    format: str
    has_offsets: bool

    def is_of(self, size_bytes: int | None, etag: str | None) -> bool:
        """Return whether the row describes this version; older indexes have ETags as the store wrote them, perhaps unquoted."""
        own, other = lasting_etag(strong_etag(self.etag)), lasting_etag(strong_etag(etag))
        return self.size_bytes == size_bytes and own == other


class Members(NamedTuple):
    """The members of one shard's samples.

    Attributes:
        names: Names of the fields, in stored order.
        head_bytes: Size in bytes of the headers before each value, with long-name and PAX headers.
        sizes: int64[samples, fields], size of each value in bytes.
    """

    names: tuple[str, ...]
    head_bytes: int
    sizes: NDArray[np.int64]

    def spans(self, ends: NDArray[np.int64], wanted: Sequence[str]) -> NDArray[np.int64]:
        """Return the ranges of the wanted members with their headers. A parser reads them as samples of these fields only.

        Args:
            ends: int64[samples], ends of the samples in the shard; may be shorter than ``sizes``.
            wanted: Names of fields.

        Returns:
            int64[samples, wanted, 2], start and end of each member, in stored order.

        Raises:
            ConfigError: The samples do not have one of the fields.
        """
        if missing := [name for name in wanted if name not in self.names]:
            raise ConfigError(f"field {missing[0]!r} is not one of {', '.join(self.names)}")
        chosen = [at for at, name in enumerate(self.names) if name in wanted]
        blocks = self.head_bytes + _padded(self.sizes[: len(ends)])
        # Bytes from the start of each member to the end of its sample.
        after = np.cumsum(blocks[:, ::-1], axis=1)[:, ::-1]
        starts = ends[:, None] - after
        return np.stack([starts[:, chosen], (starts + blocks)[:, chosen]], axis=-1)

    def cut(self, number: int, extent: memoryview, *, offset_bytes: int) -> Sample | None:
        """Return a sample cut out of its extent, which takes a third of the time of parsing. Check the checksum before.

        Args:
            number: Number of the sample in the shard.
            extent: uint8[n], the stored bytes of the sample.
            offset_bytes: Position of the extent in the shard, in bytes.

        Returns:
            The sample, equal to the parser's. None if it must be parsed: a member has more than one header, or other bytes
            come before the first one.
        """
        fields, at = {}, 0
        for name, size in zip(self.names, self.sizes[number].tolist(), strict=True):
            at += BLOCK_BYTES
            fields[name] = extent[at : at + size]
            at += -(-size // BLOCK_BYTES) * BLOCK_BYTES
        plain = self.head_bytes == BLOCK_BYTES and at == len(extent) and not extent[_PREFIX]
        split = split_name(decode_name(bytes(extent[:NAME_BYTES]).split(b"\0", 1)[0])) if plain else None
        return Sample(split[0], fields, offset_bytes, at) if split is not None else None

    def encode(self) -> tuple[bytes, int]:
        """Return the stored form (a line of JSON, then the sizes, field by field), and the bytes per size."""
        most = int(self.sizes.max()) if self.sizes.size else 0
        item_bytes = _item_bytes(most)
        head = json.dumps({"names": self.names, "head_bytes": self.head_bytes}).encode() + b"\n"
        return head + np.ascontiguousarray(self.sizes.T).astype(f"<u{item_bytes}").tobytes(), item_bytes


def members_of(names: Sequence[str], values: Sequence[Sequence[int]], sample_sizes: Sequence[int]) -> Members | None:
    """Return the members of samples with these fields; None if the samples do not all have the same layout.

    Args:
        names: Names of the fields, in stored order.
        values: Sizes in bytes of each sample's values.
        sample_sizes: Size in bytes of each sample, from its first header to the end of its last block.
    """
    if not values or not names:
        return None
    sizes = np.array(values, np.int64)
    heads = np.array(sample_sizes, np.int64) - _padded(sizes).sum(axis=1)
    head_bytes, odd = divmod(int(heads[0]), len(names))
    if odd or head_bytes < BLOCK_BYTES or head_bytes % BLOCK_BYTES or bool((heads != heads[0]).any()):
        return None
    return Members(tuple(names), head_bytes, sizes)


def decode_members(data: Buffer, *, count: int, item_bytes: int, name: str) -> Members:
    """Return the members that ``Members.encode`` stored.

    Args:
        data: uint8[n], the stored form.
        count: Number of samples.
        item_bytes: Bytes per size.
        name: Name of the shard, for errors.

    Raises:
        DataError: The data is not a stored form of members.
    """
    try:
        line, _, items = bytes(data).partition(b"\n")
        head = parse_json(line)
        names = tuple(map(str, head["names"]))
        if item_bytes not in ITEM_BYTES:
            raise ValueError(f"{item_bytes} bytes per item")
        sizes = np.frombuffer(items, f"<u{item_bytes}").astype(np.int64).reshape(len(names), count).T
        return Members(names, int(head["head_bytes"]), sizes)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"its members cannot be read ({error})", shard=name) from error


def _padded(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    padded: NDArray[np.int64] = -(-sizes // BLOCK_BYTES) * BLOCK_BYTES
    return padded


class ShardIndex:
    """Extents, checksums and keys of one shard's samples; immutable.

    Attributes:
        row: Row of the shard in the data set's index.
        offsets: int64[samples_count + 1], ascending, bounds of the extents in bytes; None if only the count is known.
        crc32c: uint32[samples_count], checksum of each extent's bytes; None if they were not read.

    ``keys`` and ``members`` have the key of each sample, and the offsets of its fields; both are decoded at first use.

    Cost: 12 bytes per sample in memory, and the keys after their first use.
    """

    __slots__ = ("_keys", "_members", "_stored", "crc32c", "offsets", "row")

    def __init__(
        self,
        row: ShardRow,
        *,
        offsets: NDArray[np.int64] | None = None,
        crc32c: NDArray[np.uint32] | None = None,
        keys: Sequence[str] | None = None,
        members: Members | None = None,
    ) -> None:
        count = row.samples_count
        if offsets is not None and (
            len(offsets) != count + 1
            or int(offsets[0]) < 0
            or int(offsets[-1]) > row.size_bytes
            or bool((np.diff(offsets) < 0).any())
        ):
            raise DataError(
                f"{len(offsets)} bounds of {count} samples must ascend within {row.size_bytes} bytes", shard=row.key
            )
        if crc32c is not None and len(crc32c) != count:
            raise DataError(f"{len(crc32c)} checksums of {count} samples", shard=row.key)
        if keys is not None and len(keys) != count:
            raise DataError(f"{len(keys)} keys of {count} samples", shard=row.key)
        if members is not None and len(members.sizes) != count:
            raise DataError(f"members of {len(members.sizes)} samples, not {count}", shard=row.key)
        self.row = row._replace(has_offsets=offsets is not None)
        self.offsets = offsets
        self.crc32c = crc32c
        self._keys = list(keys) if keys is not None else None
        self._members = members
        self._stored: dict[bytes, tuple[memoryview, _Entry]] = {}  # columns that are decoded at first use

    def __len__(self) -> int:
        return self.row.samples_count

    def __repr__(self) -> str:
        has = [name for name in ("offsets", "crc32c", "keys") if getattr(self, name) is not None]
        return f"<ShardIndex {self.row.key!r}: {len(self)} samples, {', '.join(has) or 'count only'}>"

    @property
    def sizes(self) -> NDArray[np.int64] | None:
        """int64[samples_count]: size of each extent in bytes; None if only the count is known."""
        return None if self.offsets is None else np.diff(self.offsets)

    @property
    def keys(self) -> list[str] | None:
        """``__key__`` of each sample, in stored order; None if they are not known.

        Raises:
            DataError: The stored bytes are not keys, although their checksum is right.
        """
        if self._keys is None and b"keys" in self._stored:
            self._keys = _split_keys(_expanded(*self._stored[b"keys"], self.row.key), len(self), self.row.key)
        return self._keys

    @property
    def members(self) -> Members | None:
        """Positions of each sample's fields; None if the samples have different layouts, or the shard is not a tar.

        Raises:
            DataError: The stored bytes are not members, although their checksum is right.
        """
        if self._members is None and b"members" in self._stored:
            data, entry = self._stored[b"members"]
            expanded = _expanded(data, entry, self.row.key)
            self._members = decode_members(expanded, count=len(self), item_bytes=entry.item_bytes, name=self.row.key)
        return self._members

    def member_spans(self, first: int, count: int, fields: Sequence[str]) -> NDArray[np.int64] | None:
        """Return the ranges of some fields of samples ``[first, first + count)``, which a parser reads as smaller samples.

        Args:
            first: Number of the first sample.
            count: Number of samples.
            fields: Names of the fields.

        Returns:
            int64[count, fields, 2], start and end of each range, ascending; None if ``members`` is None.

        Raises:
            ConfigError: The samples do not have one of the fields.
        """
        members = self.members
        if members is None or self.offsets is None:
            return None
        some = members._replace(sizes=members.sizes[first : first + count])
        return some.spans(self.offsets[first + 1 : first + count + 1], fields)

    def encode(self) -> bytes:
        """Return the index as it is stored."""
        columns = []
        if self.offsets is not None:
            columns.append(_offsets_column(self.offsets))
        if self.crc32c is not None:
            data = self.crc32c.astype("<u4").tobytes()
            columns.append(_Column(b"crc32c", _RAW, 4, 1, data, len(data)))
        if self.keys is not None:
            keys = [key.encode("utf-8", "surrogateescape") for key in self.keys]
            data = np.array([len(key) for key in keys], "<u4").tobytes() + b"".join(keys)
            columns.append(_Column(b"keys", _ZLIB, 1, 1, zlib.compress(data, 6), len(data)))
        if self.members is not None:
            data, item_bytes = self.members.encode()
            columns.append(_Column(b"members", _ZLIB, item_bytes, 1, zlib.compress(data, 6), len(data)))
        return _assemble(self.row, columns)


def _item_bytes(most: int) -> int:
    """Return the size of the narrowest items that hold numbers up to `most`."""
    return next(size for size in ITEM_BYTES if most < 1 << (8 * size))


class _Column(NamedTuple):
    """A column as stored."""

    name: bytes
    coding: int
    item_bytes: int
    unit: int
    data: bytes
    decoded_bytes: int


def _offsets_column(offsets: NDArray[np.int64]) -> _Column:
    """Return the first bound, then the differences in their largest common unit."""
    steps = np.diff(offsets)
    unit = int(np.gcd.reduce(steps)) if len(steps) else 1
    unit = unit if 0 < unit <= _UNIT_MAX else 1
    steps = steps // unit
    most = int(steps.max()) if len(steps) else 0
    item_bytes = _item_bytes(most)
    data = struct.pack("<Q", int(offsets[0])) + steps.astype(f"<u{item_bytes}").tobytes()
    return _Column(b"offsets", _RAW, item_bytes, unit, data, len(data))


def _split_keys(data: Buffer, count: int, shard: str) -> list[str]:
    if len(data) < 4 * count:
        raise DataError(f"{len(data)} bytes of keys for {count} samples", shard=shard)
    data = bytes(data)
    lengths = np.frombuffer(data, "<u4", count)
    ends = np.cumsum(lengths, dtype=np.int64) + 4 * count
    if count and int(ends[-1]) != len(data):
        raise DataError(f"its keys end at byte {int(ends[-1])} of {len(data)}", shard=shard)
    keys, start = [], 4 * count
    for end in ends.tolist():
        keys.append(data[start:end].decode("utf-8", "surrogateescape"))
        start = end
    return keys


def _assemble(row: ShardRow, columns: list[_Column]) -> bytes:
    from penstock.checksums.crc32c import crc32c

    strings = [text.encode("utf-8", "surrogateescape") for text in (row.key, row.etag, row.format)]
    longest = max(map(len, strings))
    if longest > _STRING_BYTES_MAX:
        raise DataError(f"a key or ETag of {longest} bytes is longer than {_STRING_BYTES_MAX}", shard=row.key[:80])
    head_bytes = _FIXED.size + sum(map(len, strings)) + _COLUMN.size * len(columns)
    head_bytes += -(head_bytes + 4) % 8 + 4
    at, table = head_bytes, []
    for column in columns:
        table.append((column, at))
        at += len(column.data)
    lengths = [len(text) for text in strings]
    head = _FIXED.pack(
        MAGIC, VERSION, len(columns), head_bytes, row.samples_count, row.size_bytes, at, *lengths, 0
    ) + b"".join(strings)
    for column, start in table:
        name, coding, item_bytes, unit, data, decoded_bytes = column
        head += _COLUMN.pack(name, coding, item_bytes, unit, start, len(data), decoded_bytes, crc32c(data), 0)
    head += bytes(head_bytes - 4 - len(head))
    return b"".join([head, struct.pack("<I", crc32c(head)), *(column.data for column in columns)])


class _Entry(NamedTuple):
    """A column's entry in the header."""

    coding: int
    item_bytes: int
    unit: int
    start: int
    stored_bytes: int
    decoded_bytes: int
    checksum: int


class _Head(NamedTuple):
    """A parsed header."""

    row: ShardRow
    file_bytes: int
    columns: dict[bytes, _Entry]


def _read_head(data: Buffer, name: str) -> _Head:
    from penstock.checksums.crc32c import crc32c

    view = memoryview(data)
    if len(view) < _FIXED.size or bytes(view[:8]) != MAGIC:
        raise DataError("it is not a shard index", shard=name)
    _, version, columns_count, head_bytes, samples_count, size_bytes, file_bytes, *lengths, _ = _FIXED.unpack_from(view)
    if version != VERSION:
        raise DataError(
            f"it has version {version}, but this penstock reads version {VERSION}",
            hint="run penstock index",
            shard=name,
        )
    if not _FIXED.size + sum(lengths) + _COLUMN.size * columns_count + 4 <= head_bytes <= len(view):
        raise DataError(f"its header of {head_bytes} bytes is cut off at {len(view)}", shard=name)
    (checksum,) = struct.unpack_from("<I", view, head_bytes - 4)
    if checksum != crc32c(view[: head_bytes - 4]):
        raise DataError("the checksum of its header is wrong", shard=name)
    at, strings = _FIXED.size, []
    for length in lengths:
        strings.append(bytes(view[at : at + length]).decode("utf-8", "surrogateescape"))
        at += length
    columns = {}
    for index in range(columns_count):
        column, *rest, _ = _COLUMN.unpack_from(view, at + index * _COLUMN.size)
        columns[column.rstrip(b"\0")] = _Entry(*rest)
    key, etag, format_name = strings
    row = ShardRow(key, size_bytes, etag, samples_count, format_name, b"offsets" in columns)
    return _Head(row, file_bytes, columns)


def read_head(data: Buffer, name: str) -> ShardRow:
    """Return the row of a stored index from its first bytes.

    Args:
        data: uint8[up to HEAD_BYTES_MAX], the file's first bytes.
        name: Name of the file, for errors.

    Raises:
        DataError: The file is not a shard index, or is damaged.
    """
    return _read_head(data, name).row


def decode(data: Buffer, name: str) -> ShardIndex:
    """Return a stored index. Columns that this version does not know are ignored.

    Args:
        data: uint8[n], the file.
        name: Name of the file, for errors.

    Raises:
        DataError: The file is not a shard index, or is damaged; checksums cover every byte.
    """
    view = memoryview(data)
    head = _read_head(view, name)
    if head.file_bytes != len(view):
        raise DataError(f"it has {len(view)} of {head.file_bytes} bytes", shard=name)
    count = head.row.samples_count
    stored = {column: (_checked(view, entry, name), entry) for column, entry in head.columns.items()}
    offsets = checksums = None
    if b"offsets" in stored:
        data, entry = stored[b"offsets"]
        offsets = _decode_offsets(_expanded(data, entry, name), count, entry.item_bytes, entry.unit, name)
    if b"crc32c" in stored:
        data = _expanded(*stored[b"crc32c"], name)
        if len(data) != 4 * count:
            raise DataError(f"{len(data)} bytes of checksums for {count} samples", shard=name)
        checksums = np.frombuffer(data, "<u4").astype(np.uint32, copy=False)
    index = ShardIndex(head.row, offsets=offsets, crc32c=checksums)
    # Keys are decompressed at first use, because they are most of an index.
    index._stored = {column: stored[column] for column in (b"keys", b"members") if column in stored}
    return index


def _checked(view: memoryview, entry: _Entry, name: str) -> memoryview:
    """Return the stored bytes of a column.

    Raises:
        DataError: Their checksum is wrong.
    """
    from penstock.checksums.crc32c import crc32c

    end = entry.start + entry.stored_bytes
    if end > len(view):
        raise DataError(f"a column ends at byte {end} of {len(view)}", shard=name)
    data = view[entry.start : end]
    if crc32c(data) != entry.checksum:
        what = f"the checksum of the column at byte {entry.start} is wrong"
        raise DataError(what, shard=name, offset_bytes=entry.start)
    return data


def _expanded(data: memoryview, entry: _Entry, name: str) -> Buffer:
    if entry.coding == _RAW:
        return data
    if entry.coding != _ZLIB:
        raise DataError(f"the column at byte {entry.start} has the unknown coding {entry.coding}", shard=name)
    try:
        return zlib.decompressobj().decompress(data, entry.decoded_bytes)
    except zlib.error as error:
        raise DataError(f"the column at byte {entry.start} cannot be decompressed ({error})", shard=name) from error


def _decode_offsets(data: Buffer, count: int, item_bytes: int, unit: int, name: str) -> NDArray[np.int64]:
    if item_bytes not in ITEM_BYTES or len(data) != 8 + item_bytes * count:
        raise DataError(f"{len(data)} bytes of bounds for {count} samples of {item_bytes} bytes", shard=name)
    offsets = np.empty(count + 1, np.int64)
    offsets[0] = struct.unpack_from("<Q", data)[0]
    np.cumsum(np.frombuffer(data, f"<u{item_bytes}", offset=8), dtype=np.int64, out=offsets[1:])
    offsets[1:] *= unit
    offsets[1:] += offsets[0]
    return offsets
