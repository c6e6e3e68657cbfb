"""Writes the output of worker processes to the gateway's log, line by line."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os

from penstock.config import KIB
from penstock.redaction import printable

log = logging.getLogger("penstock.gateway.transforms")

READ_BYTES = 16 * KIB
PAUSE_S = 0.05
"""Time after each reading. A transform that floods its output is slowed down to 300 KB/s."""
LINE_BYTES_MAX = 8 * KIB


class ProcessLog:
    """Reads a pipe until it is closed.

    Args:
        descriptor: Reading end of the pipe; it is closed with this object.
        name: Name of the access point.
        process_id: Id of the process that writes.
    """

    def __init__(self, descriptor: int, *, name: str, process_id: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._descriptor = descriptor
        self._who = f"{name}[{process_id}]"
        self._rest = b""
        self._pause: asyncio.TimerHandle | None = None
        os.set_blocking(descriptor, False)
        self._listen()

    def _listen(self) -> None:
        self._pause = None
        self._loop.add_reader(self._descriptor, self._read)

    def _read(self) -> None:
        self._loop.remove_reader(self._descriptor)
        try:
            data = os.read(self._descriptor, READ_BYTES)
        except BlockingIOError:
            data = None
        if data is not None:
            self._take(data)
        if data != b"":
            self._pause = self._loop.call_later(PAUSE_S, self._listen)

    def _take(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_BYTES_MAX or (not data and self._rest):
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            text = printable(line[:LINE_BYTES_MAX].decode(errors="replace").rstrip())
            if text:
                log.info("%s: %s", self._who, text)

    def close(self) -> None:
        """Log what is still in the pipe, and close it; idempotent."""
        if self._descriptor < 0:
            return
        self._loop.remove_reader(self._descriptor)
        if self._pause is not None:
            self._pause.cancel()
        with contextlib.suppress(OSError):
            self._take(os.read(self._descriptor, READ_BYTES))
        if self._rest:
            self._take(b"")
        os.close(self._descriptor)
        self._descriptor = -1
