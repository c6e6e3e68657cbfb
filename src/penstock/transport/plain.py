"""Plain HTTP GETs and HEADs over penstock's own sockets: a job in the network of its store sends hardly any other requests.

libcurl copies a body into its buffer and again into the landing, and calls Python for every header line and every 16 KiB.
Here the kernel writes a body straight to its landing: 15 µs of Python per request instead of 60, and half of the CPU for large
bodies (docs/development/measurements.md). libcurl carries TLS, proxies, redirects and everything that writes: it supports
them better, and over TLS it is no slower.

A connection is always in one stage, ``on_ready``: connecting, sending, waiting for the head, receiving one of three kinds of
body, or idle. It stays registered with epoll for input as long as it lives; an idle one becomes readable if the server closes
it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import sys
import termios
import time
from typing import TYPE_CHECKING

from penstock.config import KIB
from penstock.errors import StoreError
from penstock.memory.file_landings import FileLanding, LandingFileError
from penstock.system.libcurl import pycurl
from penstock.transport.connections import Connector, HttpConnection, HttpOrigin
from penstock.transport.http import Chunked, keeps, parse_head
from penstock.types import GrowingLanding

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.transport.http import HttpRequest, HttpTransfer

_SCRATCH_BYTES = 16 * KIB
"""Holds a head and the beginning of a small body, which is then copied; that costs less than a page fault or system call."""
_HEAD_BYTES_MAX = 256 * KIB
_IDLE_S_MAX = 110.0
"""Seconds after which an idle connection is not used again: servers close them after a minute or two, and a request on one
that has died by then costs a round trip."""
_IN, _OUT, _HANGUP = select.EPOLLIN, select.EPOLLOUT, select.EPOLLRDHUP
_F_SETPIPE_SZ = 1031
_PIPE_BYTES = 1 << 20
"""What a user may choose for a pipe. It holds 256 pieces, and a piece of a body that was sent on this machine is a page."""
_COPY_BYTES = 256 << 10
_WEIRD, _TOO_LARGE = 8, 100  # codes of libcurl that pycurl 7.49 does not name


class PlainPool:
    """Connections of one event loop; everything runs on its thread.

    Args:
        epoll: The epoll of the loop.
        end: Called as ``end(transfer, code, reason)`` to finish an exchange.
        call_soon: Runs a function on the loop's thread; callable from any thread.
        opened: Called as ``opened(descriptor, purpose)`` for every new socket.
        connections_max: The most open connections, including idle ones.

    Attributes:
        connections: The connections that have a socket, by descriptor.
        connector: Makes the connections.
    """

    def __init__(
        self,
        epoll: select.epoll,
        *,
        end: Callable[[HttpTransfer, int, str], None],
        call_soon: Callable[[Callable[[], None]], None],
        opened: Callable[[int, int], int],
        connections_max: int,
    ) -> None:
        self._epoll = epoll
        self._end = end
        self._origins: dict[str, HttpOrigin] = {}  # by the authority in URLs
        self.connections: dict[int, HttpConnection] = {}
        self.connector = Connector(
            epoll=epoll,
            connections=self.connections,
            connections_max=connections_max,
            call_soon=call_soon,
            opened=opened,
            made=self._send,
            failed=self._fail,
            close=self._close,
            close_idle=self._close_idle,
        )
        self._scratch = bytearray(_SCRATCH_BYTES)
        self._scratch_view = memoryview(self._scratch)
        self._beyond = bytearray(4)
        self._splicer = Splicer()

    def find_origin(self, request: HttpRequest) -> HttpOrigin | None:
        """Return the origin of `request`; None unless it is a plain GET or HEAD without proxy and redirects."""
        url = request.url
        if (
            url[:7] != "http://"
            or request.method not in ("GET", "HEAD")
            or request.redirects_max
            or request.config.proxy
        ):
            return None
        slash = url.find("/", 7)
        authority = url[7:slash] if slash > 0 else url[7:]
        origin = self._origins.get(authority)
        if origin is None:
            try:
                origin = self._origins[authority] = HttpOrigin(authority)
            except ValueError:
                return None  # libcurl will report the error
        return None if origin.proxied else origin

    def start(self, transfer: HttpTransfer, origin: HttpOrigin) -> None:
        """Send the request of `transfer`.

        Raises:
            ValueError: A header cannot be sent.
        """
        message = transfer.request.message(origin.host_header)
        transfer.started_s = transfer.watch_s = now_s = time.monotonic()
        idle = origin.idle
        while idle:
            connection = idle.pop()
            if now_s - connection.idle_s < _IDLE_S_MAX:
                connection.reused = True
                break
            self._close(connection)
        else:
            connection = HttpConnection(origin)
        connection.transfer = transfer
        transfer.carrier = connection
        connection.message = message
        if connection.socket is None:
            self.connector.connect(connection)
        else:
            self._send(connection)

    def drop(self, connection: HttpConnection) -> None:
        """Close a connection whose exchange is abandoned, because the rest of the answer is still on the way."""
        connection.transfer = None
        self._close(connection)

    def close(self) -> None:
        """Close every connection."""
        for connection in list(self.connections.values()):
            self._close(connection)
        self._splicer.close()
        self._origins.clear()

    # ── sending ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _send(self, connection: HttpConnection) -> None:
        assert connection.socket is not None
        message = connection.message
        try:
            sent = connection.socket.send(message)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._broken(connection, pycurl.E_SEND_ERROR, error)
            return
        if sent == len(message):
            connection.on_ready = self._on_head
        else:
            connection.message = message[sent:]
            connection.on_ready = self._on_writable
            self._epoll.modify(connection.fd, _OUT)
        transfer = connection.transfer
        assert transfer is not None
        transfer.sent_s = time.monotonic()

    def _on_writable(self, connection: HttpConnection) -> None:
        self._epoll.modify(connection.fd, _IN | _HANGUP)
        self._send(connection)

    # ── receiving ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_head(self, connection: HttpConnection) -> None:
        got = self._received(connection, self._scratch)
        if got < 0:
            return
        if not got:
            self._broken(connection, pycurl.E_GOT_NOTHING, None)
            return
        data: bytes | bytearray = self._scratch
        if connection.partial:
            data = connection.partial + self._scratch[:got]
            got = len(data)
            connection.partial = b""
        begin = 0
        while (end := data.find(b"\r\n\r\n", begin, got)) >= 0:
            lines = bytes(data[begin:end]).split(b"\r\n")
            begin = end + 4
            if self._on_lines(connection, lines):
                self._on_body_begun(connection, memoryview(data)[begin:got])
                return
            if connection.transfer is None:  # the head was refused
                return
        partial = bytes(data[begin:got])
        connection.partial = partial
        if not b"HTTP/1.".startswith(partial[:7]):
            self._fail(connection, _WEIRD, "the answer does not begin like one of HTTP/1")
        elif len(partial) > _HEAD_BYTES_MAX:
            self._fail(connection, _TOO_LARGE, f"a head of more than {_HEAD_BYTES_MAX} bytes")

    def _received(self, connection: HttpConnection, room: bytearray | memoryview) -> int:
        """Return the number of bytes received: 0 at the end of the connection, -1 if none are there or an error ended it."""
        try:
            return connection.receive(room)  # type: ignore[no-any-return]
        except BlockingIOError:
            return -1
        except OSError as error:
            self._broken(connection, pycurl.E_RECV_ERROR, error)
            return -1

    def _on_lines(self, connection: HttpConnection, lines: list[bytes]) -> bool:
        """Take the lines of a head; False if it is an interim one or was refused."""
        transfer = connection.transfer
        assert transfer is not None
        try:
            status, headers = parse_head(lines)
            if not 100 <= status <= 599 or lines[0][:7] != b"HTTP/1.":
                raise ValueError(f"status line {lines[0][:80]!r}")
            if status == 101:
                raise ValueError("the server switches protocols unasked")
        except ValueError as error:
            self._fail(connection, _WEIRD, str(error))
            return False
        if status < 200:
            return False
        transfer.header_lines = lines
        transfer.head = (status, headers)
        transfer.first_s = time.monotonic()
        connection.keep = keeps(lines[0], headers)
        return True

    def _on_body_begun(self, connection: HttpConnection, rest: memoryview) -> None:
        """Begin the body after a complete head; `rest` holds the bytes that arrived with the head."""
        transfer = connection.transfer
        assert transfer is not None
        assert transfer.head is not None
        status, headers = transfer.head
        length = headers.get(b"content-length")
        if transfer.request.method == "HEAD" or status in (204, 304):
            self._finish(connection, leftover=len(rest))
        elif b"transfer-encoding" in headers:
            if headers[b"transfer-encoding"].lower() != b"chunked":
                self._fail(connection, _WEIRD, f"transfer encoding {headers[b'transfer-encoding']!r:.80}")
                return
            # RFC 9112, 6.3: a length besides chunks may be an attack.
            connection.keep = connection.keep and length is None
            connection.chunks = Chunked()
            self._take_chunks(connection, bytes(rest))
        elif length is None:
            connection.keep, connection.left = False, -1
            self._take(connection, bytes(rest))
        elif not length.isdigit() or len(length) > 18:
            self._fail(connection, _WEIRD, f"content length {length!r:.80}")
        elif 200 <= status < 300 and not isinstance(transfer.landing, GrowingLanding):
            self._begin_body(connection, transfer, int(length), rest)
        else:
            connection.left = int(length)
            self._take(connection, bytes(rest))

    def _begin_body(self, connection: HttpConnection, transfer: HttpTransfer, length: int, rest: memoryview) -> None:
        """Begin a successful body of known length, which the kernel writes to its landing."""
        if not length:
            self._finish(connection, leftover=len(rest))
            return
        landing = transfer.place(length)
        if landing is None:
            self._fail(connection, pycurl.E_WRITE_ERROR, "refused")
            return
        if isinstance(landing, FileLanding):
            self._begin_file(connection, landing, length, rest)
            return
        offset = landing.offset
        view = memoryview(landing.buffer)[offset : min(offset + length, landing.end)]
        connection.overlong = length > len(view)
        if connection.overlong:
            connection.keep = False
        got = len(rest)
        if got > len(view):
            connection.keep = False
            rest, got = rest[: len(view)], len(view)
        view[:got] = rest
        landing.offset = offset + got
        if got == len(view):
            self._finish(connection)
            return
        connection.view = view[got:]
        connection.on_ready = self._on_body
        if got > _SCRATCH_BYTES // 2:  # there is probably more
            self._on_body(connection)

    def _on_body(self, connection: HttpConnection) -> None:
        view = connection.view
        assert view is not None
        got = self._received(connection, view)
        if got < 0:
            return
        if not got:
            self._fail(connection, pycurl.E_PARTIAL_FILE, f"the connection closed with {len(view)} bytes to come")
            return
        connection.transfer.landing.offset += got  # type: ignore[union-attr]
        if got == len(view):
            self._finish(connection, leftover=self._count_beyond(connection))
        else:
            connection.view = view[got:]

    def _begin_file(self, connection: HttpConnection, landing: FileLanding, length: int, rest: memoryview) -> None:
        """Begin a successful body of known length, which the kernel moves to a file."""
        connection.left = min(length, landing.end - landing.offset)
        connection.overlong = length > connection.left
        got = min(len(rest), connection.left)
        if connection.overlong or got < len(rest):
            connection.keep = False
        connection.on_ready = self._on_file
        try:
            landing.append(rest[:got])
        except StoreError as error:
            self._refuse(connection, error)
            return
        connection.left -= got
        if not connection.left:
            self._finish(connection)

    def _on_file(self, connection: HttpConnection) -> None:
        transfer = connection.transfer
        assert transfer is not None
        try:
            got = self._splicer.move(connection.fd, transfer.landing, connection.left)  # type: ignore[arg-type]
        except BlockingIOError:
            return
        except LandingFileError as error:
            self._refuse(connection, error)
            return
        except OSError as error:
            self._broken(connection, pycurl.E_RECV_ERROR, error)
            return
        if not got:
            what = f"the connection closed with {connection.left} bytes to come"
            self._fail(connection, pycurl.E_PARTIAL_FILE, what)
            return
        connection.left -= got
        if not connection.left:
            self._finish(connection, leftover=self._count_beyond(connection))

    def _refuse(self, connection: HttpConnection, error: StoreError) -> None:
        assert connection.transfer is not None
        connection.transfer.refuse(error)
        self._fail(connection, pycurl.E_WRITE_ERROR, "refused")

    def _count_beyond(self, connection: HttpConnection) -> int:
        """Return how many bytes have arrived after a body. They would be taken for the next answer; asking costs 0.4 µs."""
        fcntl.ioctl(connection.fd, termios.FIONREAD, self._beyond)
        return int.from_bytes(self._beyond, sys.byteorder)

    def _on_pieces(self, connection: HttpConnection) -> None:
        """Receive a body in chunks, of an error, or with a growing landing, which goes through ``take`` piece by piece."""
        got = self._received(connection, self._scratch)
        if got < 0:
            return
        piece = bytes(self._scratch_view[:got])
        if not got:
            if connection.left < 0 and connection.chunks is None:
                self._finish(connection)
            else:
                self._fail(connection, pycurl.E_PARTIAL_FILE, "the connection closed inside a body")
        elif connection.chunks is not None:
            self._take_chunks(connection, piece)
        else:
            self._take(connection, piece)

    def _take(self, connection: HttpConnection, piece: bytes) -> None:
        """Take bytes of a body that has ``left`` more; -1 means that it ends with the connection."""
        left = connection.left
        connection.on_ready = self._on_pieces
        extra = b"" if left < 0 else piece[left:]
        if not self._taken(connection, piece if left < 0 else piece[:left]):
            return
        if left >= 0:
            connection.left = left - len(piece) + len(extra)
            if not connection.left:
                self._finish(connection, leftover=len(extra))

    def _take_chunks(self, connection: HttpConnection, data: bytes) -> None:
        chunks = connection.chunks
        assert chunks is not None
        connection.on_ready = self._on_pieces
        try:
            pieces, leftover = chunks.feed(data)
        except ValueError as error:
            self._fail(connection, pycurl.E_RECV_ERROR, str(error))
            return
        for piece in pieces:
            if not self._taken(connection, piece):
                return
        if chunks.done:
            self._finish(connection, leftover=leftover)

    def _taken(self, connection: HttpConnection, piece: bytes) -> bool:
        assert connection.transfer is not None
        if not piece or connection.transfer.take(piece) is None:
            return True
        self._fail(connection, pycurl.E_WRITE_ERROR, "refused")
        return False

    # ── ending ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _finish(self, connection: HttpConnection, *, leftover: int = 0) -> None:
        """End an exchange whose answer is complete."""
        transfer = connection.transfer
        assert transfer is not None
        connection.transfer = connection.view = connection.chunks = None
        # Reported when the landing is full; before that, a broken connection is reported as one.
        if connection.overlong:
            transfer.overflow()
        if connection.keep and not leftover:
            connection.on_ready = self._on_idle
            connection.idle_s = time.monotonic()
            connection.origin.idle.append(connection)
        else:
            self._close(connection)
        self._end(transfer, 0, "")

    def _on_idle(self, connection: HttpConnection) -> None:
        """Close an idle connection that the server closed, or on which it sent something unasked."""
        connection.origin.idle.remove(connection)
        self._close(connection)

    def _broken(self, connection: HttpConnection, code: int, error: OSError | None) -> None:
        """Handle the end of a connection: a reused one may have died while it was idle, and the request is sent again."""
        transfer = connection.transfer
        assert transfer is not None
        if connection.reused and not transfer.header_lines and not connection.partial:
            transfer.resent = True
            fresh = HttpConnection(connection.origin)
            fresh.message, fresh.transfer = transfer.request.message(connection.origin.host_header), transfer
            connection.transfer = None
            self._close(connection)
            transfer.carrier = fresh
            self.connector.connect(fresh)
            return
        if error is None:
            reason = (
                "the connection closed inside the head" if connection.partial else "the connection closed unanswered"
            )
        else:
            reason = error.strerror or str(error)
        if connection.partial and not connection.partial.startswith(b"HTTP/1."):
            code = _WEIRD
        self._fail(connection, code, reason)

    def _close_idle(self) -> bool:
        """Close the connection that has been idle for longest, to make room; False if none is idle."""
        idle = [origin.idle for origin in self._origins.values() if origin.idle]
        if idle:
            self._close(min(idle, key=lambda each: each[0].idle_s).pop(0))
        return bool(idle)

    def _fail(self, connection: HttpConnection, code: int, reason: str) -> None:
        transfer = connection.transfer
        assert transfer is not None
        connection.transfer = None
        self._close(connection)
        self._end(transfer, code, reason)

    def _close(self, connection: HttpConnection) -> None:
        sock, connection.socket = connection.socket, None
        connection.view = connection.chunks = connection.receive = connection.on_ready = None
        if sock is not None:
            del self.connections[connection.fd]
            with contextlib.suppress(OSError):  # closing it is not enough if a forked child has a copy
                self._epoll.unregister(connection.fd)
            sock.close()


class Splicer:
    """Moves bodies from sockets to files inside the kernel, through a pipe. For one thread.

    The bytes are copied once, to the file's pages, and never lie in this process's memory. The file's disk may be slow;
    then the event loop waits for it, as nothing that it received meanwhile could be written either.
    """

    def __init__(self) -> None:
        self._pipe: tuple[int, int] | None = None
        self._scratch: memoryview | None = None

    def move(self, fd: int, landing: FileLanding, length_bytes: int) -> int:
        """Move what has arrived, up to a bound, and the landing's ``offset``.

        Args:
            fd: The socket, which must not block.
            landing: Memory for the bytes.
            length_bytes: Most bytes to move; the landing has room for them.

        Returns:
            The number of bytes; 0 at the end of the connection.

        Raises:
            BlockingIOError: No bytes have arrived.
            LandingFileError: The file cannot be written.
            OSError: The connection broke.
        """
        if not landing.file.splices:
            return self._copy(fd, landing, length_bytes)
        pipe = self._pipe or self._open()
        count = os.splice(fd, pipe[1], length_bytes, flags=os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK)
        left = count
        while left:
            try:
                moved = os.splice(pipe[0], landing.file.fd, left, offset_dst=landing.offset)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    landing.file.splices = False
                    self._drain(pipe[0], landing, left)
                    return count
                self.close()  # with the bytes left in the pipe
                landing.file.fail(error)
            landing.offset += moved
            left -= moved
        return count

    def close(self) -> None:
        """Close the pipe; idempotent, and the next use opens another one."""
        pipe, self._pipe = self._pipe, None
        for fd in pipe or ():
            os.close(fd)

    def _open(self) -> tuple[int, int]:
        self._pipe = reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        with contextlib.suppress(OSError):  # at the user's limit for all pipes, this one keeps the usual 64 KiB
            fcntl.fcntl(writer, _F_SETPIPE_SZ, _PIPE_BYTES)
        return reader, writer

    def _drain(self, reader: int, landing: FileLanding, left: int) -> None:
        """Write what is in the pipe to a file that the kernel cannot move it to."""
        try:
            while left:
                piece = os.read(reader, left)
                landing.append(piece)
                left -= len(piece)
        except BaseException:
            self.close()
            raise

    def _copy(self, fd: int, landing: FileLanding, length_bytes: int) -> int:
        if self._scratch is None:
            self._scratch = memoryview(bytearray(_COPY_BYTES))
        count = os.readv(fd, [self._scratch[:length_bytes]])
        landing.append(self._scratch[:count])
        return count
