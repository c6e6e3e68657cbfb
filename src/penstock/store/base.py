"""``Store``: one abstract verb, and everything people ask of object storage built on it once.

Cores (``S3Store``, ``LocalStore``, ``MemoryStore``, ...) and wrappers (``Retrying``, ``Limited``, ``Hedged``, ``Faulty``,
``Traced``, later the cache) are all stores: they implement ``submit`` and inherit the rest. A wrapper adds one behaviour
and passes everything else on; ``connect()`` composes the default stack.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from penstock.fetch import Budget, process_budget
from penstock.store.waiting import stat
from penstock.tracebacks import boundary

if TYPE_CHECKING:
    import io
    from collections.abc import Iterable, Iterator

    from penstock.config import FetchConfig
    from penstock.errors import StoreError
    from penstock.fetch import Chunk, Request
    from penstock.store.file import ObjectReader
    from penstock.store.writing import Writer
    from penstock.types import Blob, Buffer, ByteRange, Key, ObjectInfo, Operation, Sink, Transfer


@boundary
class Store(ABC):
    """Bytes by (key, range). All methods are safe to call from any thread; all but ``submit`` block.

    Use it as a context manager, or call ``close()``: connections and threads belong to the process and are shared, so
    closing a store only ends its own use.
    """

    fetch_config: FetchConfig | None = None
    pages_anywhere: bool = True
    """Whether a page that begins at any key costs no more than a request, so that a listing may guess where to begin."""
    keeps_checksums: bool = False
    """Whether the store is asked to keep a checksum of every object that is written in parts."""

    @abstractmethod
    def submit(self, operation: Operation, sink: Sink) -> Transfer:
        """Start `operation` and tell `sink` how it ends; never blocks. See ``penstock.types``."""

    @abstractmethod
    def describe(self, key: Key) -> str:
        """The URL of `key`, for people: no credentials, no query."""

    def statistics(self) -> Any:
        """An immutable record of what this layer did so far; its class documents each field."""
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
        return (*made, {"fetch_config": self.fetch_config})  # how it reads is configuration too

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.fetch_config = state["fetch_config"]

    @property
    def budget(self) -> Budget:
        """The byte budget that this store's reading is charged to: the process's."""
        return process_budget()

    # ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────

    def read(self, key: Key, span: ByteRange | None = None) -> Blob:
        """The bytes of an object, or of one range of it.

        Large reads are cut into parts fetched in parallel, all of one version.

        Raises:
            ObjectMissingError: no such key.
            SpanError: the range starts past the end. A range that only ends past it is cut at the end, as HTTP does.
            ObjectChangedError: the object was replaced while it was read.
            ConfigError: the read is larger than half the process's byte budget; ``open()`` streams.

        Cost: one request up to ``part_bytes``, else one per part; holds the bytes read.
        """
        from penstock.store.reading import read

        return read(self, key, span)

    def read_many(self, requests: Iterable[Request], *, ordered: bool = True) -> Iterator[Blob]:
        """Many objects or ranges, read ahead of the consumer, as many at a time as it and the store can take.

        Args:
            requests: Keys, or (key, ByteRange); consumed lazily, a little ahead of what is in flight.
            ordered: Deliver in the order asked (default), or as they arrive.

        Returns:
            An iterator of ``Blob``. A delivered blob is the caller's memory; what is in flight or waiting is charged to
            the budget. The first error ends it and cancels the rest; so does dropping it.

        Cost: one request per object up to ``part_bytes``; at most ``requests_max`` in flight, within the budget.
        """
        from penstock.store.reading import read_many

        return read_many(self, requests, ordered=ordered, errors="raise")

    def try_read_many(self, requests: Iterable[Request], *, ordered: bool = True) -> Iterator[Blob | StoreError]:
        """Like ``read_many``, but a request that cannot be served yields its ``StoreError`` and the others go on.

        Each request has one answer. Its ``request_index``, of a ``Blob`` and of an error alike, is its position in the input.
        """
        from penstock.store.reading import read_many

        return read_many(self, requests, ordered=ordered, errors="return")

    def read_parts(
        self,
        requests: Iterable[Request],
        *,
        part_bytes: int | None = None,
        requests_max: int | None = None,
    ) -> Iterator[Chunk]:
        """Stream objects of any size, in order, part by part; parts are fetched in parallel ahead of the consumer.

        Args:
            requests: Keys, or (key, ByteRange); consumed lazily.
            part_bytes: Size of the parts (default ``FetchConfig.part_bytes``).
            requests_max: The most in flight (default ``FetchConfig.requests_max``).

        Returns:
            An iterator of ``Chunk``: request_index, offset, data, last. A chunk's memory is charged to the budget
            until nothing refers to it any more, then reused.

        Cost: one request per part; memory within the budget, whatever the size of the objects.
        """
        from penstock.store.reading import read_parts

        return read_parts(self, requests, part_bytes=part_bytes, requests_max=requests_max)

    def stat(self, key: Key) -> ObjectInfo:
        """Size, ETag and modification time of an object. Cost: one request.

        Raises:
            ObjectMissingError: no such key.
        """
        return stat(self, key)

    def list(self, prefix: str = "", *, recursive: bool = True) -> Iterator[ObjectInfo]:
        """Objects whose key begins with `prefix`, in key order (of UTF-8 bytes).

        Args:
            prefix: Any string; not only whole path segments.
            recursive: False stops at the next ``/``: deeper keys appear once, as a prefix (``is_prefix``).

        Cost: one request per 1 000 keys, in parallel over the prefixes it discovers, and over parts of a flat prefix,
        where its keys are numbers; where they are not, up to as many requests more.
        """
        from penstock.store.listing import list_objects

        return list_objects(self, prefix, recursive=recursive)

    @overload
    def open(self, key: Key, mode: Literal["rb"] = "rb") -> ObjectReader: ...
    @overload
    def open(self, key: Key, mode: Literal["wb", "xb"]) -> Writer: ...
    def open(self, key: Key, mode: str = "rb") -> io.IOBase:
        """A real file object.

        Args:
            key: The object's.
            mode: ``"rb"``: seekable, read ahead when used in sequence, one version. ``"wb"``: as ``writer``. ``"xb"``:
                the same, but it never replaces an object.

        Raises:
            ConfigError: another mode.
            ObjectMissingError: ``"rb"``, and there is no such key.
            ObjectExistsError: ``"xb"``, by ``close()``: there is an object of that key by then.

        Cost: ``"rb"``: one request, of the first 64 KiB.
        """
        from penstock.store.file import open_file

        return open_file(self, key, mode)

    # ── writing ────────────────────────────────────────────────────────────────────────────────────────────────────

    def write(self, key: Key, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        """Store `data` as one object, visible at once and whole. Cost: one request, or a multipart upload when large.

        Raises:
            ObjectExistsError: `if_absent`, and there is an object of that key.
        """
        from penstock.store.writing import write

        return write(self, key, data, if_absent=if_absent)

    def writer(self, key: Key, *, part_bytes: int | None = None) -> Writer:
        """A file object to write an object of any size to; parts go up in parallel.

        It becomes visible when ``close()`` returns. An exception inside ``with``, ``abort()`` and garbage collection
        never commit: they drop what was sent.
        """
        from penstock.store.writing import Writer

        return Writer(self, key, part_bytes=part_bytes)

    def delete(self, keys: Key | Iterable[Key]) -> None:
        """Remove one or many objects; those that are not there are no error. Cost: one request per 1 000 keys."""
        from penstock.store.writing import delete

        delete(self, keys)

    def copy(self, source: Key, target: Key) -> ObjectInfo:
        """Copy inside the store, by the store: no bytes pass through here."""
        from penstock.store.writing import copy

        return copy(self, source, target)


class Wrapper(Store):
    """A store that adds one behaviour to another; subclasses implement ``submit``."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.fetch_config = inner.fetch_config
        self.pages_anywhere = inner.pages_anywhere
        self.keeps_checksums = inner.keeps_checksums

    def describe(self, key: Key) -> str:
        """As the store inside."""
        return self.inner.describe(key)

    def statistics(self) -> Any:
        """As the store inside, where the wrapper keeps none."""
        return self.inner.statistics()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    def close(self) -> None:
        """Close the store inside."""
        self.inner.close()
