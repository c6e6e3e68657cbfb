"""The types that all layers share, and the one method that every store implements.

That method is ``submit(operation, sink) -> Transfer``. It starts `operation`, notifies `sink` when it ends, and never blocks.
Everything else (read, read_many, list, writer, ...) is built on it once, in ``store/``, and wrappers (retry, hedge, limit,
fault, trace, cache) implement the same method. Operations and answers are plain records that are cheap to create, since about
15 000 of them pass each second.

Not split because it is the vocabulary of all layers: operations, their answers and the protocols name each other.
"""

from __future__ import annotations

import operator
import re
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from penstock.errors import ConfigError, SpanError, StoreError
from penstock.redaction import public_key

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Key: TypeAlias = str
"""Name of an object in its store: at most 1 024 bytes of UTF-8. A leading slash is neither added nor removed."""

Buffer: TypeAlias = bytes | bytearray | memoryview


UNKNOWN_BYTES = 1 << 62
"""``ObjectInfo.size_bytes``, and the end of a span, while a body of unknown length arrives.

``Sink.head`` may receive it. ``Get`` takes it as the end of a span that reaches to the end of the object. The result of a
successful operation never contains it.
"""

SIZE_DIGITS_MAX = 18
"""Digits of the longest size that is believed. It is less than ``UNKNOWN_BYTES``; S3's longest objects have 14 digits."""

PARTS_MAX = 10_000
"""The most parts of a multipart upload, and the largest number of one; this is S3's limit."""


class ByteRange(NamedTuple):
    """A half-open range of bytes ``[start, end)`` with ``0 <= start < end``, which ``checked()`` verifies."""

    start: int
    end: int

    @property
    def length_bytes(self) -> int:
        """Length of the range in bytes."""
        return self.end - self.start

    @property
    def header(self) -> str:
        """The header line of an HTTP request for this range; if the end is ``UNKNOWN_BYTES``, it names no last byte."""
        return f"Range: bytes={self.start}-{self.end - 1 if self.end != UNKNOWN_BYTES else ''}"

    def checked(self) -> ByteRange:
        """Return the range itself if it is valid.

        Raises:
            ConfigError: The start is negative, the end is not greater than the start, or one of them is not an integer.
        """
        try:
            if 0 <= operator.index(self.start) < operator.index(self.end):
                return self
        except TypeError:
            pass
        raise ConfigError(f"ByteRange({self.start!r}, {self.end!r}) must be whole numbers, 0 <= start < end")

    def within(self, size_bytes: int) -> ByteRange:
        """Return the range cut at the end of an object of `size_bytes` bytes.

        Raises:
            SpanError: The range starts at or past the end of the object.
        """
        if self.start >= size_bytes:
            raise SpanError(
                f"the range starts at byte {self.start}, but the object has {size_bytes} bytes", span=tuple(self)
            )
        return ByteRange(self.start, min(self.end, size_bytes))


_STRONG_ETAG = re.compile(r'"[!#-~]+"')


def strong_etag(text: str | None) -> str | None:
    """Return a strong ETag in its normal form ``"..."``, or None if the text contains none.

    Some stores omit the quotes in listings, others in headers. Every ETag passes through this function when it is parsed, so
    that two ETags of the same version are equal. A weak ETag (``W/"..."``) identifies the meaning of an object, not its bytes,
    and ``If-Match`` never matches it. Text that a header line cannot contain is not an ETag either.

    Args:
        text: An ETag from a header, a listing or a manifest, with or without quotes.
    """
    if text is None or _STRONG_ETAG.fullmatch(text):
        return text
    bare = text.strip().strip('"')
    if not bare or text.lstrip()[:2] in ("W/", "w/") or not (bare.isascii() and bare.isprintable()):
        return None
    return f'"{bare}"'


_LOCAL_ETAG = re.compile(r'("[0-9a-f]+-[0-9a-f-]+-[0-9a-f]+)-c[0-9a-f]+"')
"""An ETag as ``LocalStore`` makes it, whose last part is the time; nginx's ``"mtime-size"`` may end like it, too."""


