from __future__ import annotations

import pickle

import numpy as np
import pytest

from ordering import run_segments, runs_count
from penstock.errors import ConfigError
from penstock.order import LANES_DEFAULT, IndexedOrder, Location, Segment


def test_a_small_job_is_pinned():
    """The whole order of 5 shards of different lengths on 2 lanes, position by position."""
    order = IndexedOrder(samples=[3, 2, 4, 0, 3], seed=42, epoch=3, lanes=2, window=6)
    assert [order.lane_length(lane) for lane in (0, 1)] == [6, 6]
    assert [[order.run_length(lane, k) for k in range(4)] for lane in (0, 1)] == [[3, 3, 0, 0], [2, 3, 1, 0]]
    assert [run_segments(order, lane, k) for lane in (0, 1) for k in range(runs_count(order, lane))] == GOLDEN_SEGMENTS
    assert [order.locate(p)[1:] for p in range(12)] == GOLDEN_ORDER


GOLDEN_SEGMENTS = [[Segment(4, 0, 3)], [Segment(0, 0, 3)], [Segment(1, 0, 2)], [Segment(2, 0, 3)], [Segment(2, 3, 1)]]
GOLDEN_ORDER = [(4, 1), (1, 1), (4, 2), (1, 0), (4, 0), (2, 0), (0, 1), (2, 1), (0, 0), (2, 2), (0, 2), (2, 3)]


def test_a_large_job_is_pinned():
    """Positions far into a job of many shards, and what a run there reads."""
    order = IndexedOrder(samples=np.arange(1, 100_001) % 1000, seed=7, epoch=2, window=1 << 16)
    assert order.samples_count == 49_950_000
    assert [tuple(order.locate(p)) for p in (0, 1, 63, 64, 12_345_678, 49_949_999)] == GOLDEN_PLACES
    assert run_segments(order, 17, 500) == GOLDEN_RUN
    assert order.permute_run(17, 500)[:8].tolist() == GOLDEN_PERMUTATION


GOLDEN_PLACES = [(0, 13682, 511), (0, 59255, 152), (0, 56788, 455), (0, 8849, 458), (0, 83944, 609), (0, 43282, 228)]
GOLDEN_RUN = [Segment(34802, 25, 778), Segment(85178, 0, 179), Segment(99370, 0, 67)]
GOLDEN_PERMUTATION = [1001, 20, 196, 716, 469, 327, 127, 553]


def test_without_shuffle_one_rank_sees_the_stored_order():
    """Shards as listed, samples as stored."""
    order = IndexedOrder(samples=[2, 0, 3], shuffled=False)
    assert order.lanes_count == 1
    assert [order.locate(p) for p in range(5)] == [
        Location(0, s, k) for s, k in [(0, 0), (0, 1), (2, 0), (2, 1), (2, 2)]
    ]
    assert run_segments(order, 0, 0) == [Segment(0, 0, 2), Segment(2, 0, 3)]


def test_without_shuffle_lanes_lie_as_the_contract_says():
    """Lane l begins at l * floor(N/L) + min(l, N mod L), inside a shard where it falls there; L is W unless said."""
    order = IndexedOrder(samples=[7, 4], shuffled=False, world_size=4)
    assert order.lanes_count == 4
    for lane in range(4):
        start = lane * (11 // 4) + min(lane, 11 % 4)
        assert order.locate(lane) == (Location(0, 0, start) if start < 7 else Location(0, 1, start - 7))


def test_few_samples_are_shuffled_too():
    """A data set of fewer samples than lanes does not come out as stored: docs/decisions/0008."""
    order = IndexedOrder(samples=[50])
    places = [order.locate(p).sample for p in range(50)]
    assert sorted(places) == list(range(50))
    assert abs(np.corrcoef(places, range(50))[0, 1]) < 4 / np.sqrt(50)


def test_first_runs_are_staggered():
    """Lane l's first run is shorter by floor(l * run / L), never 0; the others are window // L."""
    order = IndexedOrder(samples=[64 * 300], lanes=64, window=64 * 100)
    assert [order.run_length(lane, 0) for lane in range(64)] == [100 - lane * 100 // 64 for lane in range(64)]
    assert {order.run_length(lane, 1) for lane in range(64)} == {100}
    assert [order.run_at(5, index) for index in (0, 92, 93, 192, 193)] == [(0, 0), (0, 92), (1, 0), (1, 99), (2, 0)]


def test_epochs_and_seeds_shuffle_differently():
    """Another epoch or seed is another permutation of shards, of lanes and in runs."""
    orders = [IndexedOrder(samples=[5] * 20, seed=seed, epoch=epoch, lanes=4) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order.locations(0).samples.tolist()) for order in orders}) == 4
    assert len({tuple(order.locations(0).shards.tolist()) for order in orders}) == 4
    again = orders[0].at_epoch(1)
    assert [again.locate(p) for p in range(100)] == [orders[1].locate(p) for p in range(100)]


