"""The file system on a real S3 server: URLs, keys, errors, and processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest

import penstock as ps
from penstock.fsspec import PenstockFileSystem, PenstockS3FileSystem, register
from penstock.store.writing import copy
from penstock.testing.s3_server import S3Server

pytestmark = pytest.mark.server


@pytest.fixture
def options(s3_endpoint: S3Server) -> Iterator[dict[str, Any]]:
    """Options as users of s3fs write them; ``s3://`` is penstock's meanwhile."""
    before = fsspec.registry.get("s3")
    register("s3")
    register("penstock")
    yield {"endpoint_url": s3_endpoint.endpoint_url, "key": s3_endpoint.access_key, "secret": s3_endpoint.secret_key}
    if before is not None:
        fsspec.register_implementation("s3", before, clobber=True)


@pytest.fixture
def files(options: dict[str, Any]) -> PenstockS3FileSystem:
    """A file system on the server."""
    return PenstockS3FileSystem(**options)


def test_urls(bucket: str, options: dict[str, Any], s3_client: Any) -> None:
    """``s3://`` and ``penstock://s3/`` are the same objects, which another client sees."""
    with fsspec.open(f"s3://{bucket}/a/text.txt", "w", **options) as file:
        file.write("text")
    assert s3_client.get_object(Bucket=bucket, Key="a/text.txt")["Body"].read() == b"text"
    with fsspec.open(f"penstock://s3/{bucket}/a/text.txt", "r", **options) as file:
        assert file.read() == "text"
    files, paths = fsspec.core.url_to_fs(f"s3://{bucket}/a/*", **options)
    assert files.glob(paths) == [f"{bucket}/a/text.txt"]
    assert fsspec.open_files(f"penstock://s3/{bucket}/a/*", **options)[0].path == f"s3/{bucket}/a/text.txt"
    listed = fsspec.get_mapper(f"s3://{bucket}/a", **options)
    assert dict(listed) == {"text.txt": b"text"}


def test_what_s3_says_of_an_object(files: PenstockS3FileSystem, bucket: str, s3_client: Any) -> None:
    """``info`` and ``ls`` agree with each other and with the store; buckets are directories."""
    files.pipe_file(f"{bucket}/x", b"abc")
    head = s3_client.head_object(Bucket=bucket, Key="x")
    info = files.info(f"{bucket}/x")
    assert (info["ETag"], info["size"], info["LastModified"]) == (head["ETag"], 3, head["LastModified"])
    assert (info["ContentType"], info["VersionId"], info["StorageClass"]) == (head["ContentType"], None, "STANDARD")
    assert files.ls(bucket) == [f"{bucket}/x"]
    assert files.ls(bucket, detail=True)[0]["ETag"] == info["ETag"]
    assert files.ls(bucket, detail=True)[0]["Key"] == info["Key"] == f"{bucket}/x"
    assert bucket in files.ls("")
    assert files.split_path(f"s3://{bucket}/a/b") == (bucket, "a/b", None)
    assert files.info(bucket)["type"] == "directory"
    assert f"s3/{bucket}" in PenstockFileSystem(**files.storage_options).ls("s3", detail=False)
    files.mkdir(bucket)
    with pytest.raises(ps.BucketMissingError):
        files.mkdir("penstock-no-such-bucket")
    with pytest.raises(FileNotFoundError):
        files.ls("penstock-no-such-bucket")
    with pytest.raises(ps.ConfigError, match="must be given a bucket"):
        files.find("")


@pytest.mark.parametrize("way", ["open", "large", "pipe_file", "pipe", "put_file", "put", "touch", "transaction"])
def test_media_types(files: PenstockS3FileSystem, bucket: str, s3_client: Any, tmp_path: Any, way: str) -> None:
    """``ContentType=`` of the calls that write is the object's media type, and a copy keeps it."""
    path, options = f"{bucket}/page", {"ContentType": "text/html; charset=utf-8", "chunksize": 50 << 20}
    local = tmp_path / "local"
    local.write_bytes(b"<p>")
    if way in ("open", "large"):
        with files.open(path, "wb", ContentType="text/html; charset=utf-8", block_size=5 << 20) as file:
            file.write(b"<p>" if way == "open" else bytes(12 << 20))
    elif way.startswith("put"):
        getattr(files, way)(str(local), path, **options)
    elif way == "transaction":
        with files.transaction:
            files.pipe_file(path, b"<p>", **options)
    else:
        calls = {"pipe_file": (path, b"<p>"), "pipe": ({path: b"<p>"},), "touch": (path,)}
        getattr(files, way)(*calls[way], **options)
    files.copy(path, f"{bucket}/copy")
    if way == "large":
        store = files.store(f"s3://{bucket}")
        copy(store, "page", "copy", copy_bytes_max=5 << 20, part_bytes=5 << 20)
    for key in ("page", "copy"):
        assert s3_client.head_object(Bucket=bucket, Key=key)["ContentType"] == "text/html; charset=utf-8"
        assert files.info(f"{bucket}/{key}")["ContentType"] == "text/html; charset=utf-8"
    assert files.cat_file(path, chunksize=1) == files.cat_file(f"{bucket}/copy")


