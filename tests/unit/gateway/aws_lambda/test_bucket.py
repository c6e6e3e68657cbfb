"""What handlers return for HEAD and LIST."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree as ET

import pytest

from penstock.gateway.aws_lambda.bucket import head_of, listing_of
from penstock.gateway.objects import S3Error

HEAD = {
    "statusCode": 200,
    "headers": {
        "Content-Length": 5,
        "Content-Type": "text/plain",
        "ETag": "abc",
        "Last-Modified": "Fri, 02 Jan 2026 03:04:05 GMT",
        "x-amz-meta-A": "b",
        "Accept-Ranges": "bytes",
    },
}
PAGE = {
    "name": "b",
    "maxKeys": 10,
    "isTruncated": True,
    "keyCount": 1,
    "nextContinuationToken": "n",
    "contents": [
        {"key": "a<&>", "size": 3, "eTag": '"1"', "lastModified": "2026-01-02T03:04:05.000Z",
         "owner": {"displayName": "me", "id": "1"}, "storageClass": "STANDARD"},
    ],
    "commonPrefixes": [{"prefix": "p/"}],
}  # fmt: skip


def test_a_head() -> None:
    """Size, ETag, time and headers of the object are those that the handler returned."""
    head = head_of(HEAD, "k")
    assert (head.key, head.size_bytes, head.etag, head.last_modified_s) == ("k", 5, '"abc"', 1767323045.0)
    assert head.headers == {"Content-Type": "text/plain", "x-amz-meta-a": "b"}


def test_a_head_without_an_etag_gets_one() -> None:
    """Equal heads have equal ETags, and others have others."""
    one, other = ({"statusCode": 200, "headers": {"Content-Length": size}} for size in (1, 2))
    assert head_of(one, "k").etag == head_of(one, "k").etag != head_of(other, "k").etag


@pytest.mark.parametrize("version", [1, 2])
def test_a_listing_as_json(version: int) -> None:
    """The fields become elements of S3's document."""
    page = dict(PAGE, marker="m", nextMarker="x") if version == 1 else PAGE
    answer = listing_of({"statusCode": 200, "listBucketResult": page}, is_v2=version == 2)
    root = ET.fromstring(answer.body)
    space = "{http://s3.amazonaws.com/doc/2006-03-01/}"
    assert root.tag == f"{space}ListBucketResult"
    assert root.findtext(f"{space}IsTruncated") == "true"
    assert root.findtext(f"{space}Contents/{space}Key") == "a<&>"
    assert root.findtext(f"{space}Contents/{space}Owner/{space}ID") == "1"
    assert root.findtext(f"{space}CommonPrefixes/{space}Prefix") == "p/"
    assert root.findtext(f"{space}NextContinuationToken") == ("n" if version == 2 else None)
    assert root.findtext(f"{space}Marker") == (None if version == 2 else "m")


def test_a_listing_as_xml_is_passed_on() -> None:
    """``listResultXml`` is not looked at."""
    answer = listing_of({"statusCode": 200, "listResultXml": "<Error>ä"}, is_v2=True)
    assert answer.body == "<Error>ä".encode()


def test_errors_are_the_clients() -> None:
    """Status, code and message reach the client; without a code, the status has its usual one."""
    with pytest.raises(S3Error) as caught:
        head_of({"statusCode": 404, "errorCode": "NoSuchThing", "errorMessage": "m"}, "k")
    assert (caught.value.status, caught.value.code, caught.value.message) == (404, "NoSuchThing", "m")
    with pytest.raises(S3Error) as caught:
        listing_of({"statusCode": 403}, is_v2=False)
    assert (caught.value.status, caught.value.code) == (403, "AccessDenied")


def with_header(name: str, value: Any) -> dict[str, Any]:
    """The head with another header."""
    return {"statusCode": 200, "headers": {**HEAD["headers"], name: value}}  # type: ignore[dict-item]


HEADS = {
    "none": None,
    "text": "x",
    "no_status": {"headers": {"Content-Length": 1}},
    "status_as_text": {"statusCode": "200", "headers": {"Content-Length": 1}},
    "true_as_status": {"statusCode": True},
    "strange_status": {"statusCode": 302},
    "strange_code": {"statusCode": 404, "errorCode": "no such\r\nX: y"},
    "no_headers": {"statusCode": 200},
    "length_as_text": with_header("Content-Length", "5"),
    "negative_length": with_header("Content-Length", -1),
    "etag_as_list": with_header("ETag", ["1"]),
    "header_injection": with_header("Content-Type", "a\r\nX: y"),
    "wrong_date": with_header("Last-Modified", "yesterday"),
}


@pytest.mark.parametrize("name", HEADS)
def test_what_is_no_head(name: str) -> None:
    """Anything of another type is the handler's mistake."""
    with pytest.raises(S3Error, match="LambdaInvalidResponse"):
        head_of(HEADS[name], "k")


LISTINGS: dict[str, Any] = {
    "neither": {"statusCode": 200},
    "both": {"statusCode": 200, "listResultXml": "", "listBucketResult": PAGE},
    "xml_as_list": {"statusCode": 200, "listResultXml": ["x"]},
    "page_as_list": {"statusCode": 200, "listBucketResult": []},
    "no_name": {"statusCode": 200, "listBucketResult": {**PAGE, "name": None}},
    "truncated_as_text": {"statusCode": 200, "listBucketResult": {**PAGE, "isTruncated": "true"}},
    "size_as_text": {"statusCode": 200, "listBucketResult": {**PAGE, "contents": [{"key": "a", "size": "1"}]}},
    "no_size": {"statusCode": 200, "listBucketResult": {**PAGE, "contents": [{"key": "a"}]}},
    "contents_as_object": {"statusCode": 200, "listBucketResult": {**PAGE, "contents": {}}},
    "owner_as_text": {
        "statusCode": 200,
        "listBucketResult": {**PAGE, "contents": [{"key": "a", "size": 1, "owner": "me"}]},
    },
}


@pytest.mark.parametrize("name", LISTINGS)
def test_what_is_no_listing(name: str) -> None:
    """Anything of another type is the handler's mistake."""
    with pytest.raises(S3Error, match="LambdaInvalidResponse"):
        listing_of(LISTINGS[name], is_v2=True)
