"""How much a cache holds, counted for all processes in one small file.

``usage`` has an int64 for each of the 256 folders: the bytes that its entries take. Whoever stores entries adds to their
folders' numbers before, unless the sum would pass the limit, all under one lock; who removes some subtracts after. A process
that is killed in between leaves these folders' numbers too high, until they are scanned next, which sets a number to
what is there: eviction scans folders all the time, and a process that stores scans one per as many entries as folders hold.
No lock is waited for longer than a moment: a stopped process must stop nobody, and a number that is off heals.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
import time
from array import array
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from penstock import forks
from penstock.cache.entry import FOLDERS_COUNT
from penstock.locks import try_lock_range, unlock_range
from penstock.private import open_private

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_NUMBER = struct.Struct("<q")
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
        with self._lock:  # nobody is writing by the descriptor's number, which the next file gets
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
                fd = open_private(self._path, os.O_RDWR | os.O_CREAT)
            except OSError as error:
                if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                    raise
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
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

    def add(self, deltas_bytes: Mapping[int, int], total_bytes_max: int | None = None) -> bool:
        """Entries come or go: change the numbers of their folders, all or none. An unknown number stays unknown.

        Args:
            deltas_bytes: By folder.
            total_bytes_max: Change nothing where the sum would be more, or is not known.

        Returns:
            Whether they were changed; also True where they cannot be written, and heal later.

        Cost: four system calls, however many folders.
        """

        def change(numbers: array[int]) -> bool:
            if total_bytes_max is not None and (
                UNKNOWN in numbers or sum(numbers) + sum(deltas_bytes.values()) > total_bytes_max
            ):
                return False
            for folder, delta_bytes in deltas_bytes.items():
                if numbers[folder] != UNKNOWN:
                    numbers[folder] = max(0, numbers[folder] + delta_bytes)
            return True

        return self._change(change)

    def set(self, folder: int, size_bytes: int) -> None:
        """A folder was counted."""

        def change(numbers: array[int]) -> bool:
            numbers[folder] = size_bytes
            return True

        self._change(change)

    def _change(self, change: Callable[[array[int]], bool]) -> bool:
        with self._lock:
            locked = self._fd >= 0 and self._try_lock()
            try:
                numbers = self.numbers()
                if not change(numbers):
                    return False
                with suppress(OSError):  # it may only be read, or was closed
                    os.pwrite(self._fd, numbers.tobytes(), 0)
            finally:
                if locked:
                    with suppress(OSError):
                        unlock_range(self._fd, 0, _BYTES)
        return True

    def _try_lock(self) -> bool:
        with suppress(OSError):
            for _ in range(_TRIES_MAX):
                if try_lock_range(self._fd, 0, _BYTES):
                    return True
                time.sleep(_PAUSE_S)
        return False  # its holder is stopped: a number that is off by an entry heals, a job that waits does not
