"""Behaviours of S3 that programs rely on, asked of ``penstock gateway --upstream DIRECTORY --read-write`` with boto3.

``python tests/s3_behaviours.py`` asks the same of other servers and prints a table.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import io
import os
import socket
import zlib
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import boto3
import pytest
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import ClientError

from servers.gateway import Gateway
from servers.others import Moto

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.testing.s3_server import S3Server

pytestmark = pytest.mark.server

MIB = 1 << 20
PART = bytes(range(256)) * (5 * MIB // 256)
ACCESS_KEY, SECRET_KEY = "behaviours", "a secret of thirty characters!"
ODD_KEYS = [
    "a b", " a", "a+b", "a%20b", "a%2Fb", "ü/日本", "a&b=c?d#e", "a<b>c", "quo'te\"", "a\\b", "~a!*()", "a:b;c,d", "a@$",
    "\x7f", "a//b", "/a", "a/", ".a", "a..b", "k" * 1024, "[a]{b}|^`", "😀",
]  # fmt: skip


class Endpoint:
    """A server that is asked."""

    def __init__(self, url: str, access_key: str, secret_key: str) -> None:
        self.url, self.keys, self._count = url, (access_key, secret_key), 0
        self.s3 = self.client()

    def client(self, **settings: Any) -> Any:
        config = Config(retries={"total_max_attempts": 1}, **settings)
        access_key, secret_key = self.keys
        return boto3.client("s3", endpoint_url=self.url, aws_access_key_id=access_key, aws_secret_access_key=secret_key,
                            region_name="us-east-1", config=config)  # fmt: skip

    def bucket(self) -> str:
        self._count += 1
        name = f"behaviours-{os.getpid()}-{self._count}"
        self.s3.create_bucket(Bucket=name)
        return name

    def put(self, keys: list[str], body: bytes = b"x") -> str:
        bucket = self.bucket()
        for key in keys:
            self.s3.put_object(Bucket=bucket, Key=key, Body=body)
        return bucket

    def fetch(
        self, url: str, *, method: str = "GET", body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
        try:
            connection.request(method, url.partition(parts.netloc)[2] or "/", body=body, headers=headers or {})
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Endpoint]:
    """The gateway, or the server that ``PENSTOCK_BEHAVIOURS`` names."""
    name = os.environ.get("PENSTOCK_BEHAVIOURS", "gateway")
    if name == "gateway":
        folder: Path = tmp_path_factory.mktemp("gateway")
        (folder / "data").mkdir()
        keys = {"PENSTOCK_GATEWAY_KEYS": f"{ACCESS_KEY}:{SECRET_KEY.replace(' ', '-')}:rw"}
        server = Gateway("--upstream", "data", "--read-write", "--port", "0", folder=folder, environment=keys)
        yield Endpoint(server.url, ACCESS_KEY, SECRET_KEY.replace(" ", "-"))
        assert server.stop() == 0
        assert "Traceback" not in server.text
        return
    other: S3Server = request.getfixturevalue("ministack") if name == "ministack" else Moto()
    yield Endpoint(other.endpoint_url, other.access_key, other.secret_key)
    if name != "ministack":
        other.close()


def refused(call: Any, **arguments: Any) -> tuple[str, int]:
    """Code and status of the error with which a call is refused."""
    with pytest.raises(ClientError) as caught:
        call(**arguments)
    answer = caught.value.response
    return answer["Error"]["Code"], answer["ResponseMetadata"]["HTTPStatusCode"]


@contextmanager
def may_be_refused(code: str) -> Iterator[None]:
    """Allow one refusal, where S3's own answer depends on the region or on time."""
    try:
        yield
    except ClientError as error:
        if error.response["Error"]["Code"] != code:
            raise


def status_of(answer: Any) -> int:
    return int(answer["ResponseMetadata"]["HTTPStatusCode"])


def headers_of(answer: Any) -> dict[str, str]:
    return dict(answer["ResponseMetadata"]["HTTPHeaders"])


