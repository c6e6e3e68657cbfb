"""``.select`` reaches down: members nobody wants are not fetched where that pays, and nothing else changes."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from counting import Counted, counted_stores
from loading import index, shard
from penstock.errors import ConfigError, CorruptShardError, FieldMissingError
from penstock.formats import TFRecordWriter
from penstock.loader.statistics import LoaderStatistics

KIB = 1024
COUNT = 24
FETCH = ps.FetchConfig(gap_bytes_max=32 * KIB)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """What is asked of all stores."""
    return counted_stores(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three shards whose samples hold two small fields, and between them a video of about 100 KiB."""
    noise = random.Random(1)
    (tmp_path / "data").mkdir()
    for number in range(3):
        samples = [
            {
                "__key__": f"ä{number}{at:03d}",
                "cls": b"%d" % at,
                "mp4": noise.randbytes(noise.randrange(80, 120) * KIB),
                "txt": b"" if at % 3 else b"t%d" % at,
            }
            for at in range(COUNT)
        ]
        (tmp_path / "data" / f"s{number}.tar").write_bytes(shard(samples))
    index(ps.shards(f"{tmp_path}/data/"), tmp_path / "index")
    return tmp_path / "data"


def read(made: ps.Pipeline, folder: Path, **options: Any) -> tuple[list[Any], LoaderStatistics]:
    options = {"fetch": FETCH, "threads": 1, "lanes": 4, "index_dir": folder.parent / "index", **options}
    with ps.Loader(made.batch(5), **options) as loader:
        found = [
            sample for batch in loader for sample in zip(batch["__key__"], batch["cls"], batch["txt"], strict=True)
        ]
        return found, loader.statistics()


def small(sample: dict[str, Any]) -> dict[str, Any]:
    return {"cls": sample["cls"], "txt": sample["txt"]}


@pytest.mark.parametrize("window", [None, 32])
def test_members_nobody_wants_are_not_fetched(folder: Path, counted: Counted, window: int | None) -> None:
    """With an index only the small members are asked for, and counted; the samples and their order are the same."""
    source = ps.shards(f"{folder}/") if window is None else ps.shards(f"{folder}/").shuffle(window=window)
    every, done = read(source.map(small), folder)
    assert len(every) == 3 * COUNT
    assert done.saved_bytes == 0
    size = sum(path.stat().st_size for path in folder.iterdir())
    for made in (source.select(["txt", "cls"]), source.decode(ps.Bytes("cls"), ps.Bytes("txt"))):
        counted.clear()
        found, done = read(made, folder)
        assert found == every
        assert counted.bytes < size / 20
        assert size - 3 * 10 * KIB - counted.bytes <= done.saved_bytes <= size - counted.bytes
    found, done = read(source.select(["txt", "cls"]), folder, index="stream")
    assert sorted(found) == sorted(every)
    assert done.saved_bytes == 0


def test_small_members_are_read_through(folder: Path, counted: Counted) -> None:
    """Where a member is shorter than the gap that a request is worth, all is read, and no index of a shard is asked for."""
    found, done = read(ps.shards(f"{folder}/").select(["txt", "cls"]), folder, fetch=ps.FetchConfig())
    assert len(found) == 3 * COUNT
    assert done.saved_bytes == 0
    assert len(counted.spans) == 4 + 2  # lanes, and shards that two of them share


def test_resumed_and_divided_it_is_the_same(folder: Path) -> None:
    """A state, two ranks and worker processes leave the same bytes out."""
    made = ps.shards(f"{folder}/").shuffle(window=32).select(["txt", "cls"])
    every, _ = read(made, folder)
    options: dict[str, Any] = {"fetch": FETCH, "lanes": 4, "threads": 1, "index_dir": folder.parent / "index"}
    with ps.Loader(made.batch(5), **options) as loader:
        for _ in range(7):
            next(iter(loader))
        state = loader.state_dict()
    with ps.Loader(made.batch(5), **options) as loader:
        loader.load_state_dict(state)
        assert [key for batch in loader for key in batch["__key__"]] == [key for key, _, _ in every[35:]]
        assert loader.statistics().saved_bytes > 20 * 80 * KIB
    ranks = [read(made, folder, rank=rank, world_size=2) for rank in range(2)]
    assert sorted(found for rank, _ in ranks for found in rank) == sorted(every)
    assert all(done.saved_bytes > 30 * 80 * KIB for _, done in ranks)


def test_a_field_that_is_not_there_is_the_same_error(folder: Path) -> None:
    """What a pipeline misses is said as ever, naming what the sample has."""
    with pytest.raises(FieldMissingError, match="'cls', 'mp4', 'txt'"):
        read(ps.shards(f"{folder}/").select(["txt", "jpg"]), folder)


def test_an_error_says_where_in_the_shard(folder: Path) -> None:
    """A damaged header behind members that were left out is named by its own offset."""
    path = folder / "s1.tar"
    data = bytearray(path.read_bytes())
    at = data.index(b"\xc3\xa41010.txt") // 512 * 512 - 512  # of the header before, which says the name
    data[at + 148 : at + 156] = b"\0" * 8
    info = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    with pytest.raises(CorruptShardError, match=r"s1\.tar") as caught:
        read(ps.shards(f"{folder}/").select(["txt", "cls"]), folder, lanes=1)
    assert caught.value.offset_bytes == at


def test_what_the_user_says_of_the_format_wins(tmp_path: Path) -> None:
    """Before the index, which says it without the content, and before what the bytes look like."""
    out = bytearray()
    writer = TFRecordWriter(out.extend)
    for number in range(20):
        writer.add({"n": b"%d" % number})
    writer.finish()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "s.tfrecord").write_bytes(out)
    place = index(ps.shards(f"{tmp_path}/data/"), tmp_path / "index")

    def names(**source: Any) -> set[str]:
        made = ps.shards(f"{tmp_path}/data/", **source).shuffle(window=8).batch(3)
        with ps.Loader(made, lanes=3, index="require", index_dir=place) as loader:
            batches = list(loader)
        assert sum(len(batch["__key__"]) for batch in batches) == 20
        return {name for batch in batches for name in batch if not name.startswith("__")}

    assert names() == {"n"}
    assert names(format="tfrecord") == {"n"}
    assert names(format="tfrecord-raw") == {"record"}
    with pytest.raises(CorruptShardError, match=r"s\.tfrecord"):
        names(format="tar")
    with pytest.raises(ConfigError, match="format"):
        names(format="tfrecords")
