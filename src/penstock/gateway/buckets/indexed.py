"""``IndexedBucket``: an access point with a transform, and the index of its results beside them.

A ``Loader`` looks for ``PREFIX.penstock/dataset.index`` and ``PREFIX.penstock/shards/KEY.index``
(docs/development/index-files.md). An access point has these objects for every prefix. They describe its results, and no listing
shows them. Each index is a result itself: it is made once from the results that it describes, kept like them, and found by an
ETag that is computed from theirs.

A result without samples has an empty index, which clients see as a missing object. It is kept as well, so the result is read
only once for it.
"""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from multidict import CIMultiDict

from penstock.errors import ObjectChangedError, ObjectMissingError
from penstock.formats import HEAD_BYTES, format_of_name
from penstock.gateway.buckets.transformed import is_beside_shards
from penstock.gateway.objects import BucketWrapper, ObjectHead
from penstock.gateway.results.identity import ResultName, ResultPlan
from penstock.gateway.results.reader import OpenResult
from penstock.index import DatasetIndex, ShardRow
from penstock.index.building import ShardReading
from penstock.index.place import DATASET_KEY, FOLDER, SHARDS_PREFIX, SUFFIX
from penstock.index.shard_index import HEAD_BYTES_MAX, read_head
from penstock.types import ByteRange, ListPage, ObjectInfo, Page

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence

    from penstock.gateway.buckets.transformed import TransformedBucket
    from penstock.gateway.config import AccessPoint
    from penstock.gateway.objects import GatewayRequest, OpenObject, ResultWriter
    from penstock.gateway.results.results import Results
    from penstock.gateway.results.shared_result import SharedResult
    from penstock.types import Buffer

T = TypeVar("T")

TRANSFORM = "index"
"""Stands for the transform in the records of indexes."""

SHARDS_MAX = 200_000
"""Largest number of results below a prefix that has an index. The index needs a listing of all of them, and a few hundred bytes
of memory for each."""

_VERSION = "1"
_TOGETHER_MAX = 8
"""Indexes of results that are made at the same time; each parses its result on one of ``_THREADS_COUNT`` threads."""
_THREADS_COUNT = 2
_TIME_S_MAX = 86400.0
_TYPE = {"Content-Type": "application/octet-stream"}
_KEY = re.compile(
    rf"(?P<base>(?:.*/)?){re.escape(FOLDER)}(?:{re.escape(DATASET_KEY)}"
    rf"|{re.escape(SHARDS_PREFIX)}(?P<shard>.+){re.escape(SUFFIX)})",
    re.DOTALL,
)


class ResultVersion(NamedTuple):
    """One version of a result; see ``IndexedVersion``.

    Attributes:
        key: Key relative to the prefix of the index.
        size_bytes: Size of the result.
        etag: ETag of the result.
    """

    key: str
    size_bytes: int
    etag: str


