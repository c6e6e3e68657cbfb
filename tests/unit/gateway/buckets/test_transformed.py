"""Access points with a transform: keys, listings, ranges that the transform maps."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway_support.results import (
    FunctionTransform,
    get,
    open_results,
    point_of,
    request_of,
    swap_case,
)
from penstock.errors import ConfigError, ObjectMissingError
from penstock.gateway.buckets.sources import KeyRenaming
from penstock.gateway.buckets.transformed import TransformedBucket
from penstock.gateway.objects import S3Error
from penstock.types import ByteRange, ListPage, Page

OBJECTS = {
    "b/1.tar": b"one",
    "b/2.tar": b"second",
    "b/deep/3.tar": b"third one",
    "b/readme.txt": b"text",
    "c.tar": b"c",
}


async def _pages(point: TransformedBucket, operation: ListPage) -> tuple[list[tuple[str, int]], list[str], int]:
    """Return the objects and prefixes of all pages, and their number."""
    objects: list[tuple[str, int]] = []
    prefixes: list[str] = []
    for count in range(1, 100):
        page = await point.list_objects(request_of(""), operation)
        assert isinstance(page, Page)
        objects += [(info.key, info.size_bytes) for info in page.objects]
        prefixes += page.prefixes
        if page.next_token is None:
            return objects, prefixes, count
        operation = operation._replace(token=page.next_token)
    raise AssertionError("the listing does not end")


async def _upper_twice(source: Any, arguments: Any, output: Any) -> None:
    async for piece in source.read():
        await output.write(bytes(piece).upper() * 2)


@pytest.mark.parametrize("keys_max", [1, 2, 1000])
@pytest.mark.parametrize(
    ("mode", "factor"), [("transform", 2), ("source", 1), ("known-only", None)], ids=["transform", "source", "known"]
)
def test_listings_tell_the_sizes_that_their_mode_promises(
    tmp_path: Path, mode: str, factor: int | None, keys_max: int
) -> None:
    """True sizes, sizes of sources, or only what is known; in pages of any size, without keys that are not served."""

    async def test() -> None:
        results = open_results(tmp_path)
        point = point_of(
            FunctionTransform(_upper_twice),
            results,
            dict(OBJECTS),
            list_sizes=mode,
            renamed_suffixes={".tar": ".tfrecord"},
        )
        await get(point, "b/2.tfrecord")
        wanted = {}
        for key, data in OBJECTS.items():
            if key.endswith(".tar"):
                times = 2 if key == "b/2.tar" else factor
                if times is not None:
                    wanted[key.replace(".tar", ".tfrecord")] = times * len(data)
        objects, prefixes, _ = await _pages(point, ListPage(keys_max=keys_max))
        assert (dict(objects), prefixes) == (wanted, [])
        assert [key for key, _ in objects] == sorted(wanted)
        objects, prefixes, _ = await _pages(point, ListPage("b/", "/", keys_max=keys_max))
        assert [key for key, _ in objects] == [key for key in sorted(wanted) if key.count("/") == 1]
        assert prefixes == ["b/deep/"]
        objects, prefixes, _ = await _pages(point, ListPage("b/2.tfr", "/", keys_max=keys_max))
        assert objects == [("b/2.tfrecord", 12)]
        after = ListPage(start_after="b/2.tfrecord", keys_max=keys_max)
        assert [key for key, _ in (await _pages(point, after))[0]] == [
            key for key in sorted(wanted) if key > "b/2.tfrecord"
        ]
        await results.close()

    asyncio.run(test())


def test_a_listing_tells_of_the_results_that_readers_get(tmp_path: Path) -> None:
    """A transform may depend on any parameter of the query, but those of the listing itself make no other result."""

    async def test() -> None:
        results = open_results(tmp_path)
        transform = FunctionTransform(_upper_twice)
        point = point_of(transform, results, dict(OBJECTS))
        etag = (await point.head(request_of("c.tar", query={"epoch": "1"}))).etag
        asked = {
            "list-type": "2",
            "prefix": "c",
            "delimiter": "/",
            "encoding-type": "url",
            "max-keys": "9",
            "epoch": "1",
        }
        page = await point.list_objects(request_of("", query=asked), ListPage("c", "/"))
        assert isinstance(page, Page)
        assert [info.etag for info in page.objects] == [etag]
        assert transform.runs_count == 1
        await results.close()

    asyncio.run(test())


def test_a_page_ends_before_the_first_result_that_is_not_ready(tmp_path: Path) -> None:
    """Producing sizes takes a bounded time for each page, and each page has at least one key."""

    async def slow(source: Any, arguments: Any, output: Any) -> None:
        await asyncio.sleep(0.03 if source.key == "b/2.tar" else 0)
        await _upper_twice(source, arguments, output)

    async def test() -> None:
        results = open_results(tmp_path)
        transform = FunctionTransform(slow)
        point = point_of(transform, results, dict(OBJECTS))
        point._listing_s_max = 0.01
        objects, _, pages_count = await _pages(point, ListPage())
        assert objects == [(key, 2 * len(data)) for key, data in sorted(OBJECTS.items())]
        assert pages_count > 1
        await results.close()

    asyncio.run(test())


def test_an_object_that_cannot_be_produced_is_left_out(tmp_path: Path) -> None:
    """One broken object does not spoil the listing, and is never listed with a size that it has not."""

    async def picky(source: Any, arguments: Any, output: Any) -> None:
        if source.key.endswith(".txt"):
            raise S3Error("BadSource", "It is no tar.", status=422)
        await _upper_twice(source, arguments, output)

    async def test() -> None:
        results = open_results(tmp_path)
        point = point_of(FunctionTransform(picky), results, dict(OBJECTS))
        objects, _, _ = await _pages(point, ListPage())
        assert [key for key, _ in objects] == [key for key in sorted(OBJECTS) if not key.endswith(".txt")]
        await results.close()

    asyncio.run(test())


def test_only_renamed_keys_are_served(tmp_path: Path) -> None:
    """With renamed suffixes, neither the source's own key nor an object without the suffix can be read."""

    async def test() -> None:
        results = open_results(tmp_path)
        point = point_of(FunctionTransform(swap_case), results, dict(OBJECTS), renamed_suffixes={".tar": ".tfrecord"})
        assert await get(point, "c.tfrecord") == b"C"
        for key in ("c.tar", "b/readme.txt", "nothing.tfrecord"):
            with pytest.raises(ObjectMissingError):
                await get(point, key)
        await results.close()

    asyncio.run(test())


