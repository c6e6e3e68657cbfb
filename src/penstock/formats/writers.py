"""Writers of tar, TFRecord, RecordIO and JSON lines. The same samples always give the same bytes.

Two runs of one packer therefore give equal shards, whose checksums and ETags can be compared, and a repeated upload is
recognised. Each ``add`` returns where the sample lies, so an index is a by-product. Tar and JSON lines store a sample's
``__key__``, TFRecord stores it only on request, and RecordIO never does.
"""

from __future__ import annotations

import json
import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.checksums.crc32c import sample_crc
from penstock.errors import ConfigError
from penstock.formats.recordio import FIRST, LAST, MAGIC, MIDDLE, PART_BYTES_MAX, WHOLE, RecordIOParser
from penstock.formats.sample import RESERVED_FIELDS, check_field, check_key, is_bytes
from penstock.formats.tar_header import BLOCK_BYTES, headers
from penstock.formats.tfrecord import TFRecordParser, masked, masked_crc
from penstock.text.json_text import parse_json
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.types import Buffer

_LENGTH, _CRC = struct.Struct("<Q"), struct.Struct("<I")

_PIECE_BYTES = 16 << 10
"""Values of at least this size are written separately, because a call costs as much as copying this many bytes."""

_VARINTS = [bytes((value,)) for value in range(0x80)]

_FIND_MAGIC = re.compile(re.escape(MAGIC)).finditer


class ShardWriter(ABC):
    """Writes samples as a shard, and holds none of them.

    Args:
        write: Function that takes the next bytes of the shard, such as ``store.writer(key).write`` or ``file.write``. The
            bytes are valid only during the call. If the function raises, the shard is broken.

    Attributes:
        decided_format: The format as which a parser will read all records, determined by the first sample. None before
            the first sample, and for formats in which all records have the same content.
    """

    decided_format: str | None = None

    def __init__(self, write: Callable[[Buffer], object]) -> None:
        self._write = write
        self._offset_bytes = 0
        self._finished = False

    @property
    def offset_bytes(self) -> int:
        """Number of bytes written so far, at which the next sample will begin."""
        return self._offset_bytes

    def add(self, sample: Mapping[str, Any]) -> ByteRange:
        """Append one sample. Fields that penstock adds to samples, such as ``__shard__``, are ignored.

        Returns:
            The sample's span in the shard; a parser can start at its first byte.

        Raises:
            ConfigError: The format cannot represent the sample, or the shard is finished. Nothing was written.
        """
        if self._finished:
            raise ConfigError("the shard is finished", hint=f"one {type(self).__name__} writes one shard")
        pieces = self._encode(sample)
        start = self._offset_bytes
        self._put(pieces)
        return ByteRange(start, self._offset_bytes)

    def finish(self) -> int:
        """Write the end of the shard after the last sample, once. Returns the shard's length in bytes."""
        self._finished = True
        return self._offset_bytes

    def _put(self, pieces: Iterable[Buffer]) -> None:
        for piece in pieces:
            if len(piece):
                self._write(piece)
                self._offset_bytes += len(piece)

    @abstractmethod
    def _encode(self, sample: Mapping[str, Any]) -> list[Buffer]:
        """Return the bytes of `sample`, in order."""


class TarWriter(ShardWriter):
    """Writes a tar shard. Fields are sorted.

    A sample is ``{"__key__": "train/000007", "png": <bytes>, "cls": "3"}``, in which strings are stored as UTF-8. One that
    would not read back equal is refused before any of its bytes are written.

    Cost: each field takes one call for the header, one for the value, and one for its padding.
    """

    _key_last: str | None = None

    def _encode(self, sample: Mapping[str, Any]) -> list[Buffer]:
        key = check_key(sample.get("__key__"))
        if key == self._key_last:
            raise ConfigError(f"__key__ {key!r} twice in a row: the two would be read as one sample")
        pieces: list[Buffer] = []
        for field, value in sorted(sample.items()):
            if field not in RESERVED_FIELDS:
                name, data = f"{key}.{check_field(field)}", bytes_of(field, value)
                pieces += (headers(name, len(data)), data, bytes(-len(data) % BLOCK_BYTES))
        if not pieces:
            raise ConfigError(f"sample {key!r} has no field")
        self._key_last = key
        return pieces

    def finish(self) -> int:
        """Write the end-of-archive mark, once. Returns the shard's length in bytes."""
        if not self._finished:
            self._put([bytes(2 * BLOCK_BYTES)])
        return super().finish()


