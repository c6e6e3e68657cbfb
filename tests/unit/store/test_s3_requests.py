"""Operations on the wire: addressing, access points, and what some buckets demand of every request."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import pytest

from penstock.config import MIB
from penstock.errors import ConfigError
from penstock.store.s3_endpoint import S3Endpoint
from penstock.store.s3_requests import S3Options, S3Request, build_request
from penstock.types import (
    AbortMultipart,
    ByteRange,
    CompleteMultipart,
    Copy,
    CopyPart,
    CreateMultipart,
    Delete,
    Get,
    Head,
    ListPage,
    Part,
    Put,
    PutPart,
)

SPAN = ByteRange(0, 10)
PARTS = (Part(1, '"e"'),)
READS_OR_WRITES = [Get("k"), Get("k", SPAN), Head("k"), Put("k", b"x"), CreateMultipart("k"), PutPart("k", "u", 1, b"x"),
                   CompleteMultipart("k", "u", PARTS)]  # fmt: skip
COPIES = [Copy("a", "b"), CopyPart("a", SPAN, "b", "u", 1)]
OTHERS = [ListPage("p"), AbortMultipart("k", "u"), Delete(("k",)), Delete(("k", "l"))]
KEY = bytes(range(32))


def endpoint(bucket: str = "bucket", **more: Any) -> S3Endpoint:
    settings: dict[str, Any] = {"prefix": "", "endpoint_url": None, "region": "eu-west-1", "addressing": "auto"}
    return S3Endpoint(bucket=bucket, **(settings | more))


def headers(wire: S3Request) -> dict[str, str]:
    return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in wire.headers)}


@pytest.mark.parametrize("operation", READS_OR_WRITES + COPIES + OTHERS, ids=lambda each: type(each).__name__)
def test_payer_and_owner_go_with_every_request(operation: Any) -> None:
    """Whatever is asked, requester-pays buckets and expected owners are told; without the options, nobody is."""
    told = headers(
        build_request(endpoint(), S3Options(requester_pays=True, expected_bucket_owner="123456789012"), operation)
    )
    assert told["x-amz-request-payer"] == "requester"
    assert told["x-amz-expected-bucket-owner"] == "123456789012"
    plain = headers(build_request(endpoint(), S3Options(), operation))
    assert not {"x-amz-request-payer", "x-amz-expected-bucket-owner"} & set(plain)


@pytest.mark.parametrize("operation", READS_OR_WRITES + COPIES + OTHERS, ids=lambda each: type(each).__name__)
def test_a_customers_key_goes_where_bytes_do(operation: Any) -> None:
    """SSE-C: key and its MD5 with all that reads or writes an object's bytes, twice with copies, with nothing else."""
    told = headers(build_request(endpoint(), S3Options(sse_customer_key=KEY), operation))
    expected = {
        "algorithm": "AES256",
        "key": base64.b64encode(KEY).decode(),
        "key-md5": base64.b64encode(hashlib.md5(KEY).digest()).decode(),
    }
    for infix, wanted in (("", operation not in OTHERS), ("copy-source-", operation in COPIES)):
        name = f"x-amz-{infix}server-side-encryption-customer-"
        found = {header.removeprefix(name): value for header, value in told.items() if header.startswith(name)}
        assert found == (expected if wanted else {})


def test_a_key_of_another_length_is_refused() -> None:
    """SSE-C takes 32 bytes; the key is never shown."""
    with pytest.raises(ConfigError, match="16 bytes"):
        S3Options(sse_customer_key=b"k" * 16)
    assert "kkkk" not in repr(S3Options(sse_customer_key=b"k" * 32))


@pytest.mark.parametrize(
    ("where", "url"),
    [
        (endpoint(), "https://bucket.s3.eu-west-1.amazonaws.com/"),
        (endpoint(region="cn-north-1"), "https://bucket.s3.cn-north-1.amazonaws.com.cn/"),
        (endpoint("dots.in.it"), "https://s3.eu-west-1.amazonaws.com/dots.in.it/"),
        (endpoint(addressing="path"), "https://s3.eu-west-1.amazonaws.com/bucket/"),
        (endpoint(endpoint_url="http://h:9000"), "http://h:9000/bucket/"),
        (endpoint(endpoint_url="http://h:9000/gateway/"), "http://h:9000/gateway/bucket/"),
        (endpoint(endpoint_url="http://h:9000", addressing="virtual"), "http://bucket.h:9000/"),
        (
            endpoint("arn:aws:s3:us-east-2:123456789012:accesspoint/point"),
            "https://point-123456789012.s3-accesspoint.us-east-2.amazonaws.com/",
        ),
    ],
)
def test_where_a_bucket_is_asked(where: S3Endpoint, url: str) -> None:
    """By host name on Amazon, by path elsewhere and where a certificate would not match; access points by their own."""
    assert build_request(where, S3Options(), Get("a b/c")).url == url + "a%20b/c"
    assert build_request(where, S3Options(), ListPage("a b")).url.startswith(f"{url}?list-type=2")


