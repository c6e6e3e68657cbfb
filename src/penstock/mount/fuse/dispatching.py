"""Passes the kernel's requests to a ``FileSystem``; refuses requests that a read-only file system does not support."""

from __future__ import annotations

import errno
import logging
import os
from collections import Counter
from typing import TYPE_CHECKING, Protocol

from penstock.errors import errno_of
from penstock.mount.fuse.answering import KernelReply, operation_name
from penstock.mount.fuse.protocol import (
    HEADER,
    MODIFYING,
    PARSERS,
    WITHOUT_REPLY,
    MalformedRequestError,
    Operation,
    RequestHeader,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.mount.fuse.answering import Outbox

REFUSED: dict[int, int] = {
    **dict.fromkeys(MODIFYING, errno.EROFS),
    Operation.IOCTL: errno.ENOTTY,
    Operation.READLINK: errno.EINVAL,
}
"""Errno for operations that no node has. Any other one gets ``ENOSYS``, after which the kernel does without and asks no more:
it keeps locks itself, checks permissions itself (ACCESS), sees no holes (LSEEK), and sends no FLUSH and no FSYNC."""

_log = logging.getLogger("penstock")


class FileSystem(Protocol):
    """Answers the kernel's requests. Each method is called on the session's thread and must not wait."""

    def look_up(self, parent: int, name: bytes, reply: KernelReply) -> None:
        """Find an entry of a directory: ``reply.entry``."""

    def forget(self, inode: int, count: int) -> None:
        """The kernel has dropped `count` references to a node."""

    def get_attributes(self, inode: int, reply: KernelReply) -> None:
        """Describe a node: ``reply.attributes``."""

    def open(self, inode: int, flags: int, reply: KernelReply) -> None:
        """Open a file: ``reply.opened``."""

    def read(self, handle: int, offset: int, length_bytes: int, reply: KernelReply) -> None:
        """Read an open file: ``reply.data``."""

    def release(self, handle: int, reply: KernelReply) -> None:
        """Close an open file: ``reply.ok``."""

    def open_directory(self, inode: int, reply: KernelReply) -> None:
        """Open a directory: ``reply.opened``."""

    def read_directory(self, handle: int, offset: int, reply: KernelReply) -> None:
        """Read an open directory: ``reply.directory``."""

    def release_directory(self, handle: int, reply: KernelReply) -> None:
        """Close an open directory: ``reply.ok``."""

    def get_statistics(self, reply: KernelReply) -> None:
        """Describe the file system: ``reply.statistics``."""

    def get_extended_attribute(self, inode: int, name: bytes, reply: KernelReply) -> None:
        """Read an extended attribute: ``reply.extended``."""

    def list_extended_attributes(self, inode: int, reply: KernelReply) -> None:
        """List the names of the extended attributes, each ended by NUL: ``reply.extended``."""

    def close(self) -> None:
        """The file system was unmounted: drop everything, and cancel the requests in flight."""


class Dispatcher:
    """Calls the method of a file system that answers a request.

    Args:
        file_system: Answers the requests.
        outbox: Sends the replies.

    Attributes:
        handlers: Functions of the header and the values in the body, by operation; the session adds its own.
        counts: Number of requests by operation.
    """

    def __init__(self, file_system: FileSystem, outbox: Outbox) -> None:
        self._file_system = file_system
        self._outbox = outbox
        self._logged: set[tuple[int, type[Exception]]] = set()
        self.counts: Counter[int] = Counter()
        files = file_system
        self.handlers: dict[int, Callable[..., None]] = {
            Operation.LOOKUP: lambda header, name: files.look_up(header.inode, name, self._reply(header)),
            Operation.FORGET: lambda header, count: files.forget(header.inode, count),
            Operation.BATCH_FORGET: self._forget_batch,
            Operation.GETATTR: lambda header: files.get_attributes(header.inode, self._reply(header)),
            Operation.OPEN: self._open,
            Operation.READ: self._read,
            Operation.RELEASE: lambda header, handle: files.release(handle, self._reply(header)),
            Operation.OPENDIR: lambda header: files.open_directory(header.inode, self._reply(header)),
            Operation.READDIR: self._read_directory,
            Operation.READDIRPLUS: self._read_directory,
            Operation.RELEASEDIR: lambda header, handle: files.release_directory(handle, self._reply(header)),
            Operation.STATFS: lambda header: files.get_statistics(self._reply(header)),
            Operation.GETXATTR: lambda header, room_bytes, name: files.get_extended_attribute(
                header.inode, name, self._reply(header, room_bytes)
            ),
            Operation.LISTXATTR: lambda header, room_bytes: files.list_extended_attributes(
                header.inode, self._reply(header, room_bytes)
            ),
            Operation.DESTROY: lambda header: self._reply(header).ok(),
        }

    def dispatch(self, message: memoryview) -> None:
        """Have one request answered, now or later. No exception leaves this method: it becomes the reply, and is logged."""
        try:
            header = RequestHeader.parse(message)
        except MalformedRequestError as error:
            _log.error("The kernel sent a request that cannot be read: %s.", error)
            return
        operation = header.operation
        self.counts[operation] += 1
        try:
            parse, handle = PARSERS.get(operation), self.handlers.get(operation, self._refuse)
            if parse is None:
                handle(header)
            else:
                handle(header, *parse(message[HEADER.size : len(message) - 8 * header.extension_words]))
        except Exception as error:
            self._failed(header, error)

    def _reply(self, header: RequestHeader, room_bytes: int = 0) -> KernelReply:
        return KernelReply(
            self._outbox,
            unique=header.unique,
            operation=header.operation,
            thread_id=header.thread_id,
            room_bytes=room_bytes,
        )

    def _failed(self, header: RequestHeader, error: Exception) -> None:
        kind = (header.operation, type(error))
        if kind not in self._logged:  # a program that tries again and again must not fill the disk with tracebacks
            self._logged.add(kind)
            _log.error("%s of node %d failed.", operation_name(header.operation), header.inode, exc_info=error)
        if header.operation in WITHOUT_REPLY:
            return
        if isinstance(error, MalformedRequestError):
            self._reply(header)
        reply = self._outbox.waiting.get(header.unique)
        if reply is not None:
            reply.error(errno_of(error))

    def _refuse(self, header: RequestHeader, *_: object) -> None:
        if header.operation not in WITHOUT_REPLY:
            self._reply(header).error(REFUSED.get(header.operation, errno.ENOSYS))

    def _forget_batch(self, _: RequestHeader, *forgotten: tuple[int, int]) -> None:
        for inode, count in forgotten:
            self._file_system.forget(inode, count)

    def _open(self, header: RequestHeader, flags: int) -> None:
        reply = self._reply(header)
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            reply.error(errno.EROFS)
        else:
            self._file_system.open(header.inode, flags, reply)

    def _read(self, header: RequestHeader, handle: int, offset: int, length_bytes: int) -> None:
        self._file_system.read(handle, offset, length_bytes, self._reply(header, length_bytes))

    def _read_directory(self, header: RequestHeader, handle: int, offset: int, room_bytes: int) -> None:
        self._file_system.read_directory(handle, offset, self._reply(header, room_bytes))
