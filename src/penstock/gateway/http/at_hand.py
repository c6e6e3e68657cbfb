"""GETs of objects that are in memory, answered at once: without a task, and without waiting for anything.

Most reads of a warm cache are plain: a GET of a small object or range, from a client that keeps its connection. The front would
answer them in the steps of any other request: aiohttp's request, a task, and a dozen coroutines. Here, one function call either
answers the request completely, or sends nothing and leaves it to the front. Nothing is refused here: if a request is wrong, or
unusual in any way, the front says so.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from penstock.gateway.http.addressing import find_address, parse_query, path_and_query
from penstock.gateway.http.byte_ranges import parse_range
from penstock.gateway.http.conditions import has_conditions
from penstock.gateway.http.direct_answer import as_sent, date_now, header_lines, status_text
from penstock.gateway.http.exchanges import SERVER_HEADERS, WatchedExchange
from penstock.gateway.http.object_answers import content_range, version_headers, wants_checksums
from penstock.gateway.objects import RequestHead
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.gateway.http.plain_requests import PlainRequest
    from penstock.gateway.objects import Authenticator, BucketTable, ObjectAtHand
    from penstock.types import Buffer

_PARAMETERS = frozenset({"x-id"})
"""Parameters that change nothing about a GET: some SDKs send the operation's name."""


class AnswersAtHand:
    """Answers plain requests whose object is in memory.

    Args:
        buckets: The buckets and access points.
        authenticator: Verifies signatures, and says who may use which bucket.
        domains: Domains whose subdomains are bucket names.
        is_route: Whether a path is not S3's.
    """

    def __init__(
        self,
        buckets: BucketTable,
        authenticator: Authenticator,
        *,
        domains: tuple[str, ...],
        is_route: Callable[[str], bool],
    ) -> None:
        self._buckets = buckets
        self._authenticator = authenticator
        self._domains = domains
        self._is_route = is_route

    def answer(self, request: PlainRequest) -> WatchedExchange | None:
        """Answer a request if that needs no waiting.

        Returns:
            The exchange, after its answer was given to the connection, which may still be sending it; None if nothing was
            sent, so that the front must answer the request.
        """
        exchange = WatchedExchange(request)
        try:
            found = self._found(exchange, request)
        except Exception:  # the front meets the same error, and answers and logs it
            return None
        transport = request.transport
        if found is None or transport is None or transport.is_closing():
            return None
        head, body = found
        exchange.sent_bytes = len(body)
        transport.writelines([head, body])
        return exchange

    def _found(self, exchange: WatchedExchange, request: PlainRequest) -> tuple[bytes, Buffer] | None:
        """Return head and body of the answer; None if it is not at hand.

        Raises:
            S3Error: The request is refused.
        """
        headers = request.headers
        raw_path, raw_query = path_and_query(request.raw_path)
        if "Origin" in headers or has_conditions(headers) or "If-Range" in headers or self._is_route(raw_path):
            return None
        address = find_address(raw_path, headers.get("Host", ""), self._domains)
        bucket = self._buckets.at_hand(address.bucket)
        known = bucket.known(address.key) if bucket is not None else None
        if known is None or (raw_query and parse_query(raw_query).keys() - _PARAMETERS):
            return None
        host_bucket = address.bucket if address.is_host_bucket else ""
        verified = self._authenticator.verify(RequestHead("GET", raw_path, raw_query, headers, host_bucket))
        if not self._authenticator.may_use(verified.caller, address.bucket):
            return None
        exchange.bucket, exchange.key, exchange.access_key = address.bucket, address.key, verified.caller.access_key
        return _read(exchange, request, known)


def _read(exchange: WatchedExchange, request: PlainRequest, known: ObjectAtHand) -> tuple[bytes, Buffer] | None:
    """Return head and body of the answer to a verified request."""
    head = known.head
    size_bytes = head.size_bytes
    if not size_bytes:
        return None
    wanted = parse_range(request.headers.get("Range"))
    span = wanted.within(size_bytes) if wanted is not None else ByteRange(0, size_bytes)
    body = known.read_nowait(span)
    if body is None:
        return None
    exchange.status = 200 if wanted is None else 206
    with_checksums = wanted is None and wants_checksums(request.headers)
    described = tuple(head.headers.items())
    lines = _version_lines(described, head.etag, head.last_modified_s, with_checksums=with_checksums)
    if wanted is not None:
        lines += f"Content-Range: {content_range(span, size_bytes)}\r\n"
    first = f"HTTP/1.1 {status_text(exchange.status)}\r\n{lines}x-amz-request-id: {exchange.request_id}\r\n"
    return as_sent(f"{first}Date: {date_now()}\r\nContent-Length: {len(body)}\r\n\r\n"), body


@lru_cache(maxsize=4096)
def _version_lines(
    described: tuple[tuple[str, str], ...], etag: str, last_modified_s: float, *, with_checksums: bool
) -> str:
    """Return the lines that every answer with this version of an object has."""
    headers = version_headers(described, etag, last_modified_s, with_checksums=with_checksums)
    return header_lines({**headers, **SERVER_HEADERS})
