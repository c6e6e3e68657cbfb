"""``UpstreamBucket``: the objects of a store as they are, through the node's cache if the store has one.

Beyond the costs of the store itself, a read copies no byte, wakes the event loop once for a body of one part, and makes one
call on a thread for each part of a longer body. While a client takes a part, no thread waits for it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import TYPE_CHECKING

from penstock.cache import Cached
from penstock.errors import ConfigError, ObjectChangedError, ObjectMissingError, ProtocolError, SpanError
from penstock.fetch.budget import POOLED_BYTES_MIN
from penstock.fetch.plan import PlanItem
from penstock.fetch.requests import contradiction_of
from penstock.gateway.buckets.known_objects import NOWAIT_BYTES_MAX, KnownObjects, object_head
from penstock.gateway.buckets.operations import BucketOperations, ReadOnlyOperations
from penstock.gateway.buckets.submitting import FirstRead, perform_on_loop
from penstock.types import ByteRange, Get, Head, same_version

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator

    from penstock.fetch.budget import Budget
    from penstock.gateway.buckets.known_objects import BodyCache
    from penstock.gateway.objects import Answer, GatewayRequest, ObjectHead, RequestBody
    from penstock.store.base import Store
    from penstock.types import Buffer, Chunk, Key, ListPage, ObjectInfo, Page

_PART_BYTES = 8 << 20
_PART_BYTES_MIN = 256 << 10
_AHEAD_COUNT = 4
"""Parts that one client's read holds or requests at a time; 4 of 8 MiB cover 10 ms at 3 GB/s."""
_FIRST_SHARES = 256
"""The beginning of an object takes at most this part of the free budget: 800 clients get 1 MiB or more of 2 GiB."""
_FIRST_BYTES_MIN = 128 << 10
"""What it takes if less than that is free."""
_PIECE_BYTES = 1 << 20
"""Bytes that are read and sent together from the page cache. 256 and 512 KiB cost as much CPU time per byte."""
_THREADS_COUNT_MAX = 64
_DESCRIBED_COUNT_MAX = 4096
"""Answers to HEAD that are remembered, far more than there are runs that read their sources; about 1 MiB."""


