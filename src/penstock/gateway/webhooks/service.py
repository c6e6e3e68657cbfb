"""``POST /-/webhook/NAME``: the gateway's own transforms, served as webhooks for MinIO, RustFS and others."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from penstock.config import KIB
from penstock.errors import PenstockError
from penstock.gateway.aws_lambda.events import is_for_handler
from penstock.gateway.aws_lambda.forwarded import METADATA_PREFIX
from penstock.gateway.aws_lambda.forwarded import PREFIX as HEADER_PREFIX
from penstock.gateway.objects import Caller, GatewayRequest, ObjectHead, S3Error
from penstock.gateway.s3_text import date_s
from penstock.gateway.webhooks.transform import authorization_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from contextlib import AbstractAsyncContextManager

    from penstock.gateway.config import AccessPoint, WebhookServiceConfig
    from penstock.gateway.objects import Transform
    from penstock.types import Buffer, ByteRange

PREFIX = "/-/webhook/"
EVENT_BYTES_MAX = 1 << 20
CALLS_MAX = 256
IDLE_S_MAX = 60.0
BUFFER_BYTES = 256 * KIB
_SENDABLE = re.compile(r"[!-~]+")
_TOTAL = re.compile(r"bytes (?:[0-9]+-[0-9]+|\*)/([0-9]{1,19})")
LOG = logging.getLogger("penstock.gateway.webhooks")


class ServedTransform(NamedTuple):
    """A transform that is served as a webhook."""

    access_point: AccessPoint
    transform: Transform


class WebhookEvent(NamedTuple):
    """The parts of an event that the service uses."""

    route: str
    token: str
    input_url: str
    request: GatewayRequest


class WebhookService:
    """Answers events of other servers with results of this gateway's transforms, which it streams and does not keep.

    Args:
        config: Token, and hosts from which sources may be read.
        transforms: The transforms by name of their access points.
    """

    def __init__(self, config: WebhookServiceConfig, *, transforms: Mapping[str, ServedTransform]) -> None:
        self._config = config
        self._transforms = dict(transforms)
        self._calls = 0
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one event. A HEAD, by which MinIO asks whether the webhook is alive, needs no token."""
        if request.method == "HEAD":
            return web.Response()
        result: StreamedResult | None = None
        self._calls += 1
        try:
            served = self._checked(request)
            event = await _event_of(request, served.access_point.name)
            result = StreamedResult(
                request,
                route=event.route,
                token=event.token,
                output_bytes_max=served.access_point.output_bytes_max,
            )
            url = allowed_url(event.input_url, self._config.source_hosts)
            async with asyncio.timeout(served.access_point.time_s_max):
                await self._run(served.transform, url, event.request, result)
            return await result.finish()
        except TimeoutError:
            refusal = S3Error("LambdaTimeout", "The transformation took too long.")
        except S3Error as error:
            refusal = error
        except PenstockError as error:
            LOG.warning("%s %s", request.path, error)
            refusal = S3Error("InternalError", "The transformation failed.")
        except aiohttp.ClientError as error:
            LOG.warning("%s The source cannot be read: %s", request.path, type(error).__name__)
            refusal = S3Error("InvalidRequest", "The source at inputS3Url cannot be read.")
        finally:
            self._calls -= 1
        if result is None:
            return web.Response(status=refusal.status, text=refusal.message)
        return result.refuse(refusal)

    async def close(self) -> None:
        """Close the connections to the servers of sources; idempotent."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _checked(self, request: web.BaseRequest) -> ServedTransform:
        """Return the transform that an authorized request names."""
        if not is_authorized(request.headers.get("Authorization", ""), self._config.token):
            raise S3Error("AccessDenied", "The header Authorization is missing or wrong.")
        served = self._transforms.get(request.path.removeprefix(PREFIX))
        if served is None:
            raise S3Error("NoSuchWebhook", "No access point with a transform has this name.")
        if request.method != "POST":
            raise S3Error("MethodNotAllowed", "Webhooks take POST and HEAD.")
        if self._calls > CALLS_MAX:
            raise S3Error("SlowDown", f"{CALLS_MAX} calls are being answered.")
        return served

    async def _run(self, transform: Transform, url: URL, request: GatewayRequest, result: StreamedResult) -> None:
        if self._session is None:
            limit = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=IDLE_S_MAX)
            jar = aiohttp.DummyCookieJar()
            self._session = aiohttp.ClientSession(timeout=limit, auto_decompress=False, cookie_jar=jar)
        source = UrlSource(self._session, url, key=request.key)
        await source.open(size_bytes_max=self._config.source_bytes_max)
        await transform.run(source, request, transform.arguments(request), result)


async def _event_of(request: web.BaseRequest, bucket: str) -> WebhookEvent:
    """Parse the event in a request's body. Raises ``S3Error`` if it is malformed or too long."""
    refusal = S3Error("InvalidRequest", "The body is not an event of an object lambda.")
    body = b""
    async for piece in request.content.iter_any():
        body += piece
        if len(body) > EVENT_BYTES_MAX:
            raise S3Error("EntityTooLarge", f"The event has more than {EVENT_BYTES_MAX} bytes.", status=413)
    try:
        event = json.loads(body)
        context, user = event["getObjectContext"], event.get("userRequest") or {}
        route, token, input_url = context["outputRoute"], context["outputToken"], context["inputS3Url"]
        texts = (route, token, input_url, user.get("url", ""))
        if not all(isinstance(text, str) for text in texts) or not _is_line(route + token):
            raise refusal
        return WebhookEvent(route, token, input_url, _request_of(request, bucket, input_url, user, event))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise refusal from error


