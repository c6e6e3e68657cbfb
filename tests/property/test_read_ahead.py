"""Read-ahead against the plain reference: any objects, spans, part sizes and budgets, with failures in between."""

from __future__ import annotations

import gc
import itertools
import random
import threading
import time
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

import penstock as ps
from penstock.config import KIB, FetchConfig, RetryConfig
from penstock.errors import ConfigError, SpanError, StoreError
from penstock.fetch import Budget
from penstock.store.base import Wrapper
from penstock.store.faulty import Faulty
from penstock.store.hedged import Hedged
from penstock.store.limited import Limited
from penstock.store.memory import MemoryStore
from penstock.store.retrying import Retrying

SIZES = st.one_of(st.integers(0, 3000), st.integers(60_000, 140_000), st.integers(900_000, 2_400_000))
BYTES = random.Random(7).randbytes(2_400_000)


class Own(Wrapper):
    """A store with a budget of its own."""

    own: Budget

    def submit(self, operation: Any, sink: Any) -> Any:
        return self.inner.submit(operation, sink)

    @property
    def budget(self) -> Budget:
        return self.own


def stack(objects: dict[str, bytes], config: FetchConfig, *, budget_bytes: int, fault_ratio: float, seed: int) -> Own:
    """The default stack's wrappers over memory, with answers cut in half now and then."""
    memory = MemoryStore()
    for key, data in objects.items():
        memory.write(key, data)
    faulty = Faulty(memory, ratio=fault_ratio, seed=seed)
    retry = RetryConfig(attempts_max=12, backoff_s=0.0, backoff_s_max=0.0)
    store = Own(Hedged(Retrying(Limited(faulty, requests_max=5), config=retry)))
    store.own = Budget(budget_bytes)
    store.fetch_config = config
    return store


class Objects(dict[str, bytes]):
    """Key to bytes, shown by size."""

    def __repr__(self) -> str:
        return f"Objects({[len(data) for data in self.values()]})"


@st.composite
def cases(draw: Any) -> tuple[dict[str, bytes], list[Any], Own]:
    """Objects, requests for them, and a store."""
    sizes = draw(st.lists(SIZES, min_size=1, max_size=5))
    objects = Objects({f"k{index}": BYTES[index : index + size] for index, size in enumerate(sizes)})
    requests: list[Any] = []
    for _ in range(draw(st.integers(1, 8))):
        key = f"k{draw(st.integers(0, len(sizes) - 1))}"
        size = len(objects[key])
        if size == 0 or draw(st.booleans()):
            requests.append(key)
        else:
            start = draw(st.integers(0, size - 1))
            length = draw(st.one_of(st.integers(1, size - start + 10), st.sampled_from([30_000_000, 10**15])))
            requests.append((key, ps.ByteRange(start, start + length)))
    config = FetchConfig(
        part_bytes=draw(st.sampled_from([64 * KIB, 100_000, 256 * KIB, 1024 * KIB, 8192 * KIB])),
        requests_min=draw(st.integers(1, 4)),
        requests_max=draw(st.integers(4, 16)),
        gap_bytes_max=draw(st.sampled_from([0, 1000, 512 * KIB])),
    )
    store = stack(
        objects,
        config,
        budget_bytes=draw(st.sampled_from([5 * 2**20, 16 * 2**20, 2**30])),
        fault_ratio=draw(st.sampled_from([0.0, 0.2])),
        seed=draw(st.integers(0, 100)),
    )
    return objects, requests, store


def expected(objects: dict[str, bytes], request: Any) -> bytes:
    """What a request must give."""
    key, span = (request, None) if isinstance(request, str) else request
    return objects[key] if span is None else objects[key][span.start : span.end]


def given_back(store: Own) -> bool:
    """Whether the budget holds nothing but buffers kept for reuse, once what was cancelled has ended."""
    deadline_s = time.monotonic() + 5
    while time.monotonic() < deadline_s:
        gc.collect()
        statistics = store.own.statistics()
        if statistics.used_bytes == statistics.free_bytes:
            return True
        threading.Event().wait(0.005)
    return False


QUICK = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@QUICK
@given(cases())
def test_read_many_equals_the_reference(case: tuple[dict[str, bytes], list[Any], Own]) -> None:
    """Every blob has the bytes asked for, in the order asked; afterwards the budget has everything back."""
    objects, requests, store = case
    blobs = list(store.read_many(requests))
    assert [blob.request_index for blob in blobs] == list(range(len(requests)))
    for blob, request in zip(blobs, requests, strict=True):
        assert blob.data == expected(objects, request)
    del blobs, blob
    assert given_back(store)


@QUICK
@given(cases())
def test_unordered_reading_gives_the_same_set(case: tuple[dict[str, bytes], list[Any], Own]) -> None:
    """``ordered=False`` gives each request once, with its bytes."""
    objects, requests, store = case
    found = {blob.request_index: bytes(blob.data) for blob in store.read_many(requests, ordered=False)}
    assert found == {index: expected(objects, request) for index, request in enumerate(requests)}
    assert given_back(store)


