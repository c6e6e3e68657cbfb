"""One FIFO: made, waited for, written, and left when its reader leaves.

The writer must be able to end at any moment, whatever the program does. So it never blocks in a system call that nothing can
interrupt: it waits in ``poll`` for the FIFO and for an eventfd, and the FIFO's descriptor is non-blocking. Opening a FIFO for
writing has no such form, since without a reader a non-blocking open fails; that open does block, and ``cancel`` releases it by
opening the other end. Both opens go by a descriptor of the FIFO itself, so they meet even if the program removes its name.
"""

from __future__ import annotations

import fcntl
import os
import select
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.types import Buffer

_F_SETPIPE_SZ = 1031
_SIZE_FILE = Path("/proc/sys/fs/pipe-max-size")
_VECTORS_MAX = 1024  # IOV_MAX of Linux


class ReaderGoneError(Exception):
    """The program closed its end of the FIFO before the end of the epoch; it wants the next one."""


class CancelledFifoError(Exception):
    """The FIFO was cancelled."""


class Fifo:
    """A FIFO that one thread writes. ``cancel`` may be called from any thread.

    Args:
        path: Path of the FIFO. What lay there is removed if it is a FIFO, too.
        wake_fd: An eventfd that becomes readable when ``cancel`` is called for good.
    """

    def __init__(self, path: Path, wake_fd: int) -> None:
        self.path = path
        self._wake_fd = wake_fd
        self._fd: int | None = None
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._released_fd: int | None = None
        if path.is_fifo():
            path.unlink()
        os.mkfifo(path, 0o600)
        self._path_fd: int | None = os.open(path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)

    def open(self) -> None:
        """Wait for a reader.

        Raises:
            CancelledFifoError: ``cancel`` was called.
        """
        fd = os.open(f"/proc/self/fd/{self._path_fd}", os.O_WRONLY | os.O_CLOEXEC)
        with self._lock:
            self._fd = fd
            if self._is_cancelled:
                raise CancelledFifoError
        os.set_blocking(fd, False)
        with suppress(OSError):  # at the user's limit for all pipes, this one keeps the usual 64 KiB
            fcntl.fcntl(fd, _F_SETPIPE_SZ, pipe_bytes_max())

    def write(self, buffers: Sequence[Buffer]) -> None:
        """Write all of `buffers`; wait while the reader is behind.

        Raises:
            ReaderGoneError: The reader has closed the FIFO.
            CancelledFifoError: ``cancel`` was called.
        """
        assert self._fd is not None
        rest = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        while rest:
            try:
                count = os.writev(self._fd, rest[:_VECTORS_MAX])
            except BlockingIOError:
                self._wait()
                continue
            except BrokenPipeError:
                raise ReaderGoneError from None
            while rest and count >= len(rest[0]):
                count -= len(rest[0])
                rest.pop(0)
            if count:
                rest[0] = rest[0][count:]

    def _wait(self) -> None:
        """Wait until the FIFO has room."""
        poller = select.poll()
        assert self._fd is not None
        poller.register(self._fd, select.POLLOUT)
        poller.register(self._wake_fd, select.POLLIN)
        for fd, _ in poller.poll():
            if fd == self._wake_fd:
                raise CancelledFifoError

    def remove(self) -> None:
        """Remove the FIFO from its directory; the reader keeps what it has open."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the writer's end, after which the reader finds the end of the file; idempotent."""
        with self._lock:
            for fd in (self._fd, self._released_fd, self._path_fd):
                if fd is not None:
                    os.close(fd)
            self._fd = self._released_fd = self._path_fd = None

    def cancel(self) -> None:
        """Have ``open`` end if it waits; ``write`` ends by the eventfd."""
        with self._lock:
            self._is_cancelled = True
            if self._fd is None and self._released_fd is None and self._path_fd is not None:
                flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
                self._released_fd = os.open(f"/proc/self/fd/{self._path_fd}", flags)


@cache
def pipe_bytes_max() -> int:
    """Return the largest size of a pipe that the system lets users choose: 1 MiB, unless an administrator changed it."""
    try:
        return int(_SIZE_FILE.read_text())
    except (OSError, ValueError):
        return 1 << 20