def lasting_etag(etag: str | None) -> str | None:
    """Return the identity of a version in a data set: its ETag, for a local file without the time of its last status change.

    That time also changes when a file is linked, renamed, or given other permissions, as backups do, which must neither outdate
    an index nor end a training job.
    """
    found = _LOCAL_ETAG.fullmatch(etag or "")
    return f'{found[1]}"' if found else etag


def parse_size(text: str | bytes) -> int | None:
    """Return the size in bytes that an answer states, or None if the text is anything but 1 to ``SIZE_DIGITS_MAX`` digits."""
    return int(text) if len(text) <= SIZE_DIGITS_MAX and text.isascii() and text.isdigit() else None


class ObjectInfo(NamedTuple):
    """A store's facts about an object, without its bytes.

    ``etag`` is in the form that ``strong_etag`` returns. A store without ETags may use an identifier of its own
    (``size-mtime-inode-ctime``). ``list(recursive=False)`` also yields prefixes: their keys end with ``/``, ``is_prefix`` is
    true, and their size is 0.

    ``headers`` are those of the answer, by lower-case name: a reference, which costs nothing. They are empty if the store has
    none, and in listings. ``tags`` are those of the object, if the store tells them with its headers, as S3 does not. Two
    records that differ in nothing else are equal.
    """

    key: Key
    size_bytes: int
    etag: str | None = None
    last_modified_s: float | None = None  # seconds since the epoch
    is_prefix: bool = False
    checksums: Mapping[str, str] = {}  # full-object only, base64: {"crc32c": "...", ...}
    headers: Mapping[bytes, bytes] = {}
    tags: Mapping[str, str] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectInfo) and tuple(self[:-2]) == tuple(other[:-2])

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(tuple(self[:-2]))

    def __repr__(self) -> str:
        values = zip(self._fields[:-2], (public_key(self.key), *self[1:-2]), strict=True)
        return f"ObjectInfo({', '.join(f'{name}={value!r}' for name, value in values)})"


def same_version(one: ObjectInfo, other: ObjectInfo) -> bool:
    """Whether two answers describe the same version of an object, as far as this can be known.

    Without an ETag, size and modification time are compared. They do not distinguish two versions of the same size that were
    written within the resolution of the time, which is one second over HTTP.
    """
    if (one.etag, one.size_bytes) != (other.etag, other.size_bytes):
        return False
    return one.etag is not None or one.last_modified_s == other.last_modified_s


