"""Which bucket and key a request names."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.http.addressing import (
    Address,
    Target,
    decoded,
    find_address,
    parse_query,
    public_query,
    split_target,
    take_headers,
)
from penstock.gateway.objects import S3Error

DOMAINS = ("gateway.example", "localhost")
LAMBDA_ARN = "arn:aws:s3-object-lambda:us-east-1:123456789012:accesspoint"


@pytest.mark.parametrize(
    ("path", "host", "address"),
    [
        ("/", "127.0.0.1:9000", Address("", "")),
        ("/bucket", "127.0.0.1:9000", Address("bucket", "")),
        ("/bucket/", "127.0.0.1:9000", Address("bucket", "")),
        ("/bucket//a", "h", Address("bucket", "/a")),
        ("/bucket/a/../b", "h", Address("bucket", "a/../b")),
        ("/bucket/..", "h", Address("bucket", "..")),
        ("/bucket/a%2Fb+c%20d", "h", Address("bucket", "a/b+c d")),
        ("/bucket%2Fkey", "h", Address("bucket", "key")),
        ("/bucket/%C3%A9%25", "h", Address("bucket", "é%")),
        ("/a/b", "Bucket.localhost:9000", Address("bucket", "a/b", is_host_bucket=True)),
        ("/", "my.bucket.gateway.example", Address("my.bucket", "", is_host_bucket=True)),
        ("/b/k", "gateway.example:80", Address("b", "k")),
        ("/b/k", "gateway.example.", Address("b", "k")),
        ("/b/k", "notgateway.example", Address("b", "k")),
        ("/b/k", "[::1]:9000", Address("b", "k")),
        ("/b/k", "[::1]", Address("b", "k")),
        ("/b/k", "", Address("b", "k")),
        ("/k/x", "train-123456789012.localhost", Address("train-123456789012", "k/x", "train", is_host_bucket=True)),
        (f"/{LAMBDA_ARN}/train/k/x", "h", Address("train", "k/x")),
        (f"/{LAMBDA_ARN.replace(':', '%3A')}%2Ftrain/k", "h", Address("train", "k")),
        (f"/{LAMBDA_ARN}/train", "h", Address("train", "")),
        (f"/{LAMBDA_ARN}:train/k", "h", Address("train", "k")),
        ("/arn:other/k", "h", Address("arn:other", "k")),
    ],
)
def test_bucket_and_key_are_found(path: str, host: str, address: Address) -> None:
    """Paths, host names, ARNs and the host names of Object Lambda name a bucket; dots and slashes in keys stay."""
    assert find_address(path, host, DOMAINS) == address


@pytest.mark.parametrize(
    "path",
    ["/b/%", "/b/%2", "/b/%zz", "/b/%00", "/b/a%00b", "/b/%ff", "/b/%C3", "/b/\udcff", "/b/%u0041"],
)
def test_bad_encoding_is_refused(path: str) -> None:
    """Broken percent-encoding, bytes that are not UTF-8, and NUL are an InvalidURI."""
    with pytest.raises(S3Error) as caught:
        find_address(path, "h", DOMAINS)
    assert (caught.value.code, caught.value.status) == ("InvalidURI", 400)


@pytest.mark.parametrize(("length", "fits"), [(1024, True), (1025, False)])
def test_keys_have_a_bound(length: int, fits: bool) -> None:
    """A key has at most 1 024 bytes of UTF-8."""
    path = "/b/" + "%C3%A9" * (length // 2) + "x" * (length % 2)
    if fits:
        assert len(find_address(path, "h", DOMAINS).key.encode()) == length
        return
    with pytest.raises(S3Error) as caught:
        find_address(path, "h", DOMAINS)
    assert caught.value.code == "KeyTooLongError"


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ("/a?b=c?d", Target("/a", "b=c?d", "")),
        ("/", Target("/", "", "")),
        ("http://host:1/a?b", Target("/a", "b", "host:1")),
        ("HTTPS://host", Target("/", "", "host")),
        ("http://host?q", Target("/", "q", "host")),
        ("//a/b", Target("//a/b", "", "")),
    ],
)
def test_targets_are_taken_apart(target: str, parts: Target) -> None:
    """The target of a request line is a path or an absolute URL."""
    assert split_target(target) == parts


@pytest.mark.parametrize("target", ["*", "", "a/b", "ftp://h/a", "http://", "http:///a", "http://user@h/a", "host:80"])
def test_other_targets_are_refused(target: str) -> None:
    """Anything else is an InvalidURI."""
    with pytest.raises(S3Error) as caught:
        split_target(target)
    assert caught.value.code == "InvalidURI"


def test_queries_lose_their_signature() -> None:
    """Parameters that sign a URL reach neither buckets nor logs, whatever their case; pluses are spaces."""
    raw = "prefix=a+b%2B&X-Amz-Signature=s&x-amz-credential=c&uploads&X-Amz-Expires=1&AWSAccessKeyId=k&Signature=x&=&"
    assert parse_query(raw) == {"prefix": "a b+", "uploads": "", "": ""}
    assert public_query(raw) == "prefix=a+b%2B&uploads&=&"
    assert (parse_query(""), public_query("")) == ({}, "")


@pytest.mark.parametrize(
    ("raw", "code"),
    [("a=1&a=2", "InvalidArgument"), ("a=%", "InvalidURI"), ("&".join(map(str, range(300))), "InvalidRequest")],
)
def test_bad_queries_are_refused(raw: str, code: str) -> None:
    """A parameter is sent once, and there are at most 256."""
    with pytest.raises(S3Error) as caught:
        parse_query(raw)
    assert caught.value.code == code


@given(st.text())
def test_any_text_is_decoded_or_refused(text: str) -> None:
    """No text makes the decoder fail in another way than a refusal."""
    for parse in (lambda: decoded(text, "path"), lambda: split_target(text), lambda: parse_query(text)):
        with contextlib.suppress(S3Error):
            parse()


def test_headers_in_a_query_are_taken_out_of_it() -> None:
    """Those that describe an object; others stay parameters."""
    query = {"X-Amz-Meta-A": "1", "content-type": "text/plain", "x-amz-checksum-crc32": "AAAAAA==", "x-id": "PutObject"}
    assert take_headers(query) == {"X-Amz-Meta-A": "1", "content-type": "text/plain"}
    assert query == {"x-amz-checksum-crc32": "AAAAAA==", "x-id": "PutObject"}


@pytest.mark.parametrize(("name", "value"), [("x-amz-meta-a\r\nb", "c"), ("x-amz-meta-a", "b\r\nc: d"), ("x-amz-meta-a b", "c"),
                                             ("x-amz-meta-é", "c"), ("content-type", "a\0")])  # fmt: skip
def test_what_could_not_be_a_header_is_refused(name: str, value: str) -> None:
    """Nobody makes an answer of two by a line break in a parameter."""
    with pytest.raises(S3Error, match="InvalidArgument"):
        take_headers({name: value})
