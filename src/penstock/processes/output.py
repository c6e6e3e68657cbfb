"""What a child process prints, line by line, on the event loop."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

READ_BYTES = 16 * 1024
PIPE_BYTES = 64 * 1024
"""Capacity of a pipe: what a process that has stopped printing can have left in it."""


class OutputPipe:
    """Reads a pipe, and hands on its lines.

    Args:
        descriptor: Reading end of the pipe; it is closed with this object.
        on_line: Called with each line, without its line feed.
        line_bytes_max: Longest line in bytes. Longer ones are cut.
        pause_s: Time after each reading of 16 KiB, in seconds. It slows down a process that floods its output.
    """

    def __init__(
        self, descriptor: int, on_line: Callable[[bytes], None], *, line_bytes_max: int, pause_s: float = 0.0
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._descriptor = descriptor
        self._on_line = on_line
        self._line_bytes_max = line_bytes_max
        self._pause_s = pause_s
        self._paused: asyncio.TimerHandle | None = None
        self._rest = b""
        os.set_blocking(descriptor, False)
        self._listen()

    def _listen(self) -> None:
        self._loop.add_reader(self._descriptor, self._read)

    def _read(self) -> bool:
        """Read a piece, and return whether there was one."""
        try:
            data = os.read(self._descriptor, READ_BYTES)
        except BlockingIOError:
            return False
        if not data or self._pause_s:
            self._loop.remove_reader(self._descriptor)
        if not data:
            return False
        if self._pause_s:
            if self._paused is not None:
                self._paused.cancel()
            self._paused = self._loop.call_later(self._pause_s, self._listen)
        self.take(data)
        return True

    def take(self, data: bytes) -> None:
        """Hand on the lines that end in this piece."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > self._line_bytes_max:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._on_line(line[: self._line_bytes_max])

    def drain(self) -> None:
        """Hand on all that was printed so far."""
        for _ in range(PIPE_BYTES // READ_BYTES):
            if self._descriptor < 0 or not self._read():
                break
        if self._rest:
            self.take(b"\n")

    def close(self) -> None:
        """Hand on what is left, and stop reading; idempotent."""
        if self._descriptor < 0:
            return
        self.drain()
        self._loop.remove_reader(self._descriptor)
        if self._paused is not None:
            self._paused.cancel()
        os.close(self._descriptor)
        self._descriptor = -1
