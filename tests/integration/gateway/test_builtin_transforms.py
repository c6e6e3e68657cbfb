"""The built-in transforms in real worker processes, by their spelling."""

from __future__ import annotations

import asyncio
import gzip
import io
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import ConfigError
from penstock.formats.tfrecord import parse_example
from penstock.gateway.objects import S3Error
from transformed_sources import members_of, png_of, tar_of
from transforming import running

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.server

_PIXELS = np.arange(8 * 4 * 3, dtype=np.uint8).reshape(8, 4, 3)
_SHARD = tar_of({"a/0.png": png_of(_PIXELS), "a/0.cls": b"[6]", "a/0.txt": b"x"})
_LINES = b'{"id":1,"user":{"mail":"m","name":"n"}}\n'


def _example(data: bytes) -> dict[str, Any]:
    return {name: np.asarray(value).tolist() for name, value in parse_example(memoryview(data)[12:-4]).items()}


def _is_decoded(data: bytes) -> bool:
    pixels = {"image": _PIXELS.reshape(-1).tolist(), "image/height": [8], "image/width": [4], "image/channels": [3]}
    return _example(data) == pixels | {"label": [6]}


@pytest.mark.parametrize(
    ("spelling", "source", "is_right"),
    [
        ("tar2tfrecord(image=png:pixels,label=cls:int)", _SHARD, _is_decoded),
        ('tar2tfrecord(fields="png=image:pixels,cls=label:int")', _SHARD, _is_decoded),
        (
            "select(cls) | tar2tfrecord(key=id, gzip=true) | gunzip | tfrecord2tar(key=id)",
            _SHARD,
            lambda data: members_of(data) == {"a/0.cls": b"[6]"},
        ),
        ("resize(width=2)", _SHARD, lambda data: sorted(members_of(data)) == ["a/0.cls", "a/0.png", "a/0.txt"]),
        ("recode(jpg)", png_of(_PIXELS), lambda data: data[:3] == b"\xff\xd8\xff"),
        ("jsonl2csv(user.name, id)", _LINES, lambda data: data == b"user.name,id\nn,1\n"),
        ("redact(user.mail)", _LINES, lambda data: data == b'{"id":1,"user":{"name":"n"}}\n'),
        ("redact(id, replacement=x) | gzip(level=9)", _LINES, lambda data: b'"id":"x"' in gzip.decompress(data)),
        ("zstd(level=1) | unzstd", _LINES, lambda data: data == _LINES),
    ],
)  # fmt: skip
def test_in_a_worker_process(spelling: str, source: bytes, is_right: Callable[[bytes], bool], tmp_path: Path) -> None:
    """Each transform gives in a worker process what it promises, alone and in a pipeline."""
    (tmp_path / "key").write_bytes(source)

    async def run() -> bytes:
        async with running(spelling, tmp_path) as bench:
            return bytes((await bench.run()).data)

    assert is_right(asyncio.run(run()))


def test_parquet_reads_ranges(tmp_path: Path) -> None:
    """Parquet is read by ranges through the worker's reader."""
    pq.write_table(pa.table({"id": range(100), "s": ["x"] * 100}), tmp_path / "key")

    async def run() -> bytes:
        async with running("parquet(id, filter=\"id >= 97 and s == 'x'\")", tmp_path) as bench:
            return bytes((await bench.run()).data)

    assert pq.read_table(io.BytesIO(asyncio.run(run()))).to_pydict() == {"id": [97, 98, 99]}


@pytest.mark.parametrize(
    ("spelling", "message"),
    [
        ("gzip(level=10)", "level=10"),
        ("resize(width=1, fit=none)", "fit='none'"),
        ("select()", "extensions"),
        ("tar2tfrecord(png=a:b)", "png=a:b"),
        ("parquet(filter=x)", "filter='x'"),
        ("recode(gif)", "format='gif'"),
    ],
)
def test_wrong_arguments_end_the_start(spelling: str, message: str, tmp_path: Path) -> None:
    """A gateway with wrong arguments does not start, and says which argument is wrong."""

    async def run() -> None:
        async with running(spelling, tmp_path):
            raise AssertionError("it started")

    with pytest.raises(ConfigError, match=message):
        asyncio.run(run())


def test_damage_is_a_failure(tmp_path: Path) -> None:
    """A damaged source ends in a failure after what came before it, never in a result."""
    (tmp_path / "key").write_bytes(_SHARD[:700])

    async def run() -> None:
        async with running("tar2tfrecord()", tmp_path) as bench:
            await bench.run()

    with pytest.raises(S3Error, match="CorruptShardError"):
        asyncio.run(run())
