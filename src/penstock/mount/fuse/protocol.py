"""The kernel's FUSE protocol: its numbers, and its requests as records. Pure.

Numbers are those of ``linux/fuse.h``, versions 7.31 (Linux 5.4) to 7.45 (Linux 6.18). All numbers in messages have the byte
order of the machine, and all fields are aligned without the compiler's help.
"""

from __future__ import annotations

import struct
from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.types import Buffer

MAJOR = 7
MINOR_MIN = 31
MINOR_MAX = 45

BUFFER_BYTES = 128 * 1024
"""Size of the buffer for one request. Requests with data to write are refused, so a batch of FORGETs is the longest one."""

WRITE_BYTES_MAX = 4096
"""Longest write that the kernel may send; the kernel takes no smaller value. Nothing is ever written."""

PAGE_BYTES = 4096
NAME_BYTES_MAX = 255
"""Longest name of an entry that programs can use: ``NAME_MAX`` of the system."""

ERRNO_MAX = 511
"""Largest errno in a reply. The kernel refuses replies with larger ones, and goes on waiting."""


class Operation(IntEnum):
    """What a request asks for."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    GETLK = 31
    SETLK = 32
    SETLKW = 33
    ACCESS = 34
    CREATE = 35
    INTERRUPT = 36
    BMAP = 37
    DESTROY = 38
    IOCTL = 39
    POLL = 40
    NOTIFY_REPLY = 41
    BATCH_FORGET = 42
    FALLOCATE = 43
    READDIRPLUS = 44
    RENAME2 = 45
    LSEEK = 46
    COPY_FILE_RANGE = 47
    SETUPMAPPING = 48
    REMOVEMAPPING = 49
    SYNCFS = 50
    TMPFILE = 51
    STATX = 52
    COPY_FILE_RANGE_64 = 53


MODIFYING = frozenset(
    {
        Operation.SETATTR,
        Operation.SYMLINK,
        Operation.MKNOD,
        Operation.MKDIR,
        Operation.UNLINK,
        Operation.RMDIR,
        Operation.RENAME,
        Operation.LINK,
        Operation.WRITE,
        Operation.SETXATTR,
        Operation.REMOVEXATTR,
        Operation.CREATE,
        Operation.FALLOCATE,
        Operation.RENAME2,
        Operation.COPY_FILE_RANGE,
        Operation.TMPFILE,
        Operation.COPY_FILE_RANGE_64,
    }
)
"""Operations that a read-only file system refuses with ``EROFS``. The kernel itself does so already for a mount with ``ro``."""

WITHOUT_REPLY = frozenset({Operation.FORGET, Operation.BATCH_FORGET, Operation.INTERRUPT, Operation.NOTIFY_REPLY})
"""Messages that the kernel does not wait for."""


class Feature(IntFlag):
    """What kernel and file system agree on in INIT; the upper 32 bits need ``INIT_EXT``."""

    ASYNC_READ = 1 << 0
    DO_READDIRPLUS = 1 << 13
    READDIRPLUS_AUTO = 1 << 14
    PARALLEL_DIROPS = 1 << 18
    ABORT_ERROR = 1 << 21
    MAX_PAGES = 1 << 22
    INIT_EXT = 1 << 30
    DIRECT_IO_ALLOW_MMAP = 1 << 36
    PASSTHROUGH = 1 << 37


class OpenFlag(IntFlag):
    """What the reply to OPEN and OPENDIR may say."""

    DIRECT_IO = 1 << 0
    KEEP_CACHE = 1 << 1
    CACHE_DIR = 1 << 3
    PASSTHROUGH = 1 << 7


BACKING_OPEN = 0x4010_E501
BACKING_CLOSE = 0x4004_E502
"""Numbers of the ioctl calls on ``/dev/fuse`` that register a file for ``OpenFlag.PASSTHROUGH``, and forget it again."""


class Notification(IntEnum):
    """What the file system may tell the kernel without being asked."""

    INVALIDATE_INODE = 2
    INCREMENT_EPOCH = 8


EPOCH_MINOR_MIN = 44
"""First version of the protocol that has ``Notification.INCREMENT_EPOCH``."""


HEADER = struct.Struct("=IIQQIII2H")
_INIT = struct.Struct("=IIII")
_INIT_EXTENDED = struct.Struct("=I44x")
_FORGET = struct.Struct("=Q")
_FORGET_COUNT = struct.Struct("=I4x")
_FORGET_ONE = struct.Struct("=QQ")
_OPEN = struct.Struct("=I4x")
_READ = struct.Struct("=QQI4x8x8x")
_RELEASE = struct.Struct("=Q16x")
_GET_EXTENDED = struct.Struct("=I4x")
_INTERRUPT = struct.Struct("=Q")

_INIT_EXT_FLAG = 1 << 30


class MalformedRequestError(ValueError):
    """The bytes are not a request as the protocol describes it."""


class RequestHeader(NamedTuple):
    """What every request begins with.

    Attributes:
        length_bytes: Length of the whole request.
        operation: Number of the operation; one that ``Operation`` does not have is possible.
        unique: Number of the request, which the reply repeats.
        inode: The node that it is about.
        uid: User of the program that caused it.
        gid: Group of the program.
        thread_id: Thread that waits for the reply, in the process namespace of the mount; 0 if it cannot be seen there.
        extension_words: Length of the extensions at the end of the request, in units of 8 bytes.
        padding: Unused.
    """

    length_bytes: int
    operation: int
    unique: int
    inode: int
    uid: int
    gid: int
    thread_id: int
    extension_words: int
    padding: int

    @classmethod
    def parse(cls, message: Buffer) -> RequestHeader:
        """Read the header of a whole request.

        Raises:
            MalformedRequestError: The request is shorter or longer than its header says.
        """
        received_bytes = len(message)
        if received_bytes < HEADER.size:
            raise MalformedRequestError(f"a request of {received_bytes} bytes is shorter than its header")
        header = cls._make(HEADER.unpack_from(message))
        if header.length_bytes != received_bytes or HEADER.size + 8 * header.extension_words > received_bytes:
            raise MalformedRequestError(
                f"a request of {received_bytes} bytes says that it has {header.length_bytes}, "
                f"{8 * header.extension_words} of them extensions"
            )
        return header


class InitRequest(NamedTuple):
    """INIT: what the kernel offers.

    Attributes:
        major: Version of the protocol.
        minor: Minor version of the protocol.
        read_ahead_bytes_max: Longest read-ahead of the kernel.
        features: Bits of ``Feature`` that the kernel knows.
    """

    major: int
    minor: int
    read_ahead_bytes_max: int
    features: int

    @classmethod
    def parse(cls, body: memoryview) -> InitRequest:
        """Read the body of INIT, with the upper half of the features if the kernel sent it."""
        if len(body) < _INIT.size:
            raise MalformedRequestError(f"INIT has {len(body)} bytes")
        major, minor, read_ahead_bytes_max, features = _INIT.unpack_from(body)
        if features & _INIT_EXT_FLAG and len(body) >= _INIT.size + _INIT_EXTENDED.size:
            features |= _INIT_EXTENDED.unpack_from(body, _INIT.size)[0] << 32
        return cls(major, minor, read_ahead_bytes_max, features)


class NameRequest(NamedTuple):
    """LOOKUP: the name of an entry of a directory.

    Attributes:
        name: The name, without the NUL that ends it.
    """

    name: bytes

    @classmethod
    def parse(cls, body: memoryview) -> NameRequest:
        """Read a name that ends with NUL."""
        return cls(_name(body))


class ForgetRequest(NamedTuple):
    """FORGET: references to the header's node that the kernel has dropped.

    Attributes:
        references: Number of references.
    """

    references: int

    @classmethod
    def parse(cls, body: memoryview) -> ForgetRequest:
        """Read the body of FORGET."""
        return cls._make(_exactly(_FORGET, body))


class BatchForgetRequest(NamedTuple):
    """BATCH_FORGET: references to several nodes that the kernel has dropped.

    Attributes:
        forgotten: Inode number and number of references for each node.
    """

    forgotten: tuple[tuple[int, int], ...]

    @classmethod
    def parse(cls, body: memoryview) -> BatchForgetRequest:
        """Read the body of BATCH_FORGET."""
        if len(body) < _FORGET_COUNT.size:
            raise MalformedRequestError(f"BATCH_FORGET has {len(body)} bytes")
        (count,) = _FORGET_COUNT.unpack_from(body)
        items = body[_FORGET_COUNT.size :]
        if len(items) != count * _FORGET_ONE.size:
            raise MalformedRequestError(f"BATCH_FORGET of {count} nodes has {len(body)} bytes")
        return cls(tuple(_FORGET_ONE.iter_unpack(items)))


class OpenRequest(NamedTuple):
    """OPEN and OPENDIR.

    Attributes:
        flags: Flags of open(2), without those that the kernel handles itself.
    """

    flags: int

    @classmethod
    def parse(cls, body: memoryview) -> OpenRequest:
        """Read the body of OPEN or OPENDIR."""
        return cls._make(_exactly(_OPEN, body))


class ReadRequest(NamedTuple):
    """READ, READDIR and READDIRPLUS.

    Attributes:
        handle: Handle of the open file or directory.
        offset: First byte; for a directory, the offset after the entry that the kernel read last, or 0.
        length_bytes: Number of bytes of a file; for a directory, the room for entries.
    """

    handle: int
    offset: int
    length_bytes: int

    @classmethod
    def parse(cls, body: memoryview) -> ReadRequest:
        """Read the body of READ, READDIR or READDIRPLUS."""
        return cls._make(_exactly(_READ, body))


class ReleaseRequest(NamedTuple):
    """RELEASE and RELEASEDIR.

    Attributes:
        handle: Handle of the file or directory that is closed.
    """

    handle: int

    @classmethod
    def parse(cls, body: memoryview) -> ReleaseRequest:
        """Read the body of RELEASE or RELEASEDIR."""
        return cls._make(_exactly(_RELEASE, body))


class GetExtendedRequest(NamedTuple):
    """GETXATTR.

    Attributes:
        room_bytes: Room for the value; 0 asks for its length.
        name: Name of the attribute.
    """

    room_bytes: int
    name: bytes

    @classmethod
    def parse(cls, body: memoryview) -> GetExtendedRequest:
        """Read the body of GETXATTR."""
        if len(body) < _GET_EXTENDED.size:
            raise MalformedRequestError(f"GETXATTR has {len(body)} bytes")
        return cls(_GET_EXTENDED.unpack_from(body)[0], _name(body[_GET_EXTENDED.size :]))


class ListExtendedRequest(NamedTuple):
    """LISTXATTR.

    Attributes:
        room_bytes: Room for the names; 0 asks for their length.
    """

    room_bytes: int

    @classmethod
    def parse(cls, body: memoryview) -> ListExtendedRequest:
        """Read the body of LISTXATTR."""
        return cls._make(_exactly(_GET_EXTENDED, body))


class InterruptRequest(NamedTuple):
    """INTERRUPT: a program that waits for a reply has received a signal.

    Attributes:
        unique: Number of the request that the program waits for.
    """

    unique: int

    @classmethod
    def parse(cls, body: memoryview) -> InterruptRequest:
        """Read the body of INTERRUPT."""
        return cls._make(_exactly(_INTERRUPT, body))


class OtherRequest(NamedTuple):
    """A request whose body is not looked at, because it has none or because the answer does not depend on it."""

    @classmethod
    def parse(cls, body: memoryview) -> OtherRequest:
        """Skip the body."""
        return _OTHER


_OTHER = OtherRequest()

PARSERS: dict[int, Callable[[memoryview], NamedTuple]] = {
    Operation.INIT: InitRequest.parse,
    Operation.LOOKUP: NameRequest.parse,
    Operation.FORGET: ForgetRequest.parse,
    Operation.BATCH_FORGET: BatchForgetRequest.parse,
    Operation.OPEN: OpenRequest.parse,
    Operation.OPENDIR: OpenRequest.parse,
    Operation.READ: ReadRequest.parse,
    Operation.READDIR: ReadRequest.parse,
    Operation.READDIRPLUS: ReadRequest.parse,
    Operation.RELEASE: ReleaseRequest.parse,
    Operation.RELEASEDIR: ReleaseRequest.parse,
    Operation.GETXATTR: GetExtendedRequest.parse,
    Operation.LISTXATTR: ListExtendedRequest.parse,
    Operation.INTERRUPT: InterruptRequest.parse,
}
"""How the body of each operation is read; that of any other one is an ``OtherRequest``."""


def _exactly(form: struct.Struct, body: memoryview) -> Iterable[int]:
    if len(body) != form.size:
        raise MalformedRequestError(f"the body of a request has {len(body)} bytes instead of {form.size}")
    return form.unpack(body)


def _name(body: memoryview) -> bytes:
    name = bytes(body)
    if len(name) < 2 or name.find(0) != len(name) - 1:
        raise MalformedRequestError(f"a name of {len(name)} bytes is empty, contains NUL, or does not end with it")
    return name[:-1]
