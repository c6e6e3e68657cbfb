"""What a loader and its cluster say to each other: the messages of the broker, and connections to machines.

At both ends of a connection, a side proves that it knows a secret before it uses the socket.
Messages over the connection are pickles, so neither end may read one from a stranger. The secret is made for each worker, and
Ray hands it to both sides as an argument of a call of an actor, which neither its logs nor its dashboard show.
"""

from __future__ import annotations

import hmac
import queue
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.errors import ProtocolError

if TYPE_CHECKING:
    from penstock.loader.workers.messages import RemoteError

CONNECT_S_MAX = 3.0
UNPROVEN_MAX = 64
"""Connections that may be about to prove that they know the secret, at a time."""
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
    secret: bytes = field(repr=False)


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
    until_s = time.monotonic() + CONNECT_S_MAX
    end = socket.create_connection((address, port), CONNECT_S_MAX)
    try:
        theirs, ours = _receive(end, until_s), secrets.token_bytes(_NONCE_BYTES)
        end.sendall(ours + _proof(secret, b"loader", theirs + ours))
        if not hmac.compare_digest(_receive(end, until_s), _proof(secret, b"worker", theirs + ours)):
            raise ProtocolError("what answers is not the worker")
        end.settimeout(None)
    except BaseException:
        end.close()
        raise
    return end


class Acceptor:
    """Accepts the connections of the loader. Each proves itself in a thread, so that no stranger keeps the loader waiting.

    Args:
        listener: Listening socket, which belongs to the acceptor.
        secret: Secret that the loader knows.
    """

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self._listener = listener
        self._secret = secret
        self._places = threading.BoundedSemaphore(UNPROVEN_MAX)
        self._proven: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        threading.Thread(target=self._accept_all, name="penstock-accept", daemon=True).start()

    def accept(self, time_s_max: float) -> socket.socket | None:
        """The next connection of the loader; None if there is none for so long."""
        with suppress(queue.Empty):
            return self._proven.get(timeout=time_s_max)
        return None

    def _accept_all(self) -> None:
        while True:
            self._places.acquire()
            try:
                end, _ = self._listener.accept()
                threading.Thread(target=self._prove, args=(end,), name="penstock-prove", daemon=True).start()
            except (OSError, RuntimeError):
                self._places.release()
                if self._listener.fileno() < 0:
                    return
                time.sleep(0.1)  # the connection has ended already, or descriptors or threads are short

    def _prove(self, end: socket.socket) -> None:
        try:
            with suppress(OSError):
                if _is_of_loader(end, self._secret):
                    self._proven.put(end)
                    return
            end.close()
        finally:
            self._places.release()


def _is_of_loader(end: socket.socket, secret: bytes) -> bool:
    """Prove to the other end that this is the worker, if that one proves to be the loader."""
    until_s = time.monotonic() + CONNECT_S_MAX
    ours = secrets.token_bytes(_NONCE_BYTES)
    end.sendall(ours)
    theirs = _receive(end, until_s)
    if not hmac.compare_digest(_receive(end, until_s), _proof(secret, b"loader", ours + theirs)):
        return False
    end.sendall(_proof(secret, b"worker", ours + theirs))
    end.settimeout(None)
    return True


def _receive(end: socket.socket, until_s: float) -> bytes:
    data = b""
    while len(data) < _NONCE_BYTES:
        if (left_s := until_s - time.monotonic()) <= 0:
            raise TimeoutError("the other end is too slow")
        end.settimeout(left_s)
        if not (part := end.recv(_NONCE_BYTES - len(data))):
            raise ConnectionResetError("the other end has closed the connection")
        data += part
    return data


def _proof(secret: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, side + nonces, "sha256")
