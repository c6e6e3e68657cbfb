from __future__ import annotations

import json
from fractions import Fraction

import pytest

from penstock.errors import ConfigError
from penstock.order import MixWeights


def test_nested_weights_are_products():
    """A mix inside the mix gives its sources its share of its parent's."""
    weights = MixWeights((0.5, (0.5, (1, 3))))
    assert weights.sources_count == 3
    assert weights.shares([True] * 3) == [Fraction(1, 2), Fraction(1, 8), Fraction(3, 8)]


def test_what_has_ended_leaves_its_share_to_its_own_mix():
    """Only when a nested mix has nothing left do its neighbours get its share."""
    weights = MixWeights((1, (1, (1, 1))))
    assert weights.shares([True, True, False]) == [Fraction(1, 2), Fraction(1, 2), 0]
    assert weights.shares([True, False, False]) == [1, 0, 0]
    assert weights.shares([False, False, True]) == [0, 0, 1]
    assert weights.shares([False] * 3) == [0, 0, 0]


def test_whoever_is_left_comes():
    """Where all that is left weighs nothing, it shares equally."""
    assert MixWeights((1, 0, 0)).shares([False, True, True]) == [0, Fraction(1, 2), Fraction(1, 2)]


def test_weights_survive_json():
    """A state has them as lists; they come back equal."""
    weights = MixWeights((0.1, (2, (1, 0))), 3, 640)
    assert MixWeights.from_json(json.loads(json.dumps(weights.as_json()))) == weights
    assert weights.as_json() == [3, 640, [0.1, [2, [1, 0]]]]


@pytest.mark.parametrize(
    "entries",
    [(), (0, 0), (1, -1), (1, float("nan")), (float("inf"),), "ab", 3, (True,), (1, (1, (0,))), (1, (2,)), None],
)
def test_what_is_no_weight_is_refused(entries):
    """Negative, infinite, missing or all zero, also inside a nested mix: the error shows it."""
    with pytest.raises(ConfigError, match="weight"):
        MixWeights(entries)


@pytest.mark.parametrize("value", [None, [], [0, 0], [0.0, 0, [1]], [0, "0", [1]], [0, -1, [1]]])
def test_what_is_no_state_of_weights_is_refused(value):
    """A damaged state is the caller's mistake, not a crash."""
    with pytest.raises(ConfigError):
        MixWeights.from_json(value)
