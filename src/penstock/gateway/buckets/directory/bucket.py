"""``DirectoryBucket``: a folder as a bucket, and its objects as they are read.

A small object is read as it is opened. Of a larger one, the event loop reads what the page cache has, and threads read from
the disk.
"""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from penstock.errors import StoreError
from penstock.gateway.buckets.directory.files import BucketFiles
from penstock.gateway.buckets.directory.layout import REGION_FILE
from penstock.gateway.buckets.directory.listing import BucketListing
from penstock.gateway.buckets.directory.operations import DirectoryOperations
from penstock.gateway.buckets.requests import access_denied, check_version, not_implemented, with_checksums
from penstock.gateway.objects import S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from penstock.gateway.buckets.directory.bodies import FileThreads, FindBucket
    from penstock.gateway.buckets.directory.files import StagedFile, StoredObject
    from penstock.gateway.objects import Answer, GatewayRequest, ObjectHead, OpenObject, RequestBody
    from penstock.types import Buffer, ByteRange, ListPage, Page

PIECE_BYTES = 1 << 20
"""Bytes in one piece: copying them from the page cache takes 0.1 to 0.2 ms, for which the event loop may wait."""

WHOLE_BYTES_MAX = 256 << 10
"""Size up to which an object is read as it is opened, in the same step on a thread."""
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_FULL = (errno.ENOSPC, errno.EDQUOT)


class DirectoryBucket:
    """A folder as a bucket that is read and written.

    Args:
        folder: The folder, which exists.
        threads: Threads for operations on files.
        find_bucket: Finds the bucket of the source of a copy.
        may_write: Whether the bucket is writable at all.
        is_durable: Whether a change is synced to the disk before it is confirmed.
    """

    def __init__(
        self, folder: Path, *, threads: FileThreads, find_bucket: FindBucket, may_write: bool, is_durable: bool = True
    ) -> None:
        self.name = folder.name
        self.created_s = folder.stat().st_mtime
        self.region = ""
        with suppress(OSError, UnicodeError):
            self.region = (folder / REGION_FILE).read_text(encoding="ascii").strip()
        self.files = BucketFiles(folder, is_durable=is_durable)
        self._threads = threads
        self._listing = BucketListing(self.files)
        self._operations = DirectoryOperations(
            self.files, self._listing, threads=threads, find_bucket=find_bucket, may_write=may_write
        )

    # ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def head(self, request: GatewayRequest) -> ObjectHead:
        """Describe an object."""
        check_version(request)
        with s3_errors():
            stored = await self._threads.run(self.files.find, request.key)
        if stored is None:
            raise self.files.key_missing(request.key)
        return stored.head(with_checksums=with_checksums(request.headers))

    async def open(self, request: GatewayRequest, hint: ByteRange | None) -> OpenObject:
        """Open the current version of an object; one of at most 256 KiB is read at once, in the same step."""
        check_version(request)
        with s3_errors():
            return await self._threads.run(self._opened, request)

    def _opened(self, request: GatewayRequest) -> OpenObject:
        fd, stored = self.files.open(request.key)
        try:
            head = stored.head(with_checksums=with_checksums(request.headers))
            if stored.size_bytes > WHOLE_BYTES_MAX:
                opened = OpenFile(fd, stored, head=head, threads=self._threads)
                fd = -1
                return opened
            return OpenBytes(stored, head=head, data=read_whole(fd, stored))
        finally:
            if fd >= 0:
                os.close(fd)

    async def list_objects(self, request: GatewayRequest, operation: ListPage) -> Page | Answer:
        """Return one page of keys."""
        with s3_errors():
            return await self._threads.run_long(self._listing.page, operation)

    async def other(self, request: GatewayRequest, body: RequestBody) -> Answer:
        """Write, remove, or answer a question about a setting."""
        with s3_errors():
            return await self._operations.perform(request, body)

    # ── the bucket itself ──────────────────────────────────────────────────────────────────────────────────────────

    def remove_debris(self) -> None:
        """Remove what killed processes left. Blocks."""
        self.files.staging.remove_debris()
        self._operations.uploads.remove_debris()

    def is_empty(self) -> bool:
        """Whether the bucket has no object. Blocks."""
        return self._listing.is_empty()

    async def close(self) -> None:
        """Nothing is held open between requests."""


