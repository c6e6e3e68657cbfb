"""``Store``: one abstract verb, and everything else that object storage offers, built on it once.

Cores (``S3Store``, ``LocalStore``, ``MemoryStore``, ...) and wrappers (``Retrying``, ``Limited``, ``Hedged``, ``Faulty``,
``Traced``, the cache) are all stores: they implement ``submit`` and inherit the rest. A wrapper adds one behaviour and passes
everything else on; ``connect()`` composes the default stack.

The methods import their modules at the first call, so that a program that only reads does not import writing.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, overload

from penstock.errors import ConfigError
from penstock.fetch import Budget, process_budget
from penstock.store.inflight import stat
from penstock.system.tracebacks import boundary
from penstock.types import CompleteMultipart, Copy, CreateMultipart, Get, Head, Put

if TYPE_CHECKING:
    import io
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from penstock.config import FetchConfig
    from penstock.errors import StoreError
    from penstock.fetch import Chunk, Request
    from penstock.store.file import ObjectReader
    from penstock.store.reading import IntoRequest, ReadInto
    from penstock.store.writing import Writer
    from penstock.types import Blob, Buffer, ByteRange, Completion, Key, Landing, ObjectInfo, Operation, Sink, Transfer


@boundary
class Store(ABC):
    """Bytes by (key, range). All methods are safe to call from any thread; all but ``submit`` block.

    Use it as a context manager, or call ``close()``. Connections and threads belong to the process and are shared, so
    closing a store only ends its own use.
    """

    fetch_config: FetchConfig | None = None
    """How the store is read; None means ``FetchConfig()``."""
    pages_anywhere: bool = True
    """Whether a page that begins at any key costs only one request, so that a listing may guess where to begin."""
    keeps_headers: bool = False
    """Whether an object that is known without headers may have some, such as its type, which a ``Head`` then tells."""
    keeps_records: bool = False
    """Whether writes may have headers and tags, which are kept, and replace one version only (``Put.if_match``)."""
    lands_in_files: bool = False
    """Whether a body may land in a file (``FileLanding``), which is then cheaper than memory."""
    keeps_checksums: bool = False
    """Whether the store is asked to keep a checksum of every object that is written in parts."""

    @abstractmethod
    def submit(self, operation: Operation, sink: Sink) -> Transfer:
        """Start `operation`, and notify `sink` of its end; never blocks. ``penstock.types`` has operations and sinks."""

    @abstractmethod
    def describe(self, key: Key) -> str:
        """Return the URL of `key` for messages, without credentials and query."""

    def statistics(self) -> Any:
        """Return an immutable record of the statistics of this layer so far; its class documents each field."""
        return None

    def close(self) -> None:  # noqa: B027 - most stores hold nothing of their own
        """End this store's use; idempotent."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.describe('')!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        made = self.__reduce__()
        if self.fetch_config is None or len(made) != 2:
            return made
        return (*made, {"fetch_config": self.fetch_config})  # how the store is read is configuration too

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.fetch_config = state["fetch_config"]

    @property
    def budget(self) -> Budget:
        """The byte budget that this store's reading is charged to: the process's."""
        return process_budget()

    # ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────

    def read(self, key: Key, span: ByteRange | None = None) -> Blob:
        """Read an object, or one range of it.

        Large reads are cut into parts that are fetched in parallel, all of one version.

        Args:
            key: Key of the object.
            span: Bytes to read; None reads the whole object.

        Raises:
            ObjectMissingError: The object does not exist.
            SpanError: The range starts past the object's end. A range that only ends past it is cut there, as in HTTP.
            ObjectChangedError: The object was replaced while it was read.
            ConfigError: The read is larger than half of the process's byte budget; ``open()`` streams instead.

        Cost: One request for up to about two parts (``part_bytes``), else one per part; holds the bytes read.
        """
        from penstock.store.reading import read

        return read(self, key, span)

    def read_many(self, requests: Iterable[Request], *, ordered: bool = True) -> Iterator[Blob]:
        """Read many objects or ranges ahead of the consumer, as many at a time as it and the store can take.

        Args:
            requests: Keys, or pairs of key and ``ByteRange``; consumed lazily, a little ahead of the requests in flight.
            ordered: True delivers in the order of `requests`, False as the answers arrive.

        Returns:
            An iterator of ``Blob``. A delivered blob is the caller's memory; requests in flight and waiting blobs are charged
            to the budget. The first error ends the iterator and cancels the rest, and so does dropping it.

        Cost: One request per object of up to about two parts; at most ``requests_max`` in flight, within the budget.
        """
        from penstock.store.reading import read_many

        return read_many(self, requests, ordered=ordered, errors="raise")

    def try_read_many(self, requests: Iterable[Request], *, ordered: bool = True) -> Iterator[Blob | StoreError]:
        """Read many objects or ranges; a request that fails yields its ``StoreError``, and the others go on.

        Each request has one answer. The ``request_index`` of a ``Blob``, or of an error, is the request's position in the
        input. The arguments are those of ``read_many``.
        """
        from penstock.store.reading import read_many

        return read_many(self, requests, ordered=ordered, errors="return")

    def read_into(self, requests: Iterable[IntoRequest]) -> ReadInto:
        """Read many objects or ranges straight into the caller's memory, many parts at a time.

        Args:
            requests: Triples of key, ``ByteRange`` (or None for the whole object), and a writable contiguous buffer of
                exactly that many bytes, or pairs of ``PlanItem``, which may name a version, and buffer; consumed lazily. The
                buffers must not overlap.

        Returns:
            An iterator of the requests' indexes from 0, each as soon as all of its bytes have arrived, in any order. The
            first error ends it. When it has ended, was closed, or was dropped in the thread that used it, nothing writes to
            any buffer any more; buffers whose index was not returned have undefined contents.

        Raises:
            ConfigError: A buffer is read-only or not contiguous, or has another length than its range.
            ObjectChangedError: An object was replaced while it was read, or has another size than its buffer.
            SpanError: A range ends past the end of its object.
            ChecksumError: A whole object does not have the checksum that the store keeps of it.

        Cost: One request per range of up to about one and a half parts (``part_bytes``), else one per part, and a HEAD for
        each whole object of several parts. Holds no memory but that of ranges of at most 256 KiB near each other, which one
        request reads, and which are then copied.
        """
        from penstock.store.reading import read_into

        return read_into(self, requests)

    def read_parts(
        self,
        requests: Iterable[Request],
        *,
        part_bytes: int | None = None,
        requests_max: int | None = None,
    ) -> Iterator[Chunk]:
        """Stream objects of any size, in order, part by part; parts are fetched in parallel ahead of the consumer.

        Args:
            requests: Keys, or pairs of key and ``ByteRange``; consumed lazily.
            part_bytes: Size of a part in bytes; None takes ``FetchConfig.part_bytes``.
            requests_max: The most requests in flight; None takes ``FetchConfig.requests_max``.

        Returns:
            An iterator of ``Chunk``. A chunk's memory is charged to the budget until nothing refers to it any more, and is
            then used again.

        Cost: One request per part; memory within the budget, whatever the size of the objects.
        """
        from penstock.store.reading import read_parts

        return read_parts(self, requests, part_bytes=part_bytes, requests_max=requests_max)

    def stat(self, key: Key) -> ObjectInfo:
        """Return size, ETag and modification time of an object. Cost: one request.

        Raises:
            ObjectMissingError: The object does not exist.
        """
        return stat(self, key)

    def list(self, prefix: str = "", *, recursive: bool = True) -> Iterator[ObjectInfo]:
        """List the objects whose key begins with `prefix`, in the order of the keys' UTF-8 bytes.

        Args:
            prefix: Any string, not only whole path segments.
            recursive: False stops at the next ``/``: deeper keys appear once, as a prefix (``is_prefix``).

        Cost: One request per 1 000 keys, in parallel over the prefixes that it discovers, and over parts of a flat prefix
        whose keys are numbers. Other flat prefixes may cost up to twice as many requests.
        """
        from penstock.store.listing import list_objects

        return list_objects(self, prefix, recursive=recursive)

    @overload
    def open(self, key: Key, mode: Literal["rb"] = "rb") -> ObjectReader: ...
    @overload
    def open(self, key: Key, mode: Literal["wb", "xb"]) -> Writer: ...
    def open(self, key: Key, mode: str = "rb") -> io.IOBase:
        """Open an object as a real file object.

        Args:
            key: Key of the object.
            mode: ``"rb"`` is seekable, reads ahead when it is used in sequence, and reads one version. ``"wb"`` is
                ``writer``. ``"xb"`` is the same, but never replaces an object.

        Raises:
            ConfigError: The mode is another one.
            ObjectMissingError: The mode is ``"rb"``, and there is no such object.
            ObjectExistsError: The mode is ``"xb"``, and there is an object by the time of ``close()``.

        Cost: For ``"rb"``, one request for the first 64 KiB.
        """
        from penstock.store.file import open_file

        return open_file(self, key, mode)

    # ── writing ────────────────────────────────────────────────────────────────────────────────────────────────────

    def write(
        self,
        key: Key,
        data: Buffer,
        *,
        if_absent: bool = False,
        if_match: str | None = None,
        headers: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        """Store `data` as one object, visible at once and whole. Cost: one request, or a multipart upload if it is large.

        Args:
            key: Key of the object.
            data: Any contiguous buffer of bytes.
            if_absent: Whether to refuse to replace an object.
            if_match: ETag of the one version that may be replaced, as ``stat`` returns it; None replaces any.
            headers: Headers to keep with the object, such as ``{"Content-Type": "text/plain", "x-amz-meta-run": "7"}``.
            tags: Tags of the object.

        Raises:
            ObjectExistsError: `if_absent` is true, and there is an object of that key.
            ObjectChangedError: The object is another version than `if_match`.
            ObjectMissingError: `if_match` is given, and there is no object of that key.
            ConfigError: The store cannot keep headers or tags, or replace one version only: S3, directories and memory can.
        """
        from penstock.store.writing import write

        return write(self, key, data, if_absent=if_absent, if_match=if_match, headers=headers, tags=tags)

    def writer(
        self,
        key: Key,
        *,
        part_bytes: int | None = None,
        if_match: str | None = None,
        headers: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> Writer:
        """Return a file object that writes an object of any size; parts are uploaded in parallel.

        The object becomes visible when ``close()`` returns. An exception inside ``with``, ``abort()`` and garbage
        collection never commit; they drop the bytes that were sent.

        Args:
            key: Key of the object.
            part_bytes: Size of the first parts in bytes, at least 5 MiB on S3; None takes 8 MiB.
            if_match: ETag of the one version that may be replaced, compared when the writer is closed; None replaces any.
            headers: Headers to keep with the object, as ``types.Put`` says.
            tags: Tags of the object, at most 10 on S3.
        """
        from penstock.store.writing import Writer

        return Writer(self, key, part_bytes=part_bytes, if_match=if_match, headers=headers, tags=tags)

    def delete(self, keys: Key | Iterable[Key]) -> None:
        """Remove one or many objects; a missing object is no error. Cost: one request per 1 000 keys."""
        from penstock.store.writing import delete

        delete(self, keys)

    def copy(self, source: Key, target: Key) -> ObjectInfo:
        """Let the store copy an object within itself; no bytes pass through this process."""
        from penstock.store.writing import copy

        return copy(self, source, target)


class Wrapper(Store):
    """A store that adds one behaviour to another; subclasses implement ``submit``."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.fetch_config = inner.fetch_config
        self.pages_anywhere = inner.pages_anywhere
        self.keeps_checksums = inner.keeps_checksums
        self.keeps_headers = inner.keeps_headers
        self.keeps_records = inner.keeps_records
        self.lands_in_files = inner.lands_in_files

    def describe(self, key: Key) -> str:
        """Return the URL of `key`, as the store inside does."""
        return self.inner.describe(key)

    def statistics(self) -> Any:
        """Return the record of the store inside; wrappers that keep one override this."""
        return self.inner.statistics()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    def close(self) -> None:
        """Close the store inside."""
        self.inner.close()


def check_plain_write(store: Store, operation: Operation) -> None:
    """Refuse a write that wants what a store without ``keeps_records`` cannot do.

    Raises:
        ConfigError: It has headers or tags, or replaces one version only.
    """
    if isinstance(operation, Put | CreateMultipart | CompleteMultipart | Copy):
        names = ("headers", "tags") if isinstance(operation, Copy) else ("headers", "tags", "if_match")
        for name in names:
            if getattr(operation, name, None):
                raise ConfigError(
                    f"{type(store).__name__} keeps only the bytes of objects, and cannot honour {name}=",
                    hint="S3, directories and memory can",
                )


def innermost(store: Store) -> Any:
    """Return the store inside all wrappers."""
    core: Any = store
    while hasattr(core, "inner"):
        core = core.inner
    return core


KEY_BYTES_MAX = 1024
"""Longest key in bytes of UTF-8; this is S3's limit."""
_DOT_SEGMENT = re.compile(r"(^|/)\.\.?(/|$)")


def check_key(key: Key) -> None:
    """Refuse keys that no store accepts.

    Raises:
        ConfigError: The key is not a str, is empty, cannot be encoded as UTF-8, or is longer than 1 024 bytes.
    """
    if not isinstance(key, str):
        raise ConfigError(f"a key must be a str, not {type(key).__name__}: {key!r}")
    try:
        length = len(key.encode())
    except UnicodeEncodeError as error:
        raise ConfigError(f"key {key!r} is not encodable as UTF-8 at character {error.start}") from error
    if not 0 < length <= KEY_BYTES_MAX:
        raise ConfigError(f"key {key[:40]!r}... has {length} bytes as UTF-8; it must have 1 to {KEY_BYTES_MAX}")


def has_dot_segment(key: Key) -> bool:
    """Whether a segment of `key` is ``.`` or ``..``, which HTTP clients, proxies and file systems resolve away."""
    return _DOT_SEGMENT.search(key) is not None


class MultiStore(Store):
    """Reads several stores; a key is the number of its store, a slash, and the key there.

    Reading stores one after the other waits for a first byte at each change of store. With two prefixes in random order that
    is every other object: 60 objects a second at 30 ms, instead of 2 700.

    Args:
        stores: At least one store; the first one's ``fetch_config`` holds for all. Closing the ``MultiStore`` closes them.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        self.stores = tuple(stores)
        self.fetch_config = self.stores[0].fetch_config

    def __repr__(self) -> str:
        return f"MultiStore({', '.join(map(repr, self.stores))})"

    def __reduce__(self) -> tuple[Any, ...]:
        return MultiStore, (self.stores,)

    def add(self, store: Store) -> None:
        """Add a store, which gets the next number. Other threads may use those that are there."""
        self.stores = (*self.stores, store)

    def submit(self, operation: Operation, sink: Sink) -> Transfer:
        """Start a ``Get`` or ``Head`` in the store that the key names; see ``Store.submit``.

        Raises:
            ConfigError: `operation` is of another kind.
        """
        if not isinstance(operation, Get | Head):
            raise ConfigError(
                f"{type(operation).__name__} is not supported by several stores together, which can only be read"
            )
        number, _, key = operation.key.partition("/")
        return self.stores[int(number)].submit(type(operation)(key, *operation[1:]), sink)

    def describe(self, key: Key) -> str:
        """Return the URL of `key` in the store that it names."""
        number, _, key = key.partition("/")
        return self.stores[int(number)].describe(key)

    def close(self) -> None:
        """Close all; idempotent."""
        for store in self.stores:
            store.close()


# ── relays ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


Owner = TypeVar("Owner")


class Relay:
    """A sink that passes everything on to another sink.

    A subclass that overrides ``done`` passes the end on whatever fails on the way (``try``/``finally``), so that a
    defect in a wrapper leaves no caller waiting.

    Attributes:
        sink: The sink that everything is passed on to.
        landing: The landing of `sink`; None if it has none beforehand.
    """

    __slots__ = ("landing", "sink")

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.landing: Landing | None = sink.landing

    def head(self, info: ObjectInfo, span: ByteRange) -> Landing | None:
        """Return where the body goes; see ``types.Sink.head``."""
        return self.sink.head(info, span)

    def done(self, completion: Completion) -> None:
        """Take the end of the operation; see ``types.Sink.done``."""
        self.sink.done(completion)


class OperationRelay(Relay, Generic[Owner]):
    """A relay that is also the caller's transfer: one object for both sides of an operation.

    Args:
        owner: The wrapper.
        operation: The operation, as the caller submitted it.
        sink: The caller's sink.

    Attributes:
        transfer: The transfer of the store inside; None before it is submitted and after it has ended.
        cancelled: Whether the caller gave the operation up.
    """

    __slots__ = ("cancelled", "operation", "owner", "transfer")

    def __init__(self, owner: Owner, operation: Operation, sink: Sink) -> None:
        self.owner = owner
        self.operation = operation
        self.sink = sink
        self.landing = sink.landing
        self.transfer: Transfer | None = None
        self.cancelled = False

    def cancel(self) -> None:
        """Give the operation up; see ``types.Transfer.cancel``."""
        self.cancelled = True
        if (transfer := self.transfer) is not None:
            transfer.cancel()

    def unanswered_s(self) -> float:
        """Return how long it has waited for an answer; see ``types.Transfer.unanswered_s``."""
        transfer = self.transfer
        return transfer.unanswered_s() if transfer is not None else 0.0


class Resent:
    """The transfer of an operation that may be sent several times; a mixin for the class that sends it.

    Attributes:
        cancelled: Whether the caller gave the operation up.
        transfers: The transfers under way. There may be two for a moment, because the first one may be added when the
            second is already under way; cancelling one that has ended does nothing.
    """

    __slots__ = ()

    cancelled: bool
    transfers: list[Transfer]

    def cancel(self) -> None:
        """Give the operation up; see ``types.Transfer.cancel``."""
        self.cancelled = True  # type: ignore[misc]  # a slot of every class that mixes this in
        for transfer in tuple(self.transfers):
            transfer.cancel()

    def unanswered_s(self) -> float:
        """Return how long it has waited for an answer; see ``types.Transfer.unanswered_s``."""
        return max((transfer.unanswered_s() for transfer in tuple(self.transfers)), default=0.0)
