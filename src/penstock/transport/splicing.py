"""Bodies that go from a socket to a file inside the kernel, through a pipe.

The bytes are copied once, to the file's pages, and never lie in this process's memory. The file's disk may be slow; then the
event loop waits for it, as nothing that it received meanwhile could be written either.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.memory.file_landings import FileLanding

_F_SETPIPE_SZ = 1031
_PIPE_BYTES = 1 << 20
"""What a user may choose for a pipe. It holds 256 pieces, and a piece of a body that was sent on this machine is a page."""
_SCRATCH_BYTES = 256 << 10


class Splicer:
    """Moves bodies from sockets to files. For one thread."""

    def __init__(self) -> None:
        self._pipe: tuple[int, int] | None = None
        self._scratch: memoryview | None = None

    def move(self, fd: int, landing: FileLanding, length_bytes: int) -> int:
        """Move what has arrived, up to a bound, and the landing's ``position``.

        Args:
            fd: The socket, which must not block.
            landing: Where the bytes go.
            length_bytes: Most bytes to move; the landing has room for them.

        Returns:
            The number of bytes; 0 at the end of the connection.

        Raises:
            BlockingIOError: No bytes have arrived.
            LandingFileError: The file cannot be written.
            OSError: The connection broke.
        """
        if not landing.file.splices:
            return self._copy(fd, landing, length_bytes)
        pipe = self._pipe or self._open()
        count = os.splice(fd, pipe[1], length_bytes, flags=os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK)
        left = count
        while left:
            try:
                moved = os.splice(pipe[0], landing.file.fd, left, offset_dst=landing.position)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    landing.file.splices = False
                    self._drain(pipe[0], landing, left)
                    return count
                self.close()  # with what is left in the pipe
                landing.file.fail(error)
            landing.position += moved
            left -= moved
        return count

    def close(self) -> None:
        """Close the pipe; idempotent, and the next use opens another one."""
        pipe, self._pipe = self._pipe, None
        for fd in pipe or ():
            os.close(fd)

    def _open(self) -> tuple[int, int]:
        self._pipe = reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        with suppress(OSError):  # at the user's limit for all pipes, this one keeps the usual 64 KiB
            fcntl.fcntl(writer, _F_SETPIPE_SZ, _PIPE_BYTES)
        return reader, writer

    def _drain(self, reader: int, landing: FileLanding, left: int) -> None:
        """Write what is in the pipe to a file that the kernel cannot move it to."""
        try:
            while left:
                piece = os.read(reader, left)
                landing.append(piece)
                left -= len(piece)
        except BaseException:
            self.close()
            raise

    def _copy(self, fd: int, landing: FileLanding, length_bytes: int) -> int:
        if self._scratch is None:
            self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        count = os.readv(fd, [self._scratch[:length_bytes]])
        landing.append(self._scratch[:count])
        return count
