"""Signatures equal botocore's, which every S3 accepts, for every shape of request that penstock sends."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import quote

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.transport import Signing

HOST = "127.0.0.1:9000"


def signed_by_botocore(method: str, target: str, headers: list[str], token: str | None, region: str) -> dict[str, str]:
    """The headers that botocore would send along, by lower-case name."""
    unsigned = any("UNSIGNED" in line for line in headers)
    request = AWSRequest(method, f"{'https' if unsigned else 'http'}://{HOST}{target}")
    for line in headers:
        name, _, value = line.partition(":")
        request.headers[name] = value.strip()
    request.context["client_config"] = Config(s3={"payload_signing_enabled": not unsigned})
    S3SigV4Auth(Credentials("AKID", "secret/key", token), "s3", region).add_auth(request)
    return {name.lower(): value for name, value in request.headers.items()}


def compare(method: str, target: str, headers: list[str], token: str | None = None, region: str = "us-east-1") -> None:
    signing = Signing("AKID", "secret/key", token, region)
    for _ in range(5):  # the two look at the clock one after the other
        ours = dict(line.split(": ", 1) for line in signing.sign(method, HOST, target, headers))
        theirs = signed_by_botocore(method, target, headers, token, region)
        if ours["x-amz-date"] == theirs["x-amz-date"]:
            break
    assert ours["Authorization"] == theirs["authorization"]
    assert ours.get("x-amz-security-token") == theirs.get("x-amz-security-token")


PAYLOAD = "x-amz-content-sha256: e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.mark.parametrize("token", [None, "session//token=="])
@pytest.mark.parametrize(
    ("method", "target", "headers"),
    [
        ("GET", "/bucket/key", []),
        ("GET", "/bucket/key", ["x-amz-checksum-mode: ENABLED"]),
        ("GET", "/bucket/a%20b/%C3%BC~-._", ["x-amz-checksum-mode: ENABLED", "x-amz-request-payer: requester"]),
        ("HEAD", "/bucket/key", ["x-amz-checksum-mode: ENABLED"]),
        ("GET", "/bucket/?list-type=2&encoding-type=url&max-keys=1000&prefix=a%2Fb&delimiter=%2F", []),
        ("GET", "/bucket/?list-type=2&continuation-token=1%2B%2F%3D&prefix=", []),
        ("PUT", "/bucket/key", [PAYLOAD, "x-amz-checksum-crc32: AAAAAA=="]),
        ("PUT", "/bucket/key", ["x-amz-content-sha256: UNSIGNED-PAYLOAD", "Content-Type: text/plain"]),
        ("POST", "/bucket/key?uploads=", [PAYLOAD, "x-amz-checksum-type: FULL_OBJECT"]),
        ("PUT", "/bucket/key?partNumber=2&uploadId=a%2Fb", [PAYLOAD]),
        (
            "POST",
            "/bucket/?delete=",
            [PAYLOAD, "Content-Type: application/xml", "Content-MD5: 1B2M2Y8AsgTpgAmY7PhCfg=="],
        ),
        ("DELETE", "/bucket/key?uploadId=x", []),
        ("GET", "/prefix/of/gateway/bucket/key//double/", ["x-amz-expected-bucket-owner: 123456789012"]),
        ("GET", "/bucket/key", ["x-amz-server-side-encryption-customer-key:   spaced   out  "]),
    ],
)
def test_every_shape_is_signed_as_botocore_does(
    method: str, target: str, headers: list[str], token: str | None
) -> None:
    """Authorization, date and token are what botocore makes of the same request in the same second."""
    compare(method, target, headers, token)


@settings(max_examples=60, deadline=None)
@given(
    key=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=40),
    region=st.sampled_from(["eu-west-1", "x"]),
)
def test_any_key_is_signed_as_botocore_does(key: str, region: str) -> None:
    """Percent-encoded keys of any characters are signed as they are sent."""
    compare("GET", "/b/" + quote(key, safe="/~-._"), ["x-amz-checksum-mode: ENABLED"], region=region)


def test_a_range_and_if_match_stay_unsigned() -> None:
    """Headers that S3 lets pass unsigned do not change the signature: one entry serves all ranges of a second."""
    signing = Signing("AKID", "secret", None, "r")
    for _ in range(5):
        first = signing.sign("GET", HOST, "/b/k", ["x-amz-checksum-mode: ENABLED", "Range: bytes=0-1"])
        second = signing.sign("GET", HOST, "/b/k", ["x-amz-checksum-mode: ENABLED", 'If-Match: "e"'])
        if first[0] == second[0]:
            break
    assert first == second


def test_the_stores_clock_counts(monkeypatch: Any) -> None:
    """An offset of the store's clock moves the date, and at midnight the key."""
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.0)
    here = Signing("AKID", "secret", None, "r").sign("GET", HOST, "/b/k", [])
    there = Signing("AKID", "secret", None, "r", clock_offset_s=86_400.0).sign("GET", HOST, "/b/k", [])
    assert here[0] == "x-amz-date: 20231114T221320Z"
    assert there[0] == "x-amz-date: 20231115T221320Z"
    assert "/20231115/r/s3/aws4_request" in there[-1]


def test_the_secret_is_never_shown() -> None:
    """``repr`` and the lines tell neither secret nor, in ``repr``, the token."""
    signing = Signing("AKID", "topsecret", "token", "r")
    assert "topsecret" not in repr(signing) + "".join(signing.sign("GET", HOST, "/", []))
    assert "token" not in repr(signing)
