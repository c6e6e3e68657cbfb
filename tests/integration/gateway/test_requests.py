"""Conditions, ranges, listings, headers and errors, over real sockets."""

from __future__ import annotations

import http.client
import urllib.parse
from typing import TYPE_CHECKING, Any

import pytest

from fronts import FixedBuckets, RunningFront, s3_client
from penstock.gateway.buckets.upstream import UpstreamBucket
from penstock.store import MemoryStore
from signed_requests import KEY, READER, authenticator

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.server

DATA = bytes(range(256)) * 1000
ODD_KEYS = [
    " lead",
    "%41",
    "a//b",
    "a/./b",
    "a/../b",
    "a&b=c?d#e",
    "e\u0301\U0001f600",
    "quote\"'<>",
    "tab\there",
    "x+y z",
    "trailing/",
    "..",
    "~*()!",
]


@pytest.fixture(scope="module")
def front() -> Iterator[RunningFront]:
    """A front with a bucket of data, and one of odd keys."""
    data = UpstreamBucket("data", MemoryStore({"d": DATA, "empty": b"", "d/e": b"1"}))
    odd = UpstreamBucket("odd", MemoryStore(dict.fromkeys(ODD_KEYS, b"odd")))
    with RunningFront(data, odd) as running:
        yield running


@pytest.fixture(scope="module")
def client(front: RunningFront) -> Any:
    """A boto3 client of it."""
    return s3_client(front.url)


def refused(call: Any, **arguments: Any) -> tuple[int, str]:
    """Status and code of a call that is refused."""
    from botocore.exceptions import ClientError

    with pytest.raises(ClientError) as caught:
        call(**arguments)
    answer = caught.value.response
    assert answer["ResponseMetadata"]["RequestId"]
    assert answer["ResponseMetadata"]["HostId"]
    return answer["ResponseMetadata"]["HTTPStatusCode"], answer["Error"]["Code"]


