from __future__ import annotations

import functools
import json
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from loading import counted, index, index_beside, numbers, pipeline, shard, write_counted
from penstock.errors import ConfigError, ObjectChangedError
from penstock.loader.state import LoaderState
from penstock.order import ORDER_VERSION
from resuming import assert_resumes_everywhere


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_counted(tmp_path, (20, 3, 0, 31, 12, 1, 25))
    return tmp_path


def saved(folder: Path, *, batches: int = 3, **changes: Any) -> dict[str, Any]:
    """The state behind some batches, through JSON."""
    with ps.Loader(pipeline(folder, **changes), lanes=3) as loader:
        for _, _ in zip(range(batches), loader, strict=False):
            pass
        return json.loads(json.dumps(loader.state_dict()))


@pytest.mark.parametrize("stop", ["first", "repeat"])
def test_a_mix_that_ends_otherwise_is_refused(tmp_path: Path, stop: Any) -> None:
    """A state of a mix goes on only where the mix stops alike; one that does not say how is believed."""
    for name in ("a", "b"):
        write_counted(tmp_path / name, (9, 4))
        index_beside(tmp_path / name)

    def mixed(stop: Any) -> ps.Loader:
        made = ps.mix({ps.shards(f"{tmp_path}/a/"): 3, ps.shards(f"{tmp_path}/b/"): 1}, stop=stop)
        return ps.Loader(made.decode(ps.Integer("cls")).batch(2), lanes=2)

    with mixed("all") as loader:
        next(iter(loader))
        state = json.loads(json.dumps(loader.state_dict()))
    with mixed(stop) as loader:
        loader.load_state_dict(state)
        with pytest.raises(ConfigError, match=rf"stop='all'.*stop='{stop}'"):
            next(iter(loader))
    del state["job"]["stop"]
    with mixed("all") as loader:
        loader.load_state_dict(state)
        assert len(list(loader)) == 12


def test_threads_and_prefetch_do_not_matter(folder: Path) -> None:
    """A state describes batches handed out: more threads and more read ahead change nothing."""
    assert assert_resumes_everywhere(
        lambda: ps.Loader(pipeline(folder, batch=5), threads=1, prefetch_batches=1),
        resumed=lambda: ps.Loader(pipeline(folder, batch=5), threads=3, prefetch_batches=8),
    )


def test_break_and_a_loaded_state_agree(folder: Path) -> None:
    """Going on after break gives what a new loader with the state gives."""
    with ps.Loader(pipeline(folder)) as loader:
        next(iter(loader))
        state = loader.state_dict()
        rest = numbers(loader)
    with ps.Loader(pipeline(folder)) as loader:
        loader.load_state_dict(state)
        assert numbers(loader) == rest


def test_loading_again_replaces(folder: Path) -> None:
    """A state loaded while a loader iterates begins there, and exhausts its iterators."""
    state = saved(folder, batches=1)
    with ps.Loader(pipeline(folder), lanes=3) as loader:
        old = iter(loader)
        seen = [next(old) for _ in range(4)]
        loader.load_state_dict(state)
        assert next(old, None) is None
        assert numbers([next(iter(loader))]) == numbers([seen[1]])


def test_restart_forgets_a_loaded_state(folder: Path) -> None:
    """restart() begins the state's epoch again; restart(epoch) another one."""
    with ps.Loader(pipeline(folder), lanes=3) as loader:
        epochs = [numbers(loader) for _ in range(2)]
        loader.load_state_dict(saved(folder))
        loader.restart()
        assert numbers(loader) == epochs[0]
        loader.restart(1)
        assert numbers(loader) == epochs[1]
        with pytest.raises(ConfigError):
            loader.restart(-1)


