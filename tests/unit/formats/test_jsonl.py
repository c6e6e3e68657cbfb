"""JSON lines taken apart: the fields and values that Parquet would give."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import CorruptShardError
from penstock.formats import parser_of

ROWS: list[dict[str, Any]] = [
    {
        "__key__": f"k/{number}",
        "text": "ü" * number,
        "count": number - 2,
        "share": number / 3,
        "good": number % 2 == 0,
        "box": [0.5, 1.5, number / 2],
        "ids": [number, number + 1],
        "flags": [True, False],
        "names": ["a", "b"],
        "meta": {"width": number, "deep": {"name": "x"}},
        "maybe": None if number % 2 else 7,
    }
    for number in range(6)
]


def read(lines: list[Any], **options: Any) -> list[Any]:
    parser = parser_of("jsonl-columns", shard="s", **options)
    return [*parser.feed("".join(json.dumps(line) + "\n" for line in lines).encode()), *parser.finish()]


def test_values_are_those_of_parquet() -> None:
    """The same rows in both formats have the same keys, fields, types, shapes and values."""
    arrow = pytest.importorskip("pyarrow")
    import io

    import pyarrow.parquet

    out = io.BytesIO()
    pyarrow.parquet.write_table(arrow.Table.from_pylist(ROWS), out)
    parser = parser_of("parquet", shard="s")
    stored = [*parser.feed(out.getvalue()), *parser.finish()]
    found = read(ROWS)
    assert [sample.key for sample in found] == [sample.key for sample in stored] == [row["__key__"] for row in ROWS]
    for ours, theirs in zip(found, stored, strict=True):
        assert ours.fields.keys() == theirs.fields.keys()
        for name, value in ours.fields.items():
            other = theirs.fields[name]
            assert (name, value.format, value.shape) == (name, other.format, other.shape)
            same = (json.loads(bytes(value)), json.loads(bytes(other))) if name == "names" else (value, other)
            assert np.array_equal(*same)


def test_what_has_no_type_is_json() -> None:
    """Mixed and nested lists and numbers beyond 64 bits are JSON; an empty list is an array of nothing."""
    (sample,) = read([{"mixed": [1, "a"], "nested": [[1], [2]], "large": 1 << 70, "empty": [], "both": [1, 2.5]}])
    values = {name: bytes(value) for name, value in sample.fields.items()}
    assert json.loads(values["mixed"]) == [1, "a"]
    assert json.loads(values["nested"]) == [[1], [2]]
    assert json.loads(values["large"]) == 1 << 70
    assert (sample.fields["empty"].shape, sample.fields["empty"].format) == ((0,), "d")
    assert sample.fields["both"].tolist() == [1.0, 2.5]


@pytest.mark.parametrize(
    "line",
    [{"a.b": 1, "a": {"b": 2}}, {"__shard__": 1}, {"x": "\ud800"}],
    ids=["two for one", "reserved", "no text"],
)
def test_lines_that_are_no_samples(line: dict) -> None:
    """Two values for one field, a reserved name, a text that is none: the line is corrupt, and can be skipped."""
    good = {"x": 1}
    with pytest.raises(CorruptShardError) as caught:
        read([good, line, good])
    assert caught.value.offset_bytes == 9
    assert len(read([good, line, good], on_corrupt="skip_sample")) == 2


@pytest.mark.parametrize("compressed", [False, True])
def test_a_loader_gives_columns(tmp_path: Path, compressed: bool) -> None:
    """Batches have a column for each name, also shuffled by an index that was made of whole lines, and after a resume."""
    data = "".join(json.dumps(row) + "\n" for row in ROWS * 10).encode()
    name = "x.jsonl.gz" if compressed else "x.jsonl"
    (tmp_path / name).write_bytes(gzip.compress(data) if compressed else data)
    said = "jsonl-columns.gz" if compressed else "jsonl-columns"
    if not compressed:
        ps.build_index(f"{tmp_path}/", beside=True)
    pipeline = ps.shards(f"{tmp_path}/", format=said).select(["count", "box", "text"]).shuffle(seed=1).batch(6)
    with ps.Loader(pipeline) as loader:
        batches = list(loader)
    assert len(batches) == 10
    assert batches[0]["count"].shape == (6, 1)
    assert batches[0]["box"].shape == (6, 3)
    assert sorted(int(n) for batch in batches for n in batch["count"][:, 0]) == sorted([*range(-2, 4)] * 10)
