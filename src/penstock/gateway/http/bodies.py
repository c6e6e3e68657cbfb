"""The body of a request as it arrives, within limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import HttpVersion11
from aiohttp.client_exceptions import ClientError

from penstock.gateway.objects import S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from penstock.gateway.http.exchanges import ClientExchange
    from penstock.gateway.objects import RequestBody

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


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
                    "IncompleteBody", "You did not provide the number of bytes that the request announced.", status=400
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
        "MaxMessageLengthExceeded",
        "Your request was too big.",
        status=400,
        details={"MaxMessageLengthBytes": str(limit)},
    )
