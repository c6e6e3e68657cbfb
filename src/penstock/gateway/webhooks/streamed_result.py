"""A result that is sent as it is made, as a webhook's response."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from penstock.config import KIB
from penstock.gateway.aws_lambda.forwarded import METADATA_PREFIX, PREFIX
from penstock.gateway.objects import S3Error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.types import Buffer

BUFFER_BYTES = 256 * KIB


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
            self._headers[name if is_metadata else f"{PREFIX}{name}"] = value

    async def write(self, data: Buffer) -> None:
        """Send bytes. Raises ``S3Error`` if the result is too long, or the client has gone."""
        self._sent_bytes += len(data)
        limit = self._output_bytes_max if self._size_bytes is None else self._size_bytes
        if self._sent_bytes > limit:
            raise S3Error("EntityTooLarge", f"The result has more than {limit} bytes.", status=400)
        try:
            response = self._response or await self._prepare()
            await response.write(bytes(data))  # the caller may reuse the memory while the socket is busy
        except ConnectionError as error:
            raise S3Error("ConnectionClosed", "The client has gone.", status=400) from error

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
            what = f"The result has {self._sent_bytes} bytes instead of {self._size_bytes}."
            raise S3Error("InternalError", what, status=500)
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
