"""What each option pays for: the articles' figures, and formulas that a reader can compute again."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from penstock.cost import Estimate, Prices, Workload, estimate
from penstock.cost.options import dollars_text, number

ARTICLE = Workload(objects_count=10**6, size_bytes=10**14)
RUN = Workload(objects_count=2000, size_bytes=300 * 10**9, epochs=3, hosts=2, host_dollars_per_hour=10, hours=73)


def charges(found: Estimate, option: str) -> dict[str, float]:
    (each,) = [each for each in found.options if each.name == option]
    names = {charge.what for charge in each.charges}
    return {name: round(sum(charge.dollars for charge in each.charges if charge.what == name), 9) for name in names}


def test_the_articles_figures() -> None:
    """100 TB in a million objects, one pass: $0.40 of GETs; Object Lambda $500 returned, $83.50 of time, $0.20 of calls."""
    found = estimate(ARTICLE)
    assert charges(found, "whole-objects") == {"GET requests": 0.40}
    assert charges(found, "object-lambda") == {
        "GET requests": 0.40,
        "GB returned": 500.0,
        "function time": 83.50,
        "function calls": 0.20,
    }
    assert charges(estimate(replace(ARTICLE, function_s=5.0)), "object-lambda")["function time"] == 83.50


@pytest.mark.parametrize(("hours_are", "wasted", "total"), [("measured", 420.0, 560.0), ("full-speed", 1680.0, 2240.0)])
def test_idle_hosts(hours_are: str, wasted: float, total: float) -> None:
    """A $28/h host at 25% for 20 h wastes $420 if that is the time with the bottleneck, $1 680 if it is the time without."""
    run = replace(ARTICLE, hours=20, busy=0.25, host_dollars_per_hour=28, hours_are=hours_are)
    found = estimate(run)
    assert charges(found, "idle-gpu") == {"GPU hosts that wait for data": wasted}
    assert found.total_dollars(found.options[-1]) == total
    assert found.total_dollars(found.options[1]) == pytest.approx(total - wasted + 0.40)


def test_every_option_by_hand() -> None:
    """A small case, each option computed here another way."""
    found = estimate(RUN).dollars()
    gets = 2000 * 18 * 0.4e-6  # objects of 150 MB are 18 parts of 8 MiB
    transform = 2000 * 7.5 / 16 / 3600 * 0.68
    shards = 1172  # of 256 MB, each 31 parts
    assert found["direct"] == pytest.approx(3 * gets)
    assert found["whole-objects"] == pytest.approx(3 * 2000 * 0.4e-6)
    assert found["single-samples"] == pytest.approx(3 * math.ceil(300e9 / 115_000) * 0.4e-6)
    assert found["node-cache"] == pytest.approx(2 * gets)
    assert found["converted-copy"] == pytest.approx(
        gets + transform + shards * 33 * 5e-6 + 300 * 0.023 + 3 * shards * 31 * 0.4e-6
    )
    assert found["gateway"] == pytest.approx(gets + 73 * 0.68 + 300 * 73 / 730 * 0.08)
    assert found["cpu-cluster"] == pytest.approx(3 * gets + 3 * transform)
    download_h = 300 / 3600
    disk = 2 * 300 * (73 + download_h) / 730 * 0.08
    assert found["file-mode"] == pytest.approx(2 * gets + disk + download_h * 2 * 10)
    assert found["mirror"] == pytest.approx(gets + 300 * 0.145)
    assert found["idle-gpu"] == 0


def test_settings_of_options() -> None:
    """Hosts of a cluster are paid for the whole run, returned bytes and months as given, and each read for its transfer."""
    changed = replace(
        RUN, cluster_hosts=4, returned_bytes=10**9, months=2.0, function_bytes=2 * 10**9, crosses_regions=True
    )
    found = estimate(changed)
    assert charges(found, "cpu-cluster")["CPU hosts"] == pytest.approx(4 * 73 * 0.68)
    assert charges(found, "object-lambda")["GB returned"] == pytest.approx(3 * 0.005)
    assert charges(found, "object-lambda")["function time"] == pytest.approx(3 * 2000 * 7.5 * 2 * 1.67e-5)
    assert charges(found, "converted-copy")["storage of the copy"] == pytest.approx(2 * 0.023)
    assert charges(found, "direct")["transfer between regions"] == pytest.approx(3 * 300 * 0.02)
    assert charges(found, "converted-copy")["transfer between regions"] == pytest.approx((300 + 3 * 1) * 0.02)
    assert charges(found, "object-lambda")["transfer between regions"] == pytest.approx(3 * 1 * 0.02)
    assert charges(found, "file-mode")["transfer between regions"] == pytest.approx(2 * 300 * 0.02)


@pytest.mark.parametrize("hours_are", ["measured", "full-speed"])
def test_formulas_can_be_computed(hours_are: str) -> None:
    """Each formula, read as arithmetic, gives the dollars that it states, to the digits shown."""
    found = estimate(replace(RUN, busy=0.5, hours_are=hours_are, crosses_regions=True), Prices.load())
    for charge in [found.hosts, *(charge for option in found.options for charge in option.charges)]:
        formula, _, stated = charge.formula.rpartition(" = ")
        text = re.sub(r"(?<=\d) (?=\d)", "", formula).replace(" per ", " / ")
        value, sign = 1.0, "x"
        for part in re.split(r" ([x/]) ", text):
            if part in ("x", "/"):
                sign = part
            else:  # "12 GETs", "$0.68", or "host hour" for 1
                leading = re.match(r"\$?([\d.]+)", part)
                value *= float(leading[1] if leading else 1) ** (1 if sign == "x" else -1)
        assert value == pytest.approx(charge.dollars, rel=2e-3), charge.formula
        assert stated == dollars_text(charge.dollars)


def test_formulas_are_words() -> None:
    """A formula names what it counts, one of it in the singular."""
    formulas = {option.name: option.charges[0].formula for option in estimate(RUN).options}
    assert formulas["direct"] == "2 000 objects x 18 GETs x 3 epochs x $0.0004 per 1 000 requests = $0.04"
    assert formulas["mirror"] == "2 000 objects x 18 GETs x 1 time x $0.0004 per 1 000 requests = $0.01"


def test_a_transform_that_outlasts_the_run() -> None:
    """The gateway's host is paid for until the transform is done, if that is after the run."""
    found = estimate(replace(RUN, function_s=16 * 3600.0))
    (host,) = [dollars for what, dollars in charges(found, "gateway").items() if "host" in what]
    assert host == pytest.approx(2000 * 0.68)


def test_without_hours_nothing_depends_on_them() -> None:
    """Without hours or a price per hour, there is no idle GPU, and no total beside the option's own dollars."""
    found = estimate(ARTICLE)
    assert "idle-gpu" not in found.dollars()
    assert found.total_dollars(found.options[0]) == found.options[0].dollars


def test_numbers_as_text() -> None:
    """Thousands are apart, cents are cents, and what is less keeps its digits."""
    numbers = [number(each) for each in (1, 1e6, 12.3456, 86.8055, 1234.5, 1e-6, 0)]
    assert numbers == ["1", "1 000 000", "12.35", "86.81", "1 234.50", "0.000001", "0"]
    amounts = [dollars_text(each) for each in (0, 0.4, 1680, 0.00004, 1e-9)]
    assert amounts == ["$0.00", "$0.40", "$1 680.00", "$0.00004", "$0"]
