"""Heads of answers: forwarded headers, statuses, errors."""

from __future__ import annotations

import base64
import hashlib
import zlib

import botocore.session
import pytest

from penstock.checksums.crc32c import crc32c
from penstock.gateway.aws_lambda.forwarded import CHECKSUMS, DROPPED, KEPT, PREFIX, forwarded_head, webhook_head
from penstock.gateway.aws_lambda.responses import body_check
from penstock.gateway.objects import S3Error


def test_every_header_of_the_model_is_known() -> None:
    """Each header that botocore's model can send is either kept, dropped on purpose, or has a meaning of its own."""
    model = botocore.session.Session().get_service_model("s3").operation_model("WriteGetObjectResponse")
    names = {
        member.serialization["name"].lower()
        for member in model.input_shape.members.values()
        if member.serialization.get("location") == "header"
    }
    forwarded = {name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)}
    checksums = {name.removeprefix("x-amz-checksum-") for name in forwarded if name.startswith("x-amz-checksum-")}
    assert checksums <= CHECKSUMS
    rest = {name for name in forwarded if not name.startswith("x-amz-checksum-")}
    assert rest <= {name.lower() for name in KEPT} | DROPPED


def test_headers_of_a_success() -> None:
    """Forwarded headers lose their prefix and keep their case, metadata stays, and the gateway's own are dropped."""
    head = forwarded_head(
        {
            "Host": "x",
            "Content-Length": "12",
            "X-Amz-Fwd-Header-content-type": "a/b",
            "x-amz-fwd-header-ETag": '"1"',
            "x-amz-fwd-header-Content-Disposition": "my%20%20file.txt",
            "x-amz-fwd-header-x-amz-checksum-sha1": "abc=",
            "X-Amz-Meta-Name": "v",
        }
    )
    assert head.headers == {
        "Content-Type": "a/b",
        "Content-Disposition": "my%20%20file.txt",
        "x-amz-checksum-sha1": "abc=",
        "x-amz-meta-name": "v",
    }
    assert (head.status, head.size_bytes, head.checksum, head.is_error) == (200, 12, ("sha1", "abc="), False)


def test_errors() -> None:
    """Code and message come from the headers, else from the document in the body, else from the status."""
    sent = {"x-amz-fwd-status": "404", "x-amz-fwd-error-code": "NotHere", "x-amz-fwd-error-message": "m"}
    error = forwarded_head(sent).error("NoSuchKey", "other")
    assert (error.code, error.message, error.status) == ("NotHere", "m", 404)
    plain = forwarded_head({"x-amz-fwd-status": "416"})
    assert (plain.error("Odd", "m").code, plain.error().code, plain.error("a b").code) == (
        "Odd",
        "InvalidRange",
        "InvalidRange",
    )


WRONG = {
    "status": {"x-amz-fwd-status": "201"},
    "status_text": {"x-amz-fwd-status": "OK"},
    "signed_status": {"x-amz-fwd-status": "+200"},
    "code_with_success": {"x-amz-fwd-error-code": "NoSuchKey"},
    "message_with_not_modified": {"x-amz-fwd-status": "304", "x-amz-fwd-error-message": "m"},
    "code_in_small_letters": {"x-amz-fwd-status": "404", "x-amz-fwd-error-code": "noSuchKey"},
    "code_with_digits": {"x-amz-fwd-status": "404", "x-amz-fwd-error-code": "Error404"},
    "code_of_one_letter": {"x-amz-fwd-status": "404", "x-amz-fwd-error-code": "E"},
    "two_checksums": {f"{PREFIX}x-amz-checksum-sha1": "a", f"{PREFIX}x-amz-checksum-crc32": "b"},
    "unknown_checksum": {f"{PREFIX}x-amz-checksum-adler": "a"},
    "unknown_header": {f"{PREFIX}Set-Cookie": "a"},
    "framing": {f"{PREFIX}Transfer-Encoding": "chunked"},
    "length": {"Content-Length": "1e3"},
}


@pytest.mark.parametrize("name", WRONG)
def test_heads_that_break_the_model(name: str) -> None:
    """They are refused before the token is used up."""
    with pytest.raises(S3Error, match="ValidationError"):
        forwarded_head(WRONG[name])


BODY = b"some bytes" * 100
VALUES = {
    "crc32": zlib.crc32(BODY).to_bytes(4, "big"),
    "crc32c": crc32c(BODY).to_bytes(4, "big"),
    "sha1": hashlib.sha1(BODY).digest(),
    "sha256": hashlib.sha256(BODY).digest(),
    "sha512": hashlib.sha512(BODY).digest(),
    "md5": hashlib.md5(BODY).digest(),
}


@pytest.mark.parametrize("name", VALUES)
def test_checksums_are_compared(name: str) -> None:
    """A checksum that matches is accepted, and any other body is refused."""
    for tail, matches in ((b"", True), (b"x", False)):
        check = body_check(name, base64.b64encode(VALUES[name]).decode())
        assert check is not None
        check.hasher.update(BODY[:7])
        check.hasher.update(memoryview(BODY)[7:])
        check.hasher.update(tail)
        if matches:
            check.compare()
        else:
            with pytest.raises(S3Error, match="BadDigest"):
                check.compare()


def test_checksums_that_cannot_be_computed() -> None:
    """They are recognized, so that a result does not promise them."""
    assert body_check("xxhash3", "abc") is None


def test_headers_are_forwarded_by_their_prefix() -> None:
    """Any header that describes the result is forwarded; others of the response are not."""
    head = webhook_head({"x-amz-fwd-header-Content-Language": "de", "X-Amz-Meta-A": "b", "Age": "1"}, status=200)
    assert head.headers == {"Content-Language": "de", "x-amz-meta-a": "b"}


@pytest.mark.parametrize(
    "name",
    [
        *("Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Connection", "TE", "Trailer", "Transfer-Encoding"),
        *("Upgrade", "Content-Length", "Content-Range", "Date", "ETag", "Location", "Server", "Set-Cookie"),
    ],
)
def test_headers_of_the_connection_are_not_forwarded(name: str) -> None:
    """A webhook cannot say how the gateway's own connection to a client goes on, or what the gateway says itself."""
    assert webhook_head({f"x-amz-fwd-header-{name}": "1"}, status=200).headers == {}
