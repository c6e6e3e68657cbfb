"""Files that are being written, under hidden names, and locks of keys.

A file that is being written is locked by its descriptor. The kernel releases the lock when the writer ends, however it ends,
so whatever a new process can lock is debris of a killed one and is removed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import zlib
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Self

from penstock.gateway.objects import S3Error
from penstock.system.locks import try_lock_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.types import Buffer, ByteRange

STEP_BYTES = 8 << 20
"""Bytes that the kernel copies in one call."""

_STRIPES = 256  # files that lock keys; two keys that share one wait for each other's rename and for nothing else
_ATTEMPTS_MAX = 16
_NO_KERNEL_COPY = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.ETXTBSY)


class StagedFile:
    """A hidden file that becomes an object when it is renamed. Use it as a context manager.

    Args:
        path: Path of the temporary file.
        fd: Descriptor of the temporary file, open for writing, which this object closes.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd
        self.is_placed = False
        """Whether the file has been renamed, so that its hidden name is not to be removed."""

    def write(self, pieces: list[Buffer]) -> None:
        """Append pieces."""
        for piece in pieces:
            view = memoryview(piece)
            while view:
                view = view[os.write(self.fd, view) :]

    def copy_from(self, source: int, span: ByteRange) -> None:
        """Append a range of another open file inside the kernel; some file systems share the blocks.

        Raises:
            S3Error: The file ends before the range.
        """
        at = span.start
        copy = _copy_range
        while at < span.end:
            try:
                count = copy(source, self.fd, at, min(STEP_BYTES, span.end - at))
            except OSError as error:
                if copy is _send_file or error.errno not in _NO_KERNEL_COPY:
                    raise
                copy = _send_file
                continue
            if count == 0:
                raise S3Error("InternalError", "The source became shorter while it was copied.", status=500)
            at += count

    def close(self) -> None:
        """Close the file, and remove it unless it was renamed; idempotent."""
        fd, self.fd = self.fd, -1
        if fd < 0:
            return
        if not self.is_placed:
            with suppress(FileNotFoundError):
                self.path.unlink()
        os.close(fd)  # after the name is gone, so that nobody takes the file for debris in between

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _copy_range(source: int, target: int, offset: int, count: int) -> int:
    return os.copy_file_range(source, target, count, offset)


def _send_file(source: int, target: int, offset: int, count: int) -> int:
    return os.sendfile(target, source, offset, count)


class StagingArea:
    """The hidden folders of a bucket in which files are written, and in which keys are locked.

    Args:
        folder: The bucket's hidden folder; it is made when it is needed. The bucket's own folder must exist.
    """

    def __init__(self, folder: Path) -> None:
        self._staging = folder / "staging"
        self._locks = folder / "locks"

    def create(self) -> StagedFile:
        """Make a hidden file, locked until it is closed."""
        for _ in range(_ATTEMPTS_MAX):
            path = self._staging / os.urandom(12).hex()
            fd = _opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            if try_lock_file(fd) and os.fstat(fd).st_nlink:
                return StagedFile(path, fd)
            os.close(fd)  # another process that has just started took it for debris
        raise S3Error("SlowDown", "No file could be made; please try again.", status=503)

    @contextmanager
    def locked(self, key: str) -> Iterator[None]:
        """Hold the lock of a key, among all threads and processes that use the bucket; for a rename, not for writing."""
        fd = _opened(self._locks / f"{zlib.crc32(key.encode()) % _STRIPES:02x}", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def remove_debris(self) -> None:
        """Remove the files of writers that no longer live."""
        try:
            names = os.listdir(self._staging)  # noqa: PTH208 - names are all that is needed
        except (FileNotFoundError, NotADirectoryError):
            return
        for name in names:
            path = self._staging / name
            with suppress(OSError):  # another process removed it, or it may not be removed
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    if try_lock_file(fd):
                        path.unlink()
                finally:
                    os.close(fd)


def _opened(path: Path, flags: int) -> int:
    """Open a file below a bucket's hidden folder, which is made if it is missing.

    Raises:
        S3Error: The bucket's own folder does not exist.
    """
    for _ in range(_ATTEMPTS_MAX):
        try:
            return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:
            make_below(path.parent.parent.parent, path.parent)
    raise bucket_missing(path.parent.parent.parent.name)


def make_below(bucket: Path, folder: Path) -> None:
    """Make a folder and its parents below a bucket's folder, but never the bucket's folder itself.

    Raises:
        S3Error: The bucket's folder does not exist.
        FileExistsError, NotADirectoryError: A file is in the way.
    """
    missing = []
    while folder != bucket:
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        try:
            path.mkdir()
        except FileExistsError:
            if not path.is_dir():
                raise
        except FileNotFoundError as error:
            if not bucket.is_dir():
                raise bucket_missing(bucket.name) from error
            raise


def bucket_missing(name: str) -> S3Error:
    """Return the error of a bucket that does not exist."""
    return S3Error("NoSuchBucket", "The specified bucket does not exist", status=404, details={"BucketName": name})