def test_ranks_own_lanes_and_share_the_order():
    """Rank r owns the lanes l with l mod W = r; what lies where does not depend on it."""
    ranks = [IndexedOrder(samples=[9, 8], lanes=6, rank=rank, world_size=3) for rank in range(3)]
    assert [order.lanes_owned for order in ranks] == [(0, 3), (1, 4), (2, 5)]
    assert len({tuple(order.locate(p) for p in range(17)) for order in ranks}) == 1
    assert IndexedOrder(samples=[9]).lanes_count == LANES_DEFAULT


def test_orders_pickle():
    """An order crosses to a worker process and says the same there."""
    order = IndexedOrder(samples=[9, 1, 4], seed=5, lanes=4, rank=1, world_size=2)
    copy = pickle.loads(pickle.dumps(order))
    assert [copy.locate(p) for p in range(14)] == [order.locate(p) for p in range(14)]
    assert copy.lanes_owned == order.lanes_owned


def test_what_it_was_made_of_is_its_own():
    """Changing the list afterwards changes no order, and an order's arrays cannot be written."""
    samples = np.array([3, 4])
    order = IndexedOrder(samples=samples, lanes=1)
    samples[0] = 100
    assert order.samples_count == 7
    with pytest.raises(ValueError, match="read-only"):
        order.samples[0] = 1


@pytest.mark.parametrize("samples", [[-1, 2], [1.5], "abc", [[1], [2]], [[1], [2, 3]], 7, None])
def test_what_is_no_list_of_counts_is_refused(samples):
    """Negative, fractional, nested or missing counts are the caller's mistake."""
    with pytest.raises(ConfigError, match="must be a list of whole numbers"):
        IndexedOrder(samples=samples)


@pytest.mark.parametrize("samples", [[], [0], [0, 0]])
def test_no_samples_are_refused(samples):
    """A job without a sample does not start."""
    with pytest.raises(ConfigError, match=r"samples 0 must be in \[1,"):
        IndexedOrder(samples=samples)


@pytest.mark.parametrize(
    "wrong",
    [{"seed": -1}, {"seed": 1 << 64}, {"epoch": -1}, {"window": 0}, {"lanes": 0}, {"rank": 1}, {"world_size": 0}],
)
def test_numbers_out_of_range_are_refused(wrong):
    """The error names the value and its bounds."""
    name, value = next(iter(wrong.items()))
    with pytest.raises(ConfigError, match=rf"{name} {value} must be in \["):
        IndexedOrder(**{"samples": [1], **wrong})


def test_ranks_lanes_and_positions_that_do_not_fit_are_refused():
    """Ranks that do not divide the lanes, lanes and positions that do not exist: each names the bound."""
    with pytest.raises(ConfigError, match=r"world_size 48 does not divide lanes 64.*to resume.*divides 64.*lanes=48$"):
        IndexedOrder(samples=[100], world_size=48)
    order = IndexedOrder(samples=[10], lanes=2)
    with pytest.raises(ConfigError, match=r"lane 2 must be in \[0, 2\)"):
        order.lane_length(2)
    for position in (-1, 10):
        with pytest.raises(ConfigError, match=rf"position {position} must be in \[0, 9\]"):
            order.locate(position)
    with pytest.raises(ConfigError, match=r"source 1 must be in \[0, 0\]"):
        order.source_at(1, 0, 0)


def test_it_has_the_shape_of_a_mix():
    """A loader reads one source and several by the same calls."""
    order = IndexedOrder(samples=[10], lanes=4)
    assert (order.sources_count, order.taken(2, 1), order.sources_of(2, 1, 9).tolist()) == (1, (1,), [0])
    place = order.source_at(0, 2, 1)
    assert (place.order, place.lane, place.taken) == (order, 2, 1)
    (whole,), (tail,) = order.segments(1, 0, order.lane_length(1)), order.segments(1, 1, order.lane_length(1) - 1)
    assert (tail.first, tail.samples_count) == (whole.first + 1, whole.samples_count - 1)
