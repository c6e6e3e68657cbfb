"""``Front``: accepts connections, verifies requests, passes them to buckets, and logs them."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

from aiohttp import HttpVersion11, web
from multidict import CIMultiDict

from penstock.errors import PenstockError
from penstock.gateway.config import GatewayLimits
from penstock.gateway.http.access_log import take_note
from penstock.gateway.http.addressing import (
    Target,
    find_address,
    joined_headers,
    parse_query,
    path_and_query,
    public_query,
    split_target,
    take_headers,
)
from penstock.gateway.http.conditions import has_conditions, parse_range
from penstock.gateway.http.connections import ClientConnection, ConnectionPool, Sweeper
from penstock.gateway.http.cors import cors_headers, preflight_headers, refuse_foreign_pages
from penstock.gateway.http.documents import XML_TYPE, error_document
from penstock.gateway.http.exchanges import HOST_ID, SERVER_HEADERS, ClientExchange, LazyBody, as_s3_error
from penstock.gateway.http.object_answers import answer_get, answer_in_memory
from penstock.gateway.http.service import METHODS, Service, method_not_allowed
from penstock.gateway.metrics import Metrics
from penstock.gateway.objects import GatewayRequest, RequestHead, S3Error
from penstock.redaction import public_key

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence

    from aiohttp.web import BaseRequest, StreamResponse

    from penstock.gateway.http.access_log import AccessLog
    from penstock.gateway.http.addressing import Address
    from penstock.gateway.http.plain_requests import PlainRequest
    from penstock.gateway.objects import Authenticator, BucketTable, OpenObject, VerifiedRequest
    from penstock.types import ByteRange

    Route = Callable[[BaseRequest], Awaitable[StreamResponse]]
    Answering = Callable[[], Awaitable[None]]

log = logging.getLogger("penstock.gateway")

_LOOPBACK_DOMAIN: Final = "localhost"
_BACKLOG_COUNT = 1024
_PLAIN_PARAMETERS = frozenset({"x-id"})
"""Parameters that change nothing about a GET: some SDKs send the operation's name."""


class _VerifiedHead(NamedTuple):
    """The head of a request whose signature was verified, and who sent it."""

    address: Address
    sender: VerifiedRequest
    headers: Mapping[str, str]
    target: Target
    query: Mapping[str, str]

    def request(self, exchange: ClientExchange) -> GatewayRequest:
        """Return the request for a bucket."""
        request, address, target = exchange.request, self.address, self.target
        shown = public_query(target.raw_query)
        host = target.host or self.headers.get("Host", "")
        return GatewayRequest(
            method=request.method,
            bucket=address.bucket,
            key=address.key,
            query=self.query,
            headers=self.headers,
            caller=self.sender.caller,
            url=f"{request.scheme}://{host}{target.raw_path}{'?' + shown if shown else ''}",
            remote=request.remote or "",
            request_id=exchange.request_id,
        )