def fetch(front: RunningFront, method: str, target: str, headers: dict[str, str] | None = None) -> Any:
    """One request without boto3: status, headers and body."""
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=20)
    try:
        connection.request(method, target, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize("key", ODD_KEYS)
def test_odd_keys_are_read_and_listed(client: Any, key: str) -> None:
    """Spaces, dots, signs and letters of all kinds in keys survive the way in and out."""
    assert client.get_object(Bucket="odd", Key=key)["Body"].read() == b"odd"
    for encoding in ({}, {"EncodingType": "url"}):
        rows = client.list_objects_v2(Bucket="odd", Prefix=key, **encoding)["Contents"]
        assert urllib.parse.unquote_plus(rows[0]["Key"]) == key if encoding else rows[0]["Key"] == key


@pytest.mark.parametrize("version", ["list_objects", "list_objects_v2"])
@pytest.mark.parametrize("page_size", [1, 2, 3, 1000])
@pytest.mark.parametrize("delimiter", ["", "/"])
def test_pages_have_everything_once(client: Any, version: str, page_size: int, delimiter: str) -> None:
    """Any size of page gives every key or prefix once, in order, with and without a delimiter."""
    pages = client.get_paginator(version).paginate(
        Bucket="odd", Delimiter=delimiter, PaginationConfig={"PageSize": page_size}
    )
    keys, prefixes = [], []
    for page in pages:
        keys += [row["Key"] for row in page.get("Contents", [])]
        prefixes += [row["Prefix"] for row in page.get("CommonPrefixes", [])]
    expected = sorted(ODD_KEYS)
    if delimiter:
        assert prefixes == sorted({key[: key.index("/") + 1] for key in expected if "/" in key})
        expected = [key for key in expected if "/" not in key]
    assert keys == expected


def test_buckets_and_their_sub_resources(client: Any) -> None:
    """Buckets are listed and found; what the gateway lacks is refused by S3's codes."""
    assert [bucket["Name"] for bucket in client.list_buckets()["Buckets"]] == ["data", "odd"]
    assert client.head_bucket(Bucket="data")["ResponseMetadata"]["HTTPStatusCode"] == 200
    assert client.get_bucket_location(Bucket="data")["LocationConstraint"] is None
    assert "Status" not in client.get_bucket_versioning(Bucket="data")
    assert refused(client.head_bucket, Bucket="none")[0] == 404
    assert refused(client.list_objects_v2, Bucket="none") == (404, "NoSuchBucket")
    assert refused(client.get_object, Bucket="data", Key="none") == (404, "NoSuchKey")
    assert refused(client.get_object, Bucket="data", Key="d", VersionId="v1") == (404, "NoSuchVersion")
    assert client.get_bucket_acl(Bucket="data")["Grants"]
    assert refused(client.get_object_torrent, Bucket="data", Key="d") == (501, "NotImplemented")
    assert refused(client.put_object, Bucket="data", Key="x", Body=b"1") == (403, "AccessDenied")
    assert refused(client.delete_object, Bucket="data", Key="d") == (403, "AccessDenied")


def test_names_of_buckets_in_hosts_and_arns(front: RunningFront) -> None:
    """Virtual hosts, the host of an Object Lambda access point, and an ARN in the path lead to the same object."""
    arn = urllib.parse.quote("arn:aws:s3-object-lambda:us-east-1:123456789012:accesspoint/data", safe="")
    ways = [
        ("/data/d/e", "127.0.0.1"),
        ("/d/e", "data.localhost"),
        ("/d/e", f"data.localhost:{front.port}"),
        ("/d/e", "data-123456789012.localhost"),
        (f"/{arn}/d/e", "localhost"),
        (f"http://data.localhost:{front.port}/d/e", "ignored.localhost"),
    ]
    assert [fetch(front, "GET", target, {"Host": host})[2] for target, host in ways] == [b"1"] * len(ways)


def test_only_names_of_this_machine_without_keys(front: RunningFront) -> None:
    """A page whose host name resolves to loopback reads nothing from a gateway without keys."""
    assert fetch(front, "GET", "/data/d", {"Host": "evil.example"})[0] == 403
    assert fetch(front, "POST", "/data?delete", {"Origin": "http://evil.example"})[0] == 403


def test_cors() -> None:
    """Pages of allowed origins may read; the browser's question is answered, and refused for others."""
    bucket = UpstreamBucket("data", MemoryStore({"d": b"1"}))
    ask = {"Origin": "https://app.example", "Access-Control-Request-Method": "GET"}
    with RunningFront(bucket, cors_origins=("https://app.example",)) as front:
        status, headers, _ = fetch(front, "OPTIONS", "/data/d", ask | {"Access-Control-Request-Headers": "range, x-a"})
        assert (status, headers["Access-Control-Allow-Origin"]) == (200, "https://app.example")
        assert headers["Access-Control-Allow-Headers"] == "range, x-a"
        _, headers, _ = fetch(front, "GET", "/data/d", {"Origin": "https://app.example"})
        assert "ETag" in headers["Access-Control-Expose-Headers"]
        _, headers, _ = fetch(front, "GET", "/data/none", {"Origin": "https://app.example"})
        assert headers["Access-Control-Allow-Origin"] == "https://app.example"
        _, headers, _ = fetch(front, "GET", "/data/d", {"Origin": "https://other.example"})
        assert headers["Access-Control-Allow-Origin"] is None
        for bad in (
            ask | {"Origin": "https://other.example"},
            ask | {"Access-Control-Request-Method": "TRACE"},
            ask | {"Access-Control-Request-Headers": "a: b"},
        ):
            assert fetch(front, "OPTIONS", "/data/d", bad)[0] == 403
        assert fetch(front, "OPTIONS", "/data/d")[0] == 400


@pytest.fixture
def guarded() -> Iterator[RunningFront]:
    """A front with keys: one that may write everywhere, and one that may read the bucket ``train``."""
    buckets = [UpstreamBucket(name, MemoryStore({"d": b"1", "e": b"1234567"})) for name in ("train", "other")]
    with RunningFront(*buckets, authenticator=authenticator(), table=FixedBuckets(buckets)) as running:
        yield running


def keyed(front: RunningFront, key: Any) -> Any:
    """A client with a key."""
    return s3_client(front.url, aws_access_key_id=key.access_key, aws_secret_access_key=key.secret_key)


def test_keys_are_verified(guarded: RunningFront) -> None:
    """Signed requests are answered, within the scope of the key; others are refused, and the log names the key only."""
    assert keyed(guarded, KEY).get_object(Bucket="other", Key="d")["Body"].read() == b"1"
    reader = keyed(guarded, READER)
    assert [bucket["Name"] for bucket in reader.list_buckets()["Buckets"]] == ["train"]
    assert reader.get_object(Bucket="train", Key="d")["Body"].read() == b"1"
    assert refused(reader.get_object, Bucket="other", Key="d") == (403, "AccessDenied")
    assert refused(reader.put_object, Bucket="train", Key="x", Body=b"") == (403, "AccessDenied")
    bad = s3_client(guarded.url, aws_access_key_id=KEY.access_key, aws_secret_access_key="wrong")
    assert refused(bad.get_object, Bucket="train", Key="d") == (403, "SignatureDoesNotMatch")
    assert fetch(guarded, "GET", "/train/d")[0] == 403
    assert {record.access_key for record in guarded.records} == {KEY.access_key, READER.access_key, ""}
    assert not [record for record in guarded.records if "X-Amz-" in record.query or KEY.secret_key in repr(record)]


def test_overrides_need_a_signature(guarded: RunningFront, front: RunningFront) -> None:
    """A signed link may set headers of its answer, an unsigned one may not, and no value adds a header line."""
    target = keyed(guarded, READER).generate_presigned_url(
        "get_object",
        Params={
            "Bucket": "train",
            "Key": "e",
            "ResponseContentType": "text/x-own",
            "ResponseContentDisposition": "attachment",
        },
    )
    status, headers, body = fetch(guarded, "GET", target)
    assert body == b"1234567"
    assert (status, headers["Content-Type"], headers["Content-Disposition"]) == (200, "text/x-own", "attachment")
    injected = keyed(guarded, READER).generate_presigned_url(
        "get_object", Params={"Bucket": "train", "Key": "e", "ResponseContentType": "a\r\nSet-Cookie: b"}
    )
    assert fetch(guarded, "GET", injected)[0] == 400
    assert fetch(front, "GET", "/data/d?response-content-type=text/html")[0] == 400
