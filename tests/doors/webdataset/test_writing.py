"""WebDataset's writers on ``s3://``: a shard is an object when it is closed, and never after an exception."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds

import penstock as ps
import penstock.webdataset
from servers.faulty import FaultyServer

PATTERN = "s3://bucket/out-%03d.tar"


@pytest.fixture
def made(bucket: FaultyServer) -> Any:
    """The keys that were written, in order."""
    return lambda: sorted(key for key in bucket.objects if key.startswith("out"))


def sample(number: int, size: int = 1000) -> dict[str, Any]:
    """A sample to write."""
    return {"__key__": f"s{number:05d}", "bin": bytes([number % 256]) * size, "cls": number}


def write(writer: Any, count: int = 1, size: int = 1000, error: type[BaseException] | None = None) -> None:
    """Write samples in a ``with`` block, and then raise `error`."""
    with writer:
        for number in range(count):
            writer.write(sample(number, size))
        if error is not None:
            raise error


def test_shards_are_those_of_local_files(bucket: FaultyServer, tmp_path: Path, made: Any) -> None:
    """``ShardWriter`` writes the bytes that it writes to local files, and they are read back by ``s3://``."""
    for pattern in (PATTERN, f"{tmp_path}/out-%03d.tar"):
        with wds.ShardWriter(pattern, maxcount=10, mtime=0, verbose=0) as writer:
            for number in range(25):
                writer.write(sample(number))
    assert made() == ["out-000.tar", "out-001.tar", "out-002.tar"]
    assert all(bucket.objects[key] == (tmp_path / key).read_bytes() for key in made())
    data = wds.WebDataset("s3://bucket/out-{000..002}.tar", shardshuffle=False)
    assert [int(row["cls"]) for row in data] == list(range(25))


def test_a_large_shard(bucket: FaultyServer, made: Any) -> None:
    """A shard of several parts is uploaded in parts, and is not there before it is closed."""
    writer = wds.TarWriter("s3://bucket/out.tar", mtime=0)
    for number in range(24):
        writer.write(sample(number, 1_000_000))
    assert made() == []
    writer.close()
    assert made() == ["out.tar"]
    assert len(bucket.objects["out.tar"]) > 24_000_000
    assert not bucket.uploads


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_exception_commits_nothing(bucket: FaultyServer, made: Any, kind: type[BaseException]) -> None:
    """The shard in which the exception came is not there, ``post`` does not hear of it, and the ones before it are whole."""
    posted: list[str] = []
    with pytest.raises(kind):
        write(wds.ShardWriter(PATTERN, maxcount=10, verbose=0, post=posted.append), 15, 1_000_000, kind)
    assert made() == ["out-000.tar"]
    assert posted == [PATTERN % 0]
    with pytest.raises(kind):
        write(wds.TarWriter("s3://bucket/out.tar"), error=kind)
    assert made() == ["out-000.tar"]
    assert not bucket.uploads


def test_a_sample_that_cannot_be_encoded(bucket: FaultyServer, made: Any) -> None:
    """WebDataset's own error about a sample reaches the program, and no half shard is there."""
    with pytest.raises(ValueError, match="no handler found for unknown"), wds.TarWriter("s3://bucket/out.tar") as tar:
        tar.write({"__key__": "a", "unknown": 1.5})
    assert made() == []


def test_writers_within_handlers(bucket: FaultyServer, made: Any) -> None:
    """An exception that is being handled when a shard is written and closed is not that shard's."""
    try:
        raise KeyError
    except KeyError:
        with wds.TarWriter("s3://bucket/out.tar") as tar:
            tar.write(sample(0))
    assert made() == ["out.tar"]


def test_a_dropped_writer_commits_nothing(bucket: FaultyServer, made: Any) -> None:
    """A writer that nobody closes leaves neither an object nor an upload."""
    writer = wds.TarWriter("s3://bucket/out.tar")
    for number in range(24):
        writer.write(sample(number, 1_000_000))
    del writer
    assert made() == []


def test_compressed_shards(bucket: FaultyServer) -> None:
    """A name that ends in ``gz`` is compressed as WebDataset does it, and read again."""
    with wds.TarWriter("s3://bucket/out.tar.gz") as tar:
        tar.write(sample(7))
    assert bucket.objects["out.tar.gz"][:2] == b"\x1f\x8b"
    assert [int(row["cls"]) for row in wds.WebDataset("s3://bucket/out.tar.gz", shardshuffle=False)] == [7]


def test_a_store_that_refuses(bucket: FaultyServer, made: Any) -> None:
    """A refused upload is the engine's error, when the shard is closed or before, and nothing is visible."""
    bucket.fail("403", times=None, match=lambda request: request.method in ("PUT", "POST"))
    for count in (1, 64):
        with pytest.raises(ps.AccessDeniedError):
            write(wds.TarWriter("s3://bucket/out.tar"), count, 1_000_000)
    assert made() == []


def test_local_files_are_as_before(tmp_path: Path) -> None:
    """What WebDataset's writers do with local files after an exception has not changed."""
    with pytest.raises(ValueError):
        write(wds.TarWriter(f"{tmp_path}/out.tar"), error=ValueError)
    with tarfile.open(tmp_path / "out.tar") as written:
        assert written.getnames() == ["s00000.bin", "s00000.cls"]


def test_an_upload_as_a_file(bucket: FaultyServer) -> None:
    """What ``gopen`` returns for writing is a file object that says what it is, and commits once."""
    with wds.gopen("s3://bucket/out.bin", "wb") as file:
        assert (file.write(b"abc"), file.tell(), file.mode, file.writable()) == (3, 3, "wb", True)
        assert file.name == "s3://bucket/out.bin"
    assert bucket.objects["out.bin"] == b"abc"
    file.close()
    with pytest.raises(ValueError), wds.gopen("s3://bucket/none.bin", "wb") as file:
        raise ValueError
    assert "aborted" in repr(file)
    assert "none.bin" not in bucket.objects
