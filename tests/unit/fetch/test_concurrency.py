"""The concurrency of requests in flight: grows while that pays, steps back where it does not, halves when throttled."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from penstock.config import KIB, MIB, FetchConfig
from penstock.fetch import Budget, PlanItem
from penstock.fetch.concurrency import Concurrency
from penstock.fetch.read_ahead import ReadAhead
from penstock.store import MemoryStore
from penstock.types import ByteRange, Get


def feed(
    concurrency: Concurrency,
    *,
    windows: int,
    bytes_each: int,
    rate_bytes_per_s: Callable[[int], float],
    starving: bool = True,
    now_s: float = 1.0,
) -> float:
    """Complete `windows` windows' worth of requests against a store of a given speed; returns the time."""
    for _ in range(windows):
        for _ in range(concurrency.limit):
            if starving:
                concurrency.starving()
            now_s += bytes_each / rate_bytes_per_s(concurrency.limit)
            concurrency.completed(bytes_each, now_s, throttled=False)
    return now_s


def test_it_grows_while_throughput_grows() -> None:
    """A starving consumer and a store that scales: the limit reaches its maximum, and not beyond."""
    concurrency = Concurrency(limit=4, limit_min=1, limit_max=100)
    feed(concurrency, windows=60, bytes_each=8 * MIB, rate_bytes_per_s=lambda limit: limit * 90e6)
    assert concurrency.limit == 100


def test_it_stays_where_nobody_waits() -> None:
    """Without a starving consumer it never grows."""
    concurrency = Concurrency(limit=4, limit_min=1, limit_max=100)
    feed(concurrency, windows=60, bytes_each=8 * MIB, rate_bytes_per_s=lambda limit: limit * 90e6, starving=False)
    assert concurrency.limit == 4


def test_it_steps_back_where_more_brings_nothing() -> None:
    """A store whose throughput ends at 8 requests is not asked with many more."""
    concurrency = Concurrency(limit=2, limit_min=1, limit_max=256)
    feed(concurrency, windows=30, bytes_each=8 * MIB, rate_bytes_per_s=lambda limit: min(limit, 8) * 100e6)
    assert 8 <= concurrency.limit <= 16


def test_it_does_not_grow_where_the_receiving_thread_is_busy() -> None:
    """A thread that runs all the time while it receives gets no more requests, whatever the consumer wants."""
    spent_s = 0.0
    concurrency = Concurrency(limit=8, limit_min=1, limit_max=256, cpu_s=lambda: spent_s)
    now_s = 1.0
    for _ in range(400):
        concurrency.starving()
        now_s += 0.01
        spent_s += 0.009
        concurrency.completed(8 * MIB, now_s, throttled=False)
    assert concurrency.limit == 8


def test_throttling_halves_it_once_per_window() -> None:
    """SlowDown halves the limit; a burst of them counts once; the minimum holds."""
    concurrency = Concurrency(limit=64, limit_min=3, limit_max=256)
    for _ in range(20):
        concurrency.completed(0, 1.0, throttled=True)
    assert concurrency.limit == 32
    for _ in range(2000):
        concurrency.completed(0, 1.0, throttled=True)
        concurrency.completed(1000, 1.0, throttled=False)
    assert concurrency.limit == 3


@given(
    st.integers(1, 16),
    st.lists(st.tuples(st.integers(0, 10 * MIB), st.floats(0, 5), st.booleans(), st.booleans()), max_size=300),
)
def test_it_never_leaves_its_bounds(limit: int, events: list[tuple[int, float, bool, bool]]) -> None:
    """Whatever happens, the limit stays between its minimum and maximum."""
    concurrency = Concurrency(limit=limit, limit_min=1, limit_max=40)
    now_s = 0.0
    for received_bytes, wait_s, throttled, starving in events:
        if starving:
            concurrency.starving()
        now_s += wait_s
        concurrency.completed(received_bytes, now_s, throttled=throttled)
        assert 1 <= concurrency.limit <= 40


class Silent:
    """A store that never answers; notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def submit(self, operation: Any, sink: Any) -> Any:
        del sink
        self.asked.append(operation)
        return self

    def cancel(self) -> None:
        """Nothing is under way."""


@pytest.mark.parametrize(("size_bytes", "count"), [(1000, 32), (None, 8), (4 * MIB, 8)])
def test_it_begins_wider_where_answers_are_known_to_be_small(size_bytes: int | None, count: int) -> None:
    """A plan that says its objects are small is begun with four times as many requests: one round trip less."""
    store = Silent()
    plan = [PlanItem(f"k{number}", etag="e", size_bytes=size_bytes) for number in range(200)]
    reader = ReadAhead(store, plan, config=FetchConfig(), budget=Budget(1 << 30), whole=True)  # type: ignore[arg-type]
    reader.start()
    assert len(store.asked) == count
    assert all(isinstance(one, Get) for one in store.asked)
    reader.close()


def test_a_window_may_shrink_below_what_is_planned() -> None:
    """A concurrency that shrinks while many more requests are planned than it holds takes no more of the plan, and goes on."""
    plan = [PlanItem(f"k{number}", etag="e", size_bytes=1000) for number in range(2000)]
    reader = ReadAhead(Silent(), plan, config=FetchConfig(), budget=Budget(1 << 30), whole=True)  # type: ignore[arg-type]
    scheduler = reader._scheduler
    for limit in (256, 1, 1):
        scheduler._concurrency.limit = limit
        reader.start()
        assert len(scheduler._planned) + len(scheduler._sent) >= 512
    reader.close()


class Noting:
    """A core that notes what it is asked."""

    def __init__(self, inner: MemoryStore) -> None:
        self._inner = inner
        self.asked: list[Any] = []

    def submit(self, operation: Any, sink: Any) -> Any:
        self.asked.append(operation)
        return self._inner.submit(operation, sink)

    def describe(self, key: Any) -> str:
        return self._inner.describe(key)


@pytest.mark.parametrize(("whole", "asked"), [(False, range(5, 13)), (True, range(256, 257))])
def test_parts_of_a_large_object_wait_for_their_consumer(whole: bool, asked: range) -> None:
    """Where parts are delivered one by one, no more are asked for than a few per request; a whole object needs all."""
    store = MemoryStore()
    data = random.Random(0).randbytes(256 * 64 * KIB)
    store.write("large", data)
    core = Noting(store)
    config = FetchConfig(part_bytes=64 * KIB, requests_min=4, requests_max=4)
    plan = [PlanItem("large", ByteRange(0, len(data)), size_bytes=len(data))]
    reader = ReadAhead(core, plan, config=config, budget=Budget(1 << 30), whole=whole)  # type: ignore[arg-type]
    reader.start()
    until_s = time.monotonic() + 10
    while len(core.asked) < asked[0] and time.monotonic() < until_s:
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(core.asked) in asked
    if not whole:
        parts = []
        while (found := reader.wait_part()) is not None:
            part = found[1]
            assert part is not None
            assert part.completion is not None
            parts.append(bytes(part.completion.body))
            reader.release(part)
        assert b"".join(parts) == data
    reader.close()
