"""``MdsWriter``: what it writes reads back by ``MdsParser``, and says of itself what MosaicML's reader needs."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.formats import feed_in_pieces, parser_of
from penstock.formats.mds import MdsWriter, index_json


def written(samples: list[dict[str, Any]]) -> tuple[bytes, MdsWriter]:
    """A shard, and its writer."""
    out = bytearray()
    writer = MdsWriter(out.extend)
    for sample in samples:
        writer.add(sample)
    writer.finish()
    return writer.head() + bytes(out), writer


def read(data: bytes) -> list[dict[str, Any]]:
    parser = parser_of("mds", shard="x")
    found = [sample for piece in feed_in_pieces(parser, data) for sample in piece]
    found += parser.finish()
    return [
        {
            name: np.asarray(value).tolist() if value.format != "B" else bytes(value)
            for name, value in sample.fields.items()
        }
        for sample in found
    ]


def test_every_kind_of_value_comes_back() -> None:
    """Bytes, texts, JSON, numbers of Python and numpy, arrays of any shape: by type, in columns sorted by name."""
    samples = [
        {
            "__key__": f"k{n}",
            "jpg": bytes([n]) * n,
            "t": f"ü{n}",
            "json": {"n": n},
            "cls": -n,
            "f": n / 2,
            "i16": np.int16(n),
            "a": np.arange(6 * n, dtype=np.float32).reshape(2, 3, n),
            "wide": np.zeros(300, np.uint8),
        }
        for n in range(4)
    ]  # fmt: skip
    data, writer = written(samples)
    for n, found in enumerate(read(data)):
        assert found.pop("a") == samples[n]["a"].tolist()
        assert found == {
            "jpg": bytes([n]) * n, "t": f"ü{n}".encode(), "json": json.dumps({"n": n}, separators=(",", ":")).encode(),
            "cls": [-n], "f": [n / 2], "i16": [n], "wide": [0] * 300,
        } or found == {**found, "wide": bytes(300)}  # fmt: skip
    entry = writer.entry("s.mds", size_bytes=len(data), stored_bytes=len(data), compression=None)
    assert dict(zip(entry["column_names"], entry["column_encodings"], strict=True)) == {
        "a": "ndarray:float32", "cls": "int", "f": "float64", "i16": "int16", "jpg": "jpeg", "json": "json", "t": "str",
        "wide": "ndarray:uint8",
    }  # fmt: skip
    assert entry["samples"] == 4
    assert json.loads(index_json([entry])) == {"version": 2, "shards": [entry]}


def test_the_head_is_as_mosaicml_writes_it() -> None:
    """uint32 count, uint32[count + 1] bounds of the file, JSON with sorted keys; sizes before the values of a sample."""
    data, _ = written([{"b": b"xyz", "n": 7}, {"b": b"", "n": 8}])
    count, *bounds = struct.unpack_from("<4I", data)
    description = json.loads(data[16 : bounds[0]])
    assert (count, bounds[1] - bounds[0], bounds[2]) == (2, 4 + 3 + 8, len(data))
    assert list(description) == sorted(description)
    assert (description["column_sizes"], description["format"]) == ([None, 8], "mds")
    assert data[bounds[0] :] == struct.pack("<I", 3) + b"xyz" + struct.pack("<qI", 7, 0) + struct.pack("<q", 8)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([{"__key__": "a"}], "no field"),
        ([{"a": 1}, {"b": 1}], "the shard's first sample had"),
        ([{"a": 1}, {"a": "x"}], "is str, in the shard's first sample it was int"),
        ([{"a": 1 << 63}], "not an int64"),
        ([{"a": np.array(["x"])}], "which MDS has not"),
        ([{"a": {"x": object()}}], "cannot be JSON"),
        ([{"a": object()}], "must be bytes, str"),
    ],
)  # fmt: skip
def test_samples_that_cannot_be(samples: list[dict[str, Any]], message: str) -> None:
    """Each is refused with the field, and nothing of it is written."""
    out = bytearray()
    writer = MdsWriter(out.extend)
    for sample in samples[:-1]:
        writer.add(sample)
    before = bytes(out)
    with pytest.raises(ConfigError, match=message):
        writer.add(samples[-1])
    assert out == before
