"""An object that is being read: one open file, from the page cache on the event loop, and from the disk on threads."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from penstock.gateway.objects import S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from penstock.gateway.buckets.directory.files import StoredObject
    from penstock.gateway.buckets.directory.threads import FileThreads
    from penstock.gateway.objects import ObjectHead
    from penstock.types import Buffer, ByteRange

PIECE_BYTES = 1 << 20
"""Bytes in one piece: copying them from the page cache takes 0.1 to 0.2 ms, for which the event loop may wait."""

WHOLE_BYTES_MAX = 256 << 10
"""Size up to which an object is read as it is opened, in the same step on a thread."""


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
        head: Description of the version.
        data: Bytes of the object: uint8[n].
    """

    def __init__(self, head: ObjectHead, data: bytes) -> None:
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
        self._stored = stored
        self._threads = threads
        self._flags = os.RWF_NOWAIT

    async def wait_size_bytes(self) -> int:
        """Return its size."""
        return self._stored.size_bytes

    async def read(self, span: ByteRange | None) -> AsyncIterator[Buffer]:
        """Yield the bytes of a range in pieces of 1 MiB.

        Raises:
            S3Error: Another program changed the file.
        """
        at, end = span if span is not None else (0, self._stored.size_bytes)
        buffer = memoryview(bytearray(min(PIECE_BYTES, max(1, end - at))))
        while at < end:
            view = buffer[: min(len(buffer), end - at)]
            count = await self._filled(view, at)
            _check_same(self._fd, self._stored)
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

    async def close(self) -> None:
        """Close the file; idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
