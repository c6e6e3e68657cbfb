from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ordering import position_of, round_robin
from penstock.order import StreamOrder, permutation


def leaving(order: StreamOrder, lane: int, lengths: list[int]) -> list[tuple[int, int]]:
    """(shard, sample) in the order in which they leave a lane."""
    stored = [(shard, sample) for shard in order.shards_of(lane) for sample in range(lengths[shard])]
    out: list[tuple[int, int]] = []
    run_index = 0
    while len(out) < len(stored):
        run = stored[len(out) : len(out) + order.run_length(lane, run_index)]
        out += [run[k] for k in order.permute_run(lane, run_index, len(run))]
        run_index += 1
    return out


def by_position(order: StreamOrder, lengths: list[int]) -> list[tuple[int, tuple[int, int]]]:
    """What a rank hands out, ascending by position: the definition that round robin has to equal."""
    return sorted(
        (position_of(order, lane, index), pair)
        for lane in order.lanes_owned
        for index, pair in enumerate(leaving(order, lane, lengths))
    )


def by_turns(order: StreamOrder, lengths: list[int]) -> list[tuple[int, tuple[int, int]]]:
    """The same by round robin, as a loader does it, not knowing how long the lanes are."""
    lanes = [
        [(position_of(order, lane, index), pair) for index, pair in enumerate(leaving(order, lane, lengths))]
        for lane in order.lanes_owned
    ]
    return list(round_robin(lanes))


@st.composite
def jobs(draw):
    world_size = draw(st.integers(1, 4))
    lanes = world_size * draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(0, 9), min_size=world_size, max_size=20))
    order = StreamOrder(
        shards_count=len(lengths),
        seed=draw(st.integers(0, 2**64 - 1)),
        epoch=draw(st.integers(0, 100)),
        lanes=lanes,
        window=draw(st.integers(1, 60)),
        world_size=world_size,
        shuffled=draw(st.booleans()),
    )
    return order, lengths


@given(st.integers(0, 3000), st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_a_permutation_is_a_bijection(count, key):
    """Every number from 0 to n - 1 comes exactly once, for any n and key."""
    assert sorted(permutation(count, key).tolist()) == list(range(count))


@given(jobs())
@settings(max_examples=80, deadline=None)
def test_every_sample_comes_exactly_once_over_the_ranks(job):
    """Nothing lost, nothing repeated, also with empty shards, and positions are unique."""
    order, lengths = job
    got = [item for rank in range(order.world_size) for item in by_position(replace(order, rank=rank), lengths)]
    assert Counter(pair for _, pair in got) == Counter((s, k) for s, n in enumerate(lengths) for k in range(n))
    assert len({position for position, _ in got}) == len(got)


@given(jobs())
@settings(max_examples=80, deadline=None)
def test_ranks_merged_by_position_give_the_order_of_one_rank(job):
    """The order belongs to the job: the world size only says who sees which part of it."""
    order, lengths = job
    alone = by_position(replace(order, world_size=1), lengths)
    merged = sorted(
        item for rank in range(order.world_size) for item in by_position(replace(order, rank=rank), lengths)
    )
    assert merged == alone


@given(jobs())
@settings(max_examples=80, deadline=None)
def test_round_robin_is_ascending_position(job):
    """Turns over the lanes that still have samples give positions in ascending order, on every rank."""
    order, lengths = job
    for rank in range(order.world_size):
        mine = replace(order, rank=rank)
        assert by_turns(mine, lengths) == by_position(mine, lengths)


@given(jobs())
@settings(max_examples=80, deadline=None)
def test_a_sample_moves_no_further_than_its_run(job):
    """Inside a lane a sample leaves within its own run: shuffling never holds more than the window."""
    order, lengths = job
    for lane in order.lanes_owned:
        stored = [(shard, sample) for shard in order.shards_of(lane) for sample in range(lengths[shard])]
        out, at, run_index = leaving(order, lane, lengths), 0, 0
        while at < len(stored):
            length = order.run_length(lane, run_index)
            assert length >= 1
            assert sorted(out[at : at + length]) == sorted(stored[at : at + length])
            at, run_index = at + length, run_index + 1


def test_a_window_over_everything_leaves_no_trend():
    """Rank correlation of stored place and position is near 0 (4 sigma), and neighbours seldom share a shard."""
    lengths = [50] * 64
    order = StreamOrder(shards_count=64, seed=9, window=64 * 50)
    pairs = [pair for _, pair in by_position(order, lengths)]
    places = np.array([shard * 50 + sample for shard, sample in pairs])
    assert abs(np.corrcoef(places, np.arange(len(places)))[0, 1]) < 4 / np.sqrt(len(places))
    assert sum(left[0] == right[0] for left, right in itertools.pairwise(pairs)) < len(pairs) // 32
