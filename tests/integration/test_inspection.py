"""One listing of a URL: what is said of very many objects from a sample of their keys, and how few requests that takes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

import penstock as ps
from penstock.loader.inspection import list_url, look_into

if TYPE_CHECKING:
    from penstock.store import Store
    from servers.faulty import FaultyServer


def numbered(count: int) -> Iterator[str]:
    """Numbers with leading zeros below one folder; the last thousand is not full."""
    return (f"x/sample-{number:07d}.jpg" for number in range(count))


def in_folders(count: int) -> Iterator[str]:
    """Folders of two levels, as those of classes."""
    return (f"x/n{number % 70:04d}/part{number % 3}/{number:07d}.jpg" for number in range(count))


def digests(count: int) -> Iterator[str]:
    """Names that are as good as random, in folders that no name is equal to."""
    chance = random.Random(1)
    return (f"x/{chance.getrandbits(64):016x}" for _ in range(count))


@pytest.mark.parametrize(
    ("names", "count", "page_keys"), [(numbered, 9000, 4), (in_folders, 9000, 4), (digests, 6000, 8)]
)
def test_very_many_objects_are_sampled(
    names: Any, count: int, page_keys: int, faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more objects than are listed, number and bytes are near the truth, with fewer requests than a listing."""
    monkeypatch.setattr("penstock.loader.inspection.KEYS_PER_PAGE", page_keys)
    faulty.page_keys_max = page_keys
    for number, key in enumerate(names(count)):
        faulty.objects[key] = bytes(1 + number % 2)
    faulty.objects["x/.penstock/index"] = bytes(100_000)
    faulty.objects["y"] = b"another folder"
    listing = list_url(f"{faulty.url}/x", objects_max=100, endpoint_url=faulty.endpoint_url, anonymous=True)
    with listing.store:
        assert listing.is_estimated
        assert len(listing.infos) == 100
        assert listing.objects_count == pytest.approx(count, rel=0.1)
        assert listing.size_bytes == pytest.approx(1.5 * count, rel=0.1)
        assert "more than the 100 objects that were looked at: number and size are estimates" in listing.sampled_text
    assert len(faulty.requests) < 0.8 * count / page_keys


def test_all_are_listed_if_they_are_few(faulty: FaultyServer) -> None:
    """Number and size are exact, by one request; empty objects and indexes are no data."""
    for number in range(20):
        faulty.objects[f"x/{number}.bin"] = bytes(number)
    faulty.objects["x/.penstock/index"] = bytes(10)
    listing = list_url(f"{faulty.url}/x/", objects_max=20, endpoint_url=faulty.endpoint_url, anonymous=True)
    with listing.store:
        assert (listing.objects_count, listing.size_bytes, listing.is_estimated) == (19, 190, False)
        assert (listing.formats, listing.sampled_text) == ({".bin": 19}, "")
    assert len(faulty.requests) == 1


def test_what_the_objects_hold(user: Any, bucket: str, s3_store: Store) -> None:
    """Pairs are one sample if groups are wanted; the listing is not repeated."""
    for number in range(4):
        s3_store.write(f"x/{number}.bin", bytes(1000))
        s3_store.write(f"x/{number}.cls", b"7")
    listing = list_url(f"s3://{bucket}/x/")
    with listing.store:
        pairs, single = look_into(listing), look_into(listing, has_groups=False)
    assert (pairs.format, len(pairs.samples), pairs.member_bytes) == ("objects", 4, {"bin": 1000.0, "cls": 1.0})
    assert (len(single.samples), single.stored_bytes) == (8, 500.5)


def test_without_permission_to_list(faulty: FaultyServer) -> None:
    """The error says what needs no such right."""
    faulty.objects["x/a.bin"] = bytes(10)
    faulty.fail("403", match=lambda request: not request.key, times=None)
    where: Any = {"endpoint_url": faulty.endpoint_url, "anonymous": True}
    with pytest.raises(ps.errors.AccessDeniedError) as caught:
        list_url(f"{faulty.url}/x/", **where)
    assert "a single object needs no right to list" in str(caught.value)
