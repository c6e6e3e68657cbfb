"""Carries requests by libcurl: those with TLS, proxies, redirects or a body. Every option of libcurl is set here.

``CurlPool`` is libcurl's side of one event loop: its multi handle, and the easy handles that are kept for the next GET. Sockets
stay registered with epoll when a transfer ends, because a kept-alive connection would soon be registered again; that saves two
system calls per request. ``SOCKOPTFUNCTION`` reports new sockets, so that a reused descriptor number is never mistaken for the
old one.

Handles are reused with as few ``setopt`` as a request needs, and header lines go to ``list.append`` without a Python frame.
libcurl passes bodies on in pieces of 16 KiB (``CURL_MAX_WRITE_SIZE``), each a new ``bytes``. For large landings in an ``mmap``
they go to its C-level ``write``, which took 250 ms of CPU per GB, where a Python callback took 330 ms.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.config import KIB, MIB
from penstock.memory.buffers import whole_bytes
from penstock.system.libcurl import pycurl
from penstock.transport.http import parse_head
from penstock.types import BodyStream

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.config import TransportConfig
    from penstock.transport.http import HttpTransfer
    from penstock.types import Buffer

UPLOAD_BUFFER_BYTES = 256 * KIB
"""Through which libcurl sends, small enough for a processor's second-level cache; measured together with bodies that are read
where they lie (docs/development/measurements.md)."""

DIRECT_BYTES_MIN = 1 * MIB
"""Smallest landing in an mmap that takes the body without a Python frame per piece. An error document goes there too, and has
to fit; it has a few hundred bytes."""

EVENTS_MAX = 256
_POOLS_MAX = 16
"""Configurations whose idle libcurl handles are kept; a program may make a store, and so a configuration, for each file."""
_WEIRD_SERVER_REPLY = 8  # a code of libcurl that pycurl 7.49 does not name
_REFUSALS = (pycurl.error, TypeError, ValueError)
_IN, _OUT = select.EPOLLIN, select.EPOLLOUT
_SELECT_IN, _SELECT_OUT, _SELECT_ERR = pycurl.CSELECT_IN, pycurl.CSELECT_OUT, pycurl.CSELECT_ERR

_SEEK_OK, _CANT_SEEK = 0, 2  # CURL_SEEKFUNC_OK, CURL_SEEKFUNC_CANTSEEK
_DNS_SHUFFLE_ADDRESSES = 275  # CURLOPT_DNS_SHUFFLE_ADDRESSES, which pycurl 7.49 does not name
_CA_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu, Arch
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, RHEL, Amazon Linux
    "/etc/ssl/ca-bundle.pem",  # SUSE
    "/etc/ssl/cert.pem",  # Alpine, macOS
)


def attach(transfer: HttpTransfer, curl: Any) -> None:
    """Configure a handle for this exchange."""
    transfer.carrier = curl
    transfer.started_s = transfer.watch_s = time.monotonic()
    request = transfer.request
    setopt = curl.setopt
    url, headers = request.url, request.headers
    setopt(pycurl.URL, url)
    if request.signing is not None:
        scheme, _, rest = url.partition("://")
        host, slash, target = rest.partition("/")
        host = host.removesuffix(":443" if scheme == "https" else ":80")
        signature = request.signing.sign(request.method, host, slash + target, headers)
        headers = [*headers, f"Host: {host}", *signature]
    if request.body is not None and not any(line.lower().startswith("content-type:") for line in headers):
        headers = [*headers, "Content-Type:"]  # removes the header; libcurl would call the body a form
    if any("\n" in line or "\r" in line for line in headers):
        raise ValueError("a header line with a line break")
    setopt(pycurl.HTTPHEADER, [line if line.isascii() else line.encode() for line in headers])
    setopt(pycurl.HEADERFUNCTION, transfer.header_lines.append)
    landing = transfer.landing
    if landing is not None and landing.direct is not None and landing.end - landing.offset >= DIRECT_BYTES_MIN:
        transfer.direct = landing.direct
        transfer.direct.seek(landing.offset)
        setopt(pycurl.MAXFILESIZE_LARGE, landing.end - landing.offset)
        setopt(pycurl.WRITEFUNCTION, transfer.direct.write)
    else:
        setopt(pycurl.MAXFILESIZE_LARGE, 0)
        setopt(pycurl.WRITEFUNCTION, transfer.take)


def record_outcome(transfer: HttpTransfer, curl: Any) -> None:
    """Take over what libcurl knows of an exchange that ended; the handle may be reused afterwards.

    Raises:
        ValueError: The head cannot be read.
    """
    curl.setopt(pycurl.WRITEFUNCTION, _discard)  # so that an idle handle keeps neither buffer nor sinks alive
    getinfo = curl.getinfo
    started_s = transfer.started_s
    transfer.sent_s = started_s + getinfo(pycurl.PRETRANSFER_TIME)
    if first_s := getinfo(pycurl.STARTTRANSFER_TIME):
        transfer.first_s = started_s + first_s
    if getinfo(pycurl.NUM_CONNECTS):
        transfer.connected_s = started_s + max(getinfo(pycurl.CONNECT_TIME), getinfo(pycurl.APPCONNECT_TIME))
    if transfer.header_lines and transfer.head is None:
        transfer.head = parse_head(transfer.header_lines)
    if transfer.direct is None or transfer.landing is None:
        return
    landing, offset = transfer.landing, transfer.direct.tell()
    if transfer.head is not None and 200 <= transfer.head[0] < 300:
        landing.offset = offset
    else:
        transfer.take_document(bytes(memoryview(landing.buffer)[transfer.initial_offset : offset]))


def _discard(_piece: bytes) -> None:
    """Replace a landing's ``write`` on an idle handle."""


