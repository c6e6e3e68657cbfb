"""Many writers and readers of one directory: two gateways that share it, killed processes, and full disks of attributes."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError

from fronts import RunningFront, s3_client
from penstock.gateway.buckets.directory import DirectoryBuckets

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.server, pytest.mark.heavy]

MIB = 1 << 20
TURNS_COUNT = 25


@pytest.fixture
def clients(tmp_path: Path) -> Iterator[list[Any]]:
    """Clients of two gateways in front of the same directory, with the bucket ``shared``."""
    (tmp_path / "shared").mkdir()
    tables = [DirectoryBuckets(tmp_path, read_write=True, is_durable=False) for _ in range(2)]
    with RunningFront(table=tables[0]) as one, RunningFront(table=tables[1]) as other:
        yield [s3_client(one.url), s3_client(other.url)]


def put(client: Any, key: str, body: str, **conditions: str) -> str:
    """Write an object and return its ETag."""
    return str(client.put_object(Bucket="shared", Key=key, Body=body, **conditions)["ETag"])


def together(*functions: Any) -> list[Any]:
    """Call functions at the same time, each on a thread; return their results, or the codes of their errors."""
    barrier = threading.Barrier(len(functions))

    def call(function: Any) -> Any:
        barrier.wait()
        try:
            return function()
        except ClientError as error:
            return error.response["Error"]["Code"]

    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(call, functions))


@pytest.mark.parametrize("size", [1000, 3 * MIB])
def test_readers_see_one_version(clients: list[Any], size: int) -> None:
    """While two gateways overwrite and remove an object, every GET has the bytes of its ETag and metadata, or is 404."""
    bodies = [bytes([value]) * size for value in range(2)]
    is_over = threading.Event()

    def write(client: Any, value: int) -> None:
        for turn in range(TURNS_COUNT):
            client.put_object(Bucket="shared", Key="k", Body=bodies[value], Metadata={"value": str(value)})
            if turn % 5 == 4:
                client.delete_object(Bucket="shared", Key="k")
        is_over.set()

    def read(client: Any) -> int:
        seen = 0
        while not is_over.is_set():
            try:
                answer = client.get_object(Bucket="shared", Key="k")
            except ClientError as error:
                assert error.response["Error"]["Code"] == "NoSuchKey"  # noqa: PT017 - it is expected at any time
                continue
            data = answer["Body"].read()
            assert answer["ETag"] == f'"{hashlib.md5(data).hexdigest()}"'
            assert data == bodies[int(answer["Metadata"]["value"])]
            seen += 1
        return seen

    results = together(
        lambda: write(clients[0], 0), lambda: write(clients[1], 1), lambda: read(clients[0]), lambda: read(clients[1])
    )
    assert min(results[2:]) > 0


def test_one_of_many_conditional_writes_succeeds(clients: list[Any]) -> None:
    """Of writes with ``If-None-Match: *`` at the same time, and of those that name one version, exactly one succeeds."""
    for turn in range(5):
        key = f"k{turn}"
        results = together(
            *(partial(put, client, key, str(value), IfNoneMatch="*") for value, client in enumerate(clients * 3))
        )
        assert sorted(results)[1:] == ["PreconditionFailed"] * 5
        etag = min(results)
        results = together(
            *(partial(put, client, key, f"next {value}", IfMatch=etag) for value, client in enumerate(clients * 3))
        )
        assert sorted(results)[1:] == ["PreconditionFailed"] * 5


def test_a_key_and_its_prefix_written_at_the_same_time(clients: list[Any]) -> None:
    """``a`` and ``a/b`` are both there, whichever was first, and removing both at the same time leaves nothing."""
    one, other = clients
    for _ in range(TURNS_COUNT):
        together(
            lambda: one.put_object(Bucket="shared", Key="a", Body=b"file"),
            lambda: other.put_object(Bucket="shared", Key="a/b", Body=b"below"),
        )
        assert [row["Key"] for row in one.list_objects_v2(Bucket="shared")["Contents"]] == ["a", "a/b"]
        assert other.get_object(Bucket="shared", Key="a")["Body"].read() == b"file"
        assert one.get_object(Bucket="shared", Key="a/b")["Body"].read() == b"below"
        results = together(
            lambda: one.delete_object(Bucket="shared", Key="a/b"), lambda: other.delete_object(Bucket="shared", Key="a")
        )
        assert not any(isinstance(result, str) for result in results)
        assert "Contents" not in one.list_objects_v2(Bucket="shared")


def test_folders_come_and_go(clients: list[Any]) -> None:
    """A write into a folder that another gateway is removing succeeds."""
    one, other = clients
    for turn in range(TURNS_COUNT):
        one.put_object(Bucket="shared", Key="x/y/old", Body=b"old")
        results = together(
            lambda: one.delete_object(Bucket="shared", Key="x/y/old"),
            lambda turn=turn: other.put_object(Bucket="shared", Key=f"x/y/{turn}", Body=b"new"),
        )
        assert not any(isinstance(result, str) for result in results)
        assert one.get_object(Bucket="shared", Key=f"x/y/{turn}")["Body"].read() == b"new"
        other.delete_object(Bucket="shared", Key=f"x/y/{turn}")


def test_completing_twice_at_the_same_time(clients: list[Any]) -> None:
    """Two clients complete an upload, and one aborts it: both complete it or neither does, and nothing is half."""
    one, other = clients
    for _ in range(5):
        upload = one.create_multipart_upload(Bucket="shared", Key="m")["UploadId"]
        etag = one.upload_part(Bucket="shared", Key="m", UploadId=upload, PartNumber=1, Body=b"part")["ETag"]
        named = {"Parts": [{"PartNumber": 1, "ETag": etag}]}
        same = {"Bucket": "shared", "Key": "m", "UploadId": upload}
        results = together(
            partial(one.complete_multipart_upload, **same, MultipartUpload=named),
            partial(other.complete_multipart_upload, **same, MultipartUpload=named),
            partial(other.abort_multipart_upload, **same),
        )
        *completed, aborted = results
        if aborted in ("NoSuchUpload", "OperationAborted"):
            assert [result["ETag"] for result in completed] == [one.head_object(Bucket="shared", Key="m")["ETag"]] * 2
        else:
            assert completed == ["NoSuchUpload"] * 2
        assert one.list_multipart_uploads(Bucket="shared").get("Uploads") is None
    one.head_bucket(Bucket="shared")


SERVER = """
import sys
from fronts import RunningFront
from penstock.gateway.buckets.directory import DirectoryBuckets
with RunningFront(table=DirectoryBuckets(sys.argv[1], read_write=True)) as front:
    print(front.port, flush=True)
    sys.stdin.read()