@pytest.mark.parametrize("way", ["added", "removed", "rewritten", "renamed"])
def test_another_data_set_is_refused(folder: Path, way: str) -> None:
    """Shards added, removed, rewritten or renamed are noticed before the first batch; a flag begins the epoch again."""
    state = saved(folder)
    if way == "added":
        (folder / "t.tar").write_bytes(shard(counted(range(100, 103))))
    elif way == "removed":
        (folder / "s-001.tar").unlink()
    elif way == "rewritten":
        (folder / "s-001.tar").write_bytes(shard(counted(range(100, 103))))
    else:
        (folder / "s-001.tar").rename(folder / "s-999.tar")
    with ps.Loader(pipeline(folder), lanes=3) as loader:
        loader.load_state_dict(state)
        with pytest.raises(ConfigError, match="data set changed"):
            next(iter(loader))
        loader.load_state_dict(state, accept_changed_data=True)
        again = numbers(loader)
    with ps.Loader(pipeline(folder), lanes=3) as loader:
        assert again == numbers(loader)


def test_a_shard_named_by_url_that_changed_is_refused(folder: Path) -> None:
    """Without a listing the state pins the versions it is in the middle of."""
    urls = [str(path) for path in sorted(folder.iterdir())]
    made = ps.shards(urls).decode(ps.Integer("cls")).batch(4)
    with ps.Loader(made) as loader:
        next(iter(loader))
        state = loader.state_dict()
    (folder / "s-000.tar").write_bytes(shard(counted(range(40, 60))))
    with ps.Loader(made) as loader:
        loader.load_state_dict(state)
        with pytest.raises(ObjectChangedError):
            list(loader)


@pytest.mark.parametrize(
    ("changes", "options", "name"),
    [
        ({"seed": 1}, {"lanes": 3}, "seed"),
        ({"window": 9}, {"lanes": 3}, "window"),
        ({"window": None}, {"lanes": 3}, "shuffled"),
        ({"batch": 9}, {"lanes": 3}, "batch"),
        ({}, {"lanes": 2}, "lanes"),
        ({}, {"lanes": 3, "rank": 0, "world_size": 3, "agree": int}, "world_size"),
    ],
)
def test_another_job_is_refused(folder: Path, changes: dict[str, Any], options: dict[str, Any], name: str) -> None:
    """Whatever the order depends on has to be as it was, and the message names what is not."""
    with ps.Loader(pipeline(folder, **changes), **options) as loader:
        loader.load_state_dict(saved(folder))
        with pytest.raises(ConfigError, match=f"the state has {name}=") as caught:
            next(iter(loader))
    if name == "world_size":
        assert "penstock index" in str(caught.value)


def test_between_epochs_the_job_may_change(folder: Path) -> None:
    """At the beginning of an epoch nothing depends on the batches before."""
    with ps.Loader(pipeline(folder), lanes=3) as loader:
        list(loader)
        state = loader.state_dict()
    with ps.Loader(pipeline(folder, batch=5), lanes=2) as loader:
        loader.load_state_dict(state)
        assert loader.epoch == 1
        assert sorted(numbers(loader)) == list(range(92))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 99}, "version 99"),
        ({"order_version": 0}, "order version 0"),
        ({"epoch": -1}, "negative"),
        ({"epoch": "1"}, "not int"),
        ({"job": None}, "not dict"),
    ],
)
def test_what_is_no_state_is_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    """A state of another version, or with something else in its place, is refused when it is loaded."""
    with ps.Loader(pipeline(folder)) as loader:
        with pytest.raises(ConfigError, match=message):
            loader.load_state_dict({**saved(folder), **changes})
        with pytest.raises(ConfigError, match="not list"):
            loader.load_state_dict([])  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["stream", "require"])
def test_a_damaged_state_is_refused_by_name(folder: Path, tmp_path: Path, mode: Any) -> None:
    """Anything else in place of an entry, or none, is a ConfigError, or another place of the same data: never a crash."""
    made = pipeline(folder)
    options = {"index": mode, "index_dir": index(made, tmp_path / "index"), "lanes": 2}
    with ps.Loader(made, **options) as loader:
        next(iter(loader))
        text = json.dumps(loader.state_dict())
    refused = 0
    for path in list(_paths(json.loads(text))):
        for value in (None, -1, 10**30, "x", [], {}, 1.5, ...):
            state = json.loads(text)
            *above, last = path
            inside = functools.reduce(operator.getitem, above, state)
            inside.pop(last) if value is ... else operator.setitem(inside, last, value)
            with ps.Loader(made, **options) as loader:
                try:
                    loader.load_state_dict(state)
                    assert len(numbers(loader)) <= 92
                except (ConfigError, ps.CorruptShardError):
                    refused += 1
    assert refused > 60


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key in value if isinstance(value, dict) else ():
        yield (*path, key)
        yield from _paths(value[key], (*path, key))


