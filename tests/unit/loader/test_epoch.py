"""Batch sources, each alone, over a backend that delivers what a test says."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from loading import index, numbers, pipeline, write_counted
from penstock.errors import ConfigError, DecodeError, PenstockError
from penstock.loader.batches.padding import Padder, Trimmer
from penstock.loader.batches.threads import Delivery
from penstock.loader.epoch import FAILED, AgreedBatches, BatchSource, HandedOut, RankConsensus
from penstock.loader.position import IndexPosition, OutOfOrderPosition
from penstock.order import Batches
from resuming import assert_same


class Made:
    """A backend that delivers batches of these keys; an exception is raised again and again."""

    def __init__(self, *batches: str | Exception) -> None:
        self.left = list(batches)
        self.given_count = 0
        self.closed = False

    def next_batch(self) -> Delivery | None:
        """The next of the batches."""
        if not self.left:
            return None
        if isinstance(self.left[0], Exception):
            raise self.left[0]
        self.given_count += 1
        return delivery(self.left.pop(0), number=self.given_count - 1)

    def has_next(self) -> bool:
        """Whether one is left."""
        return bool(self.left)

    def close(self) -> None:
        """Remember that."""
        self.closed = True


def delivery(keys: Any, *, number: int = 0) -> Delivery:
    """A batch of samples with one letter each as their key; a dash is a sample that was dropped."""
    dropped = [row for row, key in enumerate(keys) if key == "-"]
    values = {"__key__": list(keys), "n": np.arange(len(keys))}
    return Delivery(values, len(keys), dropped, IndexPosition(100 * (number + 1)), None, number)


def taken(source: Any) -> list[tuple[str, int]]:
    """Keys and number of each batch."""
    found = []
    while (batch := source.next()) is not None:
        found.append(("".join(batch.batch["__key__"]), batch.number))
    return found


def counted(samples_count: int, **options: Any) -> Batches:
    """Batches of two samples each."""
    return Batches(samples_count=samples_count, global_size=2, **options)


def test_counted_batches_end_by_arithmetic() -> None:
    """Numbers and positions follow from the index; batches of which every sample was dropped are left out."""
    backend = Made("ab", "--", "c")
    source = BatchSource(backend=backend, finisher=Trimmer(2), rows_count=2, batches=counted(5), first_number=3)
    first = source.next()
    assert first is not None
    assert (first.position, first.number) == (IndexPosition(2), 3)
    assert taken(source) == [("c", 5)]
    source.close()
    assert backend.closed


def test_counted_batches_of_a_stride() -> None:
    """Every second batch has its own number and the position behind it."""
    source = BatchSource(backend=Made("cd", "gh"), finisher=Trimmer(2), rows_count=2, batches=counted(8), stride=(1, 2))
    assert taken(source) == [("cd", 1), ("gh", 3)]


def test_a_rank_without_a_sample_pads_the_last_batch() -> None:
    """The run has ended, the count has not: the last sample is repeated, and no row is valid."""
    source = BatchSource(
        backend=Made("a"),
        finisher=Padder(lambda: None, is_variable=False),
        rows_count=1,
        batches=Batches(samples_count=3, global_size=2, rank=1, world_size=2),
    )
    batches = [source.next(), source.next()]
    assert [batch.batch["__valid__"].tolist() for batch in batches if batch is not None] == [[True], [False]]
    assert taken(source) == []


def test_streamed_batches_raise_again_and_again() -> None:
    """An error stays where it is in the order."""
    source = BatchSource(
        backend=Made("ab", DecodeError("bad")), finisher=Trimmer(2), rows_count=2, first_number=3, stride=(1, 3)
    )
    first = source.next()
    assert first is not None
    assert first.number == 4
    for _ in range(2):
        with pytest.raises(DecodeError):
            source.next()


@pytest.mark.parametrize(("ends_with_last", "expected"), [(False, 1), (True, 3)])
def test_agreed_batches_end_together(ends_with_last: bool, expected: int) -> None:
    """Another rank has one batch, or three: all give as many."""
    others = iter([1, 0] if not ends_with_last else [0, 0, 0, 1])

    def agree(n: int) -> int:
        return min(n, next(others))

    finisher = Padder(lambda: None, is_variable=False) if ends_with_last else Trimmer(1)
    source = AgreedBatches(
        backend=Made("a", "b"),
        finisher=finisher,
        consensus=RankConsensus(agree),
        rows_count=1,
        first_number=0,
        position=IndexPosition(0),
        ends_with_last=ends_with_last,
    )
    assert len(taken(source)) == expected


def test_a_rank_that_fails_tells_the_others() -> None:
    """The other ranks hear of the error in place of an answer, and this rank asks no more."""
    said = []

    def agree(n: int) -> int:
        said.append(n)
        return n

    source = AgreedBatches(
        backend=Made(DecodeError("bad")),
        finisher=Trimmer(1),
        consensus=RankConsensus(agree),
        rows_count=1,
        first_number=0,
        position=IndexPosition(0),
        ends_with_last=False,
    )
    with pytest.raises(DecodeError):
        source.next()
    assert said == [1, FAILED]
    with pytest.raises(PenstockError):
        source.next()
    assert said == [1, FAILED]


def test_out_of_order_batches_are_counted_in_the_order_in_which_they_come() -> None:
    """Batch 1 was handed out before: 0 and 2 are left, and the position in between says which were handed out."""
    before = OutOfOrderPosition(IndexPosition(0), (1,), 2)
    handed_out = HandedOut(before, feed_position=IndexPosition(0), global_size=2)
    source = BatchSource(
        backend=Made("ab", "ef"),
        finisher=Trimmer(2),
        rows_count=2,
        first_number=1,
        batches=counted(6),
        handed_out=handed_out,
    )
    assert [handed_out.number_of(made) for made in range(2)] == [0, 2]
    found = source.next()
    assert found is not None
    assert found.position == OutOfOrderPosition(IndexPosition(2), (0,), 2)
    assert taken(source) == [("ef", 2)]


def test_padding_repeats_the_last_sample_that_was_kept() -> None:
    """Dropped and missing rows hold the last kept sample; ``__valid__`` is False there."""
    batch = Padder(lambda: None, is_variable=False).finish(delivery("a-b"), 4)
    assert batch["__key__"] == ["a", "b", "b", "b"]
    assert batch["__valid__"].tolist() == [True, False, True, False]


def test_the_row_to_pad_with_is_searched_once() -> None:
    """A rank that has had no sample takes one from anywhere in the epoch; if there is none, all batches are skipped."""
    for found, skips in ((delivery("xy-"), False), (None, True)):
        searches = []
        padder = Padder(lambda: searches.append(1) or found, is_variable=False)  # noqa: B023
        assert [padder.skips(given) for given in (None, delivery("--"))] == [skips] * 2
        assert len(searches) == 1
        if not skips:
            assert [padder.finish(given, 2)["__key__"] for given in (None, delivery("--"))] == [["y", "y"]] * 2


def test_batches_by_size_keep_their_length() -> None:
    """Whatever the other ranks give, all rows of a batch that was filled by size are its own."""
    batch = Padder(lambda: None, is_variable=True).finish(delivery("abc"), 1)
    assert batch["__valid__"].tolist() == [True] * 3


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
    """A backend that begins behind single batches goes on from a place that it read, and no batch comes again or is lost."""
    begin = OutOfOrderPosition(IndexPosition(0), handed_out=(1, 3), global_size=4)
    handed_out = HandedOut(begin, feed_position=IndexPosition(0), global_size=4)
    assert [handed_out.number_of(delivered) for delivered in range(3)] == [0, 2, 4]
    assert handed_out.take(0, IndexPosition(4)) == OutOfOrderPosition(IndexPosition(4), (0, 2), 4)
    assert handed_out.take(4, IndexPosition(20)) == OutOfOrderPosition(IndexPosition(4), (0, 2, 3), 4)
    assert handed_out.take(2, IndexPosition(12)) == IndexPosition(20)
