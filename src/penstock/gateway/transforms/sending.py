"""The output of a transform on its way out of the worker: small pieces are gathered, large ones are sent as they are."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from penstock.config import KIB
from penstock.gateway.transforms.messages import DATA_BYTES_MAX, HEAD, FrameKind
from penstock.gateway.transforms.output import view_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable

    from penstock.types import Buffer

GATHER_BYTES_MAX = 256 * KIB
"""Bytes that are gathered before they are sent: a frame costs about 15 µs at both ends, and copying 256 KiB as much."""

GATHER_PIECE_BYTES_MAX = 32 * KIB
"""Longest piece that is copied; a longer one is sent from where it is."""

GATHER_PIECES_MAX = 16 * 1024
"""Most pieces that are gathered, however short: an object of bytes takes 33 bytes more than its contents."""

GATHER_S_MAX = 0.05
"""Longest time for which gathered bytes wait."""


class OutputSender:
    """Sends frames to the gateway: the main thread's, and from a timer what has been gathered for too long.

    Small pieces are gathered in a queue, which the main thread fills without a lock; the lock is held while something is sent.

    Args:
        end: The socket, which blocks.
        check: Called before each piece; raises if the call was cancelled.

    Cost: One thread, which wakes only while bytes wait. A small piece costs a copy and about 0.15 µs.
    """

    def __init__(self, end: socket.socket, *, check: Callable[[], None]) -> None:
        self._socket = end
        self._check = check
        self._gathered: deque[bytes] = deque()
        self._lock = threading.Lock()
        self._is_armed = False  # whether the timer knows that something waits
        self._armed = threading.Event()
        self._timer = threading.Thread(target=self._flush_late, name="penstock-transform-flush", daemon=True)
        self._timer.start()

    def send_frame(self, data: bytes) -> None:
        """Send a whole frame, after all output before it."""
        with self._lock:
            self._send(data)

    def send_output(self, pieces: Iterable[Buffer]) -> int:
        """Send the pieces of an output, and return their length together. No piece is referred to when the next is requested.

        Raises:
            WrongOutputError: A piece is not bytes.
            OSError: The gateway is gone.
        """
        check, gathered = self._check, self._gathered
        sent_bytes = waiting_bytes = 0
        for piece in pieces:
            check()
            if type(piece) is not bytes:
                view = view_of(piece)
                piece = bytes(view) if view.nbytes <= GATHER_PIECE_BYTES_MAX else view.cast("B")  # noqa: PLW2901
            length = len(piece)
            sent_bytes += length
            if length > GATHER_PIECE_BYTES_MAX:
                with self._lock:
                    self._send_long(memoryview(piece))
                waiting_bytes = 0
                continue
            gathered.append(piece)  # type: ignore[arg-type]
            waiting_bytes += length
            if waiting_bytes >= GATHER_BYTES_MAX or len(gathered) >= GATHER_PIECES_MAX:
                self.flush()
                waiting_bytes = 0
            elif not self._is_armed:
                self._is_armed = True
                self._armed.set()
        return sent_bytes

    def flush(self) -> None:
        """Send what has been gathered."""
        with self._lock:
            self._send(b"")

    def drop(self) -> None:
        """Forget what has been gathered."""
        with self._lock:
            self._gathered.clear()

    def _flush_late(self) -> None:
        """Send what has been gathered for too long. The thread ends with the process."""
        pause = threading.Event()
        while self._armed.wait():
            self._armed.clear()
            pause.wait(GATHER_S_MAX)
            self._is_armed = False  # before sending, so that a piece that comes meanwhile arms it again
            try:
                self.flush()
            except OSError:
                return  # the gateway is gone, and the main thread will notice

    def _taken(self) -> bytes:
        """Take what has been gathered. The main thread may append meanwhile."""
        gathered = self._gathered
        return b"".join([gathered.popleft() for _ in range(len(gathered))])

    def _send(self, after: bytes) -> None:
        """Send what has been gathered, and a frame after it, in one call."""
        data = self._taken()
        pieces: list[Buffer] = [HEAD.pack(FrameKind.DATA, len(data)), data] if data else []
        if after:
            pieces.append(after)
        if pieces:
            _send_all(self._socket, pieces)

    def _send_long(self, rest: memoryview) -> None:
        """Send a piece that is not copied, in one call with what has been gathered before it."""
        before = self._taken()
        while rest:
            part, rest = rest[: DATA_BYTES_MAX - len(before)], rest[DATA_BYTES_MAX - len(before) :]
            _send_all(self._socket, [HEAD.pack(FrameKind.DATA, len(before) + len(part)), before, part])
            before = b""


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
