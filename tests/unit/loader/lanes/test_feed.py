"""Objects as samples: any order, any member, any reader."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from counting import counted_plans
from loading import index, numbers, write_counted
from penstock.errors import DecodeError, ObjectChangedError, ObjectMissingError
from penstock.pipeline import mix, objects
from resuming import assert_resumes_everywhere

COUNT = 23


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Objects with a label beside each, and what belongs to nobody."""
    for number in range(COUNT):
        below = tmp_path / "data" / f"d{number % 3}"
        below.mkdir(parents=True, exist_ok=True)
        (below / f"{number:03d}.cls").write_text(str(number))
        (below / f"{number:03d}.txt").write_text(f"sample {number}")
    (tmp_path / "data" / ".penstock").mkdir()
    (tmp_path / "data" / ".penstock" / "dataset.index").write_text("not data")
    return tmp_path / "data"


def pairs(folder: Path, *, window: int | None = 8) -> Any:
    made = objects(f"{folder}/", group_by="stem")
    return (made if window is None else made.shuffle(window=window)).decode(ps.Integer("cls"), ps.Text("txt")).batch(4)


def test_each_sample_once_with_all_its_members(folder: Path) -> None:
    """Grouped by stem, members come together; the epoch is a full permutation, another one each time."""
    with ps.Loader(pairs(folder)) as loader:
        assert len(loader) == 6
        first, second = list(loader), list(loader)
    assert sorted(numbers(first)) == list(range(COUNT))
    assert numbers(first) != numbers(second)
    for batch in first:
        assert batch["txt"] == [f"sample {number}" for number in batch["cls"]]
        for key, url, number in zip(batch["__key__"], batch["__shard__"], batch["cls"], strict=True):
            assert key == f"d{number % 3}/{number:03d}"
            assert url.endswith(f"{key}.cls")


def test_prefixes_are_read_as_one_plan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shuffled over several prefixes, an epoch reads ahead across them: one ``read_many``, whatever lies where."""
    plans = counted_plans(monkeypatch)
    made = objects([f"{folder}/d{number}/" for number in range(3)], group_by="stem")
    with ps.Loader(made.shuffle(seed=0).decode(ps.Integer("cls")).batch(4)) as loader:
        assert sorted(numbers(list(loader))) == list(range(COUNT))
    assert len(plans) == 1


def test_single_objects(folder: Path) -> None:
    """Without grouping each object is a sample, whose key is the object's."""
    with ps.Loader(objects(f"{folder}/**/*.cls").batch(4)) as loader:
        batches = list(loader)
    found = [int(value) for batch in batches for value in batch["cls"]]
    assert sorted(found) == list(range(COUNT))
    with ps.Loader(objects(f"{folder}/nothing/").batch(4)) as loader, pytest.raises(ObjectMissingError):
        list(loader)


def test_it_resumes_behind_every_batch(folder: Path) -> None:
    """Positions say it all, also at another number of ranks."""
    assert_resumes_everywhere(lambda: ps.Loader(pairs(folder), lanes=4))
    with ps.Loader(pairs(folder), lanes=4) as loader:
        next(iter(loader))
        state = loader.state_dict()
        rest = numbers(loader)
    found: list[int] = []
    for rank in range(2):
        with ps.Loader(pairs(folder), lanes=4, rank=rank, world_size=2) as loader:
            loader.load_state_dict(state)
            for batch in loader:
                found += batch["cls"][batch["__valid__"]].tolist()
    assert sorted(found) == sorted(rest)


def test_an_object_that_changed_is_refused(folder: Path) -> None:
    """The version that was listed is the one that is read."""
    with ps.Loader(pairs(folder, window=None), prefetch_batches=1) as loader:
        loader._session.planned()
        (folder / "d1" / "001.cls").write_text("99")
        with pytest.raises(ObjectChangedError):
            list(loader)


def test_a_source_of_ones_own(folder: Path) -> None:
    """objects(keys, read=fn) calls the function in threads, ahead and in order; what it raises names the key."""
    callers: set[str] = set()

    def read(key: str) -> Any:
        callers.add(threading.current_thread().name)
        if key == "x21":
            raise KeyError("gone")
        return {"cls": key[1:].encode()} if int(key[1:]) % 2 else {"cls": f"[{key[1:]}]".encode()}

    keys = [f"x{number}" for number in range(20)]
    made = objects(keys, read=read).shuffle(window=8).decode(ps.Integer("cls"))
    with ps.Loader(made.batch(3), threads=2) as loader:
        for _ in loader.epochs(2):
            assert sorted(numbers(loader)) == list(range(20))
    assert callers == {"penstock-read-fn"}
    assert_resumes_everywhere(lambda: ps.Loader(made.batch(3), lanes=2, threads=2))
    with ps.Loader(objects([*keys, "x21"], read=read).batch(3)) as loader:
        with pytest.raises(DecodeError, match="gone") as caught:
            list(loader)
    assert caught.value.sample_key == "x21"
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock-read")]


def test_a_manifest_is_read_instead_of_a_listing(folder: Path, tmp_path: Path) -> None:
    """Objects, or shards, that a manifest names, and no others."""
    lines = [{"penstock_manifest": 1, "base_url": f"{folder}/"}]
    lines += [{"key": f"d{number % 3}/{number:03d}.cls"} for number in (4, 2, 7)]
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with ps.Loader(objects(manifest=f"{tmp_path}/some.jsonl").decode(ps.Integer("cls")).batch(3)) as loader:
        assert numbers(loader) == [4, 2, 7]


def test_a_mix_of_objects_and_shards(folder: Path, tmp_path: Path) -> None:
    """Both kinds of source in one mix, in proportion, resumable."""
    write_counted(tmp_path / "shards", (30, 10))
    made = mix({ps.shards(f"{tmp_path}/shards/"): 1, objects(f"{folder}/**/*.cls"): 1}).shuffle(window=16)
    made = made.decode(ps.Integer("cls")).batch(4)
    place = index(ps.shards(f"{tmp_path}/shards/"), tmp_path / "index")
    with ps.Loader(made, lanes=2, index_dir=place) as loader:
        assert sorted(numbers(loader)) == sorted([*range(40), *range(COUNT)])
    assert_resumes_everywhere(lambda: ps.Loader(made, lanes=2, index_dir=place), every=4)
