"""The open ``/dev/fuse``: requests are read from it, and replies written to it."""

from __future__ import annotations

import errno
import fcntl
import os

GONE = frozenset({errno.ENODEV, errno.ECONNABORTED, errno.ENOTCONN, errno.EPERM})
"""What reading and writing says once the file system is unmounted, or its connection was aborted."""


class Device:
    """Owns the descriptor of one connection to the kernel.

    A reply may be written by any thread at any time, also while the device is being closed. A closed descriptor's number is
    soon that of another file, into which a late reply must not be written. Therefore ``close`` puts ``/dev/null`` in its place,
    and the number itself is given back when nothing refers to this object.
    """

    __slots__ = ("__weakref__", "_number", "is_open")

    def __init__(self, descriptor: int) -> None:
        self._number = descriptor
        self.is_open = True
        os.set_blocking(descriptor, False)

    def fileno(self) -> int:
        """Return the descriptor, for polling."""
        return self._number

    def read(self, buffers: list[bytearray]) -> int:
        """Read one request; 0 if there is none after all.

        Raises:
            OSError: The connection has ended (``GONE``), or cannot be read.
        """
        try:
            return os.readv(self._number, buffers)
        except OSError as error:
            if error.errno in (
                errno.EAGAIN,
                errno.EINTR,
                errno.ENOENT,
            ):  # ENOENT: the program gave up while it was read
                return 0
            raise

    def write(self, message: list[bytes | bytearray | memoryview]) -> None:
        """Write one reply or notification.

        Raises:
            OSError: Nobody waits for it (``ENOENT``), the connection has ended, or the message is refused.
        """
        os.writev(self._number, message)

    def control(self, number: int, argument: bytes) -> int:
        """Call ioctl(2) on the device, and return its result.

        Raises:
            OSError: The system refuses, or the connection has ended (``ENOTTY``).
        """
        return int(fcntl.ioctl(self._number, number, bytearray(argument)))  # with bytes, it would not return the number

    def close(self) -> None:
        """End the connection: programs that wait get ``ECONNABORTED``, and later ones ``ENOTCONN``."""
        if self.is_open:
            self.is_open = False
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.dup2(null, self._number, inheritable=False)
            finally:
                os.close(null)

    def __del__(self) -> None:
        os.close(self._number)
