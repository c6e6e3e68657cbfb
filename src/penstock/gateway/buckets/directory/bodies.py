"""Bodies of requests and sources of copies become staged files: written and hashed on threads, while the next bytes arrive."""

from __future__ import annotations

import asyncio
import hashlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, TypeVar

from penstock.checksums import algorithms as checksums
from penstock.gateway.buckets.requests import body_incomplete, checked_length_bytes, collected
from penstock.gateway.objects import S3Error, copy_source
from penstock.store.records import StoredRecord
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from penstock.checksums.algorithms import Hasher
    from penstock.gateway.buckets.directory.files import StagedFile, StoredObject
    from penstock.gateway.objects import Bucket, Caller, GatewayRequest, OpenObject, RequestBody
    from penstock.types import Buffer

    FindBucket = Callable[[str, Caller], Awaitable[Bucket | None]]

P = ParamSpec("P")
T = TypeVar("T")

_LONG_COUNT_MAX = 8


class FileThreads:
    """A bounded number of threads for file operations, and others for long ones, so that no client's copy stops all reading.

    Args:
        threads_max: Largest number of threads for short operations.
    """

    def __init__(self, threads_max: int) -> None:
        self._pool = ThreadPoolExecutor(threads_max, thread_name_prefix="penstock-files")
        self._long_pool = ThreadPoolExecutor(_LONG_COUNT_MAX, thread_name_prefix="penstock-copies")

    async def run(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function on a thread and return its result.

        If the task is cancelled, the function still ends before this returns, because its caller is about to close the files
        that it uses.
        """
        return await _ended(self._pool, partial(job, *args, **kwargs))

    async def run_long(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that may take seconds, such as a copy or a listing; otherwise as ``run``."""
        return await _ended(self._long_pool, partial(job, *args, **kwargs))

    def close(self) -> None:
        """Wait for what runs and end the threads; idempotent."""
        self._pool.shutdown(wait=True)
        self._long_pool.shutdown(wait=True)


async def _ended(pool: ThreadPoolExecutor, job: Callable[[], T]) -> T:
    future = asyncio.get_running_loop().run_in_executor(pool, job)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        if not future.cancelled():
            future.exception()  # retrieved, so that the loop does not complain of it
        raise


class Received(NamedTuple):
    """The hashes of a body that was written.

    Attributes:
        md5: MD5 of the body in hexadecimal.
        checksums: Checksums in base64, by algorithm: those that the client sent, and the requested one.
    """

    md5: str
    checksums: Mapping[str, str]


class HashingFile:
    """A staged file that is hashed while it is written.

    Args:
        staged: The file.
        algorithm: A checksum to compute besides the MD5; empty for none.
    """

    def __init__(self, staged: StagedFile, algorithm: str = "") -> None:
        self._staged = staged
        self._algorithm = algorithm
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._hasher: Hasher | None = checksums.hasher(algorithm) if algorithm else None

    def write(self, pieces: list[Buffer]) -> None:
        """Append pieces."""
        self._staged.write(pieces)
        for piece in pieces:
            self._md5.update(piece)
            if self._hasher is not None:
                self._hasher.update(piece)

    def result(self, sent: Mapping[str, str]) -> Received:
        """Return what was written; `sent` are checksums that the client sent and that were verified."""
        found = dict(sent)
        if self._hasher is not None and self._algorithm not in found:
            found[self._algorithm] = checksums.text(self._hasher)
        return Received(self._md5.hexdigest(), found)


async def receive(body: RequestBody, staged: StagedFile, *, threads: FileThreads, algorithm: str = "") -> Received:
    """Write a body to a file.

    Args:
        body: The body.
        staged: The file.
        threads: Threads for operations on files.
        algorithm: A checksum to compute if the client did not send it; empty for none.

    Raises:
        S3Error: The body has no length, is too long, or is not what its headers say.

    Cost: holds at most about 3 MiB, whatever the size of the body.
    """
    length_bytes = checked_length_bytes(body)
    file = HashingFile(staged, algorithm)
    writing: asyncio.Future[None] | None = None
    total = 0
    try:
        async for pieces in collected(body):
            total += sum(map(len, pieces))
            if writing is not None:
                await writing
            writing = asyncio.ensure_future(threads.run(file.write, pieces))
        if writing is not None:
            await writing
    finally:
        if writing is not None and not writing.done():
            await asyncio.wait([writing])  # the thread uses the file, which the caller is about to close
    if total != length_bytes:
        raise body_incomplete()
    sent = {name: value for name, value in body.checksums.items() if name in checksums.ALGORITHMS}
    return file.result(sent)


# ── copies ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class CopySource:
    """An open object that is copied: of this kind of bucket, or of any other one.

    Args:
        opened: The open object.
        size_bytes: Size of the source in bytes.
        threads: Threads for operations on files.

    Attributes:
        size_bytes: Size of the source in bytes.
        etag: ETag of the version, with its quotes.
        modified_s: When it was last changed, in seconds since 1970.
        headers: Headers of the object, without checksums.
        tags: Tags of the object, if it lies in a folder.
    """

    def __init__(self, opened: OpenObject, size_bytes: int, threads: FileThreads) -> None:
        stored: StoredObject | None = getattr(opened, "stored", None)
        self.size_bytes = size_bytes
        self.etag = opened.head.etag
        self.modified_s = opened.head.last_modified_s
        self._opened = opened
        self._threads = threads
        self._record = (stored.record if stored is not None else None) or StoredRecord()
        self.tags = self._record.tags
        self.headers: Mapping[str, str] = self._record.headers
        if stored is None:
            self.headers = {
                name: value for name, value in opened.head.headers.items() if not name.startswith("x-amz-checksum-")
            }

    async def copy_whole(self, staged: StagedFile, algorithm: str) -> StoredRecord:
        """Append all of it to a file. If MD5 and checksum are known, the kernel copies, or shares the blocks.

        Args:
            staged: The file.
            algorithm: Checksum that the copy is to have; empty to keep what the source has.

        Returns:
            A record with ETag and checksums.
        """
        record = self._record
        kept = record.checksums if record.checksum_type == "FULL_OBJECT" else {}
        span = ByteRange(0, self.size_bytes)
        is_known = record.etag and "-" not in record.etag and (not algorithm or algorithm in kept)
        copy_file = getattr(self._opened, "copy_into", None)
        if is_known and copy_file is not None:
            await self._threads.run_long(copy_file, staged, span)
            return StoredRecord(etag=record.etag, checksums=kept)
        received = await self.copy_span(staged, span, algorithm)
        return StoredRecord(etag=received.md5, checksums=received.checksums if algorithm else kept)

    async def copy_span(self, staged: StagedFile, span: ByteRange, algorithm: str) -> Received:
        """Append a range to a file and hash it."""
        file = HashingFile(staged, algorithm)
        total_bytes = 0
        if span.length_bytes:
            async with aclosing(self._opened.read(span)) as pieces:  # type: ignore[type-var]
                async for held in collected(pieces):
                    total_bytes += sum(map(len, held))
                    await self._threads.run(file.write, held)
        if total_bytes != span.length_bytes:
            raise S3Error("InternalError", "The source became shorter while it was copied.")
        return file.result({})

    async def close(self) -> None:
        """End reading; idempotent."""
        await self._opened.close()


async def open_source(request: GatewayRequest, *, find_bucket: FindBucket, threads: FileThreads) -> CopySource:
    """Open what ``x-amz-copy-source`` names; the caller closes it.

    Args:
        request: The request that copies.
        find_bucket: Finds its bucket.
        threads: Threads for operations on files.

    Raises:
        S3Error: There is no such bucket or object, or the caller may not read it.
    """
    source = copy_source(request.headers)
    bucket = await find_bucket(source.bucket, request.caller)
    if bucket is None:
        details = {"BucketName": source.bucket}
        raise S3Error("NoSuchBucket", "The specified bucket does not exist", details=details)
    reading = replace(request, method="GET", bucket=source.bucket, key=source.key, query={}, headers={})
    opened = await bucket.open(reading, None)
    return CopySource(opened, await opened.wait_size_bytes(), threads)