def md5(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


def text64(data: bytes) -> str:
    return base64.b64encode(data).decode()


# ── buckets ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_new_bucket_is_listed(endpoint: Endpoint) -> None:
    """ListBuckets names it, with a time and an owner."""
    bucket = endpoint.bucket()
    answer = endpoint.s3.list_buckets()
    found = {each["Name"]: each for each in answer["Buckets"]}
    assert abs(datetime.now(UTC) - found[bucket]["CreationDate"]) < timedelta(minutes=5)
    assert answer["Owner"]["ID"]


def test_buckets_are_listed_in_pages(endpoint: Endpoint) -> None:
    """MaxBuckets bounds a page, its token leads to the next one, and Prefix bounds the list."""
    names = sorted(endpoint.bucket() for _ in range(3))
    prefix = f"behaviours-{os.getpid()}-"
    pages = list(endpoint.s3.get_paginator("list_buckets").paginate(Prefix=prefix, PaginationConfig={"PageSize": 2}))
    assert [len(page["Buckets"]) for page in pages[:-1]] == [2] * (len(pages) - 1)
    assert {page["Prefix"] for page in pages} == {prefix}
    found = [each["Name"] for page in pages for each in page["Buckets"]]
    assert found == [each["Name"] for each in endpoint.s3.list_buckets()["Buckets"] if each["Name"].startswith(prefix)]
    assert set(names) <= set(found)
    assert endpoint.s3.list_buckets(Prefix=names[0])["Buckets"][0]["Name"] == names[0]
    assert endpoint.s3.list_buckets(BucketRegion="eu-west-1", Prefix=names[0])["Buckets"] == []
    assert refused(endpoint.s3.list_buckets, ContinuationToken="made up") == ("InvalidArgument", 400)


def test_the_token_of_a_listing_is_told_as_it_was_sent(endpoint: Endpoint) -> None:
    """Also if the keys are encoded; one page follows the other by it."""
    bucket = endpoint.put(["a b", "c d"])
    first = endpoint.s3.list_objects_v2(Bucket=bucket, MaxKeys=1, EncodingType="url")
    token = first["NextContinuationToken"]
    second = endpoint.s3.list_objects_v2(Bucket=bucket, EncodingType="url", ContinuationToken=token)
    assert (second["ContinuationToken"], second["Contents"][0]["Key"]) == (token, "c%20d")


def test_a_bucket_is_where_it_was_created(endpoint: Endpoint) -> None:
    """The region of CreateBucket is told by GetBucketLocation, HeadBucket and ListBuckets."""
    name = f"behaviours-{os.getpid()}-abroad"
    endpoint.s3.create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": "eu-central-1"})
    assert endpoint.s3.get_bucket_location(Bucket=name)["LocationConstraint"] == "eu-central-1"
    assert endpoint.s3.head_bucket(Bucket=name)["BucketRegion"] == "eu-central-1"
    assert [each["Name"] for each in endpoint.s3.list_buckets(BucketRegion="eu-central-1")["Buckets"]] == [name]
    endpoint.s3.delete_bucket(Bucket=name)


def test_a_bucket_that_exists_is_found(endpoint: Endpoint) -> None:
    """HeadBucket answers 200 and names the region."""
    answer = endpoint.s3.head_bucket(Bucket=endpoint.bucket())
    assert status_of(answer) == 200
    assert headers_of(answer).get("x-amz-bucket-region") == "us-east-1"


def test_a_bucket_that_does_not_exist_is_missing(endpoint: Endpoint) -> None:
    """HEAD answers 404, GET and PUT of objects say NoSuchBucket."""
    assert refused(endpoint.s3.head_bucket, Bucket="missing-bucket")[1] == 404
    for call in (endpoint.s3.list_objects, endpoint.s3.list_objects_v2, endpoint.s3.get_bucket_location):
        assert refused(call, Bucket="missing-bucket") == ("NoSuchBucket", 404)
    assert refused(endpoint.s3.get_object, Bucket="missing-bucket", Key="k") == ("NoSuchBucket", 404)
    assert refused(endpoint.s3.put_object, Bucket="missing-bucket", Key="k", Body=b"") == ("NoSuchBucket", 404)
    assert refused(endpoint.s3.delete_bucket, Bucket="missing-bucket") == ("NoSuchBucket", 404)


def test_a_bucket_is_created_twice(endpoint: Endpoint) -> None:
    """In us-east-1 the owner gets 200 again, or BucketAlreadyOwnedByYou; objects stay."""
    bucket = endpoint.put(["k"])
    with may_be_refused("BucketAlreadyOwnedByYou"):
        endpoint.s3.create_bucket(Bucket=bucket)
    assert endpoint.s3.list_objects_v2(Bucket=bucket)["KeyCount"] == 1


def test_a_new_bucket_has_a_location(endpoint: Endpoint) -> None:
    """CreateBucket answers with the path of the bucket."""
    name = f"behaviours-{os.getpid()}-located"
    assert endpoint.s3.create_bucket(Bucket=name)["Location"].rstrip("/").endswith(name)


@pytest.mark.parametrize("name", ["UPPER", "aa", "a_b", "a..b", "-ab", "192.168.5.4", "x" * 64])
def test_bad_bucket_names_are_refused(endpoint: Endpoint, name: str) -> None:
    """A name that S3 does not allow is InvalidBucketName."""
    client = endpoint.client(parameter_validation=False)
    client.meta.events.unregister("before-parameter-build.s3")
    client.meta.events.unregister("before-parameter-build.s3.CreateBucket")
    assert refused(client.create_bucket, Bucket=name) == ("InvalidBucketName", 400)


def test_a_bucket_with_objects_is_not_deleted(endpoint: Endpoint) -> None:
    """BucketNotEmpty; when it is empty, 204, and then it is gone."""
    bucket = endpoint.put(["k"])
    assert refused(endpoint.s3.delete_bucket, Bucket=bucket) == ("BucketNotEmpty", 409)
    endpoint.s3.delete_object(Bucket=bucket, Key="k")
    assert status_of(endpoint.s3.delete_bucket(Bucket=bucket)) == 204
    assert refused(endpoint.s3.head_bucket, Bucket=bucket)[1] == 404


def test_the_location_of_us_east_1_is_empty(endpoint: Endpoint) -> None:
    """GetBucketLocation answers null for us-east-1."""
    assert endpoint.s3.get_bucket_location(Bucket=endpoint.bucket())["LocationConstraint"] is None


@pytest.mark.parametrize(
    ("name", "code"),
    [("get_bucket_policy", "NoSuchBucketPolicy"), ("get_bucket_cors", "NoSuchCORSConfiguration"),
     ("get_bucket_lifecycle_configuration", "NoSuchLifecycleConfiguration"), ("get_bucket_tagging", "NoSuchTagSet"),
     ("get_bucket_website", "NoSuchWebsiteConfiguration"), ("get_bucket_replication", "ReplicationConfigurationNotFoundError"),
     ("get_bucket_encryption", "ServerSideEncryptionConfigurationNotFoundError"),
     ("get_object_lock_configuration", "ObjectLockConfigurationNotFoundError")],
)  # fmt: skip
def test_settings_that_were_never_made_are_missing(endpoint: Endpoint, name: str, code: str) -> None:
    """Each has its own code, and 404."""
    assert refused(getattr(endpoint.s3, name), Bucket=endpoint.bucket()) == (code, 404)


def test_a_new_bucket_is_not_versioned(endpoint: Endpoint) -> None:
    """GetBucketVersioning has no status, and its owner pays."""
    bucket = endpoint.bucket()
    assert "Status" not in endpoint.s3.get_bucket_versioning(Bucket=bucket)
    assert endpoint.s3.get_bucket_request_payment(Bucket=bucket)["Payer"] == "BucketOwner"


def test_a_bucket_has_an_acl(endpoint: Endpoint) -> None:
    """Its owner may do everything."""
    answer = endpoint.s3.get_bucket_acl(Bucket=endpoint.bucket())
    assert answer["Owner"]["ID"]
    assert [grant["Permission"] for grant in answer["Grants"]] == ["FULL_CONTROL"]


# ── objects ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_object_is_read_as_it_was_written(endpoint: Endpoint) -> None:
    """Bytes, length, type, ETag, time."""
    bucket = endpoint.bucket()
    assert endpoint.s3.put_object(Bucket=bucket, Key="k", Body=b"hello")["ETag"] == md5(b"hello")
    answer = endpoint.s3.get_object(Bucket=bucket, Key="k")
    assert (answer["Body"].read(), answer["ContentLength"], answer["ETag"]) == (b"hello", 5, md5(b"hello"))
    assert answer["ContentType"] == "binary/octet-stream"
    assert answer["AcceptRanges"] == "bytes"
    assert abs(datetime.now(UTC) - answer["LastModified"]) < timedelta(minutes=5)


def test_an_empty_object(endpoint: Endpoint) -> None:
    """Zero bytes are an object."""
    bucket = endpoint.put(["k"], b"")
    answer = endpoint.s3.get_object(Bucket=bucket, Key="k")
    assert (answer["Body"].read(), answer["ContentLength"], answer["ETag"]) == (b"", 0, md5(b""))


def test_an_object_is_replaced(endpoint: Endpoint) -> None:
    """The last write wins, and takes the metadata of the first with it."""
    bucket = endpoint.bucket()
    endpoint.s3.put_object(Bucket=bucket, Key="k", Body=b"a" * 100, Metadata={"a": "1"}, ContentType="text/plain")
    endpoint.s3.put_object(Bucket=bucket, Key="k", Body=b"b")
    answer = endpoint.s3.get_object(Bucket=bucket, Key="k")
    assert (answer["Body"].read(), answer["Metadata"], answer["ContentType"]) == (b"b", {}, "binary/octet-stream")


def test_a_missing_object(endpoint: Endpoint) -> None:
    """GET says NoSuchKey and names it, HEAD says 404."""
    bucket = endpoint.bucket()
    assert refused(endpoint.s3.head_object, Bucket=bucket, Key="k") == ("404", 404)
    with pytest.raises(endpoint.s3.exceptions.NoSuchKey) as caught:
        endpoint.s3.get_object(Bucket=bucket, Key="k")
    assert caught.value.response["Error"]["Key"] == "k"


def test_headers_of_an_object_are_kept(endpoint: Endpoint) -> None:
    """Type, encoding, language, disposition, cache, expiry."""
    bucket = endpoint.bucket()
    given = {"ContentType": "text/csv", "ContentEncoding": "gzip", "ContentLanguage": "de",
             "ContentDisposition": 'attachment; filename="a.csv"', "CacheControl": "max-age=60"}  # fmt: skip
    endpoint.s3.put_object(Bucket=bucket, Key="k", Body=b"x", Expires=datetime(2030, 1, 2, tzinfo=UTC), **given)
    for answer in (endpoint.s3.head_object(Bucket=bucket, Key="k"), endpoint.s3.get_object(Bucket=bucket, Key="k")):
        assert {name: answer[name] for name in given} == given
        assert answer["ExpiresString"] == "Wed, 02 Jan 2030 00:00:00 GMT"


@pytest.mark.parametrize("sent", ["deflate, gzip", "aws-chunked, deflate, gzip", "deflate,gzip"])
def test_an_encoding_is_kept_as_it_was_sent(endpoint: Endpoint, sent: str) -> None:
    """Only the coding of the transfer is left out."""
    bucket = endpoint.bucket()
    endpoint.s3.put_object(Bucket=bucket, Key="k", Body=b"x", ContentEncoding=sent)
    kept = endpoint.s3.head_object(Bucket=bucket, Key="k")["ContentEncoding"]
    assert kept == sent.removeprefix("aws-chunked, ")


def test_user_metadata_is_kept(endpoint: Endpoint) -> None:
    """Names come back in lower case, values as they were."""
    bucket = endpoint.bucket()
    endpoint.s3.put_object(Bucket=bucket, Key="k", Body=b"x", Metadata={"Name": "Value", "empty": "", "a-b": "c, d"})
    assert endpoint.s3.head_object(Bucket=bucket, Key="k")["Metadata"] == {"name": "Value", "empty": "", "a-b": "c, d"}


def test_too_much_metadata_is_refused(endpoint: Endpoint) -> None:
    """More than 2 KB is MetadataTooLarge."""
    bucket = endpoint.bucket()
    call = endpoint.s3.put_object
    assert refused(call, Bucket=bucket, Key="k", Body=b"x", Metadata={"a": "v" * 3000}) == ("MetadataTooLarge", 400)


def test_the_storage_class_is_standard(endpoint: Endpoint) -> None:
    """STANDARD is not told by HEAD, and told by a listing."""
    bucket = endpoint.put(["k"])
    assert endpoint.s3.head_object(Bucket=bucket, Key="k").get("StorageClass", "STANDARD") == "STANDARD"
    assert endpoint.s3.list_objects_v2(Bucket=bucket)["Contents"][0]["StorageClass"] == "STANDARD"


def test_a_deleted_object_is_gone(endpoint: Endpoint) -> None:
    """204, also if there was none."""
    bucket = endpoint.put(["k"])
    for _ in range(2):
        assert status_of(endpoint.s3.delete_object(Bucket=bucket, Key="k")) == 204
    assert refused(endpoint.s3.get_object, Bucket=bucket, Key="k") == ("NoSuchKey", 404)


def test_many_objects_are_deleted_at_once(endpoint: Endpoint) -> None:
    """Each key is told, also those that did not exist; odd keys too."""
    keys = [key for key in ODD_KEYS if key != "\x7f"]
    bucket = endpoint.put(keys)
    answer = endpoint.s3.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": key} for key in [*keys, "missing"]]})
    assert sorted(each["Key"] for each in answer["Deleted"]) == sorted([*keys, "missing"])
    assert "Errors" not in answer
    assert endpoint.s3.list_objects_v2(Bucket=bucket)["KeyCount"] == 0


def test_deleting_quietly_tells_nothing(endpoint: Endpoint) -> None:
    """Quiet leaves the deleted keys out."""
    bucket = endpoint.put(["a", "b"])
    answer = endpoint.s3.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": "a"}], "Quiet": True})
    assert "Deleted" not in answer
    assert [each["Key"] for each in endpoint.s3.list_objects_v2(Bucket=bucket)["Contents"]] == ["b"]


def test_a_thousand_keys_are_deleted_and_no_more(endpoint: Endpoint) -> None:
    """1 001 keys are MalformedXML."""
    bucket = endpoint.bucket()
    objects = [{"Key": f"{number}"} for number in range(1001)]
    assert refused(endpoint.s3.delete_objects, Bucket=bucket, Delete={"Objects": objects}) == ("MalformedXML", 400)
    answer = endpoint.s3.delete_objects(Bucket=bucket, Delete={"Objects": objects[:1000]})
    assert len(answer["Deleted"]) == 1000


def test_a_key_of_1025_bytes_is_too_long(endpoint: Endpoint) -> None:
    """KeyTooLongError."""
    call = endpoint.s3.put_object
    assert refused(call, Bucket=endpoint.bucket(), Key="k" * 1025, Body=b"") == ("KeyTooLongError", 400)


@pytest.mark.parametrize("key", ODD_KEYS, ids=[f"key{number}" for number in range(len(ODD_KEYS))])
def test_odd_keys_are_read_and_listed(endpoint: Endpoint, key: str) -> None:
    """Whatever the characters are, GET, HEAD, copies and listings have them."""
    bucket = endpoint.put([key], key.encode())
    assert endpoint.s3.get_object(Bucket=bucket, Key=key)["Body"].read() == key.encode()
    assert endpoint.s3.head_object(Bucket=bucket, Key=key)["ContentLength"] == len(key.encode())
    for listing in (endpoint.s3.list_objects_v2, endpoint.s3.list_objects):
        assert [each["Key"] for each in listing(Bucket=bucket)["Contents"]] == [key]
    assert [each["Key"] for each in endpoint.s3.list_objects_v2(Bucket=bucket, Prefix=key)["Contents"]] == [key]
    endpoint.s3.copy_object(Bucket=bucket, Key="copy", CopySource={"Bucket": bucket, "Key": key})
    assert endpoint.s3.get_object(Bucket=bucket, Key="copy")["Body"].read() == key.encode()


def test_a_key_and_a_key_below_it_are_two_objects(endpoint: Endpoint) -> None:
    """S3 has no folders: ``a`` and ``a/b`` and ``a/`` exist at once."""
    bucket = endpoint.bucket()
    for key in ("a", "a/b", "a/"):
        endpoint.s3.put_object(Bucket=bucket, Key=key, Body=key.encode())
    for key in ("a", "a/b", "a/"):
        assert endpoint.s3.get_object(Bucket=bucket, Key=key)["Body"].read() == key.encode()
    assert [each["Key"] for each in endpoint.s3.list_objects_v2(Bucket=bucket)["Contents"]] == ["a", "a/", "a/b"]
    endpoint.s3.delete_object(Bucket=bucket, Key="a")
    assert endpoint.s3.get_object(Bucket=bucket, Key="a/b")["Body"].read() == b"a/b"


def test_request_ids_are_sent(endpoint: Endpoint) -> None:
    """Each answer has its own, errors too."""
    bucket = endpoint.put(["k"])
    ids = [endpoint.s3.head_object(Bucket=bucket, Key="k")["ResponseMetadata"]["RequestId"] for _ in range(2)]
    with pytest.raises(ClientError) as caught:
        endpoint.s3.get_object(Bucket=bucket, Key="missing")
    ids.append(caught.value.response["ResponseMetadata"]["RequestId"])
    assert all(ids)
    assert len(set(ids)) == 3


def test_tags_of_an_object(endpoint: Endpoint) -> None:
    """PUT, GET, DELETE of tags, and those given with the object."""
    bucket = endpoint.bucket()
    endpoint.s3.put_object(Bucket=bucket, Key="k", Body=b"x", Tagging="a=1&b=c%20d")
    tags = endpoint.s3.get_object_tagging(Bucket=bucket, Key="k")["TagSet"]
    assert sorted((tag["Key"], tag["Value"]) for tag in tags) == [("a", "1"), ("b", "c d")]
    assert endpoint.s3.get_object(Bucket=bucket, Key="k")["TagCount"] == 2
    endpoint.s3.put_object_tagging(Bucket=bucket, Key="k", Tagging={"TagSet": [{"Key": "z", "Value": "ü"}]})
    assert endpoint.s3.get_object_tagging(Bucket=bucket, Key="k")["TagSet"] == [{"Key": "z", "Value": "ü"}]
    assert status_of(endpoint.s3.delete_object_tagging(Bucket=bucket, Key="k")) == 204
    assert endpoint.s3.get_object_tagging(Bucket=bucket, Key="k")["TagSet"] == []


def test_an_object_has_an_acl(endpoint: Endpoint) -> None:
    """Its owner may do everything."""
    bucket = endpoint.put(["k"])
    answer = endpoint.s3.get_object_acl(Bucket=bucket, Key="k")
    assert [grant["Permission"] for grant in answer["Grants"]] == ["FULL_CONTROL"]


def test_a_wrong_md5_is_refused(endpoint: Endpoint) -> None:
    """BadDigest if it does not match, InvalidDigest if it is none; nothing is written."""
    bucket = endpoint.bucket()
    put = endpoint.s3.put_object
    wrong = text64(hashlib.md5(b"y").digest())
    assert refused(put, Bucket=bucket, Key="k", Body=b"x", ContentMD5=wrong) == ("BadDigest", 400)
    assert refused(put, Bucket=bucket, Key="k", Body=b"x", ContentMD5="YmFk") == ("InvalidDigest", 400)
    assert endpoint.s3.list_objects_v2(Bucket=bucket)["KeyCount"] == 0


def test_a_right_md5_is_accepted(endpoint: Endpoint) -> None:
    """Content-MD5 of the body."""
    bucket = endpoint.bucket()
    endpoint.s3.put_object(Bucket=bucket, Key="k", Body=b"x", ContentMD5=text64(hashlib.md5(b"x").digest()))
    assert endpoint.s3.head_object(Bucket=bucket, Key="k")["ETag"] == md5(b"x")


# ── conditions ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_if_match(endpoint: Endpoint) -> None:
    """The right ETag reads, another one is 412."""
    bucket = endpoint.put(["k"])
    assert endpoint.s3.get_object(Bucket=bucket, Key="k", IfMatch=md5(b"x"))["Body"].read() == b"x"
    assert refused(endpoint.s3.get_object, Bucket=bucket, Key="k", IfMatch='"0"') == ("PreconditionFailed", 412)
    assert refused(endpoint.s3.head_object, Bucket=bucket, Key="k", IfMatch='"0"')[1] == 412
    assert endpoint.s3.get_object(Bucket=bucket, Key="k", IfMatch="*")["Body"].read() == b"x"


def test_if_none_match(endpoint: Endpoint) -> None:
    """The same ETag is 304, another one reads."""
    bucket = endpoint.put(["k"])
    assert refused(endpoint.s3.get_object, Bucket=bucket, Key="k", IfNoneMatch=md5(b"x")) == ("304", 304)
    assert refused(endpoint.s3.head_object, Bucket=bucket, Key="k", IfNoneMatch=md5(b"x")) == ("304", 304)
    assert endpoint.s3.get_object(Bucket=bucket, Key="k", IfNoneMatch='"0"')["Body"].read() == b"x"


def test_a_304_has_the_etag(endpoint: Endpoint) -> None:
    """So that caches can refresh what they have; and no body."""
    bucket = endpoint.put(["k"])
    with pytest.raises(ClientError) as caught:
        endpoint.s3.get_object(Bucket=bucket, Key="k", IfNoneMatch=md5(b"x"))
    assert headers_of(caught.value.response)["etag"] == md5(b"x")


def test_if_modified_since(endpoint: Endpoint) -> None:
    """An object that was not changed is 304."""
    bucket = endpoint.put(["k"])
    changed = endpoint.s3.head_object(Bucket=bucket, Key="k")["LastModified"]
    get, day = endpoint.s3.get_object, timedelta(days=1)
    assert refused(get, Bucket=bucket, Key="k", IfModifiedSince=changed) == ("304", 304)
    assert get(Bucket=bucket, Key="k", IfModifiedSince=changed - day)["Body"].read() == b"x"


def test_if_unmodified_since(endpoint: Endpoint) -> None:
    """An object that was changed is 412."""
    bucket = endpoint.put(["k"])
    changed = endpoint.s3.head_object(Bucket=bucket, Key="k")["LastModified"]
    get, day = endpoint.s3.get_object, timedelta(days=1)
    assert refused(get, Bucket=bucket, Key="k", IfUnmodifiedSince=changed - day) == ("PreconditionFailed", 412)
    assert get(Bucket=bucket, Key="k", IfUnmodifiedSince=changed)["Body"].read() == b"x"


def test_etags_are_stronger_than_times(endpoint: Endpoint) -> None:
    """If-Match beats If-Unmodified-Since; If-None-Match beats If-Modified-Since."""
    bucket = endpoint.put(["k"])
    changed = endpoint.s3.head_object(Bucket=bucket, Key="k")["LastModified"]
    get, day = endpoint.s3.get_object, timedelta(days=1)
    assert get(Bucket=bucket, Key="k", IfMatch=md5(b"x"), IfUnmodifiedSince=changed - day)["Body"].read() == b"x"
    same = {"IfNoneMatch": md5(b"x"), "IfModifiedSince": changed - day}
    assert refused(get, Bucket=bucket, Key="k", **same) == ("304", 304)


def test_an_object_is_created_only_once(endpoint: Endpoint) -> None:
    """PUT with If-None-Match: * writes if there is none."""
    bucket = endpoint.bucket()
    put = endpoint.s3.put_object
    put(Bucket=bucket, Key="k", Body=b"1", IfNoneMatch="*")
    assert refused(put, Bucket=bucket, Key="k", Body=b"2", IfNoneMatch="*") == ("PreconditionFailed", 412)
    assert endpoint.s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"1"


def test_an_object_is_replaced_only_if_it_is_known(endpoint: Endpoint) -> None:
    """PUT with If-Match compares and swaps; a missing object is 404."""
    bucket = endpoint.put(["k"])
    put = endpoint.s3.put_object
    put(Bucket=bucket, Key="k", Body=b"2", IfMatch=md5(b"x"))
    assert refused(put, Bucket=bucket, Key="k", Body=b"3", IfMatch=md5(b"x")) == ("PreconditionFailed", 412)
    assert refused(put, Bucket=bucket, Key="missing", Body=b"3", IfMatch=md5(b"x")) == ("NoSuchKey", 404)
    assert endpoint.s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"2"


def test_an_object_is_deleted_only_if_it_is_known(endpoint: Endpoint) -> None:
    """DELETE with If-Match."""
    bucket = endpoint.put(["k"])
    delete = endpoint.s3.delete_object
    assert refused(delete, Bucket=bucket, Key="k", IfMatch='"0"') == ("PreconditionFailed", 412)
    assert status_of(delete(Bucket=bucket, Key="k", IfMatch=md5(b"x"))) == 204


# ── ranges ──────────────────────────────────────────────────────────────────────────────────────────────────────────

DIGITS = b"0123456789"


@pytest.mark.parametrize(
    ("range_", "begin", "end"),
    [("bytes=0-0", 0, 1), ("bytes=2-4", 2, 5), ("bytes=7-", 7, 10), ("bytes=-3", 7, 10), ("bytes=5-99", 5, 10),
     ("bytes=-99", 0, 10), ("bytes=9-9", 9, 10)],
)  # fmt: skip
def test_ranges(endpoint: Endpoint, range_: str, begin: int, end: int) -> None:
    """First, middle, open, suffix and beyond the end."""
    bucket = endpoint.put(["k"], DIGITS)
    answer = endpoint.s3.get_object(Bucket=bucket, Key="k", Range=range_)
    assert (status_of(answer), answer["Body"].read()) == (206, DIGITS[begin:end])
    assert answer["ContentRange"] == f"bytes {begin}-{end - 1}/10"
    assert (answer["ContentLength"], answer["ETag"]) == (end - begin, md5(DIGITS))


@pytest.mark.parametrize("range_", ["bytes=10-", "bytes=10-12", "bytes=-0"])
def test_ranges_that_have_no_byte(endpoint: Endpoint, range_: str) -> None:
    """InvalidRange tells the size."""
    bucket = endpoint.put(["k"], DIGITS)
    with pytest.raises(ClientError) as caught:
        endpoint.s3.get_object(Bucket=bucket, Key="k", Range=range_)
    answer = caught.value.response
    assert (answer["Error"]["Code"], status_of(answer)) == ("InvalidRange", 416)
    assert headers_of(answer).get("content-range", "bytes */10") == "bytes */10"
    assert answer["Error"].get("ActualObjectSize", "10") == "10"
    assert refused(endpoint.s3.head_object, Bucket=bucket, Key="k", Range=range_)[1] == 416


@pytest.mark.parametrize("range_", ["bytes=4-2", "bytes=a-b", "bytes", "items=0-1", "bytes=0-1,3-4"])
def test_ranges_that_are_none_are_ignored(endpoint: Endpoint, range_: str) -> None:
    """The whole object; S3 does not answer several ranges."""
    bucket = endpoint.put(["k"], DIGITS)
    answer = endpoint.s3.get_object(Bucket=bucket, Key="k", Range=range_)
    assert (status_of(answer), answer["Body"].read()) == (200, DIGITS)


def test_a_range_of_an_empty_object(endpoint: Endpoint) -> None:
    """There is no first byte: 416."""
    bucket = endpoint.put(["k"], b"")
    assert refused(endpoint.s3.get_object, Bucket=bucket, Key="k", Range="bytes=0-") == ("InvalidRange", 416)


def test_a_range_with_head(endpoint: Endpoint) -> None:
    """HEAD answers it as GET does."""
    bucket = endpoint.put(["k"], DIGITS)
    answer = endpoint.s3.head_object(Bucket=bucket, Key="k", Range="bytes=2-4")
    assert (status_of(answer), answer["ContentLength"]) == (206, 3)


def test_a_range_with_a_condition(endpoint: Endpoint) -> None:
    """The condition comes first."""
    bucket = endpoint.put(["k"], DIGITS)
    get = endpoint.s3.get_object
    assert refused(get, Bucket=bucket, Key="k", Range="bytes=0-1", IfMatch='"0"') == ("PreconditionFailed", 412)
    assert get(Bucket=bucket, Key="k", Range="bytes=0-1", IfMatch=md5(DIGITS))["Body"].read() == b"01"


def test_if_range(endpoint: Endpoint) -> None:
    """The range is answered if the ETag is the same, otherwise the whole object is."""
    bucket = endpoint.put(["k"], DIGITS)
    url = endpoint.client(signature_version="s3v4").generate_presigned_url("get_object", {"Bucket": bucket, "Key": "k"})
    same = endpoint.fetch(url, headers={"Range": "bytes=2-4", "If-Range": md5(DIGITS)})
    other = endpoint.fetch(url, headers={"Range": "bytes=2-4", "If-Range": '"0"'})
    assert (same[0], same[2], other[0], other[2]) == (206, b"234", 200, DIGITS)


def test_a_large_object_by_ranges(endpoint: Endpoint) -> None:
    """download_fileobj with many ranges has the same bytes."""
    bucket, data = endpoint.bucket(), os.urandom(3 * MIB + 17)
    endpoint.s3.put_object(Bucket=bucket, Key="k", Body=data)
    found = io.BytesIO()
    settings = TransferConfig(multipart_threshold=MIB, multipart_chunksize=MIB)
    endpoint.s3.download_fileobj(bucket, "k", found, Config=settings)
    assert found.getvalue() == data


# ── copies ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_copy_takes_the_metadata_along(endpoint: Endpoint) -> None:
    """COPY is the default directive."""
    bucket = endpoint.bucket()
    endpoint.s3.put_object(Bucket=bucket, Key="k", Body=b"x", Metadata={"a": "1"}, ContentType="text/plain")
    answer = endpoint.s3.copy_object(Bucket=bucket, Key="copy", CopySource=f"{bucket}/k")
    assert answer["CopyObjectResult"]["ETag"] == md5(b"x")
    head = endpoint.s3.head_object(Bucket=bucket, Key="copy")
    assert (head["Metadata"], head["ContentType"]) == ({"a": "1"}, "text/plain")


def test_a_copy_with_new_metadata(endpoint: Endpoint) -> None:
    """REPLACE takes those of the request, also in place."""
    bucket = endpoint.bucket()
    endpoint.s3.put_object(Bucket=bucket, Key="k", Body=b"x", Metadata={"a": "1"}, ContentType="text/plain")
    source = {"Bucket": bucket, "Key": "k"}
    endpoint.s3.copy_object(Bucket=bucket, Key="k", CopySource=source, Metadata={"b": "2"}, MetadataDirective="REPLACE")
    assert endpoint.s3.head_object(Bucket=bucket, Key="k")["Metadata"] == {"b": "2"}
    assert endpoint.s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"x"


def test_a_copy_onto_itself_must_change_something(endpoint: Endpoint) -> None:
    """InvalidRequest."""
    bucket = endpoint.put(["k"])
    call = endpoint.s3.copy_object
    assert refused(call, Bucket=bucket, Key="k", CopySource=f"{bucket}/k") == ("InvalidRequest", 400)


def test_a_copy_between_buckets(endpoint: Endpoint) -> None:
    """The source may be in another bucket."""
    source, target = endpoint.put(["a/ü +"]), endpoint.bucket()
    endpoint.s3.copy_object(Bucket=target, Key="k", CopySource={"Bucket": source, "Key": "a/ü +"})
    assert endpoint.s3.get_object(Bucket=target, Key="k")["Body"].read() == b"x"


def test_a_copy_of_what_is_missing(endpoint: Endpoint) -> None:
    """NoSuchKey or NoSuchBucket."""
    bucket = endpoint.bucket()
    copy = endpoint.s3.copy_object
    assert refused(copy, Bucket=bucket, Key="k", CopySource=f"{bucket}/missing") == ("NoSuchKey", 404)
    assert refused(copy, Bucket=bucket, Key="k", CopySource="missing-bucket/k") == ("NoSuchBucket", 404)


def test_a_copy_with_conditions(endpoint: Endpoint) -> None:
    """They compare the source; all refusals are 412."""
    bucket = endpoint.put(["k"])
    arguments = {"Bucket": bucket, "Key": "copy", "CopySource": f"{bucket}/k"}
    copy, past = endpoint.s3.copy_object, datetime(2001, 1, 1, tzinfo=UTC)
    for wrong in (
        {"CopySourceIfMatch": '"0"'}, {"CopySourceIfNoneMatch": md5(b"x")}, {"CopySourceIfUnmodifiedSince": past},
        {"CopySourceIfModifiedSince": datetime.now(UTC) + timedelta(days=1)},
    ):  # fmt: skip
        assert refused(copy, **arguments, **wrong) == ("PreconditionFailed", 412)
    copy(**arguments, CopySourceIfMatch=md5(b"x"), CopySourceIfModifiedSince=past)
    assert endpoint.s3.get_object(Bucket=bucket, Key="copy")["Body"].read() == b"x"


# ── multipart uploads ───────────────────────────────────────────────────────────────────────────────────────────────


def upload(endpoint: Endpoint, bucket: str, parts: list[bytes], **options: Any) -> tuple[str, list[dict[str, Any]]]:
    upload_id = endpoint.s3.create_multipart_upload(Bucket=bucket, Key="k", **options)["UploadId"]
    done = []
    for number, part in enumerate(parts, 1):
        answer = endpoint.s3.upload_part(Bucket=bucket, Key="k", UploadId=upload_id, PartNumber=number, Body=part)
        done.append({"PartNumber": number, "ETag": answer["ETag"]})
    return upload_id, done


def complete(endpoint: Endpoint, bucket: str, upload_id: str, parts: list[dict[str, Any]], **options: Any) -> Any:
    return endpoint.s3.complete_multipart_upload(
        Bucket=bucket, Key="k", UploadId=upload_id, MultipartUpload={"Parts": parts}, **options
    )


def test_a_multipart_upload(endpoint: Endpoint) -> None:
    """Bytes, headers and the ETag of the parts."""
    bucket = endpoint.bucket()
    upload_id, parts = upload(endpoint, bucket, [PART, b"end"], Metadata={"a": "1"}, ContentType="text/plain")
    assert endpoint.s3.list_objects_v2(Bucket=bucket)["KeyCount"] == 0
    answer = complete(endpoint, bucket, upload_id, parts)
    digest = hashlib.md5(hashlib.md5(PART).digest() + hashlib.md5(b"end").digest()).hexdigest()
    assert answer["ETag"] == f'"{digest}-2"'
    assert (answer["Bucket"], answer["Key"]) == (bucket, "k")
    found = endpoint.s3.get_object(Bucket=bucket, Key="k")
    assert found["Body"].read() == PART + b"end"
    assert (found["ETag"], found["Metadata"], found["ContentType"]) == (answer["ETag"], {"a": "1"}, "text/plain")


def test_parts_are_read_by_number(endpoint: Endpoint) -> None:
    """GET and HEAD of part 2 tell its length, its place and how many there are."""
    bucket = endpoint.bucket()
    complete(endpoint, bucket, *upload(endpoint, bucket, [PART, b"end"]))
    answer = endpoint.s3.get_object(Bucket=bucket, Key="k", PartNumber=2)
    assert (status_of(answer), answer["Body"].read(), answer["PartsCount"]) == (206, b"end", 2)
    assert answer["ContentRange"] == f"bytes {len(PART)}-{len(PART) + 2}/{len(PART) + 3}"
    head = endpoint.s3.head_object(Bucket=bucket, Key="k", PartNumber=1)
    assert (status_of(head), head["ContentLength"], head["PartsCount"]) == (206, len(PART), 2)
    assert refused(endpoint.s3.get_object, Bucket=bucket, Key="k", PartNumber=3)[1] == 416


def test_a_part_has_its_checksum(endpoint: Endpoint) -> None:
    """GET and HEAD by part number tell the checksum of the part, and how many parts there are, also if there is only one."""
    bucket = endpoint.bucket()
    for parts in ([PART, b"end"], [b"only"]):
        upload_id, _ = upload(endpoint, bucket, [], ChecksumAlgorithm="CRC32")
        where = {"Bucket": bucket, "Key": "k", "UploadId": upload_id}
        sent = [endpoint.s3.upload_part(**where, PartNumber=n, Body=part, ChecksumAlgorithm="CRC32")
                for n, part in enumerate(parts, 1)]  # fmt: skip
        done = [{"PartNumber": n, "ETag": each["ETag"], "ChecksumCRC32": each["ChecksumCRC32"]}
                for n, each in enumerate(sent, 1)]  # fmt: skip
        complete(endpoint, bucket, upload_id, done)
        for number, part in enumerate(parts, 1):
            for call in (endpoint.s3.get_object, endpoint.s3.head_object):
                answer = call(Bucket=bucket, Key="k", PartNumber=number, ChecksumMode="ENABLED")
                assert answer["ChecksumCRC32"] == text64(zlib.crc32(part).to_bytes(4, "big"))
                assert answer["PartsCount"] == len(parts)
    endpoint.s3.put_object(Bucket=bucket, Key="k", Body=b"x", ChecksumAlgorithm="CRC32")
    answer = endpoint.s3.get_object(Bucket=bucket, Key="k", PartNumber=1, ChecksumMode="ENABLED")
    assert (answer["ChecksumCRC32"], answer.get("PartsCount")) == (text64(zlib.crc32(b"x").to_bytes(4, "big")), None)


def test_part_1_of_a_plain_object_is_the_object(endpoint: Endpoint) -> None:
    """And there is no part 2; a range beside the number is refused."""
    bucket = endpoint.put(["k"], DIGITS)
    assert endpoint.s3.get_object(Bucket=bucket, Key="k", PartNumber=1)["Body"].read() == DIGITS
    assert refused(endpoint.s3.get_object, Bucket=bucket, Key="k", PartNumber=2)[1] == 416
    both = refused(endpoint.s3.get_object, Bucket=bucket, Key="k", PartNumber=1, Range="bytes=0-1")
    assert both == ("InvalidRequest", 400)


def test_a_part_that_is_too_small(endpoint: Endpoint) -> None:
    """All parts but the last have 5 MiB: EntityTooSmall."""
    bucket = endpoint.bucket()
    upload_id, parts = upload(endpoint, bucket, [b"a", b"b"])
    call = endpoint.s3.complete_multipart_upload
    arguments = {"Bucket": bucket, "Key": "k", "UploadId": upload_id, "MultipartUpload": {"Parts": parts}}
    assert refused(call, **arguments) == ("EntityTooSmall", 400)


def test_parts_in_the_wrong_order(endpoint: Endpoint) -> None:
    """InvalidPartOrder."""
    bucket = endpoint.bucket()
    upload_id, parts = upload(endpoint, bucket, [PART, PART])
    for wrong in (parts[::-1], [parts[0], parts[0]]):
        with pytest.raises(ClientError) as caught:
            complete(endpoint, bucket, upload_id, wrong)
        assert caught.value.response["Error"]["Code"] == "InvalidPartOrder"


def test_parts_that_do_not_exist(endpoint: Endpoint) -> None:
    """InvalidPart, for a number and for an ETag; no parts at all are MalformedXML; the upload goes on afterwards."""
    bucket = endpoint.bucket()
    upload_id, parts = upload(endpoint, bucket, [b"a"])
    for wrong, code in (([{**parts[0], "PartNumber": 9}], "InvalidPart"), ([{**parts[0], "ETag": '"0"'}], "InvalidPart"),
                        ([], "MalformedXML")):  # fmt: skip
        with pytest.raises(ClientError) as caught:
            complete(endpoint, bucket, upload_id, wrong)
        assert (caught.value.response["Error"]["Code"], status_of(caught.value.response)) == (code, 400)
    complete(endpoint, bucket, upload_id, parts)


def test_some_of_the_parts(endpoint: Endpoint) -> None:
    """Only those that are named become the object; a part may be uploaded again."""
    bucket = endpoint.bucket()
    upload_id, _ = upload(endpoint, bucket, [b"old", b"unused"])
    again = endpoint.s3.upload_part(Bucket=bucket, Key="k", UploadId=upload_id, PartNumber=1, Body=b"new")
    complete(endpoint, bucket, upload_id, [{"PartNumber": 1, "ETag": again["ETag"]}])
    assert endpoint.s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"new"


def test_an_upload_that_was_aborted(endpoint: Endpoint) -> None:
    """204, and then NoSuchUpload; the object does not exist."""
    bucket = endpoint.bucket()
    upload_id, parts = upload(endpoint, bucket, [b"a"])
    where = {"Bucket": bucket, "Key": "k", "UploadId": upload_id}
    assert status_of(endpoint.s3.abort_multipart_upload(**where)) == 204
    assert refused(endpoint.s3.upload_part, **where, PartNumber=1, Body=b"x") == ("NoSuchUpload", 404)
    assert refused(endpoint.s3.list_parts, **where) == ("NoSuchUpload", 404)
    done = {**where, "MultipartUpload": {"Parts": parts}}
    assert refused(endpoint.s3.complete_multipart_upload, **done) == ("NoSuchUpload", 404)
    assert endpoint.s3.list_objects_v2(Bucket=bucket)["KeyCount"] == 0


@pytest.mark.parametrize("upload_id", ["never", "0" * 32, "../../x"])
def test_an_upload_that_never_was(endpoint: Endpoint, upload_id: str) -> None:
    """NoSuchUpload."""
    where = {"Bucket": endpoint.bucket(), "Key": "k", "UploadId": upload_id}
    assert refused(endpoint.s3.upload_part, **where, PartNumber=1, Body=b"x") == ("NoSuchUpload", 404)
    assert refused(endpoint.s3.abort_multipart_upload, **where) == ("NoSuchUpload", 404)


@pytest.mark.parametrize("number", [0, 10001, -1])
def test_part_numbers_have_bounds(endpoint: Endpoint, number: int) -> None:
    """From 1 to 10 000: InvalidArgument."""
    bucket = endpoint.bucket()
    upload_id, _ = upload(endpoint, bucket, [])
    where = {"Bucket": bucket, "Key": "k", "UploadId": upload_id, "PartNumber": number}
    assert refused(endpoint.s3.upload_part, **where, Body=b"x") == ("InvalidArgument", 400)


def test_parts_are_listed(endpoint: Endpoint) -> None:
    """In pages, with sizes and ETags."""
    bucket = endpoint.bucket()
    upload_id, parts = upload(endpoint, bucket, [b"a", b"bb", b"ccc"])
    where = {"Bucket": bucket, "Key": "k", "UploadId": upload_id}
    first = endpoint.s3.list_parts(**where, MaxParts=2)
    assert (first["IsTruncated"], first["NextPartNumberMarker"], first["MaxParts"]) == (True, 2, 2)
    second = endpoint.s3.list_parts(**where, PartNumberMarker=2)
    found = [(part["PartNumber"], part["Size"], part["ETag"]) for part in [*first["Parts"], *second["Parts"]]]
    assert found == [(1, 1, parts[0]["ETag"]), (2, 2, parts[1]["ETag"]), (3, 3, parts[2]["ETag"])]


def test_uploads_are_listed(endpoint: Endpoint) -> None:
    """With their keys and ids, by prefix and delimiter, until they are aborted."""
    bucket = endpoint.bucket()
    keys = ["a/1", "a/2", "b ü", "b ü"]
    ids = [(key, endpoint.s3.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]) for key in keys]
    answer = endpoint.s3.list_multipart_uploads(Bucket=bucket)
    assert sorted((each["Key"], each["UploadId"]) for each in answer["Uploads"]) == sorted(ids)
    below = endpoint.s3.list_multipart_uploads(Bucket=bucket, Prefix="a/")["Uploads"]
    assert [each["Key"] for each in below] == ["a/1", "a/2"]
    folded = endpoint.s3.list_multipart_uploads(Bucket=bucket, Delimiter="/")
    assert [each["Prefix"] for each in folded["CommonPrefixes"]] == ["a/"]
    pages = endpoint.s3.get_paginator("list_multipart_uploads").paginate(
        Bucket=bucket, PaginationConfig={"PageSize": 1}
    )
    assert [each["Key"] for page in pages for each in page["Uploads"]] == keys
    for key, upload_id in ids:
        endpoint.s3.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload_id)
    assert "Uploads" not in endpoint.s3.list_multipart_uploads(Bucket=bucket)


