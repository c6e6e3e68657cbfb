"""``MetricsServer``: a small HTTP server from which Prometheus reads the numbers of a loader."""

from __future__ import annotations

import os
import socketserver
import threading
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

PATH = "/metrics"
CLIENT_S_MAX = 10.0
"""A client that sends or takes nothing for this long is disconnected."""


class MetricsServer:
    """Answers ``GET /metrics`` on a thread of its own until it is closed.

    Attributes:
        url: URL of the metrics.

    Args:
        read: Returns the metrics as text.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.

    Raises:
        ConfigError: The address is not one of this machine, or the port is taken.
    """

    def __init__(self, read: Callable[[], str], *, host: str, port: int) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = CLIENT_S_MAX

            def do_GET(self) -> None:
                found = self.path.startswith(PATH)
                body = read().encode() if found else b"GET /metrics\n"
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the base class
                """Write nothing for each scrape."""

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True
            block_on_close = False

        try:
            self._server = Server((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"cannot serve metrics at {host}:{port}: {error}", hint="port=0 takes a free one"
            ) from error
        self.url = f"http://{host}:{self._server.server_address[1]}{PATH}"
        self._process_id = os.getpid()
        threading.Thread(target=self._server.serve_forever, name="penstock metrics", daemon=True).start()

    def __repr__(self) -> str:
        return f"<MetricsServer {self.url}>"

    def close(self) -> None:
        """Stop to listen; idempotent. A forked child, which has no thread that serves, only closes its copy of the socket."""
        if self._process_id == os.getpid():
            self._server.shutdown()
        self._server.server_close()
