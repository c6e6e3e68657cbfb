"""Results in one process: produced once, read while they are being produced, kept."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from gateway_support.results import (
    BLOCK_BYTES,
    FunctionTransform,
    Gate,
    get,
    open_results,
    point_of,
    read_all,
    request_of,
    swap_case,
)
from penstock.errors import ObjectChangedError
from penstock.gateway.objects import S3Error
from penstock.gateway.results.context import ResultsConfig
from penstock.types import ByteRange

TEXT = random.Random(1).randbytes(5 * BLOCK_BYTES + 1234)


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test on an event loop."""
    asyncio.run(test())  # type: ignore[arg-type]


def test_a_result_is_produced_once_for_all_its_ranges(tmp_path: Path) -> None:
    """Ranges one after another, and all at once, cost one run."""

    async def test() -> None:
        results = open_results(tmp_path)
        transform = FunctionTransform(swap_case)
        point = point_of(transform, results, {"a": TEXT})
        wanted = TEXT.swapcase()
        spans = [ByteRange(start, min(len(TEXT), start + 7000)) for start in range(0, len(TEXT), 7000)]
        together = await asyncio.gather(*(get(point, "a", span) for span in spans))
        assert b"".join(together) == wanted
        assert b"".join([await get(point, "a", span) for span in spans]) == wanted
        assert await get(point, "a") == wanted
        assert transform.runs_count == 1
        await results.close()

    run(test)


def test_a_result_is_there_after_a_restart(tmp_path: Path) -> None:
    """A new process reads size, headers and bytes from the disk, without a run."""

    async def test() -> None:
        transform = FunctionTransform(swap_case)
        etags = set()
        for _ in range(2):
            results = open_results(tmp_path)
            point = point_of(transform, results, {"a": TEXT})
            assert await get(point, "a") == TEXT.swapcase()
            head = await point.head(request_of("a", method="HEAD"))
            assert (head.size_bytes, head.headers["Content-Type"]) == (len(TEXT), "text/plain")
            etags.add(head.etag)
            await results.close()
        assert transform.runs_count == 1
        assert len(etags) == 1

    run(test)


def test_bytes_are_sent_before_the_result_is_complete(tmp_path: Path) -> None:
    """The first byte goes out while the transform runs, and a range is served as soon as it was produced."""

    async def test() -> None:
        results = open_results(tmp_path)
        gate = Gate(TEXT)
        transform = FunctionTransform(gate)
        point = point_of(transform, results, {"a": b"source"})
        opened = await point.open(request_of("a"), None)
        assert opened.head.size_bytes is None
        pieces = opened.read(None)
        gate.allow(10)
        found = bytes(await anext(pieces))
        assert found == TEXT[:10]
        gate.allow(2 * BLOCK_BYTES)
        assert (
            await get(point, "a", ByteRange(BLOCK_BYTES - 5, BLOCK_BYTES + 5))
            == TEXT[BLOCK_BYTES - 5 : BLOCK_BYTES + 5]
        )
        gate.allow()
        async for piece in pieces:
            found += bytes(piece)
        assert found == TEXT
        assert transform.runs_count == 1
        await results.close()

    run(test)


def test_a_result_whose_size_is_announced_ends_with_its_run(tmp_path: Path) -> None:
    """The last announced byte is sent only when the transform has ended without an error."""

    async def failing(source: object, arguments: object, output: object) -> None:
        output.begin({}, size_bytes=100)  # type: ignore[attr-defined]
        await output.write(bytes(100))  # type: ignore[attr-defined]
        raise ValueError("after the last byte")

    async def test() -> None:
        results = open_results(tmp_path)
        point = point_of(FunctionTransform(failing), results, {"a": b"source"})
        opened = await point.open(request_of("a"), None)
        found = bytearray()

        async def read() -> None:
            async for piece in opened.read(None):
                found.extend(piece)

        with pytest.raises(S3Error):
            await read()
        assert len(found) < 100
        await results.close()

    run(test)