def test_a_part_is_copied(endpoint: Endpoint) -> None:
    """UploadPartCopy, whole and by range."""
    bucket = endpoint.bucket()
    endpoint.s3.put_object(Bucket=bucket, Key="source", Body=PART + DIGITS)
    upload_id = endpoint.s3.create_multipart_upload(Bucket=bucket, Key="k")["UploadId"]
    where = {"Bucket": bucket, "Key": "k", "UploadId": upload_id, "CopySource": f"{bucket}/source"}
    first = endpoint.s3.upload_part_copy(**where, PartNumber=1)["CopyPartResult"]["ETag"]
    span = f"bytes={len(PART) + 2}-{len(PART) + 4}"
    second = endpoint.s3.upload_part_copy(**where, PartNumber=2, CopySourceRange=span)["CopyPartResult"]["ETag"]
    assert second == md5(b"234")
    complete(endpoint, bucket, upload_id, [{"PartNumber": 1, "ETag": first}, {"PartNumber": 2, "ETag": second}])
    assert endpoint.s3.get_object(Bucket=bucket, Key="k")["Body"].read() == PART + DIGITS + b"234"


def test_a_range_beyond_the_source_of_a_part(endpoint: Endpoint) -> None:
    """InvalidArgument or InvalidRange; nothing is cut."""
    bucket = endpoint.put(["source"], DIGITS)
    upload_id = endpoint.s3.create_multipart_upload(Bucket=bucket, Key="k")["UploadId"]
    where = {"Bucket": bucket, "Key": "k", "UploadId": upload_id, "CopySource": f"{bucket}/source", "PartNumber": 1}
    for span in ("bytes=5-99", "bytes=5-2", "bytes=1-", "words"):
        code, status = refused(endpoint.s3.upload_part_copy, **where, CopySourceRange=span)
        assert (code, status) in (("InvalidArgument", 400), ("InvalidRange", 416))


