from __future__ import annotations

import pytest

from penstock.loader.statistics import LoaderStatistics, Meter


def statistics(**values: float) -> LoaderStatistics:
    meter = Meter()
    for name, value in values.items():
        setattr(meter, name, value)
    return meter.read(threads_count=2, dropped={})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"elapsed_s": 100, "stall_s": 1, "store_s": 90}, "consumer"),
        ({"elapsed_s": 100, "stall_s": 50, "store_s": 60, "parse_s": 3, "wait_s": 20}, "store"),
        ({"elapsed_s": 100, "stall_s": 50, "store_s": 6, "parse_s": 60, "wait_s": 20}, "parse"),
        ({"elapsed_s": 100, "stall_s": 50, "store_s": 6, "parse_s": 3, "wait_s": 80, "decode_s": 190}, "decode"),
        ({}, "consumer"),
    ],
)
def test_bottleneck(values: dict[str, float], expected: str) -> None:
    """Without stall it is the consumer; with stall it is where the reader's time went."""
    assert statistics(**values).bottleneck == expected


@pytest.mark.parametrize(
    ("step_s", "threads_s", "waited_s", "expected"),
    [(90, 20, 100, True), (90, 20, 4, False), (10, 20, 100, False), (90, 1, 100, False), (0, 0, 0, False)],
)
def test_contention_needs_a_loop_that_computes_and_threads_that_wait(
    step_s: float, threads_s: float, waited_s: float, expected: bool
) -> None:
    """Both sides run, and the threads wait longer than they run: else there is no contention for the interpreter."""
    done = statistics(elapsed_s=100, step_cpu_s=step_s, threads_cpu_s=threads_s, threads_wait_s=waited_s)
    assert done.contends == expected


def test_rates() -> None:
    """Rates are per second of iterating."""
    done = statistics(samples=200, bytes=4000, elapsed_s=4, stall_s=1)
    assert (done.samples_per_s, done.bytes_per_s, done.stall_ratio) == (50, 1000, 0.25)
    assert (statistics().samples_per_s, statistics().bytes_per_s, statistics().stall_ratio) == (0, 0, 0)
