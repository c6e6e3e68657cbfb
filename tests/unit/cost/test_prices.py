"""Prices: where they come from, and how they are replaced."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cost import Prices, Workload, estimate
from penstock.errors import ConfigError

DATA = Workload(objects_count=10**6, size_bytes=10**14)


def test_every_price_says_where_it_comes_from() -> None:
    """Each has a unit in the plural, a region, a source, and a day."""
    prices = Prices.load()
    assert len(prices) == 11
    for price in prices.values():
        assert price.region
        assert len(price.source) > 20
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", price.date)
        assert price.unit == "GB" or price.unit.endswith("s")


def test_every_price_is_used() -> None:
    """Each price changes what some option costs: none is there for nothing."""
    run = replace(DATA, hours=10, host_dollars_per_hour=1, crosses_regions=True)
    prices = Prices.load()
    before = estimate(run, prices).dollars()
    for name, price in prices.items():
        assert estimate(run, prices.replacing({name: price.value + 1})).dollars() != before, name


def test_a_file_replaces_lines(tmp_path: Path) -> None:
    """A file replaces what it names; a line inherits its unit, and has the file as its source."""
    file = tmp_path / "mine.toml"
    file.write_text("[store_get]\nvalue = 0.001\n[mirror]\nvalue = 1\nsource = 'contract'\ndate = 2026-01-02\n")
    prices = Prices.load(file)
    assert (prices["store_get"].value, prices["store_get"].per, prices["store_get"].source) == (0.001, 1000, str(file))
    assert (prices["mirror"].source, prices["mirror"].date) == ("contract", "2026-01-02")
    assert prices["store_put"] == Prices.load()["store_put"]
    assert estimate(DATA, prices).dollars()["whole-objects"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [("[other]\nvalue = 1", "no price in .* 'other'"), ("[mirror]\nvalue = -1", "value=-1"),
     ("[mirror]\nvalue = 'a'", "value='a'"), ("[mirror]\ncost = 1", r"no entry of \[mirror\] .* 'cost'"),
     ("mirror = 1", "must be a table"), ("[mirror", "is not TOML"),
     ("[mirror]\nunit = 3", "unit=3"), ("[mirror]\nper = 0", "per=0")],
)  # fmt: skip
def test_files_that_cannot_be_used(tmp_path: Path, text: str, said: str) -> None:
    """What is wrong in a file is named."""
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        Prices.load(tmp_path / "mine.toml")


def test_on_premises() -> None:
    """The store's requests, storage and transfer are free there; hosts and disks are not."""
    found = estimate(replace(DATA, crosses_regions=True), Prices.load().on_premises()).dollars()
    assert found["direct"] == found["single-samples"] == 0
    assert found["converted-copy"] == pytest.approx(59.03, abs=0.01)


def test_replacing() -> None:
    """A value is replaced in its unit, and is marked as given; the original keeps its own, and other names are errors."""
    prices = Prices.load()
    changed = prices.replacing({"function_call": 1.0})
    assert (changed["function_call"].per, changed["function_call"].source) == (1_000_000, "given")
    assert prices["function_call"].value == 0.2
    with pytest.raises(ConfigError, match="no price with the name 'get'"):
        prices.replacing({"get": 1.0})