def test_completing_twice(endpoint: Endpoint) -> None:
    """The same answer again, or NoSuchUpload; the object stays."""
    bucket = endpoint.bucket()
    upload_id, parts = upload(endpoint, bucket, [b"a"])
    etag = complete(endpoint, bucket, upload_id, parts)["ETag"]
    with may_be_refused("NoSuchUpload"):
        assert complete(endpoint, bucket, upload_id, parts)["ETag"] == etag
    assert endpoint.s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"a"


def test_completing_with_a_condition(endpoint: Endpoint) -> None:
    """If-None-Match: * does not replace an object."""
    bucket = endpoint.put(["k"])
    upload_id, parts = upload(endpoint, bucket, [b"a"])
    with pytest.raises(ClientError) as caught:
        complete(endpoint, bucket, upload_id, parts, IfNoneMatch="*")
    assert status_of(caught.value.response) == 412
    assert endpoint.s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"x"


def test_upload_file_in_parallel_parts(endpoint: Endpoint) -> None:
    """boto3's own transfer, 5 MiB parts on threads."""
    bucket, data = endpoint.bucket(), os.urandom(12 * MIB)
    settings = TransferConfig(multipart_threshold=5 * MIB, multipart_chunksize=5 * MIB, max_concurrency=4)
    endpoint.s3.upload_fileobj(io.BytesIO(data), bucket, "k", Config=settings, ExtraArgs={"Metadata": {"a": "1"}})
    head = endpoint.s3.head_object(Bucket=bucket, Key="k")
    assert (head["ContentLength"], head["Metadata"], head["ETag"][-3:]) == (len(data), {"a": "1"}, '-3"')
    assert endpoint.s3.get_object(Bucket=bucket, Key="k")["Body"].read() == data