def _request_of(request: web.BaseRequest, bucket: str, input_url: str, user: Any, event: Any) -> GatewayRequest:
    """Return the request of the other server's client, with the fields of the event."""
    url = URL(user.get("url", ""))
    headers: CIMultiDict[str] = CIMultiDict()
    for name, values in (user.get("headers") or {}).items():
        headers[str(name)] = ",".join(map(str, values)) if isinstance(values, list) else str(values)
    caller = str((event.get("userIdentity") or {}).get("accessKeyId", ""))
    return GatewayRequest(
        method="GET",
        bucket=bucket,
        key=URL(input_url, encoded=True).path.removeprefix("/").partition("/")[2],
        query={name: value for name, value in url.query.items() if is_for_handler(name)},
        headers=headers,
        caller=Caller(caller, False),
        url=f"{URL(input_url, encoded=True).origin()}{url.raw_path}",
        remote=request.remote or "",
        request_id=str(event.get("xAmzRequestId", "")) or "webhook",
    )


def _is_line(text: str) -> bool:
    return bool(text) and text.isascii() and text.isprintable()


def is_authorized(header: str, token: str) -> bool:
    """Whether a header contains the token, compared in constant time; always False if `token` is empty."""
    expected = authorization_of(token).encode("utf-8", "surrogateescape")
    return bool(token) and hmac.compare_digest(header.encode("utf-8", "surrogateescape"), expected)


class StreamedResult:
    """Takes a result and sends it; implements ``ResultWriter``.

    Args:
        request: The request that is answered.
        route: Route of the event, which the response repeats.
        token: Token of the event, which the response repeats.
        output_bytes_max: Size of the largest result, in bytes.
    """

    def __init__(self, request: web.BaseRequest, *, route: str, token: str, output_bytes_max: int) -> None:
        self._request = request
        self._echo = {"x-amz-request-route": route, "x-amz-request-token": token}
        self._output_bytes_max = output_bytes_max
        self._headers: dict[str, str] = {}
        self._size_bytes: int | None = None
        self._sent_bytes = 0
        self._response: web.StreamResponse | None = None
        self._memory = bytearray()

    def begin(self, headers: Mapping[str, str], *, size_bytes: int | None = None) -> None:
        """Describe the result; see ``ResultWriter.begin``."""
        self._size_bytes = size_bytes
        for name, value in headers.items():
            is_metadata = name.lower().startswith(METADATA_PREFIX)
            self._headers[name if is_metadata else f"{HEADER_PREFIX}{name}"] = value

    async def write(self, data: Buffer) -> None:
        """Send bytes. Raises ``S3Error`` if the result is too long, or the client has gone."""
        self._sent_bytes += len(data)
        limit = self._output_bytes_max if self._size_bytes is None else self._size_bytes
        if self._sent_bytes > limit:
            raise S3Error("EntityTooLarge", f"The result has more than {limit} bytes.")
        try:
            response = self._response or await self._prepare()
            await response.write(bytes(data))  # the caller may reuse the memory while the socket is busy
        except ConnectionError as error:
            raise S3Error("ConnectionClosed", "The client has gone.") from error

    def buffer(self) -> memoryview:
        """Return memory for the next bytes: uint8[n]."""
        self._memory = self._memory or bytearray(BUFFER_BYTES)
        return memoryview(self._memory)

    async def filled(self, length_bytes: int) -> None:
        """Send the first bytes of ``buffer()``."""
        await self.write(memoryview(self._memory)[:length_bytes])

    async def finish(self) -> web.StreamResponse:
        """End the response. Raises ``S3Error`` if the result is shorter than it was announced."""
        if self._size_bytes is not None and self._sent_bytes != self._size_bytes:
            raise S3Error("InternalError", f"The result has {self._sent_bytes} bytes instead of {self._size_bytes}.")
        response = self._response or await self._prepare()
        await response.write_eof()
        return response

    def refuse(self, error: S3Error) -> web.StreamResponse:
        """Return an error's response; if the result has begun, break the connection off."""
        if self._response is not None:
            if self._request.transport is not None:
                self._request.transport.abort()
            return self._response
        message = error.message.encode("ascii", "replace").decode("ascii")
        headers = {
            **self._echo,
            "x-amz-fwd-status": str(error.status),
            "x-amz-fwd-error-code": error.code,
            "x-amz-fwd-error-message": " ".join(message.split()),
        }
        return web.Response(status=error.status, headers=headers)

    async def _prepare(self) -> web.StreamResponse:
        response = web.StreamResponse(headers={**self._echo, "x-amz-fwd-status": "200", **self._headers})
        response.content_type = "application/octet-stream"
        response.content_length = self._size_bytes
        if self._size_bytes is None:
            response.enable_chunked_encoding()
        self._response = response
        await response.prepare(self._request)
        return response


