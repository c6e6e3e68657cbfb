"""Parses TFRecord shards and verifies both checksums of each record.

A record, in little endian, is ``uint64 length, uint32 masked CRC32C of the length, uint8[length], uint32 masked CRC32C of the
bytes``. It holds a ``tf.train.Example``, whose features become fields, or anything else, and then the sample has one field,
``record``. The shard does not state which. With ``auto`` the first valid record decides, so reading can only begin inside
a shard once that is known. A sample's key is its feature ``__key__``. Without one it is the offset of the record in twelve
digits, which does not depend on where reading began.

A wrong CRC of the bytes loses that record. A wrong CRC of the length loses the rest of the shard, because the offset of
the next record is unknown.

An Example is read without TensorFlow: the parser knows exactly as much of the protobuf wire format as this message uses.
The messages are ``Example { Features features = 1 }`` and ``Features { map<string, Feature> feature = 1 }``. A map entry is
a message with key = 1 and value = 2. A ``Feature`` is one of ``BytesList`` = 1, ``FloatList`` = 2 and ``Int64List`` = 3,
each with a repeated value = 1; numbers may be packed or not. As protobuf requires, the last of several entries with one key
counts, and fields with unknown numbers are ignored. The outermost message is the exception: an unknown field there means a
different message (``SequenceExample``), half of which would be lost silently.

Nearly all entries of a shard have the same shape, a list of one value: seven tags and lengths, including the key, and then
the value. Such a header contains the length of the value, and two headers with the same key and length have the same
bytes. So headers are found by a regular expression and looked up in `_heads`, to which each is added after it was parsed
exactly once. `_read_entry` parses every other shape, and is written for clarity rather than speed.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, NamedTuple

from penstock.checksums.crc32c import crc32c
from penstock.formats.parsing import RECORD_BYTES_MAX, OnCorrupt, RecordParser
from penstock.formats.sample import RESERVED_FIELDS, Sample, typed, view_of_array

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.types import Buffer

_VARINT = rb"[\x80-\xff]{0,9}[\x00-\x7f]"
_TOP = re.compile(rb"\x0a(" + _VARINT + rb")", re.DOTALL).match
_HEAD = re.compile(
    rb"\x0a" + _VARINT  # the map entry
    + rb"\x0a[\x00-\x7f][^\x12]{0,127}"  # its key, whose length is checked when the header is added to _heads
    + rb"\x12" + _VARINT + rb"[\x0a\x1a]" + _VARINT + rb"\x0a" + _VARINT,  # the feature, its list, and the value
    re.DOTALL,
).match  # fmt: skip

_KNOWN_MAX = 16384
_KNOWN_BYTES_MAX = 64 << 10
"""Largest value whose header is remembered. Larger lengths hardly ever repeat, and parsing them costs little in comparison."""
_VARINT_BYTES_MAX = 10
_LABEL_BYTES_MAX = 10

_heads: dict[bytes, tuple[str, int, bool]] = {}  # stored header -> (name, length of the value, whether it is bytes)
_sizes: dict[bytes, int] = {}  # stored varint -> number
_labels: dict[bytes, memoryview] = {}  # stored packed int64s -> int64[count]

HEAD_BYTES = 12
FOOT_BYTES = 4
_UNPACK = struct.Struct("<QI").unpack_from
_UNPACK_CRC = struct.Struct("<I").unpack_from

HEADS_KNOWN_MAX = 16384
"""Number of verified record headers to remember. The records of a shard have a few thousand distinct lengths."""


def masked_crc(data: Buffer) -> int:
    """Compute a CRC32C as TFRecord stores it: rotated and offset, so that a CRC of data that contains CRCs stays effective."""
    return masked(crc32c(data))


def masked(crc: int) -> int:
    """Convert a CRC32C to the form in which TFRecord stores it."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def is_tfrecord(head: bytes) -> bool:
    """Whether `head` begins with a length and its CRC, which other data does once in four billion times."""
    return len(head) >= HEAD_BYTES and _UNPACK(head)[1] == masked_crc(head[:8])


