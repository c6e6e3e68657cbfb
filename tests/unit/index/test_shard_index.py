"""``ShardIndex`` and its file."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import DataError
from penstock.index.shard_index import MAGIC, ShardIndex, ShardRow, decode, read_head

ROW = ShardRow("a/b.tar", 10_000, '"etag"', 3, "tar", has_offsets=True)


def example() -> ShardIndex:
    return ShardIndex(
        ROW,
        offsets=np.array([0, 512, 2048, 2048 + 512], np.int64),
        crc32c=np.array([1, 0, 2**32 - 1], np.uint32),
        keys=["a", "b/é", "\udc80odd\n"],
    )


def same(left: ShardIndex, right: ShardIndex) -> bool:
    return (
        left.row == right.row
        and left.keys == right.keys
        and all(
            (a is None and b is None)
            or (a is not None and b is not None and a.dtype == b.dtype and a.tolist() == b.tolist())
            for a, b in ((left.offsets, right.offsets), (left.crc32c, right.crc32c))
        )
    )


@given(
    steps=st.lists(st.integers(0, 2**40), max_size=50),
    first=st.integers(0, 2**40),
    unit=st.sampled_from([1, 4, 512]),
    has=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    keys=st.randoms(),
)
@settings(max_examples=200, deadline=None)
def test_what_was_encoded_is_decoded(
    steps: list[int], first: int, unit: int, has: tuple[bool, bool, bool], keys
) -> None:
    """Any bounds, checksums and keys, or their absence, come back equal with the same types."""
    count = len(steps)
    offsets = np.cumsum([first, *(step * unit for step in steps)], dtype=np.int64)
    row = ShardRow("k" * count, int(offsets[-1]), "e", count, "tar", has_offsets=has[0])
    index = ShardIndex(
        row,
        offsets=offsets if has[0] else None,
        crc32c=np.array([keys.getrandbits(32) for _ in steps], np.uint32) if has[1] else None,
        keys=[chr(keys.randrange(1, 0xD000)) * keys.randrange(5) for _ in steps] if has[2] else None,
    )
    data = index.encode()
    assert same(decode(data, "x"), index)
    assert read_head(data[:4096], "x") == index.row


def test_every_damaged_byte_is_noticed() -> None:
    """Checksums cover every byte that matters: no flipped bit gives another index."""
    data = example().encode()
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        with pytest.raises(DataError):
            decode(damaged, "x")


def test_every_cut_is_noticed() -> None:
    """A file that is shorter or longer than its header says is refused."""
    data = example().encode()
    for end in range(len(data)):
        with pytest.raises(DataError):
            decode(data[:end], "x")
    with pytest.raises(DataError, match="has 267 of 266 bytes"):
        decode(data + b"\0", "x")


def test_columns_of_a_later_version_are_passed_over() -> None:
    """A reader ignores unknown columns and reads the others."""
    import struct

    from crc32c import crc32c

    data = bytearray(example().encode())
    at = data.index(b"keys\0\0\0\0")
    data[at : at + 4] = b"what"
    head_bytes = struct.unpack_from("<I", data, 12)[0]
    struct.pack_into("<I", data, head_bytes - 4, crc32c(bytes(data[: head_bytes - 4])))
    index = decode(data, "x")
    assert index.keys is None
    assert index.offsets is not None


def test_another_version_is_named() -> None:
    """A file of a later version is refused with a hint."""
    data = bytearray(example().encode())
    data[8] = 9
    with pytest.raises(DataError, match=r"version 9.*run penstock index"):
        decode(data, "x")


def test_the_layout_is_pinned() -> None:
    """The bytes of version 1 are as docs/development/index-files.md describes them; another layout needs a new version."""
    data = example().encode()
    assert data[:8] == MAGIC
    assert data[8:48].hex() == ("01000300d8000000030000000000000010270000000000000a010000000000000700060003000000")
    assert data[48:64] == b'a/b.tar"etag"tar'
    assert data[64:72] == b"offsets\0"
    assert data[216:227] == bytes(8) + bytes([1, 3, 1])  # from byte 0, in units of 512


def test_lengths_have_to_agree() -> None:
    """Bounds that do not ascend within the shard, and columns of wrong lengths, are refused."""
    with pytest.raises(DataError, match="must ascend within 10000 bytes"):
        ShardIndex(ROW, offsets=np.array([0, 5, 4, 9], np.int64))
    with pytest.raises(DataError, match="must ascend"):
        ShardIndex(ROW, offsets=np.array([0, 5, 7, 10_001], np.int64))
    with pytest.raises(DataError, match="2 checksums of 3 samples"):
        ShardIndex(ROW, crc32c=np.zeros(2, np.uint32))
    with pytest.raises(DataError, match="1 keys of 3 samples"):
        ShardIndex(ROW, keys=["a"])


def test_sizes_are_given() -> None:
    """``sizes`` are those of the extents."""
    index = decode(example().encode(), "x")
    assert index.sizes is not None
    assert index.sizes.tolist() == [512, 1536, 512]
    assert "3 samples, offsets, crc32c, keys" in repr(index)
    assert "count only" in repr(ShardIndex(ROW))


def test_ten_thousand_samples_take_few_bytes() -> None:
    """A sample takes about 9 bytes: 2 for the extent, 4 for the checksum, the rest for the key."""
    source = np.random.default_rng(0)
    count = 10_000
    offsets = np.concatenate([[0], np.cumsum(source.integers(200, 400, count) * 512)])
    row = ShardRow("a.tar", int(offsets[-1]), "e", count, "tar", has_offsets=True)
    keys = [f"train/{number:09d}" for number in range(count)]
    data = ShardIndex(row, offsets=offsets, crc32c=source.integers(0, 2**32, count, np.uint32), keys=keys).encode()
    assert len(data) / count < 9