def test_errors_are_those_of_files(files: PenstockS3FileSystem, options: dict[str, Any], bucket: str) -> None:
    """Wrong keys are a ``PermissionError`` and not an object that is not there; no server is a ``ConnectionError``."""
    wrong = PenstockS3FileSystem(**{**options, "secret": "wrong"})
    for call in (wrong.exists, wrong.isdir, wrong.ls, wrong.cat_file):
        with pytest.raises(PermissionError):
            call(f"{bucket}/x")
    nowhere = PenstockS3FileSystem(
        endpoint_url="http://127.0.0.1:9", key="AK", secret="x", retry=ps.RetryConfig(attempts_max=1)
    )
    with pytest.raises(ConnectionError):
        nowhere.exists(f"{bucket}/x")
    with pytest.raises(FileNotFoundError, match="x"):
        files.open(f"{bucket}/x")


def test_signed_urls(files: PenstockS3FileSystem, bucket: str) -> None:
    """Anybody can read by a signed URL."""
    files.pipe_file(f"{bucket}/x", b"shared")
    for url in (files.sign(f"{bucket}/x", expiration=60), files.url(f"{bucket}/x"), files.open(f"{bucket}/x").url()):
        with urllib.request.urlopen(url, timeout=30) as answer:
            assert answer.read() == b"shared"
    by_http = PenstockFileSystem().cat_file(f"penstock://{files.url(f'{bucket}/x').replace('://', '/', 1)}")
    assert by_http == b"shared"
    with pytest.raises(ps.ConfigError, match="for reading only"):
        files.sign(f"{bucket}/x", client_method="put_object")


def test_folders_of_consoles(files: PenstockS3FileSystem, bucket: str, s3_client: Any) -> None:
    """The empty object that a console writes for a folder is a directory, and goes with it."""
    s3_client.put_object(Bucket=bucket, Key="folder/")
    s3_client.put_object(Bucket=bucket, Key="folder/inner/")
    assert files.info(f"{bucket}/folder")["type"] == "directory"
    assert files.ls(f"{bucket}/folder", detail=False) == [f"{bucket}/folder/inner"]
    assert files.find(bucket) == []
    assert files.find(bucket, withdirs=True) == [bucket, f"{bucket}/folder", f"{bucket}/folder/inner"]
    files.rm(f"{bucket}/folder", recursive=True)
    assert s3_client.list_objects_v2(Bucket=bucket)["KeyCount"] == 0


def _read(files: PenstockS3FileSystem, path: str, answers: Any) -> None:
    answers.put((files.cat_file(path), asyncio.run(files._cat_file(path, 0, 2)), files.open(path).read()))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes(files: PenstockS3FileSystem, bucket: str, method: str) -> None:
    """A file system works in a forked child and in a new process while its parent uses it."""
    files.pipe_file(f"{bucket}/x", b"data")
    asyncio.run(files._cat_file(f"{bucket}/x"))
    context = multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    child = context.Process(target=_read, args=(files, f"{bucket}/x", answers))
    child.start()
    assert files.cat_file(f"{bucket}/x") == b"data"
    child.join(60)
    assert child.exitcode == 0
    assert answers.get() == (b"data", b"da", b"data")


def test_threads(files: PenstockS3FileSystem, bucket: str) -> None:
    """Many threads share a file system, and one file, without mixing anything up."""
    data = bytes(range(256)) * 4096
    files.pipe_file(f"{bucket}/x", data)
    shared = pickle.loads(pickle.dumps(files))
    assert shared is files
    wrong: list[int] = []

    def use(number: int) -> None:
        for turn in range(20):
            start = (number * 31 + turn * 977) % 1_000_000
            if shared.cat_file(f"{bucket}/x", start, start + 99) != data[start : start + 99]:
                wrong.append(number)
            shared.pipe_file(f"{bucket}/t/{number}/{turn}", b"%d" % turn)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert len(files.find(f"{bucket}/t")) == 160


def test_nothing_is_left(files: PenstockS3FileSystem, bucket: str, nothing_left: Any) -> None:
    """Reading, writing and dropping files leaves no thread and no descriptor behind."""
    files.pipe_file(f"{bucket}/x", bytes(20 << 20))
    asyncio.run(files._cat_file(f"{bucket}/x"))
    files.open(f"{bucket}/x").read(9 << 20)
    with nothing_left():
        for _ in range(3):
            file = files.open(f"{bucket}/x")
            file.read(1 << 20)
            del file
            writer = files.open(f"{bucket}/y", "wb")
            writer.write(bytes(9 << 20))
            del writer
            asyncio.run(files._cat_file(f"{bucket}/x", 5, 10))
    assert not files.exists(f"{bucket}/y")