class TFRecordParser(RecordParser):
    """Samples of one TFRecord shard.

    The contents are ``example`` for features as fields, and ``raw`` for one field, ``record``.

    Cost: holds one incomplete record. Slices of a chunk keep that chunk alive.
    """

    FORMATS = ("tfrecord-example", "tfrecord-raw")

    def __init__(
        self, shard: str, *, start_offset_bytes: int = 0, on_corrupt: OnCorrupt = "raise", content: str = "auto"
    ) -> None:
        super().__init__(shard, start_offset_bytes=start_offset_bytes, on_corrupt=on_corrupt, content=content)
        self._heads_known: dict[bytes, int] = {}  # stored header -> size of the whole record

    @staticmethod
    def format_of(record: memoryview) -> str:
        """Return the format that `record`, the first of a shard, determines.

        An Example must have at least one feature, and its ``__key__``, if it has one, must be a valid key.
        """
        try:
            fields = parse_example(record)
            if "__key__" in fields:
                key_of(fields["__key__"])
        except ValueError:
            return "tfrecord-raw"
        return "tfrecord-example" if fields else "tfrecord-raw"

    def _scan(self, view: memoryview, at: int, samples: list[Sample]) -> tuple[int, int]:
        if self._groups is not None and self._content != "raw":
            at = self._scan_columns(view, at, samples)
        base, length = self._view_offset_bytes, len(view)
        known, content = self._heads_known, "first" if self._is_first else self._content
        while at + HEAD_BYTES + FOOT_BYTES <= length:
            head = bytes(view[at : at + HEAD_BYTES])
            size_bytes = known.get(head) or self._read_head(head, base + at)
            end = at + size_bytes
            if end > length:
                return at, size_bytes
            offset_bytes = base + at
            record = view[at + HEAD_BYTES : end - FOOT_BYTES]
            crc = crc32c(record)
            if ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF != _UNPACK_CRC(view, end - FOOT_BYTES)[0]:
                what = f"a record of {len(record)} bytes does not have its CRC32C"
                self._skip_sample(what, offset_bytes, size_bytes)
            elif content == "raw":
                samples.append(Sample(f"{offset_bytes:012d}", {"record": record}, offset_bytes, size_bytes))
            elif content == "first":
                content = self._decide(record)
                continue
            else:
                try:
                    fields = parse_example(record)
                    stored = fields.pop("__key__", None)
                    key = f"{offset_bytes:012d}" if stored is None else key_of(stored)
                    samples.append(Sample(key, fields, offset_bytes, size_bytes))
                except ValueError as error:
                    hint = "format='tfrecord-raw' gives the bytes of each record"
                    self._skip_sample(str(error), offset_bytes, size_bytes, hint=hint)
            at = end
        return at, HEAD_BYTES + FOOT_BYTES

    def _scan_columns(self, view: memoryview, at: int, samples: list[Sample]) -> int:
        """Parse the records from view[at:] on at once if they are valid and alike. Returns where the rest begins."""
        from penstock.formats.tfrecord_columns import read_examples, read_frames

        frames = read_frames(view, at)
        if frames is not None and self._is_first:
            self._decide(view[int(frames.starts[0]) : int(frames.ends[0])])
            if self._content == "raw":
                return at
        found = frames and read_examples(view, frames, self._view_offset_bytes)
        if frames is None or found is None:
            return at
        self._add_columns(found, samples)
        return int(frames.ends[-1]) + FOOT_BYTES

    def _read_head(self, head: bytes, offset_bytes: int) -> int:
        size_bytes, crc = _UNPACK(head)
        if masked_crc(head[:8]) != crc:
            raise self._corrupt(
                f"not a TFRecord shard: the length of a record ({size_bytes}) does not have its CRC32C",
                offset_bytes,
                hint=self._start_hint(head, offset_bytes),
            )
        if size_bytes > RECORD_BYTES_MAX:
            raise self._corrupt(f"a record claims {size_bytes} bytes, more than {RECORD_BYTES_MAX}", offset_bytes)
        whole_bytes: int = size_bytes + HEAD_BYTES + FOOT_BYTES
        if len(self._heads_known) < HEADS_KNOWN_MAX:
            self._heads_known[head] = whole_bytes
        return whole_bytes


