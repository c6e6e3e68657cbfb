"""Locks on files, by which processes exclude each other.

The kernel releases every lock when its holder ends, in whatever way it ends. The three kinds differ in who the holder is:

* A *range lock* (``F_OFD_SETLK``) belongs to an open file: all threads that use the descriptor share it, and so does a child
  that inherited the descriptor. It covers a range of bytes, which need not exist in the file.
* A *file lock* (``flock``) belongs to an open file as well, and covers all of it.
* A *process lock* (``lockf``) belongs to the process: it also works among processes that inherited one descriptor.
"""

from __future__ import annotations

import errno
import fcntl
import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid


def try_lock_range(fd: int, start: int, length: int = 1) -> bool:
    """Lock the bytes [start, start + length) of an open file; False if another open file has a lock on any of them.

    Raises:
        OSError: The file system has no such locks, or the descriptor is not open for writing.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, start, length, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def unlock_range(fd: int, start: int, length: int = 1) -> None:
    """Release the lock on the bytes [start, start + length) of an open file."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, 0, start, length, 0))


def is_range_locked(fd: int, start: int, length: int = 1) -> bool:
    """Whether another open file has a lock on any of the bytes [start, start + length)."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, start, length, 0))
    return bool(_FLOCK.unpack(answer[: _FLOCK.size])[0] != fcntl.F_UNLCK)


def try_lock_file(fd: int) -> bool:
    """Lock an open file; False if another open file has the lock. Closing the descriptor releases it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def process_lock(fd: int) -> Iterator[None]:
    """Hold the lock of an open file for this process, and wait while another process holds it."""
    fcntl.lockf(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN)
