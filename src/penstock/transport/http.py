"""One HTTP exchange, over either pool: the request, the answer with its head, and where its body goes.

``plain.py`` carries plain GETs and HEADs, ``curl.py`` everything else.
"""

from __future__ import annotations

import re
import time
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from penstock.config import MIB
from penstock.errors import ProtocolError, StoreError
from penstock.memory.buffers import bytes_buffer
from penstock.memory.file_landings import FileLanding
from penstock.types import GrowingLanding, Landing

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Sequence

    from penstock.config import TransportConfig
    from penstock.transport.signing import Signing
    from penstock.types import BodyStream, Buffer


_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEXADECIMAL = re.compile(rb"[0-9A-Fa-f]{1,15}")
_CHUNK_LINE_BYTES_MAX = 8192
_names: dict[bytes, bytes] = {}
"""Header names as they were received, to the checked name in lower case. A store uses about twenty."""
_NAMES_MAX = 256


@dataclass(slots=True, eq=False, repr=False)
class HttpRequest:
    """One exchange to make.

    Attributes:
        method: ``GET``, ``HEAD``, ``PUT``, ``POST`` or ``DELETE``.
        url: URL with query, percent-encoded.
        headers: Lines ``Name: value``.
        body: uint8[n] to send, or a stream of it; None if there is none.
        signing: Signs the request at the moment that it is sent; None for an anonymous request.
        sink: Hears how the exchange goes.
        config: Deadlines and connections.
        landing: Memory for a successful body; None lets ``sink.on_head`` decide.
        redirects_max: Largest number of redirects that libcurl follows; 0 for signed requests.
    """

    method: str
    url: str
    _: KW_ONLY
    sink: HttpSink
    config: TransportConfig
    headers: Sequence[str] = ()
    body: Buffer | BodyStream | None = None
    signing: Signing | None = None
    landing: Landing | None = None
    redirects_max: int = 0

    def message(self, host: str) -> bytes:
        """Return the request, which must have no body, as it is sent over plain HTTP.

        Args:
            host: Value of the ``Host`` header.

        Raises:
            ValueError: A path or header cannot be sent, or would be read as two.
        """
        slash = self.url.find("/", 7)
        target = self.url[slash:] if slash > 0 else "/"
        lines = [f"{self.method} {target} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: penstock/0.1\r\nAccept: */*"]
        lines += self.headers
        if self.signing is not None:
            lines += self.signing.sign(self.method, host, target, self.headers)
        if not target.isascii() or not target.isprintable() or " " in target or "#" in target:
            raise ValueError("the URL's path is not percent-encoded")
        lines.append("\r\n")
        message = "\r\n".join(lines)
        breaks_count = len(lines) + 3
        if message.count("\n") != breaks_count or message.count("\r") != breaks_count or "\0" in message:
            found = next(line for line in lines[1:-1] if not line.isprintable())
            raise ValueError(f"a header line with a line break or NUL: {found.partition(':')[0][:80]!r}")
        return message.encode("latin-1")


class HttpSink(Protocol):
    """Hears how an exchange goes, on the loop's thread."""

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> Landing | None:
        """Return where the body of a 2xx answer to a GET goes, if the request named no landing.

        None collects it in a private buffer. A ``StoreError`` refuses the body, and is then passed to ``on_end``.
        """

    def on_end(self, answer: HttpAnswer) -> None:
        """Take the end of the exchange, well or not. Called exactly once."""


@dataclass(slots=True, eq=False, repr=False)
class HttpAnswer:
    """The end of an exchange.

    Attributes:
        status: Status of the last answer; 0 if there was none.
        headers: Headers of the last answer, by lower-case name.
        landing: Memory that has the body, up to its ``offset``; None if there is none.
        received_bytes: Number of bytes of the body that arrived.
        error_body: Body of an answer that is not 2xx.
        curl_error: Code of libcurl, whatever carried the exchange (0: complete), or one of the negative codes below.
        reason: Description of the failure.
        refused: Exception that ``on_head`` raised, or None.
        resent: Whether the kept connection had died, so that the request was sent again on a new one.
        start_s, queued_s, connect_s, first_byte_s, total_s: Times in seconds, as in ``types.Attempt``.
    """

    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    landing: Landing | None = None
    received_bytes: int = 0
    error_body: bytes = b""
    curl_error: int = 0
    reason: str = ""
    refused: Exception | None = None
    resent: bool = False
    start_s: float = 0.0
    queued_s: float = 0.0
    connect_s: float = 0.0
    first_byte_s: float = 0.0
    total_s: float = 0.0