# ── checksums ───────────────────────────────────────────────────────────────────────────────────────────────────────

ALGORITHMS = ["CRC32", "CRC32C", "SHA1", "SHA256", "CRC64NVME"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_checksums_are_computed_and_told(endpoint: Endpoint, algorithm: str) -> None:
    """boto3 sends them in a trailer or a header, and reads them with ChecksumMode."""
    bucket, name = endpoint.bucket(), f"Checksum{algorithm}"
    written = endpoint.s3.put_object(Bucket=bucket, Key="k", Body=DIGITS, ChecksumAlgorithm=algorithm)
    head = endpoint.s3.head_object(Bucket=bucket, Key="k", ChecksumMode="ENABLED")
    assert head[name] == written[name]
    assert head["ChecksumType"] == "FULL_OBJECT"
    assert endpoint.s3.get_object(Bucket=bucket, Key="k", ChecksumMode="ENABLED")["Body"].read() == DIGITS
    told = endpoint.s3.get_object_attributes(Bucket=bucket, Key="k", ObjectAttributes=["Checksum"])
    assert told["Checksum"][name] == written[name]
    if algorithm == "SHA256":
        assert head[name] == text64(hashlib.sha256(DIGITS).digest())


def test_a_checksum_is_only_told_if_it_is_wanted(endpoint: Endpoint) -> None:
    """Without ChecksumMode there is none."""
    bucket = endpoint.bucket()
    endpoint.s3.put_object(Bucket=bucket, Key="k", Body=DIGITS, ChecksumAlgorithm="SHA256")
    client = endpoint.client(response_checksum_validation="when_required")
    assert "ChecksumSHA256" not in client.head_object(Bucket=bucket, Key="k")


def test_the_default_checksum_of_boto3(endpoint: Endpoint) -> None:
    """CRC32, which is kept."""
    bucket = endpoint.put(["k"], DIGITS)
    head = endpoint.s3.head_object(Bucket=bucket, Key="k", ChecksumMode="ENABLED")
    assert head["ChecksumCRC32"] == text64(zlib.crc32(DIGITS).to_bytes(4, "big"))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_wrong_checksum_is_refused(endpoint: Endpoint, algorithm: str) -> None:
    """BadDigest, and nothing is written."""
    bucket = endpoint.bucket()
    wrong = text64(b"\0" * {"CRC64NVME": 8, "SHA1": 20, "SHA256": 32}.get(algorithm, 4))
    call = endpoint.s3.put_object
    code, status = refused(call, Bucket=bucket, Key="k", Body=b"x", **{f"Checksum{algorithm}": wrong})
    assert (code, status) in (("BadDigest", 400), ("InvalidRequest", 400))
    assert endpoint.s3.list_objects_v2(Bucket=bucket)["KeyCount"] == 0


def test_a_checksum_that_is_none_is_refused(endpoint: Endpoint) -> None:
    """InvalidRequest for a value of the wrong length."""
    call = endpoint.s3.put_object
    assert refused(call, Bucket=endpoint.bucket(), Key="k", Body=b"x", ChecksumSHA256="YmFk") == ("InvalidRequest", 400)


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [("CRC32", "FULL_OBJECT"), ("CRC32C", "FULL_OBJECT"), ("CRC64NVME", "FULL_OBJECT"), ("CRC32", "COMPOSITE"),
     ("CRC32C", "COMPOSITE"), ("SHA1", "COMPOSITE"), ("SHA256", "COMPOSITE")],
)  # fmt: skip
def test_checksums_of_multipart_objects(endpoint: Endpoint, algorithm: str, kind: str) -> None:
    """A composite checksum is that of the parts' checksums, and a full-object one is that of the joined bytes."""
    bucket, field, tail = endpoint.bucket(), f"Checksum{algorithm}", b"tail" * 1000
    upload_id, _ = upload(endpoint, bucket, [], ChecksumAlgorithm=algorithm, ChecksumType=kind)
    parts = []
    for number, data in enumerate((PART, tail), 1):
        part = endpoint.s3.upload_part(
            Bucket=bucket, Key="k", UploadId=upload_id, PartNumber=number, Body=data, ChecksumAlgorithm=algorithm
        )
        parts.append({"PartNumber": number, "ETag": part["ETag"], field: part[field]})
    done = complete(endpoint, bucket, upload_id, parts)
    head = endpoint.s3.head_object(Bucket=bucket, Key="k", ChecksumMode="ENABLED")
    assert (done[field], done["ChecksumType"]) == (head[field], head["ChecksumType"]) == (head[field], kind)
    if kind == "FULL_OBJECT":
        whole = endpoint.s3.put_object(Bucket=bucket, Key="whole", Body=PART + tail, ChecksumAlgorithm=algorithm)
        assert head[field] == whole[field]
    else:
        assert head[field].endswith("-2")
        told = endpoint.s3.get_object_attributes(Bucket=bucket, Key="k", ObjectAttributes=["ObjectParts"])
        assert [row[field] for row in told["ObjectParts"]["Parts"]] == [part[field] for part in parts]
        if algorithm == "CRC32":
            digests = b"".join(base64.b64decode(part[field]) for part in parts)
            assert head[field] == text64(zlib.crc32(digests).to_bytes(4, "big")) + "-2"