# ── tf.train.Example ────────────────────────────────────────────────────────────────────────────────────────────────


def parse_example(view: memoryview) -> dict[str, memoryview]:
    """Return the features of one serialised ``tf.train.Example`` by name, in stored order.

    A list of one ``bytes`` value is a uint8 slice of `view`. A list of several becomes the fields ``name.0``, ``name.1``
    and so on, and an empty list an empty view. Numbers are int64[count] and float32[count]. The result includes a feature
    ``__key__``, if there is one; ``key_of`` interprets it.

    Raises:
        ValueError: `view` is not a serialised Example.
    """
    fields: dict[str, memoryview] = {}
    heads, labels, end = _heads, _labels, len(view)
    top = _TOP(view)
    if top is not None and top.end() + (_sizes.get(top[1]) or _size(top[1])) == end:
        at = top.end()
    else:
        view = _merged(view)
        at, end = 0, len(view)
    while at < end:  # loop over the fields of Features, nearly all of which are map entries
        match = _HEAD(view, at, end)
        known = None if match is None else heads.get(match[0]) or _learn(match[0])
        if match is None or known is None:
            at = _read_entry(view, at, end, fields)
            continue
        name, size_bytes, is_bytes = known
        start = match.end()
        stop = start + size_bytes
        if stop > end or name in fields:
            at = _read_entry(view, at, end, fields)  # it raises the error
            continue
        value = view[start:stop]
        fields[name] = value if is_bytes else labels.get(bytes(value)) or integers(value)
        at = stop
    return fields


def key_of(value: memoryview | bytes) -> str:
    """Return the sample's key from the value of its feature ``__key__``, a list of one string.

    Raises:
        ValueError: The value is empty, a number, or not valid UTF-8.
    """
    if isinstance(value, memoryview) and value.format not in {"B", "b", "c"}:
        raise ValueError("the feature '__key__' holds numbers, not the text of a key")
    key = bytes(value).decode()
    if not key:
        raise ValueError("the feature '__key__' is empty")
    return key


class FeatureHead(NamedTuple):
    """The header of a feature in an Example whose value is a list of one.

    Attributes:
        key: The feature's name as stored, shorter than 128 bytes.
        name: The feature's name as text.
        is_bytes: Whether the value is bytes; otherwise it is int64.
    """

    key: bytes
    name: str
    is_bytes: bool


def feature_heads(view: memoryview) -> list[FeatureHead] | None:
    """Return the feature headers of one Example in stored order.

    Returns None unless every feature occurs once and is a list of one value.
    """
    heads: list[FeatureHead] = []
    try:
        top = _TOP(view)
        if top is None or top.end() + _size(top[1]) != len(view):
            return None
        at = top.end()
        while at < len(view):
            match = _HEAD(view, at, len(view))
            known = None if match is None else _learn(match[0])
            if match is None or known is None:
                return None
            _, key_at = _varint(view, at + 1, len(view))
            key = bytes(view[key_at + 2 : key_at + 2 + view[key_at + 1]])
            heads.append(FeatureHead(key, known[0], known[2]))
            at = match.end() + known[1]
    except ValueError:
        return None
    return heads if len({head.name for head in heads}) == len(heads) else None