class Blob:
    """Bytes that a read returned. They belong to the caller and count towards no budget.

    Attributes:
        data: uint8[length], read without copying.
        key: Key of the object.
        span: The requested range; None for the whole object.
        etag: ETag of the version that was read; None if the store has no ETags.
        request_index: Position of the request in the input of ``read_many``, from 0; 0 for ``read``.
        verified: Checksum that the bytes were compared with: ``"crc32c"``, ``"crc64nvme"``, ...; ``"length"`` if only the
            length and the ETag could be checked.
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


class Chunk(NamedTuple):
    """Consecutive bytes of an object, as ``read_parts`` delivers them.

    Attributes:
        request_index: Position of the request in the input of ``read_parts``, from 0.
        key: Key of the object.
        offset_bytes: Offset in the object at which `data` begins.
        data: uint8[n]; its memory is charged to the budget until nothing refers to it, and is then used again.
        last: Whether it ends the request.
        etag: ETag of the version that is being read; None if the store has none.
        in_file: Whether the bytes lie in the file that the request named, where `data` reads them.
        info: The object, as the answers so far describe it.
    """

    request_index: int
    key: Key
    offset_bytes: int
    data: memoryview
    last: bool
    etag: str | None
    in_file: bool = False
    info: ObjectInfo | None = None

    def __repr__(self) -> str:
        end = self.offset_bytes + len(self.data)
        return f"<Chunk {public_key(self.key)!r} [{self.offset_bytes}, {end}){' last' if self.last else ''}>"


@runtime_checkable
class BodyStream(Protocol):
    """A body that arrives while it is sent, so that it is never held whole. It can be sent only once.

    Attributes:
        length_bytes: Length of the whole body in bytes.
    """

    length_bytes: int

    def read_nowait(self, size_bytes: int, on_more: Callable[[], None]) -> bytes | None:
        """Return the next bytes, at most `size_bytes` of them; empty bytes at the end of the body.

        Args:
            size_bytes: The most bytes to return.
            on_more: Called once, on any thread, when there are more bytes, if the result is None because there are none yet.

        Raises:
            Exception: The body is refused, and the request must not be completed.
        """


# ── operations that a store performs ────────────────────────────────────────────────────────────────────────


class Get(NamedTuple):
    """Read an object, or a span of it. With `if_match`, another version than that raises ``ObjectChangedError``."""

    key: Key
    span: ByteRange | None = None
    if_match: str | None = None


class Head(NamedTuple):
    """Get the ``ObjectInfo`` of an object as ``Completion.info``, and the claim it was written with as ``Completion.value``.

    A caller that already reads one version names it by `etag` and `size_bytes`: a cache that has its blocks may then answer.
    With `headers`, the answer's headers are wanted: a cache that knows the object only from a listing then asks the store, and
    a directory looks for the record that is kept beside a file, even if `etag` is given.
    """

    key: Key
    etag: str | None = None
    size_bytes: int | None = None
    headers: bool = False


class ListPage(NamedTuple):
    """List one page of keys, in key order; ``Completion.value`` is a ``Page``."""

    prefix: str = ""
    delimiter: str = ""
    token: str | None = None  # next_token of the previous page
    start_after: str = ""
    keys_max: int = 1000


class Put(NamedTuple):
    """Write a whole object, which becomes visible at once; ``Completion.info`` describes it.

    With `if_absent`, an object that exists raises ``ObjectExistsError``. With `if_match`, another version than that raises
    ``ObjectChangedError``, and a missing object ``ObjectMissingError``.

    `headers` are kept with the object, by their names in any case: ``Content-Type``, the other headers of content, and user
    metadata (``x-amz-meta-...``). So are `tags`. Stores without ``keeps_records`` refuse headers, tags and `if_match`.

    A store whose answers may be lost keeps `claim` beside the object. A writer that tries again and finds an object then knows
    whether it wrote the object itself.
    """

    key: Key
    body: Buffer
    if_absent: bool = False
    claim: str = ""
    headers: Mapping[str, str] = {}
    tags: Mapping[str, str] = {}
    if_match: str | None = None


class CreateMultipart(NamedTuple):
    """Begin a multipart upload; ``Completion.value`` is its upload id.

    `claim`, `headers` and `tags` have the same meaning as in ``Put``. With `checksum`, the store is asked to keep a checksum of
    the whole object if it can.
    """

    key: Key
    claim: str = ""
    checksum: bool = True
    headers: Mapping[str, str] = {}
    tags: Mapping[str, str] = {}


class PutPart(NamedTuple):
    """Upload one part; ``Completion.value`` is a ``Part``. `crc32c` is that of the body, if the caller knows it."""

    key: Key
    upload_id: str
    part_number: int  # from 1, as S3 counts
    body: Buffer
    crc32c: int | None = None


class CompleteMultipart(NamedTuple):
    """Commit a multipart upload: the whole object becomes visible.

    `checksum` must be the same as in ``CreateMultipart``; `if_absent` and `if_match` have the same meaning as in ``Put``.
    ``Completion.info`` has the checksums that the store keeps, if it reports them.
    """

    key: Key
    upload_id: str
    parts: tuple[Part, ...]
    if_absent: bool = False
    checksum: bool = True
    if_match: str | None = None


class AbortMultipart(NamedTuple):
    """Abort a multipart upload: its parts are dropped, and nothing becomes visible."""

    key: Key
    upload_id: str


class Delete(NamedTuple):
    """Delete at most 1 000 objects. Missing ones are not an error; ``Completion.value`` has the keys that failed."""

    keys: tuple[Key, ...]


class Copy(NamedTuple):
    """Copy an object inside the store, on S3 of at most 5 GB; ``Store.copy`` copies larger objects in parts.

    `if_match` is the version of the source. The copy has the headers and tags of its source, or those that are given.
    """

    source: Key
    target: Key
    if_match: str | None = None
    headers: Mapping[str, str] | None = None
    tags: Mapping[str, str] | None = None


class CopyPart(NamedTuple):
    """Copy a span of an object into a part of a multipart upload; ``Completion.value`` is a ``Part``."""

    source: Key
    span: ByteRange
    target: Key
    upload_id: str
    part_number: int
    if_match: str | None = None


class Forward(NamedTuple):
    """Send a request of S3's own protocol on to a store that speaks it; ``Completion.value`` is a ``ForwardedAnswer``.

    The store adds its address, its credentials and the headers that its bucket demands. Other stores refuse it.
    """

    method: str
    key: Key  # empty for the bucket itself
    query: str  # percent-encoded, without the question mark
    headers: tuple[str, ...]  # lines ``Name: value``; for a streamed body, ``x-amz-content-sha256`` is among them
    body: Buffer | BodyStream | None = None


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
    | Forward
)


class ForwardedAnswer(NamedTuple):
    """The answer to a ``Forward`` that succeeded: its status, its headers by lower-case name, and its body."""

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes


class Part(NamedTuple):
    """A part of a multipart upload that the store holds: its number, its ETag, and its checksums by name in base64."""

    part_number: int
    etag: str
    checksums: Mapping[str, str] = {}


class Page(NamedTuple):
    """One page of a listing: objects and, with a delimiter, common prefixes, both in key order."""

    objects: list[ObjectInfo]
    prefixes: list[str]
    next_token: str | None


# ── answers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Attempt(NamedTuple):
    """One attempt at an operation. Times are in seconds; ``start_s`` is on the monotonic clock."""

    start_s: float
    status: int  # HTTP status; 0 if there was no answer
    offset_bytes: int  # offset in the requested span where this attempt began
    received_bytes: int
    queued_s: float  # from submission to sending
    connect_s: float = 0.0  # DNS, TCP and TLS; 0 on a reused connection
    first_byte_s: float = 0.0  # from sending to the first byte of the answer
    total_s: float = 0.0
    throttled: bool = False
    request_id: str | None = None
    resent: bool = False  # sent again on a new connection, because the kept-alive one had died


class Landing:
    """The destination of a body: ``buffer[start:end]``.

    Attributes:
        buffer: A bytearray, or a writable memoryview of uint8.
        start: Offset of the first byte in `buffer`.
        end: Offset after the last byte in `buffer`.
        offset: Offset of the next byte in `buffer`. A broken transfer leaves it as it is, so that the rest of the body
            can be fetched into the same place.
        direct: An mmap of the same memory that nobody else writes to meanwhile, or None. A store may use its ``write`` and
            its file offset instead of `buffer`.
    """

    __slots__ = ("buffer", "direct", "end", "offset", "start")

    def __init__(self, buffer: Any, start: int, end: int, *, direct: Any = None) -> None:
        self.buffer = buffer
        self.start = start
        self.end = end
        self.offset = start
        self.direct = direct

    @property
    def view(self) -> memoryview:
        """The bytes that have arrived: uint8[offset - start]."""
        return memoryview(self.buffer)[self.start : self.offset]

    @property
    def length_bytes(self) -> int:
        """Number of bytes that it holds when it is full."""
        return self.end - self.start

    def append(self, piece: Buffer) -> None:
        """Copy bytes to ``offset``, which moves behind them.

        Raises:
            OverflowError: There are more than fit; those that fit were copied.
        """
        fitting = memoryview(piece)[: self.end - self.offset]
        end = self.offset + len(fitting)
        memoryview(self.buffer)[self.offset : end] = fitting
        self.offset = end
        if len(fitting) < len(piece):
            raise OverflowError(f"the body is longer than its {self.length_bytes} bytes")


class GrowingLanding(Landing):
    """The destination of a body of unknown length: private memory that grows. ``end`` is ``UNKNOWN_BYTES``.

    Args:
        reserve: Called with the length in bytes that the body is about to have; raises ``StoreError`` to refuse it.
    """

    __slots__ = ("_reserve",)

    def __init__(self, reserve: Callable[[int], None]) -> None:
        super().__init__(bytearray(), 0, UNKNOWN_BYTES)
        self._reserve = reserve

    def append(self, piece: Buffer) -> None:
        """Add bytes at ``offset``. Bytes after it, which an earlier attempt left, are dropped.

        Raises:
            StoreError: The body must not become so long.
        """
        end = self.offset + len(piece)
        self._reserve(end)
        self.buffer[self.offset :] = piece
        self.offset = end


class Completion:
    """The end of an operation. After an error, the other attributes describe how far it got.

    Attributes:
        operation: The operation.
        error: Why it failed; None if it succeeded.
        info: Size, ETag, modification time and full-object checksums of the object, as far as the answer has them.
        span: For a ``Get``, the range that ``landing`` is for.
        landing: For a ``Get``, the destination of the body; partly filled after an error.
        value: The result that the documentation of the operation describes.
        verified: Checksum that the body was compared with, or ``"length"``.
        attempts: The attempts, the newest last. ``fetch`` adapts the number of requests to them.
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
        """Length of ``body`` in bytes."""
        landing = self.landing
        return landing.offset - landing.start if landing is not None else 0

    @property
    def body(self) -> memoryview:
        """The bytes of a finished ``Get``: uint8[n]."""
        return self.landing.view if self.landing is not None else memoryview(b"")