def test_attributes_of_an_object(endpoint: Endpoint) -> None:
    """GetObjectAttributes tells size, ETag without quotes, checksum, class and parts."""
    bucket = endpoint.bucket()
    complete(endpoint, bucket, *upload(endpoint, bucket, [PART, b"end"]))
    names = ["ETag", "Checksum", "ObjectParts", "StorageClass", "ObjectSize"]
    answer = endpoint.s3.get_object_attributes(Bucket=bucket, Key="k", ObjectAttributes=names)
    assert (answer["ObjectSize"], answer["StorageClass"]) == (len(PART) + 3, "STANDARD")
    assert answer["ETag"].endswith("-2")
    assert answer["ObjectParts"]["TotalPartsCount"] == 2


# ── presigned URLs ──────────────────────────────────────────────────────────────────────────────────────────────────

VERSIONS = ["default", "s3v4", "s3"]


def signer(endpoint: Endpoint, version: str) -> Any:
    return endpoint.s3 if version == "default" else endpoint.client(signature_version=version)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_presigned_get(endpoint: Endpoint, version: str) -> None:
    """Whole, by range, and with HEAD; odd keys."""
    bucket = endpoint.put(["ü/a b+c"], DIGITS)
    client, where = signer(endpoint, version), {"Bucket": bucket, "Key": "ü/a b+c"}
    url = client.generate_presigned_url("get_object", where, ExpiresIn=60)
    assert endpoint.fetch(url)[::2] == (200, DIGITS)
    assert endpoint.fetch(url, headers={"Range": "bytes=2-4"})[::2] == (206, b"234")
    head = client.generate_presigned_url("head_object", where)
    assert endpoint.fetch(head, method="HEAD")[1]["content-length"] == "10"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_presigned_put(endpoint: Endpoint, version: str) -> None:
    """The body is not signed; the type and metadata are."""
    bucket, client = endpoint.bucket(), signer(endpoint, version)
    url = client.generate_presigned_url("put_object", {"Bucket": bucket, "Key": "k", "ContentType": "text/plain"})
    status, headers, _ = endpoint.fetch(url, method="PUT", body=DIGITS, headers={"Content-Type": "text/plain"})
    assert (status, headers["etag"]) == (200, md5(DIGITS))
    assert endpoint.s3.head_object(Bucket=bucket, Key="k")["ContentType"] == "text/plain"
    assert endpoint.fetch(url, method="PUT", body=b"x", headers={"Content-Type": "text/html"})[0] == 403