@pytest.mark.parametrize("mark", ["/", ":"])
def test_an_access_point_is_copied_from_by_its_name(mark: str) -> None:
    """Its region is the ARN's, whatever was said, and a copy's source is the ARN, ``/object/`` and the key."""
    point = endpoint(f"arn:aws:s3:us-east-2:123456789012:accesspoint{mark}point", prefix="p/")
    assert point.region == "us-east-2"
    told = headers(build_request(point, S3Options(), Copy("a b", "c", '"e"')))
    assert told["x-amz-copy-source"] == "arn:aws:s3:us-east-2:123456789012:accesspoint/point/object/p/a%20b"
    assert told["x-amz-copy-source-if-match"] == '"e"'


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "https://s3.eu-west-1.amazonaws.com/"),
        ({"endpoint_url": "http://h:1/s3/"}, "http://h:1/s3/"),
        ({"endpoint_url": "http://h:1", "addressing": "virtual"}, "http://h:1/"),
    ],
)
def test_without_a_bucket_it_is_the_service(settings: dict[str, Any], expected: str) -> None:
    """The service's own URL is asked for its buckets, also after a redirect to another region."""
    service = endpoint("", **settings)
    assert (
        build_request(service, S3Options(), ListPage(token="a/b")).url
        == f"{expected}?max-buckets=1000&continuation-token=a%2Fb"
    )
    service.move("us-west-2")
    assert service.base_url == expected.replace("eu-west-1", "us-west-2")


@pytest.mark.parametrize("name", ["a", "UPPER case", "a..b", "x/y", "bucket--use1-az4--x-s3"])
def test_what_is_no_bucket_is_refused(name: str) -> None:
    """Names that no bucket has, and directory buckets, whose sessions are not spoken here."""
    with pytest.raises(ConfigError):
        endpoint(name)


def test_a_known_checksum_of_a_part_is_sent() -> None:
    """The header is the same whether the caller knows the CRC-32C or it is computed, and a wrong one is passed on as it is."""
    from penstock.checksums.crc32c import crc32c

    told = [
        headers(build_request(endpoint(), S3Options(), PutPart("k", "u", 1, b"body", crc)))["x-amz-checksum-crc32c"]
        for crc in (None, crc32c(b"body"), 1)
    ]
    assert told[0] == told[1] == base64.b64encode(crc32c(b"body").to_bytes(4, "big")).decode()
    assert told[2] == base64.b64encode(b"\0\0\0\1").decode()


@pytest.mark.parametrize(
    ("options", "over_tls", "size_bytes", "is_hashed"),
    [
        ({}, False, MIB, True),
        ({}, False, MIB + 1, False),
        ({}, True, MIB + 1, False),
        ({"upload_checksums": False}, False, MIB + 1, True),
        ({"upload_checksums": False}, True, MIB + 1, False),
        ({"sign_payloads": True}, False, MIB + 1, True),
        ({"sign_payloads": True}, True, MIB + 1, True),
    ],
)
def test_what_is_hashed_for_the_signature(
    options: dict[str, bool], over_tls: bool, size_bytes: int, is_hashed: bool
) -> None:
    """A large body is not hashed if TLS or its CRC-32C protects it, unless that is asked for."""
    settings, body = S3Options(**options), bytes(size_bytes)
    wire = build_request(endpoint(), settings, PutPart("k", "u", 1, body))
    told = settings.payload_header(body, wire.headers, over_tls=over_tls)
    assert told == f"x-amz-content-sha256: {hashlib.sha256(body).hexdigest() if is_hashed else 'UNSIGNED-PAYLOAD'}"


def test_a_large_body_without_a_checksum_is_hashed() -> None:
    """The list of an upload's parts has no CRC-32C, so its hash is signed over plain HTTP, however long it is."""
    parts = tuple(Part(number, '"0123456789abcdef0123456789abcdef"') for number in range(1, 10_001)) * 2
    wire = build_request(endpoint(), S3Options(), CompleteMultipart("k", "u", parts))
    assert wire.body is not None
    assert len(wire.body) > MIB
    assert "UNSIGNED" not in S3Options().payload_header(wire.body, wire.headers, over_tls=False)


def test_the_checksum_of_the_parts_is_that_of_the_whole() -> None:
    """Parts of any lengths, empty ones too, give the CRC-32C of all bytes."""
    from penstock.checksums.algorithms import PartsCrc
    from penstock.checksums.crc32c import crc32c

    data = bytes(range(256)) * 40
    for cuts in ((0,), (1,), (5000,), (1, 1, 700, 9000)):
        crc, start = PartsCrc(), 0
        for end in (*cuts, len(data)):
            assert crc.add(data[start:end]) == crc32c(data[start:end])
            start = end
        assert crc.digest() == crc32c(data).to_bytes(4, "big")
