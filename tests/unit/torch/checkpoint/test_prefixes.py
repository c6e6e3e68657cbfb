"""Prefix strategies spread the ranks, and refuse what is no prefix."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from penstock.errors import ConfigError
from penstock.torch.checkpoint import BinaryPrefixes, HexPrefixes, RoundRobinPrefixes

pytestmark = pytest.mark.torch


def test_round_robin() -> None:
    """The ranks take the prefixes in turn."""
    assert [RoundRobinPrefixes(["a", "b/c"])(rank, 3) for rank in range(3)] == ["a/", "b/c/", "a/"]


def test_digits_begin_with_the_lowest() -> None:
    """Neighbouring ranks differ in the first digit."""
    assert [BinaryPrefixes()(rank, 4) for rank in range(4)] == [
        "0000000000/",
        "1000000000/",
        "0100000000/",
        "1100000000/",
    ]
    assert [HexPrefixes(length_min=3)(rank, 17) for rank in (0, 15, 16)] == ["000/", "f00/", "010/"]


@pytest.mark.parametrize("strategy", [BinaryPrefixes(length_min=1), HexPrefixes(length_min=1)])
def test_each_rank_has_its_own(strategy: Any) -> None:
    """By default there are as many prefixes as ranks, of equal length."""
    found = [strategy(rank, 300) for rank in range(300)]
    assert len(set(found)) == 300
    assert len({len(prefix) for prefix in found}) == 1


def test_a_number_of_prefixes() -> None:
    """With a number of prefixes the ranks share them."""
    assert len({HexPrefixes(prefixes_count=16)(rank, 300) for rank in range(300)}) == 16


@pytest.mark.parametrize(
    "make",
    [
        lambda: RoundRobinPrefixes([]),
        lambda: RoundRobinPrefixes("ab"),
        lambda: RoundRobinPrefixes([""]),
        lambda: RoundRobinPrefixes([".."]),
        lambda: RoundRobinPrefixes(["/a"]),
        lambda: BinaryPrefixes(length_min=0),
        lambda: HexPrefixes(prefixes_count=0),
        lambda: HexPrefixes(length_min=100),
    ],
)
def test_what_is_no_strategy(make: Any) -> None:
    """Empty or invalid prefixes and numbers are refused."""
    with pytest.raises(ConfigError):
        make()
