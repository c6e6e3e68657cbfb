"""The index of results, which the gateway serves beside them: a Loader has random access to what is transformed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from loading import counted, numbers
from loading import shard as packed
from penstock.errors import ObjectMissingError
from penstock.index.dataset_index import decode as decode_dataset
from penstock.index.shard_index import decode as decode_shard
from servers.gateway import Gateway

pytestmark = pytest.mark.server

SHARDS, SAMPLES = 5, 40
RUNS = 'penstock_gateway_result_runs_total{access_point="made",outcome="ok"}'
INDEXED = 'penstock_gateway_result_runs_total{access_point="made/index",outcome="ok"}'


def shard(number: int) -> bytes:
    """A WebDataset tar with samples that hold their number; all differ in length."""
    return packed(counted(range(1000 * number, 1000 * number + SAMPLES + number)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data" / "deep").mkdir(parents=True)
    for number in range(SHARDS):
        (tmp_path / "data" / "deep" / f"{number:03d}.tar").write_bytes(shard(number))
    (tmp_path / "data" / "words.txt").write_text("words")
    return tmp_path


TOML = """
port = 0
cache = "cache:200MB"
[access_points.made]
upstream = "data"
transform = "tar2tfrecord"
processes = 1
renamed_suffixes = { ".tar" = ".tfrecord" }
"""
LAZY = """
[access_points.LIST_SIZES]
upstream = "data"
transform = "tar2tfrecord"
processes = 1
renamed_suffixes = { ".tar" = ".tfrecord" }
list_sizes = "LIST_SIZES"
"""


@pytest.fixture
def gateway(folder: Path) -> Iterator[Gateway]:
    lazy = "".join(LAZY.replace("LIST_SIZES", mode) for mode in ("known-only", "source"))
    (folder / "gateway.toml").write_text(TOML + lazy)
    started = Gateway("--config", "gateway.toml", folder=folder)
    yield started
    started.kill()


def options_of(gateway: Gateway) -> dict[str, Any]:
    return {"endpoint_url": gateway.url, "credentials": ps.Credentials(access_key="a", secret_key="b")}


def test_the_index_describes_the_results(gateway: Gateway, folder: Path) -> None:
    """It has the size, ETag and number of samples of each result, is hidden from listings, and is made once."""
    with ps.connect("s3://made/", **options_of(gateway)) as store:
        listed = {info.key: info for info in store.list()}
        assert sorted(listed) == [f"deep/{number:03d}.tfrecord" for number in range(SHARDS)]
        whole = decode_dataset(store.read(".penstock/dataset.index").data, "whole")
        assert {(row.key, row.size_bytes, row.etag, row.samples_count) for row in whole.rows.values()} == {
            (key, info.size_bytes, info.etag, SAMPLES + int(key[5:8])) for key, info in listed.items()
        }
        deep = decode_dataset(store.read("deep/.penstock/dataset.index").data, "deep")
        assert sorted(deep.rows) == [key.removeprefix("deep/") for key in sorted(listed)]
        assert not list(store.list(".penstock/"))
        before = store.stat("deep/.penstock/dataset.index")
        assert store.stat("deep/.penstock/dataset.index").etag == before.etag
        gateway.assert_metrics({RUNS: SHARDS, INDEXED: 2 * SHARDS + 2})
        (folder / "data" / "deep" / "000.tar").write_bytes(shard(SHARDS))
        after = store.stat("deep/.penstock/dataset.index")
        assert after.etag != before.etag
        again = decode_dataset(store.read("deep/.penstock/dataset.index").data, "deep")
        assert again.rows["000.tfrecord"].samples_count == SAMPLES + SHARDS
        gateway.assert_metrics({RUNS: SHARDS + 1, INDEXED: 2 * SHARDS + 4})


def loader(url: str, *, rank: int = 0, world_size: int = 1, **options: Any) -> ps.Loader:
    pipeline = ps.shards(url, **options).shuffle(seed=7).decode(ps.Integer("cls"), ps.Text("txt")).batch(8)
    return ps.Loader(pipeline, index="require", rank=rank, world_size=world_size)


def epoch(url: str, **options: Any) -> list[int]:
    with loader(url, **options) as made:
        return numbers(made)


def test_a_loader_shuffles_by_it(gateway: Gateway, folder: Path) -> None:
    """By the index, a shuffled epoch equals that over stored TFRecords with an index, and goes on at another world size."""
    (folder / "stored").mkdir()
    with ps.connect("s3://made/deep/", **options_of(gateway)) as store:
        for info in store.list():
            (folder / "stored" / info.key).write_bytes(store.read(info.key).data)
    ps.build_index(f"{folder}/stored/", beside=True)
    everything = sorted(1000 * number + sample for number in range(SHARDS) for sample in range(SAMPLES + number))
    stored = epoch(f"{folder}/stored/")
    assert sorted(stored) == everything != stored
    url, options = "s3://made/deep/", options_of(gateway)
    assert epoch(url, **options) == stored
    with loader(url, **options) as first:
        batches = iter(first)
        seen = numbers([next(batches) for _ in range(6)])
        state = first.state_dict()
        del batches
    for rank in range(2):
        with loader(url, rank=rank, world_size=2, **options) as later:
            later.load_state_dict(state)
            seen += numbers(later)
    assert sorted(seen) == everything
    gateway.assert_metrics({RUNS: SHARDS})


def test_what_is_no_shard_has_no_index(gateway: Gateway, folder: Path) -> None:
    """Corrupt results, those that are no shards and prefixes without any have no index; the others have theirs."""
    (folder / "data" / "empty").mkdir()
    (folder / "data" / "empty" / "a.txt").write_text("x")
    with ps.connect("s3://made/", **options_of(gateway)) as store:
        for key in ("empty/", "empty/.penstock/shards/a.txt", "deep/.penstock/shards/missing.tfrecord"):
            for name in (f"{key}.penstock/dataset.index", f"{key}.index", f"{key}.penstock/packed.manifest"):
                with pytest.raises(ObjectMissingError):
                    store.read(name)
    (folder / "plain.toml").write_text(TOML.replace("tar2tfrecord", "mine:same").replace("renamed", "#"))
    (folder / "mine.py").write_text("def same(reader, request):\n    return reader.read()\n")
    (folder / "data" / "deep" / "002.tar").write_bytes(b"no tar at all" * 100)
    other = Gateway("--config", "plain.toml", folder=folder)
    try:
        with ps.connect("s3://made/deep/", **options_of(other)) as store:
            found = decode_dataset(store.read(".penstock/dataset.index").data, "deep")
            assert sorted(found.rows) == [f"{number:03d}.tar" for number in (0, 1, 3, 4)]
            with pytest.raises(ObjectMissingError):
                store.read(".penstock/shards/002.tar.index")
            index = decode_shard(store.read(".penstock/shards/003.tar.index").data, "003.tar")
            assert index.row == found.rows["003.tar"]
            other.assert_metrics({INDEXED: SHARDS + 1})
    finally:
        other.kill()


def test_listings_that_produce_nothing(gateway: Gateway, folder: Path) -> None:
    """Where a listing produces no results, neither does the index: it has those that the listing has, or there is none."""
    with ps.connect("s3://known-only/deep/", **options_of(gateway)) as store:
        with pytest.raises(ObjectMissingError):
            store.read(".penstock/dataset.index")
        data = store.read("003.tfrecord").data
        found = decode_dataset(store.read(".penstock/dataset.index").data, "deep")
        assert [(row.key, row.size_bytes) for row in found.rows.values()] == [("003.tfrecord", len(data))]
    with ps.connect("s3://source/deep/", **options_of(gateway)) as store, pytest.raises(ObjectMissingError):
        store.read(".penstock/dataset.index")
    # Three runs: the result, its index, and the index of the prefix.
    gateway.assert_metrics({"penstock_gateway_result_runs_total": 3})


def test_requests_at_once_share_one_index(gateway: Gateway) -> None:
    """Many clients that want the index of a data set that nobody has read get the same one, made once."""
    with ps.connect("s3://made/", **options_of(gateway)) as store:
        keys = ["deep/.penstock/dataset.index"] * 20
        keys += [f"deep/.penstock/shards/{number:03d}.tfrecord.index" for number in range(SHARDS)] * 5
        found: dict[str, set[bytes]] = {}
        for blob in store.read_many(keys):
            found.setdefault(blob.key, set()).add(bytes(blob.data))
    assert len(found) == SHARDS + 1
    assert all(len(each) == 1 for each in found.values())
    gateway.assert_metrics({RUNS: SHARDS, INDEXED: SHARDS + 1})
