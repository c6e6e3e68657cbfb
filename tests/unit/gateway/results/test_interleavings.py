"""Random interleavings of readers, a producer, evictions and failures, against the bytes themselves."""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway_support.results import BLOCK_BYTES, FunctionTransform, Gate, get, open_results, point_of
from penstock.checksums.combining import combined_crc
from penstock.checksums.crc32c import crc32c
from penstock.gateway.objects import S3Error
from penstock.gateway.results.context import ResultsConfig
from penstock.gateway.results.storage import iter_kept
from penstock.types import ByteRange

SIZE_BYTES = 9 * BLOCK_BYTES + 77
TEXT = random.Random(3).randbytes(SIZE_BYTES)

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("allow"), st.integers(0, SIZE_BYTES)),
        st.tuples(st.just("read"), st.integers(0, SIZE_BYTES - 1), st.integers(1, SIZE_BYTES), st.integers(0, 1)),
        st.tuples(st.just("leave"), st.integers(0, 10)),
        st.tuples(st.just("evict"), st.integers(0, 30)),
        st.tuples(st.just("fail")),
        st.tuples(st.just("pause"), st.integers(0, 3)),
    ),
    max_size=25,
)


@settings(max_examples=20)
@given(steps=STEPS, cache_blocks=st.sampled_from([None, 8, 12, 200]), recent_blocks=st.sampled_from([0, 2, 100]))
def test_whatever_happens_readers_get_the_right_bytes(
    steps: list[tuple[object, ...]], cache_blocks: int | None, recent_blocks: int
) -> None:
    """A reader gets exactly its range, or the error of a run that failed; at the end everybody gets everything."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(asyncio.wait_for(_play(steps, Path(folder), cache_blocks, recent_blocks), 60))


async def _play(steps: list[tuple[object, ...]], folder: Path, cache_blocks: int | None, recent_blocks: int) -> None:
    config = ResultsConfig(recent_bytes_max=recent_blocks * BLOCK_BYTES, held_blocks_max=2, lag_s_max=0.05)
    processes = [
        open_results(
            None if cache_blocks is None else folder, cache_bytes=(cache_blocks or 8) * BLOCK_BYTES, config=config
        )
        for _ in range(2)
    ]
    gate = Gate(TEXT, piece_bytes=5000)
    transform = FunctionTransform(gate)
    points = [point_of(transform, results, {"a": b""}) for results in processes]
    readers: dict[asyncio.Task[bytes], ByteRange] = {}
    for step in steps:
        match step:
            case "allow", int(size_bytes):
                gate.allow(max(gate.allowed_bytes, size_bytes))
            case "read", int(start), int(length), int(process):
                span = ByteRange(start, min(SIZE_BYTES, start + length))
                readers[asyncio.create_task(get(points[process], "a", span))] = span
            case "leave", int(index) if readers:
                task = list(readers)[index % len(readers)]
                task.cancel()
                await asyncio.wait([task])
                readers.pop(task)
            case "evict", int(index):
                files = sorted(folder.glob("cache/v1/entries/*/*"))
                if files:
                    files[index % len(files)].unlink(missing_ok=True)
            case ("fail",):
                gate.allow(gate.allowed_bytes, error=S3Error("InternalError", "It broke.", status=500))
                await asyncio.sleep(0.002)
                gate.error = None
            case "pause", int(count):
                for _ in range(count):
                    await asyncio.sleep(0.001)
    gate.allow()
    for task, span in readers.items():
        await asyncio.wait([task])
        error = task.exception()
        if error is None:
            assert task.result() == TEXT[span.start : span.end]
        else:
            assert isinstance(error, S3Error)
            assert error.message == "It broke." or error.code == "SlowDown"
    for point in points:
        assert await get(point, "a") == TEXT
    for results in processes:
        await results.close()
    if cache_blocks is not None:
        complete = [each.record for each in iter_kept(folder / "cache") if each.record.is_complete]
        assert all((record.size_bytes, record.crc32c) == (SIZE_BYTES, crc32c(TEXT)) for record in complete)
    assert transform.ended_count == transform.runs_count


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=6))
def test_checksums_of_blocks_join_to_that_of_the_whole(blocks: list[bytes]) -> None:
    """Joining the checksums of blocks gives the checksum of all their bytes."""
    crc = 0
    for block in blocks:
        crc = combined_crc(crc, crc32c(block), len(block))
    assert crc == crc32c(b"".join(blocks))