def stored_features(view: memoryview) -> Iterator[tuple[str, memoryview]]:
    """Yield the name and the serialised map entry of each feature of an Example, in stored order.

    Joined, with the length of all of them in front, the entries are an Example again.

    Raises:
        ValueError: `view` is not a serialised Example.
    """
    whole = _merged(view)
    at = 0
    while at < len(whole):
        number, kind, start, stop = _field(whole, at, len(whole))
        if number == 1:
            if kind != 2:
                raise ValueError(f"not a tf.train.Example: an entry of wire type {kind}")
            names = [_name(bytes(whole[a:b])) for inner, a, b in _messages(whole, start, stop) if inner == 1]
            yield names[-1] if names else "", whole[at:stop]
        at = stop


def _merged(view: memoryview) -> memoryview:
    """Concatenate the contents of several ``Features`` messages, which is how protobuf merges them."""
    pieces = []
    for number, start, end in _messages(view, 0, len(view)):
        if number != 1:
            raise ValueError(f"not a tf.train.Example: it has a field number {number}")
        pieces.append(view[start:end])
    return memoryview(b"".join(pieces))


def _learn(head: bytes) -> tuple[str, int, bool] | None:
    """Return (name, length of the value, whether it is bytes) if `head` belongs to a list of one value, else None."""
    try:
        name, size_bytes, is_bytes = _read_head(head)
    except (ValueError, IndexError):
        return None
    known = (_name(name), size_bytes, is_bytes)
    if len(_heads) < _KNOWN_MAX and size_bytes <= _KNOWN_BYTES_MAX:
        _heads[head] = known
    return known


def _read_head(head: bytes) -> tuple[bytes, int, bool]:
    view, end = memoryview(head), len(head)
    entry_bytes, entry_start = _varint(view, 1, end)
    key_start = entry_start + 2
    key_end = key_start + head[entry_start + 1]
    if head[key_end] != 0x12:
        raise ValueError("the key ends elsewhere")
    feature_bytes, feature_start = _varint(view, key_end + 1, end)
    list_bytes, list_start = _varint(view, feature_start + 1, end)
    size_bytes, value_start = _varint(view, list_start + 1, end)
    stops = {entry_start + entry_bytes, feature_start + feature_bytes, list_start + list_bytes}
    if value_start != end or stops != {end + size_bytes}:
        raise ValueError("not a list of one value")
    return head[key_start:key_end], size_bytes, head[feature_start] == 0x0A


def _read_entry(view: memoryview, at: int, end: int, fields: dict[str, memoryview]) -> int:
    """Parse one field of ``Features`` at view[at:], of any shape. Returns where the next field begins."""
    number, kind, start, stop = _field(view, at, end)
    if number != 1:
        return stop
    if kind != 2:
        raise ValueError(f"not a tf.train.Example: an entry of wire type {kind}")
    name, feature = "", (start, start)
    for inner, inner_start, inner_end in _messages(view, start, stop):
        if inner == 1:
            name = _name(bytes(view[inner_start:inner_end]))
        elif inner == 2:
            feature = (inner_start, inner_end)
    for field, value in _read_feature(view, *feature, name).items():
        if field in fields:
            raise ValueError(f"not a tf.train.Example: feature {field!r} twice")
        fields[field] = value
    return stop


def _read_feature(view: memoryview, start: int, end: int, name: str) -> dict[str, memoryview]:
    kind = 0
    pieces: list[tuple[int, int]] = []
    for number, inner_start, inner_end in _messages(view, start, end):
        if number not in {1, 2, 3}:
            continue
        if number != kind:  # the last member of a oneof counts; several of one kind are merged
            kind, pieces = number, []
        pieces.append((inner_start, inner_end))
    if kind == 1:
        values = [view[a:b] for start, end in pieces for n, a, b in _messages(view, start, end) if n == 1]
        if len(values) > 1:
            return {f"{name}.{index}": value for index, value in enumerate(values)}
        return {name: values[0] if values else memoryview(b"")}
    if kind == 0:
        return {name: memoryview(b"")}
    raw = b"".join(_packed(view, start, end, 5 if kind == 2 else 0) for start, end in pieces)
    return {name: typed(memoryview(raw), "f") if kind == 2 else integers(memoryview(raw))}