class Front:
    """The HTTP side of a gateway, in one process.

    Args:
        buckets: Buckets and access points that it serves.
        authenticator: Verifies signatures.
        limits: Bounds on what clients may use.
        metrics: Counts requests.
        log: Takes a record of each request; None for no access log.
        extra_routes: Handlers of paths that are not S3's, by exact path, or by a prefix that ends with a slash; the longest
            match is used. They get aiohttp's request before its signature is verified.
        domain: Domain whose subdomains are bucket names, beside ``localhost``.
        region: Region that the gateway says it is in.
        cors_origins: Origins whose web pages may use the gateway; ``*`` for all.

    Attributes:
        limits: Bounds on what clients may use.
        metrics: Counts requests.
        sweeper: Watches the clients whose requests are being answered.
    """

    def __init__(
        self,
        buckets: BucketTable,
        authenticator: Authenticator,
        *,
        limits: GatewayLimits | None = None,
        metrics: Metrics | None = None,
        log: AccessLog | None = None,
        extra_routes: Mapping[str, Route] | None = None,
        domain: str = "",
        region: str = "",
        cors_origins: tuple[str, ...] = (),
    ) -> None:
        self.limits = limits or GatewayLimits()
        self.metrics = metrics or Metrics()
        self._buckets = buckets
        self._authenticator = authenticator
        self._service = Service(buckets, authenticator, region=region)
        self._log = log
        self._routes = dict(extra_routes or {})
        self._prefixes = tuple(path for path in self._routes if path.endswith("/"))
        self._domains = (domain.lower(), _LOOPBACK_DOMAIN) if domain else (_LOOPBACK_DOMAIN,)
        self._cors_origins = cors_origins
        self.sweeper = Sweeper(self.limits)
        self._pool: ConnectionPool | None = None
        self._servers: list[asyncio.Server] = []

    # ── life ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self, sockets: Sequence[socket.socket], *, tls: ssl.SSLContext | None = None) -> None:
        """Accept connections on bound sockets, which the caller still owns.

        Args:
            sockets: Bound sockets of TCP.
            tls: Certificate and key; None for plain HTTP. Replacing the certificate in it affects new connections.
        """
        loop = asyncio.get_running_loop()
        if self._pool is None:
            self._pool = ConnectionPool(self)
            self.sweeper.start()
        for bound in sockets:
            server = await loop.create_server(
                self._pool,
                sock=bound.dup(),
                backlog=_BACKLOG_COUNT,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else self.limits.header_s_max,
            )
            self._servers.append(server)

    @property
    def port(self) -> int:
        """Port of the first socket."""
        return int(self._servers[0].sockets[0].getsockname()[1])

    @property
    def connections_count(self) -> int:
        """Number of open connections."""
        return len(self._pool.connections) if self._pool is not None else 0

    @property
    def requests_count(self) -> int:
        """Number of requests that are being answered."""
        return len(self.sweeper.active)

    @property
    def exchanges(self) -> tuple[ClientExchange, ...]:
        """Requests that are being answered."""
        return tuple(self.sweeper.active)

    async def drain(self, timeout_s: float) -> bool:
        """Accept no more connections, finish the transfers under way, and close.

        Args:
            timeout_s: Longest time that transfers may take, in seconds.

        Returns:
            Whether all of them were finished; the others were broken off.
        """
        for server in self._servers:
            server.close()
        if self._pool is not None:
            self._pool.drain()
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        while self.sweeper.active and loop.time() < end_s:
            await asyncio.sleep(min(0.02, max(0.0, end_s - loop.time())))
        is_finished = not self.sweeper.active
        await self.close()
        return is_finished

    async def close(self) -> None:
        """Close all connections at once; idempotent."""
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()
        for exchange in list(self.sweeper.active):
            exchange.break_off()
        if self._pool is not None:
            pool, self._pool = self._pool, None
            await pool.shutdown(1.0)
        await self.sweeper.close()

    # ── one request ────────────────────────────────────────────────────────────────────────────────────────────────

    async def handle(self, request: BaseRequest) -> StreamResponse:
        """Answer one request, whatever happens."""
        connection = request.protocol
        if isinstance(connection, ClientConnection):
            connection.head_arrived()
        if "Transfer-Encoding" in request.headers and not _has_plain_coding(request):
            refusal = self.refuse_malformed(request, 400)
            refusal.force_close()  # where the body ends is doubtful, so nothing behind it is a request
            return refusal
        if self._routes and (route := self._route(request.raw_path)) is not None:
            return await route(request)
        exchange = ClientExchange(request)
        await self._perform(exchange, partial(self._answer, exchange, request))
        if isinstance(connection, ClientConnection):
            connection.answer_ended()
        return exchange.response or web.StreamResponse(status=499)

    def begin_plain(self, request: PlainRequest) -> tuple[ClientExchange, Coroutine[None, None, None] | None] | None:
        """Begin to answer a plain request, at once if the object's bytes are in memory.

        Most reads of a warm cache are such requests: a GET of a small object or range, from a client that keeps its
        connection. One function call answers them, without a task and without waiting for anything.

        Returns:
            The exchange, and the coroutine that answers it; None instead of the latter if the answer was given to the
            connection, which may still be sending it. None if the path is not S3's, so that aiohttp must read the request.
        """
        if self._routes and self._route(request.raw_path) is not None:
            return None
        exchange = ClientExchange(request)
        try:
            rest = self._begin_plain(exchange, request)
        except Exception as error:
            rest = partial(_fail_with, error)
        return exchange, None if rest is None else self._perform(exchange, rest)

    def _begin_plain(self, exchange: ClientExchange, request: PlainRequest) -> Answering | None:
        """Answer a plain request, or return what answers it."""
        target = Target(*path_and_query(request.raw_path), "")
        is_from_page = "Origin" in request.headers
        if is_from_page:
            exchange.more_headers = cors_headers(request.headers, self._cors_origins)
        verified = self._verified(exchange, request.headers, target)
        address = verified.address
        bucket = self._buckets.get_nowait(address.bucket) if address.key else None
        if (
            bucket is None
            or is_from_page
            or verified.query.keys() - _PLAIN_PARAMETERS
            or "If-Range" in request.headers
            or has_conditions(request.headers)
            or not self._authenticator.may_use(verified.sender.caller, address.bucket)
        ):
            return partial(self._answer_verified, exchange, verified)
        wanted = parse_range(request.headers.get("Range"))
        opened = bucket.open_nowait(address.key, wanted.within if wanted is not None else None)
        if opened is not None and opened.body is not None:
            answer_in_memory(exchange, opened, opened.body, is_part=wanted is not None)
            return None
        fetch = bucket.fetch if opened is None else partial(_opened, opened)
        return partial(answer_get, exchange, fetch, verified.request(exchange))

    async def _perform(self, exchange: ClientExchange, answer: Answering) -> None:
        """Answer one request, whatever happens, and take note of it."""
        self.sweeper.active.add(exchange)
        code = ""
        is_complete = False
        try:
            try:
                await answer()
            except Exception as error:
                if isinstance(error, ConnectionError) and not isinstance(error, PenstockError):
                    raise
                code = await self._fail(exchange, error)
                is_complete = exchange.response is not None and not exchange.is_broken
            else:
                is_complete = True
        except ConnectionError:  # the client has left
            exchange.break_off()
        finally:
            self.end(exchange, code, is_complete=is_complete)

    def end(self, exchange: ClientExchange, code: str, *, is_complete: bool) -> None:
        """Take note of a request that has ended; see ``take_note``."""
        self.sweeper.active.discard(exchange)
        take_note(exchange, code, is_complete=is_complete, metrics=self.metrics, log=self._log)

    def _route(self, raw_path: str) -> Route | None:
        path, _ = path_and_query(raw_path)
        if (route := self._routes.get(path)) is not None or not path.startswith(self._prefixes):
            return route
        return self._routes[max(filter(path.startswith, self._prefixes), key=len)]

    async def _answer(self, exchange: ClientExchange, request: BaseRequest) -> None:
        method = request.method
        headers = joined_headers(request.headers)
        target = split_target(request.raw_path)
        _check_head(request, headers, target, self.limits)
        if target.host:  # the target's host overrides the header, so it must be the signed one
            headers = CIMultiDict({**headers, "Host": target.host})
        exchange.more_headers = cors_headers(headers, self._cors_origins)
        if method == "OPTIONS":
            await exchange.answer(200, preflight_headers(headers, self._cors_origins), b"")
            return
        if method not in METHODS:
            raise method_not_allowed()
        refuse_foreign_pages(method, headers, self._cors_origins)
        await self._answer_verified(exchange, self._verified(exchange, headers, target))

    def _verified(self, exchange: ClientExchange, headers: Mapping[str, str], target: Target) -> _VerifiedHead:
        """Find the bucket and key that a request addresses, and its sender.

        Raises:
            S3Error: The address or the query is not valid, or the signature is missing or wrong.
        """
        address = find_address(target.raw_path, headers.get("Host", ""), self._domains)
        exchange.bucket, exchange.key = address.bucket, address.key
        host_bucket = address.bucket if address.is_host_bucket else ""
        head = RequestHead(exchange.request.method, target.raw_path, target.raw_query, headers, host_bucket)
        sender = self._authenticator.verify(head)
        exchange.access_key = sender.caller.access_key
        query = parse_query(target.raw_query)
        if "Signature=" in target.raw_query and (more := take_headers(query)):
            headers = CIMultiDict({**more, **headers})
        return _VerifiedHead(address, sender, headers, target, query)

    async def _answer_verified(self, exchange: ClientExchange, verified: _VerifiedHead) -> None:
        request, address = verified.request(exchange), verified.address
        name, bucket = await self._service.find(address, request) if address.bucket else ("", None)
        if name != address.bucket:
            request = dataclasses.replace(request, bucket=name)
            exchange.bucket = name
        limit = None if _is_upload(request) else self.limits.body_bytes_max
        body = LazyBody(exchange, verified.sender.open_body, length_bytes_max=limit)
        await self._service.answer(exchange, bucket, request, body)

    async def _fail(self, exchange: ClientExchange, error: Exception) -> str:
        """Send an error document, or break the connection off if the answer has begun; return the error's code."""
        is_conditional = not _VERSION_HEADERS.isdisjoint(map(str.lower, exchange.request.headers))
        refusal = as_s3_error(error, is_conditional=is_conditional)
        is_refused = isinstance(error, S3Error) and error.status == 501  # the client asked for an unsupported operation
        if (refusal.status >= 500 and not is_refused) or exchange.response is not None:
            name = public_key(f"{exchange.bucket}/{exchange.key}")
            is_known = isinstance(error, (S3Error, PenstockError))
            log.error(
                "Request %s of %r failed: %s",
                exchange.request_id,
                name,
                error,
                exc_info=None if is_known else error,
                extra={"request_id": exchange.request_id},
            )
        if exchange.response is not None:
            exchange.break_off()
            return refusal.code
        await exchange.refuse(refusal)
        return refusal.code

    def refuse_malformed(self, request: BaseRequest, status: int) -> StreamResponse:
        """Return the answer to an invalid HTTP request, or to one that failed unexpectedly."""
        self.metrics.add("penstock_gateway_malformed_total")
        exchange = ClientExchange(request)
        code, message = ("BadRequest", "The request is not valid HTTP.") if status < 500 else (
            "InternalError", "We encountered an internal error. Please try again.")  # fmt: skip
        body = error_document(code, message, resource="/", request_id=exchange.request_id, host_id=HOST_ID, details={})
        headers = {"Content-Type": XML_TYPE, "x-amz-request-id": exchange.request_id, **SERVER_HEADERS}
        return web.Response(status=status, headers=headers, body=body)