"""


def test_a_killed_gateway_leaves_nothing_visible(tmp_path: Path) -> None:
    """After ``kill -9`` amid a PUT there is no object, and the next start removes what was written of it."""
    (tmp_path / "shared").mkdir()
    staging = tmp_path / "shared" / ".penstock-gateway.tmp" / "staging"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True,
    )  # fmt: skip
    with server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            head = f"PUT /shared/half HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {8 * MIB}\r\n\r\n"
            connection.sendall(head.encode() + b"x" * (4 * MIB))
            client = s3_client(f"http://127.0.0.1:{port}")
            while not any(path.stat().st_size for path in (staging.iterdir() if staging.exists() else ())):
                client.head_bucket(Bucket="shared")  # bounded by the test's timeout
            assert "Contents" not in client.list_objects_v2(Bucket="shared")
            # A gateway that starts while this one writes takes nothing away from it.
            DirectoryBuckets(tmp_path, read_write=True)
            assert len(list(staging.iterdir())) == 1
            server.send_signal(signal.SIGKILL)
            server.wait()
    assert len(list(staging.iterdir())) == 1
    table = DirectoryBuckets(tmp_path, read_write=True)
    assert list(staging.iterdir()) == []
    with RunningFront(table=table) as front:
        assert "Contents" not in s3_client(front.url).list_objects_v2(Bucket="shared")


def test_a_client_that_leaves_amid_a_put_leaves_nothing(tmp_path: Path) -> None:
    """When the connection ends before the body does, the old object stays, and no hidden file is left."""
    (tmp_path / "shared").mkdir()
    staging = tmp_path / "shared" / ".penstock-gateway.tmp" / "staging"
    with RunningFront(table=DirectoryBuckets(tmp_path, read_write=True, is_durable=False)) as front:
        client = s3_client(front.url)
        client.put_object(Bucket="shared", Key="k", Body=b"before")
        with socket.create_connection(("127.0.0.1", front.port), timeout=20) as connection:
            head = f"PUT /shared/k HTTP/1.1\r\nHost: 127.0.0.1:{front.port}\r\nContent-Length: {8 * MIB}\r\n\r\n"
            connection.sendall(head.encode() + b"x" * (4 * MIB))
        while list(staging.iterdir()):
            client.head_bucket(Bucket="shared")  # bounded by the test's timeout
        assert client.get_object(Bucket="shared", Key="k")["Body"].read() == b"before"
