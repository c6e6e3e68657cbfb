from __future__ import annotations

import itertools

import pytest

from penstock.errors import ConfigError
from penstock.order import DeliveredBatches


def test_any_order_leaves_the_rest():
    """After any batches in any order, exactly the others are left, here and in what begins from its numbers."""
    for order in itertools.permutations(range(5)):
        done = DeliveredBatches()
        for index, batch in enumerate(order):
            done.add(batch)
            done = DeliveredBatches(done.lowest, done.higher)
            assert all((batch in done) == (batch in order[: index + 1]) for batch in range(5))
            assert done.lowest == min(set(range(6)) - set(order[: index + 1]))
        assert (done.lowest, done.higher) == (5, ())


def test_in_order_it_is_one_number():
    """Batches that come in order leave nothing to remember but how many they were."""
    done = DeliveredBatches()
    for batch in range(1000):
        done.add(batch)
    assert (done.lowest, done.higher) == (1000, ())


def test_a_batch_is_handed_out_once():
    """Handing out a batch again is a defect of whoever does it."""
    done = DeliveredBatches(3, [5])
    for batch in (2, 5):
        with pytest.raises(ValueError, match=f"batch {batch} was already delivered"):
            done.add(batch)


@pytest.mark.parametrize("value", [(-1, []), (3, [1])])
def test_what_is_no_state_is_refused(value):
    """A damaged state is the caller's mistake, not a crash."""
    with pytest.raises(ConfigError, match="delivered batches"):
        DeliveredBatches(*value)