class TFRecordWriter(ShardWriter):
    """Writes a TFRecord shard.

    A sample whose only field is ``record`` is stored unchanged. Any other becomes a ``tf.train.Example``: ``bytes`` and
    ``str`` become a list of one value, ``int`` and sequences of them an ``Int64List``, ``float`` and sequences of them a
    ``FloatList``, and NumPy arrays are flattened and stored by their dtype. Features are sorted by name.

    Args:
        write: Function that takes the next bytes of the shard, as for ``ShardWriter``.
        keeps_key: Whether to store the sample's key as the feature ``__key__``, from which ``TFRecordParser`` reads it
            back. Every record is then an Example.
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
            self.decided_format = TFRecordParser.format_of(memoryview(b"".join(pieces)))
        crc = 0
        for piece in pieces:
            crc = sample_crc(piece, crc)
        head, foot = frame_head(sum(map(len, pieces))), _CRC.pack(masked(crc))
        if len(pieces) == 1:
            return [head, *pieces, foot]
        # Both are small, so joining them saves calls.
        return [
            head + pieces[0],
            *pieces[1:-1],
            bytes(pieces[-1]) + foot,
        ]


class RecordIOWriter(ShardWriter):
    """Writes a RecordIO shard of samples whose only field is ``record``."""

    def _encode(self, sample: Mapping[str, Any]) -> list[Buffer]:
        fields = {name: value for name, value in sample.items() if name not in RESERVED_FIELDS}
        if set(fields) != {"record"}:
            raise ConfigError(f"RecordIO stores one field, 'record', not {sorted(fields)}")
        record = memoryview(bytes_of("record", fields["record"]))
        if self.decided_format is None:
            self.decided_format = RecordIOParser.format_of(record)
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


class JsonLinesWriter(ShardWriter):
    """Writes a shard of JSON lines. A sample becomes one object, or its only field, ``json``, is the text of one."""

    def _encode(self, sample: Mapping[str, Any]) -> list[Buffer]:
        if set(sample) - RESERVED_FIELDS == {"json"} and not isinstance(sample["json"], Mapping | int | float):
            line = bytes(bytes_of("json", sample["json"]))
            try:
                value = parse_json(line)
            except ValueError as error:
                raise ConfigError(f"field 'json' is not JSON: {error}") from None
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
    """Serialise a ``tf.train.Example``.

    Raises:
        ConfigError: A value has a type that an Example cannot represent.
    """
    return b"".join(_example(fields))


def _example(fields: Mapping[str, Any]) -> list[Buffer]:
    """Serialise an Example in pieces, so that large values are not copied once for each message that encloses them."""
    pieces: list[Buffer] = []
    small = bytearray()  # pieces since the last large one
    size = 0
    for name in sorted(fields):
        head, data = feature_entry(name, fields[name])
        size += len(head) + len(data)
        small += head
        if len(data) < _PIECE_BYTES:
            small += data
            continue
        pieces += [small, data]
        small = bytearray()
    start = features_head(size)
    return [start + pieces[0], *pieces[1:], small] if pieces else [start + small]


def features_head(size_bytes: int) -> bytes:
    """Return what precedes the features of an Example, which take `size_bytes` bytes in total."""
    return b"\n" + _varint(size_bytes)


def frame_head(size_bytes: int) -> bytes:
    """Return what precedes a record of `size_bytes` bytes in a TFRecord shard: its length and the CRC of the length."""
    length = _LENGTH.pack(size_bytes)
    return length + _CRC.pack(masked_crc(length))


def feature_entry(name: str, value: Any) -> tuple[bytes, Buffer]:
    """Serialise a feature with its name in two parts: all but its last bytes, and its last bytes.

    The second part is the value if it is bytes; then the first part depends only on the name and the value's length.

    Raises:
        ConfigError: The value has a type that an Example cannot represent.
    """
    try:
        head, data = _feature(name, value)
        key = name.encode("utf-8")
        entry = b"%c%b%b\x12%b" % (10, _varint(len(key)), key, _varint(len(head) + len(data)))
    except (struct.error, OverflowError, TypeError, UnicodeEncodeError) as error:
        raise ConfigError(f"field {name!r} cannot be a feature: {error}") from None
    return b"\n" + _varint(len(entry) + len(head) + len(data)) + entry + head, data


def _feature(name: str, value: Any) -> tuple[bytes, Buffer]:
    """Serialise a ``Feature`` in two parts: all but its last bytes, and its last bytes, which are the value if it is bytes."""
    if isinstance(value, str | bytes | bytearray):
        return _bytes_feature(name, value)
    if isinstance(value, int | float):
        value = [value]
    elif hasattr(value, "dtype"):
        value = value.reshape(-1).tolist()
    elif isinstance(value, memoryview):
        if is_bytes(value):
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
        raise OverflowError(f"{value} is not an int64")
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


def bytes_of(field: str, value: object) -> Buffer:
    """Return `value` as bytes, with strings encoded as UTF-8.

    Raises:
        ConfigError: The value is neither bytes nor a string.
    """
    if isinstance(value, str):
        return value.encode("utf-8")
    if isinstance(value, bytes | bytearray):
        return value
    if isinstance(value, memoryview) and value.c_contiguous:
        return value.cast("B")
    raise ConfigError(f"field {field!r} must be bytes, a contiguous memoryview or str, not {type(value).__name__}")
