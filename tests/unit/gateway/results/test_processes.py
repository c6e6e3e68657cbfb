"""Results when a process of the node is killed, and what remains of them on the disk."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gateway_support.results import (
    BLOCK_BYTES,
    FunctionTransform,
    Gate,
    get,
    open_results,
    point_of,
    request_of,
    swap_case,
)
from penstock.errors import ConfigError
from penstock.gateway.results.storage import iter_kept, remove_kept

SCENARIO = Path(__file__).parent / "producer_scenario.py"


def test_a_killed_producer_is_taken_over(tmp_path: Path) -> None:
    """A process that follows a run gets its blocks, and produces the result itself when the other one is killed."""
    text = bytes(range(256)) * (10 * BLOCK_BYTES // 256)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, SCENARIO, tmp_path], env=environment, stdout=subprocess.PIPE) as producer:

        async def test() -> None:
            results = open_results(tmp_path)
            gate = Gate(text)
            gate.allow()
            transform = FunctionTransform(gate)
            opened = await point_of(transform, results, {"a": b""}).open(request_of("a"), None)
            pieces = opened.read(None)
            found = bytearray()
            while len(found) < 3 * BLOCK_BYTES:
                found += await anext(pieces)
            assert transform.runs_count == 0
            producer.kill()
            async for piece in pieces:
                found += piece
            assert found == text
            assert transform.runs_count == 1
            await results.close()

        assert producer.stdout is not None
        try:
            assert producer.stdout.readline() == b"ready\n"
            asyncio.run(test())
        finally:
            producer.kill()
    kept = list(iter_kept(tmp_path / "cache"))
    assert [each.record.is_complete for each in kept] == [True]
    assert len(list((tmp_path / "cache" / "v1" / "entries").glob("*/*b"))) == 10


def test_kept_results_are_listed_and_removed(tmp_path: Path) -> None:
    """What is kept can be looked at, and removing it removes all its blocks; it is then produced again."""

    async def fill() -> int:
        results = open_results(tmp_path)
        transform = FunctionTransform(swap_case)
        point = point_of(transform, results, {"a": bytes(3 * BLOCK_BYTES), "b": b"x"})
        for key in ("a", "b"):
            await get(point, key, x_penstock_length="auto")
        await results.close()
        return transform.runs_count

    assert asyncio.run(fill()) == 2
    kept = {each.record.key: each for each in iter_kept(tmp_path / "cache")}
    assert sorted(kept) == ["a", "b"]
    assert (kept["a"].record.size_bytes, kept["a"].record.transform) == (3 * BLOCK_BYTES, "test")
    assert kept["a"].unused_s < 60
    assert remove_kept(tmp_path / "cache", [kept["a"]]) == 3 * BLOCK_BYTES
    assert [each.record.key for each in iter_kept(tmp_path / "cache")] == ["b"]
    assert len(list((tmp_path / "cache" / "v1" / "entries").glob("*/*"))) == 2
    assert asyncio.run(fill()) == 1


def test_a_folder_that_is_no_cache_is_refused(tmp_path: Path) -> None:
    """Nothing is listed or removed in a directory that penstock did not create."""
    with pytest.raises(ConfigError):
        iter_kept(tmp_path)
    with pytest.raises(ConfigError):
        remove_kept(tmp_path, [])
