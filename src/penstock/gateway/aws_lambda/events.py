"""The parts of a request that handlers and webhooks see, the events that hold them, and the arguments by which results differ.

`seen_request` leaves out everything that a result does not depend on. Events and arguments are both made of all that it
returns, so two requests share a result only if the handler cannot tell them apart.

Source: the user guide of S3 Object Lambda, "Event context format and usage".
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.gateway.objects import Caller

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.gateway.config import AccessPoint
    from penstock.gateway.objects import GatewayRequest

PROTOCOL_VERSION = "1.00"

REQUIRED_HEADERS = frozenset(
    {
        "x-amz-request-payer",
        "x-amz-expected-bucket-owner",
        "x-amz-server-side-encryption-customer-algorithm",
        "x-amz-server-side-encryption-customer-key",
        "x-amz-server-side-encryption-customer-key-md5",
    }
)
"""Headers that change the source's answer. ``inputS3Url`` signs those that the caller sent, so the handler must send them as
well. No others are signed, because many handlers send no headers of their own."""

GATEWAY_HEADERS = frozenset(
    {"range", "if-match", "if-none-match", "if-modified-since", "if-unmodified-since", "if-range", "x-penstock-length"}
)
"""Headers about the result, which the gateway compares and cuts by itself; a handler would apply them to the source."""

SIGNING_HEADERS = frozenset(
    {"authorization", "x-amz-security-token", "x-amz-date", "x-amz-signature", "x-amz-credential"}
)
CLIENT_HEADERS = frozenset(
    {
        *("accept", "accept-encoding", "accept-language", "cache-control", "connection", "content-length"),
        *("content-md5", "content-type", "cookie", "date", "expect", "host", "keep-alive", "origin", "pragma"),
        *("priority", "referer", "te", "transfer-encoding", "upgrade", "user-agent", "via", "forwarded"),
        *("traceparent", "tracestate", "baggage", "b3", "x-request-id", "x-correlation-id", "x-real-ip"),
        *("x-amzn-trace-id", "x-amz-user-agent", "x-amz-content-sha256", "x-amz-checksum-mode"),
        *("x-amz-te", "x-amz-sdk-checksum-algorithm"),
    }
)
"""Headers that client libraries, browsers and proxies add by themselves. Equal requests differ in them, so handlers do not get
them unless ``varies_by`` names them."""

HIDDEN_HEADERS = SIGNING_HEADERS | GATEWAY_HEADERS
"""Headers that handlers never get."""

CLIENT_PREFIXES = ("amz-sdk-", "sec-", "x-forwarded-", "x-b3-", "x-datadog-")
GATEWAY_PARAMETERS = frozenset({"partnumber", "range", "lambdaarn", "x-penstock-length"})
CALLER = "caller"
"""Stands for the access key in ``varies_by``."""

CONTEXTS = {
    "GetObject": "getObjectContext",
    "HeadObject": "headObjectContext",
    "ListObjects": "listObjectsContext",
    "ListObjectsV2": "listObjectsV2Context",
}


def seen_request(request: GatewayRequest, varies_by: tuple[str, ...] | None) -> GatewayRequest:
    """Return a request without the parameters, headers and caller that its handler or webhook does not get.

    Args:
        request: The client's request.
        varies_by: Names of headers, spelled as the handler gets them, and ``"caller"``, as in ``LambdaConfig``.
    """
    query = {name: value for name, value in request.query.items() if is_for_handler(name)}
    if varies_by is None:
        headers = {name: value for name, value in request.headers.items() if _is_custom(name.lower())}
        return replace(request, query=query, headers=headers)
    names = [name for name in varies_by if name in request.headers and name.lower() not in {CALLER, *HIDDEN_HEADERS}]
    caller = request.caller if CALLER in map(str.lower, varies_by) else Caller("", False)
    return replace(request, query=query, headers={name: request.headers[name] for name in names}, caller=caller)


def event_of(
    request: GatewayRequest,
    access_point: AccessPoint,
    *,
    operation: str,
    context: Mapping[str, str],
) -> dict[str, object]:
    """Return the event for one request.

    Args:
        request: The client's request.
        access_point: The access point that it addresses, with a handler.
        operation: ``GetObject``, ``HeadObject``, ``ListObjects`` or ``ListObjectsV2``.
        context: ``inputS3Url``, and for ``GetObject`` also ``outputRoute`` and ``outputToken``.
    """
    place = f"{access_point.region}:{access_point.account}:accesspoint/{access_point.name}"
    assert access_point.handler is not None, "the caller has checked it"
    request = seen_request(request, access_point.handler.varies_by)
    return {
        "xAmzRequestId": request.request_id,
        CONTEXTS[operation]: dict(context),
        "configuration": {
            "accessPointArn": f"arn:aws:s3-object-lambda:{place}",
            "supportingAccessPointArn": f"arn:aws:s3:{place}",
            "payload": access_point.handler.payload,
        },
        "userRequest": {
            "url": user_url(request, access_point),
            "headers": {"Host": _host(access_point), **request.headers},
        },
        "userIdentity": {
            "type": "IAMUser",
            "principalId": request.caller.access_key,
            "arn": f"arn:aws:iam::{access_point.account}:user/{request.caller.access_key}",
            "accountId": access_point.account,
            "accessKeyId": request.caller.access_key,
            "userName": request.caller.access_key,
        },
        "protocolVersion": PROTOCOL_VERSION,
    }


def user_url(request: GatewayRequest, access_point: AccessPoint) -> str:
    """Return ``userRequest.url``: decoded, at the access point's host name on AWS; handlers take the key from its path.

    Parameters are in the order of their names.
    """
    query = "&".join(f"{name}={value}" if value else name for name, value in sorted(request.query.items()))
    return f"https://{_host(access_point)}/{request.key}" + (f"?{query}" if query else "")


def _host(access_point: AccessPoint) -> str:
    return f"{access_point.name}-{access_point.account}.s3-object-lambda.{access_point.region}.amazonaws.com"


def is_for_handler(parameter: str) -> bool:
    """Whether the handler gets a parameter of the query. It does not get signatures, part numbers and response headers."""
    lower = parameter.lower()
    return lower not in GATEWAY_PARAMETERS and not lower.startswith(("x-amz-", "response-"))


def required_headers(request: GatewayRequest) -> dict[str, str]:
    """Return the headers of a request that ``inputS3Url`` signs."""
    return {name: value for name, value in request.headers.items() if name.lower() in REQUIRED_HEADERS}


def arguments_of(request: GatewayRequest, varies_by: tuple[str, ...] | None, *, epoch: str = "") -> dict[str, str]:
    """Return the arguments by which results of one source differ. Values of headers may be secret, so they are digests.

    Args:
        request: The client's request.
        varies_by: Names of headers, and ``"caller"``, as in ``LambdaConfig``.
        epoch: Value of ``x-penstock-epoch`` if the query does not have it; empty for none.
    """
    seen = seen_request(request, varies_by)
    arguments = {f"query:{name}": value for name, value in seen.query.items()}
    if seen.caller.access_key:
        arguments[CALLER] = seen.caller.access_key
    for name, value in seen.headers.items():
        arguments[f"header:{name}"] = hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()
    if epoch:
        arguments.setdefault("query:x-penstock-epoch", epoch)
    return arguments


def _is_custom(lower: str) -> bool:
    return not (lower in CLIENT_HEADERS or lower in HIDDEN_HEADERS or lower.startswith(CLIENT_PREFIXES))
