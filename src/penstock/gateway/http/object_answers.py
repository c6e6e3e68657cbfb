"""GET and HEAD of an object: conditions, ranges, part numbers, headers, and the bytes.

An answer begins after the first piece has been read, so an earlier error becomes an error document. A later error, or
a body of another length than announced, breaks the connection off.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from aiohttp import HttpVersion11
from multidict import CIMultiDict

from penstock.gateway.http.conditions import (
    check_conditions,
    has_conditions,
    parse_part_number,
    parse_range,
    part_range,
    still_matches,
)
from penstock.gateway.http.documents import http_date
from penstock.gateway.http.exchanges import SERVER_HEADERS, as_sent, date_now, header_lines, status_text
from penstock.gateway.objects import S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from penstock.gateway.http.conditions import WantedRange
    from penstock.gateway.http.exchanges import ClientExchange
    from penstock.gateway.objects import Bucket, CachedObject, GatewayRequest, ObjectHead, OpenObject
    from penstock.types import Buffer, ByteRange

_OVERRIDES = {
    "response-content-type": "Content-Type",
    "response-content-language": "Content-Language",
    "response-expires": "Expires",
    "response-cache-control": "Cache-Control",
    "response-content-disposition": "Content-Disposition",
    "response-content-encoding": "Content-Encoding",
}
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_IN_NOT_MODIFIED = frozenset({"cache-control", "expires", "content-location", "vary"})
_DEFAULT_TYPE = "binary/octet-stream"
_CHECKSUM_PREFIX = "x-amz-checksum-"


class Wanted(NamedTuple):
    """Which bytes of an object a request names.

    Attributes:
        range: Range of the header; None for none.
        part_number: Number of a part; None for none.
    """

    range: WantedRange | None
    part_number: int | None

    @classmethod
    def parse(cls, request: GatewayRequest) -> Wanted:
        """Parse the header and the query of a request.

        Raises:
            S3Error: There are both, or the number of the part is not valid.
        """
        number = parse_part_number(request.query.get("partNumber"))
        header = request.headers.get("Range")
        if number is not None and header is not None:
            raise S3Error("InvalidRequest", "Cannot specify both Range header and partNumber query parameter")
        return cls(parse_range(header), number)

    def for_version(self, request: GatewayRequest, head: ObjectHead) -> Wanted:
        """Return the range to send of one version: all of it if ``If-Range`` names another version."""
        condition = request.headers.get("If-Range") if self.range is not None else None
        return Wanted(None, None) if condition is not None and not still_matches(condition, head) else self

    def is_everything(self) -> bool:
        """Whether the whole object is wanted."""
        return self.range is None and self.part_number is None

    def span(self, head: ObjectHead, size_bytes: int) -> ByteRange | None:
        """Return the bytes that are wanted; None if there are none.

        Raises:
            S3Error: The object has no such bytes.
        """
        if self.range is not None:
            return self.range.within(size_bytes)
        assert self.part_number is not None
        return part_range(self.part_number, head.part_sizes_bytes, size_bytes)


async def answer_head(exchange: ClientExchange, bucket: Bucket, request: GatewayRequest) -> None:
    """Answer a HEAD of an object."""
    wanted = Wanted.parse(request)
    overrides = _overrides(request)
    head = await bucket.head(request)
    if check_conditions(request.headers, head) == 304:
        await _not_modified(exchange, head)
        return
    wanted = wanted.for_version(request, head)
    assert head.size_bytes is not None
    if wanted.is_everything():
        exchange.begin(200, _headers(request, head, overrides, None), length_bytes=head.size_bytes)
    else:
        span = wanted.span(head, head.size_bytes)
        headers = _headers(request, head, overrides, span, is_whole=False)
        _add_part(headers, wanted, head, request)
        length_bytes = span.length_bytes if span is not None else 0
        exchange.begin(206 if span is not None else 200, headers, length_bytes=length_bytes)
    await exchange.end()


def answer_in_memory(exchange: ClientExchange, opened: CachedObject, body: memoryview, *, is_part: bool) -> None:
    """Answer a GET of bytes that are in memory, without waiting until the operating system has taken them.

    Args:
        exchange: The exchange, whose request has no conditions.
        opened: The object.
        body: Bytes of the object, at least one: uint8[n].
        is_part: Whether the request names a range.
    """
    transport = exchange.request.transport
    if transport is None or transport.is_closing():
        raise ConnectionResetError("the client has left")
    head = opened.head
    exchange.status = 206 if is_part else 200
    with_checksums = not is_part and wants_checksums(exchange.request.headers)
    lines = _version_lines(tuple(head.headers.items()), head.etag, head.last_modified_s, with_checksums=with_checksums)
    if is_part:
        assert opened.span is not None
        assert head.size_bytes is not None
        lines += f"Content-Range: {content_range(opened.span, head.size_bytes)}\r\n"
    first = f"HTTP/1.1 {status_text(exchange.status)}\r\n{lines}x-amz-request-id: {exchange.request_id}\r\n"
    exchange.sent_bytes = len(body)
    transport.writelines([as_sent(f"{first}Date: {date_now()}\r\nContent-Length: {len(body)}\r\n\r\n"), body])


@lru_cache(maxsize=4096)
def _version_lines(
    described: tuple[tuple[str, str], ...], etag: str, last_modified_s: float, *, with_checksums: bool
) -> str:
    """Return the lines that every answer with this version of an object has."""
    headers = version_headers(described, etag, last_modified_s, with_checksums=with_checksums)
    return header_lines({**headers, **SERVER_HEADERS})


async def answer_get(
    exchange: ClientExchange,
    open_object: Callable[[GatewayRequest, ByteRange | None], Awaitable[OpenObject]],
    request: GatewayRequest,
) -> None:
    """Answer a GET of an object, which a function opens as ``Bucket.open`` does."""
    wanted = Wanted.parse(request)
    overrides = _overrides(request)
    opened = await open_object(request, wanted.range.hint if wanted.range is not None else None)
    try:
        if has_conditions(request.headers) and check_conditions(request.headers, opened.head) == 304:
            await _not_modified(exchange, opened.head)
            return
        wanted = wanted.for_version(request, opened.head)
        await _send(exchange, opened, request, wanted, overrides)
    finally:
        await opened.close()


async def _send(
    exchange: ClientExchange, opened: OpenObject, request: GatewayRequest, wanted: Wanted, overrides: Mapping[str, str]
) -> None:
    span, status = None, 200
    is_old = exchange.request.version < HttpVersion11  # such a client takes a broken-off body for the whole one
    if not wanted.is_everything() or (is_old and opened.head.size_bytes is None):
        size_bytes = await opened.wait_size_bytes()
        if not wanted.is_everything():
            span = wanted.span(opened.head, size_bytes)
            if span is not None:
                status = 206
        if size_bytes == 0 or (span is None and status != 206 and not wanted.is_everything()):
            await _send_empty(exchange, opened.head, request, wanted, overrides)
            return
    pieces = opened.read(span)
    try:
        first = await anext(pieces, None)
        head = opened.head
        headers = _headers(request, head, overrides, span, is_whole=span is None)
        _add_part(headers, wanted, head, request)
        length_bytes = span.length_bytes if span is not None else head.size_bytes
        exchange.begin(status, headers, length_bytes=length_bytes)
        if first is not None:
            await exchange.write(first)
            del first
            async for piece in pieces:
                await exchange.write(piece)
                del piece
    finally:
        await _close(pieces)
    if length_bytes is not None and exchange.sent_bytes != length_bytes:
        raise S3Error("InternalError", f"{exchange.sent_bytes} of {length_bytes} bytes were sent.")
    await exchange.end()


async def _close(pieces: AsyncIterator[Buffer]) -> None:
    """End a generator now, in this task, and not when it is collected."""
    aclose = getattr(pieces, "aclose", None)  # cheaper than isinstance(pieces, AsyncGenerator)
    if aclose is not None:
        await aclose()


async def _send_empty(
    exchange: ClientExchange, head: ObjectHead, request: GatewayRequest, wanted: Wanted, overrides: Mapping[str, str]
) -> None:
    headers = _headers(request, head, overrides, None)
    _add_part(headers, wanted, head, request)
    exchange.begin(200, headers, length_bytes=0)
    await exchange.end()


async def _not_modified(exchange: ClientExchange, head: ObjectHead) -> None:
    headers = {name: value for name, value in head.headers.items() if name.lower() in _IN_NOT_MODIFIED}
    headers["ETag"] = head.etag
    headers["Last-Modified"] = http_date(head.last_modified_s)
    exchange.begin(304, headers, length_bytes=0)
    await exchange.end()


def _headers(
    request: GatewayRequest,
    head: ObjectHead,
    overrides: Mapping[str, str],
    span: ByteRange | None,
    *,
    is_whole: bool = True,
) -> CIMultiDict[str]:
    described = tuple(head.headers.items())
    with_checksums = is_whole and wants_checksums(request.headers)
    headers = version_headers(described, head.etag, head.last_modified_s, with_checksums=with_checksums).copy()
    if span is not None:
        assert head.size_bytes is not None
        headers["Content-Range"] = content_range(span, head.size_bytes)
    if overrides:
        headers.update(overrides)
    return headers


def wants_checksums(headers: Mapping[str, str]) -> bool:
    """Whether a request asks for the checksums of the object; they are sent only with the whole of it."""
    return headers.get("x-amz-checksum-mode", "").upper() == "ENABLED"


def content_range(span: ByteRange, size_bytes: int) -> str:
    """Return the value of ``Content-Range`` for a range of an object."""
    return f"bytes {span.start}-{span.end - 1}/{size_bytes}"


@lru_cache(maxsize=4096)
def version_headers(
    described: tuple[tuple[str, str], ...], etag: str, last_modified_s: float, *, with_checksums: bool
) -> CIMultiDict[str]:
    """Return the headers that every answer with this version of an object has; the caller must not change them.

    Args:
        described: Headers of the object, as in ``ObjectHead.headers``.
        etag: ETag with its quotes.
        last_modified_s: Time of the last change, in seconds since 1970.
        with_checksums: Whether to include the object's checksums.
    """
    headers = CIMultiDict({"ETag": "", "Last-Modified": "", "Accept-Ranges": "bytes", "Content-Type": _DEFAULT_TYPE})
    headers.update(
        {name: value for name, value in described if with_checksums or not name.lower().startswith(_CHECKSUM_PREFIX)}
    )
    headers["ETag"] = etag
    headers["Last-Modified"] = http_date(last_modified_s)
    return headers


def _add_part(headers: CIMultiDict[str], wanted: Wanted, head: ObjectHead, request: GatewayRequest) -> None:
    """Add the headers of an answer with one part: the number of parts, and the checksum of this part."""
    number = wanted.part_number
    if number is None:
        return
    if head.part_sizes_bytes:
        headers["x-amz-mp-parts-count"] = str(len(head.part_sizes_bytes))
    if not wants_checksums(request.headers) or (head.part_sizes_bytes and not head.part_checksums):
        return
    for name, value in head.headers.items():
        if name.lower().startswith(_CHECKSUM_PREFIX):
            is_sum = bool(head.part_checksums) and name.lower() != f"{_CHECKSUM_PREFIX}type"
            headers[name] = head.part_checksums[number - 1] if is_sum else value


def _overrides(request: GatewayRequest) -> dict[str, str]:
    """Return the headers that the query sets.

    Raises:
        S3Error: The request is not signed, so that anybody could have made such a link; or a value is not a header's.
    """
    if not request.query:
        return {}
    found = {header: request.query[name] for name, header in _OVERRIDES.items() if name in request.query}
    if not found:
        return {}
    if not request.caller.access_key:
        raise S3Error("InvalidRequest", "Request specific response headers cannot be used for anonymous GET requests.")
    for value in found.values():
        if _CONTROL.search(value):
            raise S3Error("InvalidArgument", "The value of a header contains a control character.")
    return found
