"""How much a cache holds, counted for all processes in one small file.

``usage`` has an int64 for each of the 256 folders: the bytes that its entries take. Whoever stores or removes an entry adds
to its folder's number, under that byte's lock; the sum is one read of 2 KiB. A process that is killed between a rename
and its addition leaves its folder's number wrong by that entry, until the folder is scanned next, which sets the number to
what is there: eviction scans folders all the time, and a process that stores scans one per as many entries as folders hold.
No lock is waited for longer than a moment: a stopped process must stop nobody, and a number that is off heals.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
from array import array
from contextlib import suppress
from pathlib import Path

from penstock import forks
from penstock.cache.entry import FOLDERS_COUNT

_NUMBER = struct.Struct("<q")
_FLOCK = struct.Struct("hhqqi4x")
_BYTES = FOLDERS_COUNT * _NUMBER.size
_TRIES_MAX = 50
_PAUSE_S = 0.0002

UNKNOWN = -1
"""Of a folder that was never counted: the file was lost, the folder was not."""


class Usage:
    """The numbers of one cache. Safe from any thread and process.

    Args:
        path: Of the file.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._reset()
        forks.register(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._fd = -1

    def after_fork_in_child(self) -> None:
        """A descriptor of one's own: locks belong to descriptors."""
        fd = self._fd
        self._reset()
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """Close the descriptor; the numbers can still be read. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()

    def open(self, *, empty: bool) -> None:
        """Have the file open; where there is none, one that knows nothing, or zeros for an `empty` cache.

        Raises:
            OSError: it can neither be opened nor made.
        """
        with self._lock:
            if self._fd >= 0 and os.fstat(self._fd).st_nlink:
                return
            if self._fd >= 0:  # removed under way: the others use a new one
                os.close(self._fd)
                self._fd = -1
            try:
                fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                    raise
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
                return
            if os.fstat(fd).st_size < _BYTES:
                os.pwrite(fd, _NUMBER.pack(0 if empty else UNKNOWN) * FOLDERS_COUNT, 0)
            self._fd = fd

    def numbers(self) -> array[int]:
        """Bytes by folder; ``UNKNOWN`` where that is so."""
        found = array("q")
        raw = b""
        with suppress(OSError):
            raw = os.pread(self._fd, _BYTES, 0) if self._fd >= 0 else Path(self._path).read_bytes()
        found.frombytes(raw.ljust(_BYTES, b"\0")[:_BYTES])
        return found

    def total_bytes(self) -> int:
        """Of all folders that were counted."""
        numbers = self.numbers()
        return sum(numbers) + numbers.count(UNKNOWN)

    def add(self, folder: int, delta_bytes: int) -> None:
        """An entry came or went. An unknown number stays unknown."""
        self._change(folder, lambda number: number if number == UNKNOWN else max(0, number + delta_bytes))

    def set(self, folder: int, size_bytes: int) -> None:
        """A folder was counted."""
        self._change(folder, lambda _: size_bytes)

    def _change(self, folder: int, change: object) -> None:
        assert callable(change)
        if self._fd < 0:
            return
        offset = folder * _NUMBER.size
        with self._lock, suppress(OSError):
            locked = self._locked(fcntl.F_WRLCK, offset)
            try:
                raw = os.pread(self._fd, _NUMBER.size, offset).ljust(_NUMBER.size, b"\0")
                os.pwrite(self._fd, _NUMBER.pack(change(_NUMBER.unpack(raw)[0])), offset)
            finally:
                if locked:
                    self._locked(fcntl.F_UNLCK, offset)

    def _locked(self, kind: int, offset: int) -> bool:
        for _ in range(_TRIES_MAX):
            try:
                fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, 0, offset, _NUMBER.size, 0))
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    return False
                time.sleep(_PAUSE_S)
            else:
                return True
        return False  # its holder is stopped: a number that is off by an entry heals, a job that waits does not
