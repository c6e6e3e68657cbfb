"""Writing through the gateway into an S3 upstream, and into other stores, with boto3 over real sockets."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import tracemalloc
import zlib
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError

import penstock as ps
from fronts import RunningFront, s3_client
from penstock.gateway.authentication import AccessKeys, SignatureAuthenticator
from penstock.gateway.buckets import forwarding
from penstock.gateway.buckets.forwarding import ForwardedOperations
from penstock.gateway.buckets.store_operations import operations_for
from penstock.gateway.buckets.submitting import perform_on_loop
from penstock.gateway.buckets.upstream import UpstreamBucket
from penstock.gateway.objects import Caller, GatewayRequest, S3Error
from penstock.store import LocalStore, MemoryStore
from penstock.store.base import innermost
from penstock.store.fsspec import FsspecStore
from penstock.types import CompleteMultipart, CreateMultipart, Part

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from penstock.store import Store
    from servers.faulty import FaultyServer

pytestmark = pytest.mark.server

MIB = 1 << 20
PART = bytes(range(256)) * (5 * MIB // 256)


class WritableBucket:
    """A gateway in front of a store, and a client of it."""

    def __init__(self, front: RunningFront) -> None:
        self.front = front
        self.client = s3_client(front.url, aws_access_key_id="test", aws_secret_access_key="test-secret")


def gateway_of(store: Store) -> RunningFront:
    """Return a gateway with keys, whose access point ``point`` writes to a store."""
    keys = AccessKeys.parse("test:test-secret:rw", source="test")
    bucket = UpstreamBucket("point", store, operations=operations_for(store))
    return RunningFront(bucket, authenticator=SignatureAuthenticator(keys))


@pytest.fixture(params=["", "some/prefix é/"], ids=["bucket", "prefix"])
def prefix(request: pytest.FixtureRequest) -> str:
    """What of the upstream's bucket is served."""
    return str(request.param)


@pytest.fixture
def point(connect_s3: Callable[..., Store], bucket: str, prefix: str) -> Iterator[Any]:
    """A client of a gateway in front of an S3 server."""
    with gateway_of(connect_s3(f"s3://{bucket}/{prefix}")) as front:
        yield WritableBucket(front).client


@pytest.mark.parametrize("size", [0, 10, MIB + 1, 9 * MIB])
def test_a_put_reaches_the_upstream(point: Any, s3_client: Any, bucket: str, prefix: str, size: int) -> None:
    """Bytes, headers and metadata arrive as they were sent, with the prefix before the key."""
    data = (PART * 2)[:size]
    put = point.put_object(
        Bucket="point", Key="a b+c/é", Body=data, ContentType="x/y", Metadata={"m": "1"}, CacheControl="no-cache"
    )
    assert put["ETag"] == f'"{hashlib.md5(data).hexdigest()}"'
    stored = s3_client.get_object(Bucket=bucket, Key=f"{prefix}a b+c/é")
    assert stored["Body"].read() == data
    assert (stored["ContentType"], stored["Metadata"], stored["CacheControl"]) == ("x/y", {"m": "1"}, "no-cache")
    assert point.get_object(Bucket="point", Key="a b+c/é")["Body"].read() == data
    point.delete_object(Bucket="point", Key="a b+c/é")
    with pytest.raises(ClientError):
        s3_client.head_object(Bucket=bucket, Key=f"{prefix}a b+c/é")