UNSIZED_BYTES_MAX = 64 * MIB
"""Longest body of unknown length in a private buffer. Such bodies are documents; a page of 1 000 keys has 4 MiB."""
_ERROR_BYTES_MAX = 1 * MIB
"""Longest error document; they have a few hundred bytes."""

DESCRIPTORS_HINT = "raise the limit of open files (ulimit -n), or lower TransportConfig(connections_max=...)"

CANCELLED = -1
CLOSED = -2
LATE_FIRST_BYTE = -3
LATE_BODY = -4
LATE_TOTAL = -5
OVERLONG = -6
DEFECT = -7


class TransferLoop(Protocol):
    """The part of an event loop that its transfers need."""

    def call_soon(self, call: Callable[[], None]) -> None:
        """Run `call` on the loop's thread; callable from any thread."""

    def give_up(self, transfer: HttpTransfer, code: int, reason: str) -> None:
        """End `transfer` early, with `code` and `reason`; on the loop's thread."""


@dataclass(slots=True, eq=False, repr=False)
class HttpTransfer:
    """An exchange that was submitted: a ``types.Transfer``."""

    _loop: TransferLoop
    request: HttpRequest
    start_s: float = field(init=False, default_factory=time.monotonic)
    started_s: float = field(init=False, default=0.0)
    connected_s: float = field(init=False, default=0.0)  # when a new connection was open; 0 for a reused one
    sent_s: float = field(init=False, default=0.0)
    first_s: float = field(init=False, default=0.0)
    resent: bool = field(init=False, default=False)  # whether it was sent again because the kept connection had died
    carrier: Any = field(init=False, default=None)  # a handle of libcurl, or a connection of plain.py
    head: tuple[int, dict[bytes, bytes]] | None = field(init=False, default=None)
    ended: bool = field(init=False, default=False)
    header_lines: list[bytes] = field(init=False, default_factory=list)
    sent_bytes: int = field(init=False, default=0)
    waits_for_body: bool = field(init=False, default=False)  # the caller's stream has nothing to send yet
    count_sent: Callable[[], int] | None = field(
        init=False, default=None
    )  # replaces `sent_bytes` if libcurl reads the body
    watch_bytes: int = field(init=False, default=-1)
    watch_s: float = field(init=False, default=0.0)
    direct: mmap.mmap | None = field(
        init=False, default=None
    )  # its `write` takes the body, and its file position counts
    landing: Landing | None = field(init=False)
    initial_offset: int = field(init=False)
    _body_view: memoryview | None = field(init=False, default=None)
    _appended: Landing | None = field(init=False, default=None)  # instead of the view: a file, or memory that grows
    _error_pieces: list[bytes] | None = field(init=False, default=None)
    _error_bytes: int = field(init=False, default=0)
    _refused: Exception | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.landing = landing = self.request.landing
        self.initial_offset = landing.offset if landing is not None else 0

    def cancel(self) -> None:
        """Give the exchange up; see ``types.Transfer.cancel``."""
        if not self.ended:
            self._loop.call_soon(self._cancel)

    def _cancel(self) -> None:
        self._loop.give_up(self, CANCELLED, "cancelled")

    def call_soon(self, call: Callable[[], None]) -> None:
        """Run `call` on the loop's thread; callable from any thread."""
        self._loop.call_soon(call)

    def unanswered_s(self) -> float:
        """Return how long it has waited for the head of the answer; see ``types.Transfer.unanswered_s``."""
        return 0.0 if self.header_lines or self.ended or not self.started_s else time.monotonic() - self.started_s

    # ── on the loop's thread ───────────────────────────────────────────────────────────────────────────────────────

    def take(self, piece: bytes) -> int | None:
        """Take bytes of the body; this is libcurl's write function, where None accepts them and 0 refuses them."""
        view = self._body_view
        if view is None:
            if self._error_pieces is not None:
                self._error_pieces.append(piece)
                self._error_bytes += len(piece)
                return None if self._error_bytes <= _ERROR_BYTES_MAX else 0
            if self._appended is not None:
                return self._append(self._appended, piece)
            has_place = self._begin_body()
            return self.take(piece) if has_place or self._error_pieces is not None else 0
        landing = self.landing
        assert landing is not None
        offset = landing.offset
        end = offset + len(piece)
        if end > landing.end:
            view[offset : landing.end] = piece[: landing.end - offset]
            landing.offset = landing.end
            self.overflow()
            return 0
        view[offset:end] = piece
        landing.offset = end
        return None

    def _append(self, landing: Landing, piece: bytes) -> int | None:
        try:
            landing.append(piece)
        except MemoryError:
            self._refused = StoreError(f"no memory for a body of {landing.offset} bytes and more", retryable=False)
            return 0
        except Exception as error:
            self._refused = error
            return 0
        return None

    def take_document(self, document: bytes) -> None:
        """Take an error document that went straight into the landing."""
        self._error_pieces = [document]

    def refuse(self, error: StoreError) -> None:
        """Note why the rest of the body cannot be taken."""
        self._refused = error

    def overflow(self) -> None:
        """Note that the body is longer than its landing."""
        assert self.landing is not None
        self._refused = OverflowError(f"the body is longer than its {self.landing.length_bytes} bytes")

    def _begin_body(self) -> bool:
        """Find a place for the first piece: an error document is collected, a body gets its landing."""
        if self.head is None:
            self.head = parse_head(self.header_lines)
        status, headers = self.head
        if not 200 <= status < 300:
            self._error_pieces = []
            return False
        length = headers.get(b"content-length", b"")
        known = length.isdigit() and b"transfer-encoding" not in headers
        landing = self.place(int(length) if known else None)
        if landing is None:
            return False
        if isinstance(landing, GrowingLanding | FileLanding):
            self._appended = landing
        else:
            self._body_view = memoryview(landing.buffer)
        return True

    def place(self, length_bytes: int | None) -> Landing | None:
        """Return where a successful body goes; None if it is refused.

        Args:
            length_bytes: Length of the body in bytes; None if it is unknown.
        """
        landing = self.landing
        if landing is None:
            assert self.head is not None
            try:
                landing = self.request.sink.on_head(*self.head)
                if landing is None:
                    landing = (
                        Landing(bytes_buffer(length_bytes), 0, length_bytes)
                        if length_bytes is not None
                        else GrowingLanding(_check_unsized)
                    )
                self.initial_offset = landing.offset
            except MemoryError:
                self._refused = StoreError(f"no memory for a body of {length_bytes} bytes", retryable=False)
                return None
            except Exception as error:
                self._refused = error
                return None
            self.landing = landing
        return landing

    def progress_bytes(self) -> int:
        """Return the bytes of body received and sent so far; the watchdog compares two such numbers."""
        landing = self.landing
        sent_bytes = self.sent_bytes if self.count_sent is None else self.count_sent()
        if landing is None:
            return sent_bytes
        offset = self.direct.tell() if self.direct is not None else landing.offset
        return offset + sent_bytes

    def answer(self, curl_error: int, reason: str) -> HttpAnswer:
        """Return the record of how it ended; its carrier may be reused afterwards."""
        answer = HttpAnswer()
        answer.start_s = self.start_s
        answer.curl_error = curl_error
        answer.reason = reason
        answer.resent = self.resent
        landing = self.landing
        if self.started_s:
            answer.queued_s = self.started_s - self.start_s
            answer.total_s = time.monotonic() - self.started_s
            if self.connected_s:
                answer.connect_s = self.connected_s - self.started_s
            if self.first_s:
                answer.first_byte_s = self.first_s - self.sent_s
        if self.head is not None:
            answer.status, answer.headers = self.head
        if self._error_pieces is not None:
            answer.error_body = b"".join(self._error_pieces)
        if self._refused is not None:
            answer.refused = self._refused
            if isinstance(self._refused, OverflowError):
                answer.curl_error, answer.reason = OVERLONG, str(self._refused)
        if landing is not None:
            answer.received_bytes = landing.offset - self.initial_offset
        answer.landing = landing
        self.landing = self._body_view = self._appended = self.direct = None
        return answer


