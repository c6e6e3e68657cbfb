"""One HTTP exchange: what is asked, what came back, and the libcurl handle that carries it.

About a third of the CPU of a small GET is ours (bench/small_objects.py), so: handles are reused with as few ``setopt``
as the request needs, header lines go to ``list.append`` without a Python frame, and a body lands where it will stay.
libcurl hands bodies over in pieces of 16 KiB (``CURL_MAX_WRITE_SIZE``), each a fresh ``bytes``; for large landings in an
``mmap`` they go to its C-level ``write``, which measured 250 against 330 ms of CPU per GB for a Python callback.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import pycurl

from penstock.buffers import small_buffer
from penstock.config import MIB
from penstock.types import Landing

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Sequence

    from penstock.config import TransportConfig
    from penstock.transport.loop import EventLoop
    from penstock.types import Buffer

DIRECT_BYTES_MIN = 1 * MIB
"""Landings in an mmap from this size on take the body without a Python frame per piece. An error document cannot be
told from data there, so it must fit: error documents are a few hundred bytes."""

_SEEK_OK, _CANT_SEEK = 0, 2  # CURL_SEEKFUNC_OK, CURL_SEEKFUNC_CANTSEEK
_DNS_SHUFFLE_ADDRESSES = 275  # CURLOPT_DNS_SHUFFLE_ADDRESSES, which pycurl 7.49 does not name
_CA_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu, Arch
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, RHEL, Amazon Linux
    "/etc/ssl/ca-bundle.pem",  # SUSE
    "/etc/ssl/cert.pem",  # Alpine, macOS
)


class Signing(NamedTuple):
    """Keys for libcurl's SigV4."""

    access_key: str
    secret_key: str
    token: str | None
    region: str

    def __repr__(self) -> str:
        return f"<Signing region={self.region}>"


class HttpRequest:
    """One exchange to make.

    Attributes:
        method: ``GET``, ``HEAD``, ``PUT``, ``POST`` or ``DELETE``.
        url: With query, percent-encoded.
        headers: Lines ``Name: value``.
        body: uint8[n] to send, or None.
        signing: Keys, or None for an anonymous request.
        sink: Who hears of it.
        landing: Where a successful body goes, if that is known; else ``sink.on_head`` is asked.
        redirects_max: Redirects that libcurl follows by itself; 0 for signed requests.
    """

    __slots__ = ("body", "config", "headers", "landing", "method", "redirects_max", "signing", "sink", "url")

    def __init__(
        self,
        method: str,
        url: str,
        *,
        sink: HttpSink,
        config: TransportConfig,
        headers: Sequence[str] = (),
        body: Buffer | None = None,
        signing: Signing | None = None,
        landing: Landing | None = None,
        redirects_max: int = 0,
    ) -> None:
        self.method = method
        self.url = url
        self.sink = sink
        self.config = config
        self.headers = headers
        self.body = body
        self.signing = signing
        self.landing = landing
        self.redirects_max = redirects_max


class HttpSink(Protocol):
    """Who hears how an exchange goes; on the loop's thread."""

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> Landing | None:
        """A 2xx answer to a GET has begun and the request named no landing: say where its body goes.

        None means: collect it in a private buffer. Raising ``StoreError`` refuses the body; ``on_end`` gets it.
        """

    def on_end(self, answer: HttpAnswer) -> None:
        """The exchange ended, well or not. Called exactly once."""


