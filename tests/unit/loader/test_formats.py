"""Every streamed format goes through the loader alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from loading import FORMATS_WRITTEN, index, number_of, numbers, write_formatted
from penstock.config import MIB
from penstock.errors import DataError, DecodeError
from penstock.formats import TFRecordWriter
from penstock.formats.mds import MdsWriter
from resuming import assert_resumes_everywhere, assert_same

SIZES = (9, 0, 1, 14, 5)


def pipeline(folder: Path, *, window: int | None = 12, batch: int = 4, **source: Any) -> Any:
    made = ps.shards(f"{folder}/", **source)
    return (made if window is None else made.shuffle(window=window)).map(number_of).batch(batch)


@pytest.mark.parametrize("gap_bytes", [0, 1 << 20], ids=["by range", "whole"])
@pytest.mark.parametrize("name", FORMATS_WRITTEN)
def test_the_same_samples_in_the_same_order(tmp_path: Path, name: str, gap_bytes: int) -> None:
    """The format of the shards changes nothing in the order, however they are read."""
    fetch = ps.FetchConfig(gap_bytes_max=gap_bytes)
    write_formatted(tmp_path / "tar", "tar", SIZES)
    write_formatted(tmp_path / name, name, SIZES)
    with ps.Loader(pipeline(tmp_path / "tar")) as tar, ps.Loader(pipeline(tmp_path / name), fetch=fetch) as other:
        for _ in range(2):
            assert numbers(other) == numbers(tar)


@pytest.mark.parametrize("mode", ["stream", "require"])
@pytest.mark.parametrize("name", FORMATS_WRITTEN)
def test_every_format_resumes_inside_its_shards(tmp_path: Path, name: str, mode: Any) -> None:
    """Also where a shard can be entered at its head only, or behind it, with an index and without."""
    write_formatted(tmp_path / "data", name, SIZES)
    made = pipeline(tmp_path / "data")
    options = {
        "lanes": 2, "threads": 1, "index": mode, "fetch": ps.FetchConfig(gap_bytes_max=0),
        "index_dir": index(made, tmp_path / "index") if mode == "require" else None,
    }  # fmt: skip
    assert_resumes_everywhere(lambda: ps.Loader(made, **options), every=5)


def test_the_content_decides_and_the_pipeline_may(tmp_path: Path) -> None:
    """A shard's first bytes say what it is, whatever its suffix; format= says it where they cannot."""
    write_formatted(tmp_path / "data", "tfrecord", SIZES)
    for path in list((tmp_path / "data").iterdir()):
        if path.stat().st_size:  # of an object of no bytes, the name decides
            path.rename(path.with_suffix(".tar"))
    with ps.Loader(pipeline(tmp_path / "data", window=None)) as loader:
        assert numbers(loader) == list(range(29))
    made = ps.shards(f"{tmp_path}/data/", format="tfrecord-raw").batch(4)
    with ps.Loader(made) as loader:
        assert next(iter(next(iter(loader)))) == "record"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.tar").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(600))
    with ps.Loader(pipeline(tmp_path / "other")) as loader, pytest.raises(DataError, match=r"x\.tar"):
        next(iter(loader))


def test_numbers_of_a_format_are_arrays(tmp_path: Path) -> None:
    """What the format itself says are numbers arrives as arrays, also where nobody decodes; ragged ones are refused."""

    def write(name: str, floats: list[list[float]]) -> None:
        out = bytearray()
        writer = TFRecordWriter(out.extend)
        for each in floats:
            writer.add({"x": np.array(each, np.float32), "raw": b"ab"})
        writer.finish()
        (tmp_path / name).mkdir()
        (tmp_path / name / "s.tfrecord").write_bytes(out)

    write("even", [[1, 2, 3], [4, 5, 6]])
    with ps.Loader(ps.shards(f"{tmp_path}/even/").batch(2)) as loader:
        batch = next(iter(loader))
    np.testing.assert_array_equal(batch["x"], np.array([[1, 2, 3], [4, 5, 6]], np.float32))
    assert batch["x"].dtype == np.float32
    assert batch["raw"] == [b"ab", b"ab"]
    write("odd", [[1, 2, 3], [4, 5]])
    with ps.Loader(ps.shards(f"{tmp_path}/odd/").batch(2)) as loader, pytest.raises(DecodeError, match=r"\[2\].*\[3\]"):
        next(iter(loader))


@pytest.mark.parametrize("name", ["mds", "tfrecord"])
def test_the_budget_changes_no_array(tmp_path: Path, name: str) -> None:
    """A shuffle window beyond its share of the budget is copied: arrays keep their types and shapes, empty ones too."""
    out = bytearray()
    writer: Any = MdsWriter(out.extend) if name == "mds" else TFRecordWriter(out.extend)
    for number in range(300):
        arrays = {
            "image": np.full((64, 64, 3), number % 256, np.uint8),
            "half": np.full((2, 3), number, np.float16),
            "empty": np.zeros(0, np.float32),
        }
        if name == "tfrecord":
            arrays = {"empty": [], "x": np.full(3, number, np.float32), "raw": bytes(20_000)}
        writer.add({"n": number, **arrays})
    writer.finish()
    (tmp_path / f"s.{name}").write_bytes((writer.head() if name == "mds" else b"") + out)
    made = ps.shards(f"{tmp_path}/").shuffle(window=300).batch(8)
    small, large = (ps.Loader(made, fetch=ps.FetchConfig(budget_bytes_max=MIB << at), lanes=1) for at in (4, 9))
    with small, large:
        for left, right in zip(small, large, strict=True):
            assert_same(left, right)
            if name == "mds":
                assert left["image"].shape == (8, 64, 64, 3) or left["n"].shape[0] == 4
