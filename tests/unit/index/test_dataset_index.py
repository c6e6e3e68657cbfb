"""``DatasetIndex`` and its file."""

from __future__ import annotations

import json

import pytest

from penstock.errors import DataError
from penstock.index.dataset_index import DatasetIndex, decode
from penstock.index.shard_index import ShardRow

ROWS = [ShardRow(f"é{n}.tar", 10 * n, f'"{n}"', n, "tar", has_offsets=True) for n in (2, 1)]


def test_what_was_encoded_is_decoded() -> None:
    """Rows come back equal, in key order, as JSON lines that other tools can read."""
    index = DatasetIndex("s3://b/train/", ROWS)
    data = index.encode()
    again = decode(data, "x")
    assert (again.base_url, list(again.rows.values())) == ("s3://b/train/", ROWS[::-1])
    head, *lines = map(json.loads, data.splitlines())
    assert (head["shards_count"], head["samples_count"]) == (2, 3)
    assert lines[0] == {
        "key": "é1.tar",
        "size_bytes": 10,
        "etag": '"1"',
        "samples_count": 1,
        "format": "tar",
        "has_offsets": True,
    }
    assert repr(again) == "<DatasetIndex 's3://b/train/': 2 shards, 3 samples>"


def test_no_shards_are_an_index_too() -> None:
    """An empty index is written and read."""
    assert len(decode(DatasetIndex("file:///d/").encode(), "x")) == 0


def test_damage_is_noticed() -> None:
    """A changed byte, a cut, another kind of file and a later version are refused, and never read in part."""
    data = DatasetIndex("s3://b/train/", ROWS).encode()
    for at in range(data.index(b"\n"), len(data)):
        with pytest.raises(DataError):
            decode(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], "x")
    for other in (b"", b"{}", b"[]\n", b"\xff\n", data[:-1], data.replace(b'index": 1', b'index": 2')):
        with pytest.raises(DataError):
            decode(other, "x")


def test_a_row_is_of_one_version() -> None:
    """``row_of`` returns None for another size or ETag."""
    index = DatasetIndex("s3://b/", ROWS)
    assert index.row_of("é2.tar", size_bytes=20, etag='"2"') == ROWS[0]
    assert index.row_of("é2.tar", size_bytes=21, etag='"2"') is None
    assert index.row_of("é2.tar", size_bytes=20, etag='"3"') is None
    assert index.row_of("é2.tar", size_bytes=None, etag=None) is None
    assert index.row_of("other", size_bytes=20, etag='"2"') is None
