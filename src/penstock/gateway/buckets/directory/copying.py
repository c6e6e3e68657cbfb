"""Sources of copies: a file of this gateway, which the kernel copies, or an object that another bucket reads."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from penstock.gateway.buckets.directory.files import BucketFiles
from penstock.gateway.buckets.directory.records import StoredRecord
from penstock.gateway.buckets.directory.writing import STEP_BYTES, HashingFile
from penstock.gateway.copy_sources import copy_source
from penstock.gateway.objects import S3Error
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from contextlib import AsyncExitStack

    from penstock.gateway.buckets.directory.files import StoredObject
    from penstock.gateway.buckets.directory.staging import StagedFile
    from penstock.gateway.buckets.directory.threads import FileThreads
    from penstock.gateway.buckets.directory.writing import Received
    from penstock.gateway.objects import Bucket, Caller, GatewayRequest, OpenObject
    from penstock.types import Buffer

    FindBucket = Callable[[str, Caller], Awaitable[Bucket | None]]


class CopiedObject(Protocol):
    """An open source of a copy.

    Attributes:
        etag: ETag of the version, with its quotes.
        size_bytes: Size in bytes.
        modified_s: When it was last changed, in seconds since 1970.
        headers: Headers of the object, without checksums.
        tags: Tags of the object.
    """

    etag: str
    size_bytes: int
    modified_s: float
    headers: Mapping[str, str]
    tags: Mapping[str, str]

    async def copy_whole(self, staged: StagedFile, algorithm: str) -> StoredRecord:
        """Append all of it to a file, and return a record with ETag and checksums.

        Args:
            staged: The file.
            algorithm: Checksum that the copy is to have; empty to keep what the source has.
        """

    async def copy_span(self, staged: StagedFile, span: ByteRange, algorithm: str) -> Received:
        """Append a range of it to a file."""


class CopiedFile:
    """A source that is an open file.

    Args:
        fd: Descriptor of the open file.
        stored: The version.
        threads: Threads for operations on files.
    """

    def __init__(self, fd: int, stored: StoredObject, threads: FileThreads) -> None:
        record = stored.record or StoredRecord()
        self.etag = stored.etag
        self.size_bytes = stored.size_bytes
        self.modified_s = stored.modified_s
        self.headers = record.headers
        self.tags = record.tags
        self._fd = fd
        self._stored = stored
        self._record = record
        self._threads = threads

    async def copy_whole(self, staged: StagedFile, algorithm: str) -> StoredRecord:
        """Append all of it. If MD5 and checksum are known, the kernel copies, or shares the blocks."""
        kept = self._record.checksums if self._record.checksum_type == "FULL_OBJECT" else {}
        span = ByteRange(0, self.size_bytes)
        if self._record.etag and "-" not in self._record.etag and (not algorithm or algorithm in kept):
            await self._threads.run_long(staged.copy_from, self._fd, span)
            self._check_same()
            return StoredRecord(etag=self._record.etag, checksums=kept)
        received = await self.copy_span(staged, span, algorithm)
        return StoredRecord(etag=received.md5, checksums=received.checksums if algorithm else kept)

    async def copy_span(self, staged: StagedFile, span: ByteRange, algorithm: str) -> Received:
        """Append a range and hash it."""
        file = HashingFile(staged, algorithm)
        await self._threads.run_long(file.copy, self._fd, span)
        self._check_same()
        return file.result({})

    def _check_same(self) -> None:
        if not self._stored.is_still(self._fd):
            raise S3Error("PreconditionFailed", "The source was changed while it was copied.", status=412)


class CopiedStream:
    """A source that another kind of bucket reads.

    Args:
        opened: The open object.
        size_bytes: Size in bytes.
        threads: Threads for operations on files.
    """

    def __init__(self, opened: OpenObject, size_bytes: int, threads: FileThreads) -> None:
        head = opened.head
        self.etag = head.etag
        self.size_bytes = size_bytes
        self.modified_s = head.last_modified_s
        self.headers: Mapping[str, str] = {
            name: value for name, value in head.headers.items() if not name.startswith("x-amz-checksum-")
        }
        self.tags: Mapping[str, str] = {}
        self._opened = opened
        self._threads = threads

    async def copy_whole(self, staged: StagedFile, algorithm: str) -> StoredRecord:
        """Append all of it and hash it."""
        received = await self.copy_span(staged, ByteRange(0, self.size_bytes), algorithm)
        return StoredRecord(etag=received.md5, checksums=received.checksums)

    async def copy_span(self, staged: StagedFile, span: ByteRange, algorithm: str) -> Received:
        """Append a range and hash it."""
        file = HashingFile(staged, algorithm)
        held: list[Buffer] = []
        held_bytes = total_bytes = 0
        if span.length_bytes:
            async for piece in self._opened.read(span):
                held.append(bytes(piece))  # it is valid until the next one is requested
                held_bytes += len(piece)
                total_bytes += len(piece)
                if held_bytes >= STEP_BYTES:
                    await self._threads.run(file.write, held)
                    held, held_bytes = [], 0
        if total_bytes != span.length_bytes:
            raise S3Error("InternalError", "The source became shorter while it was copied.", status=500)
        await self._threads.run(file.write, held)
        return file.result({})


async def open_source(
    request: GatewayRequest, *, find_bucket: FindBucket, threads: FileThreads, stack: AsyncExitStack
) -> CopiedObject:
    """Open what ``x-amz-copy-source`` names.

    Args:
        request: The request that copies.
        find_bucket: Finds its bucket.
        threads: Threads for operations on files.
        stack: Closes the source.

    Raises:
        S3Error: There is no such bucket or object, or the caller may not read it.
    """
    source = copy_source(request.headers)
    bucket = await find_bucket(source.bucket, request.caller)
    if bucket is None:
        details = {"BucketName": source.bucket}
        raise S3Error("NoSuchBucket", "The specified bucket does not exist", status=404, details=details)
    files = getattr(bucket, "files", None)
    if isinstance(files, BucketFiles):
        block = files.opened(source.key)
        fd, stored = await threads.run(block.__enter__)
        stack.callback(block.__exit__, None, None, None)
        return CopiedFile(fd, stored, threads)
    reading = replace(request, method="GET", bucket=source.bucket, key=source.key, query={}, headers={})
    opened = await bucket.open(reading, None)
    stack.push_async_callback(opened.close)
    return CopiedStream(opened, await opened.wait_size_bytes(), threads)
