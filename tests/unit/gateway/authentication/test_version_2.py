"""Presigned URLs of Signature Version 2 are accepted as botocore makes them, and never beyond what their signature covers."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import quote

import pytest
from botocore.auth import HmacV1QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gateway.authentication import AccessKey, AccessKeys, SignatureAuthenticator
from penstock.gateway.objects import RequestHead, S3Error
from signed_requests import HOST, KEY, READER, arrived, changed, signed

KNOWN = AccessKeys([KEY, READER])


def presigned(
    target: str = "/bucket/key",
    *,
    method: str = "GET",
    headers: dict[str, str] | None = None,
    key: AccessKey = KEY,
    token: str | None = None,
    expires_s: int = 600,
    auth_path: str | None = None,
) -> RequestHead:
    """What arrives of a request to a URL that botocore presigned with version 2."""
    request = AWSRequest(method, f"http://{HOST}{target}", headers=dict(headers or {}), auth_path=auth_path)
    HmacV1QueryAuth(Credentials(key.access_key, key.secret_key, token), expires=expires_s).add_auth(request)
    return arrived(request)


def verify(head: RequestHead, **options: Any) -> Any:
    """Who sent a request."""
    return SignatureAuthenticator(KNOWN, accepts_version_2=True, **options).verify(head).caller


def refused(head: RequestHead, **options: Any) -> S3Error:
    """The error with which a request is refused."""
    with pytest.raises(S3Error) as caught:
        verify(head, **options)
    assert KEY.secret_key not in f"{caught.value} {caught.value.details}"
    return caught.value


@settings(max_examples=100, deadline=None)
@given(
    key=st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=20),
    override=st.none() | st.text("abc/;=\" +&%ü", min_size=1, max_size=12),
)  # fmt: skip
def test_what_botocore_presigns_is_accepted(key: str, override: str | None) -> None:
    """Any key, with and without a response header."""
    target = f"/bucket/{quote(key, safe='/-_.~')}"
    if override is not None:
        target += f"?response-content-disposition={quote(override, safe='-_.~')}&versionId=null&prefix=unsigned"
    assert verify(presigned(target, key=READER)) == ("READER", False)


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "POST"])
def test_the_method_is_covered(method: str) -> None:
    """A URL is valid for the method that it was made for."""
    head = presigned("/bucket/key?uploadId=1&partNumber=2", method=method)
    assert verify(head) == (KEY.access_key, True)
    other = "PUT" if method == "GET" else "GET"
    assert refused(head._replace(method=other)).code == "SignatureDoesNotMatch"


def test_headers_are_covered_in_the_query_and_beside_it() -> None:
    """botocore moves them into the query; a client may also send them."""
    given = {"Content-Type": "text/plain", "x-amz-meta-a": "b c"}
    head = presigned(method="PUT", headers=given)
    assert "x-amz-meta-a=" in head.raw_query
    assert verify(head).may_write
    assert verify(changed(head, Content_Type="text/plain", x_amz_meta_a="b c")).may_write
    assert refused(changed(head, Content_Type="text/html")).code == "SignatureDoesNotMatch"
    assert refused(changed(head, x_amz_meta_a="c")).code == "SignatureDoesNotMatch"
    assert refused(changed(head, x_amz_acl="public-read")).code == "SignatureDoesNotMatch"


def test_the_bucket_of_a_host_name_is_covered() -> None:
    """The host itself is not signed, so a URL for one bucket must not work for an object of another one."""
    by_host = presigned("/key", auth_path="/bucket/key")._replace(host_bucket="bucket")
    assert verify(by_host) == (KEY.access_key, True)
    assert refused(by_host._replace(host_bucket="other")).code == "SignatureDoesNotMatch"
    assert refused(by_host._replace(host_bucket="")).code == "SignatureDoesNotMatch"
    by_path = presigned("/bucket/key")
    assert refused(by_path._replace(host_bucket="other")).code == "SignatureDoesNotMatch"


def edited(old: str, new: str) -> RequestHead:
    head = presigned("/bucket/key?response-content-type=text/plain")
    assert old in head.raw_query
    return head._replace(raw_query=head.raw_query.replace(old, new))


HOSTILE = {
    "another object": (presigned()._replace(raw_path="/bucket/other"), "SignatureDoesNotMatch"),
    "another response header": (edited("text/plain", "text/html"), "SignatureDoesNotMatch"),
    "another sub-resource": (edited("AWSAccessKeyId", "tagging&AWSAccessKeyId"), "SignatureDoesNotMatch"),
    "a parameter that nobody signs": (edited("AWSAccessKeyId", "attributes&AWSAccessKeyId"), "InvalidArgument"),
    "a longer life": (edited("Expires=", "Expires=1"), "SignatureDoesNotMatch"),
    "no life": (edited("Expires=", "Expired="), "InvalidArgument"),
    "an empty life": (RequestHead("GET", "/b/k", "AWSAccessKeyId=A&Signature=x", {}), "AccessDenied"),
    "a life that is no number": (RequestHead("GET", "/b/k", "AWSAccessKeyId=A&Signature=x&Expires=²", {}), "AccessDenied"),
    "an endless life": (RequestHead("GET", "/b/k", f"AWSAccessKeyId=A&Signature=x&Expires={'9' * 5000}", {}), "AccessDenied"),
    "expired": (presigned(expires_s=-1), "AccessDenied"),
    "a signature twice": (edited("Signature=", "Signature=x&Signature="), "InvalidArgument"),
    "a key twice": (edited("AWSAccessKeyId=", "AWSAccessKeyId=READER&AWSAccessKeyId="), "InvalidArgument"),
    "an unknown key": (edited(KEY.access_key, "SOMEBODY"), "InvalidAccessKeyId"),
    "a session token": (presigned(token="token"), "InvalidToken"),
    "a signature that is not ASCII": (edited("Signature=", "Signature=%ff%C3%BC"), "SignatureDoesNotMatch"),
    "an empty signature": (RequestHead("GET", "/b/k", f"AWSAccessKeyId={KEY.access_key}&Signature=&Expires=9999999999", {}),
                           "SignatureDoesNotMatch"),
    "signed twice": (presigned()._replace(headers=signed().headers), "InvalidArgument"),
    "another method": (presigned()._replace(method="PATCH"), "AccessDenied"),
    "chunks": (changed(presigned(method="PUT"), x_amz_content_sha256="STREAMING-AWS4-HMAC-SHA256-PAYLOAD"), "InvalidRequest"),
}  # fmt: skip


@pytest.mark.parametrize(("head", "code"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_urls_are_refused(head: RequestHead, code: str) -> None:
    """Each has its code, and no message shows a secret."""
    assert refused(head).code == code


def test_a_url_expires_at_its_time() -> None:
    """It is valid until the second that it names."""
    now_s = time.time()
    head = presigned(expires_s=60)
    assert verify(head, clock=lambda: now_s + 58).may_write
    assert refused(head, clock=lambda: now_s + 62).message == "Request has expired"


def test_the_switch_refuses_them() -> None:
    """Without ``accepts_version_2`` the answer tells what to use."""
    with pytest.raises(S3Error, match="s3v4"):
        SignatureAuthenticator(KNOWN).verify(presigned())


def test_version_2_in_headers_stays_refused() -> None:
    """It covers the host and the body as little as the query does, and no client of today needs it."""
    assert refused(changed(signed(), Authorization="AWS AKID:c2lnbmF0dXJl")).code == "InvalidRequest"
