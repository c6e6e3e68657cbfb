from __future__ import annotations

import itertools
import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CheckpointError, ConfigError, DataError, UnsupportedFormatError
from penstock.formats import safetensors
from penstock.formats.safetensors import (
    SafetensorsIndex,
    TensorEntry,
    encode_header,
    encode_index,
    parse_header,
    parse_index,
)

URL = "s3://bucket/model.safetensors"


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def with_header(header: Any, *, data_bytes: int = 8) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data_bytes)


def test_a_header_comes_back() -> None:
    """What encode_header writes, parse_header reads: names, dtypes, shapes, positions and metadata."""
    tensors = [("b", "F64", (2, 3)), ("ä", "BF16", ()), ("none", "I8", (0, 4)), ("c", "BOOL", (7,))]
    head = encode_header(tensors, {"format": "pt"})
    assert len(head) % 8 == 0
    header = parse_header(head, size_bytes=len(head) + 48 + 2 + 7, url=URL)
    start = len(head)
    assert header.metadata == {"format": "pt"}
    assert header.tensors == {
        "b": TensorEntry("F64", (2, 3), start, start + 48),
        "ä": TensorEntry("BF16", (), start + 48, start + 50),
        "none": TensorEntry("I8", (0, 4), start + 50, start + 50),
        "c": TensorEntry("BOOL", (7,), start + 50, start + 57),
    }


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (b"", "0 bytes is not a safetensors"),
        (b"\x01\x00", "2 bytes is not a safetensors"),
        (struct.pack("<Q", 2**63), "announce a header of 9223372036854775808"),
        (struct.pack("<Q", 400) + b"{}", "the header has 400 bytes, but the file only 10"),
        (with_header(b"\xff\xfe{}"), "cannot be parsed"),
        (with_header(b"{"), "cannot be parsed"),
        (with_header(b"[" * 100_000), "cannot be parsed"),
        (with_header(b'{"a":' + b"9" * 5000 + b"}"), "cannot be parsed"),
        (with_header(b"[]"), "not an object"),
        (with_header(b'{"w":1,"w":2}'), r"occurs twice.*'w'"),
        (with_header(b'{"w":{"dtype":"F32","dtype":"I8","shape":[2],"data_offsets":[0,8]}}'), "occurs twice.*'dtype'"),
        (with_header({"__metadata__": {"a": 1}, "w": entry()}), "__metadata__"),
        (with_header({"__metadata__": [], "w": entry()}), "__metadata__"),
        (with_header({"w": 3}), "must have a dtype.*'w'"),
        (with_header({"w": {"dtype": "F32", "shape": [2]}}), "must have a dtype"),
        (with_header({"w": {**entry(), "more": 1}}), "must have a dtype"),
        (with_header({"w": entry("F99")}), "no dtype 'F99'.*'w'"),
        (with_header({"w": entry(["F32"])}), "no dtype"),
        (with_header({"w": entry(shape=[-2])}), "shape.*whole numbers"),
        (with_header({"w": entry(shape=[2.0])}), "shape.*whole numbers"),
        (with_header({"w": entry(shape=[True, 2])}), "shape.*whole numbers"),
        (with_header({"w": entry(shape=[2**64])}), "shape.*whole numbers"),
        (with_header({"w": entry(shape=[1] * 64 + [2])}), "shape.*at most 64"),
        (with_header({"w": {**entry(), "shape": "2"}}), "shape"),
        (with_header({"w": entry(shape=[2**40, 2**40], offsets=[0, 8])}), "does not take the 8 bytes"),
        (with_header({"w": entry(offsets=[8, 0])}), "data_offsets"),
        (with_header({"w": entry(offsets=[-8, 0])}), "data_offsets"),
        (with_header({"w": entry(offsets=[0])}), "data_offsets"),
        (with_header({"w": entry(offsets=[0, 2**62], shape=[2**60])}), "tensors end at byte"),
        (with_header({"w": entry(), "v": entry()}), "overlaps"),
        (with_header({"w": entry(), "v": entry(shape=[1], offsets=[4, 8])}), "overlaps.*'v'"),
        (with_header({"w": entry(shape=[1], offsets=[4, 8])}), "does not begin at the end"),
        (with_header({"w": entry()}, data_bytes=7), "tensors end at byte .* but the file has"),
        (with_header({"w": entry()}, data_bytes=9), "tensors end at byte .* but the file has"),
    ],
)
def test_a_bad_header_is_refused(file: bytes, message: str) -> None:
    """Each violation of the format is an error that names the file, before anything is allocated."""
    with pytest.raises(CheckpointError, match=message) as caught:
        parse_header(file, size_bytes=len(file), url=URL)
    assert caught.value.url == URL


def test_dtypes_that_cannot_be_read_are_no_damage() -> None:
    """Elements shorter than a byte are a valid part of the format, and an error of their own."""
    file = with_header({"w": entry("F4", (16,), (0, 8))})
    with pytest.raises(UnsupportedFormatError, match="F4"):
        parse_header(file, size_bytes=len(file), url=URL)


@given(st.data())
def test_damage_is_never_anything_but_an_error(data: st.DataObject) -> None:
    """A file with random bytes changed or cut off is either refused, or has tensors that fill it exactly."""
    file = bytearray(encode_header([("a", "F32", (2, 2)), ("b", "U8", (3,)), ("c", "U8", ())], {"x": "y"}) + bytes(20))
    for _ in range(data.draw(st.integers(1, 3))):
        file[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
    del file[data.draw(st.integers(0, len(file))) :]
    try:
        header = parse_header(bytes(file), size_bytes=len(file), url=URL)
    except DataError:
        return
    spans = [(entry.start, entry.end) for entry in header.tensors.values()]
    assert spans[-1][1] == len(file) if spans else True
    assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))


def test_an_index_comes_back() -> None:
    """What encode_index writes, parse_index reads."""
    index = SafetensorsIndex(files={"a": "model-1.safetensors", "b": "model-2.safetensors"}, metadata={"total_size": 7})
    assert parse_index(encode_index(index), url=URL) == index


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be parsed"),
        (b"{}", "weight_map"),
        (b'{"weight_map":[]}', "weight_map"),
        (b'{"weight_map":{},"metadata":3}', "weight_map"),
        (b'{"weight_map":{"w":3}}', "not the name of a file"),
        (b'{"weight_map":{"w":"../../etc/passwd"}}', "'../../etc/passwd' is not the name of a file"),
        (b'{"weight_map":{"w":".."}}', "not the name of a file"),
        (b'{"weight_map":{"w":""}}', "not the name of a file"),
        (b'{"weight_map":{"w":"a","w":"b"}}', "occurs twice"),
    ],
)
def test_a_bad_index_is_refused(content: bytes, message: str) -> None:
    """An index that is damaged, or that leads out of its directory, is an error that names it."""
    with pytest.raises(CheckpointError, match=message):
        parse_index(content, url=URL)


def test_headers_and_indexes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A header or an index that no reader would accept is not written, and not parsed."""
    monkeypatch.setattr(safetensors, "HEADER_BYTES_MAX", 100)
    with pytest.raises(ConfigError, match=r"header of .* more than 100"):
        encode_header([("w" * 100, "U8", (1,))])
    with pytest.raises(ConfigError, match=r"index of .* more than 100"):
        encode_index(SafetensorsIndex(files={"w" * 100: "f"}, metadata={}))
    with pytest.raises(CheckpointError, match="longer than 100"):
        parse_index(b" " * 101, url=URL)
