"""``ps.bench.step``: the cost of data is what a streamed step takes longer than a cached one."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

import penstock as ps
from penstock.bench import StepCost, step


def slowly(count: int, seconds: float) -> Iterator[int]:
    for number in range(count):
        time.sleep(seconds)
        yield number


def test_the_difference_is_the_cost_of_data() -> None:
    """A loader that takes 6 ms for each batch costs a step of 3 ms so much, and the text says that it is the bottleneck."""
    seen: list[int] = []
    cost = step(lambda batch: (seen.append(batch), time.sleep(0.003)), slowly(40, 0.006), batches=20)
    assert cost.data_s == pytest.approx(0.006, rel=0.5)
    assert cost.stall_ratio == pytest.approx(2 / 3, abs=0.2)
    assert cost.batches == 18
    assert seen == [*range(20), *[19] * 20]
    assert "Data is a bottleneck" in repr(cost)
    assert " a step, 18 batches" in repr(cost)


def test_data_that_costs_nothing() -> None:
    """Batches in memory are no bottleneck, and an iterable that ends early gives fewer windows."""
    cost = step(lambda _: time.sleep(0.03), list(range(9)), batches=20)
    assert (cost.batches, cost.verdict.partition(":")[0]) == (6, "Data is not the bottleneck")


def test_a_device_is_waited_for_at_the_ends_of_windows() -> None:
    """Steps that only begin work are timed when `synchronise` returns, once for each window."""
    calls: list[float] = []
    cost = step(lambda _: None, range(1000), batches=100, synchronise=lambda: (calls.append(0.0), time.sleep(0.01)))
    assert len(calls) == 20
    assert cost.cached_s == pytest.approx(0.001, rel=0.5)


def test_too_few_batches() -> None:
    """Fewer than two windows are an error that says what to change."""
    with pytest.raises(ps.ConfigError, match="ended before two windows of 20 batches"):
        step(print, [])
    with pytest.raises(ps.ConfigError, match="batches=3 must be at least 20"):
        step(print, [], batches=3)


def test_noise_is_no_bottleneck() -> None:
    """If the windows overlap, the verdict is that data is no bottleneck."""
    cost = StepCost(streamed_s=1.2, streamed_range_s=(0.9, 1.4), cached_s=1.0, cached_range_s=(0.8, 1.1), batches=100)
    assert cost.data_range_s == pytest.approx((-0.2, 0.6))
    assert "within the noise" in cost.verdict
