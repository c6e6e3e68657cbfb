"""Who fetches what, among the processes of a node: byte locks that die with their holder.

A lease is a lock of one byte of the file ``leases``, at an offset that the name of what is fetched hashes to. Open file
description locks (``F_OFD_SETLK``) belong to the descriptor, not to the thread or the process id: one descriptor per
process holds all its leases, the kernel drops them when the process ends in whatever way, nothing is left behind, and no
file is made or removed. Two names of one offset (of 2^60) only wait for each other needlessly.

A process's temporary files carry its token; it holds the lock of that token's byte for its life, so that whoever cleans
up knows which of them nobody writes any more, without process ids, which containers do not share.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
from typing import TYPE_CHECKING

from penstock import forks
from penstock.locks import is_range_locked, try_lock_range, unlock_range
from penstock.private import open_private

if TYPE_CHECKING:
    from penstock.cache.troubles import Troubles

_NAMES = 1 << 60
_TOKENS = 1 << 62  # where the bytes of tokens begin
_TOKEN_BITS = 52


class Leases:
    """The leases of this process. Safe from any thread; nothing blocks.

    Args:
        path: Of the file; made when first needed.
        troubles: Told when there can be no locks; then nobody waits for anybody.
    """

    def __init__(self, path: str, troubles: Troubles) -> None:
        self._path = path
        self._troubles = troubles
        self._reset()
        forks.register(self)

    def _reset(self) -> None:
        self._closed = False
        self._lock = threading.Lock()
        self._fd = -1
        self._token = secrets.randbits(_TOKEN_BITS)

    def after_fork_in_child(self) -> None:
        """The parent's leases stay the parent's: closing the inherited descriptor drops none of them."""
        fd = self._fd
        self._reset()
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """Close the descriptor, and with it end what it holds; idempotent."""
        with self._lock:  # nobody else is using the descriptor, whose number the next file gets
            self._closed = True
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()

    @property
    def token(self) -> str:
        """This process's part of the names of its temporary files."""
        return f"{self._token:013x}"

    def open(self) -> bool:
        """Have the file open and this process's token locked; False where that cannot be."""
        return self._fd >= 0 or self._open()

    def reopen(self) -> bool:
        """As ``open``, also where somebody removed the file: the others use a new one."""
        return self._open()

    def _open(self) -> bool:
        with self._lock:
            if self._closed:
                return False
            if self._fd >= 0 and os.fstat(self._fd).st_nlink > 0:
                return True
            try:
                fd = open_private(self._path, os.O_RDWR | os.O_CREAT)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTDIR):  # the directory comes with the first write
                    self._troubles.note("lock", error)
                return False
            try:
                try_lock_range(fd, _TOKENS + self._token)
            except OSError as error:
                os.close(fd)
                self._troubles.note("lock", error)
                return False
            if self._fd < 0:
                self._fd = fd
            else:
                os.dup2(fd, self._fd, inheritable=False)  # at once, whoever uses the number now; old leases end
                os.close(fd)
            return True

    def try_take(self, name: int, count: int = 1) -> bool | None:
        """Take the leases of `name` and the `count` - 1 that follow it, all or none.

        Returns:
            True; False where another process has one of them; None where there are no leases.
        """
        if not self.open():
            return None
        try:
            with self._lock:
                return try_lock_range(self._fd, name % _NAMES, count) if self._fd >= 0 else None
        except OSError as error:
            self._troubles.note("lock", error)
            return None

    def release(self, name: int, count: int = 1) -> None:
        """Give leases back."""
        try:
            with self._lock:
                if self._fd >= 0:  # closing the file released all of them
                    unlock_range(self._fd, name % _NAMES, count)
        except OSError as error:
            self._troubles.note("lock", error)

    def is_alive(self, token: str) -> bool:
        """Whether the process of this token still runs; True where that cannot be known."""
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
