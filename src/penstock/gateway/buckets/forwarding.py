"""Requests that write are passed on to an S3 upstream, signed with the upstream's own keys.

A body is streamed and never held, unless it is small. Over TLS, and for bodies in chunks, it is sent without a hash of its own
(``UNSIGNED-PAYLOAD``); over plain HTTP the client's own SHA-256, if it sent one, is signed again. A checksum in the client's
trailer goes to the upstream in a trailer as well, and that of a small body in a header.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ssl
from typing import TYPE_CHECKING

import aiohttp
from yarl import URL

from penstock.errors import CredentialsError, StoreError
from penstock.gateway.buckets.documents import document, element, malformed, parsed
from penstock.gateway.buckets.requests import not_implemented, read_document
from penstock.gateway.buckets.submitting import perform_on_loop
from penstock.gateway.buckets.subresources import default_setting, setting_named
from penstock.gateway.buckets.trailing import CHECKSUM_CHARACTERS, encoded, encoded_length_bytes
from penstock.gateway.buckets.upstream_requests import (
    BUCKET_OPERATIONS,
    OPERATIONS,
    PassedRequest,
    passed_document,
    passed_headers,
    passed_request,
)
from penstock.gateway.objects import Answer, S3Error
from penstock.redaction import public_url
from penstock.store import xml
from penstock.store.upload import multipart_etag
from penstock.transport import EMPTY_SHA256
from penstock.types import Head, ListPage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection

    from penstock.gateway.objects import GatewayRequest, RequestBody
    from penstock.store.credentials import Credentials
    from penstock.store.s3 import S3Store

SMALL_BYTES_MAX = 1 << 20
"""Largest body that is held, hashed, and sent again if the connection was dead or the region wrong."""

_ANSWER_BYTES_MAX = 16 << 20
_ATTEMPTS_MAX = 3
_UNSIGNED = "UNSIGNED-PAYLOAD"
_UNSIGNED_TRAILER = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
_AUTOMATIC = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


class OutgoingBody:
    """The body of a request to the upstream.

    Args:
        data: The bytes, or an iterator over them.
        length_bytes: Number of bytes of the body.
        headers: Headers that describe the body.
    """

    def __init__(self, data: bytes | AsyncIterator[bytes], length_bytes: int, headers: dict[str, str]) -> None:
        self.data = data if isinstance(data, bytes) else self._watched(data)
        self.length_bytes = length_bytes
        self.headers = headers
        self.error: S3Error | None = None
        """The error in the client's body, which aiohttp would report as a failure of the connection."""

    async def _watched(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        held = b""
        try:
            async for piece in pieces:
                if held:
                    yield held
                held = piece
        except S3Error as error:
            self.error = error
            raise
        if held:  # only now, because a body may be refused at its end, and the upstream stores what is complete
            yield held

    @property
    def can_be_repeated(self) -> bool:
        """Whether it can be sent a second time."""
        return isinstance(self.data, bytes)


class ForwardedWrites:
    """Passes requests on to an S3 upstream.

    Args:
        name: Name of the bucket, by which clients know it.
        store: The upstream.
        note_written: Called with keys before and after they are written, so that the cache drops what it knows of them.
    """

    def __init__(
        self, name: str, store: S3Store, *, note_written: Callable[[Collection[str]], Awaitable[None]]
    ) -> None:
        self._name = name
        self._store = store
        self._note_written = note_written
        self._session: aiohttp.ClientSession | None = None
        self._is_region_known = False

    async def perform(self, request: GatewayRequest, body: RequestBody) -> Answer:
        """Pass a request on; see ``Writes.perform``."""
        setting = setting_named(request)
        operation = (request.method, setting or ("uploadId" if "uploadId" in request.query else ""))
        if operation not in (OPERATIONS if request.key else BUCKET_OPERATIONS):
            if request.method == "GET" and setting is not None:
                return default_setting(request, setting)
            raise not_implemented(f"{request.method} {setting or ''}".strip())
        passed = passed_request(request, self._store.endpoint, self._store.options)
        if operation == ("POST", "delete"):
            outgoing, written = await self._deletion(passed, body)
        else:
            outgoing = await self._outgoing(passed, request, body)
            is_write = operation in (("PUT", ""), ("DELETE", ""), ("POST", "uploadId"))
            written = [request.key] if is_write else []
        await self._note_written(written)
        try:
            return await self._sent(passed, request, outgoing)
        except S3Error as error:
            if error.code != "NoSuchUpload" or operation != ("POST", "uploadId"):
                raise
            completed = await self._completed(request, outgoing)
            if completed is None:
                raise
            return completed
        finally:
            if written:  # even after a failure: the upstream may have written although its answer was lost
                await asyncio.shield(self._note_written(written))

    async def _completed(self, request: GatewayRequest, body: OutgoingBody) -> Answer | None:
        """Return the answer to an upload that was completed before; None if the object does not consist of its parts.

        If an answer is lost, the client or this class repeats the request. AWS then answers as before, but other servers
        have forgotten the upload.
        """
        assert isinstance(body.data, bytes)
        tree = parsed(body.data, root="CompleteMultipartUpload")
        expected = multipart_etag(part.findtext("ETag") or "" for part in tree.findall("Part"))
        try:
            info = (await perform_on_loop(self._store, Head(request.key))).info
        except StoreError:  # the client is told what the upstream said first
            return None
        if info is None or expected is None or (info.etag or "").strip('"') != expected:
            return None
        rows = [("Location", public_url(request.url)), ("Bucket", self._name), ("Key", request.key)]
        return document("CompleteMultipartUploadResult", [*rows, ("ETag", info.etag)])

    # ── bodies ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _outgoing(self, passed: PassedRequest, request: GatewayRequest, body: RequestBody) -> OutgoingBody:
        if request.method in ("GET", "DELETE") or "x-amz-copy-source" in passed.headers:
            return OutgoingBody(b"", 0, {"x-amz-content-sha256": EMPTY_SHA256})
        length_bytes = body.length_bytes
        if length_bytes is None:
            if request.method == "PUT":
                raise S3Error("MissingContentLength", "You must provide the Content-Length HTTP header.", status=411)
            length_bytes = 0
        if length_bytes <= SMALL_BYTES_MAX or request.method == "POST":
            data = await read_document(body, max(SMALL_BYTES_MAX, 4 << 20))
            sums = {
                f"x-amz-checksum-{name}": value for name, value in body.checksums.items() if name in CHECKSUM_CHARACTERS
            }
            return _held(data, sums)
        await self._learn_region()
        trailer = request.headers.get("x-amz-trailer", "").strip().lower().removeprefix("x-amz-checksum-")
        if trailer in CHECKSUM_CHARACTERS:
            headers = {
                "x-amz-content-sha256": _UNSIGNED_TRAILER,
                "x-amz-decoded-content-length": str(length_bytes),
                "x-amz-trailer": f"x-amz-checksum-{trailer}",
                "Content-Encoding": ",".join(filter(None, ["aws-chunked", passed.headers.get("Content-Encoding", "")])),
            }
            pieces = encoded(aiter(body), trailer, lambda: body.checksums[trailer])
            return OutgoingBody(pieces, encoded_length_bytes(length_bytes, trailer), headers)
        sent = request.headers.get("x-amz-content-sha256", "")
        is_hash = len(sent) == 64 and not passed.url.startswith("https:")
        return OutgoingBody(aiter(body), length_bytes, {"x-amz-content-sha256": sent if is_hash else _UNSIGNED})

    async def _deletion(self, passed: PassedRequest, body: RequestBody) -> tuple[OutgoingBody, list[str]]:
        """Return the body of ``DeleteObjects`` with the upstream's keys, and the client's keys."""
        tree = parsed(await read_document(body), root="Delete")
        rows = [[(child.tag, child.text or "") for child in row] for row in tree.findall("Object")]
        keys = [dict(row).get("Key", "") for row in rows]
        if not 0 < len(rows) <= 1000 or not all(keys):
            raise malformed()
        prefix = self._store.endpoint.prefix
        objects = [("Object", [(name, prefix + text if name == "Key" else text) for name, text in row]) for row in rows]
        data = element("Delete", [("Quiet", (tree.findtext("Quiet") or "false").strip()), *objects]).encode()
        for name in [
            name for name in passed.headers if name.lower().startswith(("x-amz-checksum-", "x-amz-sdk-", "content-md5"))
        ]:
            del passed.headers[name]
        digest = hashlib.md5(data, usedforsecurity=False).digest()
        passed.headers["Content-MD5"] = base64.b64encode(digest).decode()
        return _held(data, {}), keys

    # ── sending ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _sent(self, passed: PassedRequest, request: GatewayRequest, body: OutgoingBody) -> Answer:
        for attempt in range(_ATTEMPTS_MAX):
            is_last = attempt == _ATTEMPTS_MAX - 1 or not body.can_be_repeated
            try:
                status, headers, data = await self._attempt(passed, body)
            except (aiohttp.ClientError, TimeoutError, S3Error) as error:
                if body.error is not None:
                    raise body.error from None
                if isinstance(error, S3Error):
                    raise
                if is_last:
                    message = "The upstream could not be reached, or broke the connection off; please try again."
                    raise S3Error("ServiceUnavailable", message, status=503) from error
                continue
            region = headers.get("x-amz-bucket-region", "")
            if status in (301, 307, 400) and region and region != self._store.endpoint.region and not is_last:
                self._store.endpoint.move(region)
                passed = passed._replace(url=passed_request(request, self._store.endpoint, self._store.options).url)
                continue
            return self._answer(status, headers, data, request)
        raise AssertionError(passed.method)

    async def _attempt(self, passed: PassedRequest, body: OutgoingBody) -> tuple[int, dict[str, str], bytes]:
        headers = {**passed.headers, **body.headers, "Content-Length": str(body.length_bytes)}
        _, _, rest = passed.url.partition("://")
        host, slash, target = rest.partition("/")
        if (credentials := await self._credentials()) is not None:
            lines = [f"{name}: {value}" for name, value in headers.items()]
            signing = self._store.signing(credentials)
            for line in signing.sign(passed.method, host, slash + target, lines):
                name, _, value = line.partition(": ")
                headers[name] = value
        async with self._client().request(
            passed.method,
            URL(passed.url, encoded=True),
            headers=headers,
            data=body.data,
            skip_auto_headers=_AUTOMATIC,
            allow_redirects=False,
        ) as answer:
            data = await answer.content.read(_ANSWER_BYTES_MAX)
            if not answer.content.at_eof():
                raise S3Error("InternalError", "The upstream's answer is too long.", status=502)
            return answer.status, {name.lower(): value for name, value in answer.headers.items()}, data

    def _answer(self, status: int, headers: dict[str, str], data: bytes, request: GatewayRequest) -> Answer:
        endpoint = self._store.endpoint
        if status >= 300:
            found = xml.parse_error(data)
            if found is None or not found.code:
                raise S3Error(
                    "ServiceUnavailable", f"The upstream answered with status {status}.", status=max(status, 400)
                )
            raise S3Error(found.code, found.message, status=max(status, 400))
        return Answer(
            status, passed_headers(headers, request), passed_document(data, request, endpoint) if data else b""
        )

    async def _learn_region(self) -> None:
        """Have the store find the bucket's region, because a body that is streamed cannot be sent a second time."""
        if not self._is_region_known:
            await perform_on_loop(self._store, ListPage(keys_max=1))
            self._is_region_known = True

    async def _credentials(self) -> Credentials | None:
        provider = self._store.provider
        if provider is None:
            return None
        if (known := provider.now()) is not None:
            return known
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Credentials | CredentialsError] = loop.create_future()

        def found(result: Credentials | CredentialsError) -> None:
            loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(result))

        provider.when_known(found)
        result = await future
        if isinstance(result, CredentialsError):
            raise result
        return result

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            config = self._store.transport
            timeout = aiohttp.ClientTimeout(
                total=None, sock_connect=config.connect_s_max, sock_read=max(300.0, config.first_byte_s_max)
            )
            connector = aiohttp.TCPConnector(limit=config.connections_max, ssl=self._tls(), keepalive_timeout=4.0)
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=timeout,
                auto_decompress=False,
                proxy=config.proxy,
                trust_env=config.proxy is None,
            )
        return self._session

    def _tls(self) -> ssl.SSLContext | bool:
        config = self._store.transport
        if not config.verify_tls:
            return False
        return ssl.create_default_context(cafile=config.ca_bundle) if config.ca_bundle else True

    async def close(self) -> None:
        """Close the connections; idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def _held(data: bytes, headers: dict[str, str]) -> OutgoingBody:
    return OutgoingBody(data, len(data), {**headers, "x-amz-content-sha256": hashlib.sha256(data).hexdigest()})