class HttpAnswer:
    """How an exchange ended.

    Attributes:
        status: Of the last answer; 0 where none came.
        headers: Lower-case names to values, of the last answer.
        landing: Where the body is; ``position`` says how far.
        error_body: The body of an answer that is not 2xx.
        curl_error: libcurl's code (0: the exchange is complete), ``CANCELLED`` or ``CLOSED`` or ``LATE_*``.
        reason: libcurl's words, or ours.
        refused: What ``on_head`` raised.
        start_s, queued_s, connect_s, first_byte_s, total_s: see ``types.Attempt``.
    """

    __slots__ = (
        "connect_s",
        "curl_error",
        "error_body",
        "first_byte_s",
        "headers",
        "landing",
        "queued_s",
        "reason",
        "received_bytes",
        "refused",
        "start_s",
        "status",
        "total_s",
    )

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.landing: Landing | None = None
        self.received_bytes = 0
        self.error_body = b""
        self.curl_error = 0
        self.reason = ""
        self.refused: Exception | None = None
        self.start_s = self.queued_s = self.connect_s = self.first_byte_s = self.total_s = 0.0


CANCELLED = -1
CLOSED = -2
LATE_FIRST_BYTE = -3
LATE_BODY = -4
LATE_TOTAL = -5
OVERLONG = -6


_known_lines: dict[bytes, tuple[bytes, bytes]] = {}
"""Header lines seen first in this process, parsed: half of the lines of every answer of a store are always the same."""
_KNOWN_LINES_MAX = 256


def parse_head(lines: list[bytes]) -> tuple[int, dict[bytes, bytes]]:
    """Status and headers of the last answer among header lines; names in lower case.

    1xx answers, and those that libcurl followed, come first and are dropped. libcurl refuses a broken status line.
    """
    status = 0
    headers: dict[bytes, bytes] = {}
    for line in lines:
        known = _known_lines.get(line)
        if known is not None:
            headers[known[0]] = known[1]
            continue
        name, colon, value = line.partition(b":")
        if line[:5] == b"HTTP/":
            status = int(line.split(None, 2)[1])
            headers = {}
        elif colon:
            name, value = name.lower(), value.strip()
            headers[name] = value
            if len(_known_lines) < _KNOWN_LINES_MAX:
                _known_lines[line] = (name, value)
    return status, headers


