"""Parses and frames many TFRecords of Examples at once with NumPy.

`TFRecordParser` uses ``read_frames`` and ``read_examples`` if its caller wants columns, for Examples that all have the features
of the first. Lengths and both CRCs are verified as in the other parser. The Examples are parsed in parallel, with an array
that holds an offset for each record. Features that are not lists of one value, or that come in another order than in the
first record, are left to the other parser.

``ExampleFramer`` is the counterpart. `TFRecordWriter` takes one sample at a time, which costs 10 µs. Samples in columns
have the same features, and most headers in them depend only on the length of one value. They are looked up by that length,
and the rest is a few calls for each column and two for each record: 1.5 µs for a picture with a label. The bytes are
exactly those of `TFRecordWriter`.
"""

from __future__ import annotations

import struct
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from penstock.checksums.crc32c import crc32c
from penstock.formats.columnar import Samples, kind_of
from penstock.formats.tfrecord import FOOT_BYTES, HEAD_BYTES, feature_heads, key_of
from penstock.formats.writers import feature_entry, features_head, frame_head

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.formats.tfrecord import FeatureHead
    from penstock.types import Buffer

RECORDS_MIN = 16
"""Fewest records to handle here. With fewer, NumPy's calls cost more than the loop that they replace."""

RECORD_BYTES_MAX = 1 << 20
"""Largest first record: large records gain nothing here. The bound also limits lengths to three bytes of a varint."""

_LENGTH_BYTES_MAX = 3  # bytes of a varint that is a length
_VALUE_BYTES_MAX = 10
_UNPACK_SIZE = struct.Struct("<Q").unpack_from
_KNOWN_MAX = 16384  # lengths and headers to remember; the values of a shard have a few thousand distinct lengths

_size_crcs: dict[int, int] = {}  # length -> unmasked CRC of its eight bytes

_Part: TypeAlias = "bytes | Sequence[Any] | NDArray[np.uint8]"
# What all records have in common, or one piece of bytes for each record: a list, or the rows of an array.


class _NotAlikeError(Exception):
    """The records do not all have the shape that this module handles."""


class Frames(NamedTuple):
    """Consecutive complete records whose CRCs were verified.

    Attributes:
        starts: int64[n]: offsets in the chunk at which the bytes of the records begin.
        ends: int64[n]: offsets at which they end.
    """

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


def read_frames(view: memoryview, at: int) -> Frames | None:
    """Find the complete records from view[at] on. Returns None if they are too few, too large, or damaged."""
    starts, crcs, length, most = [], [], len(view), HEAD_BYTES + FOOT_BYTES + RECORD_BYTES_MAX
    while at + HEAD_BYTES <= length:
        size = _UNPACK_SIZE(view, at)[0] + HEAD_BYTES + FOOT_BYTES
        if size > most or at + size > length:
            break
        start = at + HEAD_BYTES
        at += size
        starts.append(start)
        crcs.append(crc32c(view[start : at - FOOT_BYTES]))
    if len(starts) < RECORDS_MIN:
        return None
    begins = np.array(starts)
    ends = np.append(begins[1:], at + HEAD_BYTES) - (HEAD_BYTES + FOOT_BYTES)
    data = np.frombuffer(view, np.uint8)
    heads = np.array([_size_crcs.get(size) or _size_crc(size) for size in (ends - begins).tolist()], np.uint32)
    if not (_uint32_at(data, begins - 4) == masked_crcs(heads)).all():
        return None
    if not (_uint32_at(data, ends) == masked_crcs(np.array(crcs, np.uint32))).all():
        return None
    return Frames(begins, ends)


def _size_crc(size: int) -> int:
    crc: int = crc32c(size.to_bytes(8, "little"))
    if len(_size_crcs) < _KNOWN_MAX:
        _size_crcs[size] = crc
    return crc


