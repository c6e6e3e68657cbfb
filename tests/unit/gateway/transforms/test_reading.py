"""What transforms read: versions of objects, and the output of other transforms."""

from __future__ import annotations

import gzip
import io
import os
import random
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.checksums.algorithms import encode
from penstock.errors import ChecksumError, ObjectChangedError
from penstock.gateway.transforms.reading import PipedReader, SourceVersion, VersionReader
from penstock.store import Store

DATA = os.urandom(7_000_000)


def version(store: Store, key: str) -> SourceVersion:
    info = store.stat(key)
    return SourceVersion(key, key, info.size_bytes, info.etag, {})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A folder with one object of 7 MB and an empty one."""
    (tmp_path / "data").write_bytes(DATA)
    (tmp_path / "empty").write_bytes(b"")
    with ps.connect(tmp_path) as store:
        yield store


@pytest.fixture
def reader(store: Store) -> Iterator[VersionReader]:
    """A reader of the object of 7 MB."""
    with VersionReader(store, version(store, "data"), check=lambda: None) as reader:
        yield reader


def piped(data: bytes, length: int) -> PipedReader:
    """A reader of pieces of one length."""
    pieces = (data[at : at + length] for at in range(0, len(data), length))
    return PipedReader("data", headers={}, size_bytes=None, pieces=pieces)


@pytest.mark.parametrize("seed", range(5), ids=str)
def test_any_sequence_of_calls(reader: VersionReader, seed: int) -> None:
    """Reading, seeking, lines, ranges and iteration in any order agree with a file."""
    draw, model = random.Random(seed), io.BytesIO(DATA)
    for _ in range(60):
        match draw.randrange(6):
            case 0:
                at = draw.randrange(len(DATA) + 100)
                assert reader.seek(at) == model.seek(at)
            case 1:
                size = draw.choice((0, 1, 1000, 70_000, 2_000_000))
                assert reader.read(size) == model.read(size)
            case 2:
                ours, theirs = bytearray(5000), bytearray(5000)
                assert reader.readinto(ours) == model.readinto(theirs)
                assert ours == theirs
            case 3:
                assert reader.readline(300) == model.readline(300)
            case 4:
                start, end = draw.randrange(len(DATA)), draw.randrange(len(DATA) + 1000)
                assert reader.read_range(start, end) == DATA[start:end]
            case _:
                pieces = iter(reader)
                for _ in range(draw.randrange(3)):
                    piece = next(pieces, b"")
                    assert piece == model.read(len(piece))
                    assert not piece or memoryview(piece).readonly
        assert reader.tell() == model.tell()


def test_libraries_take_it_for_a_file(store: Store, tmp_path: Path) -> None:
    """Libraries that seek, and those that read lines of text, work on a reader."""
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(tmp_path / "data", "inside")
    (tmp_path / "text").write_bytes("ä\nb\n".encode())
    with (
        VersionReader(store, version(store, "a.tar"), check=lambda: None) as reader,
        tarfile.open(fileobj=reader) as archive,
    ):
        member = archive.extractfile("inside")
        assert member is not None
        assert member.read() == DATA
    with VersionReader(store, version(store, "text"), check=lambda: None) as reader:
        assert list(io.TextIOWrapper(io.BufferedReader(reader), encoding="utf-8")) == ["ä\n", "b\n"]


def test_an_empty_source(store: Store) -> None:
    """An empty source has no bytes in any way of reading it."""
    with VersionReader(store, version(store, "empty"), check=lambda: None) as reader:
        assert reader.read() == reader.readline() == reader.read_range(0, 5) == b""
        assert list(reader) == []
        assert reader.readinto(bytearray(3)) == 0


@pytest.mark.parametrize("how", ["read", "iterate", "read_range"])
def test_another_version_is_refused(store: Store, tmp_path: Path, how: str) -> None:
    """Each way of reading refuses bytes of a version that replaced the first."""
    pinned = version(store, "data")
    (tmp_path / "new").write_bytes(DATA)
    (tmp_path / "new").replace(tmp_path / "data")
    calls: dict[str, Any] = {"read": lambda r: r.read(10), "iterate": list, "read_range": lambda r: r.read_range(5, 10)}
    with VersionReader(store, pinned, check=lambda: None) as reader, pytest.raises(ObjectChangedError):
        calls[how](reader)


def test_the_check_comes_before_each_read(store: Store) -> None:
    """A call that was cancelled reads nothing more."""

    class StopReading(BaseException):
        pass

    def stop() -> None:
        raise StopReading

    with VersionReader(store, version(store, "data"), check=stop) as reader:
        for read in (reader.read, reader.readline, lambda: list(reader), lambda: reader.read_range(0, 1)):
            with pytest.raises(StopReading):
                read()


@pytest.mark.parametrize("length", [1, 7, 1000, 100_000], ids=str)
def test_piped_output_is_a_file(length: int) -> None:
    """The output of another transform reads like a file, however it is cut into pieces."""
    data = b"\n".join(b"%d" % number * (number % 50) for number in range(3000))
    ours, model = piped(data, length), io.BytesIO(data)
    draw = random.Random(length)
    while model.tell() < len(data):
        size = draw.randrange(500)
        if draw.random() < 0.5:
            assert ours.read(size) == model.read(size)
        elif draw.random() < 0.5:
            assert ours.readline(size) == model.readline(size)
        else:
            mine, other = bytearray(size), bytearray(size)
            assert ours.readinto(mine) == model.readinto(other)
            assert mine == other
        assert ours.tell() == model.tell()
    assert ours.read() == b""
    packed = gzip.compress(data)
    assert gzip.GzipFile(fileobj=piped(packed, length)).read() == data
    assert b"".join(bytes(piece) for piece in piped(data, length)) == data


def test_piped_output_does_not_jump() -> None:
    """A reader of another transform's output says that it cannot seek, and does not."""
    reader = piped(b"abc", 1)
    assert not reader.seekable()
    for jump in (lambda: reader.seek(0), lambda: reader.read_range(0, 1)):
        with pytest.raises(io.UnsupportedOperation):
            jump()


