from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from loading import write_counted
from penstock import compose
from penstock.errors import ClosedError, ObjectMissingError, UnsupportedFormatError
from penstock.sources.shards import Shard, ShardFinder, ShardVersion
from penstock.store import Store
from penstock.store.local import LocalStore
from servers.faulty import FaultyServer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_counted(tmp_path / "a", (1, 1, 1))
    write_counted(tmp_path / "b", (1, 1))
    (tmp_path / "a" / "index.json").write_text("{}")
    (tmp_path / "odd {x}[1].tar").write_bytes(bytes(1024))
    return tmp_path


def found(source: object) -> list[str]:
    finder = ShardFinder(ps.shards(source).source, fetch=None)  # type: ignore[arg-type]
    try:
        return ["/".join(shard.url.split("/")[-2:]) for shard in finder.find()]
    finally:
        finder.close()


def test_prefix_in_key_order_without_other_files(folder: Path) -> None:
    """A prefix gives its shards in key order, deep ones too, and passes over other files."""
    assert found(f"{folder}/a/") == ["a/s-000.tar", "a/s-001.tar", "a/s-002.tar"]
    assert found(f"{folder}/a") == found(f"{folder}/a/")
    assert len(found(f"{folder}/")) == 6


def test_one_shard_braces_and_lists(folder: Path) -> None:
    """Names are taken as they are, in the order given, and nothing is listed for them."""
    assert found(f"{folder}/b/s-001.tar") == ["b/s-001.tar"]
    assert found(f"{folder}/{{b,a}}/s-00{{0..1}}.tar") == ["b/s-000.tar", "b/s-001.tar", "a/s-000.tar", "a/s-001.tar"]
    assert found([f"{folder}/b/s-001.tar", f"{folder}/a/s-000.tar"]) == ["b/s-001.tar", "a/s-000.tar"]
    assert found([f"{folder}/b/", f"{folder}/a/s-000.tar"]) == ["b/s-000.tar", "b/s-001.tar", "a/s-000.tar"]


def test_names_in_a_list_are_literal(folder: Path) -> None:
    """Braces and brackets in a list of names are part of the name."""
    assert found([f"{folder}/odd {{x}}[1].tar"])[0].endswith("tar")


def test_globs(folder: Path) -> None:
    """Wildcards match within a path segment, in key order."""
    assert found(f"{folder}/*/s-000.tar") == ["a/s-000.tar", "b/s-000.tar"]
    assert found(f"{folder}/a/s-00[12].tar") == ["a/s-001.tar", "a/s-002.tar"]
    assert found(f"{folder}/{{b,a}}/s-*.tar")[:2] == ["b/s-000.tar", "b/s-001.tar"]
    assert len(found(f"{folder}/**/*.tar")) == 6


@pytest.mark.parametrize("what", ["nowhere/", "a/*.zip", "a/s-9*.tar"])
def test_nothing_found_is_an_error(folder: Path, what: str) -> None:
    """A prefix or pattern without shards is a missing object that names it."""
    with pytest.raises(ObjectMissingError):
        found(f"{folder}/{what}")


@pytest.mark.parametrize("connected_count", [1, 2, 3, 4])
def test_closing_while_it_lists_ends_it_with_closed_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, connected_count: int
) -> None:
    """Whichever store was connected when ``close()`` came, listing ends with ClosedError, and every store is closed."""
    source = ps.shards([f"{folder}/a/", f"{folder}/b/", f"{folder}/a/s-000.tar"]).source
    stores: list[Store] = []

    def share(listed: Callable[[], bytes]) -> bytes:
        data = listed()
        if connected_count == 4:
            finder.close()
        return data

    def connect(*arguments: Any, **options: Any) -> Store:
        stores.append(connect_store(*arguments, **options))
        if len(stores) == connected_count:
            finder.close()
        return stores[-1]

    finder = ShardFinder(source, fetch=None, share=share)  # type: ignore[arg-type]
    connect_store = compose.connect
    monkeypatch.setattr(compose, "connect", connect)
    with pytest.raises(ClosedError):
        finder.find()
    for store in stores:
        with pytest.raises(ClosedError):
            store.read("s-000.tar")