@pytest.mark.parametrize("version", VERSIONS)
def test_a_presigned_put_with_metadata(endpoint: Endpoint, version: str) -> None:
    """It is kept, whether the client sends it in the query or in headers."""
    bucket, client = endpoint.bucket(), signer(endpoint, version)
    url = client.generate_presigned_url("put_object", {"Bucket": bucket, "Key": "k", "Metadata": {"a": "b c"}})
    assert endpoint.fetch(url, method="PUT", body=DIGITS, headers={"x-amz-meta-a": "b c"})[0] == 200
    assert endpoint.s3.head_object(Bucket=bucket, Key="k")["Metadata"] == {"a": "b c"}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_presigned_delete(endpoint: Endpoint, version: str) -> None:
    """204, and the object is gone."""
    bucket = endpoint.put(["k"])
    url = signer(endpoint, version).generate_presigned_url("delete_object", {"Bucket": bucket, "Key": "k"})
    assert endpoint.fetch(url, method="DELETE")[0] == 204
    assert endpoint.s3.list_objects_v2(Bucket=bucket)["KeyCount"] == 0


@pytest.mark.parametrize("version", VERSIONS)
def test_a_presigned_listing(endpoint: Endpoint, version: str) -> None:
    """Lists by prefix."""
    bucket = endpoint.put(["a/1", "b/1"])
    url = signer(endpoint, version).generate_presigned_url("list_objects_v2", {"Bucket": bucket, "Prefix": "a/"})
    status, _, body = endpoint.fetch(url)
    assert (status, body.count(b"<Contents>"), b"<Key>a/1</Key>" in body) == (200, 1, True)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_presigned_part(endpoint: Endpoint, version: str) -> None:
    """UploadPart by a URL, as browsers upload large files."""
    bucket, client = endpoint.bucket(), signer(endpoint, version)
    upload_id, _ = upload(endpoint, bucket, [])
    where = {"Bucket": bucket, "Key": "k", "UploadId": upload_id, "PartNumber": 1}
    status, headers, _ = endpoint.fetch(client.generate_presigned_url("upload_part", where), method="PUT", body=PART)
    assert status == 200
    complete(endpoint, bucket, upload_id, [{"PartNumber": 1, "ETag": headers["etag"]}])
    assert endpoint.s3.head_object(Bucket=bucket, Key="k")["ContentLength"] == len(PART)


@pytest.mark.parametrize("version", ["default", "s3"])  # botocore signs no URL of version 4 that has expired
def test_a_presigned_url_expires(endpoint: Endpoint, version: str) -> None:
    """403 AccessDenied."""
    bucket, client = endpoint.put(["k"]), signer(endpoint, version)
    url = client.generate_presigned_url("get_object", {"Bucket": bucket, "Key": "k"}, ExpiresIn=-1)
    status, _, body = endpoint.fetch(url)
    assert status in (400, 403)
    assert DIGITS not in body


@pytest.mark.parametrize("version", VERSIONS)
def test_a_presigned_url_is_for_one_object_and_one_method(endpoint: Endpoint, version: str) -> None:
    """Changed in any way it is SignatureDoesNotMatch."""
    bucket, client = endpoint.put(["k", "l"]), signer(endpoint, version)
    url = client.generate_presigned_url("get_object", {"Bucket": bucket, "Key": "k"})
    for method, other in (("GET", url.replace("/k?", "/l?")), ("PUT", url), ("DELETE", url), ("GET", url + "0")):
        status, _, _ = endpoint.fetch(other, method=method)
        assert status in (400, 403)


@pytest.mark.parametrize("version", VERSIONS)
def test_headers_of_the_answer_are_overridden(endpoint: Endpoint, version: str) -> None:
    """The six response- parameters."""
    bucket = endpoint.put(["k"])
    given = {"ResponseContentType": "text/html", "ResponseContentLanguage": "fr", "ResponseCacheControl": "no-cache",
             "ResponseContentDisposition": 'attachment; filename="a b.txt"', "ResponseContentEncoding": "br",
             "ResponseExpires": datetime(2030, 1, 2, tzinfo=UTC)}  # fmt: skip
    url = signer(endpoint, version).generate_presigned_url("get_object", {"Bucket": bucket, "Key": "k", **given})
    status, headers, body = endpoint.fetch(url)
    assert (status, body) == (200, b"x")
    assert (headers["content-type"], headers["content-language"], headers["cache-control"]) == (
        "text/html",
        "fr",
        "no-cache",
    )
    assert headers["content-disposition"] == 'attachment; filename="a b.txt"'
    assert headers["content-encoding"] == "br"
    assert headers["expires"].endswith("2030 00:00:00 GMT")


# ── signatures ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_wrong_secret_is_refused(endpoint: Endpoint) -> None:
    """SignatureDoesNotMatch."""
    client = boto3.client("s3", endpoint_url=endpoint.url, aws_access_key_id=ACCESS_KEY, aws_secret_access_key="wrong",
                          region_name="us-east-1")  # fmt: skip
    assert refused(client.list_buckets) == ("SignatureDoesNotMatch", 403)


def test_an_unknown_key_is_refused(endpoint: Endpoint) -> None:
    """InvalidAccessKeyId."""
    client = boto3.client("s3", endpoint_url=endpoint.url, aws_access_key_id="unknown", aws_secret_access_key="wrong",
                          region_name="us-east-1")  # fmt: skip
    assert refused(client.list_buckets) == ("InvalidAccessKeyId", 403)


def test_an_unsigned_request_is_refused(endpoint: Endpoint) -> None:
    """AccessDenied."""
    bucket = endpoint.put(["k"])
    status, _, body = endpoint.fetch(f"{endpoint.url}/{bucket}/k")
    assert (status, b"AccessDenied" in body) == (403, True)


