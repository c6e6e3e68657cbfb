"""Sensitivity and break-even."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.cost import Prices, Workload, break_even, by_epochs, by_object_bytes, estimate
from penstock.cost.tables import further_tables

DATA = Workload(
    objects_count=10**6, size_bytes=10**14, hours=20, busy=0.25, host_dollars_per_hour=28, hours_are="measured"
)
PRICES = Prices.load()


def test_by_epochs() -> None:
    """What is paid in every epoch grows with them, hours too; what is paid once does not; the run's own number is there."""
    table = by_epochs(replace(DATA, epochs=3, hours=60), PRICES)
    assert list(table) == [1, 2, 3, 5, 10, 30, 100]
    assert table[10]["object-lambda"] == pytest.approx(5841.0)
    assert table[10]["idle-gpu"] == pytest.approx(4200)
    assert table[10]["node-cache"] == table[1]["node-cache"] == pytest.approx(4.80)


def test_by_object_bytes() -> None:
    """The same bytes in smaller objects need more requests, and never fewer; the data's own size is there."""
    table = by_object_bytes(replace(DATA, objects_count=2 * 10**6), PRICES)
    assert list(table) == [10**5, 10**6, 10**7, 5 * 10**7, 10**8, 10**9]
    whole = [row["whole-objects"] for row in table.values()]
    assert whole == sorted(whole, reverse=True)
    assert whole[0] == pytest.approx(400)


def test_break_even_is_where_the_order_changes() -> None:
    """One epoch earlier the other option is not more expensive; at the stated number it is."""
    found = break_even(DATA, PRICES)
    pairs = {(each.option, each.instead_of): each.epochs for each in found}
    assert pairs["converted-copy", "object-lambda"] == 5
    assert pairs["node-cache", "whole-objects"] == 13
    assert [each.epochs for each in found] == sorted(each.epochs for each in found)
    for (option, other), epochs in pairs.items():
        before = estimate(DATA.at_epochs(epochs - 1), PRICES).dollars()
        after = estimate(DATA.at_epochs(epochs), PRICES).dollars()
        assert before[option] >= before[other], (option, other)
        assert after[option] < after[other], (option, other)


def test_break_even_of_several_hosts() -> None:
    """With hosts whose caches fill one after the other, it is found behind the bend."""
    found = break_even(replace(DATA, hosts=8), PRICES)
    assert [each.epochs for each in found if (each.option, each.instead_of) == ("node-cache", "direct")] == [9]


def test_no_break_even_no_table() -> None:
    """If no option overtakes another one, the table is left out."""
    free = PRICES.replacing(dict.fromkeys(PRICES, 0.0))
    found = further_tables(estimate(replace(DATA, host_dollars_per_hour=0), free), free)
    assert [table.title for table in found] == ["By epochs", "By size of an object"]
