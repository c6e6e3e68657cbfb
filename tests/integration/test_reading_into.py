"""Bytes land in the caller's memory exactly, whatever the server does meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.cache import CacheConfig
from penstock.config import KIB, FetchConfig, HedgeConfig, RetryConfig
from penstock.errors import ChecksumError, ObjectChangedError, StoreError
from penstock.fetch import PlanItem
from penstock.types import ByteRange
from servers.faulty import FaultyServer

pytestmark = pytest.mark.server

FAST = RetryConfig(backoff_s=0.005, backoff_s_max=0.05)
SMALL_PARTS = FetchConfig(part_bytes=256 * KIB)
DATA = b"".join(number.to_bytes(4, "big") for number in range(400_000))  # 1.6 MB: seven parts, no two alike
OTHER = bytes(byte ^ 255 for byte in DATA)
SPANS = (None, ByteRange(1, 1_500_001), ByteRange(5, 20), ByteRange(700_000, 1_600_000), ByteRange(40, 90_000))

Connect = Callable[..., ps.Store]


def requests() -> tuple[list[bytearray], list[Any]]:
    """Buffers, and what is to be read into them."""
    buffers = [bytearray(span.length_bytes if span is not None else len(DATA)) for span in SPANS]
    return buffers, [("a", span, buffer) for span, buffer in zip(SPANS, buffers, strict=True)]


def check(store: ps.Store) -> None:
    """Read everything, and compare it."""
    buffers, asked = requests()
    assert sorted(store.read_into(asked)) == list(range(len(SPANS)))
    assert [bytes(buffer) for buffer in buffers] == [DATA[span.start : span.end] if span else DATA for span in SPANS]


@pytest.mark.parametrize("seed", range(3))
def test_faults_leave_no_trace(faulty: FaultyServer, connect_faulty: Connect, seed: int) -> None:
    """Broken and refused answers are made up for, and every byte is right."""
    faulty.objects["a"] = DATA
    faulty.random_faults(["503", "reset", "close", "close_head", "500"], ratio=0.2, seed=seed)
    with connect_faulty(fetch=SMALL_PARTS, retry=RetryConfig(attempts_max=12, backoff_s=0.001)) as store:
        check(store)


@pytest.mark.parametrize("kind", ["wrong_range", "short_range", "promise_more", "empty_200", "garbage_headers", "html"])
def test_wrong_answers_are_errors(faulty: FaultyServer, connect_faulty: Connect, kind: str) -> None:
    """Bytes that are not those of the range are never passed off as such."""
    faulty.objects["a"] = DATA
    faulty.fail(kind, times=1000, match=lambda request: request.method == "GET")
    with connect_faulty(fetch=SMALL_PARTS, retry=FAST) as store:
        for span in SPANS[1:]:
            assert span is not None
            with pytest.raises(StoreError, match="a"):
                list(store.read_into([("a", span, bytearray(span.length_bytes))]))


def test_a_damaged_body_is_noticed(faulty: FaultyServer, connect_faulty: Connect) -> None:
    """A whole object in parts is compared with the checksum that the store keeps, and read once more if it differs."""
    faulty.objects["a"] = DATA
    faulty.fail("corrupt", times=1, match=lambda request: request.method == "GET")
    buffer = bytearray(len(DATA))
    with connect_faulty(fetch=SMALL_PARTS, retry=FAST) as store:
        assert list(store.read_into([("a", None, buffer)])) == [0]
        assert buffer == DATA
        faulty.fail("corrupt", times=1000, match=lambda request: request.method == "GET")
        with pytest.raises(ChecksumError, match="a"):
            list(store.read_into([("a", None, buffer)]))


def test_a_second_request_that_wins(faulty: FaultyServer, connect_faulty: Connect) -> None:
    """If late requests are sent a second time, the loser writes nothing after the index was returned."""
    for number in range(100):
        faulty.objects[f"{number:03d}"] = bytes([number]) * 1000
    with connect_faulty(hedge=HedgeConfig(wait_s_min=0.01), fetch=SMALL_PARTS, retry=FAST) as store:
        for _ in store.read_many(sorted(faulty.objects)):
            pass
        faulty.objects["a"] = DATA
        faulty.fail(
            "stall_head", times=3, seconds=5, match=lambda request: request.key == "a" and request.method == "GET"
        )
        check(store)


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_changed_object_is_an_error(faulty: FaultyServer, connect_faulty: Connect, when: str) -> None:
    """Parts of two versions are never mixed."""
    faulty.objects["a"] = DATA
    with connect_faulty(fetch=FetchConfig(part_bytes=64 * KIB, requests_min=1, requests_max=1), retry=FAST) as store:
        info = store.stat("a")
        buffer = bytearray(len(DATA) - 1)
        item = PlanItem("a", ByteRange(0, len(buffer)), etag=info.etag) if when == "before" else None
        asked: Any = (item, buffer) if item is not None else ("a", ByteRange(0, len(buffer)), buffer)
        if when == "between":
            faulty.fail("change", times=1, match="a")
        else:
            faulty.objects["a"] = OTHER
        with pytest.raises(ObjectChangedError, match="a"):
            list(store.read_into([asked]))


def test_a_server_without_ranges(faulty: FaultyServer, connect_faulty: Connect) -> None:
    """A whole object is then read by one request, into the same memory, after the refused ones have ended."""
    faulty.objects["a"] = DATA
    faulty.fail("chunked_whole", times=1000, match=lambda request: request.method == "GET")
    buffer = bytearray(len(DATA))
    with connect_faulty(fetch=SMALL_PARTS, retry=FAST) as store:
        assert list(store.read_into([("a", None, buffer)])) == [0]
        assert buffer == DATA
        with pytest.raises(StoreError, match="a"):
            list(store.read_into([("a", ByteRange(1, 1_500_001), bytearray(1_500_000))]))


def test_through_a_cache(faulty: FaultyServer, connect_faulty: Connect, tmp_path: Path) -> None:
    """Blocks are kept although the caller may change its memory at once, and the second time nothing is requested."""
    faulty.objects["a"] = DATA
    with connect_faulty(cache=CacheConfig(tmp_path, 1 << 30), retry=FAST, fetch=SMALL_PARTS) as store:
        check(store)
        requests_count = len(faulty.requests)
        check(store)
    assert sum(request.method == "GET" for request in faulty.requests[requests_count:]) == 0
