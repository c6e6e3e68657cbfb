"""Indexes that other tools left beside the shards. They say where samples lie, so the shards need not be read.

| file | written by | what it holds |
|---|---|---|
| ``x.tfrecord.idx``, ``x.idx`` | tfrecord2idx, DALI | text: ``offset size`` of each record, framing included |
| ``x.tar.idx`` | Megatron-Energon | uint64, little endian: start of each sample; some have the end of the last sample too |
| ``x.idx`` of a tar | DALI's wds2idx | text: ``v1.1`` or ``v1.2``, a count, and for each sample extensions, offsets and sizes |
| ``x.idx`` of a RecordIO file | MXNet's im2rec | text: ``number<tab>offset`` of each record |

None of them names the version of its shard, so each is compared with the shard: the offsets must ascend and end where the
shard ends, and the file must not be older. These indexes have no checksums and no keys; ``penstock index --again`` reads the
shards.

WebDataset's ``wids`` index is not used: it has counts without offsets, so the shards would have to be read anyway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from penstock.types import Buffer, Key

SUFFIX = ".idx"

_BLOCK_BYTES = 512  # a tar's block


class Bounds(NamedTuple):
    """The content of such a file.

    Attributes:
        offsets: int64[n], ascending offsets in bytes.
        last_is_end: Whether the last offset is the end of the last sample; None if only the shard's bytes can tell.
    """

    offsets: NDArray[np.int64]
    last_is_end: bool | None


def candidates(key: Key) -> tuple[Key, ...]:
    """Return the keys of possible indexes of the shard `key`: ``.idx`` after its name, or in place of its suffix."""
    folder, _, name = key.rpartition("/")
    stem = name.rpartition(".")[0]
    with_stem = f"{folder}/{stem}{SUFFIX}" if folder else f"{stem}{SUFFIX}"
    return (key + SUFFIX, with_stem) if stem else (key + SUFFIX,)


def parse(data: Buffer, *, format_name: str, size_bytes: int, name: str) -> Bounds:
    """Return the bounds in a shard's index.

    Args:
        data: uint8[n], the index.
        format_name: Format of the shard.
        size_bytes: Size of the shard in bytes.
        name: Name of the index, for errors.

    Raises:
        DataError: The index is not of a kind that this module describes, or does not fit the shard.
    """
    raw = bytes(data)
    reader = _READERS.get(format_name)
    if reader is None:
        raise DataError(f"penstock knows no foreign index for shards of format {format_name}", shard=name)
    try:
        bounds = reader(raw, size_bytes)
    except (ValueError, IndexError) as error:
        raise DataError(f"it is not an index of a {format_name} shard ({error})", shard=name) from error
    offsets = bounds.offsets
    if len(offsets) and (int(offsets[0]) < 0 or int(offsets[-1]) > size_bytes or bool((np.diff(offsets) <= 0).any())):
        raise DataError(f"its offsets do not ascend within the {size_bytes} bytes of the shard", shard=name)
    return bounds


def _tfrecord(raw: bytes, size_bytes: int) -> Bounds:
    table = _table(raw, 2)
    starts, sizes = table[:, 0], table[:, 1]
    if len(starts) and (starts[0] != 0 or bool((starts[1:] != (starts + sizes)[:-1]).any())):
        raise ValueError("its records are not contiguous")
    end = int(starts[-1] + sizes[-1]) if len(starts) else 0
    if end != size_bytes:
        raise ValueError(f"its records end at byte {end} of {size_bytes}")
    return Bounds(np.append(starts, end), last_is_end=True)


def _recordio(raw: bytes, size_bytes: int) -> Bounds:
    starts = np.sort(_table(raw, 2)[:, 1])
    if len(starts) and starts[0] != 0:
        raise ValueError(f"its first record begins at byte {starts[0]}")
    return Bounds(np.append(starts, size_bytes), last_is_end=True)


def _tar(raw: bytes, size_bytes: int) -> Bounds:
    if raw[:2] == b"v1":
        return _wds2idx(raw)
    if len(raw) % 8:
        raise ValueError(f"{len(raw)} bytes are not a table of uint64")
    offsets = np.frombuffer(raw, "<u8").astype(np.int64)
    if bool((offsets % _BLOCK_BYTES).any()):
        raise ValueError("an offset is not a multiple of 512")
    if len(offsets) and offsets[0] != 0:
        raise ValueError(f"its first sample begins at byte {offsets[0]}")
    return Bounds(offsets, last_is_end=True if len(offsets) and offsets[-1] == size_bytes else None)


def _wds2idx(raw: bytes) -> Bounds:
    """Parse an index of the members' data. A sample's extent ends with the last block of its last member."""
    head, *lines = raw.decode().splitlines()
    version, count = head.split()
    fields = {"v1.1": 3, "v1.2": 4}.get(version)
    if fields is None or len(lines) != int(count):
        raise ValueError(f"{version} with {len(lines)} of {count} samples")
    ends = [0]
    for line in lines:
        words = line.split()
        if not words or len(words) % fields:
            raise ValueError(f"{line[:60]!r} does not have {fields} words per member")
        data_ends = [int(words[at + 1]) + int(words[at + 2]) for at in range(0, len(words), fields)]
        ends.append(-(-max(data_ends) // _BLOCK_BYTES) * _BLOCK_BYTES)
    return Bounds(np.array(ends, np.int64), last_is_end=True)


def _table(raw: bytes, columns: int) -> NDArray[np.int64]:
    words = raw.split()
    if len(words) % columns or len(words) != columns * len(raw.splitlines()):
        raise ValueError(f"{len(words)} words are not lines of {columns} words")
    return np.array([int(word) for word in words], np.int64).reshape(-1, columns)


_READERS: dict[str, Callable[[bytes, int], Bounds]] = {
    "tar": _tar,
    "tfrecord": _tfrecord,
    "tfrecord-raw": _tfrecord,
    "recordio": _recordio,
}