def test_the_state_of_many_lanes_is_small(tmp_path: Path) -> None:
    """64 lanes over 200 shards make a state of less than 20 KB."""
    write_counted(tmp_path, [2] * 200)
    with ps.Loader(pipeline(tmp_path, window=64)) as loader:
        next(iter(loader))
        assert len(json.dumps(loader.state_dict())) < 20_000


def test_an_error_leaves_the_state_before_it(folder: Path) -> None:
    """After a corrupt shard the state is that of the last good batch, and the repaired data goes on from there."""
    whole = (folder / "s-003.tar").read_bytes()
    with ps.Loader(pipeline(folder, window=None)) as loader:
        good = numbers(loader)
    urls = [str(path) for path in sorted(folder.iterdir())]
    made = ps.shards(urls).decode(ps.Integer("cls")).batch(8)
    (folder / "s-003.tar").write_bytes(whole[:-20_000])
    with ps.Loader(made) as loader:
        seen = []
        with pytest.raises(ps.CorruptShardError):
            seen.extend(number for batch in loader for number in numbers([batch]))
        state = loader.state_dict()
    assert seen == good[: len(seen)]
    assert state["batches"] == len(seen) // 8


LANE = {
    "segment": 2,
    "format": "tar",
    "etag": '"e"',
    "offset_bytes": 1024,
    "sample": 7,
    "run": 3,
    "before": 40,
    "emitted": 5,
}
STREAMED = {"round": 4, "turn": 1, "left": None, "lanes": {"0": LANE, "2": None}}


@pytest.mark.parametrize(
    ("mode", "cursor"),
    [
        ("index", {"position": 640}),
        ("index", {"position": 640, "skip": 3}),
        ("index", {"position": 640, "handed": [0, 2], "handed_size": 8}),
        ("stream", STREAMED),
        ("stream", {**STREAMED, "left": 9, "skip": 0}),
        ("stream", {**STREAMED, "handed": [1], "handed_size": 4}),
        ("stream", None),
    ],
)
def test_json_of_a_state_stays_as_it_is(mode: str, cursor: Any) -> None:
    """Every kind of position is read from the JSON of version 1, and written as the same text."""
    state = {
        "version": 1,
        "order_version": ORDER_VERSION,
        "mode": mode,
        "epoch": 3,
        "batches": 12 if cursor else 0,
        "job": {"seed": 0, "shuffled": True, "window": 100, "lanes": 4},
        "data": "0" * 32,
        "cursor": cursor,
        "on_epoch": None,
        "changed": None,
    }
    text = json.dumps(state)
    assert json.dumps(LoaderState.from_json(json.loads(text)).to_json()) == text


@pytest.mark.parametrize(
    ("cursor", "message"),
    [
        ({**STREAMED, "handed": 1, "handed_size": 4}, "not a list"),
        ({**STREAMED, "handed": [1]}, "handed_size"),
        ({**STREAMED, "lanes": {"0": {**LANE, "etag": 5}, "2": None}}, "not an ETag"),
        ({**STREAMED, "turn": 2}, "turn=2 of 2 lanes"),
    ],
)
def test_a_position_that_cannot_be_is_refused(cursor: Any, message: str) -> None:
    """A position that no loader saves is refused when the state is loaded, by the name of the entry."""
    state = {"version": 1, "order_version": ORDER_VERSION, "mode": "stream", "epoch": 0, "batches": 1, "data": ""}
    with pytest.raises(ConfigError, match=message):
        LoaderState.from_json({**state, "job": {"seed": 0}, "cursor": cursor})
