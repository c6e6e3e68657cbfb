"""The two small files with which the processes of a node coordinate their use of a cache: leases and usage.

A *lease* is a lock on one byte of the file ``leases``. The offset of the byte is a hash of the name of the entry that the
process fetches. One descriptor per process holds all its leases, and the kernel releases them when the process ends in
whatever way, so a killed process leaves nothing behind. If two names have the same one of the 2^60 offsets, the second waits
needlessly for the first.

The names of a process's temporary files contain its *token*. The process holds the lock on its token's byte as long as it
lives, so others know which temporary files are no longer written. Process IDs would not work, as containers do not share them.

The file ``usage`` holds an int64 for each of the 256 folders: the bytes that its entries take. A process adds to these
numbers before it stores entries, unless the sum would pass the limit, and subtracts after it removed some. Both happen under
a lock on the whole file. If a process is killed in between, the numbers of its folders are too high until the next scan of
them. Eviction scans folders all the time; a process that stores entries scans one folder for as many entries as a
folder holds. No process waits long for this lock: a stopped process must not stop the others, and a wrong number corrects
itself.
"""

from __future__ import annotations

import errno
import os
import secrets
import struct
import threading
import time
from array import array
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cache.entry import FOLDERS_COUNT
from penstock.system import forks
from penstock.system.locks import is_range_locked, try_lock_range, unlock_range
from penstock.system.private import open_private

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.cache.statistics import DiskFailures

_NAMES = 1 << 60
_TOKENS = 1 << 62  # offset of the first token's byte
_TOKEN_BITS = 52

_NUMBER = struct.Struct("<q")
_BYTES = FOLDERS_COUNT * _NUMBER.size
_TRIES_MAX = 50
_PAUSE_S = 0.0002

UNKNOWN = -1
"""The number of a folder that was never counted: the file was lost, but the folder was not."""


class SharedFile:
    """A file that every process of the node opens once. A forked child opens it again, since locks belong to descriptors.

    Args:
        path: Path of the file; it is created when it is first needed.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._reset()
        forks.register(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._fd = -1

    def after_fork_in_child(self) -> None:
        """Close the inherited descriptor; the parent's own keeps the parent's locks."""
        fd = self._fd
        self._reset()
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """Close the descriptor, which releases its locks; idempotent."""
        with self._lock:  # no other thread may use the number of the descriptor, which the next file gets
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()


class Leases(SharedFile):
    """The leases of this process. All threads may use it, and nothing blocks.

    Args:
        path: Path of the file; it is created when it is first needed.
        failures: Records that locks are not available; then no process waits for another.
    """

    def __init__(self, path: str, failures: DiskFailures) -> None:
        self._failures = failures
        super().__init__(path)

    def _reset(self) -> None:
        super()._reset()
        self._closed = False
        self._token = secrets.randbits(_TOKEN_BITS)

    def close(self) -> None:
        """Close the descriptor, which releases all leases; idempotent."""
        self._closed = True
        super().close()

    @property
    def token(self) -> str:
        """The part of the names of temporary files that identifies this process."""
        return f"{self._token:013x}"

    def open(self, *, anew: bool = False) -> bool:
        """Open the file and lock this process's token if that is not done yet; False if it cannot be done.

        Args:
            anew: Whether to open the file also if it was removed since, as the other processes use a new one.
        """
        if self._fd >= 0 and not anew:
            return True
        with self._lock:
            if self._closed:
                return False
            if self._fd >= 0 and os.fstat(self._fd).st_nlink > 0:
                return True
            try:
                fd = open_private(self._path, os.O_RDWR | os.O_CREAT)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTDIR):  # the first write creates the directory
                    self._failures.note("lock", error)
                return False
            try:
                try_lock_range(fd, _TOKENS + self._token)
            except OSError as error:
                os.close(fd)
                self._failures.note("lock", error)
                return False
            if self._fd < 0:
                self._fd = fd
            else:
                os.dup2(fd, self._fd, inheritable=False)  # atomic for threads that use the number; releases old leases
                os.close(fd)
            return True

    def try_take(self, name: int, count: int = 1) -> bool | None:
        """Take the leases of `name` and of the `count` - 1 names that follow it, all or none.

        Returns:
            True if they were taken, False if another process has one of them, None if leases are not available.
        """
        if not self.open():
            return None
        try:
            with self._lock:
                return try_lock_range(self._fd, name % _NAMES, count) if self._fd >= 0 else None
        except OSError as error:
            self._failures.note("lock", error)
            return None

    def release(self, name: int, count: int = 1) -> None:
        """Give back the leases of `name` and of the `count` - 1 names that follow it."""
        try:
            with self._lock:
                if self._fd >= 0:  # closing the file released all of them
                    unlock_range(self._fd, name % _NAMES, count)
        except OSError as error:
            self._failures.note("lock", error)

    def is_alive(self, token: str) -> bool:
        """Whether the process with this token is still running; True if that is not known."""
        if not self.open():
            return True
        try:
            number = int(token, 16)
        except ValueError:
            return False
        if number >= 1 << _TOKEN_BITS or number == self._token:
            return number == self._token
        with self._lock:
            return self._fd < 0 or is_range_locked(self._fd, _TOKENS + number)


class Usage(SharedFile):
    """The bytes that the entries of each folder take. All threads and processes may use it.

    Args:
        path: Path of the file.
    """

    def open(self, *, empty: bool) -> None:
        """Open the file if it is not open yet.

        Args:
            empty: Whether the cache has no entries. A new file then holds zeros, otherwise ``UNKNOWN`` for each folder.

        Raises:
            OSError: The file can neither be opened nor created.
        """
        with self._lock:
            if self._fd >= 0 and os.fstat(self._fd).st_nlink:
                return
            if self._fd >= 0:  # it was removed, and the other processes use a new one
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
        """Return the bytes of each folder, or ``UNKNOWN``. This also works after ``close()``."""
        found = array("q")
        raw = b""
        with suppress(OSError):
            raw = os.pread(self._fd, _BYTES, 0) if self._fd >= 0 else Path(self._path).read_bytes()
        found.frombytes(raw.ljust(_BYTES, b"\0")[:_BYTES])
        return found

    def total_bytes(self) -> int:
        """Return the sum over all folders whose bytes are known."""
        numbers = self.numbers()
        return sum(numbers) + numbers.count(UNKNOWN)

    def add(self, deltas_bytes: Mapping[int, int], total_bytes_max: int | None = None) -> bool:
        """Change the numbers of several folders, all or none. An unknown number remains unknown.

        Args:
            deltas_bytes: Bytes to add to each folder's number; negative where entries were removed.
            total_bytes_max: Change nothing if the sum over all folders would exceed this, or is unknown.

        Returns:
            False if `total_bytes_max` forbids the change. If the file cannot be written the result is True, and a later scan
            corrects the numbers.

        Cost: four system calls, whatever the number of folders.
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
        """Set the number of a folder to the result of a scan."""

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
                with suppress(OSError):  # the file is read-only, or was closed
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
        return False  # its holder was stopped: go on without the lock, since a number that is off corrects itself
