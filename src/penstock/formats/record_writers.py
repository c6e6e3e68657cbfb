"""Samples in; a shard of TFRecord, RecordIO or JSON lines out. As ``TarWriter``: the same samples give the same bytes.

Each ``add`` says where the sample lies, so that an index is a by-product. JSON lines hold a sample's ``__key__``, TFRecord
only on request, RecordIO never.
"""

from __future__ import annotations

import json
import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.crc import sample_crc
from penstock.errors import ConfigError
from penstock.formats import recordio, tfrecord
from penstock.formats.recordio import FIRST, LAST, MAGIC, MIDDLE, PART_BYTES_MAX, WHOLE
from penstock.formats.sample import RESERVED_FIELDS, check_key
from penstock.formats.tar_writer import bytes_of
from penstock.formats.tfrecord import masked, masked_crc
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.types import Buffer

_LENGTH, _CRC = struct.Struct("<Q"), struct.Struct("<I")

_PIECE_BYTES = 16 << 10
"""Values from this size on are written by themselves: a call costs as much as copying so many."""

_VARINTS = [bytes((value,)) for value in range(0x80)]

_FIND_MAGIC = re.compile(re.escape(MAGIC)).finditer


class RecordWriter(ABC):
    """Base of these writers.

    Args:
        write: Takes the next bytes of the shard, in order, e.g. ``store.writer(key).write`` or ``file.write``. They are
            valid only during the call. Where it raises, the shard is broken.

    Attributes:
        decided_format: What the first sample decides that a parser will take all records for; None before it, and where
            the format leaves nothing open.
    """

    decided_format: str | None = None

    def __init__(self, write: Callable[[Buffer], object]) -> None:
        self._write = write
        self._offset_bytes = 0
        self._finished = False

    @property
    def offset_bytes(self) -> int:
        """Bytes written so far; where the next sample will begin."""
        return self._offset_bytes

    def add(self, sample: Mapping[str, Any]) -> ByteRange:
        """Append one sample, by field; names with which ``penstock`` adds to samples are passed over.

        Returns:
            Where in the shard it lies: a parser can start at its start.

        Raises:
            ConfigError: The format cannot hold it, or the shard is finished; nothing was written.
        """
        if self._finished:
            raise ConfigError("the shard is finished", hint=f"one {type(self).__name__} writes one shard")
        pieces = self._encode(sample)
        start = self._offset_bytes
        for piece in pieces:
            if len(piece):
                self._write(piece)
                self._offset_bytes += len(piece)
        return ByteRange(start, self._offset_bytes)

    def finish(self) -> int:
        """Nothing more will be added; the shard's length in bytes. None of these formats has an end mark."""
        self._finished = True
        return self._offset_bytes

    @abstractmethod
    def _encode(self, sample: Mapping[str, Any]) -> list[Buffer]:
        """The bytes of `sample`, in order."""


class TFRecordWriter(RecordWriter):
    """Writes a TFRecord shard.

    A sample with the one field ``record`` is stored as it is. Any other becomes a ``tf.train.Example``: ``bytes`` and
    ``str`` a list of one value, ``int`` and sequences of them an ``Int64List``, ``float`` and sequences a
    ``FloatList``; numpy arrays by their dtype, flat. Features are sorted by name.

    Args:
        write: As for every writer.
        keeps_key: Store the sample's key as the feature ``__key__``, from which ``TFRecordParser`` reads it back. Then
            every record is an Example.
    """

    def __init__(self, write: Callable[[Buffer], object], *, keeps_key: bool = False) -> None:
        super().__init__(write)
        self._keeps_key = keeps_key

    def _encode(self, sample: Mapping[str, Any]) -> list[Buffer]:
        fields = {name: value for name, value in sample.items() if name not in RESERVED_FIELDS}
        if self._keeps_key:
            pieces = _example({"__key__": check_key(sample.get("__key__")), **fields})
        elif fields.keys() == {"record"}:
            pieces = [bytes_of("record", fields["record"])]
        elif fields:
            pieces = _example(fields)
        else:
            raise ConfigError("a sample has no field")
        if self.decided_format is None:
            self.decided_format = tfrecord.DECIDED[tfrecord.content_of(memoryview(b"".join(pieces)))]
        length = _LENGTH.pack(sum(map(len, pieces)))
        crc = 0
        for piece in pieces:
            crc = sample_crc(piece, crc)
        head, foot = length + _CRC.pack(masked_crc(length)), _CRC.pack(masked(crc))
        if len(pieces) == 1:
            return [head, *pieces, foot]
        return [head + pieces[0], *pieces[1:-1], bytes(pieces[-1]) + foot]  # both small: fewer pieces, fewer calls