def configure(config: TransportConfig, url: str, opened: Callable[[int, int], int]) -> Any:
    """Return a new libcurl handle with the options that no request changes."""
    curl = pycurl.Curl()
    tls = url.startswith("https:")
    setopt = curl.setopt
    setopt(pycurl.NOSIGNAL, 1)
    setopt(pycurl.HTTP_VERSION, pycurl.CURL_HTTP_VERSION_1_1)
    setopt(pycurl.BUFFERSIZE, config.receive_buffer_bytes)
    setopt(pycurl.CONNECTTIMEOUT_MS, max(1, int(config.connect_s_max * 1000)))
    setopt(pycurl.TCP_KEEPALIVE, 1)
    setopt(pycurl.SOCKOPTFUNCTION, opened)
    setopt(_DNS_SHUFFLE_ADDRESSES, 1)
    setopt(pycurl.USERAGENT, "penstock/0.1 libcurl")
    setopt(pycurl.PROTOCOLS, pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS)
    setopt(pycurl.REDIR_PROTOCOLS, pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS)
    setopt(pycurl.PATH_AS_IS, 1)  # so that the path is sent as it was signed
    if config.proxy is not None:
        setopt(pycurl.PROXY, config.proxy)
    elif not tls and "http_proxy" not in os.environ and (proxy := os.environ.get("HTTP_PROXY")):
        setopt(pycurl.PROXY, proxy)  # libcurl reads the lower-case name only; botocore and requests read both
    if tls:
        if config.verify_tls:
            setopt(pycurl.CAINFO, _ca_bundle(config))
        else:
            setopt(pycurl.SSL_VERIFYPEER, 0)
            setopt(pycurl.SSL_VERIFYHOST, 0)
    return curl


def _ca_bundle(config: TransportConfig) -> str:
    """Return the bundle to trust; the path in libcurl's wheel is not right on every system."""
    named = config.ca_bundle or os.environ.get("AWS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE")
    if named:
        return named
    return next((path for path in _CA_BUNDLES if os.path.exists(path)), _CA_BUNDLES[0])  # noqa: PTH110 - hot start


def prepare_method(transfer: HttpTransfer, curl: Any) -> None:
    """Set the options of requests other than plain GETs; such handles are used once."""
    request = transfer.request
    setopt = curl.setopt
    if request.redirects_max:
        setopt(pycurl.FOLLOWLOCATION, 1)
        setopt(pycurl.MAXREDIRS, request.redirects_max)
    if request.method == "HEAD":
        setopt(pycurl.NOBODY, 1)
    elif request.body is not None:
        _send(transfer, curl, request.body)
    elif request.method != "GET":
        setopt(pycurl.CUSTOMREQUEST, request.method)