READ_WHOLE: dict[str, Callable[[VersionReader], bytes]] = {
    "iterating": lambda reader: b"".join(map(bytes, reader)),
    "read": lambda reader: reader.read(),
    "read_at_most": lambda reader: reader.read(len(DATA) + 1),
}


@pytest.mark.parametrize("algorithm", ["crc32c", "crc64nvme"])
@pytest.mark.parametrize("way", READ_WHOLE)
def test_a_whole_source_is_compared_with_its_checksum(store: Store, way: str, algorithm: str) -> None:
    """Bytes that do not match the checksum of the source's head are an error, at the latest with the last ones."""
    for checksum, is_right in (
        (encode(algorithm, DATA), True),
        (encode(algorithm, DATA[:-1] + b"?"), DATA[-1:] == b"?"),
    ):
        source = version(store, "data")._replace(headers={f"x-amz-checksum-{algorithm}": checksum})
        with VersionReader(store, source, check=lambda: None) as reader:
            if is_right:
                assert READ_WHOLE[way](reader) == DATA
            else:
                with pytest.raises(ChecksumError):
                    READ_WHOLE[way](reader)


@pytest.mark.parametrize(
    "headers",
    [
        {"x-amz-checksum-crc32c": "AAAAAA==-2"},
        {"x-amz-checksum-crc32c": "AAAAAA==", "x-amz-checksum-type": "COMPOSITE"},
        {"x-amz-checksum-sha1": "AAAA", "x-amz-checksum-unknown": "AAAA", "content-type": "text/plain"},
    ],
    ids=["parts", "composite", "others"],
)
def test_checksums_of_other_kinds_are_not_compared(store: Store, headers: dict[str, str]) -> None:
    """A checksum of the parts, or of an algorithm that is slow or unknown, says nothing here."""
    with VersionReader(store, version(store, "data")._replace(headers=headers), check=lambda: None) as reader:
        assert b"".join(map(bytes, reader)) == DATA


def test_a_part_of_a_source_is_not_compared(store: Store) -> None:
    """The checksum of the whole object does not stop a transform that reads a part of it."""
    source = version(store, "data")._replace(headers={"x-amz-checksum-crc32c": "AAAAAA=="})
    with VersionReader(store, source, check=lambda: None) as reader:
        assert reader.read(10) == DATA[:10]
        assert b"".join(map(bytes, reader)) == DATA[10:]
        assert bytes(reader.read_range(3, 5)) == DATA[3:5]