class UpstreamBucket:
    """A bucket that serves the objects of a store, and changes none.

    Args:
        name: Name of the bucket.
        store: The store; closing the bucket closes it.
        created_s: When the bucket was created, in seconds since 1970; 0 if that is not known.
        operations: The operations that change the store's objects, from ``operations_for``; None if the bucket is read-only.
        bodies: Keeps the bytes of small objects that are read again and again; None leaves that to the page cache.

    Attributes:
        name: Name of the bucket.
        store: The store.
        created_s: When the bucket was created.
    """

    def __init__(
        self,
        name: str,
        store: Store,
        *,
        created_s: float = 0.0,
        operations: BucketOperations | None = None,
        bodies: BodyCache | None = None,
    ) -> None:
        self.name = name
        self.store = store
        self.created_s = created_s
        self._operations = operations or ReadOnlyOperations(self)
        self._cached = store if isinstance(store, Cached) else None
        self._known = KnownObjects(store, bodies)
        self._described: OrderedDict[Key, ObjectInfo] = OrderedDict()  # by the last HEADs
        self._streams_count = 0
        self._threads: ThreadPoolExecutor | None = None

    async def head(self, request: GatewayRequest) -> ObjectHead:
        """Describe an object; see ``Bucket.head``. Cost: one request, or none if the cache knows the object."""
        try:
            return object_head(await self._stat(request.key))
        except ProtocolError:  # the answer has no length: all of the object must be read for it
            opened = await self._open_whole(request.key)
            await opened.close()
            return opened.head

    async def _stat(self, key: str) -> ObjectInfo:
        try:
            completion = await perform_on_loop(self.store, Head(key, headers=self.store.keeps_headers))
        except ConfigError as error:
            raise ObjectMissingError("the store cannot have such a key", status=404) from error
        info = completion.info
        assert info is not None
        self._described[key] = info._replace(checksums={}, headers={})
        self._described.move_to_end(key)
        while len(self._described) > _DESCRIBED_COUNT_MAX:
            self._described.popitem(last=False)
        return info

    async def open(self, request: GatewayRequest, hint: ByteRange | None) -> UpstreamObject:
        """Begin to read an object; see ``Bucket.open``. Cost: one request for an object of one part."""
        if hint is None and _depends_on_size(request):
            return await self.fetch(request, hint)
        opened = self.open_nowait(request.key, hint.within if hint is not None else None)
        return opened if opened is not None else await self.fetch(request, hint)

    def open_nowait(self, key: Key, within: Callable[[int], ByteRange] | None = None) -> UpstreamObject | None:
        """Open an object that the cache knows, with the wanted bytes if they are few; see ``CachedBucket.open_nowait``."""
        known = self._known.get(key)
        if known is None:
            return None
        size_bytes = known.info.size_bytes
        try:
            span = within(size_bytes) if within is not None and size_bytes else ByteRange(0, size_bytes)
        except SpanError:  # the range begins past the end of the object
            span = None
        if span is None or not 0 < span.length_bytes <= NOWAIT_BYTES_MAX:
            return UpstreamObject(self, known.info, head=known.head)
        body = known.read_nowait(span)
        return None if body is None else UpstreamObject(self, known.info, head=known.head, span=span, body=body)

    async def fetch(self, request: GatewayRequest, hint: ByteRange | None) -> UpstreamObject:
        """Open an object that the store or the disk must be asked for; see ``CachedBucket.fetch``."""
        try:
            try:
                return await self._fetch(request, hint)
            except ObjectChangedError:  # the version in the cache was replaced, and the cache now knows it
                return await self._fetch(request, hint)
        except ProtocolError:  # the store may know neither lengths nor ranges; if it is really broken, this fails too
            return await self._open_whole(request.key)

    async def _fetch(self, request: GatewayRequest, hint: ByteRange | None) -> UpstreamObject:
        key = request.key
        if hint is None and _depends_on_size(request):
            return UpstreamObject(self, await self._stat(key))
        first = None
        try:
            first = FirstRead(self.store, Get(key, hint), length_bytes_max=self.first_bytes())
            info = await self._with_headers(self._checked(await first.wait_described()))
            if self._cached is not None and self._cached.config.metadata_ttl_s > 0:
                await (
                    first.wait_body()
                )  # only now it is certain that the version that the cache had trusted still exists
        except SpanError:
            return UpstreamObject(self, await self._stat(key))
        except ConfigError as error:
            raise ObjectMissingError("the store cannot have such a key", status=404) from error
        except BaseException:
            if first is not None:
                first.cancel()
            raise
        return UpstreamObject(self, info, first=first)

    async def _open_whole(self, key: str) -> UpstreamObject:
        """Open an object whose store makes it while sending it, so that it has neither a length nor ranges beforehand."""
        first = FirstRead(self.store, Get(key), length_bytes_max=self.first_bytes())
        try:
            return UpstreamObject(
                self, await self._with_headers(self._checked(await first.wait_described())), first=first
            )
        except BaseException:
            first.cancel()
            raise

    def _checked(self, info: ObjectInfo) -> ObjectInfo:
        """Return the object that an answer describes.

        Raises:
            ProtocolError: The answer, which may be chunked, has another size of the version than a HEAD stated. Of what is
                made of such a source, nobody would notice that it is cut.
        """
        described = self._described.get(info.key)
        claim = None if described is None else (described.etag, described.size_bytes)
        if (contradiction := contradiction_of(info, claim)) is not None:
            raise contradiction
        return info

    async def _with_headers(self, info: ObjectInfo) -> ObjectInfo:
        """Return an object with its headers. This costs a request only if the object was known from a listing."""
        if info.headers or not self.store.keeps_headers:
            return info
        found = await self._stat(info.key)
        return info._replace(headers=found.headers, tags=found.tags) if same_version(found, info) else info

    async def list_objects(self, request: GatewayRequest, operation: ListPage) -> Page:
        """Return one page of the store's listing; see ``Bucket.list_objects``. Cost: one request."""
        completion = await perform_on_loop(self.store, operation)
        page: Page = completion.value
        return page

    async def perform(self, request: GatewayRequest, body: RequestBody) -> Answer:
        """Write, or answer a question about a setting; see ``Bucket.perform``."""
        return await self._operations.perform(request, body)

    async def close(self) -> None:
        """Close the store; idempotent."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)
        await self._operations.close()
        await asyncio.to_thread(self.store.close)

    # ── for the objects ────────────────────────────────────────────────────────────────────────────────────────────

    def part_bytes(self) -> int:
        """Return the size of a part: smaller if many clients read at once, so that all of them fit into the budget."""
        budget = self.store.budget
        share_bytes = budget.bytes_max // (2 * _AHEAD_COUNT * (self._streams_count + 1))
        return _part_bytes(min(share_bytes, _free_bytes(budget) // (2 * _AHEAD_COUNT)), least_bytes=_PART_BYTES_MIN)

    def first_bytes(self) -> int:
        """Return how much of an object is read when it is opened.

        These bytes are held until the client takes them, and nobody who opens an object waits for the budget. So the less of
        it is free, the less is read: clients that take nothing cannot use it up.
        """
        share_bytes = _free_bytes(self.store.budget) // _FIRST_SHARES
        return _part_bytes(share_bytes if share_bytes >= POOLED_BYTES_MIN else 0, least_bytes=_FIRST_BYTES_MIN)

    async def stream(self, info: ObjectInfo, span: ByteRange) -> AsyncGenerator[memoryview]:
        """Iterate over the bytes of a range of one version, part by part, read ahead.

        Blocks in the page cache are read on the event loop's thread, where a piece is sent while it is still in the processor's
        cache. The rest, from the first miss, comes in larger parts from other threads. A piece is valid until the next one is
        requested.
        """
        cached, offset = self._cached, span.start
        while cached is not None and offset < span.end:
            end = min(span.end, offset - offset % _PIECE_BYTES + _PIECE_BYTES)
            piece = cached.read_nowait(info, ByteRange(offset, end))
            if piece is None:
                break
            yield piece
            del piece  # its memory, which the processor's cache has, takes the next one
            offset = end
            await asyncio.sleep(0)  # a fast client must not keep the loop from the others
        if offset < span.end:
            async with aclosing(self._stream_parts(info, ByteRange(offset, span.end))) as parts:
                async for piece in parts:
                    yield piece

    async def _stream_parts(self, info: ObjectInfo, span: ByteRange) -> AsyncGenerator[memoryview]:
        """Iterate over the bytes of a range of one version, in parts that are read ahead."""
        loop = asyncio.get_running_loop()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS_COUNT_MAX, thread_name_prefix="penstock-stream")
        item = PlanItem(info.key, span, info.etag, info.size_bytes, last_modified_s=info.last_modified_s)
        self._streams_count += 1
        chunks: Iterator[Chunk] | None = None
        try:
            chunks = self.store.read_parts([item], part_bytes=self.part_bytes(), requests_max=_AHEAD_COUNT)
            while True:
                following = loop.run_in_executor(self._threads, next, chunks, None)
                following.add_done_callback(_retrieved)  # if the client leaves now, nobody else asks for its error
                chunk = await asyncio.shield(following)
                if chunk is None:
                    break
                yield chunk.data
                chunk = None
        finally:
            self._streams_count -= 1
            if chunks is not None:
                chunks.close()  # type: ignore[attr-defined]


def _retrieved(future: asyncio.Future[Chunk | None]) -> None:
    if not future.cancelled():
        future.exception()


def _free_bytes(budget: Budget) -> int:
    """Return how much of a budget nobody holds."""
    statistics = budget.statistics()
    return max(0, statistics.bytes_max - statistics.used_bytes + statistics.free_bytes)


def _part_bytes(share_bytes: int, *, least_bytes: int) -> int:
    """Return the size of a part that is not larger than a share, unless the share is smaller than any part."""
    part_bytes = _PART_BYTES
    while part_bytes > least_bytes and part_bytes > share_bytes:
        part_bytes //= 2
    return part_bytes


def _depends_on_size(request: GatewayRequest) -> bool:
    """Whether the bytes that a request without a hint wants are known only once the object's size is."""
    return "Range" in request.headers or "partNumber" in request.query