def _send(transfer: HttpTransfer, curl: Any, body: Buffer | BodyStream) -> None:
    """Send `body`: libcurl reads a ``bytes`` object in place, without the GIL, and copies of any other memory."""
    method, setopt = transfer.request.method, curl.setopt
    whole = None if isinstance(body, BodyStream) else whole_bytes(body)
    if isinstance(body, BodyStream):
        _pass_on(transfer, curl, body)
    elif whole is not None:
        setopt(pycurl.POSTFIELDS, whole)  # makes it a POST; a PUT changes only the method's name
        transfer.count_sent = partial(curl.getinfo, pycurl.SIZE_UPLOAD_T)
    else:
        _stream(transfer, curl, memoryview(body).cast("B"))
    if method != "POST" and (whole is not None or method != "PUT"):
        setopt(pycurl.CUSTOMREQUEST, method)
    setopt(pycurl.UPLOAD_BUFFERSIZE, UPLOAD_BUFFER_BYTES)


def _stream(transfer: HttpTransfer, curl: Any, view: memoryview) -> None:
    """Pass `view` on in pieces, and again if libcurl has to send it again on a new connection."""
    setopt = curl.setopt

    def read(size: int) -> bytes:
        start = transfer.sent_bytes
        piece = bytes(view[start : start + size])
        transfer.sent_bytes = start + len(piece)
        return piece

    def seek(offset: int, origin: int) -> int:
        if origin != 0:
            return _CANT_SEEK
        transfer.sent_bytes = offset
        return _SEEK_OK

    if transfer.request.method == "POST":
        setopt(pycurl.POST, 1)
        setopt(pycurl.POSTFIELDSIZE_LARGE, len(view))
    else:
        setopt(pycurl.UPLOAD, 1)
        setopt(pycurl.INFILESIZE_LARGE, len(view))
    setopt(pycurl.READFUNCTION, read)
    setopt(pycurl.SEEKFUNCTION, seek)


