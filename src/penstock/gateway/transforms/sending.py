"""The output of a transform on its way out of the worker: small pieces are gathered, large ones are sent as they are."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from penstock.config import KIB
from penstock.gateway.transforms.messages import DATA_BYTES_MAX, HEAD, FrameKind

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from penstock.types import Buffer

GATHER_BYTES_MAX = 256 * KIB
"""Bytes that are gathered before they are sent: a frame costs about 15 µs at both ends, and copying 256 KiB as much."""

GATHER_PIECE_BYTES_MAX = 32 * KIB
"""Longest piece that is copied; a longer one is sent from where it is."""

GATHER_S_MAX = 0.05
"""Longest time for which gathered bytes wait."""


class OutputSender:
    """Sends frames to the gateway, the main thread's and those of a timer that sends what has been gathered for too long.

    Args:
        end: The socket, which blocks.
        check: Called before each piece; raises if the call was cancelled.

    Cost: One thread, which wakes only while bytes wait. A small piece costs a copy and about 0.3 µs.
    """

    def __init__(self, end: socket.socket, *, check: Callable[[], None]) -> None:
        self._socket = end
        self._check = check
        self._gathered = bytearray(GATHER_BYTES_MAX + GATHER_PIECE_BYTES_MAX)
        self._view = memoryview(self._gathered)
        self._length = 0
        self._lock = threading.Lock()
        self._wanted = threading.Event()
        self._timer = threading.Thread(target=self._flush_late, name="penstock-transform-flush", daemon=True)
        self._timer.start()

    def send_frame(self, data: bytes) -> None:
        """Send a whole frame, after all output before it."""
        with self._lock:
            self._send(data)

    def add(self, piece: Buffer) -> int:
        """Take a piece of the output, and return its length. The piece is not referred to after that.

        Raises:
            TypeError: It is not bytes.
            OSError: The gateway is gone.
        """
        self._check()
        if not isinstance(piece, bytes):
            piece = memoryview(piece).cast("B")
        length = len(piece)
        if length > GATHER_PIECE_BYTES_MAX:
            with self._lock:
                self._send_long(piece)
            return length
        with self._lock:
            at = self._length
            self._view[at : at + length] = piece
            self._length = at + length
            if self._length >= GATHER_BYTES_MAX:
                self._send(b"")
        if at == 0:
            self._wanted.set()
        return length

    def flush(self) -> None:
        """Send what has been gathered."""
        with self._lock:
            self._send(b"")

    def drop(self) -> None:
        """Forget what has been gathered."""
        with self._lock:
            self._length = 0

    def _flush_late(self) -> None:
        """Send what has been gathered for too long. The thread ends with the process."""
        pause = threading.Event()
        while self._wanted.wait():
            self._wanted.clear()
            pause.wait(GATHER_S_MAX)
            try:
                self.flush()
            except OSError:
                return  # the gateway is gone, and the main thread will notice

    def _send(self, after: bytes) -> None:
        """Send what has been gathered, and a frame after it, in one call."""
        pieces: list[Buffer] = []
        if self._length:
            pieces = [HEAD.pack(FrameKind.DATA, self._length), self._view[: self._length]]
        if after:
            pieces.append(after)
        if pieces:
            _send_all(self._socket, pieces)
        self._length = 0

    def _send_long(self, piece: Buffer) -> None:
        """Send a piece that is not copied, in one call with what has been gathered before it."""
        rest = memoryview(piece)
        while rest:
            part, rest = rest[: DATA_BYTES_MAX - self._length], rest[DATA_BYTES_MAX - self._length :]
            head = HEAD.pack(FrameKind.DATA, self._length + len(part))
            _send_all(self._socket, [head, self._view[: self._length], part])
            self._length = 0


def _send_all(end: socket.socket, pieces: list[Buffer]) -> None:
    sent = end.sendmsg(pieces)
    if sent == sum(map(len, pieces)):
        return
    for piece in pieces:
        if sent >= len(piece):
            sent -= len(piece)
        else:
            end.sendall(memoryview(piece)[sent:])
            sent = 0
