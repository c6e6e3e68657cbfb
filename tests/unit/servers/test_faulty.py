"""The misbehaving server behaves rightly until told otherwise, and then exactly as told."""

from __future__ import annotations

import http.client
import re
import urllib.parse
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from servers.faulty import FaultyServer
from servers.records import checksum

BODY = bytes(range(256)) * 4


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with FaultyServer(objects={"a": BODY, "b c/d+é": b"odd key"}) as started:
        yield started


class Answer:
    """One answer, read to its end; ``error`` is what stopped the reading."""

    def __init__(
        self, server: FaultyServer, target: str, method: str, body: bytes | None, headers: dict[str, str]
    ) -> None:
        with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)) as connection:
            self.status, self.body = 0, b""
            self.headers: dict[str, str] = {}
            self.error: Exception | None = None
            try:
                connection.request(method, target, body, headers)
                answer = connection.getresponse()
                self.status, self.headers = answer.status, {k.lower(): v for k, v in answer.getheaders()}
                self.body = answer.read()
            except http.client.IncompleteRead as error:
                self.body, self.error = error.partial, error
            except (OSError, http.client.HTTPException) as error:
                self.error = error


def ask(
    server: FaultyServer, key: str = "a", *, method: str = "GET", body: bytes | None = None, **headers: str
) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(server, f"/bucket/{key}", method, body, named)


def test_serves_objects_with_their_metadata(server: FaultyServer) -> None:
    """A GET has the bytes, ETag, date, request id and, if asked, the checksum."""
    answer = ask(server, x_amz_checksum_mode="ENABLED")
    assert (answer.status, answer.body) == (200, BODY)
    assert re.fullmatch(r'"[0-9a-f]{32}"', answer.headers["etag"])
    assert answer.headers["x-amz-checksum-crc32c"] == checksum(BODY)
    assert answer.headers["x-amz-checksum-type"] == "FULL_OBJECT"
    assert answer.headers["last-modified"].endswith("GMT")
    assert answer.headers["x-amz-request-id"]
    assert ask(server, urllib.parse.quote("b c/d+é", safe="")).body == b"odd key"


def boto(server: FaultyServer, **changes: Any) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint_url,
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
        config=Config(retries={"max_attempts": 0}, s3={"addressing_style": "path"}),
        **changes,
    )


def test_boto3_reads_writes_lists_copies_and_deletes(server: FaultyServer) -> None:
    """An independent client finds an S3: whole objects, multipart, copy, delete, listing with delimiter and pages."""
    with closing(boto(server)) as client:
        client.put_object(Bucket="bucket", Key="new", Body=b"new")
        assert client.get_object(Bucket="bucket", Key="new")["Body"].read() == b"new"
        with pytest.raises(ClientError, match="PreconditionFailed"):
            client.put_object(Bucket="bucket", Key="new", Body=b"newer", IfNoneMatch="*")
        upload = client.create_multipart_upload(Bucket="bucket", Key="parts")["UploadId"]
        etags = [
            client.upload_part(Bucket="bucket", Key="parts", UploadId=upload, PartNumber=n, Body=bytes([n]) * 5)["ETag"]
            for n in (1, 2)
        ]
        assert list(server.uploads) == [upload]
        done = client.complete_multipart_upload(
            Bucket="bucket",
            Key="parts",
            UploadId=upload,
            MultipartUpload={"Parts": [{"PartNumber": n + 1, "ETag": etag} for n, etag in enumerate(etags)]},
        )
        assert done["ETag"].endswith('-2"')
        assert server.objects["parts"] == b"\1" * 5 + b"\2" * 5
        assert not server.uploads
        client.copy_object(Bucket="bucket", Key="copy", CopySource={"Bucket": "bucket", "Key": "parts"})
        assert server.objects["copy"] == server.objects["parts"]
        for n in range(2500):
            server.objects[f"many/{n:04d}/x"] = b""
        pages = client.get_paginator("list_objects_v2").paginate(Bucket="bucket", Prefix="many/", Delimiter="/")
        prefixes = [each["Prefix"] for page in pages for each in page.get("CommonPrefixes", ())]
        assert prefixes == [f"many/{n:04d}/" for n in range(2500)]
        pages = client.get_paginator("list_objects_v2").paginate(Bucket="bucket")
        keys = [each["Key"] for page in pages for each in page.get("Contents", ())]
        assert keys == sorted(server.objects, key=str.encode)
        assert "b c/d+é" in keys
        client.delete_objects(Bucket="bucket", Delete={"Objects": [{"Key": "new"}, {"Key": "copy"}]})
        client.delete_object(Bucket="bucket", Key="a")
        assert not {"new", "copy", "a"} & set(server.objects)


