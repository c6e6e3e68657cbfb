"""Messages between the supervisor and its worker processes, over a pair of Unix sockets.

The first frame is the ``WorkerOrder``, which the supervisor pickles; all others are JSON, so that nothing that comes from a
worker can run code in the supervisor. A frame is its length in 4 bytes, and its content. The end of the stream means that
the process at the other end has ended, for whatever reason.
"""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket

    from penstock.gateway.authentication.keys import AccessKey, AccessKeys
    from penstock.gateway.config import GatewayConfig

FRAME_BYTES_MAX = 16 * 1024 * 1024
_LENGTH = struct.Struct(">I")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOrder:
    """The configuration and keys of a worker process, sent over a channel: others can read arguments and environments.

    Attributes:
        config: The configuration, checked.
        keys: The access keys; None lets everybody in.
        internal_key: Key that signs the URLs of the internal endpoints; all processes of a gateway share it.
        index: Number of this process, from 0.
        started_s: When the gateway was started, in seconds since 1970.
    """

    config: GatewayConfig
    keys: AccessKeys | None
    internal_key: AccessKey
    index: int
    started_s: float


def encode(message: dict[str, Any]) -> bytes:
    """Return a message as a frame."""
    return frame(json.dumps(message, separators=(",", ":")).encode())


def encode_order(order: WorkerOrder) -> bytes:
    """Return the order as the first frame."""
    return frame(pickle.dumps(order))


def encode_keys(keys: AccessKeys | None) -> str:
    """Return access keys as a member of a message to a worker."""
    return base64.b64encode(pickle.dumps(keys)).decode()


def decode_keys(text: str) -> AccessKeys | None:
    """Return the keys that ``encode_keys`` encoded. Only a worker calls it, for what its supervisor sent."""
    keys: AccessKeys | None = pickle.loads(base64.b64decode(text))
    return keys


def frame(content: bytes) -> bytes:
    """Return content with its length in front.

    Raises:
        ValueError: It is longer than ``FRAME_BYTES_MAX``.
    """
    if len(content) > FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {len(content)} bytes is longer than {FRAME_BYTES_MAX}")
    return _LENGTH.pack(len(content)) + content


def read_order(channel: socket.socket) -> WorkerOrder:
    """Wait for the first frame, and return the order.

    Raises:
        EOFError: The supervisor has ended.
    """
    (length,) = _LENGTH.unpack(_exactly(channel, _LENGTH.size))
    order = pickle.loads(_exactly(channel, length))  # the supervisor wrote it, and nobody else has the other end
    assert isinstance(order, WorkerOrder)
    return order


def _exactly(channel: socket.socket, count: int) -> bytes:
    pieces = bytearray()
    while len(pieces) < count:
        piece = channel.recv(count - len(pieces))
        if not piece:
            raise EOFError("the supervisor has ended")
        pieces += piece
    return bytes(pieces)


class Channel:
    """One end of the connection, on an event loop.

    Args:
        reader: Reading side.
        writer: Writing side.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, sock: socket.socket) -> Channel:
        """Return the end of a connection that a socket is; the socket belongs to it."""
        sock.setblocking(False)
        return cls(*await asyncio.open_unix_connection(sock=sock))

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; if the other end is gone, it is dropped."""
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    def send_order(self, order: WorkerOrder) -> None:
        """Send the first frame."""
        self._writer.write(encode_order(order))

    async def receive(self) -> dict[str, Any] | None:
        """Return the next message; None if the other end is gone."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > FRAME_BYTES_MAX:
                return None
            message = json.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError):
            return None
        assert isinstance(message, dict)
        return message

    async def drain(self) -> None:
        """Wait until what was sent has left this process."""
        try:
            await self._writer.drain()
        except OSError:
            return

    def close(self) -> None:
        """Close this end; idempotent."""
        self._writer.close()