def test_a_range_of_an_announced_result_that_fails(tmp_path: Path) -> None:
    """Ranges are sent as they are made; those with the last byte fail if the transform does, and nothing is kept."""

    async def failing(source: object, arguments: object, output: object) -> None:
        output.begin({}, size_bytes=len(TEXT))  # type: ignore[attr-defined]
        await output.write(TEXT)  # type: ignore[attr-defined]
        raise S3Error("Late", "after the last byte", status=400)

    async def test() -> None:
        transform = FunctionTransform(failing)
        results = open_results(tmp_path)
        point = point_of(transform, results, {"a": TEXT})
        assert await get(point, "a", ByteRange(0, 10)) == TEXT[:10]
        for span in (ByteRange(len(TEXT) - 1, len(TEXT)), ByteRange(0, len(TEXT)), None):
            with pytest.raises(S3Error, match="Late"):
                await get(point, "a", span)
        assert transform.runs_count > 1
        await results.close()

    run(test)


def test_a_failed_run_leaves_nothing_and_the_next_read_tries_again(tmp_path: Path) -> None:
    """All readers of a run that fails half-way get the error; the next one gets the whole result."""

    async def test() -> None:
        results = open_results(tmp_path)
        gate = Gate(TEXT)
        transform = FunctionTransform(gate)
        point = point_of(transform, results, {"a": b"source"})
        gate.allow(3 * BLOCK_BYTES, error=S3Error("Teapot", "No coffee.", status=418))
        answers = await asyncio.gather(get(point, "a"), get(point, "a", ByteRange(0, 80_000)), return_exceptions=True)
        assert [getattr(answer, "status", None) for answer in answers] == [418, 418]
        assert transform.runs_count == 1
        gate.allow()
        assert await get(point, "a") == TEXT
        assert transform.runs_count == 2
        await results.close()
        kept = [path.name for path in (tmp_path / "cache" / "v1" / "entries").glob("*/*")]
        assert sorted(name.partition(".")[2] for name in kept) == ["0b", "1b", "2b", "3b", "4b", "5b", "r"]

    run(test)


def test_a_source_that_changes_under_way_fails_the_read(tmp_path: Path) -> None:
    """The bytes of two versions are never mixed, and nothing of them is kept; then the new version is read."""

    async def test() -> None:
        results = open_results(tmp_path)
        objects = {"a": TEXT}

        async def changing(source, arguments, output):  # type: ignore[no-untyped-def]
            async for piece in source.read(ByteRange(0, 10)):
                await output.write(piece)
            if objects["a"] == TEXT:
                objects["a"] = b"another version"
            async for piece in source.read(ByteRange(10, 15)):
                await output.write(piece)

        point = point_of(FunctionTransform(changing), results, objects)
        with pytest.raises(ObjectChangedError):
            await get(point, "a")
        assert await get(point, "a") == b"another version"
        await results.close()

    run(test)


@pytest.mark.parametrize(
    ("options", "announced_bytes", "status"),
    [({"output_bytes_max": 1000}, None, 500), ({}, 10, 500), ({}, 10**6, 500), ({"time_s_max": 0.05}, None, 504)],
    ids=["output", "longer-than-announced", "shorter-than-announced", "time"],
)
def test_limits_end_a_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, float],
    announced_bytes: int | None,
    status: int,
) -> None:
    """A transform that floods, hangs or lies about its size is stopped, and the reader gets an error."""
    monkeypatch.setattr("penstock.gateway.buckets.transformed._GRACE_S", 0.0)

    async def test() -> None:
        results = open_results(tmp_path)

        async def function(source, arguments, output):  # type: ignore[no-untyped-def]
            if announced_bytes is not None:
                output.begin({}, size_bytes=announced_bytes)
            if "time_s_max" in options:
                await asyncio.Event().wait()
            await output.write(bytes(2000))

        point = point_of(FunctionTransform(function), results, {"a": b""}, **options)
        with pytest.raises(S3Error) as caught:
            await get(point, "a")
        assert caught.value.status == status
        await results.close()

    run(test)


