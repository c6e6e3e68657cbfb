"""Batch sources, each alone, over a run that delivers what a test says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.errors import DecodeError, PenstockError
from penstock.loader.batches.run import Delivery
from penstock.loader.epoch.batch_sources import AgreedBatches, CountedBatches, RebatchedBatches, StreamedBatches
from penstock.loader.epoch.consensus import FAILED, RankConsensus
from penstock.loader.epoch.out_of_order import CountedOutOfOrder, OutOfOrderTracker
from penstock.loader.epoch.padding import Padder, Trimmer
from penstock.loader.position import IndexPosition, OutOfOrderPosition
from penstock.order import Batches


class Run:
    """A run that delivers batches of these keys; an exception is raised again and again."""

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
    run = Run("ab", "--", "c")
    source = CountedBatches(run, Trimmer(2), batches=counted(5), first_number=3, numbers=range(3, 6))
    first = source.next()
    assert first is not None
    assert (first.position, first.number) == (IndexPosition(2), 3)
    assert taken(source) == [("c", 5)]
    source.close()
    assert run.closed


def test_counted_batches_of_a_stride() -> None:
    """Every second batch has its own number and the position behind it."""
    source = CountedBatches(Run("cd", "gh"), Trimmer(2), batches=counted(8), first_number=0, numbers=range(1, 4, 2))
    assert taken(source) == [("cd", 1), ("gh", 3)]


def test_a_rank_without_a_sample_pads_the_last_batch() -> None:
    """The run has ended, the count has not: the last sample is repeated, and no row is valid."""
    source = CountedBatches(
        Run("a"),
        Padder(lambda: None, is_variable=False),
        batches=Batches(samples_count=3, global_size=2, rank=1, world_size=2),
        first_number=0,
        numbers=range(2),
    )
    batches = [source.next(), source.next()]
    assert [batch.batch["__valid__"].tolist() for batch in batches if batch is not None] == [[True], [False]]
    assert taken(source) == []


def test_streamed_batches_raise_again_and_again() -> None:
    """An error stays where it is in the order."""
    source = StreamedBatches(Run("ab", DecodeError("bad")), Trimmer(2), rows_count=2, next_number=4, step=3)
    first = source.next()
    assert first is not None
    assert first.number == 4
    for _ in range(2):
        with pytest.raises(DecodeError):
            source.next()


def test_rebatched_batches_of_a_stride_are_numbered_in_the_whole() -> None:
    """The run makes all batches, those of the stride are given."""
    source = RebatchedBatches(Run(*"abcde"), Trimmer(1), rows_count=1, first_number=2, stride=(1, 3))
    assert taken(source) == [("c", 4)]


@pytest.mark.parametrize(("ends_with_last", "expected"), [(False, 1), (True, 3)])
def test_agreed_batches_end_together(ends_with_last: bool, expected: int) -> None:
    """Another rank has one batch, or three: all give as many."""
    others = iter([1, 0] if not ends_with_last else [0, 0, 0, 1])

    def agree(n: int) -> int:
        return min(n, next(others))

    finisher = Padder(lambda: None, is_variable=False) if ends_with_last else Trimmer(1)
    source = AgreedBatches(
        Run("a", "b"),
        finisher,
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
        Run(DecodeError("bad")),
        Trimmer(1),
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
    tracker = OutOfOrderTracker(before, feed_position=IndexPosition(0), global_size=2)
    source = CountedOutOfOrder(Run("ab", "ef"), Trimmer(2), tracker=tracker, batches=counted(6), next_number=1)
    assert [tracker.number_of(made) for made in range(2)] == [0, 2]
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
