"""Ranges of objects whose size nobody told beforehand, at every kind of store: cut at the end, or refused past it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import penstock as ps
from penstock.config import KIB, MIB, FetchConfig
from penstock.errors import ObjectChangedError, SpanError
from penstock.store import MemoryStore, Store
from penstock.types import ByteRange
from servers.faulty import FaultyServer

SIZES = (0, 1, 1000, 64 * KIB, 64 * KIB + 1, 150_000, 400_000, 1 * MIB)
OBJECTS = {str(size): random.Random(size).randbytes(size) for size in SIZES}
ENDS = st.one_of(st.integers(1, 2 * MIB), st.sampled_from(SIZES[1:]), st.sampled_from([30_000_000, 10**15]))
ANSWERS = ["rightly", "chunked", "ignore_range", "chunked_whole"]


@pytest.fixture(scope="module", params=["memory", *ANSWERS])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    if request.param == "memory":
        yield MemoryStore(OBJECTS)
        return
    with FaultyServer(OBJECTS) as server:
        if request.param != "rightly":
            server.fail(request.param, times=None)
        with ps.connect(server.url, endpoint_url=server.endpoint_url, anonymous=True) as store:
            store.obeys_ranges = request.param in ("rightly", "chunked")  # type: ignore[attr-defined]
            yield store


def answers(store: Store, size: int, span: ByteRange) -> list[Any]:
    """What each verb gives for `span`: its bytes, or the error."""
    key = str(size)
    found: list[Any] = []
    for read in (
        lambda: bytes(store.read(key, span).data),
        lambda: bytes(next(store.read_many([(key, span)])).data),
        lambda: b"".join(chunk.data for chunk in store.read_parts([(key, span)])),
    ):
        try:
            found.append(read())
        except SpanError as error:
            found.append(type(error))
    (answer,) = store.try_read_many([(key, span)])
    found.append(bytes(answer.data) if isinstance(answer, ps.Blob) else type(answer))
    with store.open(key) as file:
        file.seek(span.start)
        found.append(file.read(min(span.length_bytes, 2 * MIB)) or SpanError)
    return found


@pytest.mark.server
@settings(max_examples=15)
@given(
    size=st.sampled_from(SIZES), start=st.integers(0, 2 * MIB), length=ENDS, part_kib=st.sampled_from([64, 100, 8192])
)
def test_a_range_is_cut_at_the_end_of_its_object(
    store: Store, size: int, start: int, length: int, part_kib: int
) -> None:
    """Every verb gives the bytes that the range and the object share, or ``SpanError`` where there are none."""
    store.fetch_config = FetchConfig(part_bytes=part_kib * KIB)
    if not getattr(store, "obeys_ranges", True):
        size, start = min(size, 64 * KIB), 0  # beyond, the whole object is no answer to a range
        length = max(length, size, 1)
    expected = OBJECTS[str(size)][start : start + length] or SpanError
    assert answers(store, size, ByteRange(start, start + length)) == [expected] * 5


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with FaultyServer({"k": bytes(5 * MIB)}) as server:
        yield server


def connect(server: FaultyServer) -> Store:
    store = ps.connect(server.url, endpoint_url=server.endpoint_url, anonymous=True)
    store.fetch_config = FetchConfig(part_bytes=2 * MIB)
    return store


@pytest.mark.server
@pytest.mark.parametrize(("end", "count"), [(1000, 1), (3 * MIB, 1), (5 * MIB, 3), (30_000_000, 3), (10**15, 3)])
def test_no_request_is_made_for_bytes_past_the_end(server: FaultyServer, end: int, count: int) -> None:
    """A range costs a request per part of what there is: one where it is small, and none to learn the size."""
    with connect(server) as store:
        assert len(store.read("k", ByteRange(0, end))) == min(end, 5 * MIB)
    assert len(server.requests) == count


@pytest.mark.server
def test_parts_of_a_range_are_of_one_version(server: FaultyServer) -> None:
    """An object that is replaced after the first part of a range was answered is an ``ObjectChangedError``."""
    server.fail("change", times=1)
    with connect(server) as store, pytest.raises(ObjectChangedError):
        store.read("k", ByteRange(0, 30_000_000))