@pytest.mark.parametrize("place", ["no-cache", "too-large", "read-only"])
def test_a_result_that_cannot_be_kept_is_read_all_the_same(tmp_path: Path, place: str) -> None:
    """Memory stays bounded and the producer waits for its readers; a late reader has the result produced again."""

    async def test() -> None:
        results = open_results(None if place == "no-cache" else tmp_path, cache_bytes=40 * BLOCK_BYTES)
        if place == "read-only":
            results.storage.directory.reserve = None  # type: ignore[attr-defined]
        text = random.Random(2).randbytes(100 * BLOCK_BYTES)
        transform = FunctionTransform(swap_case)
        point = point_of(transform, results, {"a": text})
        spans = [None, None, ByteRange(0, len(text)), ByteRange(70 * BLOCK_BYTES - 7, 90 * BLOCK_BYTES)]
        found = await asyncio.gather(*(get(point, "a", span) for span in spans))
        for span, data in zip(spans, found, strict=True):
            start, end = span or (0, len(text))
            assert data == text[start:end].swapcase()
        assert transform.runs_count <= 2
        await results.close()
        assert transform.ended_count == transform.runs_count

    run(test)


def test_a_corrupt_block_is_produced_again(tmp_path: Path) -> None:
    """A block whose checksum is wrong is never sent; the result is produced again."""

    async def test() -> None:
        transform = FunctionTransform(swap_case)
        results = open_results(tmp_path)
        assert await get(point_of(transform, results, {"a": TEXT}), "a") == TEXT.swapcase()
        await results.close()
        block = next(path for path in (tmp_path / "cache").rglob("*.3b"))
        data = bytearray(block.read_bytes())
        data[-1] ^= 1
        block.write_bytes(data)
        results = open_results(tmp_path)
        point = point_of(transform, results, {"a": TEXT})
        assert await get(point, "a") == TEXT.swapcase()
        assert transform.runs_count == 2
        assert (
            await get(point, "a", ByteRange(3 * BLOCK_BYTES, 4 * BLOCK_BYTES))
            == TEXT[3 * BLOCK_BYTES : 4 * BLOCK_BYTES].swapcase()
        )
        assert transform.runs_count == 2
        await results.close()

    run(test)


def test_a_corrupt_small_result_is_produced_again(tmp_path: Path) -> None:
    """A result of one block is verified at every read, and read from the disk only if it is what was produced."""

    async def read(transform: FunctionTransform) -> bytes:
        results = open_results(tmp_path, config=ResultsConfig(recent_bytes_max=0))
        data = await get(point_of(transform, results, {"a": TEXT[:5000]}), "a")
        await results.close()
        return data

    transform = FunctionTransform(swap_case)
    for runs_count, damage in ((1, False), (1, False), (1, True), (2, False)):
        assert asyncio.run(read(transform)) == TEXT[:5000].swapcase()
        assert transform.runs_count == runs_count
        if damage:
            block = next(path for path in (tmp_path / "cache").rglob("*.0b"))
            block.write_bytes(block.read_bytes()[:-1] + b"?")


def test_a_run_goes_on_when_its_readers_have_left(tmp_path: Path) -> None:
    """A client that hangs up does not waste the work: the result is complete for the next one."""

    async def test() -> None:
        results = open_results(tmp_path)
        gate = Gate(TEXT)
        transform = FunctionTransform(gate)
        point = point_of(transform, results, {"a": b""})
        gate.allow(100)
        opened = await point.open(request_of("a"), None)
        pieces = opened.read(None)
        await anext(pieces)
        await pieces.aclose()  # type: ignore[attr-defined]
        await opened.close()
        gate.allow()
        assert await get(point, "a") == TEXT
        assert transform.runs_count == 1
        await results.close()

    run(test)


def test_close_ends_runs(tmp_path: Path) -> None:
    """Closing cancels what runs, and the readers get an error."""

    async def test() -> None:
        results = open_results(tmp_path)
        transform = FunctionTransform(Gate(TEXT))
        reading = asyncio.create_task(get(point_of(transform, results, {"a": b""}), "a"))
        while not transform.runs_count:
            await asyncio.sleep(0)
        await results.close()
        assert transform.ended_count == 1
        with pytest.raises(Exception, match=r"ending|failed|closed"):
            await reading

    run(test)