def _packed(view: memoryview, start: int, end: int, kind_single: int) -> bytes:
    """Return the values of a FloatList or Int64List in packed form."""
    out = []
    at = start
    while at < end:
        number, kind, value_start, at = _field(view, at, end)
        if number == 1:
            if kind not in {2, kind_single}:
                raise ValueError(f"not a tf.train.Example: a number of wire type {kind}")
            out.append(bytes(view[value_start:at]))
    return b"".join(out)


def integers(packed: memoryview) -> memoryview:
    """Decode packed varints to int64[count].

    Raises:
        ValueError: A varint is cut off, or longer than 64 bits.
    """
    if len(packed) > _LABEL_BYTES_MAX:
        return _integers_many(packed)
    raw = bytes(packed)
    known = _labels.get(raw)
    if known is None:
        values, at = [], 0
        while at < len(raw):
            value, at = _varint(packed, at, len(raw))
            values.append(value - (1 << 64) if value >> 63 else value)
        known = typed(memoryview(struct.pack(f"={len(values)}q", *values)), "q")
        if len(_labels) < _KNOWN_MAX:
            _labels[raw] = known
    return known


def _integers_many(packed: memoryview) -> memoryview:
    """Do what `integers` does, with numpy: 30 ns a value instead of 300."""
    import numpy as np

    data = np.frombuffer(packed, np.uint8)
    last = data < 0x80
    if not last[-1]:
        raise ValueError("not a tf.train.Example: a varint is cut off")
    if last.all():
        return view_of_array(data.astype(np.int64))
    ends = np.flatnonzero(last)
    starts = np.concatenate(([0], ends[:-1] + 1))
    sizes = ends - starts + 1
    if sizes.max() > _VARINT_BYTES_MAX:
        raise ValueError("not a tf.train.Example: a varint of more than 10 bytes")
    places = np.arange(len(data)) - np.repeat(starts, sizes)
    pieces = (data & 0x7F).astype(np.uint64) << (7 * places).astype(np.uint64)
    return view_of_array(np.add.reduceat(pieces, starts).view(np.int64))


def _messages(view: memoryview, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (field number, start, end) of the length-delimited fields in view[at:end]; ignore other fields."""
    while at < end:
        number, kind, start, at = _field(view, at, end)
        if kind == 2:
            yield number, start, at


def _field(view: memoryview, at: int, end: int) -> tuple[int, int, int, int]:
    """Return (field number, wire type, start, end) of the field at view[at:]; `start` lies after its length, if it has one."""
    tag, start = _varint(view, at, end)
    number, kind = tag >> 3, tag & 7
    if kind == 2:
        size, start = _varint(view, start, end)
        stop = start + size
    elif kind == 0:
        _, stop = _varint(view, start, end)
    elif kind in {1, 5}:
        stop = start + (8 if kind == 1 else 4)
    else:
        stop = -1
    if not number or not start <= stop <= end:
        raise ValueError(f"not a protobuf message: field {number} of wire type {kind} does not fit into what is there")
    return number, kind, start, stop


def _varint(view: memoryview, at: int, end: int) -> tuple[int, int]:
    """Return the unsigned varint at view[at:] and where it ends."""
    value = 0
    for shift in range(0, 7 * _VARINT_BYTES_MAX, 7):
        if at >= end:
            break
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
    raise ValueError("not a protobuf message: a varint is cut off or too long")


def _size(raw: bytes) -> int:
    value, _ = _varint(memoryview(raw), 0, len(raw))
    if len(_sizes) < _KNOWN_MAX and value <= _KNOWN_BYTES_MAX:
        _sizes[raw] = value
    return value


def _name(raw: bytes) -> str:
    name = raw.decode("utf-8", "surrogateescape")
    if name in RESERVED_FIELDS and name != "__key__":
        raise ValueError(f"a feature is called {name!r}, a name that penstock adds itself")
    return name
