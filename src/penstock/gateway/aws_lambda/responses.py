"""``WriteGetObjectResponse``: a handler sends its answer to the gateway, which streams it into the result that waits for it.

Each expected answer has a route, a token that is valid once, and a writer that takes the body. Handlers reach the
internal endpoint of the gateway process that started them, with a key that is valid for nothing else.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import logging
import re
import secrets
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from penstock.checksums.algorithms import ALGORITHMS, Hasher, hasher
from penstock.errors import PenstockError
from penstock.gateway.authentication import AccessKey, AccessKeys, SignatureAuthenticator
from penstock.gateway.authentication.bodies import BodyCheck, DecodedBody
from penstock.gateway.aws_lambda.forwarded import CHECKSUM_PREFIX, ForwardedHead, forwarded_head, refuse
from penstock.gateway.http.addressing import joined_headers
from penstock.gateway.http.exchanges import ClientExchange
from penstock.gateway.objects import RequestHead, S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from aiohttp import web

    from penstock.gateway.objects import RequestBody, ResultWriter

PATH = "/WriteGetObjectResponse"
ERROR_BODY_BYTES_MAX = 64 * 1024
LOG = logging.getLogger("penstock.gateway.lambda")

_ROUTE_IN_HOST = re.compile(r"(io-[0-9a-f]+)\.", re.IGNORECASE)


class PendingResponse:
    """The answer to one event.

    Attributes:
        route: ``outputRoute`` of the event.
        token: ``outputToken`` of the event.
        output: Takes the body.
        finished: A future that ends when the body has arrived to its end, or with the ``S3Error`` for the client.
        is_begun: Whether the head of the handler's answer has arrived.
    """

    def __init__(self, output: ResultWriter) -> None:
        self.route = f"io-{secrets.token_hex(8)}"
        self.token = secrets.token_urlsafe(32)
        self.output = output
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_begun = False
        self._copying: asyncio.Task[None] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the body has arrived to its end."""
        return self.finished.done() and not self.finished.cancelled() and self.finished.exception() is None

    def begin(self, copying: asyncio.Task[None]) -> None:
        """Note that the head of the answer has arrived, and which task copies the body."""
        self.is_begun = True
        self._copying = copying
        copying.add_done_callback(self._ended)

    def close(self) -> None:
        """Stop copying; the answer is not needed any more."""
        if self._copying is not None:
            self._copying.cancel()
        if not self.finished.done():
            self.finished.cancel()
        elif not self.finished.cancelled():
            self.finished.exception()  # otherwise asyncio logs that it was never retrieved

    def _ended(self, copying: asyncio.Task[None]) -> None:
        if self.finished.done():
            return
        if copying.cancelled():
            message = "The call of WriteGetObjectResponse was broken off."
            self.finished.set_exception(S3Error("ConnectionClosedByRequester", message))
            return
        error = copying.exception()
        if error is None:
            self.finished.set_result(None)
        else:
            self.finished.set_exception(error)


class PendingResponses:
    """All answers that this process expects from its handlers."""

    def __init__(self) -> None:
        self._by_token: dict[bytes, PendingResponse] = {}

    def __len__(self) -> int:
        return len(self._by_token)

    @contextmanager
    def expect(self, output: ResultWriter) -> Iterator[PendingResponse]:
        """Accept one answer until the block ends; then its token expires."""
        pending = PendingResponse(output)
        digest = _digest(pending.token)
        self._by_token[digest] = pending
        try:
            yield pending
        finally:
            self._by_token.pop(digest, None)
            pending.close()

    def find(self, route: str, token: str) -> PendingResponse:
        """Return the answer that a route and a token name; ``take`` makes the token invalid.

        Raises:
            S3Error: ``InvalidTokenId``: the token is unknown, was used before, has expired, or belongs to another route.
        """
        pending = self._by_token.get(_digest(token))
        if pending is None or not secrets.compare_digest(pending.route.encode(), route.encode("utf-8", "replace")):
            message = "The request token is unknown, has expired, was used before, or belongs to another request route."
            raise S3Error("InvalidTokenId", message)
        return pending

    def take(self, pending: PendingResponse) -> None:
        """Make the token of an answer invalid."""
        self._by_token.pop(_digest(pending.token), None)


def _digest(token: str) -> bytes:
    """A digest, so that the time of looking a token up says nothing about the tokens that exist."""
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


