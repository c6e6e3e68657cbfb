"""What a new user gets wrong: each mistake is one of our errors, which says what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from loading import write_counted
from penstock.errors import (
    BucketMissingError,
    ConfigError,
    DataError,
    DecodeError,
    DirectoryMissingError,
    FieldMissingError,
    PenstockError,
)
from penstock.pack.entries import PlanEntry, SourceListing, labelled_by_table

P: Any = ps.shards("s3://bucket/train/")
ANY: Any = ps  # what a type checker refuses as well


def _said(call: Callable[[], Any], kind: type[PenstockError] = ConfigError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ps.shards(), ["shards() must be given a URL", "ps.shards('s3://bucket/train/')"]),
        (lambda: ps.objects(), ["objects() must be given a URL", "ps.objects("]),
        (lambda: ANY.shards(5), ["shards(5)"]),
        (lambda: ANY.shards(b"s3://b/"), ["shards(b's3://b/')"]),
        (lambda: ANY.shards(P), ["must be given a URL"]),
        (lambda: ANY.shards("s3://b/", endpoint="http://x"), ["endpoint=...", "did you mean endpoint_url=?"]),
        (lambda: ANY.connect("s3://bucket-x/", retry=3), ["retry=3 must be a RetryConfig", "ps.RetryConfig(...)"]),
        (lambda: ANY.shards("s3://bucket-x/", retry=3), ["retry=3 must be a RetryConfig"]),
        (lambda: ANY.shards("s3://bucket-x/", hedge=False), ["hedge=False must be a HedgeConfig"]),
        (lambda: ANY.connect("s3://bucket-x/", transport={}), ["transport={} must be a TransportConfig"]),
        (lambda: ANY.connect("s3://bucket-x/", credentials=("a", "b")), ["must be a Credentials, not tuple"]),
        (lambda: ANY.RetryConfig(attempts_max="3"), ["attempts_max='3'"]),
        (lambda: ANY.shards({"a": 1}), ["must be given a URL"]),
        (lambda: ANY.mix({P: 1}, schedule=[1]), ["schedule=[1]", "must be a dict"]),
        (lambda: ANY.mix({P: 1}, schedule={5: 1}), ["schedule={5: 1}", "must be a dict"]),
        (lambda: P.join(5), [".join(5) must be the URL of a table, or a pipeline"]),
        (lambda: ANY.Loader(P.batch(2), on_epoch=5), ["on_epoch=5 must be a function"]),
        (lambda: ANY.build_index(P, index_dir=5), ["index_dir=5 must be a path"]),
        (lambda: ANY.connect(5), ["connect(5) must be given a URL or a path"]),
        (lambda: ANY.mix([P, P]), ["a dict of pipelines and their weights", "{photos: 1, drawings: 1}"]),
        (lambda: ANY.mix(P), ["a dict of pipelines"]),
        (lambda: P.select(5), [".select() takes a name or a list of names, not 5"]),
        (lambda: P.decode([ps.Integer("cls")]), [".decode(*fields)"]),
        (lambda: P.decode(ps.Integer), ["ps.Integer('ext')"]),
        (lambda: P.decode("cls"), ["ps.Text('cls')"]),
        (lambda: P.map(len, fields=["a"]), ["must be a dict of field names"]),
        (lambda: P.map(len, fields={"a": "int65"}), ["'int65'", "must be a dtype"]),
        (lambda: P.map(len, fields={"a": ("int64", 3)}), ["('int64', 3)"]),
        (lambda: P.batch(4, ragged=3), ["ragged= takes a name"]),
        (lambda: P.decode(ps.Text("txt")).batch_by_size(9, size="tokens"), ["'tokens', but samples have txt"]),
        (lambda: ANY.FetchConfig(part_bytes="8MB"), ["part_bytes='8MB' must be a whole number of at least 65536"]),
        (lambda: ps.FetchConfig(budget_bytes_max=-1), ["budget_bytes_max=-1"]),
        (lambda: ANY.peek(P, "3"), ["n='3' must be a whole number in [1, 10000]"]),
        (lambda: ANY.explain(P, lane=3), ["explain(lane=...)", "did you mean lanes=?"]),
        (lambda: ANY.Loader(P.batch(2)).epochs("3"), ["epochs='3'"]),
        (lambda: ANY.Loader(P.batch(2)).restart("3"), ["epoch='3'"]),
        (lambda: ANY.Loader(P.batch(2), num_worker=2), ["Loader(num_worker=...)", "ps.Loader(processes=)"]),
        (lambda: ANY.Loader(P, batch_size=2), [".batch(n) of the pipeline"]),
        (lambda: ANY.Loader(P.batch(2), thread=2), ["did you mean threads=?"]),
        (lambda: P.shuffle(buffer_size=9), ["shuffle(buffer_size=...)", ".shuffle(window=n)"]),
        (lambda: P.shuffle(windw=9), ["did you mean window=?"]),
        (lambda: P.batch(batch_size=9), [".batch(n)"]),
        (lambda: ANY.shards("s3://b/", shuffle_buffer=9), [".shuffle(window=n)"]),
        (lambda: ANY.Image("jpg", size=224), ["Image(size=...)", "height= and width="]),
        (lambda: ANY.Image("jpg", hieght=224, width=224), ["did you mean height=?"]),
        (lambda: ANY.Integer("cls", defualt=0), ["Integer(defualt=...)", "did you mean default=?"]),
        (lambda: ANY.connect("s3://bucket-x/", endpoint="http://x"), ["did you mean endpoint_url=?"]),
        (lambda: ANY.connect("s3://bucket-x/", aws_access_key_id="a"), ["keys are a ps.Credentials"]),
        (lambda: ANY.shards("s3://b/", on_corupt="raise"), ["did you mean on_corrupt=?"]),
        (lambda: ANY.pack("a", "b", bytes_maxx=9), ["did you mean bytes_max=?"]),
    ],
)
def test_mistakes_of_writing(call: Callable[[], Any], words: list[str]) -> None:
    """Wrong types, swapped arguments and misspelt names are refused at once, with what to write."""
    said = _said(call)
    assert [word for word in words if word not in said] == [], said


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("threads", "2"),
        ("lanes", "2"),
        ("lanes", 0),
        ("processes", 1.5),
        ("prefetch_batches", True),
        ("fetch", {"part_bytes": 1}),
        ("index_dir", 5),
        ("stride", 2),
        ("stride", ("a", "b")),
    ],
)
def test_a_loaders_options_have_types(name: str, value: Any) -> None:
    """What is of another type is refused when the loader is made, and named."""
    assert f"{name}={value!r} must be" in _said(lambda: ps.Loader(P.batch(2), **{name: value}))


def test_one_name_is_a_list_of_one() -> None:
    """Nobody means the letters of a word."""
    assert P.batch(4, pad="tokens").stages[-1].pad == (("tokens", 0),)
    assert P.batch(4, ragged="tokens").stages[-1].ragged == ("tokens",)
    assert P.join("s3://b/t.csv", fields="label").stages[-1].fields == ("label",)


def test_a_pipeline_is_not_iterated() -> None:
    """It says what does."""
    with pytest.raises(TypeError, match=r"ps\.Loader\(pipeline\)"):
        list(P)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_counted(tmp_path / "data", (4, 4))
    return tmp_path


def _read(pipeline: Any) -> list[Any]:
    with ps.Loader(pipeline.batch(8), threads=1) as loader:
        return list(loader)


def test_a_missing_directory_is_no_bucket(folder: Path) -> None:
    """Its error and hint speak of a path; who caught the error of a bucket catches it as before."""
    for wrong in ("none/", "none/*.tar", "none/a.tar"):
        said = _said(lambda wrong=wrong: _read(ps.shards(f"{folder}/{wrong}")), DirectoryMissingError)  # type: ignore[misc]
        assert f"the directory {folder}/none does not exist" in said
        assert "Hint: check the path" in said
        assert "bucket" not in said
    assert issubclass(DirectoryMissingError, BucketMissingError)


def test_nothing_to_read_says_why(folder: Path) -> None:
    """An empty folder, files of other kinds, a pattern that matches nothing, a directory in a list: each has its hint."""
    (folder / "empty").mkdir()
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("x")
    cases = {
        f"{folder}/empty/": "the folder is empty",
        f"{folder}/texts/": "ps.objects(url)",
        f"{folder}/data/*.zip": "no shard has a name like this",
        f"['{folder}/data/s-000.tar']": "as a list",
    }
    for url, word in cases.items():
        assert word in _said(lambda url=url: _read(ps.shards(url)), PenstockError)  # type: ignore[misc]
    assert "is a directory" in _said(lambda: _read(ps.shards(manifest=f"{folder}/data/")))
    said = _said(lambda: _read(ps.shards([f"{folder}/data"])))
    assert f"with a slash: {folder}/data/" in said


def test_a_format_that_does_not_exist(folder: Path) -> None:
    """Its hint is the name that was meant, not a list of thirty."""
    assert "Hint: did you mean 'tar'?" in _said(lambda: _read(ps.shards(f"{folder}/data/", format="tarr")))
    (folder / "labels.csv").write_text("a,b\n")
    said = _said(lambda: _read(ps.shards([f"{folder}/labels.csv"])), DataError)
    assert "format='tar'" in said
    assert len(said) < 300


@pytest.mark.parametrize(
    ("first", "other", "remedy"),
    [
        (1, 1.5, "float(sample['v'])"),
        (1, "a", "return int for every sample"),
        (1, 2**70, "2**63 - 1"),
        (np.zeros(3), np.zeros(4), ".batch(pad=['v'])"),
        (np.zeros(3), np.zeros(3, np.float32), "return float64[3] for every sample"),
        (np.zeros((2, 2, 3), np.uint8), np.zeros((3, 2, 3), np.uint8), "give Image a height and width"),
    ],
)
def test_what_does_not_fit_into_a_batch_says_the_remedy(folder: Path, first: Any, other: Any, remedy: str) -> None:
    """That of its own kind: pictures are scaled, numbers converted, arrays padded."""
    made = ps.shards(f"{folder}/data/").map(lambda sample: {"v": other if sample["__key__"] == "s00003" else first})
    assert remedy in _said(lambda: _read(made), DecodeError)


@pytest.mark.parametrize(
    ("row", "tells"),
    [
        ("train/s00000", "it has 'train/s00000': its names begin with 'train/'"),
        ("s00000.jpg", "it has 's00000.jpg': its names end with '.jpg'"),
        ("other", "its names are like 'other'"),
        (None, "it is empty"),
    ],
)
def test_a_table_without_the_key_says_what_it_has(folder: Path, row: str | None, tells: str) -> None:
    """A name of the table, and by what it differs: in joins and in tables of labels."""
    (folder / "labels.csv").write_text("key,label\n" + (f"{row},1\n" if row else ""))
    said = _said(lambda: _read(ps.shards(f"{folder}/data/").join(f"{folder}/labels.csv")), FieldMissingError)
    assert tells in said
    rows: list[dict[str, Any]] = [{"key": row, "label": "1"}] if row and "." not in row else []
    if row is None or rows:
        listing = SourceListing([], [PlanEntry("s00000", (), {})], 0, None)
        assert tells in _said(lambda: labelled_by_table(listing, "cls", rows, url="labels.csv"), DataError)


def test_text_is_no_picture(folder: Path) -> None:
    """The error speaks of the bytes, and not of an object in memory."""
    said = _said(lambda: _read(ps.shards(f"{folder}/data/").decode(ps.Image("txt", height=4, width=4))), DecodeError)
    assert "does not recognise the format" in said
    assert "0x" not in said


def test_a_member_that_does_not_decode_is_no_damaged_shard(tmp_path: Path) -> None:
    """`on_corrupt=` does not leave it out; the error names what does."""
    write_counted(tmp_path / "data", (3,))
    made = ps.shards(f"{tmp_path}/data/", on_corrupt="skip_sample")
    assert "Hint: decode(max_errors=n)" in _said(lambda: _read(made.decode(ps.Image("txt"))), DecodeError)
    with ps.Loader(made.decode(ps.Image("txt"), max_errors=3).batch(1)) as loader:
        assert list(loader) == []
