"""A relay in front of a server that holds certain requests back, so that their sender can be killed while it waits."""

from __future__ import annotations

import re
import socket
import threading
from contextlib import suppress
from typing import Self

PIECE_BYTES = 1 << 16


class HoldingRelay:
    """A relay on loopback. It passes everything on but requests whose first line matches a pattern.

    Args:
        port: Port of the server, on loopback.
        pattern: Pattern of the first lines of requests that are held for ever.

    Attributes:
        url: URL of the relay.
        held: Set once a request is held.
    """

    def __init__(self, port: int, pattern: bytes) -> None:
        self._port = port
        self._pattern = re.compile(pattern)
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.held = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._port))
            self._sockets += [client, server]
            for source, target in ((client, server), (server, client)):
                thread = threading.Thread(target=self._pump, args=(source, target))
                thread.start()
                self._threads.append(thread)

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(PIECE_BYTES):
                if self._pattern.match(data):
                    self.held.set()
                    return
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