@pytest.mark.parametrize("style", ["path", "virtual"])
def test_both_addressing_styles(endpoint: Endpoint, style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bucket is in the path, or in the host name; presigned URLs of both versions too."""
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda _host, *rest, **options: real("127.0.0.1", *rest, **options))
    bucket = endpoint.put(["a/k"])
    other = Endpoint(endpoint.url.replace("127.0.0.1", "localhost"), *endpoint.keys)
    client = other.client(s3={"addressing_style": style})
    assert client.get_object(Bucket=bucket, Key="a/k")["Body"].read() == b"x"
    assert client.list_objects_v2(Bucket=bucket)["KeyCount"] == 1
    for version in ("s3", "s3v4"):
        client = other.client(s3={"addressing_style": style}, signature_version=version)
        url = client.generate_presigned_url("get_object", {"Bucket": bucket, "Key": "a/k"})
        assert (f"//{bucket}." in url) == (style == "virtual")
        assert endpoint.fetch(url)[::2] == (200, b"x")
        assert endpoint.fetch(client.generate_presigned_url("list_objects", {"Bucket": bucket}))[0] == 200


def test_a_stream_is_uploaded_in_signed_chunks(endpoint: Endpoint) -> None:
    """A body that cannot be rewound, with a trailer."""
    bucket = endpoint.bucket()
    client = endpoint.client(s3={"payload_signing_enabled": True})
    client.put_object(Bucket=bucket, Key="k", Body=io.BytesIO(PART))
    assert endpoint.s3.get_object(Bucket=bucket, Key="k")["Body"].read() == PART


# ── listings ────────────────────────────────────────────────────────────────────────────────────────────────────────


def keys_of(answer: Any) -> list[str]:
    return [each["Key"] for each in answer.get("Contents", [])]


def prefixes_of(answer: Any) -> list[str]:
    return [each["Prefix"] for each in answer.get("CommonPrefixes", [])]


def test_a_listing_tells_size_etag_and_time(endpoint: Endpoint) -> None:
    """As HEAD does."""
    bucket = endpoint.put(["k"], DIGITS)
    (found,) = endpoint.s3.list_objects_v2(Bucket=bucket)["Contents"]
    head = endpoint.s3.head_object(Bucket=bucket, Key="k")
    assert (found["Size"], found["ETag"]) == (10, head["ETag"])
    assert found["LastModified"].replace(microsecond=0) == head["LastModified"]


def test_an_empty_listing(endpoint: Endpoint) -> None:
    """No contents, not truncated."""
    answer = endpoint.s3.list_objects_v2(Bucket=endpoint.bucket())
    assert (answer["KeyCount"], answer["IsTruncated"], "Contents" in answer) == (0, False, False)


def test_listings_are_ordered_by_bytes(endpoint: Endpoint) -> None:
    """UTF-8, not the alphabet: capitals first, ``-`` before ``/``."""
    keys = ["B", "a", "Ä", "a-b", "a/b", "a.b", "ab", "😀", "\uffee"]
    assert keys_of(endpoint.s3.list_objects_v2(Bucket=endpoint.put(keys))) == sorted(keys, key=str.encode)


def test_pages_of_a_listing(endpoint: Endpoint) -> None:
    """Each key comes once; version 2 with tokens, version 1 with markers."""
    keys = [f"{number:02d} ü" for number in range(7)]
    bucket = endpoint.put(keys)
    for name in ("list_objects_v2", "list_objects"):
        pages = list(endpoint.s3.get_paginator(name).paginate(Bucket=bucket, PaginationConfig={"PageSize": 3}))
        assert [len(keys_of(page)) for page in pages] == [3, 3, 1]
        assert [key for page in pages for key in keys_of(page)] == keys
    first = endpoint.s3.list_objects_v2(Bucket=bucket, MaxKeys=3)
    assert (first["KeyCount"], first["MaxKeys"], first["IsTruncated"]) == (3, 3, True)


def test_a_page_that_ends_with_the_listing(endpoint: Endpoint) -> None:
    """It is not truncated."""
    answer = endpoint.s3.list_objects_v2(Bucket=endpoint.put(["a", "b"]), MaxKeys=2)
    assert (answer["IsTruncated"], "NextContinuationToken" in answer) == (False, False)


def test_a_page_of_no_keys(endpoint: Endpoint) -> None:
    """MaxKeys 0 lists nothing and is not truncated."""
    answer = endpoint.s3.list_objects_v2(Bucket=endpoint.put(["a"]), MaxKeys=0)
    assert (answer["KeyCount"], answer["IsTruncated"]) == (0, False)


def test_more_than_a_thousand_keys_are_not_listed_at_once(endpoint: Endpoint) -> None:
    """MaxKeys is at most 1 000."""
    answer = endpoint.s3.list_objects_v2(Bucket=endpoint.put(["a"]), MaxKeys=5000)
    assert (answer["MaxKeys"], keys_of(answer)) == (1000, ["a"])


def test_a_delimiter_folds_keys(endpoint: Endpoint) -> None:
    """Common prefixes count as keys; both versions."""
    bucket = endpoint.put(["a", "b/1", "b/2", "c/d/1", "e"])
    for listing in (endpoint.s3.list_objects_v2, endpoint.s3.list_objects):
        answer = listing(Bucket=bucket, Delimiter="/")
        assert (keys_of(answer), prefixes_of(answer)) == (["a", "e"], ["b/", "c/"])
    assert endpoint.s3.list_objects_v2(Bucket=bucket, Delimiter="/")["KeyCount"] == 4
    below = endpoint.s3.list_objects_v2(Bucket=bucket, Prefix="c/", Delimiter="/")
    assert (keys_of(below), prefixes_of(below)) == ([], ["c/d/"])


@pytest.mark.parametrize("delimiter", ["-", "bb", "ü", " ", "%", "//"])
def test_any_text_is_a_delimiter(endpoint: Endpoint, delimiter: str) -> None:
    """Not only the slash."""
    bucket = endpoint.put([f"a{delimiter}1", f"a{delimiter}2", "z"])
    answer = endpoint.s3.list_objects_v2(Bucket=bucket, Delimiter=delimiter)
    assert (keys_of(answer), prefixes_of(answer)) == (["z"], [f"a{delimiter}"])
    assert answer["Delimiter"] == delimiter


def test_pages_with_a_delimiter(endpoint: Endpoint) -> None:
    """A common prefix comes once, whatever the page size."""
    bucket = endpoint.put(["a/1", "a/2", "b", "c/1", "c/2", "c/3", "d"])
    for size in (1, 2, 3):
        for name in ("list_objects_v2", "list_objects"):
            pages = endpoint.s3.get_paginator(name).paginate(
                Bucket=bucket, Delimiter="/", PaginationConfig={"PageSize": size}
            )
            found = [(keys_of(page), prefixes_of(page)) for page in pages]
            assert [key for keys, _ in found for key in keys] == ["b", "d"]
            assert [prefix for _, prefixes in found for prefix in prefixes] == ["a/", "c/"]
            assert all(len(keys) + len(prefixes) <= size for keys, prefixes in found)


@pytest.mark.parametrize(("prefix", "found"), [("a", ["a", "a/b", "ab"]), ("a/", ["a/b"]), ("", ["a", "a/b", "ab", "b"]),
                                               ("x", []), ("A", [])])  # fmt: skip
def test_prefixes(endpoint: Endpoint, prefix: str, found: list[str]) -> None:
    """A prefix is any beginning of a key."""
    bucket = endpoint.put(["a", "a/b", "ab", "b"])
    assert keys_of(endpoint.s3.list_objects_v2(Bucket=bucket, Prefix=prefix)) == found


def test_start_after_and_markers(endpoint: Endpoint) -> None:
    """They need not exist."""
    keys = ["a", "b/1", "b/2", "c", "d//"]
    bucket = endpoint.put(keys)
    for after in ("a", "aa", "b/1", "b/", "c", "d//", "z"):
        wanted = [key for key in keys if key > after]
        assert keys_of(endpoint.s3.list_objects_v2(Bucket=bucket, StartAfter=after)) == wanted
        assert keys_of(endpoint.s3.list_objects(Bucket=bucket, Marker=after)) == wanted
    assert endpoint.s3.list_objects_v2(Bucket=bucket, StartAfter="bb")["StartAfter"] == "bb"
    assert endpoint.s3.list_objects(Bucket=bucket, Marker="b")["Marker"] == "b"


def test_a_token_that_is_none_is_refused(endpoint: Endpoint) -> None:
    """InvalidArgument."""
    call = endpoint.s3.list_objects_v2
    assert refused(call, Bucket=endpoint.put(["a"]), ContinuationToken="") == ("InvalidArgument", 400)


def test_owners_are_listed_if_they_are_wanted(endpoint: Endpoint) -> None:
    """FetchOwner in version 2, always in version 1."""
    bucket = endpoint.put(["a"])
    assert "Owner" not in endpoint.s3.list_objects_v2(Bucket=bucket)["Contents"][0]
    assert endpoint.s3.list_objects_v2(Bucket=bucket, FetchOwner=True)["Contents"][0]["Owner"]["ID"]
    assert endpoint.s3.list_objects(Bucket=bucket)["Contents"][0]["Owner"]["ID"]


def test_a_listing_is_encoded_if_it_is_wanted(endpoint: Endpoint) -> None:
    """encoding-type=url, which boto3 decodes; without it, XML says what it can."""
    bucket = endpoint.put(["a b/ü", "a&b"])
    url = endpoint.s3.generate_presigned_url("list_objects_v2", {"Bucket": bucket, "EncodingType": "url"})
    body = endpoint.fetch(url)[2].decode()
    assert "<EncodingType>url</EncodingType>" in body
    assert "<Key>a%26b</Key>" in body
    assert "<Key>a+b/%C3%BC</Key>" in body or "<Key>a%20b/%C3%BC</Key>" in body


def test_versions_of_a_bucket_without_versions(endpoint: Endpoint) -> None:
    """Each object has the version null, by which it is read and deleted, and is the latest."""
    bucket = endpoint.put(["a", "b"])
    answer = endpoint.s3.list_object_versions(Bucket=bucket)
    assert [(each["Key"], each["VersionId"], each["IsLatest"]) for each in answer["Versions"]] == [
        ("a", "null", True),
        ("b", "null", True),
    ]
    assert endpoint.s3.get_object(Bucket=bucket, Key="a", VersionId="null")["Body"].read() == b"x"
    endpoint.s3.delete_object(Bucket=bucket, Key="a", VersionId="null")
    wrong = endpoint.s3.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": "b", "VersionId": "7"}]})
    assert [(each["Key"], each["Code"]) for each in wrong["Errors"]] == [("b", "NoSuchVersion")]
    assert keys_of(endpoint.s3.list_objects_v2(Bucket=bucket)) == ["b"]


def test_multipart_etags_are_listed(endpoint: Endpoint) -> None:
    """A listing has the same ETag as HEAD."""
    bucket = endpoint.bucket()
    complete(endpoint, bucket, *upload(endpoint, bucket, [PART, b"end"]))
    (found,) = endpoint.s3.list_objects_v2(Bucket=bucket)["Contents"]
    assert found["ETag"] == endpoint.s3.head_object(Bucket=bucket, Key="k")["ETag"]
    assert found["Size"] == len(PART) + 3


# ── bad requests ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_body_without_a_length_is_refused(endpoint: Endpoint) -> None:
    """PUT needs Content-Length: MissingContentLength, or at least no empty object."""
    bucket = endpoint.bucket()
    url = endpoint.client(signature_version="s3v4").generate_presigned_url("put_object", {"Bucket": bucket, "Key": "k"})
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    connection.putrequest("PUT", url.partition(parts.netloc)[2])
    connection.endheaders()
    status = connection.getresponse().status
    connection.close()
    assert status in (411, 200)


def test_bad_xml_is_refused(endpoint: Endpoint) -> None:
    """MalformedXML."""
    bucket = endpoint.bucket()
    client = endpoint.client(signature_version="s3v4")
    upload_id, _ = upload(endpoint, bucket, [b"a"])
    where = {"Bucket": bucket, "Key": "k", "UploadId": upload_id}
    url = client.generate_presigned_url("complete_multipart_upload", where)
    status, _, body = endpoint.fetch(url, method="POST", body=b"<nonsense")
    assert (status, b"MalformedXML" in body) == (400, True)


def test_unknown_methods_are_refused(endpoint: Endpoint) -> None:
    """405 or 403, in XML."""
    bucket = endpoint.put(["k"])
    url = endpoint.client(signature_version="s3v4").generate_presigned_url("get_object", {"Bucket": bucket, "Key": "k"})
    assert endpoint.fetch(url, method="PATCH")[0] in (400, 403, 405)


def test_errors_are_xml(endpoint: Endpoint) -> None:
    """With code, message, resource and request id."""
    bucket = endpoint.bucket()
    url = endpoint.s3.generate_presigned_url("get_object", {"Bucket": bucket, "Key": "missing"})
    status, headers, body = endpoint.fetch(url)
    assert (status, headers["content-type"]) == (404, "application/xml")
    for name in (b"Code", b"Message", b"RequestId"):
        assert b"<%b>" % name in body