@contextmanager
def s3_errors() -> Iterator[None]:
    """Turn errors of the file system into S3's; their messages name no path."""
    try:
        yield
    except (S3Error, StoreError):
        raise
    except OSError as error:
        if error.errno in _DENIED:
            raise access_denied("The file system refuses this.") from error
        if error.errno in _FULL:
            raise S3Error("InsufficientStorage", "The file system is full.", status=507) from error
        if error.errno == errno.EXDEV:
            raise not_implemented("writing into another file system that is mounted in the bucket") from error
        reason = error.strerror or type(error).__name__
        raise S3Error("InternalError", f"The file system failed: {reason}.", status=500) from error


# ── objects that are read ────────────────────────────────────────────────────────────────────────────────────────────


def read_whole(fd: int, stored: StoredObject) -> bytes:
    """Read a small object and check that it is one version.

    Raises:
        S3Error: Another program changed the file meanwhile.
    """
    data = os.pread(fd, stored.size_bytes + 1, 0)
    _check_same(fd, stored)
    if len(data) != stored.size_bytes:
        raise _changed()
    return data


def _check_same(fd: int, stored: StoredObject) -> None:
    if not stored.is_still(fd):
        raise _changed()


def _changed() -> S3Error:
    return S3Error("PreconditionFailed", "The file was changed while it was read.", status=412)


class OpenBytes:
    """An object that has been read already.

    Args:
        stored: The version.
        head: Description of the version.
        data: Bytes of the object: uint8[n].
    """

    def __init__(self, stored: StoredObject, *, head: ObjectHead, data: bytes) -> None:
        self.stored = stored
        self.head = head
        self._data = memoryview(data)

    async def wait_size_bytes(self) -> int:
        """Return its size."""
        return len(self._data)

    async def read(self, span: ByteRange | None) -> AsyncIterator[Buffer]:
        """Yield the bytes of a range."""
        piece = self._data if span is None else self._data[span.start : span.end]
        if piece:
            yield piece

    async def close(self) -> None:
        """Nothing is open."""


class OpenFile:
    """An open file as an ``OpenObject``.

    Bytes in the page cache are read on the event loop without waiting (``RWF_NOWAIT``), into one buffer that is used again.
    For others a thread waits.

    Args:
        fd: Descriptor of the file, which this object closes.
        stored: The version.
        head: Description of the version.
        threads: Threads that wait for the disk.
    """

    def __init__(self, fd: int, stored: StoredObject, *, head: ObjectHead, threads: FileThreads) -> None:
        self.head = head
        self._fd = fd
        self.stored = stored
        self._threads = threads
        self._flags = os.RWF_NOWAIT

    async def wait_size_bytes(self) -> int:
        """Return its size."""
        return self.stored.size_bytes

    async def read(self, span: ByteRange | None) -> AsyncIterator[Buffer]:
        """Yield the bytes of a range in pieces of 1 MiB.

        Raises:
            S3Error: Another program changed the file.
        """
        at, end = span if span is not None else (0, self.stored.size_bytes)
        buffer = memoryview(bytearray(min(PIECE_BYTES, max(1, end - at))))
        while at < end:
            view = buffer[: min(len(buffer), end - at)]
            count = await self._filled(view, at)
            _check_same(self._fd, self.stored)
            if count == 0:
                raise _changed()
            at += count
            yield view[:count]

    async def _filled(self, view: memoryview, offset: int) -> int:
        if self._flags:
            try:
                return os.preadv(self._fd, [view], offset, self._flags)
            except BlockingIOError:
                pass
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
                self._flags = 0
        return await self._threads.run(os.preadv, self._fd, [view], offset)

    def copy_into(self, staged: StagedFile, span: ByteRange) -> None:
        """Append a range to a file inside the kernel. Blocks.

        Raises:
            S3Error: Another program changed the file.
        """
        staged.copy_from(self._fd, span)
        _check_same(self._fd, self.stored)

    async def close(self) -> None:
        """Close the file; idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
