"""The kernel's FUSE protocol: its numbers, and how its requests are read. Pure.

Numbers are those of ``linux/fuse.h``, versions 7.31 (Linux 5.4) to 7.45 (Linux 6.18). All numbers in messages have the byte
order of the machine, and all fields are aligned without the compiler's help.
"""

from __future__ import annotations

import struct
from enum import IntEnum, IntFlag
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

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
    """The operations that a request can ask for."""

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
    """Features that kernel and file system agree on in INIT; the upper 32 bits need ``INIT_EXT``."""

    ASYNC_READ = 1 << 0
    DO_READDIRPLUS = 1 << 13
    PARALLEL_DIROPS = 1 << 18
    ABORT_ERROR = 1 << 21
    MAX_PAGES = 1 << 22
    INIT_EXT = 1 << 30


class OpenFlag(IntFlag):
    """Flags of the reply to OPEN and OPENDIR."""

    KEEP_CACHE = 1 << 1
    CACHE_DIR = 1 << 3


class Notification(IntEnum):
    """Notifications that the file system may send to the kernel."""

    INCREMENT_EPOCH = 8


EPOCH_MINOR_MIN = 44
"""First version of the protocol that has ``Notification.INCREMENT_EPOCH``."""


HEADER = struct.Struct("=IIQQIII2H")
_INIT = struct.Struct("=IIII")
_INIT_EXTENDED = struct.Struct("=I44x")
_FORGET = struct.Struct("=Q")  # references to the header's node that the kernel has dropped
_FORGET_COUNT = struct.Struct("=I4x")
_FORGET_ONE = struct.Struct("=QQ")
_OPEN = struct.Struct("=I4x")  # flags of open(2), without those that the kernel handles itself
_READ = struct.Struct("=QQI4x8x8x")  # handle, first byte or entry, number of bytes or room for entries
_RELEASE = struct.Struct("=Q16x")  # handle
_GET_EXTENDED = struct.Struct("=I4x")  # room for the value or the names; 0 asks for their length
_INTERRUPT = struct.Struct("=Q")  # number of the request whose program has received a signal


class MalformedRequestError(ValueError):
    """The bytes are not a request as the protocol describes it."""


class RequestHeader(NamedTuple):
    """The header of every request.

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


def _parse_init(body: memoryview) -> tuple[int, int, int, int]:
    """Return major and minor version, the kernel's longest read-ahead in bytes, and all bits of ``Feature`` that it knows."""
    if len(body) < _INIT.size:
        raise MalformedRequestError(f"INIT has {len(body)} bytes")
    major, minor, read_ahead_bytes_max, features = _INIT.unpack_from(body)
    if features & Feature.INIT_EXT and len(body) >= _INIT.size + _INIT_EXTENDED.size:
        features |= _INIT_EXTENDED.unpack_from(body, _INIT.size)[0] << 32
    return major, minor, read_ahead_bytes_max, features


def _parse_forgets(body: memoryview) -> tuple[tuple[int, int], ...]:
    """Return inode number and number of references for each node."""
    if len(body) < _FORGET_COUNT.size:
        raise MalformedRequestError(f"BATCH_FORGET has {len(body)} bytes")
    (count,) = _FORGET_COUNT.unpack_from(body)
    items = body[_FORGET_COUNT.size :]
    if len(items) != count * _FORGET_ONE.size:
        raise MalformedRequestError(f"BATCH_FORGET of {count} nodes has {len(body)} bytes")
    return tuple(_FORGET_ONE.iter_unpack(items))


def _parse_name(body: memoryview) -> tuple[bytes]:
    """Return the name of a directory entry, without the NUL that ends it."""
    name = bytes(body)
    if len(name) < 2 or name.find(0) != len(name) - 1:
        raise MalformedRequestError(f"a name of {len(name)} bytes is empty, contains NUL, or does not end with it")
    return (name[:-1],)


def _parse_get_extended(body: memoryview) -> tuple[int, bytes]:
    """Return the room for the value, where 0 asks for its length, and the name of the attribute."""
    if len(body) < _GET_EXTENDED.size:
        raise MalformedRequestError(f"GETXATTR has {len(body)} bytes")
    return _GET_EXTENDED.unpack_from(body)[0], *_parse_name(body[_GET_EXTENDED.size :])


def _unpack(form: struct.Struct, body: memoryview) -> tuple[int, ...]:
    if len(body) != form.size:
        raise MalformedRequestError(f"the body of a request has {len(body)} bytes instead of {form.size}")
    return form.unpack(body)


PARSERS: dict[int, Callable[[memoryview], tuple[Any, ...]]] = {
    Operation.INIT: _parse_init,
    Operation.LOOKUP: _parse_name,
    Operation.FORGET: partial(_unpack, _FORGET),
    Operation.BATCH_FORGET: _parse_forgets,
    Operation.OPEN: partial(_unpack, _OPEN),
    Operation.READ: partial(_unpack, _READ),
    Operation.READDIR: partial(_unpack, _READ),
    Operation.READDIRPLUS: partial(_unpack, _READ),
    Operation.RELEASE: partial(_unpack, _RELEASE),
    Operation.RELEASEDIR: partial(_unpack, _RELEASE),
    Operation.GETXATTR: _parse_get_extended,
    Operation.LISTXATTR: partial(_unpack, _GET_EXTENDED),
    Operation.INTERRUPT: partial(_unpack, _INTERRUPT),
}
"""Functions that return the values in the body of an operation. Other bodies are not read: they are empty, or the answer does
not depend on them."""