class Sink(Protocol):
    """Receives the answer to an operation. Its methods run on an engine thread, so they must return soon.

    Attributes:
        landing: The destination of the body of a ``Get``, if it is known beforehand: ``offset`` is the place of the
            first byte, and ``end - offset`` the requested length. A store may then skip ``head``. When the operation
            succeeds, ``completion.landing`` is this landing and contains the body, even if the body first arrived elsewhere.

    A sink may also have the attribute ``leaves_body_alone``. If it is true, nobody changes the body after ``done``,
    so a cache may still read it then.
    """

    landing: Landing | None

    def head(self, info: ObjectInfo, span: ByteRange) -> Landing | None:
        """Choose the destination of a body, when the answer to a ``Get`` has begun. Not called for empty objects.

        If the store does not send the length, ``info.size_bytes`` and ``span.end`` are ``UNKNOWN_BYTES``.

        Args:
            info: Size and ETag of the object.
            span: The range of the object that follows.

        Returns:
            A landing for ``span.length_bytes`` bytes, or for fewer: then only those are read, and the operation succeeds with
            them. None for a new private buffer. For an unknown length a ``GrowingLanding``, a landing that must be filled
            exactly, or None.

        Raises:
            StoreError: The body is refused; the operation ends with this error.
        """

    def done(self, completion: Completion) -> None:
        """Take the result when the operation has ended. Called exactly once, even after ``cancel()``; must not raise."""


class Transfer(Protocol):
    """A submitted operation."""

    def cancel(self) -> None:
        """Cancel the operation, from any thread and at any time; idempotent. An engine thread still calls ``done``."""

    def unanswered_s(self) -> float:
        """Return how long the request has waited for the first byte of its answer, in seconds.

        The result is 0 if the request has not been sent, or its answer has begun. ``Hedged`` calls this for late operations.
        """


class Core(Protocol):
    """The methods that a store must implement; ``penstock.store.Store`` builds all others on them."""

    def submit(self, operation: Operation, sink: Sink) -> Transfer:
        """Start `operation` without blocking. Invalid arguments raise here; any other failure reaches ``sink.done``."""

    def describe(self, key: Key) -> str:
        """Return the URL of `key` for display, without credentials and query."""