class UpstreamObject:
    """One version of an object of a store that is being read; implements ``CachedObject``.

    Args:
        bucket: Bucket of the object.
        info: The object.
        head: Description of the object; None makes it of `info`.
        first: The read of its first bytes; None if none was begun.
        span: Range of the bytes in memory; None if there are none.
        body: The bytes in memory.

    Attributes:
        head: Description of the object.
        span: Range of the bytes in memory.
        body: The bytes in memory.
    """

    __slots__ = ("_bucket", "_first", "_info", "body", "head", "span")

    def __init__(
        self,
        bucket: UpstreamBucket,
        info: ObjectInfo,
        *,
        head: ObjectHead | None = None,
        first: FirstRead | None = None,
        span: ByteRange | None = None,
        body: memoryview | None = None,
    ) -> None:
        self._bucket = bucket
        self._info = info
        self._first = first
        self.head = head or object_head(info)
        self.span = span
        self.body = body

    async def wait_size_bytes(self) -> int:
        """Return the object's size in bytes."""
        return self._info.size_bytes

    async def read(self, span: ByteRange | None) -> AsyncIterator[Buffer]:
        """Iterate over the bytes of a range; see ``OpenObject.read``."""
        wanted = span or ByteRange(0, self._info.size_bytes)
        begun, body = self.span, self.body
        first, self._first = self._first, None
        if first is not None:
            begun = first.span
        if begun is not None and begun.start <= wanted.start < begun.end:
            if first is not None:
                try:
                    body = await first.wait_body()
                finally:
                    first.cancel()
            assert body is not None
            begin = body[wanted.start - begun.start : wanted.end - begun.start]
            wanted = ByteRange(wanted.start + len(begin), wanted.end)
            yield begin
        elif first is not None:
            first.cancel()
        if wanted.start < wanted.end:
            async with aclosing(self._bucket.stream(self._info, wanted)) as pieces:
                async for piece in pieces:
                    yield piece

    async def close(self) -> None:
        """End reading; idempotent."""
        first, self._first = self._first, None
        if first is not None:
            first.cancel()
