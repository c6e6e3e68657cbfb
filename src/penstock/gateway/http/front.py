"""``Front``: accepts connections, verifies requests, has them answered, and logs them."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from itertools import chain
from typing import TYPE_CHECKING, Final

from aiohttp import HttpVersion11, web
from multidict import CIMultiDict

from penstock.errors import PenstockError
from penstock.gateway.config import GatewayLimits
from penstock.gateway.http.addressing import (
    find_address,
    parse_query,
    path_and_query,
    public_query,
    split_target,
    take_headers,
)
from penstock.gateway.http.at_hand import AnswersAtHand
from penstock.gateway.http.bodies import LazyBody
from penstock.gateway.http.connections import ClientConnection, ConnectionPool, Sweeper
from penstock.gateway.http.cors import cors_headers, preflight_headers, refuse_foreign_pages
from penstock.gateway.http.documents import XML_TYPE, error_document
from penstock.gateway.http.exchanges import HOST_ID, SERVER_HEADERS, ClientExchange
from penstock.gateway.http.records import RequestRecords
from penstock.gateway.http.refusals import as_s3_error
from penstock.gateway.http.service import METHODS, Service, method_not_allowed
from penstock.gateway.metrics import Metrics
from penstock.gateway.objects import GatewayRequest, RequestHead, S3Error
from penstock.redaction import public_key

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from aiohttp.web import BaseRequest, StreamResponse

    from penstock.gateway.http.access_log import AccessLog
    from penstock.gateway.http.addressing import Address, Target
    from penstock.gateway.http.exchanges import WatchedExchange
    from penstock.gateway.objects import Authenticator, BucketTable, VerifiedRequest

    Route = Callable[[BaseRequest], Awaitable[StreamResponse]]

log = logging.getLogger("penstock.gateway")

_LOOPBACK_DOMAIN: Final = "localhost"
_BACKLOG_COUNT = 1024


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
        self._authenticator = authenticator
        self._service = Service(buckets, authenticator, region=region)
        self._records = RequestRecords(self.metrics, log)
        self._routes = dict(extra_routes or {})
        self._prefixes = tuple(path for path in self._routes if path.endswith("/"))
        self._domains = (domain.lower(), _LOOPBACK_DOMAIN) if domain else (_LOOPBACK_DOMAIN,)
        self._cors_origins = cors_origins
        self._sweeper = Sweeper(self.limits)
        self._at_hand = AnswersAtHand(
            buckets, authenticator, domains=self._domains, is_route=lambda path: self._route(path) is not None
        )
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
            self._pool = ConnectionPool(
                self.handle,
                refusal=self._refuse_malformed,
                limits=self.limits,
                at_hand=self._at_hand,
                sweeper=self._sweeper,
                records=self._records,
            )
            self._sweeper.start()
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
        return len(self._sweeper.active)

    @property
    def exchanges(self) -> tuple[WatchedExchange, ...]:
        """Requests that are being answered."""
        return tuple(self._sweeper.active)

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
        while self._sweeper.active and loop.time() < end_s:
            await asyncio.sleep(min(0.02, max(0.0, end_s - loop.time())))
        is_finished = not self._sweeper.active
        await self.close()
        return is_finished

    async def close(self) -> None:
        """Close all connections at once; idempotent."""
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()
        for exchange in list(self._sweeper.active):
            exchange.break_off()
        if self._pool is not None:
            pool, self._pool = self._pool, None
            await pool.shutdown(1.0)
        await self._sweeper.close()

    # ── one request ────────────────────────────────────────────────────────────────────────────────────────────────

    async def handle(self, request: BaseRequest) -> StreamResponse:
        """Answer one request, whatever happens."""
        connection = request.protocol
        if isinstance(connection, ClientConnection):
            connection.head_arrived()
        if "Transfer-Encoding" in request.headers and not _has_plain_coding(request):
            refusal = self._refuse_malformed(request, 400)
            refusal.force_close()  # where the body ends is doubtful, so nothing behind it is a request
            return refusal
        if self._routes and (route := self._route(request.raw_path)) is not None:
            return await route(request)
        exchange = ClientExchange(request)
        self._sweeper.active.add(exchange)
        code = ""
        is_complete = False
        try:
            try:
                await self._answer(exchange)
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
            self._sweeper.active.discard(exchange)
            self._records.note(exchange, code, is_complete=is_complete)
            if isinstance(connection, ClientConnection):
                connection.answer_ended()
        return exchange.response or web.StreamResponse(status=499)

    def _route(self, raw_path: str) -> Route | None:
        path, _ = path_and_query(raw_path)
        if (route := self._routes.get(path)) is not None or not path.startswith(self._prefixes):
            return route
        return self._routes[max(filter(path.startswith, self._prefixes), key=len)]

    async def _answer(self, exchange: ClientExchange) -> None:
        request = exchange.request
        method = request.method
        headers = _joined(request)
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
        address = find_address(target.raw_path, headers.get("Host", ""), self._domains)
        exchange.bucket, exchange.key = address.bucket, address.key
        host_bucket = address.bucket if address.is_host_bucket else ""
        head = RequestHead(method, target.raw_path, target.raw_query, headers, host_bucket)
        verified = self._authenticator.verify(head)
        exchange.access_key = verified.caller.access_key
        query = parse_query(target.raw_query)
        if "Signature=" in target.raw_query and (more := take_headers(query)):
            headers = CIMultiDict({**more, **headers})
        gateway_request = GatewayRequest(
            method=method,
            bucket=address.bucket,
            key=address.key,
            query=query,
            headers=headers,
            caller=verified.caller,
            url=_public_url(request, headers, target),
            remote=request.remote or "",
            request_id=exchange.request_id,
        )
        await self._answer_verified(exchange, address, gateway_request, verified)

    async def _answer_verified(
        self, exchange: ClientExchange, address: Address, request: GatewayRequest, verified: VerifiedRequest
    ) -> None:
        name, bucket = await self._service.find(address, request) if address.bucket else ("", None)
        if name != address.bucket:
            request = dataclasses.replace(request, bucket=name)
            exchange.bucket = name
        limit = None if _is_upload(request) else self.limits.body_bytes_max
        body = LazyBody(exchange, verified.open_body, length_bytes_max=limit)
        await self._service.answer(exchange, bucket, request, body)

    async def _fail(self, exchange: ClientExchange, error: Exception) -> str:
        """Send an error document, or break the connection off if the answer has begun; return the error's code."""
        is_conditional = not _VERSION_HEADERS.isdisjoint(map(str.lower, exchange.request.headers))
        refusal = as_s3_error(error, is_conditional=is_conditional)
        is_refused = isinstance(error, S3Error) and error.status == 501  # the client asked for what is not done here
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

    def _refuse_malformed(self, request: BaseRequest, status: int) -> StreamResponse:
        """Return the answer to what is not a valid HTTP request, or to one that failed unexpectedly."""
        self.metrics.add("penstock_gateway_malformed_total")
        return _refusal(request, status)


