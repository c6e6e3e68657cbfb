from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from loading import counted, shard
from penstock.errors import ConfigError, DecodeError, FieldMissingError, ObjectMissingError
from penstock.formats import Sample
from penstock.pack.entries import read_table
from penstock.samples.decoding import SampleRandom
from penstock.samples.transform import SampleTransform

ROWS = [
    {"key": "007", "label": 3, "score": 0.5, "text": "sieben"},
    {"key": "8", "label": 4, "score": 1.0, "text": "1a"},
]


def joined(pipeline: Any, key: str = "007", **members: bytes) -> Any:
    given = Sample(key, {name: memoryview(value) for name, value in members.items()}, 0)
    return SampleTransform(pipeline)(given, shard="s.tar", position=0, random=SampleRandom(seed=0, epoch=0))


def write(folder: Path, form: str) -> str:
    path = folder / f"labels.{form}"
    if form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif form == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    else:
        mark = {"csv": ",", "tsv": "\t"}[form]
        path.write_text("\n".join(mark.join(map(str, row)) for row in ([*ROWS[0]], *(row.values() for row in ROWS))))
    return str(path)


@pytest.mark.parametrize("form", ["jsonl", "csv", "tsv", "parquet"])
def test_tables_give_their_columns(form: str, tmp_path: Path) -> None:
    """Every kind of table gives the same fields: numbers as numbers, keys as they are written, zeros in front included."""
    pipeline = ps.shards("/data/").decode(ps.Integer("cls")).join(write(tmp_path, form))
    assert joined(pipeline, cls=b"1") == {"cls": 1, "label": 3, "score": 0.5, "text": "sieben"}
    assert joined(ps.shards("/data/").join(write(tmp_path, form), fields=["label"]), "8") == {"label": 4}


def test_what_was_joined_before_decode_stays(tmp_path: Path) -> None:
    """decode leaves members out that it does not name, but no joined field; a joined text may be decoded itself."""
    table = write(tmp_path, "jsonl")
    pipeline = ps.shards("/data/").join(table, fields=["label", "text"]).decode(ps.Integer("cls"), ps.Text("text"))
    assert joined(pipeline, cls=b"1", other=b"x") == {"cls": 1, "label": 3, "text": "sieben"}


def test_samples_without_a_row(tmp_path: Path) -> None:
    """They are an error that names the key, or dropped and counted."""
    table = write(tmp_path, "jsonl")
    with pytest.raises(FieldMissingError) as caught:
        joined(ps.shards("/data/").join(table), "9")
    assert (caught.value.stage, caught.value.sample_key) == ("join[0]", "9")
    transform = SampleTransform(ps.shards("/data/").join(table, missing="drop"))
    assert transform.may_drop
    assert transform(Sample("9", {}, 0), shard="s", position=0, random=SampleRandom(seed=0, epoch=0)) is None
    assert transform.tolerance.counts() == {"join[0]": 1}


def test_a_field_is_never_replaced(tmp_path: Path) -> None:
    """A column that the sample has as a field already is an error: which of the two is meant, nobody can know."""
    with pytest.raises(DecodeError, match="has label already"):
        joined(ps.shards("/data/").join(write(tmp_path, "jsonl")), label=b"1")


@pytest.mark.parametrize(
    ("name", "text", "error", "match"),
    [
        ("a.jsonl", '{"key": 1, "label": 2}\n{"key": 1, "label": 2}\n', DecodeError, "two rows"),
        ("a.jsonl", '{"id": 1}\n', ConfigError, "no column 'key'"),
        ("a.jsonl", '{"key": 1}\n', ConfigError, "lacks 'label'"),
        ("a.jsonl", "{", DecodeError, "cannot be read"),
        ("a.jsonl", "3", DecodeError, "is not a JSON object"),
        ("a.csv", "key,label\n1,2,3\n", DecodeError, "more or fewer columns"),
        ("a.csv", "key,label\n1\n", DecodeError, "more or fewer columns"),
        ("a.csv", "key,label,label\n1,2,3\n", DecodeError, "two columns are called 'label'"),
        ("a.parquet", "no parquet", DecodeError, "cannot be read"),
    ],
)
def test_bad_tables(name: str, text: str, error: Any, match: str, tmp_path: Path) -> None:
    """A table that cannot serve is an error when it is opened, before a sample passes."""
    (tmp_path / name).write_text(text)
    with pytest.raises(error, match=match):
        SampleTransform(ps.shards("/data/").join(str(tmp_path / name), fields=["label"])).open()


def test_tables_have_a_bound_and_must_exist(tmp_path: Path) -> None:
    """A table larger than its bound is refused with both numbers; one that is not there is missing."""
    table = write(tmp_path, "jsonl")
    with pytest.raises(ConfigError, match=r"has \d+ bytes, more than bytes_max=10"):
        SampleTransform(ps.shards("/data/").join(table, bytes_max=10)).open()
    with pytest.raises(ObjectMissingError):
        SampleTransform(ps.shards("/data/").join(str(tmp_path / "nothing.csv"))).open()


def test_a_table_is_held_once(tmp_path: Path) -> None:
    """All who join it share it, the sources of a mix too; it goes when nobody does, and is then read anew."""
    path = tmp_path / "a.csv"
    path.write_text("key,x\n1,5\n")
    leaves = ps.mix({ps.shards("/a/"): 1, ps.shards("/b/"): 1}).join(str(path)).flat().leaves
    both = [SampleTransform(leaf) for leaf in leaves]
    both[0].open()
    path.write_text("key,x\n1,6\n")

    def value(transform: SampleTransform) -> Any:
        return transform(Sample("1", {}, 0), shard="s", position=0, random=SampleRandom(seed=0, epoch=0))["x"]

    assert [value(transform) for transform in both] == [5, 5]
    del both
    gc.collect()
    assert value(SampleTransform(leaves[1])) == 6


def test_another_source_is_a_table(tmp_path: Path) -> None:
    """The samples of a second set of shards are joined by their keys."""
    (tmp_path / "other.tar").write_bytes(shard(counted(range(5))))
    other = ps.shards(str(tmp_path / "other.tar")).decode(ps.Integer("cls"), ps.Text("txt"))
    pipeline = ps.shards("/data/").decode(ps.Integer("n")).join(other, fields=["cls"])
    assert joined(pipeline, "s00003", n=b"9") == {"n": 9, "cls": 3}


def test_a_parquet_table_gives_the_values_of_a_parquet_shard(tmp_path: Path) -> None:
    """Dates and times are ISO 8601 with every digit, whichever packages are installed; bytes stay bytes."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {
        "key": pa.array(["007"]),
        "when": pa.array([1], pa.timestamp("ns", tz="UTC")),
        "day": pa.array([3_000_000], pa.date32()),  # in the year 10 183, which Python's dates do not reach
        "price": pa.array([5], pa.decimal128(10, 2)),
        "data": pa.array([b"\x00\xff"]),
        "many": pa.array([[1, 2]]),
    }
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    expected = {
        "when": "1970-01-01T00:00:00.000000001Z",
        "day": "10183-09-21",
        "price": "5.00",
        "data": b"\x00\xff",
        "many": [1, 2],
    }
    found = joined(ps.shards("/data/").join(str(tmp_path / "a.parquet")))
    assert {name: found[name] for name in expected} == expected
    assert read_table((tmp_path / "a.parquet").read_bytes(), url="a.parquet") == [{"key": "007", **expected}]
