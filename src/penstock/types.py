"""The nouns that every layer shares, and the one verb of a store.

A store's core is ``submit(operation, sink) -> Transfer``: start `operation`, tell `sink` when it ends, never block.
Everything else (read, read_many, list, writer, ...) is built on it once, in ``store/``; wrappers (retry, hedge, limit,
fault, trace, cache) have the same shape. Requests and answers are plain records, cheap to make: about 15 000 of them
pass each second.
"""

from __future__ import annotations

import operator
import re
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from penstock.errors import ConfigError, SpanError, StoreError
from penstock.redaction import public_key

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Key: TypeAlias = str
"""Name of an object inside its store: unicode, at most 1 024 bytes as UTF-8, no leading slash added or removed."""

Buffer: TypeAlias = bytes | bytearray | memoryview


UNKNOWN_BYTES = 1 << 62
"""``ObjectInfo.size_bytes``, and the end of a span, while a body is on its way whose length nobody told.

``Sink.head`` may hear it, and ``Get`` takes it as the end of a span that goes to the end of the object, wherever that
is. No operation that succeeded shows it.
"""


class ByteRange(NamedTuple):
    """Half-open range of bytes ``[start, end)``; ``0 <= start < end``. Check with ``checked()``."""

    start: int
    end: int

    @property
    def length_bytes(self) -> int:
        """Bytes in the range."""
        return self.end - self.start

    @property
    def header(self) -> str:
        """The line of an HTTP request that asks for it; without a last byte where that is ``UNKNOWN_BYTES``."""
        return f"Range: bytes={self.start}-{self.end - 1 if self.end != UNKNOWN_BYTES else ''}"

    def checked(self) -> ByteRange:
        """Itself, or ``ConfigError`` where it is no range.

        Raises:
            ConfigError: start is negative, end is not past start, or one of them is no whole number.
        """
        try:
            if 0 <= operator.index(self.start) < operator.index(self.end):
                return self
        except TypeError:
            pass
        raise ConfigError(f"ByteRange({self.start!r}, {self.end!r}) must be whole numbers, 0 <= start < end")

    def within(self, size_bytes: int) -> ByteRange:
        """The bytes of it that an object of `size_bytes` has: itself, cut at the object's end.

        Raises:
            SpanError: it starts at or past the end.
        """
        if self.start >= size_bytes:
            raise SpanError(
                f"the range starts at byte {self.start}, the object has {size_bytes} bytes", span=tuple(self)
            )
        return ByteRange(self.start, min(self.end, size_bytes))


_STRONG_ETAG = re.compile(r'"[!#-~]+"')


def strong_etag(text: str | None) -> str | None:
    """The strong ETag that `text` names, in its one normal form ``"..."``; None where it names none.

    Some stores leave the quotes out of their listings, others out of their headers, so every ETag passes through here
    where it is parsed: two that name the same version are then equal. A weak ETag (``W/"..."``) names what an object
    means and not its bytes, and ``If-Match`` never matches it. Text that no header line can carry is no ETag either.

    Args:
        text: From a header, a listing or a manifest, with or without quotes.
    """
    if text is None or _STRONG_ETAG.fullmatch(text):
        return text
    bare = text.strip().strip('"')
    if not bare or text.lstrip()[:2] in ("W/", "w/") or not (bare.isascii() and bare.isprintable()):
        return None
    return f'"{bare}"'


class ObjectInfo(NamedTuple):
    """What a store says of an object without giving its bytes.

    ``etag`` is in the form that ``strong_etag`` gives it, or the store's own pin (``size-mtime-inode``) where the store
    has no ETags.
    A ``list(recursive=False)`` also yields prefixes: key ends with ``/``, ``is_prefix`` is true, size 0.
    """

    key: Key
    size_bytes: int
    etag: str | None = None
    last_modified_s: float | None = None  # seconds since the epoch
    is_prefix: bool = False
    checksums: Mapping[str, str] = {}  # full-object only, base64: {"crc32c": "...", ...}

    def __repr__(self) -> str:
        values = zip(self._fields, (public_key(self.key), *self[1:]), strict=True)
        return f"ObjectInfo({', '.join(f'{name}={value!r}' for name, value in values)})"


def same_version(one: ObjectInfo, other: ObjectInfo) -> bool:
    """Whether two answers are of one version of an object, as far as they tell.

    Without an ETag, size and modification time stand for it. Two versions of one size that were written within the
    resolution of the time, a second over HTTP, cannot be told apart.
    """
    if (one.etag, one.size_bytes) != (other.etag, other.size_bytes):
        return False
    return one.etag is not None or one.last_modified_s == other.last_modified_s


