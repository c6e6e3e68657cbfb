"""Keys of samples in formats that store none: refused, stored in a field, or read back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.errors import ConfigError, DataError, PenstockError
from penstock.pack import convert, pack, verify, writer

KEYED = [{"__key__": f"a/{number}", "jpg": b"x" * number, "cls": number} for number in range(40)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return six files."""
    root = tmp_path / "source"
    root.mkdir()
    for number in range(6):
        (root / f"{number:03d}.txt").write_text(f"text {number}")
    return root


def keys_of(folder: Path) -> list[str]:
    """Return the samples as a loader yields them."""
    with ps.Loader(ps.shards(f"{folder}/").batch(4), index="stream") as loader:
        return [key for batch in loader for key in batch["__key__"]]


@pytest.mark.parametrize("name", ["tfrecord", "tfrecord.gz", "mds", "recordio"])
def test_packing_and_converting_agree_on_keys(source: Path, tmp_path: Path, name: str) -> None:
    """``pack`` and ``convert`` both refuse to lose keys, with the same hint; no shard is written."""
    pack(source, tmp_path / "tars")
    fields = "txt=record" if name == "recordio" else None
    for make in (
        lambda **options: pack(source, tmp_path / "out", format=name, fields=fields, **options),
        lambda **options: convert(f"{tmp_path}/tars/", tmp_path / "out", to=name, fields=fields, **options),
        lambda **options: pack(KEYED, tmp_path / "out", format=name, fields="jpg=record", **options),
    ):
        with pytest.raises(ConfigError, match="keys") as caught:
            make()
        assert "--allow-loss" in str(caught.value)
        assert not [path for path in (tmp_path / "out").glob("*") if path.is_file()]
        assert make(allow_loss=True).samples_count in (6, 40)
        shutil.rmtree(tmp_path / "out")
    assert pack([{"record": b"x"}], tmp_path / "counted", format=name).samples_count == 1  # a number is not lost


@pytest.mark.parametrize("name", ["tfrecord", "tfrecord.zst"])
def test_keys_in_tfrecords_are_read_back(source: Path, tmp_path: Path, name: str) -> None:
    """With ``__key__``, keys are read back after packing files or Python objects, writing, and converting."""
    files = [f"{number:03d}" for number in range(6)]
    pack(source, tmp_path / "files", format=name, key_field="__key__", verify=True)
    pack(KEYED, tmp_path / "python", format=name, key_field="__key__", samples_max=15, verify=True)
    with writer(tmp_path / "pushed/x-%03d", format=name, key_field="__key__") as out:
        for sample in KEYED:
            out.write(sample)
    pack(source, tmp_path / "tars")
    convert(f"{tmp_path}/tars/", tmp_path / "converted", to=name, key_field="__key__", verify=True)
    assert keys_of(tmp_path / "files") == keys_of(tmp_path / "converted") == files
    assert keys_of(tmp_path / "python") == keys_of(tmp_path / "pushed") == [sample["__key__"] for sample in KEYED]
    convert(f"{tmp_path}/python/", tmp_path / "back", to="tar", allow_loss=True)  # the types of numbers
    assert keys_of(tmp_path / "back") == keys_of(tmp_path / "python")
    assert not verify(f"{tmp_path}/python/").problems
    assert pack(KEYED, tmp_path / "python", format=name, key_field="__key__", samples_max=15).shards_written == 0
    with pytest.raises(ConfigError, match="key_field='__key__' instead of None"):
        pack(source, tmp_path / "files", format=name, allow_loss=True)


def test_an_index_finds_keys_of_tfrecords(tmp_path: Path) -> None:
    """The index written by packing equals the one made by reading, and samples are found by key."""
    pack(KEYED, tmp_path / "out", format="tfrecord", key_field="__key__")
    with ps.shards(f"{tmp_path}/out/").open() as dataset:
        assert bytes(dataset["a/7"]["jpg"]) == b"x" * 7
    with ps.Loader(ps.shards(f"{tmp_path}/out/").shuffle(seed=1).batch(8)) as loader:
        assert sorted(key for batch in loader for key in batch["__key__"]) == sorted(each["__key__"] for each in KEYED)


def test_keys_of_tfrecords_are_not_lost_on_the_way_out(tmp_path: Path) -> None:
    """Keys in TFRecords are stored in a field or kept with the record; losing them is refused."""
    pack(KEYED, tmp_path / "in", format="tfrecord", key_field="__key__")
    with pytest.raises(DataError, match="would lose its key"):
        convert(f"{tmp_path}/in/", tmp_path / "mds", to="mds")
    with pytest.raises(DataError, match="would lose its key"):
        convert(f"{tmp_path}/in/", tmp_path / "some", to="tfrecord", fields="jpg")
    convert(f"{tmp_path}/in/", tmp_path / "again", to="tfrecord", bytes_max=1000)
    assert keys_of(tmp_path / "again") == keys_of(tmp_path / "in")
    convert(f"{tmp_path}/in/", tmp_path / "mds", to="mds", allow_loss=True)


@pytest.mark.parametrize("name", ["tar", "tfrecord", "mds", "parquet", "jsonl"])
def test_a_field_may_take_the_keys(tmp_path: Path, name: str) -> None:
    """Under another name, keys become a field in every format that has names; an existing field is refused."""
    samples: list[dict[str, Any]] = [{"__key__": f"k{number}", "n": number} for number in range(3)]
    pack(samples, tmp_path / "out", format=name, key_field="id")
    pipeline = ps.shards(f"{tmp_path}/out/")
    with ps.Loader(pipeline.batch(3), index="stream") as loader:
        (batch,) = loader
    assert b"k1" in (bytes(batch["json"][1]) if name == "jsonl" else bytes(batch["id"][1]))
    with pytest.raises(DataError, match="already has a field 'n'"):
        pack(samples, tmp_path / "none", format=name, key_field="n")


@pytest.mark.parametrize(
    ("name", "key_field"), [("mds", "__key__"), ("recordio", "__key__"), ("tar", "__shard__"), ("tar", "")]
)
def test_fields_that_cannot_take_the_keys(source: Path, tmp_path: Path, name: str, key_field: str) -> None:
    """Formats that cannot read keys back, and reserved names, are refused before anything is written."""
    with pytest.raises(PenstockError, match="key_field="):
        pack(source, tmp_path / "out", format=name, key_field=key_field)
    with pytest.raises(PenstockError, match="key_field="):
        convert(f"{source}/", tmp_path / "out", to=name, key_field=key_field)
    assert not (tmp_path / "out").exists()
