"""A directory as an S3 server: boto3 writes, reads and lists it over real sockets, and other programs see plain files."""

from __future__ import annotations

import base64
import hashlib
import os
import zlib
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError

from fronts import RunningFront, s3_client
from penstock.gateway.authentication import AccessKeys, SignatureAuthenticator
from penstock.gateway.buckets.directory import DirectoryBuckets
from penstock.gateway.buckets.upstream import UpstreamBucket
from penstock.gateway.serving.assembly import AccessPointTable
from penstock.store import LocalStore, MemoryStore
from penstock.types import lasting_etag

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.server

MIB = 1 << 20
PART = bytes(range(256)) * (5 * MIB // 256)
NATURAL_KEYS = [
    "plain",
    "dir/plain",
    "with space",
    " lead",
    "plus+plus",
    "per%20cent%2F",
    "ünï/日本語/\U0001f600",
    "quo\"te<>&'",
    "a=b&c?d#e;f",
    "new\nline\r\ttab",
    "\x01\x1f",
    "~tilde",
    "back\\slash",
    "-dash",
    "dots...and.dots",
    "k" * 255,
    "/".join(["0123456789abcde"] * 64) + "f",
]
ESCAPED_KEYS = [
    "//",
    "/",
    "/leading",
    "trailing/",
    "x/y//",
    "double//slash",
    "with:colon//",
    ".penstock-x.tmp/inside",
    "k" * 1024,
    "é" * 512,
]
DOT_KEYS = [".", "..", "a/../b", "../a", "a/./b", "./a", "a/.", "a/.."]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that is served."""
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def front(root: Path) -> Iterator[RunningFront]:
    """A gateway in front of it, with keys."""
    keys = AccessKeys.parse("test:test-secret:rw,reader:reader-secret:ro", source="test")
    table = DirectoryBuckets(root, read_write=True, is_durable=False)
    with RunningFront(table=table, authenticator=SignatureAuthenticator(keys)) as running:
        yield running


@pytest.fixture(scope="module")
def client(front: RunningFront) -> Any:
    """A boto3 client that may write."""
    return client_of(front, "test")


def client_of(front: RunningFront, name: str) -> Any:
    """Return a boto3 client with one of the two keys."""
    return s3_client(front.url, aws_access_key_id=name, aws_secret_access_key=f"{name}-secret")


@pytest.fixture
def bucket(client: Any, root: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """A bucket of its own for each test; nothing of it is left afterwards."""
    name = "b" + hashlib.md5(request.node.nodeid.encode(), usedforsecurity=False).hexdigest()[:20]
    client.create_bucket(Bucket=name)
    yield name
    staging = root / name / ".penstock-gateway.tmp" / "staging"
    assert not staging.exists() or not list(staging.iterdir())


def code_of(caught: Any) -> tuple[str, int]:
    """Return code and status of an error."""
    answer = caught.value.response
    return answer["Error"]["Code"], answer["ResponseMetadata"]["HTTPStatusCode"]


def keys_in(client: Any, bucket: str, **arguments: Any) -> list[str]:
    """Return all keys of a bucket."""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, **arguments)
    return [row["Key"] for page in pages for row in page.get("Contents", [])]


# ── objects ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", [0, 1, 100_000, 256 << 10, (256 << 10) + 1, 3 * MIB + 7])
def test_an_object_comes_back_as_it_was_written(client: Any, bucket: str, root: Path, size: int) -> None:
    """GET returns the bytes, the MD5 as ETag, and all headers; the bytes are a plain file at the natural path."""
    data = (PART * (size // len(PART) + 1))[:size]
    put = client.put_object(
        Bucket=bucket, Key="a/b.bin", Body=data, ContentType="text/x-odd", CacheControl="max-age=3",
        ContentDisposition="attachment", ContentLanguage="de", ContentEncoding="gzip", Expires="Thu, 01 Jan 2032 00:00:00 GMT",
        Metadata={"One": "1", "two": "zwei drei"},
    )  # fmt: skip
    assert put["ETag"] == f'"{hashlib.md5(data).hexdigest()}"'
    for answer in (client.get_object(Bucket=bucket, Key="a/b.bin"), client.head_object(Bucket=bucket, Key="a/b.bin")):
        assert answer["ETag"] == put["ETag"]
        assert answer["ContentLength"] == size
        assert answer["Metadata"] == {"one": "1", "two": "zwei drei"}
        named = (
            "ContentType",
            "CacheControl",
            "ContentDisposition",
            "ContentLanguage",
            "ContentEncoding",
            "ExpiresString",
        )
        assert [answer[name] for name in named] == [
            "text/x-odd", "max-age=3", "attachment", "de", "gzip", "Thu, 01 Jan 2032 00:00:00 GMT",
        ]  # fmt: skip
    assert client.get_object(Bucket=bucket, Key="a/b.bin")["Body"].read() == data
    assert (root / bucket / "a" / "b.bin").read_bytes() == data
    if size > 10:
        part = client.get_object(Bucket=bucket, Key="a/b.bin", Range="bytes=5-9")
        assert (part["Body"].read(), part["ResponseMetadata"]["HTTPStatusCode"]) == (data[5:10], 206)
        assert client.get_object(Bucket=bucket, Key="a/b.bin", Range="bytes=-3")["Body"].read() == data[-3:]


@pytest.mark.parametrize("key", NATURAL_KEYS + ESCAPED_KEYS, ids=lambda key: ascii(key)[:30])
def test_every_key_works(client: Any, bucket: str, root: Path, key: str) -> None:
    """Any key of S3 is written, read, listed and removed, and none leads out of the bucket's folder."""
    before = sorted(path for path in root.iterdir() if path.name != bucket)
    client.put_object(Bucket=bucket, Key=key, Body=b"data", Metadata={"is": "kept"})
    answer = client.get_object(Bucket=bucket, Key=key)
    assert (answer["Body"].read(), answer["Metadata"]) == (b"data", {"is": "kept"})
    assert keys_in(client, bucket) == [key]
    assert keys_in(client, bucket, Prefix=key[:1]) == [key]
    if key in NATURAL_KEYS:
        assert (root / bucket / key).read_bytes() == b"data"
        assert [info.key for info in LocalStore(root / bucket).list()] == [key]
    client.copy_object(Bucket=bucket, Key="copied", CopySource={"Bucket": bucket, "Key": key})
    assert client.get_object(Bucket=bucket, Key="copied")["Body"].read() == b"data"
    gone = client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": key}, {"Key": "copied"}]})
    assert "Errors" not in gone
    assert keys_in(client, bucket) == []
    client.delete_bucket(Bucket=bucket)
    assert sorted(path for path in root.iterdir() if path.name != bucket) == before


def test_keys_that_cannot_be_stored_are_refused(client: Any, bucket: str) -> None:
    """A key above 1 024 bytes is ``KeyTooLongError``."""
    with pytest.raises(ClientError) as caught:
        client.put_object(Bucket=bucket, Key="k" * 1025, Body=b"x")
    assert code_of(caught) == ("KeyTooLongError", 400)


@pytest.mark.parametrize("order", [["a", "a/b", "a/b/c"], ["a/b/c", "a/b", "a"], ["a/b", "a/", "a"]], ids=str)
def test_a_key_may_be_the_prefix_of_another(client: Any, bucket: str, order: list[str]) -> None:
    """Keys that no file system can hold as paths beside each other all exist, in any order of writing and removing."""
    for key in order:
        client.put_object(Bucket=bucket, Key=key, Body=key.encode())
    assert keys_in(client, bucket) == sorted(order)
    assert [client.get_object(Bucket=bucket, Key=key)["Body"].read() for key in order] == [
        key.encode() for key in order
    ]
    for key in order:
        client.put_object(Bucket=bucket, Key=key, Body=b"again")
    for index, key in enumerate(order):
        assert client.get_object(Bucket=bucket, Key=key)["Body"].read() == b"again"
        client.delete_object(Bucket=bucket, Key=key)
        assert keys_in(client, bucket) == sorted(order[index + 1 :])


def test_missing_objects_and_buckets(client: Any, bucket: str) -> None:
    """Reading what is missing is 404 with S3's codes, and removing it is no error."""
    for call, code in (
        (lambda: client.get_object(Bucket=bucket, Key="none"), "NoSuchKey"),
        (lambda: client.head_object(Bucket=bucket, Key="none"), "404"),
        (lambda: client.get_object(Bucket="no-such-bucket", Key="none"), "NoSuchBucket"),
        (lambda: client.put_object(Bucket="no-such-bucket", Key="none"), "NoSuchBucket"),
        (lambda: client.list_objects_v2(Bucket="no-such-bucket"), "NoSuchBucket"),
        (lambda: client.copy_object(Bucket=bucket, Key="k", CopySource=f"{bucket}/none"), "NoSuchKey"),
        (lambda: client.copy_object(Bucket=bucket, Key="k", CopySource="no-such-bucket/none"), "NoSuchBucket"),
    ):
        with pytest.raises(ClientError) as caught:
            call()
        assert code_of(caught) == (code, 404)
    assert client.delete_object(Bucket=bucket, Key="none")["ResponseMetadata"]["HTTPStatusCode"] == 204


def test_conditional_writes(client: Any, bucket: str) -> None:
    """``If-None-Match: *`` never replaces, and ``If-Match`` replaces one version alone."""
    etag = client.put_object(Bucket=bucket, Key="k", Body=b"one", IfNoneMatch="*")["ETag"]
    with pytest.raises(ClientError) as caught:
        client.put_object(Bucket=bucket, Key="k", Body=b"two", IfNoneMatch="*")
    assert code_of(caught) == ("PreconditionFailed", 412)
    with pytest.raises(ClientError) as caught:
        client.put_object(Bucket=bucket, Key="k", Body=b"two", IfMatch='"other"')
    assert code_of(caught) == ("PreconditionFailed", 412)
    with pytest.raises(ClientError) as caught:
        client.put_object(Bucket=bucket, Key="none", Body=b"two", IfMatch=etag)
    assert code_of(caught) == ("NoSuchKey", 404)
    client.put_object(Bucket=bucket, Key="k", Body=b"two", IfMatch=etag)
    with pytest.raises(ClientError) as caught:
        client.delete_object(Bucket=bucket, Key="k", IfMatch=etag)
    assert code_of(caught) == ("PreconditionFailed", 412)
    assert client.get_object(Bucket=bucket, Key="k")["Body"].read() == b"two"


def test_conditional_deletes(client: Any, bucket: str) -> None:
    """A version whose ETag, size or time differs is kept, by DeleteObject and by DeleteObjects; a missing one is no error."""
    for name, right, wrong in (
        ("Size", 3, 4),
        ("LastModifiedTime", None, datetime(2001, 1, 1, tzinfo=UTC)),
        ("ETag", hashlib.md5(b"one").hexdigest(), "x"),
    ):
        client.put_object(Bucket=bucket, Key="k", Body=b"one")
        modified = client.head_object(Bucket=bucket, Key="k")["LastModified"]
        header = f"IfMatch{name.removeprefix('ETag')}"
        with pytest.raises(ClientError) as caught:
            client.delete_object(Bucket=bucket, Key="k", **{header: wrong})
        assert code_of(caught) == ("PreconditionFailed", 412)
        told = client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": "k", name: wrong}]})
        assert [(row["Key"], row["Code"]) for row in told["Errors"]] == [("k", "PreconditionFailed")]
        assert client.get_object(Bucket=bucket, Key="k")["Body"].read() == b"one"
        client.delete_object(Bucket=bucket, Key="k", **{header: right or modified})
        assert keys_in(client, bucket) == []
        client.delete_object(Bucket=bucket, Key="k", **{header: wrong})
        assert "Errors" not in client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": "k", name: wrong}]})


@contextmanager
def sent_with(client: Any, headers: dict[str, str], query: str = "") -> Iterator[None]:
    """Add headers and a query to all requests of a client."""

    def add(request: Any, **_: Any) -> None:
        for name, value in headers.items():
            request.headers[name] = value
        request.url += f"{'&' if '?' in request.url else '?'}{query}" if query else ""

    client.meta.events.register("before-sign.s3", add)
    try:
        yield
    finally:
        client.meta.events.unregister("before-sign.s3", add)


@pytest.mark.parametrize(
    ("headers", "query"),
    [
        ({"x-amz-expected-bucket-owner": "123456789012"}, ""),
        ({"x-amz-server-side-encryption-customer-algorithm": "AES256"}, ""),
        ({"x-amz-object-lock-legal-hold": "ON"}, ""),
        ({"x-amz-write-offset-bytes": "3"}, ""),
        ({"x-amz-if-match-initiated-time": "Mon, 01 Jan 2001 00:00:00 GMT"}, ""),
        ({"If-Unmodified-Since": "Mon, 01 Jan 2001 00:00:00 GMT"}, ""),
        ({"Content-Range": "bytes 3-5/6"}, ""),
        ({}, "renameObject"),
        ({}, "annotation&name=n"),
        ({}, "x-amz-if-match-size=9"),
        ({}, "x-amz-copy-source=/other/k"),
        ({}, "x-amz-acl=public-read"),
    ],
    ids=str,
)
def test_what_is_not_honoured_is_refused(
    client: Any, bucket: str, headers: dict[str, str], query: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A condition, demand or operation that is unknown here changes nothing, whichever write carries it, and is no failure."""
    client.put_object(Bucket=bucket, Key="k", Body=b"one", Tagging="a=1")
    upload = client.create_multipart_upload(Bucket=bucket, Key="m")["UploadId"]
    part = {"Bucket": bucket, "Key": "m", "UploadId": upload, "PartNumber": 1}
    key = {"Bucket": bucket, "Key": "k"}
    with sent_with(client, headers, query):
        for call in (
            lambda: client.put_object(**key, Body=b"two"),
            lambda: client.copy_object(**key, CopySource=f"{bucket}/k", MetadataDirective="REPLACE"),
            lambda: client.delete_object(**key),
            lambda: client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": "k"}]}),
            lambda: client.delete_object_tagging(**key),
            lambda: client.create_multipart_upload(**key),
            lambda: client.upload_part(**part, Body=b"x"),
            lambda: client.upload_part_copy(**part, CopySource=f"{bucket}/k"),
            lambda: client.abort_multipart_upload(Bucket=bucket, Key="m", UploadId=upload),
        ):
            with pytest.raises(ClientError) as caught:
                call()
            assert code_of(caught) == ("NotImplemented", 501)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert client.get_object(**key)["Body"].read() == b"one"
    assert client.get_object_tagging(**key)["TagSet"] == [{"Key": "a", "Value": "1"}]
    assert "Parts" not in client.list_parts(Bucket=bucket, Key="m", UploadId=upload)
    assert len(client.list_multipart_uploads(Bucket=bucket)["Uploads"]) == 1


@pytest.mark.parametrize(
    ("headers", "query"),
    [({"x-amz-expected-bucket-owner": "1" * 12}, ""), ({"x-amz-bucket-object-lock-enabled": "true"}, ""),
     ({}, "metadataConfiguration"), ({}, "unheard-of")],
    ids=str,
)  # fmt: skip
def test_a_bucket_is_not_changed_by_unknown_requests(
    client: Any, headers: dict[str, str], query: str, root: Path
) -> None:
    """Neither is it made without the lock that was asked for, nor removed because its setting was meant."""
    (root / "old-bucket").mkdir(exist_ok=True)
    with sent_with(client, headers, query):
        for call, name in ((client.create_bucket, "new-bucket"), (client.delete_bucket, "old-bucket")):
            with pytest.raises(ClientError) as caught:
                call(Bucket=name)
            assert code_of(caught)[1] in (404, 501)
    assert not (root / "new-bucket").exists()
    (root / "old-bucket").rmdir()


def test_files_of_other_programs_are_objects(client: Any, bucket: str, root: Path) -> None:
    """A file that another program writes, replaces or removes is served as it is, with a strong ETag that is no MD5."""
    path = root / bucket / "there" / "file.txt"
    path.parent.mkdir()
    path.write_bytes(b"first")
    first = client.head_object(Bucket=bucket, Key="there/file.txt")
    assert "-" in first["ETag"]
    assert first["ContentType"] == "text/plain"
    listed = client.list_objects_v2(Bucket=bucket)["Contents"][0]
    assert (listed["ETag"], listed["Size"]) == (first["ETag"], 5)
    assert lasting_etag(LocalStore(root / bucket).stat("there/file.txt").etag) == first["ETag"]
    client.put_object(Bucket=bucket, Key="there/file.txt", Body=b"written here", Metadata={"a": "b"})
    path.write_bytes(b"changed in place")
    changed = client.get_object(Bucket=bucket, Key="there/file.txt")
    assert (changed["Body"].read(), changed["Metadata"]) == (b"changed in place", {})
    assert "-" in changed["ETag"]
    path.unlink()
    with pytest.raises(ClientError):
        client.head_object(Bucket=bucket, Key="there/file.txt")


def test_nothing_is_written_through_links(client: Any, bucket: str, root: Path, tmp_path: Path) -> None:
    """Links are read, and a write replaces a link or is refused, but nothing outside the directory changes."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"outside")
    (root / bucket / "link").symlink_to(outside / "file")
    (root / bucket / "folder").symlink_to(outside)
    assert client.get_object(Bucket=bucket, Key="link")["Body"].read() == b"outside"
    assert client.get_object(Bucket=bucket, Key="folder/file")["Body"].read() == b"outside"
    client.put_object(Bucket=bucket, Key="link", Body=b"replaced")
    for call in (client.put_object, client.delete_object):
        with pytest.raises(ClientError) as caught:
            call(Bucket=bucket, Key="folder/file")
        assert code_of(caught) == ("AccessDenied", 403)
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == {"file": b"outside"}
    assert client.get_object(Bucket=bucket, Key="link")["Body"].read() == b"replaced"


# ── checksums ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("algorithm", ["CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256"])
def test_checksums_are_kept_and_compared(client: Any, bucket: str, algorithm: str) -> None:
    """Each algorithm is stored, told on request, and a wrong value is refused."""
    field = f"Checksum{algorithm}"
    put = client.put_object(Bucket=bucket, Key="k", Body=b"hello", ChecksumAlgorithm=algorithm)
    got = client.get_object(Bucket=bucket, Key="k", ChecksumMode="ENABLED")
    assert got["Body"].read() == b"hello"
    assert got[field] == put[field]
    assert got["ChecksumType"] == "FULL_OBJECT"
    assert client.head_object(Bucket=bucket, Key="k", ChecksumMode="ENABLED")[field] == put[field]
    wrong = put[field][1:2] + put[field][:1] + put[field][2:]
    with pytest.raises(ClientError) as caught:
        client.put_object(Bucket=bucket, Key="k", Body=b"other", **{field: wrong})
    assert code_of(caught)[1] == 400
    assert client.get_object(Bucket=bucket, Key="k")["Body"].read() == b"hello"
    attributes = client.get_object_attributes(
        Bucket=bucket, Key="k", ObjectAttributes=["Checksum", "ObjectSize", "ETag"]
    )
    assert attributes["Checksum"][field] == put[field]
    assert (attributes["ObjectSize"], attributes["ETag"]) == (5, hashlib.md5(b"hello").hexdigest())


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [("CRC32", "FULL_OBJECT"), ("CRC32C", "FULL_OBJECT"), ("CRC64NVME", "FULL_OBJECT"), ("CRC32", "COMPOSITE"),
     ("CRC32C", "COMPOSITE"), ("SHA1", "COMPOSITE"), ("SHA256", "COMPOSITE")],
)  # fmt: skip
def test_checksums_of_multipart_objects(client: Any, bucket: str, algorithm: str, kind: str) -> None:
    """A composite checksum is that of the parts' checksums, and a full-object one is that of the joined bytes."""
    field, tail = f"Checksum{algorithm}", b"tail" * 1000
    upload = client.create_multipart_upload(Bucket=bucket, Key="k", ChecksumAlgorithm=algorithm, ChecksumType=kind)[
        "UploadId"
    ]
    parts = []
    for number, data in enumerate((PART, tail), 1):
        part = client.upload_part(
            Bucket=bucket, Key="k", UploadId=upload, PartNumber=number, Body=data, ChecksumAlgorithm=algorithm
        )
        parts.append({"PartNumber": number, "ETag": part["ETag"], field: part[field]})
    done = client.complete_multipart_upload(Bucket=bucket, Key="k", UploadId=upload, MultipartUpload={"Parts": parts})
    head = client.head_object(Bucket=bucket, Key="k", ChecksumMode="ENABLED")
    assert (done[field], done["ChecksumType"]) == (head[field], head["ChecksumType"]) == (head[field], kind)
    if kind == "FULL_OBJECT":
        whole = client.put_object(Bucket=bucket, Key="whole", Body=PART + tail, ChecksumAlgorithm=algorithm)
        assert head[field] == whole[field]
    else:
        assert head[field].endswith("-2")
        rows = client.get_object_attributes(Bucket=bucket, Key="k", ObjectAttributes=["ObjectParts"])["ObjectParts"]
        assert [row[field] for row in rows["Parts"]] == [part[field] for part in parts]
        if algorithm == "CRC32":
            digests = b"".join(base64.b64decode(part[field]) for part in parts)
            assert head[field] == base64.b64encode(zlib.crc32(digests).to_bytes(4, "big")).decode() + "-2"


# ── multipart ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_multipart_upload(client: Any, bucket: str, root: Path) -> None:
    """Parts become one plain file; sizes of parts, ETag, metadata and part numbers are those of S3."""
    begun = client.create_multipart_upload(Bucket=bucket, Key="big/x", Metadata={"m": "1"}, ContentType="a/b")
    upload = begun["UploadId"]
    tail = b"end"
    etags = {}
    for number, data in ((7, tail), (2, b"replaced later"), (2, PART)):
        etags[number] = client.upload_part(Bucket=bucket, Key="big/x", UploadId=upload, PartNumber=number, Body=data)[
            "ETag"
        ]
    listed = client.list_parts(Bucket=bucket, Key="big/x", UploadId=upload)
    assert [(part["PartNumber"], part["Size"], part["ETag"]) for part in listed["Parts"]] == [
        (2, len(PART), etags[2]), (7, 3, etags[7]),
    ]  # fmt: skip
    page = client.list_parts(Bucket=bucket, Key="big/x", UploadId=upload, MaxParts=1)
    assert (page["IsTruncated"], page["NextPartNumberMarker"]) == (True, 2)
    assert [row["Key"] for row in client.list_multipart_uploads(Bucket=bucket)["Uploads"]] == ["big/x"]
    assert keys_in(client, bucket) == []
    named = [{"PartNumber": number, "ETag": etags[number]} for number in (2, 7)]
    done = client.complete_multipart_upload(
        Bucket=bucket, Key="big/x", UploadId=upload, MultipartUpload={"Parts": named}
    )
    digest = hashlib.md5(hashlib.md5(PART).digest() + hashlib.md5(tail).digest()).hexdigest()
    assert done["Location"] == f"{client.meta.endpoint_url}/{bucket}/big/x"
    assert done["ETag"] == f'"{digest}-2"'
    assert (root / bucket / "big" / "x").read_bytes() == PART + tail
    second = client.get_object(Bucket=bucket, Key="big/x", PartNumber=2)
    assert (second["Body"].read(), second["PartsCount"], second["Metadata"]) == (tail, 2, {"m": "1"})
    assert client.list_multipart_uploads(Bucket=bucket).get("Uploads") is None
    assert client.list_objects_v2(Bucket=bucket)["Contents"][0]["ETag"] == done["ETag"]
    parts = client.get_object_attributes(Bucket=bucket, Key="big/x", ObjectAttributes=["ObjectParts"])["ObjectParts"]
    assert parts["TotalPartsCount"] == 2


def test_what_completing_refuses(client: Any, bucket: str) -> None:
    """Wrong orders, wrong parts, small parts and unknown uploads have S3's errors, and the upload goes on afterwards."""
    upload = client.create_multipart_upload(Bucket=bucket, Key="k")["UploadId"]

    def part(number: int, data: bytes) -> dict[str, Any]:
        etag = client.upload_part(Bucket=bucket, Key="k", UploadId=upload, PartNumber=number, Body=data)["ETag"]
        return {"PartNumber": number, "ETag": etag}

    one, two, three = part(1, PART), part(2, b"small"), part(3, b"last")

    def complete(*parts: dict[str, Any], upload_id: str = upload, **more: Any) -> Any:
        named = {"Parts": list(parts)}
        return client.complete_multipart_upload(
            Bucket=bucket, Key="k", UploadId=upload_id, MultipartUpload=named, **more
        )

    for parts, code in (
        ([two, one], "InvalidPartOrder"),
        ([one, one], "InvalidPartOrder"),
        ([one, two, three], "EntityTooSmall"),
        ([one, {"PartNumber": 9, "ETag": three["ETag"]}], "InvalidPart"),
        ([one, {"PartNumber": 3, "ETag": '"00000000000000000000000000000000"'}], "InvalidPart"),
        ([], "MalformedXML"),
    ):
        with pytest.raises(ClientError) as caught:
            complete(*parts)
        assert code_of(caught) == (code, 400)
    for other in ("nonsense", "0" * 32, "../../x"):
        with pytest.raises(ClientError) as caught:
            complete(one, upload_id=other)
        assert code_of(caught) == ("NoSuchUpload", 404)
    client.put_object(Bucket=bucket, Key="k", Body=b"there")
    with pytest.raises(ClientError) as caught:
        complete(one, three, IfNoneMatch="*")
    assert code_of(caught) == ("PreconditionFailed", 412)
    complete(one, three)
    with pytest.raises(ClientError) as caught:
        client.upload_part(Bucket=bucket, Key="k", UploadId=upload, PartNumber=1, Body=b"late")
    assert code_of(caught) == ("NoSuchUpload", 404)


def test_completing_again_answers_as_before(client: Any, bucket: str) -> None:
    """A client that lost the answer gets it again, whatever its condition was, as long as the object is that of the upload."""
    upload = client.create_multipart_upload(Bucket=bucket, Key="k")["UploadId"]
    same = {"Bucket": bucket, "Key": "k", "UploadId": upload}
    etags = [client.upload_part(**same, PartNumber=n, Body=data)["ETag"] for n, data in ((3, PART), (5, b"end"))]
    parts = [{"PartNumber": n, "ETag": etag} for n, etag in zip((3, 5), etags, strict=True)]

    def complete(parts: list[dict[str, Any]], **more: Any) -> Any:
        return client.complete_multipart_upload(**{**same, "MultipartUpload": {"Parts": parts}, **more})

    def refusal(parts: list[dict[str, Any]], **more: Any) -> tuple[str, int]:
        with pytest.raises(ClientError) as caught:
            complete(parts, **more)
        return code_of(caught)

    first = complete(parts, IfNoneMatch="*")
    client.put_object_tagging(Bucket=bucket, Key="k", Tagging={"TagSet": [{"Key": "a", "Value": "b"}]})
    for more in ({}, {"IfNoneMatch": "*"}):
        again = complete(parts, **more)
        assert {name: again[name] for name in ("ETag", "Location")} == {
            name: first[name] for name in ("ETag", "Location")
        }
    client.copy_object(Bucket=bucket, Key="copy", CopySource=f"{bucket}/k")
    for others, more in ((parts[1:], {}), ([{**parts[0], "ETag": "x"}], {}), (parts, {"Key": "copy"})):
        assert refusal(others, **more) == ("NoSuchUpload", 404)
    client.put_object(Bucket=bucket, Key="k", Body=b"other")
    assert refusal(parts) == ("NoSuchUpload", 404)


def test_aborting_drops_everything(client: Any, bucket: str, root: Path) -> None:
    """An aborted upload leaves no part, and no longer exists."""
    upload = client.create_multipart_upload(Bucket=bucket, Key="k")["UploadId"]
    client.upload_part(Bucket=bucket, Key="k", UploadId=upload, PartNumber=1, Body=b"x")
    client.abort_multipart_upload(Bucket=bucket, Key="k", UploadId=upload)
    with pytest.raises(ClientError) as caught:
        client.abort_multipart_upload(Bucket=bucket, Key="k", UploadId=upload)
    assert code_of(caught) == ("NoSuchUpload", 404)
    assert list((root / bucket / ".penstock-gateway.tmp" / "uploads").iterdir()) == []


def test_copied_parts(client: Any, bucket: str) -> None:
    """``UploadPartCopy`` takes ranges of objects, and refuses ranges outside them."""
    client.put_object(Bucket=bucket, Key="src", Body=PART + b"tail")
    upload = client.create_multipart_upload(Bucket=bucket, Key="k")["UploadId"]
    ranges = [f"bytes=0-{len(PART) - 1}", f"bytes={len(PART)}-{len(PART) + 3}"]
    parts = []
    for number, span in enumerate(ranges, 1):
        copied = client.upload_part_copy(
            Bucket=bucket, Key="k", UploadId=upload, PartNumber=number, CopySource=f"{bucket}/src", CopySourceRange=span
        )["CopyPartResult"]
        parts.append({"PartNumber": number, "ETag": copied["ETag"]})
    for span in ("bytes=0-99999999", "bytes=5-2", "bytes=1-", "words"):
        with pytest.raises(ClientError) as caught:
            client.upload_part_copy(
                Bucket=bucket, Key="k", UploadId=upload, PartNumber=3, CopySource=f"{bucket}/src", CopySourceRange=span
            )
        assert code_of(caught) == ("InvalidArgument", 400)
    client.complete_multipart_upload(Bucket=bucket, Key="k", UploadId=upload, MultipartUpload={"Parts": parts})
    assert client.get_object(Bucket=bucket, Key="k")["Body"].read() == PART + b"tail"


def test_listing_uploads(client: Any, bucket: str) -> None:
    """Uploads are listed in order, by prefix, by delimiter, and in pages."""
    keys = ["a/1", "a/2", "b", "b", "c//"]
    for key in keys:
        client.create_multipart_upload(Bucket=bucket, Key=key)
    found = []
    for page in client.get_paginator("list_multipart_uploads").paginate(
        Bucket=bucket, PaginationConfig={"PageSize": 2}
    ):
        found += [row["Key"] for row in page["Uploads"]]
    assert found == keys
    grouped = client.list_multipart_uploads(Bucket=bucket, Delimiter="/")
    assert [row["Prefix"] for row in grouped["CommonPrefixes"]] == ["a/", "c/"]
    assert [row["Key"] for row in client.list_multipart_uploads(Bucket=bucket, Prefix="a/")["Uploads"]] == [
        "a/1",
        "a/2",
    ]


# ── copies, tags, deleting ──────────────────────────────────────────────────────────────────────────────────────────


def test_copies(client: Any, bucket: str) -> None:
    """A copy keeps or replaces metadata, heeds the conditions on its source, and is never of itself without a change."""
    source = client.put_object(Bucket=bucket, Key="s p+%c", Body=b"data", Metadata={"a": "1"}, ContentType="x/y")
    here = {"Bucket": bucket, "Key": "s p+%c"}
    copied = client.copy_object(Bucket=bucket, Key="kept", CopySource=here)["CopyObjectResult"]
    assert copied["ETag"] == source["ETag"]
    kept = client.head_object(Bucket=bucket, Key="kept")
    assert (kept["Metadata"], kept["ContentType"]) == ({"a": "1"}, "x/y")
    client.copy_object(
        Bucket=bucket, Key="new", CopySource=here, Metadata={"b": "2"}, ContentType="n/w", MetadataDirective="REPLACE"
    )
    new = client.head_object(Bucket=bucket, Key="new")
    assert (new["Metadata"], new["ContentType"]) == ({"b": "2"}, "n/w")
    with pytest.raises(ClientError) as caught:
        client.copy_object(Bucket=bucket, Key="s p+%c", CopySource=here)
    assert code_of(caught) == ("InvalidRequest", 400)
    client.copy_object(Bucket=bucket, Key="s p+%c", CopySource=here, Metadata={"c": "3"}, MetadataDirective="REPLACE")
    assert client.head_object(Bucket=bucket, Key="s p+%c")["Metadata"] == {"c": "3"}
    for condition in ({"CopySourceIfMatch": '"x"'}, {"CopySourceIfNoneMatch": source["ETag"]},
                      {"CopySourceIfModifiedSince": "Thu, 01 Jan 2099 00:00:00 GMT"},
                      {"CopySourceIfUnmodifiedSince": "Thu, 01 Jan 1980 00:00:00 GMT"}):  # fmt: skip
        with pytest.raises(ClientError) as caught:
            client.copy_object(Bucket=bucket, Key="kept", CopySource=here, **condition)
        assert code_of(caught) == ("PreconditionFailed", 412)
    client.copy_object(Bucket=bucket, Key="kept", CopySource=here, CopySourceIfMatch=source["ETag"])


def test_copying_what_has_no_md5(client: Any, bucket: str, root: Path) -> None:
    """Copies of files of other programs have an MD5 as ETag."""
    (root / bucket / "file").write_bytes(b"data")
    copied = client.copy_object(Bucket=bucket, Key="copy", CopySource=f"{bucket}/file", ChecksumAlgorithm="SHA256")
    assert copied["CopyObjectResult"]["ETag"] == f'"{hashlib.md5(b"data").hexdigest()}"'
    assert base64.b64decode(copied["CopyObjectResult"]["ChecksumSHA256"]) == hashlib.sha256(b"data").digest()


def test_tags(client: Any, bucket: str) -> None:
    """Tags are set with an object or afterwards, which changes no version, and are removed."""
    etag = client.put_object(Bucket=bucket, Key="k", Body=b"x", Tagging="a=1&b=two%20words")["ETag"]
    assert client.get_object_tagging(Bucket=bucket, Key="k")["TagSet"] == [
        {"Key": "a", "Value": "1"}, {"Key": "b", "Value": "two words"},
    ]  # fmt: skip
    client.put_object_tagging(Bucket=bucket, Key="k", Tagging={"TagSet": [{"Key": "c", "Value": "ü"}]})
    assert client.get_object_tagging(Bucket=bucket, Key="k")["TagSet"] == [{"Key": "c", "Value": "ü"}]
    got = client.get_object(Bucket=bucket, Key="k")
    assert (got["ETag"], got["TagCount"]) == (etag, 1)
    client.delete_object_tagging(Bucket=bucket, Key="k")
    assert client.get_object_tagging(Bucket=bucket, Key="k")["TagSet"] == []


def test_delete_objects(client: Any, bucket: str) -> None:
    """Keys are removed whether they exist or not; quiet answers name only errors; a version that is none is an error."""
    for key in ("a", "b/c", "d"):
        client.put_object(Bucket=bucket, Key=key, Body=b"x")
    told = client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": "a"}, {"Key": "none"}]})
    assert sorted(row["Key"] for row in told["Deleted"]) == ["a", "none"]
    odd = client.delete_objects(
        Bucket=bucket, Delete={"Quiet": True, "Objects": [{"Key": "b/c"}, {"Key": "d", "VersionId": "7"}]}
    )
    assert "Deleted" not in odd
    assert [(row["Key"], row["Code"]) for row in odd["Errors"]] == [("d", "NoSuchVersion")]
    assert keys_in(client, bucket) == ["d"]
    with pytest.raises(ClientError) as caught:
        client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": f"k{index}"} for index in range(1001)]})
    assert code_of(caught) == ("MalformedXML", 400)


def test_emptied_folders_disappear(client: Any, bucket: str, root: Path) -> None:
    """Removing the last object below a prefix removes its folders, but never the bucket's."""
    client.put_object(Bucket=bucket, Key="x/y/z", Body=b"x")
    client.delete_object(Bucket=bucket, Key="x/y/z")
    assert [path.name for path in (root / bucket).iterdir()] == [".penstock-gateway.tmp"]


# ── listings ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("page", [1, 2, 1000])
@pytest.mark.parametrize("version", ["list_objects", "list_objects_v2"])
def test_listings_of_ordinary_and_odd_keys(client: Any, bucket: str, version: str, page: int) -> None:
    """Pages of any size, prefixes and delimiters give what sorting and grouping all keys gives."""
    keys = sorted(["a", "a/b", "a/b/c", "a//", "a//x", "b/", "b/c", "c!d", "c/d", "d", "é/ü", "é", "ab", "/", "/x"])
    for key in keys:
        client.put_object(Bucket=bucket, Key=key, Body=b"")
    for prefix in ("", "a", "a/", "a//", "b/", "é", "none", "/"):
        for delimiter in ("", "/", "b", "//"):
            wanted = grouped(keys, prefix, delimiter)
            found: list[str] = []
            arguments = {"Delimiter": delimiter} if delimiter else {}
            pages = client.get_paginator(version).paginate(
                Bucket=bucket, Prefix=prefix, PaginationConfig={"PageSize": page}, **arguments
            )
            for answer in pages:
                rows = [row["Key"] for row in answer.get("Contents", [])]
                rows += [row["Prefix"] for row in answer.get("CommonPrefixes", [])]
                assert len(rows) <= page
                found += sorted(rows)
            assert found == wanted, (prefix, delimiter)


def grouped(keys: list[str], prefix: str, delimiter: str) -> list[str]:
    """Return what a listing shows."""
    found = []
    for key in keys:
        if key.startswith(prefix):
            at = key.find(delimiter, len(prefix)) if delimiter else -1
            entry = key if at < 0 else key[: at + len(delimiter)]
            if entry not in found:
                found.append(entry)
    return sorted(found)


def test_listings_begin_anywhere(client: Any, bucket: str) -> None:
    """``StartAfter`` and markers begin behind any string."""
    keys = ["a", "b/1", "b/2", "c", "d//"]
    for key in keys:
        client.put_object(Bucket=bucket, Key=key, Body=b"")
    for after in ("a", "aa", "b/1", "b/", "c", "d//", "z"):
        wanted = [key for key in keys if key > after]
        assert keys_in(client, bucket, StartAfter=after) == wanted
        assert [row["Key"] for row in client.list_objects(Bucket=bucket, Marker=after).get("Contents", [])] == wanted


# ── buckets ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_buckets_are_folders(client: Any, bucket: str, root: Path) -> None:
    """Buckets are created, listed and deleted, with S3's errors."""
    assert (root / bucket).is_dir()
    assert bucket in [row["Name"] for row in client.list_buckets()["Buckets"]]
    client.head_bucket(Bucket=bucket)
    with pytest.raises(ClientError) as caught:
        client.create_bucket(Bucket=bucket)
    assert code_of(caught) == ("BucketAlreadyOwnedByYou", 409)
    for name in ("No_Valid", "1.2.3.4", "a..b", "x.-y", "ends-"):
        with pytest.raises(ClientError) as caught:
            client.create_bucket(Bucket=name)
        assert code_of(caught) == ("InvalidBucketName", 400)
    client.put_object(Bucket=bucket, Key="k//", Body=b"x")
    with pytest.raises(ClientError) as caught:
        client.delete_bucket(Bucket=bucket)
    assert code_of(caught) == ("BucketNotEmpty", 409)
    client.create_multipart_upload(Bucket=bucket, Key="unfinished")
    client.delete_object(Bucket=bucket, Key="k//")
    client.delete_bucket(Bucket=bucket)
    assert not (root / bucket).exists()
    with pytest.raises(ClientError) as caught:
        client.delete_bucket(Bucket=bucket)
    assert code_of(caught) == ("NoSuchBucket", 404)


def test_settings_that_were_never_made(client: Any, bucket: str) -> None:
    """Questions about settings have the answers of a bucket for which none was made."""
    assert "Status" not in client.get_bucket_versioning(Bucket=bucket)
    assert client.get_bucket_acl(Bucket=bucket)["Grants"][0]["Permission"] == "FULL_CONTROL"
    assert client.get_bucket_location(Bucket=bucket)["LocationConstraint"] is None
    assert client.get_bucket_request_payment(Bucket=bucket)["Payer"] == "BucketOwner"
    for name, code in (
        ("policy", "NoSuchBucketPolicy"),
        ("cors", "NoSuchCORSConfiguration"),
        ("lifecycle_configuration", "NoSuchLifecycleConfiguration"),
        ("encryption", "ServerSideEncryptionConfigurationNotFoundError"),
        ("tagging", "NoSuchTagSet"),
        ("website", "NoSuchWebsiteConfiguration"),
        ("replication", "ReplicationConfigurationNotFoundError"),
    ):
        method = f"get_bucket_{name}"
        with pytest.raises(ClientError) as caught:
            getattr(client, method)(Bucket=bucket)
        assert code_of(caught) == (code, 404)
    with pytest.raises(ClientError) as caught:
        client.get_object_lock_configuration(Bucket=bucket)
    assert code_of(caught) == ("ObjectLockConfigurationNotFoundError", 404)
    with pytest.raises(ClientError) as caught:
        client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    assert code_of(caught) == ("NotImplemented", 501)


def test_versions_are_listed(client: Any, bucket: str) -> None:
    """Each object has one version, ``null``, by which it is read and removed."""
    client.put_object(Bucket=bucket, Key="k", Body=b"x")
    rows = client.list_object_versions(Bucket=bucket)["Versions"]
    assert [(row["Key"], row["VersionId"], row["IsLatest"]) for row in rows] == [("k", "null", True)]
    assert client.get_object(Bucket=bucket, Key="k", VersionId="null")["Body"].read() == b"x"
    client.delete_object(Bucket=bucket, Key="k", VersionId="null")
    assert keys_in(client, bucket) == []


def test_readers_may_not_write(front: RunningFront, client: Any, bucket: str) -> None:
    """A key that may only read is refused every change."""
    client.put_object(Bucket=bucket, Key="k", Body=b"x")
    reader = client_of(front, "reader")
    assert reader.get_object(Bucket=bucket, Key="k")["Body"].read() == b"x"
    for call in (
        lambda: reader.put_object(Bucket=bucket, Key="k", Body=b"y"),
        lambda: reader.delete_object(Bucket=bucket, Key="k"),
        lambda: reader.create_multipart_upload(Bucket=bucket, Key="k"),
        lambda: reader.create_bucket(Bucket="another"),
        lambda: reader.delete_bucket(Bucket=bucket),
        lambda: reader.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": "k"}]}),
    ):
        with pytest.raises(ClientError) as caught:
            call()
        assert code_of(caught) == ("AccessDenied", 403)


def test_a_transfer_in_parts(client: Any, bucket: str, tmp_path: Path) -> None:
    """boto3's managed transfer uploads and downloads a large file."""
    from boto3.s3.transfer import TransferConfig

    data = os.urandom(MIB) * 17
    (tmp_path / "up").write_bytes(data)
    config = TransferConfig(multipart_threshold=5 * MIB, multipart_chunksize=5 * MIB)
    client.upload_file(str(tmp_path / "up"), bucket, "big", Config=config)
    client.download_file(bucket, "big", str(tmp_path / "down"), Config=config)
    assert (tmp_path / "down").read_bytes() == data


def test_copies_from_another_access_point(tmp_path: Path) -> None:
    """What another kind of bucket serves is copied into a folder, whole or a range of it as a part."""
    (tmp_path / "folder").mkdir()
    directory = DirectoryBuckets(tmp_path, read_write=True, is_durable=False)
    point = UpstreamBucket("point", MemoryStore({"big": PART + b"tail", "empty": b""}))
    table = directory.sources = AccessPointTable({"point": point}, others=directory)
    table.close = directory.close  # type: ignore[attr-defined]
    with RunningFront(table=table) as front:
        client = s3_client(front.url)
        for key, data in (("big", PART + b"tail"), ("empty", b"")):
            copied = client.copy_object(Bucket="folder", Key=key, CopySource={"Bucket": "point", "Key": key})
            assert copied["CopyObjectResult"]["ETag"] == f'"{hashlib.md5(data).hexdigest()}"'
            assert (tmp_path / "folder" / key).read_bytes() == data
        upload = client.create_multipart_upload(Bucket="folder", Key="m")["UploadId"]
        part = client.upload_part_copy(
            Bucket="folder", Key="m", UploadId=upload, PartNumber=1, CopySource="point/big", CopySourceRange="bytes=5-9"
        )["CopyPartResult"]
        named = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
        client.complete_multipart_upload(Bucket="folder", Key="m", UploadId=upload, MultipartUpload=named)
        assert (tmp_path / "folder" / "m").read_bytes() == PART[5:10]