@QUICK
@given(cases(), st.integers(0, 9))
def test_read_into_equals_the_reference(case: tuple[dict[str, bytes], list[Any], Own], taken_count: int) -> None:
    """Each buffer has the bytes asked for, and no byte outside; what was dropped early is written to no more."""
    objects, requests, store = case
    keys = [(request, None) if isinstance(request, str) else request for request in requests]
    wanted = [expected(objects, request) for request in requests]
    starts = [span and span.start for _, span in keys]
    ranges = [
        None if start is None else ps.ByteRange(start, start + len(data))
        for start, data in zip(starts, wanted, strict=True)
    ]
    memory = [bytearray(b"#" + bytes(len(data)) + b"#") for data in wanted]
    views = [memoryview(buffer)[1:-1] for buffer in memory]
    asked = [(key, span, view) for (key, _), span, view in zip(keys, ranges, views, strict=True)]
    assert sorted(store.read_into(asked)) == list(range(len(asked)))
    assert memory == [b"#" + data + b"#" for data in wanted]
    landed = store.read_into(asked)
    for _ in itertools.islice(landed, taken_count):
        pass
    del landed
    for buffer in memory:
        buffer[:] = bytes(len(buffer))
    assert given_back(store)
    assert not any(map(any, memory))


@QUICK
@given(cases())
def test_read_parts_equals_the_reference(case: tuple[dict[str, bytes], list[Any], Own]) -> None:
    """Chunks come in order and without gaps, end with ``last``, and their bytes are those asked for."""
    objects, requests, store = case
    found: list[bytearray] = [bytearray() for _ in requests]
    ended = [False] * len(requests)
    before = 0
    for chunk in store.read_parts(requests):
        index = chunk.request_index
        request = requests[index]
        first = 0 if isinstance(request, str) or request[1] is None else request[1].start
        assert index >= before
        assert not ended[index]
        assert chunk.offset_bytes == first + len(found[index])
        found[index] += chunk.data
        ended[index] = chunk.last
        before = index
        del chunk
        assert store.own.statistics().used_bytes <= store.own.bytes_max + 4 * 2**20
    assert [bytes(data) for data in found] == [expected(objects, request) for request in requests]
    assert all(ended[index] for index, data in enumerate(found) if data)
    assert given_back(store)


@QUICK
@given(cases(), st.integers(0, 8))
def test_dropping_an_iterator_gives_everything_back(case: tuple[dict[str, bytes], list[Any], Own], taken: int) -> None:
    """An iterator that is dropped anywhere leaves nothing charged to the budget."""
    _, requests, store = case
    for verb in (store.read_many, store.read_parts):
        blobs: Any = verb(requests)
        for _ in range(taken):
            next(blobs, None)
        del blobs
        assert given_back(store)


@QUICK
@given(cases(), st.integers(0, 7))
def test_what_cannot_be_read_is_returned_in_its_place(case: tuple[dict[str, bytes], list[Any], Own], at: int) -> None:
    """``try_read_many`` yields the error of a missing object or range in order, and all others' bytes."""
    objects, requests, store = case
    at = min(at, len(requests))
    bad: list[Any] = ["missing", ("k0", ps.ByteRange(len(objects["k0"]) + 5, len(objects["k0"]) + 9))]
    mixed = [*requests[:at], *bad, *requests[at:]]
    results = list(store.try_read_many(mixed))
    assert len(results) == len(mixed)
    for index, (result, request) in enumerate(zip(results, mixed, strict=True)):
        if index == at:
            assert isinstance(result, FileNotFoundError)
        elif index == at + 1:
            assert isinstance(result, SpanError)
        else:
            assert not isinstance(result, StoreError)
            assert result.data == expected(objects, request)
    del results, result
    assert given_back(store)


def test_too_large_a_read_is_refused_with_both_numbers() -> None:
    """A read larger than half the budget is ConfigError that names both, and holds nothing."""
    store = stack({"k": BYTES}, FetchConfig(), budget_bytes=2**21, fault_ratio=0, seed=0)
    with pytest.raises(ConfigError, match=rf"{len(BYTES)}.*{2**21}"):
        store.read("k")
    assert b"".join(chunk.data for chunk in store.read_parts(["k"], part_bytes=64 * KIB)) == BYTES
    assert given_back(store)


def test_a_range_is_held_against_the_budget_by_what_there_is_of_it() -> None:
    """A range longer than half of the budget is read where the object is smaller, and refused where it is not."""
    for part_bytes in (64 * KIB, 8192 * KIB):
        config = FetchConfig(part_bytes=part_bytes)
        store = stack({"k": BYTES, "small": BYTES[:300_000]}, config, budget_bytes=2**20, fault_ratio=0, seed=0)
        assert store.read("small", ps.ByteRange(0, 30_000_000)).data == BYTES[:300_000]
        assert store.read("small", ps.ByteRange(0, 600_000)).data == BYTES[:300_000]
        for length in (600_000, 30_000_000):
            with pytest.raises(ConfigError, match=str(2**20)):
                store.read("k", ps.ByteRange(0, length))
        assert given_back(store)


def test_a_consumer_that_keeps_everything_is_not_stuck() -> None:
    """Chunks that are all kept exceed the budget one by one instead of waiting for ever."""
    objects = {f"k{index}": BYTES[: 1_200_000 + index] for index in range(12)}
    store = stack(objects, FetchConfig(), budget_bytes=4 * 2**20, fault_ratio=0, seed=0)
    kept = list(store.read_parts(list(objects)))
    assert [bytes(chunk.data) for chunk in kept] == list(objects.values())
    assert store.own.statistics().overdrawn_count > 0
    blobs = list(store.read_many(list(objects)))
    assert [bytes(blob.data) for blob in blobs] == list(objects.values())
    del kept, blobs
    assert given_back(store)
