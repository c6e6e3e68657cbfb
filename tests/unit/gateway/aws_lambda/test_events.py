"""What of a request a handler's answer depends on."""

from __future__ import annotations

from typing import Any

from penstock.gateway.aws_lambda.events import arguments_of, required_headers, user_url
from penstock.gateway.config import AccessPoint
from penstock.gateway.objects import Caller, GatewayRequest


def asked(**changes: Any) -> GatewayRequest:
    """A request for one object."""
    fields: dict[str, Any] = {
        "method": "GET", "bucket": "ap", "key": "a b/ä?.tar", "query": {}, "headers": {}, "caller": Caller("AK", False),
        "url": "http://g/", "remote": "", "request_id": "R",
    }  # fmt: skip
    return GatewayRequest(**(fields | changes))


def test_what_clients_add_by_themselves_does_not_matter() -> None:
    """Requests of different clients for the same thing, or for parts of it, share one result."""
    headers = {
        "User-Agent": "x",
        "amz-sdk-invocation-id": "1",
        "Range": "bytes=0-1",
        "X-Amz-Date": "1",
        "If-Match": "1",
    }
    query = {"partNumber": "1", "response-content-type": "a/b", "X-Amz-Signature": "1", "lambdaArn": "arn"}
    assert arguments_of(asked(headers=headers, query=query), None) == arguments_of(asked(), None)


def test_what_handlers_can_see_matters() -> None:
    """Another caller, another query or a header of the application's own make another result."""
    variants = [
        asked(),
        asked(caller=Caller("other", False)),
        asked(query={"width": "1"}),
        asked(query={"width": "2"}),
        asked(headers={"X-Tenant": "1"}),
        asked(headers={"X-Tenant": "2"}),
    ]
    assert len({tuple(sorted(arguments_of(each, None).items())) for each in variants}) == len(variants)


def test_an_access_point_can_say_what_matters() -> None:
    """With `varies_by`, only the query and what it names matter."""
    one = asked(headers={"X-Tenant": "1", "X-Other": "1"})
    other = asked(headers={"x-tenant": "1", "X-Other": "2"}, caller=Caller("other", False))
    assert arguments_of(one, ("X-Tenant",)) == arguments_of(other, ("X-Tenant",))
    assert arguments_of(one, ("X-Tenant", "caller")) != arguments_of(other, ("X-Tenant", "caller"))
    assert arguments_of(one, ()) == {}


def test_secrets_in_headers_are_not_in_the_arguments() -> None:
    """Arguments may be written to disk, so headers are digests."""
    assert "secret" not in str(arguments_of(asked(headers={"X-Token": "secret"}), None))


def test_the_url_is_decoded_and_has_the_key_as_its_path() -> None:
    """``userRequest.url`` has AWS's host, the decoded key, and the parameters that are the handler's business."""
    point = AccessPoint(name="ap", upstream="memory://", account="111122223333")
    url = user_url(asked(query={"a": "b c", "flag": "", "X-Amz-Signature": "1", "partNumber": "1"}), point)
    assert url == "https://ap-111122223333.s3-object-lambda.us-east-1.amazonaws.com/a b/ä?.tar?a=b c&flag"


def test_headers_that_the_source_needs_are_signed() -> None:
    """A customer's key must be sent to the source; a checksum mode need not."""
    sent = {"x-amz-server-side-encryption-customer-key": "k", "x-amz-checksum-mode": "ENABLED", "Host": "g"}
    assert required_headers(asked(headers=sent)) == {"x-amz-server-side-encryption-customer-key": "k"}
