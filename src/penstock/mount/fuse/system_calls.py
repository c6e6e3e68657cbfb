"""The system calls ``mount`` and ``umount2``, which Python does not have."""

from __future__ import annotations

import ctypes
import os
from functools import cache

READ_ONLY, NO_SET_USER_ID, NO_DEVICES, NO_ACCESS_TIMES = 1, 2, 4, 1024
DETACH, NO_FOLLOW = 2, 8


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def mount(directory: str, *, source: str, kind: str, flags: int, options: str) -> None:
    """Mount a file system.

    Raises:
        OSError: The system refuses.
    """
    arguments = (
        os.fsencode(source),
        os.fsencode(directory),
        kind.encode(),
        ctypes.c_ulong(flags),
        os.fsencode(options),
    )
    if _libc().mount(*arguments):
        _raise(directory)


def unmount(directory: str, *, flags: int) -> None:
    """Unmount what is mounted on a directory.

    Raises:
        OSError: The system refuses; ``EBUSY`` if files are open and ``DETACH`` is not among the flags.
    """
    if _libc().umount2(os.fsencode(directory), ctypes.c_int(flags)):
        _raise(directory)


def _raise(directory: str) -> None:
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number), directory)
