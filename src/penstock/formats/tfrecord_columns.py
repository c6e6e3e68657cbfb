"""Parses many TFRecords at once with NumPy, in a run of Examples that all have the features of the first.

`TFRecordParser` uses this if its caller wants columns. Lengths and both CRCs are verified as in the other parser. The
Examples are parsed in parallel by an array with one position for each record. Features that are not lists of one value, or
that come in another order than in the first record, are left to the other parser.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.checksums.crc32c import crc32c
from penstock.formats.columnar import Samples, kind_of
from penstock.formats.example import feature_heads, key_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.formats.example import FeatureHead

RECORDS_MIN = 16
"""Fewest records to handle here. With fewer, NumPy's calls cost more than the loop that they replace."""

RECORD_BYTES_MAX = 1 << 20
"""Largest first record: large records gain nothing here. The bound also limits lengths to three bytes of a varint."""

_HEAD_BYTES, _FOOT_BYTES = 12, 4
_LENGTH_BYTES_MAX = 3  # bytes of a varint that is a length
_VALUE_BYTES_MAX = 10
_UNPACK_SIZE = struct.Struct("<Q").unpack_from
_SIZES_KNOWN_MAX = 16384

_size_crcs: dict[int, int] = {}  # length -> unmasked CRC of its eight bytes


class _NotAlikeError(Exception):
    """The records do not all have the shape that this module handles."""


class Frames(NamedTuple):
    """Consecutive complete records whose CRCs were verified.

    Attributes:
        starts: int64[n]: positions in the chunk at which the bytes of the records begin.
        ends: int64[n]: positions at which they end.
    """

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


def read_frames(view: memoryview, at: int) -> Frames | None:
    """Find the complete records from view[at] on. Returns None if they are too few, too large, or damaged."""
    starts, crcs, length, most = [], [], len(view), _HEAD_BYTES + _FOOT_BYTES + RECORD_BYTES_MAX
    while at + _HEAD_BYTES <= length:
        size = _UNPACK_SIZE(view, at)[0] + _HEAD_BYTES + _FOOT_BYTES
        if size > most or at + size > length:
            break
        start = at + _HEAD_BYTES
        at += size
        starts.append(start)
        crcs.append(crc32c(view[start : at - _FOOT_BYTES]))
    if len(starts) < RECORDS_MIN:
        return None
    begins = np.array(starts)
    ends = np.append(begins[1:], at + _HEAD_BYTES) - (_HEAD_BYTES + _FOOT_BYTES)
    data = np.frombuffer(view, np.uint8)
    heads = np.array([_size_crcs.get(size) or _size_crc(size) for size in (ends - begins).tolist()], np.uint32)
    if not (_uint32_at(data, begins - 4) == masked_crcs(heads)).all():
        return None
    if not (_uint32_at(data, ends) == masked_crcs(np.array(crcs, np.uint32))).all():
        return None
    return Frames(begins, ends)


def _size_crc(size: int) -> int:
    crc: int = crc32c(size.to_bytes(8, "little"))
    if len(_size_crcs) < _SIZES_KNOWN_MAX:
        _size_crcs[size] = crc
    return crc


def masked_crcs(crcs: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Convert CRC32Cs, uint32[n], to the form in which TFRecord stores them."""
    return ((crcs >> np.uint32(15)) | (crcs << np.uint32(17))) + np.uint32(0xA282EAD8)


def _uint32_at(data: NDArray[np.uint8], at: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Read little-endian uint32[n] at any positions."""
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
    offsets = frames.starts - _HEAD_BYTES
    sizes = (frames.ends - frames.starts + (_HEAD_BYTES + _FOOT_BYTES)).tolist()
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
    """Advance past `what`, which every record must have at its position."""
    after = at + len(what)
    if (after > end).any():
        raise _NotAlikeError
    if (data[at[:, None] + np.arange(len(what))] != np.frombuffer(what, np.uint8)).any():
        raise _NotAlikeError
    return after


def _length(
    data: NDArray[np.uint8], at: NDArray[np.int64], end: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the varints at these positions and where they end."""
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