@pytest.mark.server
def test_slashes_at_the_end_of_a_prefix_count(faulty: FaultyServer) -> None:
    """Keys below ``a//`` are other keys than those below ``a/``."""
    for key in ("a/x.tar", "a//y.tar", "a/b/z.tar", "a///z.tar"):
        faulty.objects[key] = bytes(1024)
    source = ps.shards(f"{faulty.url}/a//", endpoint_url=faulty.endpoint_url, anonymous=True).source
    finder = ShardFinder(source, fetch=None)  # type: ignore[arg-type]
    try:
        assert [shard.url for shard in finder.find()] == ["s3://bucket/a///z.tar", "s3://bucket/a//y.tar"]
    finally:
        finder.close()


@pytest.mark.parametrize("scheme", ["http", "file", ""])
def test_urls_of_a_manifest_are_decoded_once(tmp_path: Path, scheme: str) -> None:
    """Percent-encoding in ``http`` and ``file`` URLs of a manifest is that of the URL; in a path it is part of a name."""
    root = {"http": "http://127.0.0.1:1/d/", "file": f"file://{tmp_path}/d/", "": f"{tmp_path}/d/"}[scheme]
    names = ["a%20b.tar", "100%25.tar", "sub/%C3%A9.tar"]
    (tmp_path / "m.manifest.jsonl").write_text("".join(json.dumps({"url": root + name}) + "\n" for name in names))
    finder = ShardFinder(ps.shards(manifest=str(tmp_path / "m.manifest.jsonl")).source, fetch=None)  # type: ignore[arg-type]
    try:
        shards = finder.find()
    finally:
        finder.close()
    assert [shard.key for shard in shards] == (["a b.tar", "100%.tar", "sub/é.tar"] if scheme else names)


def test_a_shard_keeps_the_first_etag_that_is_learned(tmp_path: Path) -> None:
    """What a listing or the first answer said of a version stays; sizes follow the answers; other shards are not touched."""
    versions: dict[Shard, ShardVersion] = {}
    store = LocalStore(tmp_path)
    named, listed = (
        Shard(store, "a", versions),
        Shard(store, "b", versions, listed_etag='"1"', listed_size_bytes=5),
    )
    named.learn(etag='"2"', size_bytes=7)
    named.learn(etag='"3"')
    listed.learn(etag='"4"', size_bytes=5)
    assert (named.etag, named.size_bytes, named.version) == ('"2"', 7, ShardVersion('"2"', 7))
    assert (listed.etag, listed.size_bytes) == ('"1"', 5)
    assert listed not in versions
    assert (named.listed_etag, named.listed_size_bytes) == (None, None)
    copies = pickle.loads(pickle.dumps([named, listed]))
    assert [copy.version for copy in copies] == [named.version, listed.version]
    assert copies[0].versions is copies[1].versions
    with pytest.raises(FrozenInstanceError):
        named.format = "tar"  # type: ignore[misc]


def test_chunks_of_litdata_are_named(tmp_path: Path) -> None:
    """A folder or an object that LitData wrote is said to be one, with the command that converts it."""
    (tmp_path / "index.json").write_text("{}")
    (tmp_path / "chunk-0-0.bin").write_bytes(bytes(range(1, 256)) * 3)
    for url, error in ((f"{tmp_path}/", ObjectMissingError), ([f"{tmp_path}/chunk-0-0.bin"], UnsupportedFormatError)):
        with pytest.raises(error, match=rf"LitData.*penstock.pack.*StreamingDataset\('(file://)?{tmp_path}/'\)"):
            next(iter(ps.Loader(ps.shards(url).batch(1))))
