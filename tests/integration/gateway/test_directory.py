"""A directory as an S3 server: boto3 writes, reads and lists it over real sockets, and other programs see plain files."""

from __future__ import annotations

import base64
import hashlib
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
    """GET returns the bytes, the MD5 as ETag and the metadata; the bytes are a plain file at the natural path."""
    data = (PART * (size // len(PART) + 1))[:size]
    put = client.put_object(Bucket=bucket, Key="a/b.bin", Body=data, Metadata={"One": "1", "two": "zwei drei"})
    assert put["ETag"] == f'"{hashlib.md5(data).hexdigest()}"'
    for answer in (client.get_object(Bucket=bucket, Key="a/b.bin"), client.head_object(Bucket=bucket, Key="a/b.bin")):
        assert (answer["ETag"], answer["ContentLength"]) == (put["ETag"], size)
        assert answer["Metadata"] == {"one": "1", "two": "zwei drei"}
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


# ── multipart ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_completing_again_answers_as_before(client: Any, bucket: str, root: Path) -> None:
    """A client that lost the answer gets it again, whatever its condition was, while the object is still that of the upload."""
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
    assert first["Location"] == f"{client.meta.endpoint_url}/{bucket}/k"
    assert (root / bucket / "k").read_bytes() == PART + b"end"
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


# ── copies, tags, deleting ──────────────────────────────────────────────────────────────────────────────────────────


def test_copying_what_has_no_md5(client: Any, bucket: str, root: Path) -> None:
    """Copies of files of other programs have an MD5 as ETag."""
    (root / bucket / "file").write_bytes(b"data")
    copied = client.copy_object(Bucket=bucket, Key="copy", CopySource=f"{bucket}/file", ChecksumAlgorithm="SHA256")
    assert copied["CopyObjectResult"]["ETag"] == f'"{hashlib.md5(b"data").hexdigest()}"'
    assert base64.b64decode(copied["CopyObjectResult"]["ChecksumSHA256"]) == hashlib.sha256(b"data").digest()


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


# ── buckets ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_buckets_are_folders(client: Any, bucket: str, root: Path) -> None:
    """A bucket is a folder, which goes with it although an upload has not ended."""
    assert (root / bucket).is_dir()
    client.create_multipart_upload(Bucket=bucket, Key="unfinished")
    client.delete_bucket(Bucket=bucket)
    assert not (root / bucket).exists()


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
