"""The events that handlers get, in the form of S3 Object Lambda, and the arguments by which results differ.

Source: the user guide of S3 Object Lambda, "Event context format and usage".
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

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
        *(
            "accept",
            "accept-encoding",
            "accept-language",
            "cache-control",
            "connection",
            "content-length",
            "content-md5",
        ),
        *(
            "content-type",
            "cookie",
            "date",
            "expect",
            "host",
            "keep-alive",
            "origin",
            "pragma",
            "priority",
            "referer",
            "te",
        ),
        *(
            "transfer-encoding",
            "upgrade",
            "user-agent",
            "via",
            "forwarded",
            "traceparent",
            "tracestate",
            "baggage",
            "b3",
        ),
        *("x-request-id", "x-correlation-id", "x-real-ip", "x-amzn-trace-id", "x-amz-user-agent"),
        *("x-amz-content-sha256", "x-amz-checksum-mode", "x-amz-te", "x-amz-sdk-checksum-algorithm"),
    }
)
"""Headers that client libraries add by themselves. They are in the event, but equal requests may differ in them."""

CLIENT_PREFIXES = ("amz-sdk-", "sec-", "x-forwarded-", "x-b3-", "x-datadog-")
GATEWAY_PARAMETERS = frozenset({"partnumber", "range", "lambdaarn", "x-penstock-length"})
CONTEXTS = {
    "GetObject": "getObjectContext",
    "HeadObject": "headObjectContext",
    "ListObjects": "listObjectsContext",
    "ListObjectsV2": "listObjectsV2Context",
}


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
        access_point: The access point that it addresses.
        operation: ``GetObject``, ``HeadObject``, ``ListObjects`` or ``ListObjectsV2``.
        context: ``inputS3Url``, and for ``GetObject`` also ``outputRoute`` and ``outputToken``.
    """
    place = f"{access_point.region}:{access_point.account}:accesspoint/{access_point.name}"
    payload = access_point.handler.payload if access_point.handler is not None else ""
    return {
        "xAmzRequestId": request.request_id,
        CONTEXTS[operation]: dict(context),
        "configuration": {
            "accessPointArn": f"arn:aws:s3-object-lambda:{place}",
            "supportingAccessPointArn": f"arn:aws:s3:{place}",
            "payload": payload,
        },
        "userRequest": {"url": user_url(request, access_point), "headers": user_headers(request)},
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

    Parameters that sign the request or choose a part of the result are left out.
    """
    host = f"{access_point.name}-{access_point.account}.s3-object-lambda.{access_point.region}.amazonaws.com"
    query = "&".join(f"{name}={value}" if value else name for name, value in user_query(request).items())
    return f"https://{host}/{request.key}" + (f"?{query}" if query else "")


def user_query(request: GatewayRequest) -> dict[str, str]:
    """Return the parameters of the query that the handler gets."""
    return {name: value for name, value in request.query.items() if is_for_handler(name)}


def is_for_handler(parameter: str) -> bool:
    """Whether the handler gets a parameter of the query. It does not get signatures, part numbers and response headers."""
    lower = parameter.lower()
    return lower not in GATEWAY_PARAMETERS and not lower.startswith(("x-amz-", "response-"))


def user_headers(request: GatewayRequest) -> dict[str, str]:
    """Return ``userRequest.headers``, without those that sign the request or that the gateway evaluates itself."""
    hidden = SIGNING_HEADERS | GATEWAY_HEADERS
    return {name: value for name, value in request.headers.items() if name.lower() not in hidden}


def required_headers(request: GatewayRequest) -> dict[str, str]:
    """Return the headers of a request that ``inputS3Url`` signs."""
    return {name: value for name, value in request.headers.items() if name.lower() in REQUIRED_HEADERS}


def arguments_of(request: GatewayRequest, varies_by: tuple[str, ...] | None, *, epoch: str = "") -> dict[str, str]:
    """Return the arguments by which results of one source differ. Values of headers may be secret, so they are digests.

    Args:
        request: The client's request.
        varies_by: Names that the result depends on, as in ``LambdaConfig``. None takes everything by which the handler can tell
            requests apart: an answer for one caller, perhaps with names left out, must not be sent to another.
        epoch: Value of ``x-penstock-epoch`` if the query does not have it; empty for none.
    """
    arguments = {f"query:{name}": value for name, value in user_query(request).items()}
    wanted = None if varies_by is None else {name.lower() for name in varies_by}
    if wanted is None or "caller" in wanted:
        arguments["caller"] = request.caller.access_key
    for name, value in request.headers.items():
        lower = name.lower()
        if lower in wanted if wanted is not None else _is_custom(lower):
            arguments[f"header:{lower}"] = hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()
    if epoch:
        arguments.setdefault("query:x-penstock-epoch", epoch)
    return arguments


def _is_custom(lower: str) -> bool:
    known = CLIENT_HEADERS | SIGNING_HEADERS | GATEWAY_HEADERS
    return lower not in known and not lower.startswith(CLIENT_PREFIXES)
