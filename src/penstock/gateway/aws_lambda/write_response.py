"""``WriteGetObjectResponse``: a handler sends its answer to the gateway, which streams it into the result."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from penstock.errors import PenstockError
from penstock.gateway.aws_lambda.body_checksums import BodyChecksum
from penstock.gateway.aws_lambda.forwarded import CHECKSUM_PREFIX, ForwardedHead, forwarded_head, refuse
from penstock.gateway.objects import RequestHead, S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from penstock.gateway.aws_lambda.endpoint import InternalEndpoint
    from penstock.gateway.aws_lambda.responses import PendingResponse
    from penstock.gateway.objects import RequestBody

PATH = "/WriteGetObjectResponse"
ERROR_BODY_BYTES_MAX = 64 * 1024
LOG = logging.getLogger("penstock.gateway.lambda")

_ROUTE_IN_HOST = re.compile(r"(io-[0-9a-f]+)\.", re.IGNORECASE)


class WriteGetObjectResponse:
    """The operation, as a handler of HTTP requests to ``PATH``.

    Args:
        endpoint: The endpoint that handlers send their answers to.
    """

    def __init__(self, endpoint: InternalEndpoint) -> None:
        self._responses = endpoint.responses
        self._authenticator = endpoint.authenticator

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """Take one answer.

        The request succeeds when the whole body has arrived and is part of the result.
        """
        try:
            pending, head, body = self._checked(request)
            self._responses.take(pending)
            if request.headers.get("Expect", "").lower() == "100-continue":
                await _send_continue(request)
            copying = asyncio.create_task(_copy(head, body, pending))
            pending.begin(copying)
            try:
                await asyncio.wait([copying])
            finally:
                copying.cancel()  # if this request was cancelled
            if copying.cancelled():
                raise S3Error(
                    "ConnectionClosedByRequester", "The client that waited for this answer has left.", status=400
                )
            if not (head.is_error and isinstance(copying.exception(), S3Error)):
                copying.result()
        except S3Error as error:
            return _refusal(error)
        except PenstockError as error:
            return _refusal(S3Error("InternalError", error.what, status=500))
        return web.Response(status=200)

    def _checked(self, request: web.BaseRequest) -> tuple[PendingResponse, ForwardedHead, RequestBody]:
        if request.method != "POST":
            raise S3Error("MethodNotAllowed", f"{PATH} takes only POST.", status=405)
        headers = joined_headers(request.headers)
        url = request.rel_url
        signed = RequestHead(request.method, url.raw_path, url.raw_query_string, headers)
        verified = self._authenticator.verify(signed)
        if "/s3-object-lambda/aws4_request" not in headers.get("Authorization", ""):
            raise S3Error("InvalidSignature", "The signature must name the service s3-object-lambda.", status=400)
        route, token = headers.get("x-amz-request-route", ""), headers.get("x-amz-request-token", "")
        if not route or not token:
            refuse("The headers x-amz-request-route and x-amz-request-token are required.")
        prefix = _ROUTE_IN_HOST.match(request.host)
        if prefix is not None and prefix[1].lower() != route.lower():
            refuse("The host name and the header x-amz-request-route name different routes.")
        head = forwarded_head(headers)
        pending = self._responses.find(route, token)
        is_chunked = "chunked" in headers.get("Transfer-Encoding", "").lower()
        if (head.error_code or head.error_message) and (head.size_bytes or is_chunked):
            refuse("An answer with an error code or message has no body.")
        return pending, head, verified.open_body(_arriving(request))


def joined_headers(headers: CIMultiDictProxy[str]) -> Mapping[str, str]:
    """Return headers in the form of ``RequestHead``: repeated ones are joined with commas, and case does not matter."""
    joined: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        joined[name] = f"{joined[name]},{value}" if name in joined else value
    return joined


async def _send_continue(request: web.BaseRequest) -> None:
    if request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


async def _arriving(request: web.BaseRequest) -> AsyncIterator[bytes]:
    """Iterate over a request's body as it arrives. Raises ``S3Error`` if it is cut off."""
    try:
        async for piece in request.content.iter_any():
            yield piece
    except S3Error:
        raise
    except Exception as error:
        message = "The body of WriteGetObjectResponse ended early."
        raise S3Error("ConnectionClosedByRequester", message, status=400) from error


async def _copy(head: ForwardedHead, body: RequestBody, pending: PendingResponse) -> None:
    """Copy a body into the result, or turn it into the client's error."""
    if head.is_error:
        raise await _client_error(head, body)
    if head.status != 200:
        message = f"The handler answered a request for the whole object with status {head.status}."
        raise S3Error("LambdaInvalidResponse", message, status=400)
    checksum = None
    headers = head.headers
    if head.checksum is not None:
        checksum = BodyChecksum(*head.checksum)
        if not checksum.is_checked:
            headers = {name: value for name, value in headers.items() if not name.startswith(CHECKSUM_PREFIX)}
    size_bytes = body.length_bytes
    pending.output.begin(headers, size_bytes=size_bytes)
    received_bytes = 0
    async for piece in body:
        if checksum is not None:
            checksum.update(piece)
        received_bytes += len(piece)
        await pending.output.write(piece)
    if size_bytes is not None and received_bytes != size_bytes:
        message = f"The body has {received_bytes} bytes instead of {size_bytes}."
        raise S3Error("ConnectionClosedByRequester", message, status=400)
    if checksum is not None:
        checksum.verify()


async def _client_error(head: ForwardedHead, body: RequestBody) -> S3Error:
    """Return the error that a handler's answer means; an error document in the body supplies what the headers leave out."""
    text = b""
    async for piece in body:
        if len(text) < ERROR_BODY_BYTES_MAX:
            text += piece
    code, message = error_of_document(text[:ERROR_BODY_BYTES_MAX])
    return head.error(code, message)


def error_of_document(text: bytes) -> tuple[str, str]:
    """Return code and message of an S3 error document; two empty texts for any other text."""
    if b"<!" in text:  # S3 sends no document type, and entities could grow without bound
        return "", ""
    try:
        root = ET.fromstring(text)
    except ET.ParseError:
        return "", ""
    return (root.findtext("Code") or "", root.findtext("Message") or "") if root.tag == "Error" else ("", "")


def _refusal(error: S3Error) -> web.Response:
    LOG.info("WriteGetObjectResponse was refused: %s", error)
    document = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{escape(error.code)}</Code>'
    document += f"<Message>{escape(error.message)}</Message></Error>"
    answer = web.Response(status=error.status, headers=error.headers, text=document, content_type="application/xml")
    answer.force_close()  # the rest of the body may still be on its way
    return answer
