"""Shards of every format that are not what they should be, through the loader: named, or left out and counted."""

from __future__ import annotations

import io
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from counting import Counted, counted_stores
from loading import FORMATS_WRITTEN, formatted, index, shard
from penstock.errors import CorruptShardError, DecodeError, ObjectChangedError, UnsupportedFormatError

KIB = 1024
ROWS = 12
FETCH = ps.FetchConfig(gap_bytes_max=0)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """What is asked of all stores."""
    return counted_stores(monkeypatch)


def write(folder: Path, name: str, *, value_bytes: int = 0) -> list[Path]:
    """Two shards, whose second one holds what the tests look for."""
    folder.mkdir(exist_ok=True)
    noise, paths = random.Random(5), []
    for number in range(2):
        digits = [str(100 * number + at + 1) for at in range(ROWS)]
        if value_bytes:  # numbers for JSON, of many digits
            digits = [str(noise.randrange(10 ** (value_bytes - 1), 10**value_bytes)) for _ in digits]
        samples = [{"__key__": f"{number}{at:03d}", "n": text.encode()} for at, text in enumerate(digits)]
        paths.append(folder / f"s{number}.{name}")
        paths[-1].write_bytes(formatted(name, samples))
    return paths


def read(folder: Path, policy: Any = "raise", **options: Any) -> tuple[int, Any]:
    """Samples read, and the statistics."""
    made = ps.shards(f"{folder}/", on_corrupt=policy).batch(5)
    with ps.Loader(made, threads=1, fetch=FETCH, **options) as loader:
        return sum(len(batch["__key__"]) for batch in loader), loader.statistics()


@pytest.mark.parametrize("damage", ["garbage", "cut"])
@pytest.mark.parametrize("name", FORMATS_WRITTEN)
def test_raised_or_counted(tmp_path: Path, name: str, damage: str) -> None:
    """It is an error that names shard and offset; or what is good is read, and what is not is counted."""
    paths = write(tmp_path, name)
    data = paths[0].read_bytes()
    if damage == "garbage":
        paths[0].write_bytes(random.Random(7).randbytes(len(data)))
    else:  # not where a line or a frame ends
        cut = len(data) * 2 // 3 | 1
        paths[0].write_bytes(data[: cut if data[cut - 1] not in b"}\n" else cut - 2])
    with pytest.raises(CorruptShardError, match=rf"s0\.{name}") as caught:
        read(tmp_path)
    assert caught.value.offset_bytes is not None
    for policy in ("skip_sample", "skip_shard"):
        count, done = read(tmp_path, policy)
        assert ROWS <= count < 2 * ROWS
        assert done.skipped_samples >= 1
        assert done.skipped_bytes > 0 or (damage == "cut" and "." in name)  # of a stream that ends, nothing is left


@pytest.mark.parametrize("how", ["stream", "require"])
@pytest.mark.parametrize("name", FORMATS_WRITTEN)
def test_changed_under_way(tmp_path: Path, counted: Counted, name: str, how: Any) -> None:
    """A shard that is replaced by a shorter one while it is read is an error that names it, whatever the policy."""
    paths = write(tmp_path / "data", name, value_bytes=3000)
    made = ps.shards([str(paths[1])], on_corrupt="skip_shard").batch(1)
    place = index(made, tmp_path / "index") if how == "require" else None
    with ps.Loader(made, threads=1, index=how, index_dir=place, fetch=FETCH) as loader:
        loader._session.planned()
        list(loader)  # pins the version
        paths[1].write_bytes(formatted(name, [{"__key__": "0", "n": b"1"}]))
        with pytest.raises(ObjectChangedError, match=rf"s1\.{name}"):
            list(loader)


@pytest.mark.parametrize("name", ["tar", "tfrecord", "mds", "recordio"])
def test_an_index_of_another_version(tmp_path: Path, name: str) -> None:
    """It is not used: nothing is read by its offsets."""
    paths = write(tmp_path / "data", name)
    place = index(ps.shards(f"{tmp_path}/data/"), tmp_path / "index")
    paths[0].write_bytes(formatted(name, [{"__key__": "0", "n": b"1"}]))
    assert read(tmp_path / "data", index_dir=place)[0] == ROWS + 1


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    """An array of objects is refused without allow_pickle=True; a column of pickles is bytes."""

    class Trap:
        def __reduce__(self) -> Any:
            return pytest.fail, ("a pickle was loaded",)

    npy = io.BytesIO()
    np.save(npy, np.array([{"a": 1}], object), allow_pickle=True)
    npy_trap = npy.getvalue()[:128] + pickle.dumps(Trap())
    (tmp_path / "tar").mkdir()
    (tmp_path / "tar" / "s.tar").write_bytes(shard([{"__key__": "a", "npy": npy_trap}]))
    with ps.Loader(ps.shards(f"{tmp_path}/tar/").decode(ps.Numpy("npy")).batch(1)) as loader:
        with pytest.raises(DecodeError, match="allow_pickle=True"):
            list(loader)
    trap = pickle.dumps(Trap())
    data = formatted("mds", [{"__key__": "a", "n": trap}]).replace(b'"bytes"', b'"pkl"  ')
    (tmp_path / "mds").mkdir()
    (tmp_path / "mds" / "s.mds").write_bytes(data)
    with ps.Loader(ps.shards(f"{tmp_path}/mds/").batch(1)) as loader:
        assert next(iter(loader))["n"] == [trap]


