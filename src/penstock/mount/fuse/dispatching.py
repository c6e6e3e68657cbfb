"""Has a ``FileSystem`` answer the kernel's requests; refuses what a read-only file system does not do."""

from __future__ import annotations

import errno
import logging
import os
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import errno_of
from penstock.mount.fuse.answering import KernelReply, operation_name
from penstock.mount.fuse.protocol import (
    HEADER,
    MODIFYING,
    PARSERS,
    WITHOUT_REPLY,
    MalformedRequestError,
    Operation,
    OtherRequest,
    RequestHeader,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.mount.fuse.answering import Outbox
    from penstock.mount.fuse.protocol import (
        BatchForgetRequest,
        ForgetRequest,
        GetExtendedRequest,
        ListExtendedRequest,
        NameRequest,
        OpenRequest,
        ReadRequest,
        ReleaseRequest,
    )

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
        """The file system was unmounted: drop everything, and cancel what is in flight."""


class Dispatcher:
    """Calls the method of a file system that answers a request.

    Args:
        file_system: Answers the requests.
        outbox: Sends the replies.

    Attributes:
        handlers: Functions of the header and the body, by operation; the session adds its own.
        counts: Number of requests by operation.
    """

    def __init__(self, file_system: FileSystem, outbox: Outbox) -> None:
        self._file_system = file_system
        self._outbox = outbox
        self._logged: set[tuple[int, type[Exception]]] = set()
        self.counts: Counter[int] = Counter()
        self.handlers: dict[int, Callable[[RequestHeader, Any], None]] = {
            Operation.LOOKUP: self._look_up,
            Operation.FORGET: self._forget,
            Operation.BATCH_FORGET: self._forget_batch,
            Operation.GETATTR: self._get_attributes,
            Operation.OPEN: self._open,
            Operation.READ: self._read,
            Operation.RELEASE: self._release,
            Operation.OPENDIR: self._open_directory,
            Operation.READDIR: self._read_directory,
            Operation.READDIRPLUS: self._read_directory,
            Operation.RELEASEDIR: self._release_directory,
            Operation.STATFS: self._get_statistics,
            Operation.GETXATTR: self._get_extended,
            Operation.LISTXATTR: self._list_extended,
            Operation.DESTROY: self._destroy,
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
            parse = PARSERS.get(operation, OtherRequest.parse)
            body = parse(message[HEADER.size : len(message) - 8 * header.extension_words])
            self.handlers.get(operation, self._refuse)(header, body)
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

    def _refuse(self, header: RequestHeader, _body: OtherRequest) -> None:
        if header.operation not in WITHOUT_REPLY:
            self._reply(header).error(REFUSED.get(header.operation, errno.ENOSYS))

    def _look_up(self, header: RequestHeader, body: NameRequest) -> None:
        self._file_system.look_up(header.inode, body.name, self._reply(header))

    def _forget(self, header: RequestHeader, body: ForgetRequest) -> None:
        self._file_system.forget(header.inode, body.references)

    def _forget_batch(self, _header: RequestHeader, body: BatchForgetRequest) -> None:
        for inode, count in body.forgotten:
            self._file_system.forget(inode, count)

    def _get_attributes(self, header: RequestHeader, _body: OtherRequest) -> None:
        self._file_system.get_attributes(header.inode, self._reply(header))

    def _open(self, header: RequestHeader, body: OpenRequest) -> None:
        reply = self._reply(header)
        if body.flags & os.O_ACCMODE != os.O_RDONLY or body.flags & os.O_TRUNC:
            reply.error(errno.EROFS)
        else:
            self._file_system.open(header.inode, body.flags, reply)

    def _read(self, header: RequestHeader, body: ReadRequest) -> None:
        handle, offset, length_bytes = body
        self._file_system.read(handle, offset, length_bytes, self._reply(header, length_bytes))

    def _release(self, header: RequestHeader, body: ReleaseRequest) -> None:
        self._file_system.release(body.handle, self._reply(header))

    def _open_directory(self, header: RequestHeader, _body: OpenRequest) -> None:
        self._file_system.open_directory(header.inode, self._reply(header))

    def _read_directory(self, header: RequestHeader, body: ReadRequest) -> None:
        self._file_system.read_directory(body.handle, body.offset, self._reply(header, body.length_bytes))

    def _release_directory(self, header: RequestHeader, body: ReleaseRequest) -> None:
        self._file_system.release_directory(body.handle, self._reply(header))

    def _get_statistics(self, header: RequestHeader, _body: OtherRequest) -> None:
        self._file_system.get_statistics(self._reply(header))

    def _get_extended(self, header: RequestHeader, body: GetExtendedRequest) -> None:
        self._file_system.get_extended_attribute(header.inode, body.name, self._reply(header, body.room_bytes))

    def _list_extended(self, header: RequestHeader, body: ListExtendedRequest) -> None:
        self._file_system.list_extended_attributes(header.inode, self._reply(header, body.room_bytes))

    def _destroy(self, header: RequestHeader, _body: OtherRequest) -> None:
        self._reply(header).ok()
