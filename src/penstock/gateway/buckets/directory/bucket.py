"""``DirectoryBucket``: a folder as a bucket, with its objects as they are read; ``DirectoryBuckets``: all folders.

A small object is read as it is opened. Of a larger one, the event loop reads what the page cache has, and threads read from
the disk.
"""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import ConfigError, StoreError
from penstock.gateway.buckets.directory.bodies import FileThreads
from penstock.gateway.buckets.directory.files import (
    REGION_FILE,
    BucketFiles,
    bucket_missing,
    check_bucket_name,
    is_folder_name,
    make_below,
)
from penstock.gateway.buckets.directory.listing import BucketListing
from penstock.gateway.buckets.directory.operations import DirectoryOperations
from penstock.gateway.buckets.requests import check_version, with_checksums
from penstock.gateway.objects import S3Error, access_denied, not_implemented
from penstock.store.local import copy_range
from penstock.store.tree import HIDDEN

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from penstock.gateway.buckets.directory.bodies import FindBucket
    from penstock.gateway.buckets.directory.files import StagedFile, StoredObject
    from penstock.gateway.objects import (
        Answer,
        Bucket,
        BucketTable,
        Caller,
        GatewayRequest,
        ObjectHead,
        OpenObject,
        RequestBody,
    )
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

    async def perform(self, request: GatewayRequest, body: RequestBody) -> Answer:
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
            raise S3Error("InsufficientStorage", "The file system is full.") from error
        if error.errno == errno.EXDEV:
            raise not_implemented("writing into another file system that is mounted in the bucket") from error
        reason = error.strerror or type(error).__name__
        raise S3Error("InternalError", f"The file system failed: {reason}.") from error


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
    return S3Error("PreconditionFailed", "The file was changed while it was read.")


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
        copy_range(self._fd, span, staged.fd)
        _check_same(self._fd, self.stored)

    async def close(self) -> None:
        """Close the file; idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


# ── all folders ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class DirectoryBuckets:
    """Each folder in a directory as a bucket; a ``BucketTable``.

    Files that other programs put there are objects. What clients write becomes a plain file at its natural path, whole or not
    at all; ``files`` says which keys cannot be paths and where they are kept. Folders whose names begin with a dot are hidden.

    Args:
        root: The directory.
        read_write: Whether clients may write, and create and delete buckets.
        is_durable: Whether every change is synced to the disk, file and folder, before it is confirmed. False survives the
            death of the process, but may lose the last changes in a power cut.
        threads_max: Largest number of threads that use files.

    Raises:
        ConfigError: The directory does not exist.

    Attributes:
        root: The directory.
        sources: Table in which the source of a copy is found: this one, unless a gateway serves more than the directory.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        read_write: bool = False,
        is_durable: bool = True,
        threads_max: int = 16,
    ) -> None:
        self.root = Path(root).resolve()
        if not self.root.is_dir():
            raise ConfigError(f"the directory {self.root} does not exist", hint="create it, or name another one")
        self._read_write = read_write
        self.sources: BucketTable = self
        self._is_durable = is_durable
        self._threads = FileThreads(threads_max)
        self._buckets: dict[str, DirectoryBucket] = {}
        if read_write:
            for name in self._folder_names():
                with suppress(OSError):
                    self._bucket(name).remove_debris()

    def _folder_names(self) -> list[str]:
        with os.scandir(self.root) as entries:
            return sorted(entry.name for entry in entries if is_folder_name(entry.name) and entry.is_dir())

    def _bucket(self, name: str) -> DirectoryBucket:
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._buckets[name] = DirectoryBucket(
                self.root / name,
                threads=self._threads,
                find_bucket=self._find_source,
                may_write=self._read_write,
                is_durable=self._is_durable,
            )
        return bucket

    async def _find_source(self, name: str, caller: Caller) -> Bucket | None:
        return await self.sources.get(name, caller)

    async def get(self, name: str, caller: Caller) -> Bucket | None:
        """Return the bucket of a name; None if there is no such folder."""
        if not is_folder_name(name) or len(name.encode("utf-8", "replace")) > 255:
            return None
        with s3_errors():
            if await self._threads.run((self.root / name).is_dir):
                return self._bucket(name)
        self._buckets.pop(name, None)
        return None

    def get_nowait(self, name: str) -> None:
        """Return None: a folder may have gone, and only the file system can tell."""

    async def names(self, caller: Caller) -> list[Bucket]:
        """Return all buckets, in the order of their names."""
        with s3_errors():
            return [self._bucket(name) for name in await self._threads.run(self._folder_names)]

    async def create(self, name: str, caller: Caller, *, region: str) -> None:
        """Make a folder, and note its region if there is one.

        Raises:
            S3Error: The name is not valid or taken, or the caller may not write.
        """
        self._check_may_write(caller)
        check_bucket_name(name)
        with s3_errors():
            await self._threads.run(_make_folder, self.root / name, region)

    async def delete(self, name: str, caller: Caller) -> None:
        """Remove the folder of an empty bucket, with its unfinished uploads.

        Raises:
            S3Error: There is none, it is not empty, or the caller may not write.
        """
        self._check_may_write(caller)
        bucket = await self.get(name, caller)
        if not isinstance(bucket, DirectoryBucket):
            raise bucket_missing(name)
        with s3_errors():
            await self._threads.run_long(_remove_bucket, bucket)
        self._buckets.pop(name, None)

    def _check_may_write(self, caller: Caller) -> None:
        if not self._read_write:
            raise access_denied("This gateway serves the directory read-only.")
        if not caller.may_write:
            raise access_denied("This access key may only read.")

    async def close(self) -> None:
        """Wait for the operations that run, and end the threads; idempotent."""
        self._threads.close()


def _make_folder(path: Path, region: str) -> None:
    try:
        path.mkdir()
    except FileExistsError as error:
        raise S3Error(
            "BucketAlreadyOwnedByYou",
            "Your previous request to create the named bucket succeeded and you already own it.",
            details={"BucketName": path.name},
        ) from error
    if region:
        make_below(path, path / HIDDEN)
        (path / REGION_FILE).write_text(region, encoding="ascii")


def _remove_bucket(bucket: DirectoryBucket) -> None:
    """Remove an empty bucket. Only folders that are empty are removed, so an object that arrives meanwhile is never lost."""
    folder, hidden = bucket.files.folder, bucket.files.hidden
    if folder.is_symlink():
        raise access_denied("The bucket is a link, which is not removed.")
    try:
        if not bucket.is_empty():
            raise _not_empty(bucket.name)
        _remove_empty_folders(bucket.files.escaped)
        if not bucket.files.escaped.exists():
            shutil.rmtree(hidden, ignore_errors=True)
        _remove_empty_folders(folder)
    except OSError as error:
        raise _not_empty(bucket.name) from error


def _remove_empty_folders(folder: Path) -> None:
    """Remove a folder and the folders in it, from the innermost on.

    Raises:
        OSError: There is a file somewhere.
    """
    if folder.is_dir():
        for path, _, _ in os.walk(folder, topdown=False):
            Path(path).rmdir()


def _not_empty(name: str) -> S3Error:
    return S3Error("BucketNotEmpty", "The bucket you tried to delete is not empty", details={"BucketName": name})
