"""A bucket in memory and a transform from a function, for tests of results without HTTP and without processes."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.cache.config import CacheConfig
from penstock.config import KIB, MIB
from penstock.errors import ObjectMissingError
from penstock.gateway.buckets.transformed import TransformedBucket
from penstock.gateway.config import AccessPoint
from penstock.gateway.objects import (
    Answer,
    Caller,
    GatewayRequest,
    ObjectHead,
    OpenObject,
    RequestBody,
    ResultWriter,
    Source,
)
from penstock.gateway.results.context import ResultsConfig
from penstock.gateway.results.results import Results
from penstock.gateway.results.storage import open_storage
from penstock.store.base import Store
from penstock.types import Buffer, ByteRange, ListPage, ObjectInfo, Page

BLOCK_BYTES = 16 * KIB

RunFunction = Callable[[Source, Mapping[str, str], ResultWriter], Awaitable[None]]


def request_of(
    key: str, *, method: str = "GET", query: Mapping[str, str] | None = None, **headers: str
) -> GatewayRequest:
    """Return a request; underscores in names of headers stand for dashes."""
    return GatewayRequest(
        method=method,
        bucket="point",
        key=key,
        query=query or {},
        headers={name.replace("_", "-"): value for name, value in headers.items()},
        caller=Caller("key", may_write=False),
        url=f"http://127.0.0.1:1/point/{key}",
        remote="127.0.0.1",
        request_id="0",
    )


class MemoryObject:
    """An object of a ``MemoryBucket`` that is being read."""

    def __init__(self, head: ObjectHead, data: bytes) -> None:
        self.head = head
        self._data = data

    async def wait_size_bytes(self) -> int:
        """Return its size."""
        return len(self._data)

    async def read(self, span: ByteRange | None) -> AsyncIterator[Buffer]:
        """Iterate over its bytes in pieces of 4 KiB."""
        start, end = span or (0, len(self._data))
        for offset in range(start, min(end, len(self._data)), 4 * KIB):
            yield self._data[offset : min(end, offset + 4 * KIB)]

    async def close(self) -> None:
        """Do nothing."""


class MemoryBucket:
    """A bucket of objects in memory; changing ``objects`` replaces them."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.name = "sources"
        self.created_s = 0.0
        self.objects = objects

    def _head(self, key: str) -> ObjectHead:
        if key not in self.objects:
            raise ObjectMissingError(f"no object {key}", status=404)
        data = self.objects[key]
        return ObjectHead(key=key, size_bytes=len(data), etag=f'"{hashlib.md5(data).hexdigest()}"', last_modified_s=1e9)

    async def head(self, request: GatewayRequest) -> ObjectHead:
        """Describe an object."""
        return self._head(request.key)

    async def open(self, request: GatewayRequest, hint: ByteRange | None) -> OpenObject:
        """Begin to read an object."""
        return MemoryObject(self._head(request.key), self.objects[request.key])

    async def list_objects(self, request: GatewayRequest, operation: ListPage) -> Page | Answer:
        """Return one page; tokens are keys."""
        objects: list[ObjectInfo] = []
        prefixes: list[str] = []
        after = max(operation.start_after, operation.token or "")
        for key in sorted(key for key in self.objects if key.startswith(operation.prefix) and key > after):
            rest = key[len(operation.prefix) :]
            if operation.delimiter and operation.delimiter in rest:
                common = operation.prefix + rest.partition(operation.delimiter)[0] + operation.delimiter
                if after.startswith(common) or (prefixes and prefixes[-1] == common):
                    continue
            if len(objects) + len(prefixes) == operation.keys_max:
                return Page(objects, prefixes, max([info.key for info in objects] + prefixes))
            if operation.delimiter and operation.delimiter in rest:
                prefixes.append(common)
            else:
                head = self._head(key)
                objects.append(ObjectInfo(key, len(self.objects[key]), head.etag, head.last_modified_s))
        return Page(objects, prefixes, None)

    async def perform(self, request: GatewayRequest, body: RequestBody) -> Answer:
        """Answer anything."""
        return Answer(body=b"other")

    async def close(self) -> None:
        """Do nothing."""