async def _fail_with(error: Exception) -> None:
    raise error


async def _opened(opened: OpenObject, _request: GatewayRequest, _hint: ByteRange | None) -> OpenObject:
    """Return an object that was opened before."""
    return opened


def _has_plain_coding(request: BaseRequest) -> bool:
    """Whether the body of a request is sent in chunks and in no other coding, by a version of HTTP that has chunks.

    aiohttp accepts more, which a proxy before the gateway may read in another way: then the two see different requests.
    """
    return request.version >= HttpVersion11 and request.headers["Transfer-Encoding"].strip().lower() == "chunked"


def _check_head(request: BaseRequest, headers: Mapping[str, str], target: Target, limits: GatewayLimits) -> None:
    """Refuse a head that is too large or names no host."""
    raw_headers = request.raw_headers
    size_bytes = sum(map(len, chain.from_iterable(raw_headers))) + 4 * len(raw_headers)
    if size_bytes > limits.header_bytes_max:
        raise S3Error(
            "RequestHeaderSectionTooLarge",
            "Your request header and metadata section exceeds the maximum allowed size.",
            details={"MaxSizeAllowed": str(limits.header_bytes_max)},
        )
    if not target.host and not headers.get("Host") and request.version >= HttpVersion11:
        raise S3Error("InvalidRequest", "The request names no host.")


def _is_upload(request: GatewayRequest) -> bool:
    """Whether the body is an object or a part of one, which goes to a store as it arrives."""
    return request.method == "PUT" and bool(request.key) and request.query.keys() <= _UPLOAD_PARAMETERS


_VERSION_HEADERS = frozenset({"if-match", "if-unmodified-since"})
_UPLOAD_PARAMETERS = frozenset({"partNumber", "uploadId", "x-id"})
