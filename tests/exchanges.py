"""Exchanges at the transport: a sink to wait on, and a server that says exactly what a test tells it to."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any, Self

from penstock.config import TransportConfig
from penstock.transport import HttpAnswer, HttpRequest, HttpTransfer, engine
from penstock.types import Landing


class Heard:
    """An ``HttpSink`` that one thread waits for."""

    def __init__(self, landing: Landing | None = None, on_head: Callable[..., Any] | None = None) -> None:
        self.landing = landing
        self.heads: list[tuple[int, dict[bytes, bytes]]] = []
        self.answers: list[HttpAnswer] = []
        self.bodies: list[bytes] = []
        self.begun = threading.Event()
        self._ended = threading.Event()
        self._on_head = on_head

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> Landing | None:
        self.heads.append((status, headers))
        self.begun.set()
        if self._on_head is not None:
            self._on_head(status, headers)
        return self.landing

    def on_end(self, answer: HttpAnswer) -> None:
        self.answers.append(answer)
        self.bodies.append(bytes(answer.landing.view) if answer.landing is not None else b"")
        self._ended.set()

    def wait(self, seconds_max: float = 20.0) -> HttpAnswer:
        """The answer; fails if none comes in time."""
        assert self._ended.wait(seconds_max), "no end within the limit"
        return self.answers[0]

    @property
    def body(self) -> bytes:
        return self.bodies[0]


def start(
    url: str, method: str = "GET", *, config: TransportConfig | None = None, **more: Any
) -> tuple[HttpTransfer, Heard]:
    """Submit an exchange."""
    sink = more.pop("sink", None) or Heard()
    request = HttpRequest(method, url, sink=sink, config=config or TransportConfig(), **more)
    return engine.submit(request), sink


def ask(url: str, method: str = "GET", **more: Any) -> tuple[HttpAnswer, bytes]:
    """An exchange and its end."""
    _, sink = start(url, method, **more)
    return sink.wait(), sink.body


class RawServer:
    """Reads one request head per connection, sends `answer` byte for byte, closes.

    Args:
        answer: Bytes, or a function of the request's head that gives them; None: accept and say nothing.
    """

    def __init__(self, answer: bytes | Callable[[bytes], bytes] | None) -> None:
        self._answer = answer
        self.heads: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._connections: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run, name="raw-server", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)
        for connection in self._connections:
            connection.close()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            if self._answer is None:
                continue
            head = b""
            connection.settimeout(10)
            with contextlib.suppress(OSError):
                while b"\r\n\r\n" not in head and (piece := connection.recv(65536)):
                    head += piece
                self.heads.append(head)
                connection.sendall(self._answer(head) if callable(self._answer) else self._answer)
                connection.shutdown(socket.SHUT_WR)


class KeptServer:
    """Answers one request after the other on each connection, as a test says.

    Args:
        script: ``script(connection_index, exchange_index, head)`` gives the pieces to send, or None: close.
    """

    def __init__(self, script: Callable[[int, int, bytes], Iterable[bytes] | None]) -> None:
        self._script = script
        self.heads: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.connections: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._run, name="kept-server", daemon=True)]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # pieces as the script cuts them
            index = len(self.connections)
            self.connections.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection, index), name="kept-server", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket, index: int) -> None:
        data = b""
        with connection, contextlib.suppress(OSError):
            for exchange in itertools.count():
                while b"\r\n\r\n" not in data:
                    if not (piece := connection.recv(65536)):
                        return
                    data += piece
                head, _, data = data.partition(b"\r\n\r\n")
                self.heads.append(head)
                pieces = self._script(index, exchange, head)
                if pieces is None:
                    return
                for piece in pieces:
                    connection.sendall(piece)