def test_a_multipart_upload_with_the_names_of_the_gateway(point: Any, s3_client: Any, bucket: str, prefix: str) -> None:
    """Uploads are begun, listed, completed and aborted; answers name the access point and the client's keys."""
    begun = point.create_multipart_upload(Bucket="point", Key="dir/x&y", Metadata={"m": "2"})
    assert (begun["Bucket"], begun["Key"]) == ("point", "dir/x&y")
    upload = begun["UploadId"]
    parts = []
    for number, data in enumerate((PART, b"tail"), 1):
        etag = point.upload_part(Bucket="point", Key="dir/x&y", UploadId=upload, PartNumber=number, Body=data)["ETag"]
        parts.append({"PartNumber": number, "ETag": etag})
    listed = point.list_parts(Bucket="point", Key="dir/x&y", UploadId=upload)
    assert [part["Size"] for part in listed["Parts"]] == [len(PART), 4]
    assert listed["Key"] == "dir/x&y"
    assert [row["Key"] for row in point.list_multipart_uploads(Bucket="point")["Uploads"]] == ["dir/x&y"]
    done = point.complete_multipart_upload(
        Bucket="point", Key="dir/x&y", UploadId=upload, MultipartUpload={"Parts": parts}
    )
    assert (done["Bucket"], done["Key"]) == ("point", "dir/x&y")
    assert done["Location"].endswith("/point/dir/x%26y")
    assert s3_client.get_object(Bucket=bucket, Key=f"{prefix}dir/x&y")["Body"].read() == PART + b"tail"
    other = point.create_multipart_upload(Bucket="point", Key="k")["UploadId"]
    point.abort_multipart_upload(Bucket="point", Key="k", UploadId=other)
    with pytest.raises(ClientError) as caught:
        point.complete_multipart_upload(Bucket="point", Key="k", UploadId=other, MultipartUpload={"Parts": parts})
    assert caught.value.response["Error"]["Code"] == "NoSuchUpload"


def test_an_upload_that_is_completed_again(faulty: FaultyServer, connect_faulty: Callable[..., Store]) -> None:
    """If the upstream's or the gateway's answer is lost, completing succeeds again, while the object has just these parts."""
    with gateway_of(connect_faulty()) as front:
        point = WritableBucket(front).client
        upload = point.create_multipart_upload(Bucket="point", Key="x&y")["UploadId"]
        same = {"Bucket": "point", "Key": "x&y", "UploadId": upload}
        etags = [point.upload_part(**same, PartNumber=n, Body=PART)["ETag"] for n in (1, 2)]
        named = {"Parts": [{"PartNumber": n, "ETag": etag} for n, etag in enumerate(etags, 1)]}
        faulty.fail("reset_head", times=1, match=lambda request: request.is_complete)
        for _ in range(2):
            done = point.complete_multipart_upload(**same, MultipartUpload=named)
            assert done["ETag"] == point.head_object(Bucket="point", Key="x&y")["ETag"]
            assert (done["Bucket"], done["Key"]) == ("point", "x&y")
        assert len([request for request in faulty.requests if request.is_complete]) == 3
        faulty.objects["x&y"] = PART * 2
        with pytest.raises(ClientError) as caught:
            point.complete_multipart_upload(**same, MultipartUpload=named)
        assert caught.value.response["Error"]["Code"] == "NoSuchUpload"


def test_deletions_and_copies_stay_below_the_prefix(point: Any, s3_client: Any, bucket: str, prefix: str) -> None:
    """Keys in documents and copy sources are the client's, and what lies beside the prefix is out of reach."""
    s3_client.put_object(Bucket=bucket, Key="beside", Body=b"x")
    for key in ("a", "b&<c>", "d"):
        point.put_object(Bucket="point", Key=key, Body=key.encode())
    point.copy_object(Bucket="point", Key="copy", CopySource={"Bucket": "point", "Key": "b&<c>"})
    assert s3_client.get_object(Bucket=bucket, Key=f"{prefix}copy")["Body"].read() == b"b&<c>"
    told = point.delete_objects(Bucket="point", Delete={"Objects": [{"Key": "a"}, {"Key": "b&<c>"}, {"Key": "none"}]})
    assert sorted(row["Key"] for row in told["Deleted"]) == ["a", "b&<c>", "none"]
    if prefix:
        point.delete_objects(Bucket="point", Delete={"Objects": [{"Key": "beside"}]})
        assert s3_client.get_object(Bucket=bucket, Key="beside")["Body"].read() == b"x"
    with pytest.raises(ClientError) as caught:
        point.copy_object(Bucket="point", Key="copy", CopySource={"Bucket": bucket, "Key": "beside"})
    assert caught.value.response["Error"]["Code"] == "NotImplemented"
    for key in ("../beside", "a/./b"):
        with pytest.raises(ClientError) as caught:
            point.delete_object(Bucket="point", Key=key)
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 400


