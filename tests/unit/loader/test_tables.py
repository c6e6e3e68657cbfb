"""Tables through the loader: columns without a detour over samples, nulls, defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from loading import index
from penstock.errors import ConfigError, DecodeError, FieldMissingError
from penstock.samples.transform import SampleTransform

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS = 700
FETCH = ps.FetchConfig(gap_bytes_max=0)  # small shards are read by ranges, as large ones are
FIELDS = (
    ps.Integer("age", default=-1, valid="has_age"),
    ps.Float("height", default=0.5),
    ps.Text("name", default=None),
    ps.Bytes("raw"),
    ps.Numpy("box"),
    ps.Integer("flag"),
    ps.Category("kind", ["cat", "dog"], default=-1),
)


def write(folder: Path, *, nulls: bool = True) -> Any:
    """Three shards of several row groups, whose third columns have nulls in places; returns their pipeline."""
    folder.mkdir()
    for shard in range(3):
        numbers = range(ROWS * shard, ROWS * (shard + 1))
        has = [not nulls or (number % 5 > 0 and number >= 40) for number in numbers]
        table = {
            "id": pa.array(numbers),
            "age": [number if there else None for number, there in zip(numbers, has, strict=True)],
            "height": pa.array([number / 2 if number % 3 or not nulls else None for number in numbers], pa.float32()),
            "name": pa.array(
                [f"né{number % 4}" if number % 7 or not nulls else None for number in numbers]
            ).dictionary_encode(),
            "raw": [bytes([number % 251]) * (number % 3) for number in numbers],
            "box": pa.array([[number, 0.5] for number in numbers], pa.list_(pa.float64(), 2)),
            "flag": [number % 2 == 0 for number in numbers],
            "kind": pa.array([("cat", "dog", "owl")[number % 3] for number in numbers]).dictionary_encode(),
        }
        pq.write_table(pa.table(table), folder / f"{shard}.parquet", row_group_size=150)
    return ps.shards(f"{folder}/")


def listed(batches: Any) -> list[dict[str, Any]]:
    """Batches as lists, to compare."""
    return [{name: np.asarray(column).tolist() for name, column in batch.items()} for batch in batches]


def read(pipeline: Any, **options: Any) -> list[dict[str, Any]]:
    with ps.Loader(
        pipeline, fetch=FETCH, **{"index": "auto" if "index_dir" in options else "stream", **options}
    ) as loader:
        return listed(loader)


@pytest.fixture
def by_rows(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has the next loaders decode sample by sample."""
    return lambda: monkeypatch.setattr(SampleTransform, "columns", lambda self, samples: None)


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("indexed", [False, True])
def test_columns_are_what_rows_are(tmp_path: Path, by_rows: Any, *, shuffled: bool, indexed: bool) -> None:
    """Whole columns give the batches that single rows give: values, nulls, dtypes, order, at any place."""
    made = write(tmp_path / "data").decode(*FIELDS)
    made = (made.shuffle(512, seed=3) if shuffled else made).batch(64)
    options: dict[str, Any] = {"index_dir": index(made, tmp_path / "index")} if indexed else {"index": "stream"}
    with ps.Loader(made, fetch=FETCH, **options) as loader:
        batches = list(loader)
        assert all(isinstance(batch["age"], np.ndarray) for batch in batches)
        assert {batch["has_age"].dtype for batch in batches} == {np.dtype(bool)}
    columns = listed(batches)
    by_rows()
    assert columns == read(made, **options)
    ages = {
        key: (age, has)
        for batch in columns
        for key, age, has in zip(batch["__key__"], batch["age"], batch["has_age"], strict=True)
    }
    assert len(ages) == 3 * ROWS
    assert ages["41"] == (41, True)
    assert ages["45"] == (-1, False)


def test_columns_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a table are not decoded one by one, except in the block in which a lane ends."""
    made, rows = write(tmp_path / "data", nulls=False), []
    monkeypatch.setattr(SampleTransform, "write", lambda self, sample, *_, **__: rows.append(sample) or False)
    read(made.decode(*FIELDS).batch(64))
    assert len(rows) <= 3 * ROWS % 64


@pytest.mark.server
def test_columns_in_processes(tmp_path: Path) -> None:
    """Worker processes give the same columns, decoded or as stored."""
    made = write(tmp_path / "data", nulls=False).shuffle(512)
    for pipeline in (made.decode(*FIELDS).batch(64), made.batch(64)):
        options = {"lanes": 8, "index_dir": index(pipeline, tmp_path / "index")}
        assert read(pipeline, processes=2, **options) == read(pipeline, **options)


def test_null_is_said(tmp_path: Path) -> None:
    """A null without a default is an error that says null, the field, the row and what to do."""
    made = write(tmp_path / "data")
    with pytest.raises(FieldMissingError, match=r"null.*Integer|Integer.*null") as caught:
        read(made.decode(ps.Integer("age")).batch(64))
    assert (caught.value.field, caught.value.sample_key) == ("age", "0")
    assert "default=" in str(caught.value)
    with pytest.raises(DecodeError, match="null"):
        read(made.batch(64))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ps.Integer("x", default=0.5),
        lambda: ps.Integer("x", default="0"),
        lambda: ps.Integer("x", valid="y"),
        lambda: ps.Integer("x", default=0, valid="__y"),
        lambda: ps.shards("s3://b/").decode(ps.Integer("x", default=0, valid="y"), ps.Integer("y")),
    ],
)
def test_wrong_defaults_are_refused(wrong: Any) -> None:
    """A default that the dtype cannot hold, and a mask without default or name of its own, are refused at once."""
    with pytest.raises(ConfigError):
        wrong()


def test_default_fills_a_declared_array(tmp_path: Path) -> None:
    """A member that no sample has becomes an array of the declared shape, full of the default."""
    made = write(tmp_path / "data").decode(ps.Numpy("no", dtype="float32", shape=(2, 3), default=1.5), ps.Bytes("raw"))
    assert np.array_equal(read(made.batch(600))[0]["no"], np.full((600, 2, 3), 1.5))


def test_categories(tmp_path: Path) -> None:
    """Categories become codes, by a list that is given or found; an unknown one is an error that names it."""
    made = write(tmp_path / "data")
    found = ps.read_column(made, "kind")
    assert found == [("cat", "dog", "owl")[number % 3] for number in range(3 * ROWS)]
    assert ps.read_column(made.batch(2), "age")[40:43] == [None, 41, 42]
    batches = read(made.decode(ps.Category("kind", sorted(set(found))), ps.Category("id", range(3 * ROWS))).batch(64))
    rows = [row for batch in batches for row in zip(batch["kind"], batch["id"], strict=True)]
    assert rows == [(number % 3, number) for number in range(3 * ROWS)]
    with pytest.raises(DecodeError, match="'owl' is not one of its 2 categories"):
        read(made.decode(ps.Category("kind", ["cat", "dog"])).batch(64))
    with pytest.raises(ConfigError):
        ps.Category("kind", ["cat", "cat"])
