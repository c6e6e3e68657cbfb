from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from penstock.order import ORDER_VERSION, key_of, permutation
from penstock.order.permutation import GAMMA, mix

MASK = (1 << 64) - 1


def defined(count: int, key: int) -> list[int]:
    """The module's definition, read literally."""
    return sorted(range(count), key=lambda i: mix(key + (i + 1) * GAMMA & MASK))


def test_the_version_is_the_one_that_these_tables_pin():
    """Whoever changes an order changes its version, and these tables with it."""
    assert ORDER_VERSION == 1


def test_mix_is_splitmix64():
    """The published SplitMix64 sequence for seed 1234567 comes out."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [mix(1234567 + (i + 1) * GAMMA & MASK) for i in range(4)] == published


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ((), 0),
        ((0,), 16294208416658607535),
        ((1, 2, 3), 15020427595393229491),
        ((2**64 - 1,), 16490336266968443936),
    ],
)
def test_keys_are_pinned(words, key):
    """A key is the same on every machine and version."""
    assert key_of(*words) == key


@pytest.mark.parametrize(
    ("count", "key", "order"),
    [
        (1, 0, [0]),
        (5, 0, [2, 4, 1, 0, 3]),
        (10, 1, [8, 4, 3, 7, 0, 1, 5, 9, 6, 2]),
        (16, 12793040940332582595, [10, 12, 11, 6, 14, 13, 1, 7, 3, 4, 15, 8, 2, 0, 5, 9]),
    ],
)
def test_permutations_are_pinned(count, key, order):
    """A permutation is the same on every machine and version of Python and numpy."""
    assert permutation(count, key).tolist() == order


@pytest.mark.parametrize("count", [0, 1, 2, 3, 255, 256, 1000])
def test_the_fast_form_equals_the_definition(count):
    """numpy's vector form gives what the definition says, for any key."""
    for key in (0, 1, GAMMA, MASK, key_of(5, count)):
        assert permutation(count, key).tolist() == defined(count, key)


def test_words_and_their_places_matter():
    """No two of many similar word lists share a key."""
    lists = [words for n in range(4) for words in itertools.product(range(6), repeat=n)]
    assert len({key_of(*words) for words in lists}) == len(lists)


def test_all_permutations_of_four_are_equally_likely():
    """Chi-square over the 24 orders of 4 elements stays below its 99.9% quantile (49.7 at 23 degrees)."""
    trials = 24 * 400
    seen = Counter(tuple(permutation(4, key_of(trial)).tolist()) for trial in range(trials))
    expected = trials / 24
    assert len(seen) == 24
    assert sum((n - expected) ** 2 / expected for n in seen.values()) < 49.7


def test_a_permutation_has_no_trend():
    """Rank correlation of place and element is near 0 (4 sigma), also between neighbouring keys."""
    n = 4096
    orders = [permutation(n, key_of(7, epoch)) for epoch in range(8)]
    identity = np.arange(n)
    for left, right in itertools.combinations([identity, *orders], 2):
        assert abs(np.corrcoef(left, right)[0, 1]) < 4 / np.sqrt(n)