def allowed_url(text: str, hosts: tuple[str, ...]) -> URL:
    """Return a URL whose host is allowed.

    Args:
        text: The URL, percent-encoded.
        hosts: Hosts, each as ``HOST``, which allows all ports, or ``HOST:PORT``.

    Raises:
        S3Error: The URL is malformed, is not percent-encoded, is not HTTP, or leads to another host.
    """
    refusal = S3Error("AccessDenied", "The host of inputS3Url is not allowed by the configuration.")
    if not _SENDABLE.fullmatch(text):  # it is sent as it came, so a line break in it would begin another header
        raise refusal
    try:
        url = URL(text, encoded=True)
        host, port = url.host, url.port
    except ValueError:
        raise refusal from None
    if url.scheme not in ("http", "https") or not host or url.user is not None:
        raise refusal
    shown = f"[{host}]" if ":" in host else host
    if not {shown.lower(), f"{shown}:{port}".lower()} & {name.lower() for name in hosts}:
        raise refusal
    return url


class UrlSource:
    """An object that a signed URL of a GET reads; implements ``Source``.

    Cost: one request for its head, one for each ``read``.

    Attributes:
        key: Key of the object.
        head: Version and size of the source; ``open`` sets it.
    """

    def __init__(self, session: aiohttp.ClientSession, url: URL, *, key: str) -> None:
        self.key = key
        self.head = ObjectHead(key=key, size_bytes=None, etag="", last_modified_s=0)
        self._session = session
        self._url = url

    async def open(self, *, size_bytes_max: int) -> None:
        """Ask for the object's first byte, and with it for its size and version.

        Raises:
            S3Error: The object cannot be read, or is too large.
        """
        async with self._get({"Range": "bytes=0-0"}) as response:
            if response.status not in (200, 206, 416):
                await _refuse(response)
            total = _TOTAL.fullmatch(response.headers.get("Content-Range", ""))
            size_bytes = int(total[1]) if total is not None else response.content_length
            headers = response.headers
        if size_bytes is None:
            raise S3Error("InvalidRequest", "The server of inputS3Url does not send a length.")
        if size_bytes > size_bytes_max:
            raise S3Error("EntityTooLarge", f"The source has more than {size_bytes_max} bytes.")
        kept = {name: headers[name] for name in ("Content-Type",) if name in headers}
        self.head = ObjectHead(
            key=self.key,
            size_bytes=size_bytes,
            etag=headers.get("ETag", ""),
            last_modified_s=date_s(headers.get("Last-Modified")) or 0.0,
            headers=kept,
        )

    def worker_url(self) -> tuple[str, str]:
        """Return the server's URL for ``penstock.connect``, and the path with its signature as the key."""
        return str(self._url.origin()), self._url.raw_path_qs.removeprefix("/")

    def signed_url(self, headers: Mapping[str, str]) -> str:
        """Return the URL as it came; it has been signed for one set of headers."""
        return str(self._url)

    async def read(self, span: ByteRange | None = None) -> AsyncIterator[bytes]:
        """Iterate over the object's bytes, all of the version in `head`.

        Raises:
            S3Error: The object cannot be read, or was replaced.
        """
        size_bytes = self.head.size_bytes or 0
        start, end = (0, size_bytes) if span is None else (span.start, min(span.end, size_bytes))
        if start >= end:
            return
        headers = {"Range": f"bytes={start}-{end - 1}"}
        if self.head.etag.startswith('"'):
            headers["If-Match"] = self.head.etag
        received_bytes = 0
        async with self._get(headers) as response:
            is_whole = response.status == 200 and (start, end) == (0, size_bytes)
            if response.status != 206 and not is_whole:
                await _refuse(response)
            if response.headers.get("ETag", "") != self.head.etag:
                raise S3Error("PreconditionFailed", "The source was replaced while it was read.")
            async for piece in response.content.iter_any():
                received_bytes += len(piece)
                yield piece
        if received_bytes != end - start:
            raise S3Error("IncompleteBody", "The source ended early.")

    def _get(self, headers: Mapping[str, str]) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._session.get(self._url, headers={"Accept-Encoding": "identity", **headers}, allow_redirects=False)


async def _refuse(response: aiohttp.ClientResponse) -> None:
    raise S3Error("InvalidRequest", f"The server of inputS3Url answered with status {response.status}.")