def test_what_belongs_to_the_owner_of_the_upstream_is_refused(point: Any) -> None:
    """Settings of the bucket are neither shown nor changed, and no object is opened to others."""
    assert "Status" not in point.get_bucket_versioning(Bucket="point")
    for call, code in (
        (lambda: point.get_bucket_policy(Bucket="point"), "NoSuchBucketPolicy"),
        (lambda: point.put_bucket_policy(Bucket="point", Policy="{}"), "NotImplemented"),
        (
            lambda: point.put_bucket_versioning(Bucket="point", VersioningConfiguration={"Status": "Enabled"}),
            "NotImplemented",
        ),
        (lambda: point.put_object_acl(Bucket="point", Key="k", ACL="public-read"), "NotImplemented"),
        (lambda: point.put_object(Bucket="point", Key="k", ACL="public-read"), "AccessControlListNotSupported"),
    ):
        with pytest.raises(ClientError) as caught:
            call()
        assert caught.value.response["Error"]["Code"] == code


@pytest.mark.parametrize("name", ["If-Unmodified-Since", "Content-Range"])
def test_what_an_upstream_may_ignore_is_refused(point: Any, name: str) -> None:
    """S3 has no such header of writes, so it would overwrite or remove the object."""

    def add(request: Any, **_: Any) -> None:
        request.headers[name] = "x"

    point.put_object(Bucket="point", Key="k", Body=b"x")
    point.meta.events.register("before-sign.s3", add)
    for call in (partial(point.put_object, Body=b"y"), point.delete_object):
        with pytest.raises(ClientError) as caught:
            call(Bucket="point", Key="k")
        assert caught.value.response["Error"]["Code"] == "NotImplemented"
    point.meta.events.unregister("before-sign.s3", add)
    assert point.get_object(Bucket="point", Key="k")["Body"].read() == b"x"


def test_errors_of_the_upstream_are_passed_back(point: Any) -> None:
    """A condition that does not hold is the upstream's 412."""
    point.put_object(Bucket="point", Key="k", Body=b"x", IfNoneMatch="*")
    with pytest.raises(ClientError) as caught:
        point.put_object(Bucket="point", Key="k", Body=b"y", IfNoneMatch="*")
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 412
    assert point.get_object(Bucket="point", Key="k")["Body"].read() == b"x"


def test_the_cache_forgets_what_was_written(connect_s3: Callable[..., Store], bucket: str, tmp_path: Path) -> None:
    """With a cache that believes versions for an hour, a client reads what it has just written."""
    cache = ps.CacheConfig(path=tmp_path, bytes_max=100 * MIB, metadata_ttl_s=3600)
    with gateway_of(connect_s3(f"s3://{bucket}/", cache=cache)) as front:
        client = WritableBucket(front).client
        for value in (b"one", b"two", b"three"):
            client.put_object(Bucket="point", Key="k", Body=value)
            assert client.get_object(Bucket="point", Key="k")["Body"].read() == value
            assert len(client.list_objects_v2(Bucket="point")["Contents"]) == 1
        client.delete_objects(Bucket="point", Delete={"Objects": [{"Key": "k"}]})
        with pytest.raises(ClientError):
            client.head_object(Bucket="point", Key="k")
        assert "Contents" not in client.list_objects_v2(Bucket="point")


class TrailedBody:
    """A body whose checksum comes after its bytes; with an error, it is refused there."""

    def __init__(self, data: bytes, error: S3Error | None = None, *, pause_s: float = 0.0) -> None:
        self.length_bytes = len(data)
        self.checksums: dict[str, str] = {}
        self._data = data
        self._error = error
        self._pause_s = pause_s

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self._data), 100_000):
            yield self._data[start : start + 100_000]
            if self._pause_s and start == 3_000_000:
                await asyncio.sleep(self._pause_s)
        if self._error is not None:
            raise self._error
        self.checksums["crc32"] = base64.b64encode(zlib.crc32(self._data).to_bytes(4, "big")).decode()