def test_mapped_ranges_are_produced_alone(tmp_path: Path) -> None:
    """A transform that maps ranges produces just the range, and nothing is kept."""

    async def mapped(source: Any, arguments: Any, output: Any) -> None:
        start, _, end = arguments["span"].partition("-")
        output.begin({"Content-Type": "text/mapped"})
        async for piece in source.read(ByteRange(int(start), int(end))):
            await output.write(bytes(piece).upper())

    async def test() -> None:
        results = open_results(tmp_path)
        transform = FunctionTransform(mapped, maps_ranges=True, size=lambda info: info.size_bytes)
        point = point_of(transform, results, {"a": b"abcdefghij"})
        opened = await point.open(request_of("a"), None)
        assert opened.head.size_bytes == 10
        assert await get(point, "a", ByteRange(2, 5)) == b"CDE"
        assert await get(point, "a") == b"ABCDEFGHIJ"
        assert transform.runs_count == 2
        await results.close()
        assert not list((tmp_path / "cache" / "v1" / "entries").glob("*/*"))

    asyncio.run(test())


def test_sizes_known_beforehand_need_no_run(tmp_path: Path) -> None:
    """HEAD and listings of a transform that knows its sizes run nothing."""

    async def test() -> None:
        results = open_results(tmp_path)
        transform = FunctionTransform(swap_case, size=lambda info: info.size_bytes)
        point = point_of(transform, results, dict(OBJECTS))
        assert (await point.head(request_of("c.tar"))).size_bytes == 1
        objects, _, _ = await _pages(point, ListPage())
        assert dict(objects) == {key: len(data) for key, data in OBJECTS.items()}
        assert transform.runs_count == 0
        assert await get(point, "c.tar") == b"C"
        await results.close()

    asyncio.run(test())


@pytest.mark.parametrize("suffixes", [{"": ".a"}, {".a": "x/"}, {".a/": ".b"}, {".a": ".c", ".b": ".c"}])
def test_suffixes_that_cannot_be_renamed_are_refused(suffixes: dict[str, str]) -> None:
    """Empty suffixes, folders, and two suffixes that become the same one are errors of the configuration."""
    with pytest.raises(ConfigError):
        KeyRenaming(suffixes)


def test_the_longest_suffix_is_renamed() -> None:
    """A key with .tar.gz is not taken for one with .gz, in either direction."""
    renaming = KeyRenaming({".gz": ".txt", ".tar.gz": ".tar"})
    assert renaming.result_key("a.tar.gz") == "a.tar"
    assert renaming.result_key("a.gz") == "a.txt"
    assert renaming.source_keys("a.tar") == ["a.tar.gz"]
    assert renaming.source_keys("a.tar.txt") == []
    assert renaming.source_prefix("x/a.t") == "x/a"
