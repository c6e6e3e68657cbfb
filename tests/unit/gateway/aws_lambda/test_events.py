"""What of a request a handler's answer depends on."""

from __future__ import annotations

from typing import Any

import pytest
from multidict import CIMultiDict

from penstock.gateway.aws_lambda.events import arguments_of, event_of, required_headers, seen_request, user_url
from penstock.gateway.config import AccessPoint, LambdaConfig
from penstock.gateway.objects import Caller, GatewayRequest
from penstock.gateway.webhooks.transform import webhook_event


def asked(**changes: Any) -> GatewayRequest:
    """A request for one object."""
    fields: dict[str, Any] = {
        "method": "GET", "bucket": "ap", "key": "a b/ä?.tar", "query": {}, "headers": {}, "caller": Caller("AK", False),
        "url": "http://g/", "remote": "", "request_id": "R",
    }  # fmt: skip
    fields |= changes
    return GatewayRequest(**fields | {"headers": CIMultiDict(fields["headers"])})


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


SEEN = ["Cookie", "Accept-Language", "X-Forwarded-For", "Referer", "Origin", "User-Agent", "Host", "Accept", "X-Real-IP",
        "Sec-Fetch-User", "X-Tenant", "x-tenant", "X-Amz-Request-Payer", "Cache-Control", "traceparent"]  # fmt: skip


def shown(request: GatewayRequest, varies_by: tuple[str, ...] | None) -> tuple[Any, ...]:
    """All that a handler and a webhook see of a request."""
    handler = LambdaConfig(handler="app:handler", varies_by=varies_by)
    point, seen = AccessPoint(name="ap", upstream="memory://", handler=handler), seen_request(request, varies_by)

    class Source:
        def signed_url(self, headers: Any) -> str:
            return str(sorted(headers.items()))

    hook: Any = webhook_event(Source(), seen)  # type: ignore[arg-type]
    return event_of(request, point, operation="GetObject", context={}), hook["userIdentity"], hook["userRequest"]


@pytest.mark.parametrize("varies_by", [None, (), ("caller",), ("cookie", "X-Tenant", "host"), ("User-Agent", "caller")])
def test_requests_that_share_a_result_look_alike(varies_by: tuple[str, ...] | None) -> None:
    """Whatever a handler or a webhook can see of a request is an argument of its result; what is none, it does not see."""
    plain = asked(headers={"Host": "g"})
    variants = [
        plain,
        asked(headers={"Host": "g"}, caller=Caller("other", False)),
        asked(headers={"Host": "g"}, caller=Caller("", False)),
        *(asked(headers={"Host": "g"}, query=query) for query in ({"w": "1"}, {"w": "2"}, {"w": "1", "v": "2"})),
        *(asked(headers={"Host": "g", name: value}) for name in SEEN for value in ("one", "two")),
    ]
    for one in variants:
        for other in variants:
            is_shared = arguments_of(one, varies_by) == arguments_of(other, varies_by)
            assert is_shared == (shown(one, varies_by) == shown(other, varies_by)), (one, other)


@pytest.mark.parametrize(
    ("varies_by", "headers", "caller"),
    [
        (None, {"X-Tenant": "1"}, "AK"),
        ((), {}, ""),
        (("Cookie", "x-absent"), {"Cookie": "c"}, ""),
        (("x-tenant", "caller", "Range"), {"x-tenant": "1"}, "AK"),
    ],
)
def test_an_access_point_can_say_what_is_passed(
    varies_by: tuple[str, ...] | None, headers: dict[str, str], caller: str
) -> None:
    """With `varies_by`, the handler sees the headers that it names, as it spells them, and the caller only if it says so."""
    sent = {"X-Tenant": "1", "Cookie": "c", "User-Agent": "u", "Range": "bytes=0-1"}
    seen = seen_request(asked(headers=sent), varies_by)
    assert (dict(seen.headers), seen.caller.access_key) == (headers, caller)


def test_secrets_in_headers_are_not_in_the_arguments() -> None:
    """Arguments may be written to disk, so headers are digests."""
    assert "secret" not in str(arguments_of(asked(headers={"X-Token": "secret"}), None))


def test_the_url_is_decoded_and_has_the_key_as_its_path() -> None:
    """``userRequest.url`` has AWS's host, the decoded key, and the parameters that are the handler's business."""
    point = AccessPoint(name="ap", upstream="memory://", account="111122223333")
    query = {"flag": "", "a": "b c", "X-Amz-Signature": "1", "partNumber": "1"}
    url = user_url(seen_request(asked(query=query), None), point)
    assert url == "https://ap-111122223333.s3-object-lambda.us-east-1.amazonaws.com/a b/ä?.tar?a=b c&flag"


def test_headers_that_the_source_needs_are_signed() -> None:
    """A customer's key must be sent to the source; a checksum mode need not."""
    sent = {"x-amz-server-side-encryption-customer-key": "k", "x-amz-checksum-mode": "ENABLED", "Host": "g"}
    assert required_headers(asked(headers=sent)) == {"x-amz-server-side-encryption-customer-key": "k"}