def test_conditions_need_no_run(tmp_path: Path) -> None:
    """Opening a result tells its ETag without running the transform."""

    async def test() -> None:
        results = open_results(tmp_path)
        transform = FunctionTransform(swap_case)
        point = point_of(transform, results, {"a": TEXT})
        opened = await point.open(request_of("a"), None)
        other = await point.open(request_of("a", query={"x": "1"}), None)
        assert opened.head.etag != other.head.etag
        await opened.close()
        await other.close()
        assert transform.runs_count == 0
        await results.close()

    run(test)


def test_spooling_knows_the_length_before_the_first_byte(tmp_path: Path) -> None:
    """With spool, the head that is made after the first piece has the size; with stream, it never has."""

    async def test() -> None:
        results = open_results(tmp_path)
        gate = Gate(TEXT)
        point = point_of(FunctionTransform(gate), results, {"a": b"", "b": b""})
        for key, length, wanted in (("a", "spool", len(TEXT)), ("b", "stream", None), ("a", "auto", len(TEXT))):
            gate.allow()
            opened = await point.open(request_of(key, x_penstock_length=length), None)
            pieces = opened.read(None)
            await anext(pieces)
            assert opened.head.size_bytes == wanted
            await pieces.aclose()  # type: ignore[attr-defined]
            await opened.close()
        with pytest.raises(S3Error, match="x-penstock-length"):
            await point.open(request_of("a", x_penstock_length="short"), None)
        await results.close()

    run(test)


def test_an_empty_result_is_a_result(tmp_path: Path) -> None:
    """A transform that writes nothing has a result of 0 bytes, which is kept."""

    async def test() -> None:
        results = open_results(tmp_path)
        transform = FunctionTransform(Gate(b""))
        point = point_of(transform, results, {"a": b""})
        assert await get(point, "a") == b""
        assert (await point.head(request_of("a"))).size_bytes == 0
        assert transform.runs_count == 1
        assert await read_all(await point.open(request_of("a"), None)) == b""
        await results.close()

    run(test)


def _random_transform() -> FunctionTransform:
    async def function(source, arguments, output):  # type: ignore[no-untyped-def]
        await output.write(random.randbytes(3 * BLOCK_BYTES))

    return FunctionTransform(function, is_deterministic=False)


def test_ranges_of_one_read_fit_together_without_determinism(tmp_path: Path) -> None:
    """Within the hold time all requests get one result; afterwards it is gone, and the next read gets another one."""

    async def test() -> None:
        results = open_results(tmp_path, config=ResultsConfig(hold_s=0.2))
        transform = _random_transform()
        point = point_of(transform, results, {"a": b""})
        first = await point.open(request_of("a"), None)
        whole = await read_all(first)
        cut = 2 * BLOCK_BYTES + 7
        assert await get(point, "a", ByteRange(0, cut)) + await get(point, "a", ByteRange(cut, len(whole))) == whole
        assert await get(point, "a", if_match=first.head.etag) == whole
        assert transform.runs_count == 1
        while list((tmp_path / "cache" / "v1" / "entries").glob("*/*")):
            await asyncio.sleep(0.02)
        second = await point.open(request_of("a", if_match=first.head.etag), None)
        assert second.head.etag != first.head.etag
        assert await read_all(second) != whole
        await results.close()

    run(test)


def test_what_a_transform_says_when_it_has_started_counts(tmp_path: Path) -> None:
    """A transform may become one that is not deterministic when its code is imported, after its bucket was made."""

    async def test() -> None:
        results = open_results(tmp_path)
        transform = _random_transform()
        transform.is_deterministic = True
        point = point_of(transform, results, {"a": b""})
        transform.is_deterministic = False
        transform_etag = (await point.open(request_of("a"), None)).head.etag
        transform.is_deterministic = True
        assert (await point.open(request_of("a"), None)).head.etag != transform_etag
        await results.close()

    run(test)


