"""Messages between processes, over a pair of Unix sockets: JSON, so that nothing that arrives can run code.

A frame is the length of its content in 4 bytes, big-endian, and the content. The end of the stream means that the process at
the other end has ended, for whatever reason.
"""

from __future__ import annotations

import json
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping

FRAME_BYTES_MAX = 16 * 1024 * 1024
_LENGTH = struct.Struct(">I")


class JsonChannel:
    """One end of the connection, on an event loop.

    Args:
        end: The socket; it is closed with the channel.
        reader: Reading side.
        writer: Writing side.
    """

    def __init__(self, end: socket.socket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._socket = end
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, end: socket.socket) -> JsonChannel:
        """Return the end of a connection that a socket is; the socket belongs to it."""
        import asyncio  # not above: a loader's workers, which need only receive_exactly, start without it

        end.setblocking(False)
        return cls(end, *await asyncio.open_unix_connection(sock=end))

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; if the other end is gone, it is dropped.

        Raises:
            ValueError: The message is too long, or JSON cannot express it.
        """
        content = json.dumps(message, separators=(",", ":")).encode()
        if len(content) > FRAME_BYTES_MAX:
            raise ValueError(f"a message of {len(content)} bytes is longer than {FRAME_BYTES_MAX}")
        if not self._writer.is_closing():
            self._writer.write(_LENGTH.pack(len(content)) + content)

    async def receive(self) -> dict[str, Any] | None:
        """Return the next message; None if the other end is gone.

        Raises:
            ValueError: The other end has sent something that is not a message.
        """
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > FRAME_BYTES_MAX:
                raise ValueError(f"a message of {length} bytes is longer than {FRAME_BYTES_MAX}")
            message = json.loads(await self._reader.readexactly(length))
        except (EOFError, OSError):
            return None
        if isinstance(message, dict):
            return message
        raise ValueError(f"{type(message).__name__} is not a message")

    async def drain(self) -> None:
        """Wait until all sent bytes have left this process."""
        with suppress(OSError):
            await self._writer.drain()

    def end_receiving(self) -> None:
        """Let ``receive`` return None after the arrived messages, although another process may still hold the other end."""
        with suppress(OSError):  # it is closed
            self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Close this end; idempotent."""
        self._writer.close()


def receive_exactly(end: socket.socket, length: int) -> bytearray | None:
    """Return the next bytes of a socket that blocks; None if the other end is gone before."""
    data = bytearray(length)
    view, at = memoryview(data), 0
    while at < length:
        count = end.recv_into(view[at:])
        if not count:
            return None
        at += count
    return data
