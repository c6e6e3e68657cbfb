"""An S3 on loopback that transforms objects while they are read, as Object Lambda does: no length before the last chunk.

What it lists may be the sizes of the stored objects, and it may refuse ranges, as Object Lambda does by default.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit

_PIECE_BYTES = 100_000


class TransformingServer:
    """Serves objects in chunks on a free port of 127.0.0.1 until closed.

    Args:
        objects: Transformed objects by key.
        has_ranges: Whether it sends ranges; otherwise they are answered with 501.
        listed_excess_bytes: What listings tell more than the true size; negative for less.
        head_excess_bytes: What a HEAD tells more than the true size; None if it tells no length.
        states_length: Whether whole objects are sent with their length, and not in chunks.

    Attributes:
        requests: Method, key and range of every request for an object.
        connections: Open connections.
    """

    def __init__(
        self,
        objects: dict[str, bytes],
        *,
        has_ranges: bool,
        listed_excess_bytes: int = 0,
        head_excess_bytes: int | None = None,
        states_length: bool = False,
    ) -> None:
        self.objects = objects
        self.has_ranges = has_ranges
        self.listed_excess_bytes = listed_excess_bytes
        self.head_excess_bytes = head_excess_bytes
        self.states_length = states_length
        self.requests: list[tuple[str, str, str | None]] = []
        self.connections: set[socket.socket] = set()
        owner = self

        class Bound(_Handler):
            server_owner = owner

        self._server = _Listener(("127.0.0.1", 0), Bound)
        self._server.daemon_threads = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="transforming")

    @property
    def url(self) -> str:
        """URL of the endpoint; the bucket is called ``bucket``."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def listed_bytes(self, key: str) -> int:
        """Size of an object in the listing."""
        return max(1, len(self.objects[key]) + self.listed_excess_bytes)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        for connection in list(self.connections):  # otherwise their threads would wait for the next request
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.server_close()


class _Listener(ThreadingHTTPServer):
    request_queue_size = 1024  # clients connect many times at once


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # an answer in few packets
    server_owner: TransformingServer

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def handle(self) -> None:
        """Serve a connection; clients may break it off."""
        self.server_owner.connections.add(self.connection)
        try:
            super().handle()
        except OSError:
            self.close_connection = True
        finally:
            self.server_owner.connections.discard(self.connection)

    def do_HEAD(self) -> None:
        """Describe an object, with or without a length."""
        owner, key = self.server_owner, self._key()
        owner.requests.append(("HEAD", key, None))
        self.send_response(200 if key in owner.objects else 404)
        self.send_header("ETag", '"1"')
        if owner.head_excess_bytes is not None and key in owner.objects:
            self.send_header("Content-Length", str(max(1, len(owner.objects[key]) + owner.head_excess_bytes)))
        self.end_headers()

    def do_GET(self) -> None:
        """List, or send an object in chunks."""
        owner, key = self.server_owner, self._key()
        if not key:
            self._send(200, self._listing())
            return
        wanted = self.headers.get("Range")
        owner.requests.append(("GET", key, wanted))
        if key not in owner.objects:
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>")
        elif wanted is not None and not owner.has_ranges:
            self._send(501, b"<Error><Code>NotImplemented</Code><Message>no ranges</Message></Error>")
        else:
            self._send_chunks(owner.objects[key], wanted)

    def _key(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix("/bucket").removeprefix("/")

    def _listing(self) -> bytes:
        owner, prefix = self.server_owner, parse_qs(urlsplit(self.path).query).get("prefix", [""])[0]
        rows = "".join(
            f"<Contents><Key>{key}</Key><Size>{owner.listed_bytes(key)}</Size><ETag>&quot;1&quot;</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key in sorted(owner.objects)
            if key.startswith(prefix)
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>".encode()

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_chunks(self, data: bytes, wanted: str | None) -> None:
        size_bytes = len(data)
        if wanted is not None:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            end = min(int(last or size_bytes) + 1, size_bytes)
            if int(first) >= size_bytes:
                self._send(416, b"<Error><Code>InvalidRange</Code></Error>")
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{end - 1}/{size_bytes}")
            data = data[int(first) : end]
        else:
            self.send_response(200)
        self.send_header("ETag", '"1"')
        if self.server_owner.states_length:
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            return
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        self.wfile.write(b"0\r\n\r\n")