class InternalEndpoint:
    """Port and keys with which handlers reach the internal endpoint of one gateway process on 127.0.0.1.

    Args:
        port: Port of the internal endpoint on 127.0.0.1.

    Attributes:
        port: Port of the internal endpoint on 127.0.0.1.
        key: Key with which handlers sign ``WriteGetObjectResponse``. It is valid for nothing else.
        responses: Answers that this process expects from its handlers.
        authenticator: Verifies ``WriteGetObjectResponse``.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.key = AccessKey.generate()
        self.responses = PendingResponses()
        self.authenticator = SignatureAuthenticator(AccessKeys([self.key]))

    @property
    def url(self) -> str:
        """URL for clients that put a route in front of the host name; names below localhost must resolve to 127.0.0.1."""
        return f"http://localhost:{self.port}"

    def accept_keys_of(self, environment: Mapping[str, str]) -> None:
        """Accept answers signed with AWS keys of a handler's own environment, which it may need for other services."""
        access_key, secret_key = environment.get("AWS_ACCESS_KEY_ID"), environment.get("AWS_SECRET_ACCESS_KEY")
        if access_key and secret_key:
            key = AccessKey(access_key=access_key, secret_key=secret_key)
            self.authenticator.keys = self.authenticator.keys.with_key(key)


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
        exchange = ClientExchange(request)
        try:
            pending, head, body = self._checked(request)
            self._responses.take(pending)
            if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
                request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            copying = asyncio.create_task(_copy(head, body, pending))
            pending.begin(copying)
            try:
                await asyncio.wait([copying])
            finally:
                copying.cancel()  # if this request was cancelled
            if copying.cancelled():
                raise S3Error("ConnectionClosedByRequester", "The client that waited for this answer has left.")
            if not (head.is_error and isinstance(copying.exception(), S3Error)):
                copying.result()
            with suppress(ConnectionError):  # the handler has left
                await exchange.answer(200, {}, b"")
        except (S3Error, PenstockError) as error:
            refusal = error if isinstance(error, S3Error) else S3Error("InternalError", error.what)
            LOG.info("WriteGetObjectResponse was refused: %s", refusal)
            with suppress(ConnectionError):  # the handler has left
                await exchange.refuse(refusal)
        assert exchange.response is not None
        return exchange.response

    def _checked(self, request: web.BaseRequest) -> tuple[PendingResponse, ForwardedHead, RequestBody]:
        if request.method != "POST":
            raise S3Error("MethodNotAllowed", f"{PATH} takes only POST.")
        headers = joined_headers(request.headers)
        url = request.rel_url
        signed = RequestHead(request.method, url.raw_path, url.raw_query_string, headers)
        verified = self._authenticator.verify(signed)
        if "/s3-object-lambda/aws4_request" not in headers.get("Authorization", ""):
            raise S3Error("InvalidSignature", "The signature must name the service s3-object-lambda.")
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


async def _arriving(request: web.BaseRequest) -> AsyncIterator[bytes]:
    """Iterate over a request's body as it arrives. Raises ``S3Error`` if it is cut off."""
    try:
        async for piece in request.content.iter_any():
            yield piece
    except S3Error:
        raise
    except Exception as error:
        raise S3Error("ConnectionClosedByRequester", "The body of WriteGetObjectResponse ended early.") from error


async def _copy(head: ForwardedHead, body: RequestBody, pending: PendingResponse) -> None:
    """Copy a body into the result, or turn it into the client's error."""
    if head.is_error:
        raise await _client_error(head, body)
    if head.status != 200:
        message = f"The handler answered a request for the whole object with status {head.status}."
        raise S3Error("LambdaInvalidResponse", message)
    checks = []
    headers = head.headers
    if head.checksum is not None:
        check = body_check(*head.checksum)
        if check is not None:
            checks.append(check)
        else:  # then the result must not promise the checksum
            headers = {name: value for name, value in headers.items() if not name.startswith(CHECKSUM_PREFIX)}
    pending.output.begin(headers, size_bytes=body.length_bytes)
    async for piece in DecodedBody(aiter(body), length_bytes=body.length_bytes, checks=checks):
        await pending.output.write(piece)


def body_check(algorithm: str, expected: str) -> BodyCheck | None:
    """Return what compares a body with a checksum; None if this process cannot compute the algorithm.

    Args:
        algorithm: Name of the algorithm, as in ``x-amz-checksum-...``.
        expected: Checksum that the body must have, in base64.

    Cost: about 0.1 s per GB for CRCs, 1 s per GB for SHA.
    """
    computed: Hasher | None = None
    if algorithm in ("sha512", "md5"):
        computed = hashlib.new(algorithm, usedforsecurity=False)
    elif algorithm in ALGORITHMS:
        computed = hasher(algorithm)
    if computed is None:
        return None
    try:
        digest = base64.b64decode(expected.strip(), validate=True)
    except binascii.Error:
        digest = b""  # which no body has
    wrong = S3Error("BadDigest", f"The body does not match its checksum {algorithm}.")
    return BodyCheck(computed, digest, wrong)


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