@dataclass
class FunctionTransform:
    """A transform from a function, which counts its runs."""

    function: RunFunction
    name: str = "test"
    identity: str = "test 1"
    is_deterministic: bool = True
    maps_ranges: bool = False
    size: Callable[[ObjectInfo], int] | None = None
    runs_count: int = 0
    ended_count: int = 0
    sizes_count: int = 0

    async def start(self) -> None:
        """Do nothing."""

    def arguments(self, request: GatewayRequest) -> Mapping[str, str]:
        """Return the query."""
        return dict(request.query)

    async def size_bytes(self, source: ObjectInfo, arguments: Mapping[str, str]) -> int | None:
        """Return what ``size`` returns."""
        self.sizes_count += 1
        return self.size(source) if self.size is not None else None

    async def run(
        self,
        source: Source,
        request: GatewayRequest,
        arguments: Mapping[str, str],
        output: ResultWriter,
        span: ByteRange | None = None,
    ) -> None:
        """Call the function."""
        self.runs_count += 1
        try:
            if span is not None:
                arguments = {**arguments, "span": f"{span.start}-{span.end}"}
            await self.function(source, arguments, output)
        finally:
            self.ended_count += 1

    async def close(self) -> None:
        """Do nothing."""


async def swap_case(source: Source, arguments: Mapping[str, str], output: ResultWriter) -> None:
    """Write the source with upper and lower case exchanged, and the arguments before it."""
    output.begin({"Content-Type": "text/plain"})
    for name, value in arguments.items():
        await output.write(f"{name}={value};".encode())
    async for piece in source.read():
        await output.write(bytes(piece).swapcase())


class Gate:
    """A transform's function that writes a text piece by piece, each when the test says so."""

    def __init__(self, text: bytes, *, piece_bytes: int = 1000) -> None:
        self.text = text
        self.piece_bytes = piece_bytes
        self.allowed_bytes = 0
        self.error: Exception | None = None
        self._changed = asyncio.Event()

    def allow(self, size_bytes: int | None = None, *, error: Exception | None = None) -> None:
        """Let it write so many bytes in all, or all; then it goes on, or fails with `error`."""
        self.allowed_bytes = len(self.text) if size_bytes is None else size_bytes
        self.error = error
        self._changed.set()

    async def __call__(self, source: Source, arguments: Mapping[str, str], output: ResultWriter) -> None:
        done = 0
        while done < len(self.text):
            while done >= self.allowed_bytes:
                if self.error is not None:
                    raise self.error
                self._changed.clear()
                await self._changed.wait()
            count = min(self.piece_bytes, self.allowed_bytes - done)
            await output.write(self.text[done : done + count])
            done += count
        if self.error is not None:
            raise self.error


def open_results(
    folder: Path | None,
    *,
    cache_bytes: int = 64 * MIB,
    config: ResultsConfig | None = None,
    derived_store: Store | None = None,
) -> Results:
    """Return results in a cache directory, or without one, with small blocks."""
    cache = None
    if folder is not None:
        cache = CacheConfig(folder / "cache", cache_bytes, block_bytes=BLOCK_BYTES, free_ratio_min=0.0)
    return Results(open_storage(cache, block_bytes=BLOCK_BYTES), config=config, derived_store=derived_store)


def point_of(
    transform: FunctionTransform, results: Results, objects: dict[str, bytes], **options: object
) -> TransformedBucket:
    """Return an access point over objects in memory."""
    access_point = AccessPoint(name="point", upstream="s3://sources")
    return TransformedBucket(
        replace(access_point, **options),
        MemoryBucket(objects),
        scope="s3://sources",
        transform=transform,
        results=results,
    )


async def read_all(opened: OpenObject, span: ByteRange | None = None) -> bytes:
    """Read a range as the front does."""
    found = bytearray()
    async with aclosing(opened.read(span)) as pieces:  # type: ignore[type-var]
        async for piece in pieces:
            found += piece
    await opened.close()
    return bytes(found)


async def get(point: TransformedBucket, key: str, span: ByteRange | None = None, **headers: str) -> bytes:
    """Read an object as a client does."""
    return await read_all(await point.open(request_of(key, **headers), span), span)