def put_request(**headers: str) -> GatewayRequest:
    """Return a PUT of the key ``k``."""
    return GatewayRequest(
        method="PUT", bucket="point", key="k", query={}, headers=headers, caller=Caller("", True),
        url="http://gateway/point/k", remote="", request_id="1",
    )  # fmt: skip


async def performed(store: Store, request: GatewayRequest, body: TrailedBody) -> Any:
    """Pass one request on."""

    async def note_written(_keys: Any) -> None:
        """There is no cache."""

    writes = ForwardedOperations(innermost(store), note_written=note_written)
    try:
        return await writes.perform(request, body)
    finally:
        await writes.close()


@pytest.mark.parametrize("size", [10, 3 * MIB + 5])
def test_a_checksum_in_a_trailer_reaches_the_upstream(s3_store: Store, s3_client: Any, bucket: str, size: int) -> None:
    """The upstream verifies and keeps the checksum that the client sent after the bytes."""
    data = (PART)[:size]
    request = put_request(**{"x-amz-trailer": "x-amz-checksum-crc32", "Content-Encoding": "aws-chunked,gzip"})
    answer = asyncio.run(performed(s3_store, request, TrailedBody(data)))
    assert answer.status == 200
    stored = s3_client.head_object(Bucket=bucket, Key="k", ChecksumMode="ENABLED")
    assert stored["ContentLength"] == size
    assert stored["ContentEncoding"] == "gzip"
    assert stored["ChecksumCRC32"] == base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


def test_a_body_that_is_refused_at_its_end_is_not_stored(s3_store: Store, s3_client: Any, bucket: str) -> None:
    """If a streamed body turns out to be damaged, the client's error is its own, and the upstream has no object."""
    error = S3Error("BadDigest", "It does not match.", status=400)
    with pytest.raises(S3Error) as caught:
        asyncio.run(performed(s3_store, put_request(), TrailedBody(PART, error)))
    assert caught.value is error
    with pytest.raises(ClientError):
        s3_client.head_object(Bucket=bucket, Key="k")


