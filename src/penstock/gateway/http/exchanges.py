"""One request of a client and its answer: the body, facts for the sweeper and the log, and how the answer is sent or refused.

Head and body of an answer go to the transport together, and no byte of the body is copied. aiohttp's own response sends the
head by a system call of its own, or copies the body behind it. With signed GETs of 100 KB from the page cache, this cost a
fifth of the requests per second.
"""

from __future__ import annotations

import random
import secrets
import socket
import struct
import time
from contextlib import suppress
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from aiohttp import HttpVersion11, web
from aiohttp.client_exceptions import ClientError
from multidict import CIMultiDict

from penstock.errors import (
    WIRE,
    AccessDeniedError,
    BucketMissingError,
    CancelledOperationError,
    ConfigError,
    CredentialsError,
    DeadlineError,
    ObjectChangedError,
    ObjectExistsError,
    ObjectMissingError,
    PenstockError,
    SpanError,
    StoreError,
    ThrottledError,
    UnavailableError,
    UnsupportedFormatError,
)
from penstock.gateway.http.documents import XML_TYPE, error_document, http_date
from penstock.gateway.objects import S3Error
from penstock.gateway.s3_text import UPLOAD_MESSAGES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from aiohttp.web import BaseRequest

    from penstock.gateway.http.plain_requests import PlainRequest
    from penstock.gateway.objects import RequestBody
    from penstock.types import Buffer

HOST_ID = secrets.token_urlsafe(32)
"""ID of this process in answers (``x-amz-id-2``), by which its operators find the right log."""
SERVER_HEADERS = {"x-amz-id-2": HOST_ID, "Server": "penstock"}
"""Headers of every answer of this process."""
_numbers = random.Random(
    secrets.randbits(256)
)  # IDs of requests are not secret, and this avoids a system call for each
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
CLIENT_GONE = 499
"""Status in the log of a request whose client left before the answer had begun."""
_REASONS = {status.value: status.phrase for status in HTTPStatus}
_WITHOUT_LENGTH = (204, 304)
_LAST_CHUNK = b"0\r\n\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

RETRY_AFTER_S = "5"
"""When a client may ask again for what the upstream did not give, in seconds."""

