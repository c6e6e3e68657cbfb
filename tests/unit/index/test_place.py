"""Places of an index."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from indexing import Shard
from penstock.errors import ConfigError, DataError, ObjectMissingError
from penstock.index import DatasetIndex, IndexPlace, ShardIndex, ShardLike, ShardRow, beside, in_directory, resolve
from penstock.index.place import base_url, default_directory
from penstock.store.local import LocalStore
from penstock.store.memory import MemoryStore

ROW = ShardRow("a/b.tar", 10, '"e"', 0, "tar", has_offsets=False)


def named(root: str, *keys: str) -> list[ShardLike]:
    """Return shards of a store that describes itself as `root`."""
    store = MemoryStore(name="named")
    store.describe = lambda key: root + key  # type: ignore[method-assign]
    return [Shard(store, key, root + key, None, None) for key in keys]


def test_the_base_is_the_folder_that_was_listed_or_the_one_in_common() -> None:
    """A listed folder is the base URL, whatever it contains; for shards in a bucket, it is the deepest common folder."""
    assert base_url(named("s3://b/train/", "x/1.tar", "x/2.tar")) == "s3://b/train/"
    assert base_url(named("s3://b/", "train/x/1.tar", "train/x/2.tar")) == "s3://b/train/x/"
    assert base_url(named("s3://b/", "train/x1/1.tar", "train/x2/2.tar")) == "s3://b/train/"
    assert base_url(named("s3://b/", "1.tar")) == "s3://b/"
    assert base_url(named("s3://b/t/", "1.tar") + named("s3://b/v/", "1.tar")) == "s3://b/"
    assert base_url(named("file:///d/", "1.tar") + named("file:///e/", "1.tar")) == "file:///"


def test_two_buckets_have_no_base() -> None:
    """Shards without a common folder are refused with a hint."""
    with pytest.raises(ConfigError, match="index each bucket separately"):
        base_url(named("s3://b/", "1.tar") + named("s3://c/", "1.tar"))
    with pytest.raises(ConfigError, match="above"):
        beside(named("s3://b/t/", "1.tar") + named("s3://b/v/", "1.tar"))


def test_versions_that_a_listing_did_not_say_are_asked(memory: MemoryStore) -> None:
    """A shard given by name gets the stored object's size and ETag; a missing one is an error."""
    infos = {key: memory.write(key, b"x" * n) for n, key in enumerate(("t/0", "t/1", "t/2"))}
    shards = [Shard(memory, key, memory.describe(key), None, None) for key in infos]
    shards[1] = shards[1]._replace(etag="listed", size_bytes=9)
    found = resolve(shards, memory.describe("t/"))
    assert [(each.key, each.size_bytes, each.etag, each.if_match) for each in found] == [
        ("0", 0, infos["t/0"].etag, infos["t/0"].etag),
        ("1", 9, "listed", "listed"),
        ("2", 2, infos["t/2"].etag, infos["t/2"].etag),
    ]
    with pytest.raises(ObjectMissingError):
        resolve([Shard(memory, "t/gone", memory.describe("t/gone"), None, None)], memory.describe(""))
    with pytest.raises(ConfigError, match="does not lie under"):
        resolve(shards, "s3://elsewhere/")


def test_a_directory_is_named_after_url_and_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each data set has its folder; the same bucket name at another endpoint has another one."""
    one, two = (
        in_directory(named("s3://b/train/", "1.tar"), tmp_path),
        in_directory(named("s3://b/val/", "1.tar"), tmp_path),
    )
    assert one.url != two.url
    assert one.url == in_directory(named("s3://b/train/", "2.tar"), tmp_path).url
    assert "/train-" in one.url
    shards = named("s3://b/train/", "1.tar")
    shards[0].store.endpoint = type("S3Endpoint", (), {"endpoint_url": "http://127.0.0.1:9000"})()  # type: ignore[attr-defined]
    assert in_directory(shards, tmp_path).url != one.url
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert default_directory() == tmp_path / "cache" / "penstock" / "index"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the specification says to ignore it
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_directory() == tmp_path / ".cache" / "penstock" / "index"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """If an index cannot be stored, the error names the place, the reason and the options."""
    (tmp_path / "file").touch()
    place = in_directory(named("s3://b/train/", "1.tar"), tmp_path / "file")
    with pytest.raises(ConfigError, match=r"/file/.*: Not a directory") as caught:
        place.save(DatasetIndex(place.base_url, [ROW]))
    assert "index_dir=" in caught.value.hint


def test_beside_is_below_the_shards(memory: MemoryStore) -> None:
    """The folder's name is not a shard of any format."""
    from penstock.formats import format_of_name

    place = beside([Shard(memory, "t/1.tar", memory.describe("t/1.tar"), "e", 1)])
    place.save_shard(ShardIndex(ROW))
    place.save(DatasetIndex(place.base_url, [ROW]))
    keys = [info.key for info in memory.list()]
    assert keys == ["t/.penstock/dataset.index", "t/.penstock/shards/a/b.tar.index"]
    assert [format_of_name(key) for key in keys] == [None, None]


def test_what_is_damaged_is_as_if_it_were_not_there(memory: MemoryStore) -> None:
    """A damaged data set's index counts as empty; a damaged or foreign index of a shard gives no row."""
    place = IndexPlace(memory, "i/", base="s3://b/")
    assert len(place.load()) == 0
    memory.write("i/dataset.index", b"garbage")
    assert len(place.load()) == 0
    assert place.saved_rows({"a/b.tar"}) == []
    place.save_shard(ShardIndex(ROW))
    memory.write("i/shards/c.tar.index", b"garbage")
    memory.write("i/shards/d.tar.index", b"")
    memory.write("i/shards/e.tar.index", ShardIndex(ROW).encode())
    assert place.saved_rows({"a/b.tar", "c.tar", "d.tar", "e.tar"}) == [ROW, ROW]
    with pytest.raises(DataError, match="run penstock index"):
        place.load_shard(ROW._replace(key="e.tar"))
    with pytest.raises(ObjectMissingError):
        place.load_shard(ROW._replace(key="f.tar"))


def test_a_read_only_look_makes_no_folder(tmp_path: Path, listed: Callable[..., list[ShardLike]]) -> None:
    """Looking for a missing index leaves nothing behind."""
    from penstock.index import lookup

    (tmp_path / "data").mkdir()
    store = LocalStore(tmp_path / "data")
    store.write("1.tar", b"x")
    found = lookup(listed(store), index_dir=tmp_path / "index")
    assert (found.is_complete, found.samples_count, found.rows) == (False, 0, [None])
    assert not (tmp_path / "index").exists()
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["1.tar"]
    with pytest.raises(ConfigError, match="at least one shard"):
        lookup([], index_dir=uuid.uuid4().hex)
