"""Rows are dealt in the order of the job, however late and little the workers know of their lanes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ordering import round_robin
from penstock.loader.position import LANE_BEGIN, RunStart, StreamPosition
from penstock.loader.workers.row_assignment import (
    Assignment,
    IndexedRowAssigner,
    LaneProgress,
    StreamRowAssigner,
    worker_position,
)
from penstock.order import Batches, StreamOrder


def order(lanes: int) -> StreamOrder:
    return StreamOrder(shards_count=lanes, lanes=lanes, seed=0, window=1, shuffled=True, rank=0, world_size=1)


def naive(lengths: list[int], workers: int) -> list[int]:
    """Whose the samples are, one by one, by the rule of the order."""
    return list(round_robin([lane % workers] * length for lane, length in enumerate(lengths)))


def played(assigner: StreamRowAssigner, lengths: list[int], shares: Any) -> list[Assignment]:
    """Answer what a deal wants, not always all at once, until it ends."""
    dealt = []
    asked: dict[int, int] = {}
    while not assigner.is_ended:
        for wanted in assigner.wants().values():
            asked.update(wanted)
        while (batch := assigner.next()) is not None:
            dealt.append(batch)
            for wanted in assigner.wants().values():
                asked.update(wanted)
        if asked and not assigner.is_ended:
            answered = list(asked)[: 1 + next(shares) % len(asked)]
            assigner.note(
                {
                    lane: LaneProgress(min(lengths[lane], total), lengths[lane] < total, None)
                    for lane in answered
                    for total in [asked.pop(lane)]
                }
            )
    return dealt


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    workers=st.integers(1, 4),
    size=st.integers(1, 9),
    drop_last=st.booleans(),
    take_count=st.none() | st.integers(1, 60),
    seed=st.integers(0, 99),
)
def test_rows_are_those_of_the_naive_order(
    lengths: list[int], workers: int, size: int, drop_last: bool, take_count: int | None, seed: int
) -> None:
    """Every sample once, in turns of the lanes, each row with the worker that owns the lane, whoever answers first."""
    expected = naive(lengths, workers)[:take_count]
    if drop_last:
        expected = expected[: len(expected) - len(expected) % size]
    assigner = StreamRowAssigner(
        order(len(lengths)), None, take_count=take_count, size=size, drop_last=drop_last, workers_count=workers
    )
    shares = iter(np.random.default_rng(seed).integers(0, 99, 100_000).tolist())
    found: list[int] = []
    for batch in played(assigner, lengths, shares):
        owners = np.full(batch.rows_count, -1)
        for worker, rows in enumerate(batch.rows):
            owners[rows] = worker
        found += owners.tolist()
    assert found == expected


def test_a_failure_comes_where_its_sample_would() -> None:
    """What a lane has before it failed is dealt; then, and not earlier, its error is raised."""
    assigner = StreamRowAssigner(order(2), None, take_count=None, size=4, drop_last=False, workers_count=2)
    assert assigner.next() is None
    assigner.note(
        {0: LaneProgress(50, is_ended=False, error=None), 1: LaneProgress(5, is_ended=False, error=OSError("gone"))}
    )
    assert [batch is not None for batch in (assigner.next(), assigner.next())] == [True, True]
    with pytest.raises(OSError, match="gone"):
        assigner.next()


def test_lanes_are_not_asked_for_each_sample() -> None:
    """One question per lane and batch at most, and again only of a process that replaced another."""
    assigner = StreamRowAssigner(order(2), None, take_count=None, size=4, drop_last=False, workers_count=2)
    assert assigner.wants() == {0: {0: 4}, 1: {1: 4}}
    assert assigner.wants() == {}
    assigner.forget_wants(1)
    assert assigner.wants() == {1: {1: 4}}


@pytest.mark.parametrize("world_size", [1, 2])
def test_with_an_index_rows_go_by_lane(world_size: int) -> None:
    """The worker of a row is lane div W mod n, and rows that only pad are nobody's."""
    for rank in range(world_size):
        batches = Batches(
            samples_count=101,
            global_size=6,
            rank=rank,
            world_size=world_size,
            drop_last=False,
            take=None,
            origin=0,
        )
        assigner = IndexedRowAssigner(batches, workers_count=3)
        count = 0
        while (batch := assigner.next()) is not None:
            for worker, rows in enumerate(batch.rows):
                assert (batch.positions[rows] % (6 * world_size) // world_size % 3 == worker).all()
            assert sorted(np.concatenate(batch.rows).tolist()) == list(range(batch.rows_count))
            count += batch.rows_count
        assert assigner.is_ended
        assert count == len(range(rank, 101, world_size))


def test_a_position_is_cut_by_lanes() -> None:
    """Each worker gets its lanes that are left; one whose lanes all had their turn begins with the next round."""
    lanes = {number: (RunStart(number, 0, 0, 0, 0), number) for number in (0, 2, 3)}
    position = StreamPosition(round_count=5, turn=2, remaining_count=9, lanes=lanes)
    assert worker_position(position, range(4), 0, 2) == StreamPosition(6, 0, None, {0: lanes[0], 2: lanes[2]})
    assert worker_position(position, range(4), 1, 2) == StreamPosition(5, 0, None, {3: lanes[3]})
    assert worker_position(None, range(4), 1, 2).lanes == {1: LANE_BEGIN, 3: LANE_BEGIN}