def _check_unsized(length_bytes: int) -> None:
    """Check the length of a body that was not announced and has no landing.

    Raises:
        ProtocolError: The body is longer than ``UNSIZED_BYTES_MAX``.
    """
    if length_bytes > UNSIZED_BYTES_MAX:
        raise ProtocolError(f"a body of unknown length has more than {UNSIZED_BYTES_MAX} bytes")


# ── heads, and bodies in chunks ─────────────────────────────────────────────────────────────────────────────────────


def parse_head(lines: list[bytes]) -> tuple[int, dict[bytes, bytes]]:
    """Return status and headers of the last answer among header lines, by lower-case name.

    1xx answers, and redirects that libcurl followed, come first and are dropped.

    Raises:
        ValueError: A line cannot be part of a head; libcurl refuses such an answer as well.
    """
    status = 0
    headers: dict[bytes, bytes] = {}
    within = False
    for line in lines:
        raw, colon, value = line.partition(b":")
        name = _names.get(raw)
        if name is None:
            if line[:5] == b"HTTP/" and not within:
                status, headers, within = _status(line), {}, True
                continue
            if not colon and not line.strip():  # libcurl passes an empty line at the end of a head
                within = False
                continue
            name = _checked_name(raw, line)
        value = value.strip()
        if name in headers:
            value = _repeated(name, headers[name], value)
        headers[name] = value
    return status, headers