def _has_plain_coding(request: BaseRequest) -> bool:
    """Whether the body of a request is sent in chunks and in no other coding, by a version of HTTP that has chunks.

    aiohttp accepts more, which a proxy before the gateway may read in another way: then the two see different requests.
    """
    return request.version >= HttpVersion11 and request.headers["Transfer-Encoding"].strip().lower() == "chunked"


def _joined(request: BaseRequest) -> Mapping[str, str]:
    """Return the headers of a request, repeated ones joined with commas; looking one up ignores case."""
    headers = request.headers
    if len(set(map(str.lower, headers))) == len(headers):
        return headers
    joined: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        if name.lower() == "host" and "Host" in joined:
            raise S3Error("InvalidRequest", "The request names more than one host.", status=400)
        joined[name] = f"{joined[name]},{value}" if name in joined else value
    return joined


def _check_head(request: BaseRequest, headers: Mapping[str, str], target: Target, limits: GatewayLimits) -> None:
    """Refuse a head that is too large or names no host."""
    raw_headers = request.raw_headers
    size_bytes = sum(map(len, chain.from_iterable(raw_headers))) + 4 * len(raw_headers)
    if size_bytes > limits.header_bytes_max:
        raise S3Error(
            "RequestHeaderSectionTooLarge",
            "Your request header and metadata section exceeds the maximum allowed size.",
            status=400,
            details={"MaxSizeAllowed": str(limits.header_bytes_max)},
        )
    if not target.host and not headers.get("Host") and request.version >= HttpVersion11:
        raise S3Error("InvalidRequest", "The request names no host.", status=400)


def _is_upload(request: GatewayRequest) -> bool:
    """Whether the body is an object or a part of one, which goes to a store as it arrives."""
    return request.method == "PUT" and bool(request.key) and request.query.keys() <= _UPLOAD_PARAMETERS


_VERSION_HEADERS = frozenset({"if-match", "if-unmodified-since"})
_UPLOAD_PARAMETERS = frozenset({"partNumber", "uploadId", "x-id"})


def _public_url(request: BaseRequest, headers: Mapping[str, str], target: Target) -> str:
    query = public_query(target.raw_query)
    host = target.host or headers.get("Host", "")
    return f"{request.scheme}://{host}{target.raw_path}{'?' + query if query else ''}"


def _refusal(request: BaseRequest, status: int) -> StreamResponse:
    """Return the answer to what is not a valid HTTP request, or to a request that failed unexpectedly."""
    exchange = ClientExchange(request)
    code, message = ("BadRequest", "The request is not valid HTTP.") if status < 500 else (
        "InternalError", "We encountered an internal error. Please try again.")  # fmt: skip
    body = error_document(code, message, resource="/", request_id=exchange.request_id, host_id=HOST_ID, details={})
    headers = {
        "Content-Type": XML_TYPE,
        "x-amz-request-id": exchange.request_id,
        **SERVER_HEADERS,
    }
    return web.Response(status=status, headers=headers, body=body)