class HttpTransfer:
    """An exchange under way: a ``Transfer``."""

    __slots__ = (
        "_body_view",
        "_direct",
        "_error_pieces",
        "_head",
        "_initial_position",
        "_loop",
        "_refused",
        "curl",
        "ended",
        "header_lines",
        "landing",
        "request",
        "sent_bytes",
        "start_s",
        "started_s",
        "watch_bytes",
        "watch_s",
    )

    def __init__(self, loop: EventLoop, request: HttpRequest) -> None:
        self._loop = loop
        self.request = request
        self.start_s = time.monotonic()
        self.started_s = 0.0
        self.curl: Any = None
        self.ended = False
        self.header_lines: list[bytes] = []
        self.landing = request.landing
        self.sent_bytes = 0
        self.watch_bytes = -1
        self.watch_s = 0.0
        self._body_view: memoryview | None = None
        self._direct: mmap.mmap | None = None  # the body goes to this one's write
        self._error_pieces: list[bytes] | None = None
        self._refused: Exception | None = None
        self._head: tuple[int, dict[bytes, bytes]] | None = None
        self._initial_position = self.landing.position if self.landing is not None else 0

    def cancel(self) -> None:
        """See ``types.Transfer``."""
        if not self.ended:
            self._loop.call_soon(self._cancel)

    def _cancel(self) -> None:
        self._loop.give_up(self, CANCELLED, "cancelled")

    def unanswered_s(self) -> float:
        """See ``types.Transfer``."""
        return 0.0 if self.header_lines or self.ended or not self.started_s else time.monotonic() - self.started_s

    # ── on the loop's thread ───────────────────────────────────────────────────────────────────────────────────────

    def attach(self, curl: Any) -> None:
        """Point a base-configured handle at this exchange."""
        self.curl = curl
        self.started_s = self.watch_s = time.monotonic()
        request = self.request
        setopt = curl.setopt
        setopt(pycurl.URL, request.url)
        setopt(pycurl.HTTPHEADER, request.headers)
        setopt(pycurl.HEADERFUNCTION, self.header_lines.append)
        signing = request.signing
        if curl.signing is not signing and signing is not None:  # a handle once signed is never used unsigned
            curl.signing = signing
            setopt(pycurl.AWS_SIGV4, f"aws:amz:{signing.region}:s3")
            setopt(pycurl.USERNAME, signing.access_key)
            setopt(pycurl.PASSWORD, signing.secret_key)
        landing = self.landing
        if landing is not None and landing.direct is not None and landing.end - landing.position >= DIRECT_BYTES_MIN:
            self._direct = landing.direct
            self._direct.seek(landing.position)
            setopt(pycurl.MAXFILESIZE_LARGE, landing.end - landing.position)
            setopt(pycurl.WRITEFUNCTION, self._direct.write)
        else:
            setopt(pycurl.MAXFILESIZE_LARGE, 0)
            setopt(pycurl.WRITEFUNCTION, self._write)

    def _write(self, piece: bytes) -> int | None:
        view = self._body_view
        if view is None:
            if self._error_pieces is not None:
                self._error_pieces.append(piece)
                return None
            if not self._begin_body():
                return self._write(piece) if self._error_pieces is not None else 0
            view = self._body_view
            assert view is not None
        landing = self.landing
        assert landing is not None
        position = landing.position
        end = position + len(piece)
        if end > landing.end:
            if self._initial_position >= 0:
                view[position : landing.end] = piece[: landing.end - position]
                landing.position = landing.end
                self._refused = OverflowError(f"the body is longer than its {landing.length_bytes} bytes")
                return 0
            self._grow(end)
            view = self._body_view
            assert view is not None
        view[position:end] = piece
        landing.position = end
        return None

    def _begin_body(self) -> bool:
        """At the first piece: an error document is collected, a body gets its landing."""
        self._head = status, headers = parse_head(self.header_lines)
        if not 200 <= status < 300:
            self._error_pieces = []
            return False
        if self.landing is None:
            try:
                self.landing = self.request.sink.on_head(status, headers)
            except Exception as error:
                self._refused = error
                return False
            if self.landing is None:
                length = headers.get(b"content-length", b"")
                known = length.isdigit()
                size_bytes = int(length) if known else 64 * 1024
                self.landing = Landing(small_buffer(size_bytes), 0, size_bytes)
                self._initial_position = 0 if known else -1  # -1: of unknown length, may grow
            else:
                self._initial_position = self.landing.position
        self._body_view = memoryview(self.landing.buffer)
        return True

    def _grow(self, end: int) -> None:
        landing = self.landing
        assert landing is not None
        self._body_view = None
        grown = bytearray(max(end, 2 * landing.end))
        grown[: landing.position] = memoryview(landing.buffer)[: landing.position]
        landing.buffer = grown
        landing.end = len(grown)
        self._body_view = memoryview(landing.buffer)

    def progress_bytes(self) -> int:
        """Bytes of body received and sent so far; the watchdog compares two looks."""
        landing = self.landing
        if landing is None:
            return self.sent_bytes
        position = self._direct.tell() if self._direct is not None else landing.position
        return position + self.sent_bytes

    def answer(self, curl_error: int, reason: str) -> HttpAnswer:
        """The record of how it ended; the handle may be reused afterwards."""
        answer = HttpAnswer()
        answer.start_s = self.start_s
        answer.curl_error = curl_error
        answer.reason = reason
        curl = self.curl
        landing = self.landing
        if curl is not None:
            getinfo = curl.getinfo
            if self.header_lines:
                answer.status, answer.headers = self._head or parse_head(self.header_lines)
            answer.queued_s = self.started_s - self.start_s
            answer.total_s = getinfo(pycurl.TOTAL_TIME)
            sent_s = getinfo(pycurl.PRETRANSFER_TIME)
            first_s = getinfo(pycurl.STARTTRANSFER_TIME)
            answer.first_byte_s = first_s - sent_s if first_s else 0.0
            if getinfo(pycurl.NUM_CONNECTS):
                answer.connect_s = max(getinfo(pycurl.CONNECT_TIME), getinfo(pycurl.APPCONNECT_TIME))
            if self._direct is not None and landing is not None:
                position = self._direct.tell()
                if 200 <= answer.status < 300:
                    landing.position = position
                else:
                    answer.error_body = bytes(memoryview(landing.buffer)[self._initial_position : position])
            elif self._error_pieces is not None:
                answer.error_body = b"".join(self._error_pieces)
        if self._refused is not None:
            answer.refused = self._refused
            if isinstance(self._refused, OverflowError):
                answer.curl_error, answer.reason = OVERLONG, str(self._refused)
        if landing is not None:
            answer.received_bytes = landing.position - max(self._initial_position, 0)
        answer.landing = landing
        if curl is not None:
            curl.setopt(pycurl.WRITEFUNCTION, _discard)  # an idle handle must keep neither buffer nor sinks alive
        self.landing = self._body_view = self._direct = None
        return answer


