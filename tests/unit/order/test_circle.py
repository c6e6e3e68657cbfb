from __future__ import annotations

from fractions import Fraction

import pytest

from penstock.order.circle import GOLDEN, UNITS, Circle, floor_sum


@pytest.mark.parametrize("count", [0, 1, 2, 7, 40])
@pytest.mark.parametrize("modulus", [1, 2, 9, 49])
def test_a_floor_sum_is_the_sum_of_floors(count, modulus):
    """Euclid's algorithm gives what adding up gives, for steps and starts below and above the modulus."""
    for step in (0, 1, 5, 48, 49, 120):
        for start in (0, 3, 48, 200):
            assert floor_sum(count, modulus, step, start) == sum((start + i * step) // modulus for i in range(count))


def test_constants_are_pinned():
    """Changing one changes every mix: it needs a new ORDER_VERSION."""
    assert (UNITS, GOLDEN) == (16_777_216, 6_408_327)


def test_turns_are_pinned():
    """Whose turn it is, in some lanes, far into an epoch too."""
    circle = Circle(64)
    arcs = circle.arcs([Fraction(5), Fraction(3), Fraction(2)])
    assert "".join(map(str, circle.sources(0, 0, arcs, count=40).tolist())) == GOLDEN_FIRST
    assert "".join(map(str, circle.sources(63, 10**12, arcs, count=40).tolist())) == GOLDEN_LATE


GOLDEN_FIRST = "0010020120100100201201001002012010010120"
GOLDEN_LATE = "2010020120120100201201001002012010010020"


@pytest.mark.parametrize("lanes", [1, 2, 3, 12, 64, 66])
def test_counts_are_the_closed_form_of_turns(lanes):
    """How often an arc was visited equals counting, and the round after n visits is the first one that has n before it."""
    circle = Circle(lanes)
    arcs = circle.arcs([Fraction(1), Fraction(0), Fraction(1, 3), Fraction(7)])
    for lane, round_index in ((0, 0), (lanes - 1, 5), (lanes // 2, 10**9)):
        turns = circle.sources(lane, round_index, arcs, count=300).tolist()
        for source in range(4):
            start, end = arcs[source : source + 2]
            for count in (0, 1, 17, 300):
                assert circle.visits(lane, range(round_index, round_index + count), start, end) == turns[:count].count(
                    source
                )
            seen = [index + 1 for index, turn in enumerate(turns) if turn == source]
            for visits in range(1, len(seen) + 1):
                assert (
                    circle.round_after(lane, round_index, (start, end), visits=visits) == round_index + seen[visits - 1]
                )
            if start < end:
                assert circle.round_after(lane, round_index, (start, end), visits=0) == round_index


def test_long_stretches_are_in_one_piece():
    """More rounds than fit one piece of 64-bit arithmetic continue where the piece ends."""
    circle = Circle(2)
    arcs = circle.arcs([Fraction(2), Fraction(1)])
    turns = circle.sources(1, 3, arcs, count=(1 << 20) + 50)
    assert turns[-60:].tolist() == circle.sources(1, 3 + len(turns) - 60, arcs, count=60).tolist()
    assert circle.sources(0, 0, arcs, count=0).tolist() == []


def test_rows_do_not_drift():
    """Over thousands of rounds a source stays within six samples of its weight, and within six in each lane."""
    circle = Circle(64)
    shares = [Fraction(1, 3), Fraction(7, 50), Fraction(79, 150)]
    arcs = circle.arcs(shares)
    for rounds in (1, 10, 999, 4000):
        for source, share in enumerate(shares):
            taken = [circle.visits(lane, range(rounds), *arcs[source : source + 2]) for lane in range(64)]
            assert abs(sum(taken) - share * 64 * rounds) < 6
            assert max(abs(one - share * rounds) for one in taken) < 6