_CODES: tuple[tuple[type[PenstockError], str, str], ...] = (
    (BucketMissingError, "NoSuchBucket", "The specified bucket does not exist"),
    (ObjectMissingError, "NoSuchKey", "The specified key does not exist."),
    (AccessDeniedError, "AccessDenied", "The gateway may not read this from its upstream."),
    (ObjectChangedError, "PreconditionFailed", "The object was replaced while it was being read."),
    (ObjectExistsError, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold."),
    (SpanError, "InvalidRange", "The requested range is not satisfiable"),
    (ThrottledError, "SlowDown", "Please reduce your request rate."),
    (DeadlineError, "GatewayTimeout", "The upstream did not answer in time."),
    (UnavailableError, "ServiceUnavailable", "The upstream is not available."),
    (UnsupportedFormatError, "NotImplemented", "The object is of a kind that cannot be read."),
    (ConfigError, "InvalidRequest", "The upstream cannot perform this request."),
)
"""Code and message of each class of error, subclasses first. The messages of the errors themselves may name hosts and paths."""


class ClientExchange:
    """One request and its answer.

    Args:
        request: The request.

    Attributes:
        request: The request.
        request_id: ID in the answer and in the log.
        started_s: When the request arrived, in seconds since 1970.
        access_key: ID of the key that signed it; empty until that was verified, and for anonymous requests.
        bucket: Name of the bucket; empty until it is known.
        key: Key; empty until it is known.
        sent_bytes: Bytes of the body that were given to the connection.
        received_bytes: Bytes of the request's body that have arrived.
        waits_for_client: Whether the answer goes on only when the client sends or takes bytes.
        status: Status of the answer; 499 if none has begun.
        is_broken: Whether the connection was broken off.
        response: The answer, once it has begun.
        more_headers: Headers of every answer to this request, e.g. those of CORS.
    """

    __slots__ = (
        "_began_s",
        "access_key",
        "bucket",
        "is_broken",
        "key",
        "more_headers",
        "received_bytes",
        "request",
        "request_id",
        "response",
        "sent_bytes",
        "started_s",
        "status",
        "waits_for_client",
    )

    def __init__(self, request: BaseRequest | PlainRequest) -> None:
        self.request = request
        self.request_id = f"{_numbers.getrandbits(64):016X}"
        self.started_s = time.time()
        self._began_s = time.monotonic()
        self.access_key = self.bucket = self.key = ""
        self.sent_bytes = self.received_bytes = 0
        self.waits_for_client = self.is_broken = False
        self.status = CLIENT_GONE
        self.response: DirectAnswer | None = None
        self.more_headers: Mapping[str, str] = {}

    @property
    def elapsed_s(self) -> float:
        """Seconds since the request arrived."""
        return time.monotonic() - self._began_s

    @property
    def has_begun(self) -> bool:
        """Whether the answer has begun."""
        return self.status != CLIENT_GONE

    def progress_bytes(self) -> int:
        """Return the bytes of both bodies that have passed the connection so far."""
        transport = self.request.transport
        waiting_bytes = transport.get_write_buffer_size() if transport is not None else 0
        return self.sent_bytes + self.received_bytes - waiting_bytes

    def break_off(self) -> None:
        """Reset the connection, so that the client cannot mistake a part for the whole answer."""
        self.is_broken = True
        break_off(self.request.transport)

    def begin(self, status: int, headers: Mapping[str, str], *, length_bytes: int | None) -> None:
        """Begin the answer. Its head is sent together with the first bytes of the body.

        Args:
            status: HTTP status.
            headers: Headers, without those that every answer has.
            length_bytes: Length of the body; None sends it in chunks.
        """
        found = headers if isinstance(headers, CIMultiDict) else CIMultiDict(headers)
        found["x-amz-request-id"] = self.request_id
        found.update(SERVER_HEADERS)
        if self.more_headers:
            found.update(self.more_headers)
        self.status = status
        self.response = DirectAnswer(self.request, status=status, headers=found, length_bytes=length_bytes)

    async def write(self, piece: Buffer) -> None:
        """Send bytes of the body, and wait until the operating system has taken them; the memory is free afterwards."""
        assert self.response is not None
        self.sent_bytes += len(piece)
        self.waits_for_client = True
        await self.response.write(piece)
        self.waits_for_client = False

    async def end(self) -> None:
        """End the answer. Only this makes a body in chunks complete."""
        assert self.response is not None
        self.waits_for_client = True
        await self.response.write_eof()
        self.waits_for_client = False

    async def answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Send a whole answer with a small body."""
        self.begin(status, headers, length_bytes=len(body))
        if body and self.request.method != "HEAD":
            await self.write(body)
        await self.end()

    async def refuse(self, error: S3Error) -> None:
        """Send an error document; a HEAD gets its status and headers."""
        headers = {"Content-Type": XML_TYPE, **error.headers}
        if error.status in (503, 504):
            headers.setdefault("Retry-After", RETRY_AFTER_S)
        if self.request.method == "HEAD" or error.status in (204, 304):
            self.begin(error.status, headers, length_bytes=0)
            await self.end()
            return
        resource = f"/{self.bucket}/{self.key}" if self.bucket else "/"
        body = error_document(
            error.code,
            error.message,
            resource=resource,
            request_id=self.request_id,
            host_id=HOST_ID,
            details=error.details,
        )
        await self.answer(error.status, headers, body)


def break_off(transport: object) -> None:
    """Reset a connection. The operating system drops unsent bytes, and the client sees an error."""
    if transport is None:
        return
    connection = transport.get_extra_info("socket")  # type: ignore[attr-defined]
    if connection is not None:
        with suppress(OSError):  # it is closed already
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    transport.abort()  # type: ignore[attr-defined]


class DirectAnswer(web.StreamResponse):
    """One answer. aiohttp learns from it only whether the connection stays open.

    Args:
        request: The request.
        status: HTTP status.
        headers: All headers but Date, Connection, Content-Length and Transfer-Encoding.
        length_bytes: Length of the body; None sends it in chunks.

    Raises:
        ValueError: A header contains a line break or a NUL.
    """

    def __init__(
        self, request: BaseRequest | PlainRequest, *, status: int, headers: Mapping[str, str], length_bytes: int | None
    ) -> None:
        super().__init__(status=status)
        self._request = request
        self._is_chunked = length_bytes is None and request.method != "HEAD"
        # What is left of the body, or a body that a client with "Expect: 100-continue" never sends, must not be taken for the
        # next request. After an offer to upgrade, aiohttp takes nothing on the connection for a request.
        self._stays_open = bool(request.keep_alive) and not request.can_read_body and "Upgrade" not in request.headers
        self._head = self._made_head(headers, length_bytes)
        self._is_ended = False

    def _made_head(self, headers: Mapping[str, str], length_bytes: int | None) -> bytes:
        version, status = self._request.version, self.status
        lines = [f"HTTP/{version.major}.{version.minor} {status_text(status)}\r\n{header_lines(headers)}"]
        lines.append(f"Date: {date_now()}\r\n")
        if self._is_chunked:
            lines.append("Transfer-Encoding: chunked\r\n")
        elif length_bytes is not None and status not in _WITHOUT_LENGTH:
            lines.append(f"Content-Length: {length_bytes}\r\n")
        if not self._stays_open:
            lines.append("Connection: close\r\n")
        elif version < HttpVersion11:
            lines.append("Connection: keep-alive\r\n")
        return as_sent("".join([*lines, "\r\n"]))

    @property
    def keep_alive(self) -> bool | None:
        """Whether the connection stays open."""
        return self._stays_open

    def force_close(self) -> None:
        """Close the connection after the answer, although the head may have said otherwise."""
        self._stays_open = False

    async def prepare(self, request: BaseRequest) -> Any:
        """Do nothing: the head is sent with the body."""

    async def write(self, data: Buffer) -> None:
        """Send bytes, and wait until the operating system has all of them.

        Raises:
            ConnectionResetError: The client has left.
        """
        head, self._head = self._head, b""
        if self._is_chunked:
            self._send([head + b"%x\r\n" % len(data), data, b"\r\n"])
        elif head:
            self._send([head, data])
        else:
            self._send([data])
        await self._request.writer.drain()

    async def write_eof(self, data: bytes = b"") -> None:
        """End the answer; idempotent. aiohttp calls it again, also after a connection was broken off."""
        if self._is_ended:
            return
        self._is_ended = True
        rest, self._head = self._head + data, b""
        if self._is_chunked:
            rest += _LAST_CHUNK
        if rest:
            self._send([rest])
            await self._request.writer.drain()

    def _send(self, pieces: list[Buffer]) -> None:
        transport = self._request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has left")
        transport.writelines(pieces)


def status_text(status: int) -> str:
    """Return a status with its phrase, as the first line of an answer has it."""
    return f"{status} {_REASONS.get(status, 'Unknown')}"


def header_lines(headers: Mapping[str, str]) -> str:
    """Return headers as lines, each with its line break.

    Raises:
        ValueError: A header contains a line break or a NUL.
    """
    text = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if text.count("\r") != len(headers) or text.count("\n") != len(headers) or "\0" in text:
        raise ValueError("a header contains a line break or a NUL")
    return text


def date_now() -> str:
    """Return the value of ``Date`` for an answer that begins now."""
    return _date(int(time.time()))


@lru_cache(maxsize=4)
def _date(now_s: int) -> str:
    return http_date(now_s)


def as_sent(head: str) -> bytes:
    """Return the head of an answer in bytes; surrogates become the bytes that they stand for."""
    return head.encode("utf-8", "surrogateescape")


class LazyBody:
    """A ``RequestBody`` that is opened when it is first read. A body that is not needed is not read.

    Args:
        exchange: The request.
        open_body: Makes the decoded body of the bytes that arrive.
        length_bytes_max: Largest body in bytes, as it is sent; None for no limit.
    """

    def __init__(
        self,
        exchange: ClientExchange,
        open_body: Callable[[AsyncIterator[bytes]], RequestBody],
        *,
        length_bytes_max: int | None,
    ) -> None:
        self._exchange = exchange
        self._length_bytes_max = length_bytes_max
        self._open_body = open_body
        self._opened: RequestBody | None = None

    @property
    def _body(self) -> RequestBody:
        if self._opened is None:
            self._opened = self._open_body(self._pieces())
        return self._opened

    @property
    def length_bytes(self) -> int | None:
        """Length of the decoded body; None if the client did not send it."""
        return self._body.length_bytes

    @property
    def checksums(self) -> Mapping[str, str]:
        """Checksums that the body matched; see ``RequestBody``."""
        return self._body.checksums

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._body.__aiter__()

    async def _pieces(self) -> AsyncIterator[bytes]:
        exchange, limit = self._exchange, self._length_bytes_max
        request = exchange.request
        if limit is not None and (request.content_length or 0) > limit:
            raise _too_large(limit)
        if request.headers.get("Expect", "").lower() == "100-continue" and request.version >= HttpVersion11:
            transport = request.transport
            if transport is None:
                raise ConnectionResetError("the client has left")
            transport.write(_CONTINUE)
        content = request.content
        while True:
            exchange.waits_for_client = True
            try:
                piece = await content.readany()
            except ClientError:
                raise S3Error(
                    "IncompleteBody", "You did not provide the number of bytes that the request announced."
                ) from None
            finally:
                exchange.waits_for_client = False
            if not piece:
                return
            exchange.received_bytes += len(piece)
            if limit is not None and exchange.received_bytes > limit:
                raise _too_large(limit)
            yield piece


def _too_large(limit: int) -> S3Error:
    return S3Error(
        "MaxMessageLengthExceeded", "Your request was too big.", details={"MaxMessageLengthBytes": str(limit)}
    )


def as_s3_error(error: Exception, *, is_conditional: bool) -> S3Error:
    """Return an error in S3's terms. Its message names neither the upstream nor a path; the log has the original.

    Args:
        error: The error.
        is_conditional: Whether the request named a version. Otherwise its client, which did nothing wrong, gets a status
            with which AWS's clients try again, and reads the new version.
    """
    if isinstance(error, S3Error):
        return error
    if isinstance(error, ObjectChangedError) and not is_conditional:
        return S3Error("ServiceUnavailable", "The object was replaced while it was being read.")
    if isinstance(error, CredentialsError):  # the gateway's own, whatever the client's keys may do
        message = "The gateway could not use its upstream; the gateway's log says why."
        return S3Error("UpstreamAccessDenied", message, status=502)
    if isinstance(error, StoreError) and error.code in UPLOAD_MESSAGES:
        return S3Error(error.code, UPLOAD_MESSAGES[error.code])
    if isinstance(error, PenstockError):
        _, status = WIRE.get(type(error), WIRE[PenstockError])
        if isinstance(error, CancelledOperationError):
            status = 503
        for kind, code, message in _CODES:
            if isinstance(error, kind):
                return S3Error(code, message, status=status)
        return S3Error("InternalError", "The object could not be read; the gateway's log says why.", status=status)
    return S3Error("InternalError", "We encountered an internal error. Please try again.")
