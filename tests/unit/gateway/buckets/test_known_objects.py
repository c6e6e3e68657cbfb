"""Which bytes are kept in memory, for how long, and what they are charged to."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.cache import CacheConfig, Cached
from penstock.fetch import Budget
from penstock.gateway.buckets import known_objects
from penstock.gateway.buckets.known_objects import BodyCache, KnownObjects
from penstock.store import MemoryStore
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 64 << 10
DATA = {name: name.encode() * SIZE for name in "abcd"} | {"large": bytes((256 << 10) + 1)}
MIB = 1 << 20


@pytest.fixture
def cached(tmp_path: Path) -> Iterator[Cached]:
    """A cache that has all objects."""
    config = CacheConfig(tmp_path / "cache", 64 * MIB, metadata_ttl_s=3600)
    with Cached(MemoryStore(DATA), config) as store:
        for key in DATA:
            store.read(key)
            wait_stored(store, key)
        yield store


def wait_stored(store: Cached, key: str) -> None:
    """Wait until the bytes are at hand, because a body is returned before it is stored."""
    end_s = time.monotonic() + 10
    info = store.stat_nowait(key)
    assert info is not None
    while store.read_nowait(info, ByteRange(0, info.size_bytes)) is None:
        assert time.monotonic() < end_s
        time.sleep(0.005)


def read(objects: KnownObjects, key: str, span: ByteRange | None = None) -> bytes:
    """Bytes of an object that is at hand."""
    known = objects.get(key)
    assert known is not None
    body = known.read_nowait(span or ByteRange(0, len(DATA[key])))
    assert body is not None
    assert body.readonly
    return bytes(body)


def test_the_second_read_keeps_a_small_object(cached: Cached) -> None:
    """What is read twice is kept, and then read without its file; the reads count as hits of the cache."""
    bodies = BodyCache(Budget(8 * MIB))
    objects = KnownObjects(cached, bodies)
    for used_bytes in (0, SIZE):
        assert read(objects, "a") == DATA["a"]
        assert bodies.used_bytes == used_bytes
    for path in Path(cached.config.path, "v1", "entries").glob("*/*b"):
        path.unlink()
    before = cached.counts.hit_count
    assert read(objects, "a") == DATA["a"]
    assert read(objects, "a", ByteRange(5, 9)) == b"aaaa"
    assert cached.counts.hit_count == before + 2
    assert objects.get("b").read_nowait(ByteRange(0, SIZE)) is None  # type: ignore[union-attr]


def test_parts_and_large_objects_are_not_kept(cached: Cached) -> None:
    """Ranges keep nothing, and neither do objects of more than 256 KiB."""
    bodies = BodyCache(Budget(8 * MIB))
    objects = KnownObjects(cached, bodies)
    for _ in range(3):
        read(objects, "a", ByteRange(1, 9))
        read(objects, "large")
    assert bodies.used_bytes == 0


def test_the_bodies_take_an_eighth_of_the_budget(cached: Cached) -> None:
    """Further objects are not kept until old ones have had their time; closing gives everything back."""
    budget = Budget(8 * 2 * SIZE)
    bodies = BodyCache(budget)
    objects = KnownObjects(cached, bodies)
    for _ in range(2):
        for key in "abcd":
            assert read(objects, key) == DATA[key]
    assert bodies.used_bytes == 2 * SIZE == budget.statistics().used_bytes
    bodies.close()
    assert (bodies.used_bytes, budget.statistics().used_bytes) == (0, 0)


def test_old_bodies_are_read_again_and_make_room(cached: Cached, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body whose time is over is not used, and what was not read since then makes room for others."""
    monkeypatch.setattr(known_objects, "_KEPT_S_MAX", 0.0)
    budget = Budget(8 * SIZE)
    bodies = BodyCache(budget)
    objects = KnownObjects(cached, bodies)
    for key in "abcd":
        for _ in range(3):
            assert read(objects, key) == DATA[key]
            known = objects.get(key)
            assert known is not None
            assert bodies.get(known) is None
        assert bodies.used_bytes == SIZE == budget.statistics().used_bytes


def test_a_budget_that_lacks_bytes_keeps_nothing(cached: Cached) -> None:
    """Reading goes on from the page cache if the budget is used up by others."""
    budget = Budget(8 * MIB)
    assert budget.reserve(8 * MIB)
    bodies = BodyCache(budget)
    objects = KnownObjects(cached, bodies)
    for _ in range(3):
        assert read(objects, "a") == DATA["a"]
    assert bodies.used_bytes == 0
    budget.release(8 * MIB)
