"""Indexes of other tools: what they contain, and when they are not used."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from penstock.errors import DataError
from penstock.formats import TarParser
from penstock.index.building import foreign_keys, parse_foreign


def bounds(data: bytes, format_name: str, size_bytes: int) -> list[int]:
    return parse_foreign(data, format_name=format_name, size_bytes=size_bytes, name="x.idx").offsets.tolist()


def test_candidates_lie_beside_the_shard() -> None:
    """Candidates are the shard's name with .idx after it or as its suffix; a dot in a folder's name is not a suffix."""
    assert foreign_keys("a/b.tar") == ("a/b.tar.idx", "a/b.idx")
    assert foreign_keys("b.tfrecord") == ("b.tfrecord.idx", "b.idx")
    assert foreign_keys("v1.0/train-00000-of-00004") == ("v1.0/train-00000-of-00004.idx",)


def test_tfrecord2idx() -> None:
    """tfrecord2idx has offset and size of each framed record, which must be contiguous to the shard's end."""
    assert bounds(b"0 20\n20 30\n50 7\n", "tfrecord", 57) == [0, 20, 50, 57]
    assert bounds(b"", "tfrecord", 0) == [0]
    for wrong in (
        b"0 20\n21 30\n",
        b"0 20\n20 31\n",
        b"1 20\n21 29\n",
        b"0 20 5\n20 30\n",
        b"0\n20\n",
        b"a b\n",
        b"\xff",
    ):
        with pytest.raises(DataError, match=r"not an index of a tfrecord shard"):
            bounds(wrong, "tfrecord", 50)


def test_energon() -> None:
    """Energon has starts in multiples of 512; only the shard shows whether the last one is the end."""
    assert bounds(struct.pack("<3Q", 0, 1024, 5120), "tar", 10_240) == [0, 1024, 5120]
    found = parse_foreign(struct.pack("<2Q", 0, 1024), format_name="tar", size_bytes=1024, name="x")
    assert found.last_is_end
    assert parse_foreign(struct.pack("<2Q", 0, 512), format_name="tar", size_bytes=1024, name="x").last_is_end is None
    for wrong in ((0, 1000), (512, 1024), (0, 1024, 1024), (0, 2048, 1024), (0, 20_480)):
        with pytest.raises(DataError):
            bounds(struct.pack(f"<{len(wrong)}Q", *wrong), "tar", 10_240)
    with pytest.raises(DataError, match="not a table of uint64"):
        bounds(b"\0" * 9, "tar", 10_240)


@pytest.mark.parametrize("version", ["v1.1", "v1.2"])
def test_wds2idx(tar: Callable[..., bytes], version: str) -> None:
    """Extensions, data offsets and sizes of members give the same extents as the shard."""
    data = tar(9)
    parser = TarParser("x")
    samples = parser.feed(data) + parser.finish()
    lines = []
    for sample in samples:
        words, at = [], sample.offset_bytes
        for field, value in sample.fields.items():
            words += [field, str(at + 512), str(len(value))] + ([f"{sample.key}.{field}"] if version == "v1.2" else [])
            at += 512 + -(-len(value) // 512) * 512
        lines.append(" ".join(words))
    text = "\n".join([f"{version} {len(samples)}", *lines, ""]).encode()
    assert bounds(text, "tar", len(data)) == [sample.offset_bytes for sample in samples] + [at]
    for wrong in (
        text.replace(b" 9\n", b" 8\n", 1),
        text.replace(version.encode(), b"v9.9"),
        text.rpartition(b" cls ")[0] + b" cls\n",
        b"v1.2\n",
    ):
        with pytest.raises(DataError):
            bounds(wrong, "tar", len(data))


def test_mxnet() -> None:
    """im2rec has numbers and offsets of records in any order; the last record ends with the file."""
    assert bounds(b"7\t40\n1\t0\n3\t16\n", "recordio", 100) == [0, 16, 40, 100]
    with pytest.raises(DataError, match="first record begins at byte 16"):
        bounds(b"1\t16\n", "recordio", 100)


def test_other_formats_have_none() -> None:
    """A format for which no tool writes an index is refused by name."""
    with pytest.raises(DataError, match="format parquet"):
        bounds(b"", "parquet", 0)