class RecordIOWriter(RecordWriter):
    """Writes a RecordIO shard: samples with one field, ``record``."""

    def _encode(self, sample: Mapping[str, Any]) -> list[Buffer]:
        fields = {name: value for name, value in sample.items() if name not in RESERVED_FIELDS}
        if set(fields) != {"record"}:
            raise ConfigError(f"RecordIO stores one field, 'record', not {sorted(fields)}")
        record = memoryview(bytes_of("record", fields["record"]))
        if self.decided_format is None:
            self.decided_format = recordio.DECIDED[recordio.content_of(record)]
        cuts = [match.start() for match in _FIND_MAGIC(record) if match.start() % 4 == 0]
        starts = [0, *(cut + len(MAGIC) for cut in cuts)]
        ends = [*cuts, len(record)]
        pieces: list[Buffer] = []
        for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if end - start > PART_BYTES_MAX:
                raise ConfigError(f"a record of {len(record)} bytes; RecordIO holds {PART_BYTES_MAX}")
            last = index == len(cuts)
            flag = (WHOLE if last else FIRST) if not index else (LAST if last else MIDDLE)
            pieces += [
                MAGIC + struct.pack("<I", flag << 29 | end - start),
                record[start:end],
                bytes(-(end - start) % 4),
            ]
        return pieces


class JsonLinesWriter(RecordWriter):
    """Writes a shard of JSON lines. A sample is an object; or it has the one field ``json``, the text of one."""

    def _encode(self, sample: Mapping[str, Any]) -> list[Buffer]:
        if set(sample) - RESERVED_FIELDS == {"json"} and not isinstance(sample["json"], Mapping | int | float):
            line = bytes(bytes_of("json", sample["json"]))
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"field 'json' is no JSON: {error}") from None
        else:
            hidden = RESERVED_FIELDS - {"__key__"}
            value = {name: field for name, field in sample.items() if name not in hidden}
            try:
                line = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")
            except (TypeError, ValueError) as error:
                raise ConfigError(f"a sample cannot be JSON: {error}") from None
        if not isinstance(value, dict) or b"\n" in line:
            raise ConfigError(f"a line must hold one object, not {line[:40]!r}...")
        return [line, b"\n"]


def encode_example(fields: Mapping[str, Any]) -> bytes:
    """A serialised ``tf.train.Example``.

    Raises:
        ConfigError: A value is of a type that it cannot hold.
    """
    return b"".join(_example(fields))


def _example(fields: Mapping[str, Any]) -> list[Buffer]:
    """The same in pieces: large values are not copied, as each message around them would have it; the ends are small."""
    pieces: list[Buffer] = []
    small = bytearray()  # since the last large piece
    size = 0
    for name in sorted(fields):
        try:
            head, data = _feature(name, fields[name])
            length = len(data)
            key = name.encode("utf-8")
            entry = b"%c%b%b\x12%b" % (10, _varint(len(key)), key, _varint(len(head) + length))
        except (struct.error, OverflowError, TypeError, UnicodeEncodeError) as error:
            raise ConfigError(f"field {name!r} cannot be a feature: {error}") from None
        inside = len(entry) + len(head) + length
        start = b"\n" + _varint(inside)
        size += len(start) + inside
        small += start + entry + head
        if length < _PIECE_BYTES:
            small += data
            continue
        pieces += [small, data]
        small = bytearray()
    start = b"\n" + _varint(size)
    return [start + pieces[0], *pieces[1:], small] if pieces else [start + small]


def _feature(name: str, value: Any) -> tuple[bytes, Buffer]:
    """A ``Feature``: all but the last bytes of it, and these, which are the value where it is bytes."""
    if isinstance(value, str | bytes | bytearray):
        return _bytes_feature(name, value)
    if isinstance(value, int | float):
        value = [value]
    elif hasattr(value, "dtype"):
        value = value.reshape(-1).tolist()
    elif isinstance(value, memoryview):
        if value.format in {"B", "c", "b"}:
            return _bytes_feature(name, value)
        value = _flat(value.tolist())
    if not isinstance(value, Sequence):
        raise ConfigError(f"field {name!r} must be bytes, str or numbers, not {type(value).__name__}")
    if all(isinstance(item, int) for item in value):
        packed = b"".join(_varint(item & 0xFFFF_FFFF_FFFF_FFFF) for item in map(_int64, value))
        return b"", _message(3, _message(1, packed))
    if all(isinstance(item, int | float) for item in value):
        return b"", _message(2, _message(1, struct.pack(f"<{len(value)}f", *value)))
    return b"", _message(1, b"".join(_message(1, bytes(bytes_of(name, item))) for item in value))


def _bytes_feature(name: str, value: Any) -> tuple[bytes, Buffer]:
    data = bytes_of(name, value)
    inner = b"\n" + _varint(len(data))
    return b"\n" + _varint(len(inner) + len(data)) + inner, data


def _flat(values: Any) -> list[Any]:
    return [item for value in values for item in _flat(value)] if isinstance(values, list) else [values]


def _int64(value: int) -> int:
    if not -(1 << 63) <= value < 1 << 63:
        raise OverflowError(f"{value} is no int64")
    return value


def _message(number: int, data: bytes) -> bytes:
    return bytes((number << 3 | 2,)) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    if value < 0x80:
        return _VARINTS[value]
    if value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    if value < 0x20_0000:
        return bytes((value & 0x7F | 0x80, value >> 7 & 0x7F | 0x80, value >> 14))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