def masked_crcs(crcs: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Convert CRC32Cs, uint32[n], to the form in which TFRecord stores them."""
    return ((crcs >> np.uint32(15)) | (crcs << np.uint32(17))) + np.uint32(0xA282EAD8)


def _uint32_at(data: NDArray[np.uint8], at: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Read little-endian uint32[n] at any offsets."""
    found: NDArray[np.uint32] = data[at[:, None] + np.arange(4)].view("<u4")[:, 0]
    return found


def read_examples(view: memoryview, frames: Frames, base_bytes: int) -> Samples | None:
    """Parse records as Examples, with values copied from `view`. Returns None if they are not all like the first.

    Args:
        view: The chunk.
        frames: The records in the chunk.
        base_bytes: Offset of the chunk in the shard.
    """
    first = view[int(frames.starts[0]) : int(frames.ends[0])]
    features = feature_heads(first)
    if not features:
        return None
    offsets = frames.starts - HEAD_BYTES
    sizes = (frames.ends - frames.starts + (HEAD_BYTES + FOOT_BYTES)).tolist()
    try:
        columns = _values(view, frames, features)
    except _NotAlikeError:
        return None
    in_shard = (offsets + base_bytes).tolist()
    names = tuple(feature.name for feature in features)
    if "__key__" in names:
        place = names.index("__key__")
        if not features[place].is_bytes:
            return None  # the other parser raises the error
        try:
            keys = [key_of(value) for value in columns.pop(place)]
        except ValueError:
            return None
        names = names[:place] + names[place + 1 :]
    else:
        keys = ("%012d\n" * len(in_shard) % tuple(in_shard)).split()
    integers = frozenset(each.name for each in features if not each.is_bytes and each.name in names)
    return Samples(kind_of(names, integers), [keys, in_shard, sizes, *columns])


def _values(view: memoryview, frames: Frames, features: list[FeatureHead]) -> list[list[Any]]:
    data = np.frombuffer(view, np.uint8)
    at = _expect(data, frames.starts, b"\x0a", frames.ends)
    at = _until(*_length(data, at, frames.ends), frames.ends)
    columns: list[list[Any]] = []
    for feature in features:
        at = _expect(data, at, b"\x0a", frames.ends)
        size, at = _length(data, at, frames.ends)
        end = at + size  # end of the map entry, and of everything in it
        if (end > frames.ends).any():
            raise _NotAlikeError
        at = _expect(data, at, b"\x0a" + bytes([len(feature.key)]) + feature.key + b"\x12", end)
        at = _until(*_length(data, at, end), end)
        at = _expect(data, at, b"\x0a" if feature.is_bytes else b"\x1a", end)
        at = _until(*_length(data, at, end), end)
        at = _expect(data, at, b"\x0a", end)
        at = _until(*_length(data, at, end), end)
        if feature.is_bytes:
            bounds = zip(at.tolist(), end.tolist(), strict=True)
            columns.append([view[start:stop].tobytes() for start, stop in bounds])
        else:
            columns.append(_integers(data, at, end).tolist())
        at = end
    if (at != frames.ends).any():
        raise _NotAlikeError
    return columns


def _expect(data: NDArray[np.uint8], at: NDArray[np.int64], what: bytes, end: NDArray[np.int64]) -> NDArray[np.int64]:
    """Advance past `what`, which every record must have at its offset."""
    after = at + len(what)
    if (after > end).any():
        raise _NotAlikeError
    if (data[at[:, None] + np.arange(len(what))] != np.frombuffer(what, np.uint8)).any():
        raise _NotAlikeError
    return after


def _length(
    data: NDArray[np.uint8], at: NDArray[np.int64], end: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the varints at these offsets and where they end."""
    value = np.zeros(len(at), np.int64)
    more = np.ones(len(at), np.bool_)
    for number in range(_LENGTH_BYTES_MAX):
        if (at >= end)[more].any():
            raise _NotAlikeError
        byte = data[np.minimum(at, len(data) - 1)]
        value += np.where(more, (byte & 0x7F).astype(np.int64) << (7 * number), 0)
        at = at + more
        more = more & (byte > 0x7F)
        if not more.any():
            return value, at
    raise _NotAlikeError


def _until(size: NDArray[np.int64], at: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return `at` after checking that `size` bytes from there reach exactly to `end`."""
    if (at + size != end).any():
        raise _NotAlikeError
    return at


def _integers(data: NDArray[np.uint8], at: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
    """Decode one varint for each record to int64[n]."""
    sizes = end - at
    if sizes.min() < 1 or sizes.max() > _VALUE_BYTES_MAX or (data[end - 1] > 0x7F).any():
        raise _NotAlikeError
    value = np.zeros(len(at), np.uint64)
    for number in range(int(sizes.max())):
        here = number < sizes
        byte = data[np.where(here, at + number, at)]
        if ((byte <= 0x7F) & (number < sizes - 1)).any():
            raise _NotAlikeError  # several values
        value |= np.where(here, (byte & 0x7F).astype(np.uint64) << np.uint64(7 * number), np.uint64(0))
    return value.view(np.int64)


# ── framing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class ExampleFramer:
    """Serialises samples in columns as framed ``tf.train.Example`` records.

    Args:
        names: Names of the features, at least one. They are stored in sorted order.

    Cost: holds nothing but known headers. The values are copied twice; for values from 64 KiB on ``TFRecordWriter``, which
        copies none, is faster.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = sorted(names)
        self._heads: list[dict[int, bytes]] = [{} for _ in names]  # by the length of the value
        self._numbers: dict[str, dict[int, bytes]] = {name: {} for name in names}  # whole features by their number
        self._starts: dict[int, tuple[bytes, bytes]] = {}  # size of all features -> heads of the record and its content

    def frame(self, columns: Mapping[str, Sequence[Any] | NDArray[np.uint8]]) -> Buffer:
        """Return the records of samples.

        Args:
            columns: For each name, the values of all samples: all bytes (uint8[length]), all numbers, or an array whose rows
                are the values, uint8[N, length].

        Raises:
            ConfigError: A value has a type that an Example cannot represent.
        """
        parts: list[_Part] = []
        for name, heads in zip(self._names, self._heads, strict=True):
            parts += self._parts(name, columns[name], heads)
        count = len(columns[self._names[0]])
        lengths = [_lengths(part, count) for part in parts]
        if all(isinstance(length, int) for length in lengths):
            return self._frame_alike(parts, lengths, count)
        starts = [
            self._starts.get(size) or self._start(size) for size in sum(lengths, np.zeros(count, np.int64)).tolist()
        ]
        joined = [repeat(part, count) if isinstance(part, bytes) else _listed(part) for part in _merged(parts)]
        records = list(map(b"".join, zip([start[1] for start in starts], *joined, strict=True)))
        crcs = np.fromiter(map(crc32c, records), np.uint32, count)
        feet = masked_crcs(crcs).astype("<u4").view("V4").tolist()
        return b"".join(chain.from_iterable(zip([start[0] for start in starts], records, feet, strict=True)))

    def _frame_alike(self, parts: list[_Part], lengths: list[Any], count: int) -> memoryview:
        """Frame records that all have their parts at the same places, as those of decoded pictures of one size."""
        outer, inner = self._starts.get(sum(lengths)) or self._start(sum(lengths))
        row_bytes = len(outer) + len(inner) + sum(lengths) + FOOT_BYTES
        out = np.empty((count, row_bytes), np.uint8)
        at = 0
        placed: list[Any] = [outer + inner, *parts]
        for part, length in zip(placed, [len(outer) + len(inner), *lengths], strict=True):
            if isinstance(part, bytes):
                out[:, at : at + length] = np.frombuffer(part, np.uint8)
            elif isinstance(part, np.ndarray):
                out[:, at : at + length] = part
            else:
                out[:, at : at + length] = np.frombuffer(b"".join(part), np.uint8).reshape(count, length)
            at += length
        view = out.reshape(-1).data
        begins = range(len(outer), count * row_bytes, row_bytes)
        ends = range(at, count * row_bytes, row_bytes)
        crcs = np.fromiter(map(crc32c, map(view.__getitem__, map(slice, begins, ends))), np.uint32, count)
        out[:, at:] = masked_crcs(crcs).astype("<u4")[:, None].view(np.uint8)
        return view

    def _parts(self, name: str, values: Sequence[Any] | NDArray[np.uint8], heads: dict[int, bytes]) -> list[_Part]:
        """Return the parts that a column of values becomes: heads and values, or both in one."""
        if isinstance(values, np.ndarray):
            return [heads.get(values.shape[1]) or self._learn(name, values[0].tobytes(), heads), values]
        if isinstance(values[0], int | float):
            known = self._numbers[name]
            if float in set(map(type, values)):  # 1.0 equals 1, and 0.0 equals -0.0, but their bytes differ
                return [[self._learn_number(name, value) for value in values]]
            return [_constant([known.get(value) or self._learn_number(name, value) for value in values])]
        found = [
            heads.get(length) or self._learn(name, value, heads)
            for value, length in zip(values, map(len, values), strict=True)
        ]
        return [_constant(found), values]

    def _learn(self, name: str, value: Any, heads: dict[int, bytes]) -> bytes:
        head, _ = feature_entry(name, value)
        if len(heads) < _KNOWN_MAX:
            heads[len(value)] = head
        return head

    def _learn_number(self, name: str, value: Any) -> bytes:
        entry = b"".join(feature_entry(name, value))
        known = self._numbers[name]
        if len(known) < _KNOWN_MAX and not isinstance(value, float):
            known[value] = entry
        return entry

    def _start(self, size_bytes: int) -> tuple[bytes, bytes]:
        inner = features_head(size_bytes)
        start = frame_head(len(inner) + size_bytes), inner
        if len(self._starts) < _KNOWN_MAX:
            self._starts[size_bytes] = start
        return start


def _lengths(part: _Part, count: int) -> Any:
    """Return the lengths of a part in all records: one number if they are equal, otherwise int64[count]."""
    if isinstance(part, bytes):
        return len(part)
    if isinstance(part, np.ndarray):
        return part.shape[1]
    found = np.fromiter(map(len, part), np.int64, count)
    first = int(found[0])
    return first if (found == first).all() else found


def _listed(part: Sequence[Any] | NDArray[np.uint8]) -> Sequence[Any]:
    return list(map(bytes, part)) if isinstance(part, np.ndarray) else part


def _constant(entries: list[bytes]) -> _Part:
    """Return the one value of a column if all are the same object, as pictures of one size have them."""
    return entries[0] if entries.count(entries[0]) == len(entries) else entries


def _merged(parts: list[_Part]) -> list[_Part]:
    """Join constants that follow each other."""
    merged: list[_Part] = []
    for part in parts:
        if merged and isinstance(part, bytes) and isinstance(merged[-1], bytes):
            merged[-1] += part
        else:
            merged.append(part)
    return merged