class CurlPool:
    """Exchanges that libcurl carries; everything runs on the loop's thread.

    Args:
        epoll: The epoll of the loop.
        end: Called as ``end(transfer, code, reason)`` to finish an exchange.
        opened: Called as ``opened(descriptor, purpose)`` for every new socket.
        connections_max: The most open connections, including idle ones.

    Attributes:
        due_s: Time of the monotonic clock at which libcurl is to be called at the latest; None if there is none.
    """

    def __init__(
        self,
        epoll: select.epoll,
        *,
        end: Callable[[HttpTransfer, int, str], None],
        opened: Callable[[int, int], int],
        connections_max: int,
    ) -> None:
        self._epoll = epoll
        self._end = end
        self._opened = opened
        self.due_s: float | None = None
        self._active: dict[Any, HttpTransfer] = {}
        self._idle: dict[tuple[int, bool] | None, list[Any]] = {}
        self._handles: set[Any] = set()
        self._registered: dict[int, int] = {}
        self._wanted: dict[int, int] = {}
        self._closing = False
        self._multi = pycurl.CurlMulti()
        self._multi.setopt(pycurl.M_SOCKETFUNCTION, self._on_socket)
        self._multi.setopt(pycurl.M_TIMERFUNCTION, self._on_timer)
        self._multi.setopt(pycurl.M_MAXCONNECTS, connections_max)
        self._multi.setopt(pycurl.M_MAX_TOTAL_CONNECTIONS, connections_max)

    # ── exchanges ──────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, transfer: HttpTransfer) -> None:
        """Send the request of `transfer`."""
        request = transfer.request
        plain = request.method == "GET" and not request.redirects_max
        pool = (id(request.config), request.url.startswith("https:"))
        idle = self._idle_handles(pool) if plain else None
        if idle:
            curl = idle.pop()
        else:
            curl = None
            try:
                curl = configure(request.config, request.url, self._on_new_socket)
                curl.pool = pool if plain else None
                curl.config = request.config  # keeps the config alive, so that no other gets its id
                self._handles.add(curl)
                if not plain:
                    prepare_method(transfer, curl)
            except _REFUSALS as error:
                self._refuse(transfer, curl, error)
                return
        try:
            attach(transfer, curl)
            self._active[curl] = transfer
            self._multi.add_handle(curl)
        except _REFUSALS as error:
            self._refuse(transfer, curl, error)

    def _idle_handles(self, pool: tuple[int, bool]) -> list[Any]:
        """Return the idle handles of a configuration; if there are too many configurations, those of the oldest are closed."""
        idle = self._idle.get(pool)
        if idle is None:
            if len(self._idle) >= _POOLS_MAX:
                for curl in self._idle.pop(next(iter(self._idle))):
                    self._drop(curl)
            idle = self._idle[pool] = []
        return idle

    def _refuse(self, transfer: HttpTransfer, curl: Any, error: Exception) -> None:
        """End an exchange that libcurl refuses: a bad URL, header or file name."""
        self._active.pop(curl, None)
        code = error.args[0] if isinstance(error, pycurl.error) else pycurl.E_URL_MALFORMAT
        self._end(transfer, code, str(error.args[-1]))
        if curl is not None:
            self._drop(curl)

    def finish(self, curl: Any, code: int, reason: str) -> None:
        """End an exchange that libcurl has ended, or that is abandoned, which closes its connection."""
        transfer = self._active.pop(curl)
        self._multi.remove_handle(curl)
        try:
            record_outcome(transfer, curl)
        except ValueError as error:
            code, reason = code or _WEIRD_SERVER_REPLY, str(error)
        pool = self._idle.get(curl.pool) if not self._closing else None
        if pool is not None:
            pool.append(curl)
        else:
            self._drop(curl)
        self._end(transfer, code, reason)

    def _drop(self, curl: Any) -> None:
        self._handles.discard(curl)
        curl.close()

    def stop_keeping(self) -> None:
        """Close every handle whose exchange ends from now on."""
        self._closing = True

    def close(self) -> None:
        """Close every handle and connection; all exchanges have ended."""
        for curl in self._handles:
            curl.close()
        self._handles.clear()
        self._idle.clear()
        self._multi.close()

    # ── events ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def on_ready(self, fd: int, event: int) -> None:
        """Pass an event of epoll on to libcurl."""
        if not self._wanted.get(fd):  # the server closed an idle connection; libcurl notices before it reuses it
            self._forget_socket(fd)
            return
        mask = _SELECT_IN if event & _IN else 0
        if event & _OUT:
            mask |= _SELECT_OUT
        if event & ~(_IN | _OUT):
            mask |= _SELECT_ERR
        self._multi.socket_action(fd, mask)

    def collect(self, now_s: float) -> None:
        """Call libcurl if it is due, and end the exchanges that it has finished."""
        if self.due_s is not None and now_s >= self.due_s:
            self.due_s = None
            self._multi.socket_action(pycurl.SOCKET_TIMEOUT, 0)
        while True:
            queued, finished, failed = self._multi.info_read(EVENTS_MAX)
            for curl in finished:
                self.finish(curl, 0, "")
            for curl, code, reason in failed:
                self.finish(curl, code, reason)
            if not queued:
                return

    def _on_socket(self, what: int, fd: int, _multi: Any, _data: Any) -> None:
        if what == pycurl.POLL_REMOVE:
            self._wanted[fd] = 0
            return
        self._wanted[fd] = what
        registered = self._registered.get(fd)
        if registered == what:
            return
        mask = (_IN if what & pycurl.POLL_IN else 0) | (_OUT if what & pycurl.POLL_OUT else 0)
        if registered is None:
            try:
                self._epoll.register(fd, mask)
            except FileExistsError:  # the same open descriptor, after a connection that was not completed
                self._epoll.modify(fd, mask)
        else:
            self._epoll.modify(fd, mask)
        self._registered[fd] = what

    def _on_new_socket(self, fd: int, purpose: int) -> int:
        self._registered.pop(fd, None)
        return self._opened(fd, purpose)

    def _forget_socket(self, fd: int) -> None:
        self._registered.pop(fd, None)
        with contextlib.suppress(OSError):
            self._epoll.unregister(fd)

    def _on_timer(self, timeout_ms: int) -> None:
        self.due_s = None if timeout_ms < 0 else time.monotonic() + timeout_ms / 1000


def _pass_on(transfer: HttpTransfer, curl: Any, stream: BodyStream) -> None:
    """Send a stream, which can be sent only once; while it has nothing to send, libcurl pauses."""

    def read(size: int) -> bytes | int:
        try:
            piece = stream.read_nowait(size, wake)
        except Exception:  # the stream's owner knows it
            return pycurl.READFUNC_ABORT  # type: ignore[no-any-return]
        transfer.waits_for_body = piece is None
        if piece is None:
            return pycurl.READFUNC_PAUSE  # type: ignore[no-any-return]
        transfer.sent_bytes += len(piece)
        return piece

    def wake() -> None:
        transfer.call_soon(resume)

    def resume() -> None:
        if not transfer.ended:
            curl.pause(pycurl.PAUSE_CONT)

    curl.setopt(pycurl.UPLOAD, 1)
    curl.setopt(pycurl.INFILESIZE_LARGE, stream.length_bytes)
    curl.setopt(pycurl.READFUNCTION, read)
