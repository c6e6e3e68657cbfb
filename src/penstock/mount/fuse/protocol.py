"""Numbers of the kernel's FUSE protocol, as in ``linux/fuse.h``, versions 7.31 (Linux 5.4) to 7.45 (Linux 6.18).

All numbers in messages have the byte order of the machine, and all fields are aligned without the compiler's help.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

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
