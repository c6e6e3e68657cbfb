"""in_order=False: batches as they come, each exactly once, also after a state was loaded."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from loading import index, numbers, pipeline, write_counted
from penstock.errors import ConfigError, DecodeError
from penstock.loader.epoch.out_of_order import OutOfOrderTracker
from penstock.loader.position import IndexPosition, OutOfOrderPosition
from resuming import assert_same

SIZES = (20, 3, 0, 31, 12, 1, 25)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_counted(tmp_path / "data", SIZES)
    index(pipeline(tmp_path / "data"), tmp_path / "index")
    return tmp_path / "data"


class Gate:
    """A function that holds back a sample of the first batch until it may go."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        if sample["__position__"] == 1:
            assert self.opened.wait(20)
        return sample


@pytest.mark.parametrize("how", ["stream", "require"])
def test_what_is_complete_goes_first_and_all_comes_once(folder: Path, how: Any) -> None:
    """While the first batch is held back others are handed out; a state taken then loses none and repeats none."""
    options: dict[str, Any] = {"index": how, "index_dir": folder.parent / "index", "lanes": 1, "prefetch_batches": 4}
    made = ps.shards(f"{folder}/").shuffle(window=20).decode(ps.Integer("cls"))
    with ps.Loader(made.batch(8), **options) as loader:
        whole = {batch["__position__"][0]: batch for batch in loader}
    gate = Gate()
    with ps.Loader(made.map(gate).batch(8), in_order=False, threads=2, **options) as loader:
        batches = iter(loader)
        seen = [next(batches) for _ in range(3)]
        assert 0 not in [batch["__position__"][0] for batch in seen]
        state = json.loads(json.dumps(loader.state_dict()))
        assert len(state["cursor"]["handed"]) == 3
        gate.opened.set()
        rest = list(batches)
        assert loader.epoch == 1
    assert sorted(numbers(seen + rest)) == list(range(92))
    for batch in seen + rest:
        assert_same(batch, whole[batch["__position__"][0]])
    with ps.Loader(made.map(gate).batch(8), in_order=False, threads=2, **options) as loader:
        loader.load_state_dict(state)
        again = list(loader)
    assert sorted(numbers(seen + again)) == list(range(92))
    for other in ({"in_order": True}, {"processes": 2}):
        with ps.Loader(made.batch(8), **options, **other) as loader:
            loader.load_state_dict(state)
            again = list(loader)
            assert sorted(numbers(seen + again)) == list(range(92))
            assert sorted(numbers(loader)) == list(range(92))
    with ps.Loader(made.batch(8), stride=(0, 2), **options) as loader:
        loader.load_state_dict(state)
        with pytest.raises(ConfigError, match="in_order=False"):
            next(iter(loader))
    if how == "require":
        with ps.Loader(made.batch(4), in_order=False, **options) as loader:
            loader.load_state_dict(state)
            with pytest.raises(ConfigError, match="8 samples out of order"):
                next(iter(loader))


def test_ranks_pad_their_last_batch(folder: Path) -> None:
    """With several ranks every sample counts once, and all have equally many batches."""
    found, counts = [], set()
    for rank in range(5):
        job = {"rank": rank, "world_size": 5, "index_dir": folder.parent / "index", "lanes": 5}
        with ps.Loader(pipeline(folder, batch=6), in_order=False, **job) as loader:
            batches = list(loader)
            counts.add(len(batches))
            found += [n for batch in batches for n in batch["cls"][batch["__valid__"]].tolist()]
    assert counts == {4}
    assert sorted(found) == list(range(92))


def test_an_error_does_not_hide_good_batches(folder: Path) -> None:
    """What failed is raised, once nothing complete is left before it."""

    def fails(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["cls"] == 3:
            raise ValueError("three")
        return sample

    made = ps.shards(f"{folder}/").decode(ps.Integer("cls")).map(fails).batch(8)
    with ps.Loader(made, in_order=False, threads=1) as loader, pytest.raises(DecodeError, match="three"):
        list(loader)
    with pytest.raises(ConfigError, match="in_order"):
        ps.Loader(made, in_order=False, stride=(0, 2))


def test_a_state_counts_batches_that_were_handed_out_before_it() -> None:
    """A run that begins behind single batches goes on from a place that it read, and no batch comes again or is lost."""
    begin = OutOfOrderPosition(IndexPosition(0), handed_out=(1, 3), global_size=4)
    tracker = OutOfOrderTracker(begin, feed_position=IndexPosition(0), global_size=4)
    assert [tracker.number_of(delivered) for delivered in range(3)] == [0, 2, 4]
    assert tracker.take(0, IndexPosition(4)) == OutOfOrderPosition(IndexPosition(4), (0, 2), 4)
    assert tracker.take(4, IndexPosition(20)) == OutOfOrderPosition(IndexPosition(4), (0, 2, 3), 4)
    assert tracker.take(2, IndexPosition(12)) == IndexPosition(20)
