from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.order import Batches


def shares(**job):
    world_size = job["world_size"]
    ranks = [Batches(rank=rank, **job) for rank in range(world_size)]
    return [[(r.batch(k).positions.tolist(), r.batch(k).valid_count) for r in ranks] for k in range(len(ranks[0]))]


def test_ranks_share_each_batch():
    """Global batch k is positions [kG, (k+1)G); rank r has those with p mod W = r."""
    assert shares(samples_count=8, global_size=4, world_size=2) == [
        [([0, 2], 2), ([1, 3], 2)],
        [([4, 6], 2), ([5, 7], 2)],
    ]


def test_the_last_batch_is_padded_to_a_multiple_of_the_ranks():
    """All ranks have as many rows; the rows beyond the samples repeat the last position and do not count."""
    assert shares(samples_count=9, global_size=8, world_size=4)[1] == [([8], 1), ([8], 0), ([8], 0), ([8], 0)]
    assert shares(samples_count=13, global_size=8, world_size=2)[1] == [([8, 10, 12], 3), ([9, 11, 12], 2)]


def test_one_rank_pads_nothing():
    """With W = 1 the last batch is shorter."""
    assert shares(samples_count=5, global_size=3, world_size=1)[1] == [([3, 4], 2)]


def test_drop_last_drops_what_fills_no_global_batch():
    """Positions from G * floor(N / G) on are left out; an epoch may have no batch at all."""
    assert [len(Batches(samples_count=n, global_size=4, drop_last=True)) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    assert [len(Batches(samples_count=n, global_size=4)) for n in (0, 3, 4, 7, 8)] == [0, 1, 1, 2, 2]


def test_take_counts_global_positions():
    """take(n) shortens the epoch before batches are cut, whatever the world size; more than there is takes all."""
    assert shares(samples_count=100, global_size=4, world_size=2, take=5)[1] == [([4], 1), ([4], 0)]
    assert len(Batches(samples_count=100, global_size=4, take=7, drop_last=True)) == 1
    assert [len(Batches(samples_count=10, global_size=4, take=take)) for take in (0, 10, 1000)] == [0, 3, 3]


def test_the_rest_of_an_epoch_is_read_with_another_batch():
    """From any position on, with any G: ranks share every batch equally, and nothing is left out."""
    assert shares(samples_count=11, global_size=4, world_size=2, origin=5) == [
        [([6, 8], 2), ([5, 7], 2)],
        [([10], 1), ([9], 1)],
    ]
    assert len(Batches(samples_count=11, global_size=4, origin=11)) == 0
    assert len(Batches(samples_count=11, global_size=4, origin=50, drop_last=True)) == 0


def test_states_hold_the_end_of_the_last_batch():
    """After batch k the position is its end, without padding."""
    batches = Batches(samples_count=9, global_size=4, world_size=2)
    assert [batches.position_after(k) for k in range(3)] == [4, 8, 9]
    assert (batches.span(2), batches.batch_size) == (range(8, 9), 2)


def test_what_does_not_fit_is_refused():
    """A G that the ranks do not divide names the nearest one; batches that do not exist name the bound."""
    with pytest.raises(ConfigError, match=r"world_size 4 does not divide global_size 130.*global_size=128$"):
        Batches(samples_count=9, global_size=130, world_size=4)
    with pytest.raises(ConfigError, match=r"batch_index 3 must be in \[0, 2\]"):
        Batches(samples_count=9, global_size=4).batch(3)
    for wrong in ({"global_size": 0}, {"take": -1}, {"origin": -1}, {"rank": 1}, {"samples_count": -1}):
        with pytest.raises(ConfigError, match="must be in"):
            Batches(**{"samples_count": 9, "global_size": 4, **wrong})
