"""URLs that read one object for a limited time equal botocore's, which every S3 accepts."""

from __future__ import annotations

import calendar
import time
from typing import Any
from urllib.parse import quote

import pytest
from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as BotoCredentials
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.compose import split
from penstock.errors import ConfigError
from penstock.store.s3 import presigned_get
from penstock.transport import Signing

KEYS = ps.Credentials(access_key="AKID", secret_key="secret/key", session_token=None)
LAMBDA_ARN = "arn:aws:s3-object-lambda:eu-west-1:123456789012:accesspoint/resized"


def theirs(url: str, token: str | None, region: str, service: str, expires_s: int, headers: dict[str, str]) -> str:
    """What botocore makes of `url`, at a moment that ours is given."""
    request = AWSRequest("GET", url, headers=headers)
    signer = S3SigV4QueryAuth(BotoCredentials("AKID", "secret/key", token), service, region, expires=expires_s)
    signer.add_auth(request)
    return str(request.url)


def stamp_s(url: str) -> float:
    """When a URL was signed, in seconds since 1970."""
    text = url.split("X-Amz-Date=")[1][:16]
    return calendar.timegm(time.strptime(text, "%Y%m%dT%H%M%SZ"))


def parts_of(url: str) -> tuple[str, set[str]]:
    """Path and parameters of a URL; their order may differ."""
    path, _, query = url.partition("?")
    return path, set(query.split("&"))


@pytest.mark.parametrize("token", [None, "session//token=="])
@pytest.mark.parametrize("service", ["s3", "s3-object-lambda"])
def test_a_url_equals_that_of_botocore(token: str | None, service: str) -> None:
    """Scope, order, token and signature are botocore's."""
    url = "https://bucket.s3.eu-west-1.amazonaws.com/a%20b/%C3%BC~-._"
    expected = theirs(url, token, "eu-west-1", service, 600, {})
    signing = Signing("AKID", "secret/key", token, "eu-west-1", service=service)
    ours = signing.presigned("GET", url, now_s=stamp_s(expected), expires_s=600)
    assert parts_of(ours) == parts_of(expected)


@settings(max_examples=50, deadline=None)
@given(
    query=st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name.isprintable()), st.text(max_size=12)
    ),
    values=st.dictionaries(
        st.sampled_from(["x-amz-checksum-mode", "x-amz-request-payer", "Range"]),
        st.text("abc =/", min_size=1).map(str.strip).filter(bool),
    ),
)
def test_any_query_and_headers_are_signed_as_by_botocore(query: dict[str, str], values: dict[str, str]) -> None:
    """Parameters with any characters and signed headers give botocore's signature."""
    encoded = "&".join(
        f"{quote(name.encode('utf-8', 'replace'), safe='-_.~')}={quote(value.encode('utf-8', 'replace'), safe='-_.~')}"
        for name, value in query.items()
    )
    plain = "http://127.0.0.1:9000/bucket/key"
    ranged = {name: value for name, value in values.items() if name == "Range"}
    expected = theirs(f"{plain}?{encoded}" if encoded else plain, None, "us-east-1", "s3", 60, ranged)
    ours = Signing("AKID", "secret/key", None, "us-east-1").presigned(
        "GET",
        plain,
        now_s=stamp_s(expected),
        expires_s=60,
        query={
            name.encode("utf-8", "replace").decode(): value.encode("utf-8", "replace").decode()
            for name, value in query.items()
        },
        headers=ranged,
    )
    assert parts_of(ours) == parts_of(expected)


@pytest.mark.parametrize(
    ("url", "options", "start"),
    [
        (
            "s3://bucket/pre/fix/",
            {"endpoint_url": "http://127.0.0.1:9000"},
            "http://127.0.0.1:9000/bucket/pre/fix/a%20b.tar?",
        ),
        ("s3://bucket", {}, "https://bucket.s3.eu-west-1.amazonaws.com/a%20b.tar?"),
        (
            "s3://bucket",
            {"endpoint_url": "https://gw.example", "addressing": "virtual"},
            "https://bucket.gw.example/a%20b.tar?",
        ),
        (
            f"s3://{LAMBDA_ARN}",
            {"endpoint_url": "https://gw.example"},
            "https://resized-123456789012.gw.example/a%20b.tar?",
        ),
    ],
    ids=["path", "amazon", "virtual", "object-lambda"],
)
def test_a_store_signs_for_its_own_place(url: str, options: dict[str, Any], start: str) -> None:
    """Addressing, prefix and service of the store are those of the URL, and ``split`` takes it apart again."""
    with ps.connect(url, region="eu-west-1", credentials=KEYS, **options) as store:
        signed = presigned_get(store, "a b.tar", expires_s=60)
    assert signed.startswith(start)
    assert ("%2Fs3-object-lambda%2F" in signed) == ("object-lambda" in url)
    root, key = split(signed)
    assert root + key == signed


def test_what_the_bucket_demands_is_in_the_url() -> None:
    """Requester pays and the expected owner are parameters of the URL, because S3 takes them there."""
    with ps.connect(
        "s3://bucket", credentials=KEYS, requester_pays=True, expected_bucket_owner="123456789012"
    ) as store:
        signed = presigned_get(store, "k")
    assert "x-amz-request-payer=requester" in signed
    assert "x-amz-expected-bucket-owner=123456789012" in signed


@pytest.mark.parametrize("expires_s", [0, -1, 604_801])
def test_a_life_out_of_bounds_is_refused(expires_s: int) -> None:
    """S3 takes 1 second to 7 days."""
    with ps.connect("s3://bucket", credentials=KEYS) as store, pytest.raises(ConfigError, match="604800"):
        presigned_get(store, "k", expires_s=expires_s)


def test_what_no_url_can_read_is_refused() -> None:
    """Objects under a customer's key, other stores and keys with dot segments give a clear error."""
    with ps.connect("s3://bucket", credentials=KEYS, sse_customer_key=b"k" * 32) as store:
        with pytest.raises(ConfigError, match="SSE-C"):
            presigned_get(store, "k")
    with ps.connect("memory://presigning") as store, pytest.raises(ConfigError, match="MemoryStore has no presigned"):
        presigned_get(store, "k")
    with ps.connect("s3://bucket", credentials=KEYS) as store, pytest.raises(ConfigError, match="segment"):
        presigned_get(store, "a/../b")


def test_an_anonymous_store_gives_a_plain_url() -> None:
    """Without keys there is nothing to sign, and the URL reads what is public."""
    with ps.connect("s3://bucket", endpoint_url="http://127.0.0.1:9000", anonymous=True) as store:
        assert presigned_get(store, "a b") == "http://127.0.0.1:9000/bucket/a%20b"