@pytest.mark.parametrize("kind", ["tfrecord", "tar"])
def test_other_tools_indexes(tmp_path: Path, counted: Counted, kind: str) -> None:
    """Offsets that another tool left beside the shards serve the loader: no shard is read for an index."""
    paths = write(tmp_path / "data", kind, value_bytes=3000)
    with ps.Loader(ps.shards(f"{tmp_path}/data/").batch(1), index="stream") as loader:
        want = [value for batch in loader for value in batch["n"]]
    for path in paths:
        data = path.read_bytes()
        if kind == "tar":  # Megatron-Energon: where each sample begins, and the end
            starts = [0]
            while len(starts) < ROWS:
                starts.append(starts[-1] + 512 + -(-3000 // 512) * 512)
            Path(f"{path}.idx").write_bytes(np.array([*starts, len(data)], "<u8").tobytes())
        else:
            size, at, lines = len(data) // ROWS, 0, ""
            while at < len(data):
                lines += f"{at} {size}\n"
                at += size
            Path(f"{path}.idx").write_text(lines)
    counted.clear()
    made = ps.shards(f"{tmp_path}/data/")
    place = index(made, tmp_path / "index")
    assert counted.bytes < 10 * KIB
    with ps.Loader(made.shuffle(window=8).batch(3), index="require", index_dir=place, lanes=3) as loader:
        assert sorted(value for batch in loader for value in batch["n"]) == sorted(want)


@pytest.mark.parametrize("name", FORMATS_WRITTEN)
def test_an_object_of_no_bytes(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """It has no samples where writers leave such files, and a warning names it; else it is cut off, and named or counted."""
    paths = write(tmp_path / "data", name)
    paths[0].write_bytes(b"")
    may_be_empty = name in {"tfrecord", "recordio", "jsonl"}
    options: dict[str, Any] = {"index_dir": tmp_path / "index", "index": "stream"}
    count, statistics = read(tmp_path / "data", "skip_sample", **options)
    assert (count, statistics.skipped_samples) == (ROWS, 0 if may_be_empty else 1)
    (warning,) = [record.getMessage() for record in caplog.records if paths[0].name in record.getMessage()]
    assert "0 bytes" in warning
    if may_be_empty:
        index(ps.shards(f"{tmp_path}/data/"), tmp_path / "index")
        assert read(tmp_path / "data", **options | {"index": "require"})[0] == ROWS
        return
    with pytest.raises(CorruptShardError, match=r"0 bytes|not a zip|not a Parquet|too short"):
        read(tmp_path / "data", **options)


def test_a_key_with_a_lone_surrogate(tmp_path: Path) -> None:
    """Such a line is read, indexed and opened like any other; its key is where it begins."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/s.jsonl").write_bytes(b'{"key": "\\ud800", "n": 1}\n{"key": "b", "n": 2}\n')
    made = ps.shards(f"{tmp_path}/data/").decode(ps.Json("json"))
    index(made, tmp_path / "index")
    with made.open(index_dir=tmp_path / "index") as dataset:
        assert dataset["000000000000"]["json"] == {"key": "\ud800", "n": 1}
        assert dataset["b"]["json"]["n"] == 2
    with ps.Loader(ps.shards(f"{tmp_path}/data/").batch(2), index_dir=tmp_path / "index", processes=1) as loader:
        assert [list(batch["__key__"]) for batch in loader] == [["000000000000", "b"]]


@pytest.mark.parametrize("policy", ["raise", "skip_sample", "skip_shard"])
def test_what_is_not_supported_is_never_skipped(tmp_path: Path, policy: str) -> None:
    """A sparse member stops a job that skips what is corrupt, and an object of another format that its name hides."""
    sparse = bytearray(shard([{"__key__": "a", "x": b"1"}]))
    sparse[156:157] = b"S"
    sparse[148:156] = b"%06o\0 " % (sum(sparse[:148]) + sum(sparse[156:512]) + 8 * 32)
    for data in (bytes(sparse), b"BZh91AY&SY" + bytes(600)):
        (tmp_path / "s.tar").write_bytes(data)
        with pytest.raises(UnsupportedFormatError, match=r"sparse|bzip2") as caught:
            read(tmp_path, policy)
        assert str(caught.value.shard).endswith("s.tar")
