"""An internal endpoint with one source object and results in memory, for tests of handlers without the rest of the gateway."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from penstock.gateway.aws_lambda import PATH, InternalEndpoint, LambdaTransform, WriteGetObjectResponse
from penstock.gateway.config import AccessPoint, LambdaConfig
from penstock.gateway.objects import (
    Caller,
    GatewayRequest,
    ObjectHead,
    S3Error,
    Transform,
)


class MemoryResult:
    """Takes a result into memory, as ``ResultWriter``."""

    def __init__(self) -> None:
        self.headers: Mapping[str, str] = {}
        self.size_bytes: int | None = None
        self.data = bytearray()
        self.write_bytes_max = 1 << 40
        self.pieces: asyncio.Queue[bytes] = asyncio.Queue()
        self._memory = bytearray(65536)

    def begin(self, headers: Mapping[str, str], *, size_bytes: int | None = None) -> None:
        self.headers, self.size_bytes = dict(headers), size_bytes

    async def write(self, data: Any) -> None:
        if len(self.data) + len(data) > self.write_bytes_max:
            raise S3Error("EntityTooLarge", "The result is too long.", status=400)
        self.data += data
        self.pieces.put_nowait(bytes(data))

    def buffer(self) -> memoryview:
        return memoryview(self._memory)

    async def filled(self, length_bytes: int) -> None:
        await self.write(self._memory[:length_bytes])


class MemorySource:
    """A source object that the endpoint serves at ``/source``."""

    def __init__(self, endpoint: Endpoint, data: bytes, key: str) -> None:
        self.key = key
        self.head = ObjectHead(key=key, size_bytes=len(data), etag='"1"', last_modified_s=0)
        self.data = data
        self.signed: dict[str, str] = {}
        self._endpoint = endpoint

    def worker_url(self) -> tuple[str, str]:
        return f"http://127.0.0.1:{self._endpoint.port}", "source"

    def signed_url(self, headers: Mapping[str, str]) -> str:
        self.signed = dict(headers)
        names = "%3B".join(["host", *sorted(name.lower() for name in headers)])
        return f"http://127.0.0.1:{self._endpoint.port}/source?X-Amz-SignedHeaders={names}&X-Amz-Signature=0"

    async def read(self, span: Any = None) -> AsyncIterator[bytes]:
        yield self.data if span is None else self.data[span.start : span.end]


class Endpoint:
    """The server. ``posts`` and ``gets`` are the headers of all requests to ``WriteGetObjectResponse`` and of the source."""

    def __init__(self, data: bytes) -> None:
        self.port = 0
        self.posts: list[dict[str, str]] = []
        self.gets: list[dict[str, str]] = []
        self.source_headers: dict[str, str] = {}
        self.source_error: tuple[int, bytes] | None = None
        self.transforms: list[LambdaTransform] = []
        self.source = MemorySource(self, data, "folder/a b.tar")
        self.routes: dict[str, Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]] = {}
        self.internal: InternalEndpoint
        self._write: WriteGetObjectResponse

    def attach(self, port: int) -> None:
        """Begin to accept answers."""
        self.port = port
        self.internal = InternalEndpoint(port)
        self._write = WriteGetObjectResponse(self.internal)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        for prefix, route in self.routes.items():
            if request.path.startswith(prefix):
                return await route(request)
        if request.path == PATH:
            self.posts.append(dict(request.headers))
            return await self._write(request)
        self.gets.append(dict(request.headers))
        if self.source_error is not None:
            return web.Response(status=self.source_error[0], body=self.source_error[1])
        data, headers = self.source.data, {"ETag": '"1"', **self.source_headers}
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))
        if span is None:
            return web.Response(body=data, headers=headers)
        if int(span[1]) >= len(data):
            return web.Response(status=416, headers={"Content-Range": f"bytes */{len(data)}", "ETag": '"1"'})
        part = data[int(span[1]) : int(span[2]) + 1]
        shown = f"bytes {span[1]}-{int(span[1]) + len(part) - 1}/{len(data)}"
        return web.Response(status=206, body=part, headers={"ETag": '"1"', "Content-Range": shown})

    def transform(self, config: LambdaConfig, **settings: Any) -> LambdaTransform:
        """A transform of this endpoint, which is closed with it."""
        settings = {"name": "ap", "upstream": "memory://", "processes": 1} | settings
        made = LambdaTransform(AccessPoint(handler=config, **settings), self.internal)
        self.transforms.append(made)
        return made

    def request(self, **changes: Any) -> GatewayRequest:
        """A GET of the source object."""
        fields: dict[str, Any] = {
            "method": "GET",
            "bucket": "ap",
            "key": self.source.key,
            "query": {},
            "headers": {"Host": "gateway"},
            "caller": Caller("AKUSER", False),
            "url": "http://gateway/ap/folder/a%20b.tar",
            "remote": "127.0.0.1",
            "request_id": "REQ1",
        }
        return GatewayRequest(**(fields | changes))

    async def run(self, transform: Transform, **changes: Any) -> MemoryResult:
        """Produce a result for a GET."""
        request = self.request(**changes)
        result = MemoryResult()
        await transform.run(self.source, request, transform.arguments(request), result)
        return result


@asynccontextmanager
async def endpoint(data: bytes = b"hello world") -> AsyncIterator[Endpoint]:
    """Serve on a free port of loopback."""
    made = Endpoint(data)
    runner = web.ServerRunner(web.Server(made.handle, lingering_time=0.0), shutdown_timeout=0.2)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.attach(runner.addresses[0][1])
    try:
        yield made
    finally:
        for transform in made.transforms:
            await transform.close()
        await runner.cleanup()
