"""How many workers a loader asks for, and how a pool is divided."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.ray.elastic import IDLE_S_MIN, Elasticity
from penstock.ray.host import Shares, fair_shares


def test_a_loop_that_stalls_gets_more_workers_up_to_the_bound() -> None:
    """In proportion to the stall, at most twice as many at a time, and not before the last ones are there."""
    elastic = Elasticity(2, 7)
    elastic.note(2.9, 2.9, has_all=True)
    assert elastic.wanted_count == 2  # too early to say
    elastic.note(4.0, 3.9, has_all=True)
    assert elastic.wanted_count == 4
    elastic.note(20.0, 19.0, has_all=False)
    assert elastic.wanted_count == 4
    elastic.note(24.0, 20.0, has_all=True)  # a stall of a quarter
    assert elastic.wanted_count == 5
    elastic.note(28.0, 24.0, has_all=True)
    elastic.note(32.0, 28.0, has_all=True)
    assert elastic.wanted_count == 7


def test_a_loop_that_does_not_stall_gives_workers_back_ever_more_slowly() -> None:
    """One after a minute; if the loop stalls without it, the next one only after two."""
    elastic = Elasticity(1, 4)
    elastic.note(10.0, 5.0, has_all=True)
    assert elastic.wanted_count == 2
    now_s = 10.0 + IDLE_S_MIN
    elastic.note(now_s - 1, 5.0, has_all=True)
    assert elastic.wanted_count == 2
    elastic.note(now_s, 5.0, has_all=True)
    assert elastic.wanted_count == 1
    elastic.note(now_s + 4, 7.0, has_all=True)
    assert elastic.wanted_count == 2
    elastic.note(now_s + 4 + IDLE_S_MIN, 7.0, has_all=True)
    assert elastic.wanted_count == 2
    elastic.note(now_s + 4 + 2 * IDLE_S_MIN, 7.0, has_all=True)
    assert elastic.wanted_count == 1
    elastic.note(now_s + 1000, 7.0, has_all=True)
    assert elastic.wanted_count == 1


@given(st.dictionaries(st.text(min_size=1, max_size=3), st.integers(0, 9), max_size=6), st.integers(0, 20))
def test_a_pool_is_divided_fairly(wanted: dict[str, int], capacity: int) -> None:
    """Nobody gets more than wanted, nothing is left over while somebody wants it, and who gets less has at most one less."""
    shares = fair_shares(wanted, capacity)
    assert sum(shares.values()) == min(capacity, sum(wanted.values()))
    for name, share in shares.items():
        assert 0 <= share <= wanted[name]
        if share < wanted[name]:
            assert all(other <= share + 1 for other in shares.values())


def test_a_loader_that_reports_no_more_leaves_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool forgets it after a while."""
    shares = Shares(forget_s=10.0)
    now_s = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    assert shares.report("a", 8, 8) == 8
    assert shares.report("b", 8, 8) == 4
    assert shares.report("a", 8, 8) == 4
    now_s = 11.0
    assert shares.report("a", 8, 8) == 8