def test_a_body_that_comes_slowly_is_sent_as_it_comes(
    s3_store: Store, s3_client: Any, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the client sends nothing, the upload waits, longer than an upstream may take for an answer, and then goes on."""
    core = innermost(s3_store)
    core.transport = replace(core.transport, first_byte_s_max=0.4)
    monkeypatch.setattr(forwarding, "_ANSWER_S_MAX", 0.4)
    answer = asyncio.run(performed(s3_store, put_request(), TrailedBody(PART, pause_s=2.0)))
    assert answer.headers["ETag"] == f'"{hashlib.md5(PART).hexdigest()}"'
    assert s3_client.get_object(Bucket=bucket, Key="k")["Body"].read() == PART


# ── other stores ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(params=["memory", "local"])
def simple(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """A client of a gateway in front of a store that is no S3."""
    store = MemoryStore() if request.param == "memory" else LocalStore(tmp_path)
    with gateway_of(store) as front:
        yield WritableBucket(front).client


def test_writing_into_other_stores(simple: Any) -> None:
    """Objects of any size are written, copied, replaced under a condition, and removed."""
    for size in (0, 5, 20 * MIB):
        data = (PART * 4)[:size]
        simple.put_object(Bucket="point", Key="a/k", Body=data)
        assert simple.get_object(Bucket="point", Key="a/k")["Body"].read() == data
    simple.copy_object(Bucket="point", Key="copy", CopySource="point/a/k")
    assert simple.head_object(Bucket="point", Key="copy")["ContentLength"] == 20 * MIB
    with pytest.raises(ClientError) as caught:
        simple.put_object(Bucket="point", Key="copy", Body=b"x", IfNoneMatch="*")
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 412
    told = simple.delete_objects(Bucket="point", Delete={"Objects": [{"Key": "copy"}]})
    assert [row["Key"] for row in told["Deleted"]] == ["copy"]
    simple.delete_object(Bucket="point", Key="a/k")
    assert "Contents" not in simple.list_objects_v2(Bucket="point")


def test_multipart_uploads_into_other_stores(simple: Any) -> None:
    """Parts become one object, copied parts among them; an aborted upload leaves nothing."""
    simple.put_object(Bucket="point", Key="src", Body=b"0123456789")
    upload = simple.create_multipart_upload(Bucket="point", Key="m")["UploadId"]
    first = simple.upload_part(Bucket="point", Key="m", UploadId=upload, PartNumber=1, Body=PART)["ETag"]
    second = simple.upload_part_copy(
        Bucket="point", Key="m", UploadId=upload, PartNumber=2, CopySource="point/src", CopySourceRange="bytes=2-4"
    )["CopyPartResult"]["ETag"]
    parts = [{"PartNumber": 1, "ETag": first}, {"PartNumber": 2, "ETag": second}]
    simple.complete_multipart_upload(Bucket="point", Key="m", UploadId=upload, MultipartUpload={"Parts": parts})
    assert simple.get_object(Bucket="point", Key="m")["Body"].read() == PART + b"234"
    other = simple.create_multipart_upload(Bucket="point", Key="n")["UploadId"]
    simple.abort_multipart_upload(Bucket="point", Key="n", UploadId=other)
    assert [row["Key"] for row in simple.list_objects_v2(Bucket="point")["Contents"]] == ["m", "src"]


def test_what_other_stores_do_not_honour_is_refused(simple: Any) -> None:
    """A condition, an old version or a demand that the store cannot meet changes nothing."""
    simple.put_object(Bucket="point", Key="k", Body=b"one")
    key = {"Bucket": "point", "Key": "k"}
    calls = [
        lambda: simple.put_object(**key, Body=b"two", IfNoneMatch="x"),
        lambda: simple.put_object(**key, Body=b"two", IfMatch="*"),
        lambda: simple.put_object(**key, Body=b"two", SSECustomerAlgorithm="AES256", SSECustomerKey="k" * 32),
        lambda: simple.put_object(**key, Body=b"two", ExpectedBucketOwner="1" * 12),
        lambda: simple.copy_object(**key, CopySource="point/k", IfNoneMatch="*"),
        lambda: simple.delete_object(**key, IfMatch="x"),
        lambda: simple.delete_object(**key, IfMatchSize=9),
        lambda: simple.delete_object(**key, VersionId="old"),
        *(
            lambda row=row: simple.delete_objects(Bucket="point", Delete={"Objects": [{"Key": "k", **row}]})
            for row in ({"ETag": "x"}, {"Size": 9}, {"VersionId": "old"})
        ),
    ]
    for call in calls:
        with pytest.raises(ClientError) as caught:
            call()
        assert caught.value.response["Error"]["Code"] in ("NotImplemented", "NoSuchVersion")
    assert simple.get_object(**key)["Body"].read() == b"one"


DESCRIBED = {"ContentType": "text/x-a", "CacheControl": "no-cache", "Metadata": {"run": "7"}}


def described(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the part of an answer that describes the object."""
    return {name: answer.get(name) for name in DESCRIBED}


@pytest.mark.parametrize("way", ["put", "large put", "upload"])
def test_other_stores_keep_what_clients_send(simple: Any, way: str) -> None:
    """Headers, metadata and tags come back, copies have those of their source or their own, and a new version has none."""
    key = {"Bucket": "point", "Key": "a/k"}
    if way == "upload":
        upload = simple.create_multipart_upload(**key, Tagging="t=v&u=", **DESCRIBED)["UploadId"]
        etag = simple.upload_part(**key, UploadId=upload, PartNumber=1, Body=b"part")["ETag"]
        parts = {"Parts": [{"PartNumber": 1, "ETag": etag}]}
        simple.complete_multipart_upload(**key, UploadId=upload, MultipartUpload=parts)
    else:
        simple.put_object(**key, Body=b"x" * (17 * MIB if way == "large put" else 5), Tagging="t=v&u=", **DESCRIBED)
    assert described(simple.get_object(**key)) == described(simple.head_object(**key)) == DESCRIBED
    assert simple.head_object(**key)["ResponseMetadata"]["HTTPHeaders"]["x-amz-tagging-count"] == "2"
    assert simple.get_object_tagging(**key)["TagSet"] == [{"Key": "t", "Value": "v"}, {"Key": "u", "Value": ""}]
    simple.copy_object(Bucket="point", Key="copy", CopySource="point/a/k")
    assert described(simple.head_object(Bucket="point", Key="copy")) == DESCRIBED
    simple.copy_object(
        Bucket="point", Key="copy", CopySource="point/a/k", MetadataDirective="REPLACE", Metadata={"other": "8"}
    )
    assert simple.head_object(Bucket="point", Key="copy")["Metadata"] == {"other": "8"}
    assert len(simple.get_object_tagging(Bucket="point", Key="copy")["TagSet"]) == 2
    simple.put_object(**key, Body=b"anew")
    assert simple.head_object(**key)["Metadata"] == {}
    assert simple.get_object_tagging(**key)["TagSet"] == []


def test_other_stores_replace_one_version_only(simple: Any) -> None:
    """If-Match is compared with the current version, for a PUT and for an upload, and a missing object has none."""
    key = {"Bucket": "point", "Key": "k"}
    first = simple.put_object(**key, Body=b"one")["ETag"]
    second = simple.put_object(**key, Body=b"two", IfMatch=first)["ETag"]
    upload = simple.create_multipart_upload(**key)["UploadId"]
    etag = simple.upload_part(**key, UploadId=upload, PartNumber=1, Body=b"three")["ETag"]
    ending = {**key, "UploadId": upload, "MultipartUpload": {"Parts": [{"PartNumber": 1, "ETag": etag}]}}
    for call, code in (
        (lambda: simple.put_object(**key, Body=b"x", IfMatch=first), "PreconditionFailed"),
        (lambda: simple.put_object(**key, Body=b"x", IfMatch='W/"weak"'), "PreconditionFailed"),
        (lambda: simple.put_object(Bucket="point", Key="none", Body=b"x", IfMatch=first), "NoSuchKey"),
        (lambda: simple.complete_multipart_upload(**ending, IfMatch=first), "PreconditionFailed"),
    ):
        with pytest.raises(ClientError) as caught:
            call()
        assert caught.value.response["Error"]["Code"] == code
    assert simple.get_object(**key)["Body"].read() == b"two"
    simple.complete_multipart_upload(**ending, IfMatch=second)
    assert simple.get_object(**key)["Body"].read() == b"three"


def test_a_store_of_bytes_alone_takes_objects_without_headers(tmp_path: Path) -> None:
    """A type is left out, because every client sends one, but tags and conditions are refused."""
    with FsspecStore(f"local://{tmp_path}") as store, gateway_of(store) as front:
        client = WritableBucket(front).client
        client.put_object(Bucket="point", Key="k", Body=b"one", ContentType="text/plain")
        for options in ({"Tagging": "a=b"}, {"IfMatch": "x"}):
            with pytest.raises(ClientError) as caught:
                client.put_object(Bucket="point", Key="k", Body=b"two", **options)
            assert caught.value.response["Error"]["Code"] == "NotImplemented"
        assert client.get_object(Bucket="point", Key="k")["Body"].read() == b"one"


class LongBody:
    """A body of zeros that is made while it is read."""

    checksums: dict[str, str] = {}  # noqa: RUF012 - nobody changes it

    def __init__(self, length_bytes: int, sent_bytes: int) -> None:
        self.length_bytes = length_bytes
        self._sent_bytes = sent_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for _ in range(self._sent_bytes // MIB):
            yield bytes(MIB)


def test_a_part_of_any_size_is_not_held(tmp_path: Path) -> None:
    """A part of 200 MiB reaches a directory while less than 20 MiB are in memory; one that is cut off leaves nothing."""

    async def run() -> None:
        with LocalStore(tmp_path) as store:
            operations = operations_for(store)
            upload_id = (await perform_on_loop(store, CreateMultipart("k"))).value
            request = replace(put_request(), query={"uploadId": upload_id, "partNumber": "1"})
            with pytest.raises(S3Error) as caught:
                await operations.perform(request, LongBody(200 * MIB, 100 * MIB))
            assert caught.value.code == "IncompleteBody"
            tracemalloc.start()
            try:
                answer = await operations.perform(request, LongBody(200 * MIB, 200 * MIB))
                assert tracemalloc.get_traced_memory()[1] < 20 * MIB
            finally:
                tracemalloc.stop()
            part = Part(1, answer.headers["ETag"])
            await perform_on_loop(store, CompleteMultipart("k", upload_id, (part,)))
            assert store.stat("k").size_bytes == 200 * MIB

    asyncio.run(run())


def test_uploads_to_a_directory_are_refused_as_by_s3(tmp_path: Path) -> None:
    """An upload that does not exist is 404, and parts that were not sent or do not ascend are 400, so no client tries again."""
    with LocalStore(tmp_path) as store, gateway_of(store) as front:
        point = WritableBucket(front).client
        upload = {
            "Bucket": "point",
            "Key": "k",
            "UploadId": point.create_multipart_upload(Bucket="point", Key="k")["UploadId"],
        }
        parts = [
            {"PartNumber": number, "ETag": point.upload_part(**upload, PartNumber=number, Body=b"x")["ETag"]}
            for number in (1, 2)
        ]
        calls: list[tuple[Callable[..., Any], dict[str, Any], tuple[int, str]]] = [
            (point.upload_part, {**upload, "UploadId": "other", "PartNumber": 1}, (404, "NoSuchUpload")),
            (point.abort_multipart_upload, {**upload, "UploadId": "other"}, (404, "NoSuchUpload")),
            (
                point.complete_multipart_upload,
                {**upload, "MultipartUpload": {"Parts": [{**parts[0], "PartNumber": 3}]}},
                (400, "InvalidPart"),
            ),
            (
                point.complete_multipart_upload,
                {**upload, "MultipartUpload": {"Parts": parts[::-1]}},
                (400, "InvalidPartOrder"),
            ),
        ]
        for call, arguments, expected in calls:
            with pytest.raises(ClientError) as caught:
                call(**arguments)
            answer = caught.value.response
            assert (answer["ResponseMetadata"]["HTTPStatusCode"], answer["Error"]["Code"]) == expected
            assert answer["ResponseMetadata"]["RetryAttempts"] == 0
        point.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
        assert store.read("k").data == b"xx"


def test_the_owner_that_a_client_expects_is_told_to_the_upstream(
    faulty: FaultyServer, connect_faulty: Callable[..., Store]
) -> None:
    """The upstream compares it; one that contradicts the gateway's own setting is refused, and nothing is written."""
    with gateway_of(connect_faulty(expected_bucket_owner="1" * 12)) as front:
        point = WritableBucket(front).client
        point.put_object(Bucket="point", Key="k", Body=b"x", ExpectedBucketOwner="1" * 12)
        with pytest.raises(ClientError) as caught:
            point.put_object(Bucket="point", Key="k", Body=b"y", ExpectedBucketOwner="2" * 12)
        assert caught.value.response["Error"]["Code"] == "AccessDenied"
        assert faulty.objects["k"] == b"x"
    with gateway_of(connect_faulty()) as front:
        WritableBucket(front).client.delete_object(Bucket="point", Key="k", ExpectedBucketOwner="2" * 12)
        assert faulty.requests[-1].headers["x-amz-expected-bucket-owner"] == "2" * 12