def _discard(_piece: bytes) -> None:
    """Takes the place of a landing's ``write`` on an idle handle."""


def configure(config: TransportConfig, url: str, opened: Callable[[int, int], int]) -> Any:
    """A new libcurl handle with everything that no request changes."""
    curl = pycurl.Curl()
    curl.signing = None
    tls = url.startswith("https:")
    setopt = curl.setopt
    setopt(pycurl.NOSIGNAL, 1)
    setopt(pycurl.HTTP_VERSION, pycurl.CURL_HTTP_VERSION_1_1)
    setopt(pycurl.BUFFERSIZE, config.receive_buffer_tls_bytes if tls else config.receive_buffer_bytes)
    setopt(pycurl.CONNECTTIMEOUT_MS, max(1, int(config.connect_s_max * 1000)))
    setopt(pycurl.TCP_KEEPALIVE, 1)
    setopt(pycurl.SOCKOPTFUNCTION, opened)
    setopt(_DNS_SHUFFLE_ADDRESSES, 1)
    setopt(pycurl.USERAGENT, "penstock/0.1 libcurl")
    setopt(pycurl.PROTOCOLS, pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS)
    setopt(pycurl.REDIR_PROTOCOLS, pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS)
    setopt(pycurl.PATH_AS_IS, 0)  # libcurl's SigV4 signs the path it normalised; dot segments are refused in store/
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
    """The bundle to trust: libcurl's wheel carries no path that holds on every system."""
    named = config.ca_bundle or os.environ.get("AWS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE")
    if named:
        return named
    return next((path for path in _CA_BUNDLES if os.path.exists(path)), _CA_BUNDLES[0])  # noqa: PTH110 - hot start


def prepare_method(transfer: HttpTransfer, curl: Any) -> None:
    """Options of requests other than plain GETs; such handles are used once."""
    request = transfer.request
    setopt = curl.setopt
    if request.redirects_max:
        setopt(pycurl.FOLLOWLOCATION, 1)
        setopt(pycurl.MAXREDIRS, request.redirects_max)
    if request.method == "HEAD":
        setopt(pycurl.NOBODY, 1)
    elif request.body is not None:
        _send(transfer, curl, memoryview(request.body).cast("B"))
    elif request.method != "GET":
        setopt(pycurl.CUSTOMREQUEST, request.method)


def _send(transfer: HttpTransfer, curl: Any, view: memoryview) -> None:
    """Stream `view` as the request's body, rewindable where libcurl must send it again on a fresh connection."""
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
        if transfer.request.method != "PUT":
            setopt(pycurl.CUSTOMREQUEST, transfer.request.method)
    setopt(pycurl.UPLOAD_BUFFERSIZE, 2 * MIB)
    setopt(pycurl.READFUNCTION, read)
    setopt(pycurl.SEEKFUNCTION, seek)