class IndexedBucket(BucketWrapper):
    """A bucket of results with the index of these results.

    Args:
        access_point: Configuration of the access point.
        bucket: The results. It is closed with this object.
        results: The results of this process, among which indexes are kept.

    Attributes:
        name: Name of the access point.
        created_s: When it was created.
    """

    def __init__(self, access_point: AccessPoint, bucket: TransformedBucket, *, results: Results) -> None:
        super().__init__(bucket)
        self._bucket = bucket
        self._results = results
        # With list_sizes="source" listings must stay cheap, and the sizes in them would contradict an index.
        self._serves_indexes = access_point.list_sizes != "source"
        self._turns = asyncio.Semaphore(_TOGETHER_MAX)
        self._threads: ThreadPoolExecutor | None = None

    async def head(self, request: GatewayRequest) -> ObjectHead:
        """Describe a result or an index; see ``Bucket.head``."""
        if not is_beside_shards(request.key):
            return await self._bucket.head(request)
        opened = await self.open(request, None)
        await opened.close()
        return opened.head

    async def open(self, request: GatewayRequest, hint: ByteRange | None) -> OpenObject:
        """Begin to read a result or an index; see ``Bucket.open``.

        Cost: the first time, one pass over the bytes of the results that an index describes; for the index of a prefix also a
        listing of its results each time.
        """
        if not is_beside_shards(request.key):
            return await self._bucket.open(request, hint)
        wanted = _KEY.fullmatch(request.key)
        if wanted is None or not self.serves_indexes(request):
            raise ObjectMissingError(f"{self.name} has no object {request.key!r}", status=404)
        plain = _plain(request)
        if wanted["shard"] is not None:
            info = await self._described(plain, wanted["base"] + wanted["shard"])
            shared = await self._shard_index(plain, wanted["base"], info)
        else:
            shared = await self._dataset_index(plain, wanted["base"])
        if not await shared.wait_size_bytes():
            raise ObjectMissingError(f"nothing below {wanted['base']!r} has an index", status=404)
        plan = shared.plan
        head = ObjectHead(
            key=request.key,
            size_bytes=None,
            etag=plan.name.etag,
            last_modified_s=plan.last_modified_s,
            headers=_TYPE,
        )
        return OpenResult(shared, head, spools=True)

    def serves_indexes(self, request: GatewayRequest) -> bool:
        """Whether a request for an index is answered: the results are kept, and listings show their sizes."""
        return self._serves_indexes and self._bucket.keeps_results(request)

    async def shared_indexes(self, request: GatewayRequest, base: str = "") -> list[SharedResult]:
        """Return the indexes of the results below a prefix, and at last that of the prefix, without beginning to make them.

        Args:
            request: A request with the query and the caller of those that will read them.
            base: The prefix, which ends with a slash; empty for all results.

        Raises:
            ObjectMissingError: Nothing below the prefix has the name of a shard, or there is too much of it.

        Cost: a listing of the results, which produces those whose sizes are not known.
        """
        plain = _plain(request)
        found = [await self._shard_index(plain, base, info) for info in await self._listed(plain, base)]
        return [*found, await self._dataset_index(plain, base)]

    async def close(self) -> None:
        """Close the bucket of results; idempotent."""
        await super().close()
        threads, self._threads = self._threads, None
        if threads is not None:
            await asyncio.to_thread(threads.shutdown)

    # ── one result ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def _described(self, request: GatewayRequest, key: str) -> ObjectInfo:
        """Return key, ETag and time of a result, without producing it."""
        opened = await self._bucket.open(replace(request, key=key), None)
        await opened.close()
        return ObjectInfo(key, 0, opened.head.etag, opened.head.last_modified_s)

    async def _shard_index(self, request: GatewayRequest, base: str, info: ObjectInfo) -> SharedResult:
        """Return the index of a result, without beginning to make it."""
        version = ResultVersion(info.key.removeprefix(base), 0, info.etag or "")

        async def produce(output: ResultWriter) -> None:
            async with self._turns:
                await self._index_result(replace(request, key=info.key), version, output)

        return await self._share(info.key, _etag("shard", base, version.etag), info.last_modified_s or 0.0, produce)

    async def _index_result(self, request: GatewayRequest, version: ResultVersion, output: ResultWriter) -> None:
        """Read a result, and write its index; nothing if it has no samples.

        Raises:
            ObjectChangedError: The source was replaced.
        """
        opened = await self._bucket.open(request, None)
        try:
            version = version._replace(size_bytes=await opened.wait_size_bytes())
            if opened.head.etag != version.etag:
                raise ObjectChangedError(f"{request.key} was replaced while it was indexed")
            reading = ShardReading(version, url=f"s3://{self.name}/{request.key}")
            await self._read(opened, reading)
            index = await self._on_thread(partial(reading.feed, b"", is_last=True))
        finally:
            await opened.close()
        output.begin(_TYPE)
        if index is not None:
            await output.write(await self._on_thread(index.encode))

    async def _read(self, opened: OpenObject, reading: ShardReading) -> None:
        """Feed the bytes of a result, at first so many that they show its format."""
        held = b""
        is_begun = False
        async with aclosing(opened.read(None)) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                data: Buffer = piece
                if not is_begun:
                    data = held = held + bytes(piece)
                    if len(held) < HEAD_BYTES:
                        continue
                is_begun = True
                await self._on_thread(partial(reading.feed, data, is_last=False))
                if reading.error is not None or reading.ranged is not None:
                    return
        if not is_begun:
            reading.feed(held, is_last=False)

    # ── all results of a prefix ────────────────────────────────────────────────────────────────────────────────────

    async def _dataset_index(self, request: GatewayRequest, base: str) -> SharedResult:
        """Return the index of a prefix, without beginning to make it.

        Raises:
            ObjectMissingError: Nothing below the prefix has the name of a shard, or there is too much of it.
        """
        infos = await self._listed(request, base)
        versions = [text for info in infos for text in (info.key, str(info.size_bytes), info.etag or "")]
        last_modified_s = max(info.last_modified_s or 0.0 for info in infos)

        async def produce(output: ResultWriter) -> None:
            rows = await self._rows(request, base, infos)
            output.begin(_TYPE)
            if rows:
                await output.write(DatasetIndex(f"s3://{self.name}/{base}", rows).encode())

        return await self._share(
            f"{base}{FOLDER}{DATASET_KEY}", _etag("dataset", base, *versions), last_modified_s, produce
        )

    async def _listed(self, request: GatewayRequest, base: str) -> list[ObjectInfo]:
        infos: list[ObjectInfo] = []
        operation = ListPage(base)
        while True:
            page = await self._bucket.list_objects(replace(request, key=""), operation)
            if not isinstance(page, Page):
                break
            infos += [info for info in page.objects if format_of_name(info.key) is not None]
            if page.next_token is None or len(infos) > SHARDS_MAX:
                break
            operation = operation._replace(token=page.next_token)
        if not 0 < len(infos) <= SHARDS_MAX:
            raise ObjectMissingError(f"there is no index of {len(infos)} results below {base!r}", status=404)
        return infos

    async def _rows(self, request: GatewayRequest, base: str, infos: Sequence[ObjectInfo]) -> list[ShardRow]:
        """Return the rows of those results that have an index; the indexes are made if necessary."""
        rows: list[ShardRow] = []

        async def index(info: ObjectInfo) -> None:
            row = await self._row(await self._shard_index(request, base, info))
            if row is not None:
                rows.append(row)

        await for_each(infos, index, together_max=min(_TOGETHER_MAX, len(infos)))
        return rows

    async def _row(self, shared: SharedResult) -> ShardRow | None:
        size_bytes = await shared.wait_size_bytes()
        if not size_bytes:
            return None
        data = bytearray()
        async with aclosing(shared.pieces(ByteRange(0, min(size_bytes, HEAD_BYTES_MAX)))) as pieces:
            async for piece in pieces:
                data += piece
        return read_head(data, shared.plan.name.key)

    # ── both ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _share(
        self, key: str, etag: str, last_modified_s: float, produce: Callable[[ResultWriter], Awaitable[None]]
    ) -> SharedResult:
        name = ResultName(self._bucket.scope, key, etag)
        found = self._results.shared(name)
        if found is not None:
            return found
        plan = ResultPlan(
            name=name,
            produce=produce,
            transform=TRANSFORM,
            access_point=f"{self.name}/index",
            last_modified_s=last_modified_s,
            time_s_max=_TIME_S_MAX,
            waits_for_results=True,
        )
        return self._results.share(plan, await self._results.find(name))

    async def _on_thread(self, function: Callable[[], T]) -> T:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS_COUNT, thread_name_prefix="penstock-index")
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)


async def for_each(
    items: Iterable[T], function: Callable[[T], Coroutine[None, None, object]], *, together_max: int
) -> None:
    """Call a function for each item, which is taken as others are finished. Raises the first error."""
    rest = iter(items)

    async def work() -> None:
        for item in rest:
            await function(item)

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(together_max):
                tasks.create_task(work())
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


def _etag(*texts: str) -> str:
    digest = blake2b(digest_size=20)
    for text in (TRANSFORM, _VERSION, *texts):
        raw = text.encode(errors="surrogateescape")
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return f'"{digest.hexdigest()}"'


def _plain(request: GatewayRequest) -> GatewayRequest:
    """Return a request for the results that the index describes, without conditions and range, which are for the index."""
    kept = [pair for pair in request.headers.items() if not pair[0].lower().startswith(("if-", "range"))]
    return replace(request, method="GET", headers=CIMultiDict(kept))
