"""One request of a client and its answer: what the sweeper, the log and the sending code know about it."""

from __future__ import annotations

import random
import secrets
import socket
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from multidict import CIMultiDict

from penstock.gateway.http.direct_answer import DirectAnswer
from penstock.gateway.http.documents import XML_TYPE, error_document

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping

    from aiohttp.web import BaseRequest

    from penstock.gateway.objects import S3Error
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


class ClientRequest(Protocol):
    """What a log tells of a request, and its connection. aiohttp's requests are such, and ``PlainRequest``."""

    @property
    def method(self) -> str:
        """HTTP method."""

    @property
    def raw_path(self) -> str:
        """Target of the request line, as it was sent."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers; looking one up ignores case."""

    @property
    def remote(self) -> str | None:
        """Address of the client."""

    @property
    def transport(self) -> asyncio.Transport | None:
        """The connection; None if it was closed."""


class WatchedExchange:
    """One request and its answer, as the sweeper, the log and the status page see it.

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
    """

    __slots__ = (
        "_began_s",
        "access_key",
        "bucket",
        "is_broken",
        "key",
        "received_bytes",
        "request",
        "request_id",
        "sent_bytes",
        "started_s",
        "status",
        "waits_for_client",
    )

    def __init__(self, request: ClientRequest) -> None:
        self.request = request
        self.request_id = f"{_numbers.getrandbits(64):016X}"
        self.started_s = time.time()
        self._began_s = time.monotonic()
        self.access_key = self.bucket = self.key = ""
        self.sent_bytes = self.received_bytes = 0
        self.waits_for_client = self.is_broken = False
        self.status = CLIENT_GONE

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
        """Reset the connection, so that the client cannot take what it has for the whole answer."""
        self.is_broken = True
        break_off(self.request.transport)


class ClientExchange(WatchedExchange):
    """One request and its answer, for the code that sends it.

    Args:
        request: The request.

    Attributes:
        response: The answer, once it has begun.
        more_headers: Headers of every answer to this request, e.g. those of CORS.
    """

    __slots__ = ("more_headers", "response")

    request: BaseRequest

    def __init__(self, request: BaseRequest) -> None:
        super().__init__(request)
        self.response: DirectAnswer | None = None
        self.more_headers: Mapping[str, str] = {}

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
    """Reset a connection. The operating system drops what it has not sent, and the client sees an error."""
    if transport is None:
        return
    connection = transport.get_extra_info("socket")  # type: ignore[attr-defined]
    if connection is not None:
        with suppress(OSError):  # it is closed already
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    transport.abort()  # type: ignore[attr-defined]