TRIED: dict[str, Any] = {
    "close": lambda a: a.body == BODY[:10] and isinstance(a.error, http.client.IncompleteRead),
    "close_head": lambda a: isinstance(a.error, http.client.RemoteDisconnected),
    "promise_more": lambda a: a.body == BODY and isinstance(a.error, http.client.IncompleteRead),
    "stall": lambda a: isinstance(a.error, http.client.IncompleteRead),
    "stall_head": lambda a: isinstance(a.error, http.client.RemoteDisconnected),
    "delay": lambda a: a.status == 200 and a.body == BODY,
    "reset": lambda a: isinstance(a.error, ConnectionResetError),
    "reset_head": lambda a: isinstance(a.error, ConnectionResetError),
    "chunked": lambda a: a.body == BODY and "content-length" not in a.headers,
    "chunked_whole": lambda a: (a.status, a.body) == (200, BODY) and "content-length" not in a.headers,
    "unsized": lambda a: a.body == BODY and not {"content-length", "transfer-encoding"} & set(a.headers),
    "chunked_cut": lambda a: isinstance(a.error, http.client.IncompleteRead),
    "500": lambda a: a.status == 500 and b"InternalError" in a.body,
    "501": lambda a: a.status == 501 and b"NotImplemented" in a.body,
    "503": lambda a: a.status == 503 and "retry-after" not in a.headers and not a.body,
    "503_retry_after": lambda a: a.headers["retry-after"] == "0",
    "429": lambda a: a.status == 429,
    "slow_down": lambda a: a.status == 503 and b"<Code>SlowDown</Code>" in a.body,
    "403": lambda a: a.status == 403 and b"AccessDenied" in a.body,
    "quota": lambda a: a.status == 403 and b"QuotaExceeded" in a.body,
    "507": lambda a: a.status == 507 and b"XMinioStorageFull" in a.body,
    "expired_token": lambda a: a.status == 400 and b"ExpiredToken" in a.body,
    "expired_token_403": lambda a: a.status == 403 and b"ExpiredToken" in a.body,
    "time_skewed": lambda a: a.status == 403 and b"RequestTimeTooSkewed" in a.body and "date" in a.headers,
    "wrong_region_301": lambda a: a.status == 301 and a.headers["x-amz-bucket-region"] == "eu-central-1",
    "wrong_region_400": lambda a: a.status == 400 and a.headers["x-amz-bucket-region"] == "eu-central-1",
    "wrong_checksum": lambda a: a.headers["x-amz-checksum-crc32c"] != checksum(a.body),
    "corrupt": lambda a: len(a.body) == 1024 and a.body != BODY and a.error is None,
    "garbage_headers": lambda a: not a.body,
    "garbage_status": lambda a: isinstance(a.error, http.client.BadStatusLine),
    "html": lambda a: a.status == 200 and b"<html>" in a.body and "x-amz-request-id" not in a.headers,
    "empty_200": lambda a: a.status == 200 and not a.body,
}


@pytest.mark.parametrize("kind", TRIED)
def test_fault(server: FaultyServer, kind: str) -> None:
    """Told to fail once, it fails once in the way told, says so in its log, and then is well again."""
    server.fail(kind, match="a", after_bytes=10, seconds=0.01)
    assert TRIED[kind](ask(server))
    assert ask(server).body == BODY
    assert [request.fault for request in server.requests] == [kind, None]


def test_random_faults_depend_on_the_request_alone() -> None:
    """The same requests in another order meet the same faults; another seed, others; about the ratio of them."""
    objects = {f"k{n:03d}": b"x" for n in range(200)}

    def faults(order: list[str], seed: int) -> set[str]:
        with FaultyServer(objects=objects) as server:
            server.random_faults(["500", "slow_down"], ratio=0.1, seed=seed)
            for key in order:
                ask(server, key)
            return {request.key for request in server.requests if request.fault}

    keys = list(objects)
    first = faults(keys, 1)
    assert first == faults(keys[::-1], 1)
    assert first != faults(keys, 2)
    assert 10 <= len(first) <= 35