class Blob:
    """Bytes that a read returned. They belong to the caller and are counted in no budget.

    Attributes:
        data: uint8[length], read without copying.
        key: Of the object.
        span: The bytes asked for; None means the whole object.
        etag: Of the version read.
        request_index: Position of the request in ``read_many``'s input; 0 for ``read``.
        verified: ``"crc32c"``, ``"crc64nvme"``, ...: the checksum that these bytes were held against;
            ``"length"`` where only length and ETag could be.
    """

    __slots__ = ("data", "etag", "key", "request_index", "span", "verified")

    def __init__(
        self, data: memoryview, *, key: Key, span: ByteRange | None, etag: str | None, request_index: int, verified: str
    ) -> None:
        self.data = data
        self.key = key
        self.span = span
        self.etag = etag
        self.request_index = request_index
        self.verified = verified

    def __len__(self) -> int:
        return len(self.data)

    def __repr__(self) -> str:
        span = f"[{self.span.start}, {self.span.end})" if self.span else ""
        return f"<Blob {public_key(self.key)!r}{span} {len(self.data)} bytes, verified by {self.verified}>"


# ── operations: what can be asked of a store ────────────────────────────────────────────────────────────────────────


class Get(NamedTuple):
    """Bytes of an object: all of it, or a span. With `if_match`, of that version or ``ObjectChangedError``."""

    key: Key
    span: ByteRange | None = None
    if_match: str | None = None


class Head(NamedTuple):
    """``ObjectInfo`` of an object, as ``Completion.info``; ``Completion.value`` is the claim it was written with, if any."""

    key: Key


class ListPage(NamedTuple):
    """One page of keys, in key order; ``Completion.value`` is a ``Page``."""

    prefix: str = ""
    delimiter: str = ""
    token: str | None = None  # the previous page's
    start_after: str = ""
    keys_max: int = 1000


class Put(NamedTuple):
    """A whole object, visible at once. ``Completion.info`` describes it.

    A store that may lose answers keeps `claim` beside the object: who asks again and finds one learns whose it is.
    """

    key: Key
    body: Buffer
    if_absent: bool = False
    claim: str = ""


class CreateMultipart(NamedTuple):
    """Begin an object in parts; ``Completion.value`` is its upload id. `claim`: as of ``Put``.

    With `checksum`, a store that can is asked to keep a checksum of the whole object.
    """

    key: Key
    claim: str = ""
    checksum: bool = True


class PutPart(NamedTuple):
    """One part; ``Completion.value`` is a ``Part``."""

    key: Key
    upload_id: str
    part_number: int  # from 1, as S3 counts
    body: Buffer


class CompleteMultipart(NamedTuple):
    """Commit: the object becomes visible, whole. `checksum`: as the upload was begun.

    ``Completion.info`` has the checksums that the store now keeps, where it tells them.
    """

    key: Key
    upload_id: str
    parts: tuple[Part, ...]
    if_absent: bool = False
    checksum: bool = True


class AbortMultipart(NamedTuple):
    """Drop the parts; nothing becomes visible."""

    key: Key
    upload_id: str


class Delete(NamedTuple):
    """Remove objects, at most 1 000; those that are not there are no error. ``Completion.value``: keys that failed."""

    keys: tuple[Key, ...]


class Copy(NamedTuple):
    """Copy inside the store, by the store. At most 5 GB on S3; ``Store.copy`` cuts larger ones into part copies."""

    source: Key
    target: Key
    if_match: str | None = None


class CopyPart(NamedTuple):
    """One part of a multipart upload, copied from an object by the store; ``Completion.value`` is a ``Part``."""

    source: Key
    span: ByteRange
    target: Key
    upload_id: str
    part_number: int
    if_match: str | None = None


Operation: TypeAlias = (
    Get
    | Head
    | ListPage
    | Put
    | CreateMultipart
    | PutPart
    | CompleteMultipart
    | AbortMultipart
    | Delete
    | Copy
    | CopyPart
)


class Part(NamedTuple):
    """A part that the store holds: its number, ETag, and checksums by name as base64."""

    part_number: int
    etag: str
    checksums: Mapping[str, str] = {}


class Page(NamedTuple):
    """One page of a listing: objects, and with a delimiter the prefixes below; both in key order."""

    objects: list[ObjectInfo]
    prefixes: list[str]
    next_token: str | None


# ── answers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Attempt(NamedTuple):
    """One attempt at an operation. Times in seconds; ``start_s`` on the monotonic clock."""

    start_s: float
    status: int  # 0 where no answer came
    offset_bytes: int  # where in the asked span this attempt began
    received_bytes: int
    queued_s: float  # from submission to sending
    connect_s: float  # DNS, TCP and TLS; 0 on a reused connection
    first_byte_s: float  # from sending to the first byte of the answer
    total_s: float
    throttled: bool
    request_id: str | None
    resent: bool = False  # the kept-alive connection had died, so that it was sent again on a fresh one