def keeps(status_line: bytes, headers: dict[bytes, bytes]) -> bool:
    """Whether the connection stays open after an answer with this head."""
    options = headers.get(b"connection", b"").lower()
    tokens = [token.strip() for token in options.split(b",")] if b"," in options else (options,)
    return b"close" not in tokens and (status_line[:8] != b"HTTP/1.0" or b"keep-alive" in tokens)


def _repeated(name: bytes, before: bytes, value: bytes) -> bytes:
    """Return the value of a header that occurs twice: the last one, except for headers that decide where a body ends."""
    if name == b"content-length" and before != value:
        raise ValueError("the head has two content lengths")
    return before + b", " + value if name in (b"connection", b"transfer-encoding") else value


def _checked_name(raw: bytes, line: bytes) -> bytes:
    if len(raw) == len(line) or not _NAME.fullmatch(raw):
        raise ValueError(f"not a header line: {line[:80]!r}")
    name = raw.lower()
    if len(_names) < _NAMES_MAX:
        _names[raw] = name
    return name


def _status(line: bytes) -> int:
    parts = line.split(None, 2)
    if len(parts) < 2 or not parts[1].isdigit():
        raise ValueError(f"not a status line: {line[:80]!r}")
    return int(parts[1])


@dataclass(slots=True, eq=False, repr=False)
class Chunked:
    """Decodes a body in chunks (RFC 9112, 7.1) that arrives in pieces, cut at any byte.

    Attributes:
        done: Whether the body has ended.
    """

    done: bool = False
    _between: bool = False  # whether only the line break of a chunk is still to come
    _in_trailers: bool = False
    _left: int = 0
    _line: bytes = b""

    def feed(self, data: bytes) -> tuple[list[bytes], int]:
        """Decode `data`.

        Returns:
            The pieces of the body in it, and the number of bytes that follow the body's end.

        Raises:
            ValueError: `data` is not encoded in chunks.
        """
        pieces = []
        at = 0
        while at < len(data) and not self.done:
            if self._left:
                piece = data[at : at + self._left]
                at += len(piece)
                pieces.append(piece)
                self._left -= len(piece)
                continue
            end = data.find(b"\n", at)
            if end < 0:
                end = len(data) - 1
            self._line += data[at : end + 1]
            at = end + 1
            if len(self._line) > _CHUNK_LINE_BYTES_MAX:
                raise ValueError("a chunk's size does not end")
            if self._line.endswith(b"\n"):
                self._on_line(self._line)
                self._line = b""
        return pieces, len(data) - at

    def _on_line(self, line: bytes) -> None:
        if self._between:
            if line.strip():
                raise ValueError(f"a chunk is longer than its size: {line[:80]!r}")
            self._between = False
        elif self._in_trailers:
            self.done = not line.strip()
        else:
            text = line.partition(b";")[0].strip()
            if not _HEXADECIMAL.fullmatch(text):
                raise ValueError(f"not a chunk's size: {line[:80]!r}")
            self._left = int(text, 16)
            self._between = self._left > 0
            self._in_trailers = not self._left
