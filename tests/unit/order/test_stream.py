from __future__ import annotations

import pickle

import pytest

from ordering import position_of, round_robin
from penstock.errors import ConfigError
from penstock.order import LANES_DEFAULT, StreamOrder


def emitted(order: StreamOrder, lengths: list[int]) -> list[tuple[int, int, int]]:
    """(position, shard, sample) in the order in which one rank hands them out: how a loader uses the parts."""
    leaving = []
    for lane in order.lanes_owned:
        stored = [(shard, sample) for shard in order.shards_of(lane) for sample in range(lengths[shard])]
        out, at, run_index = [], 0, 0
        while at < len(stored):
            run = stored[at : at + order.run_length(lane, run_index)]
            out += [run[k] for k in order.permute_run(lane, run_index, len(run))]
            at, run_index = at + len(run), run_index + 1
        leaving.append([(position_of(order, lane, index), *pair) for index, pair in enumerate(out)])
    return list(round_robin(leaving))


def test_a_small_job_is_pinned():
    """The whole order of 5 shards of different lengths on 2 lanes: positions, shards, samples."""
    order = StreamOrder(shards_count=5, seed=42, epoch=3, lanes=2, window=6)
    assert [order.shards_of(lane) for lane in (0, 1)] == [[4, 3, 2], [0, 1]]
    assert [[order.run_length(lane, k) for k in range(3)] for lane in (0, 1)] == [[3, 3, 3], [2, 3, 3]]
    assert emitted(order, [3, 2, 4, 1, 3]) == [
        (0, 4, 1),
        (1, 0, 1),
        (2, 4, 2),
        (3, 0, 0),
        (4, 4, 0),
        (5, 0, 2),
        (6, 2, 0),
        (7, 1, 0),
        (8, 3, 0),
        (9, 1, 1),
        (10, 2, 1),
        (12, 2, 3),
        (14, 2, 2),
    ]


def test_without_shuffle_one_rank_sees_the_stored_order():
    """Shards as listed, samples as stored, positions without holes."""
    order = StreamOrder(shards_count=3, shuffled=False)
    assert order.lanes_configured == 1
    assert emitted(order, [2, 0, 3]) == [(0, 0, 0), (1, 0, 1), (2, 2, 0), (3, 2, 1), (4, 2, 2)]


def test_without_shuffle_ranks_take_shards_in_turn():
    """L is W unless said: rank r reads shards r, r + W, ... in order."""
    orders = [StreamOrder(shards_count=5, shuffled=False, rank=rank, world_size=2) for rank in (0, 1)]
    assert [order.shards_of(lane) for order in orders for lane in order.lanes_owned] == [[0, 2, 4], [1, 3]]


def test_first_runs_are_staggered():
    """Lane l's first run is shorter by floor(l * run / L), never 0; the others are window // L."""
    order = StreamOrder(shards_count=100, lanes=64, window=64 * 100)
    assert [order.run_length(lane, 0) for lane in range(64)] == [100 - lane * 100 // 64 for lane in range(64)]
    assert {order.run_length(lane, 1) for lane in range(64)} == {100}
    tiny = StreamOrder(shards_count=100, lanes=64, window=1)
    assert {tiny.run_length(lane, k) for lane in range(64) for k in range(2)} == {1}


def test_few_shards_get_the_whole_window():
    """With fewer shards than lanes the window is shared by the lanes that exist."""
    order = StreamOrder(shards_count=2, window=1000)
    assert (order.lanes_configured, order.lanes_count) == (LANES_DEFAULT, 2)
    assert [order.run_length(lane, 1) for lane in range(2)] == [500, 500]


def test_epochs_seeds_and_lanes_shuffle_differently():
    """Another epoch, seed, lane or run is another permutation, of shards and of samples."""
    orders = [StreamOrder(shards_count=50, seed=seed, epoch=epoch, lanes=1) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order.shards_of(0)) for order in orders}) == 4
    runs = [
        tuple(StreamOrder(shards_count=50, seed=seed, epoch=epoch, lanes=2).permute_run(lane, run_index, 40))
        for seed in (0, 1)
        for epoch in (0, 1)
        for lane in (0, 1)
        for run_index in (0, 1)
    ]
    assert len(set(runs)) == 16
    assert orders[0].at_epoch(1) == orders[1]


def test_orders_pickle():
    """An order crosses to a worker process and says the same there."""
    order = StreamOrder(shards_count=9, seed=5, lanes=4, rank=1, world_size=2)
    copy = pickle.loads(pickle.dumps(order))
    assert copy == order
    assert copy.shards_of(3) == order.shards_of(3)


@pytest.mark.parametrize(
    ("lanes", "world_size", "nearest"), [(64, 48, 48), (64, 40, 80), (64, 128, 128), (64, 6, 66), (6, 4, 4), (5, 2, 4)]
)
def test_ranks_that_do_not_divide_the_lanes_are_refused(lanes, world_size, nearest):
    """The error names the nearest number of lanes that the ranks divide."""
    with pytest.raises(ConfigError, match=f"world_size {world_size} does not divide lanes {lanes}.*lanes={nearest}$"):
        StreamOrder(shards_count=1000, lanes=lanes, world_size=world_size)


def test_fewer_shards_than_ranks_are_refused():
    """No rank is left waiting for data that it will never have: the job does not start."""
    with pytest.raises(ConfigError, match=r"3 shards are fewer than 4 ranks.*at least 4 shards"):
        StreamOrder(shards_count=3, world_size=4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"shards_count": 0},
        {"seed": -1},
        {"seed": 1 << 64},
        {"epoch": -1},
        {"window": 0},
        {"lanes": 0},
        {"rank": 1},
        {"rank": -1},
        {"world_size": 0},
    ],
)
def test_numbers_out_of_range_are_refused(wrong):
    """The error names the value and its bounds."""
    name, value = next(iter(wrong.items()))
    with pytest.raises(ConfigError, match=rf"{name} {value} must be in \["):
        StreamOrder(**{"shards_count": 1, **wrong})


def test_lanes_that_do_not_exist_are_refused():
    """A lane number beyond the lanes that hold shards is the caller's mistake, not an empty list."""
    with pytest.raises(ConfigError, match=r"lane 2 must be in \[0, 2\)"):
        StreamOrder(shards_count=2).shards_of(2)