class Landing:
    """Where a body goes: ``buffer[start:end]``. ``buffer`` is writable; ``position`` is where the next byte goes.

    ``position`` survives a broken transfer, so that the rest can be fetched into the same place. ``direct`` is an mmap of
    the same memory that nobody else writes to meanwhile: a store may use its ``write`` and file position instead.
    """

    __slots__ = ("buffer", "direct", "end", "position", "start")

    def __init__(self, buffer: Any, start: int, end: int, *, direct: Any = None) -> None:
        self.buffer = buffer  # bytearray or writable memoryview of uint8
        self.start = start
        self.end = end
        self.position = start
        self.direct = direct

    @property
    def view(self) -> memoryview:
        """uint8[position - start]: what has landed."""
        return memoryview(self.buffer)[self.start : self.position]

    @property
    def length_bytes(self) -> int:
        """Bytes it holds when full."""
        return self.end - self.start


class GrowingLanding(Landing):
    """Where a body goes whose length nobody told: private memory that grows with it. ``end`` is ``UNKNOWN_BYTES``.

    Args:
        reserve: Called with the length in bytes that the body is about to have; raises ``StoreError`` to refuse it.
    """

    __slots__ = ("_reserve",)

    def __init__(self, reserve: Callable[[int], None]) -> None:
        super().__init__(bytearray(), 0, UNKNOWN_BYTES)
        self._reserve = reserve

    def append(self, piece: Buffer) -> None:
        """Add bytes at ``position``; what lay behind it, of an attempt that is begun again, is dropped.

        Raises:
            StoreError: the body may not become so long.
        """
        end = self.position + len(piece)
        self._reserve(end)
        self.buffer[self.position :] = piece
        self.position = end


class Completion:
    """How an operation ended. ``error`` is None, or the reason; everything else is as far as it got.

    Attributes:
        operation: What was asked.
        error: Why it failed, else None.
        info: The object's size, ETag, modification time and full-object checksums, where the answer told them.
        span: For a ``Get``: the bytes that ``landing`` was for.
        landing: For a ``Get``: where the body is; partly filled after an error.
        value: What the operation's own documentation says.
        verified: The checksum that the body was held against, or ``"length"``.
        attempts: Newest last. ``fetch`` adapts on these.
    """

    __slots__ = ("attempts", "error", "info", "landing", "operation", "span", "value", "verified")

    def __init__(self, operation: Operation, *, error: StoreError | None = None, value: Any = None) -> None:
        self.operation = operation
        self.error = error
        self.info: ObjectInfo | None = None
        self.span: ByteRange | None = None
        self.landing: Landing | None = None
        self.value = value
        self.verified = "length"
        self.attempts: tuple[Attempt, ...] = ()

    @property
    def received_bytes(self) -> int:
        """Length of ``body``, in bytes."""
        landing = self.landing
        return landing.position - landing.start if landing is not None else 0

    @property
    def body(self) -> memoryview:
        """uint8[n]: the bytes of a finished ``Get``; empty where the object is."""
        return self.landing.view if self.landing is not None else memoryview(b"")


class Sink(Protocol):
    """Who hears how an operation goes. Both methods run on an engine thread: return soon, raise nothing.

    Attributes:
        landing: Where the body of a ``Get`` goes, when that is known beforehand: ``position`` is where its first byte
            belongs and ``end - position`` the length asked for. A store may then skip ``head``. When the operation
            succeeds, ``completion.landing`` is this landing and the body lies in it: whoever had the body elsewhere
            has moved it.
    """

    landing: Landing | None

    def head(self, info: ObjectInfo, span: ByteRange) -> Landing | None:
        """A ``Get``'s answer has begun: `info` says the object's size and ETag, `span` which of its bytes follow.

        Returns where they go: a landing for ``span.length_bytes``, or for fewer, and then only those are read and the
        operation succeeds with them; or None for a new private buffer. Not called for empty objects. Raising a
        ``StoreError`` refuses the body; the operation ends with it.

        Where the store does not tell the length, ``info.size_bytes`` and ``span.end`` are ``UNKNOWN_BYTES``, and what
        is returned is a ``GrowingLanding``, or one that must be filled exactly, or None.
        """

    def done(self, completion: Completion) -> None:
        """The operation ended, well or not. Called exactly once, also after ``cancel()``."""


class Transfer(Protocol):
    """A submitted operation."""

    def cancel(self) -> None:
        """Give it up, from any thread, at any time; idempotent. ``done`` still comes, from an engine thread."""

    def unanswered_s(self) -> float:
        """Seconds that a request has been on the wire without a byte of answer; 0 where it waits or is answered.

        Asked by ``Hedged``, about late operations only.
        """


class Core(Protocol):
    """What a store must be able to do; see ``penstock.store.Store`` for what is built on it."""

    def submit(self, operation: Operation, sink: Sink) -> Transfer:
        """Start `operation`; never blocks. Bad arguments raise here, everything else reaches ``sink.done``."""

    def describe(self, key: Key) -> str:
        """The URL of `key`, for people: no credentials, no query."""
