"""What a loader and its cluster say to each other: the messages of the broker, and connections to machines.

At both ends of a connection, a side proves that it knows a secret before it uses the socket.
Messages over the connection are pickles, so neither end may read one from a stranger. The secret is made for each worker, and
Ray hands it to both sides as an argument of a call of an actor, which neither its logs nor its dashboard show.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import ProtocolError
from penstock.processes.channel import receive_exactly

if TYPE_CHECKING:
    from penstock.loader.workers.messages import RemoteError

CONNECT_S_MAX = 3.0
_NONCE_BYTES = 32


@dataclass(frozen=True, slots=True)
class HostsWanted:
    """From the loader: keep `count` actors, and end those with these names; of a shared pool, `wish` are wanted."""

    count: int
    wish: int
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HostJoined:
    """To the loader: an actor listens here, and knows this secret."""

    name: str
    node: str
    port: int
    secret: bytes


@dataclass(frozen=True, slots=True)
class HostLeft:
    """To the loader: an actor was lost."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class CountAllowed:
    """To the loader: how many workers of the shared pool it may have."""

    count: int


@dataclass(frozen=True, slots=True)
class BrokerFailed:
    """To the loader: there will be no actors, for this reason."""

    error: RemoteError


def connect(address: str, port: int, secret: bytes) -> socket.socket:
    """Connect to a machine's worker.

    Raises:
        OSError: Nothing answers in time, or something that does not know the secret does.
    """
    end = socket.create_connection((address, port), CONNECT_S_MAX)
    try:
        theirs, ours = _receive(end), secrets.token_bytes(_NONCE_BYTES)
        end.sendall(ours + _proof(secret, b"loader", theirs + ours))
        if not hmac.compare_digest(_receive(end), _proof(secret, b"worker", theirs + ours)):
            raise ProtocolError("what answers is not the worker")
        end.settimeout(None)
    except BaseException:
        end.close()
        raise
    return end


def accept(listener: socket.socket, secret: bytes) -> socket.socket | None:
    """Accept a connection of the loader; None if it is somebody else's.

    Raises:
        TimeoutError: Nobody has connected within the listener's time limit.
    """
    end, _ = listener.accept()
    try:
        with suppress(OSError):
            end.settimeout(CONNECT_S_MAX)
            ours = secrets.token_bytes(_NONCE_BYTES)
            end.sendall(ours)
            theirs = _receive(end)
            if hmac.compare_digest(_receive(end), _proof(secret, b"loader", ours + theirs)):
                end.sendall(_proof(secret, b"worker", ours + theirs))
                end.settimeout(None)
                return end
    except BaseException:
        end.close()
        raise
    end.close()
    return None


def _receive(end: socket.socket) -> bytes:
    data = receive_exactly(end, _NONCE_BYTES)
    if data is None:
        raise ConnectionResetError("the other end has closed the connection")
    return bytes(data)


def _proof(secret: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, side + nonces, "sha256")