def test_an_epoch_makes_a_result_that_is_kept(tmp_path: Path) -> None:
    """The epoch of the query, the header or the access point is part of the ETag."""

    async def test() -> None:
        results = open_results(tmp_path)
        transform = _random_transform()
        point = point_of(transform, results, {"a": b""})
        etags = []
        for request in (
            request_of("a", query={"x-penstock-epoch": "3"}),
            request_of("a", query={"x-penstock-epoch": "3"}),
            request_of("a", x_penstock_epoch="4"),
            request_of("a", x_penstock_seed="4"),
        ):
            opened = await point.open(request, None)
            await read_all(opened)
            etags.append(opened.head.etag)
        assert (len(set(etags)), transform.runs_count) == (3, 3)
        await results.close()

    run(test)


def test_processes_share_a_held_result(tmp_path: Path) -> None:
    """A second process on the same cache gets the result that the first one holds."""

    async def test() -> None:
        first, second = open_results(tmp_path), open_results(tmp_path)
        transform = _random_transform()
        points = [point_of(transform, results, {"a": b""}) for results in (first, second)]
        assert await get(points[0], "a") == await get(points[1], "a")
        opened = [await point.open(request_of("a"), None) for point in points]
        assert opened[0].head.etag == opened[1].head.etag
        assert transform.runs_count == 1
        await first.close()
        await second.close()

    run(test)


def test_an_etag_of_another_result_is_not_believed(tmp_path: Path) -> None:
    """If-Match does not reach results of other transforms of the same source."""

    async def test() -> None:
        results = open_results(tmp_path)
        secret = point_of(FunctionTransform(swap_case), results, {"a": b"secret"})
        opened = await secret.open(request_of("a"), None)
        await read_all(opened)
        point = point_of(_random_transform(), results, {"a": b"secret"})
        other = await point.open(request_of("a", if_match=opened.head.etag), None)
        assert other.head.etag != opened.head.etag
        await results.close()

    run(test)


def test_processes_share_one_run(tmp_path: Path) -> None:
    """A second process on the same cache reads the blocks that the first one stores, while it stores them."""

    async def test() -> None:
        first, second = open_results(tmp_path), open_results(tmp_path)
        gate = Gate(TEXT)
        transform = FunctionTransform(gate)
        points = [point_of(transform, results, {"a": b""}) for results in (first, second)]
        gate.allow(3 * BLOCK_BYTES + 5)
        leading = asyncio.create_task(get(points[0], "a"))
        while transform.runs_count == 0:
            await asyncio.sleep(0)
        following = await points[1].open(request_of("a"), None)
        pieces = following.read(None)
        found = bytes(await anext(pieces))
        while len(found) < 3 * BLOCK_BYTES:
            found += bytes(await anext(pieces))
        gate.allow()
        async for piece in pieces:
            found += bytes(piece)
        assert found == await leading == TEXT
        assert transform.runs_count == 1
        await first.close()
        await second.close()

    run(test)


def test_a_follower_takes_over_from_a_failed_leader(tmp_path: Path) -> None:
    """If the process that produces a result gives up, another one that waits produces it."""

    async def test() -> None:
        first, second = open_results(tmp_path), open_results(tmp_path)
        gates = [Gate(TEXT), Gate(TEXT)]
        transforms = [FunctionTransform(gate) for gate in gates]
        points = [
            point_of(transform, results, {"a": b""})
            for transform, results in zip(transforms, (first, second), strict=True)
        ]
        gates[0].allow(2 * BLOCK_BYTES + 5)
        leading = asyncio.create_task(get(points[0], "a"))
        while transforms[0].runs_count == 0:
            await asyncio.sleep(0)
        following = asyncio.create_task(get(points[1], "a"))
        await asyncio.sleep(0)
        gates[1].allow()
        gates[0].allow(2 * BLOCK_BYTES + 5, error=S3Error("InternalError", "It broke.", status=500))
        with pytest.raises(S3Error):
            await leading
        assert await following == TEXT
        assert [transform.runs_count for transform in transforms] == [1, 1]
        await first.close()
        await second.close()

    run(test)
