"""Shards as streams, one after the other; the next ones are requested while one is read.

``ShardStreams`` reads a whole sequence of URLs by one ``Store.read_parts``, so requests stay in flight over the ends of
shards, and the next shard starts with the number of requests that the previous shard reached. WebDataset takes the next stream
when it has finished with the previous one, but a program need not: if a stream that is not at its end is read after the next
one was taken, it continues from its offset by a reader of its own.

Errors belong to the shard that is being opened or read. They end the read-ahead, which begins again with the shard after it.
"""

from __future__ import annotations

import io
import sys
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import penstock.store.hedged
import penstock.store.limited
import penstock.store.retrying
import penstock.store.s3
import penstock.store.traced
import penstock.transport.engine  # noqa: F401 - workers that are forked would each spend 0.2 s on importing what reads S3
from penstock.compose import check_connect_options, connect, split
from penstock.config import KIB, FetchConfig, default_budget_bytes, share_machine
from penstock.errors import ConfigError, StoreError
from penstock.store.base import MultiStore
from penstock.store.file import ObjectReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from _typeshed import WriteableBuffer

    from penstock.store import Store
    from penstock.types import Chunk


T = TypeVar("T")

STREAM_BUFFER_BYTES = 256 * KIB
"""``tarfile`` reads 10 KiB at a time: from a buffer in C, which is filled by one call for this many bytes."""

FOREIGN_MAX = 64
"""URLs in a row that others open, after which the read-ahead looks no further for its next shard."""


class Place(NamedTuple):
    """Where an object lies."""

    store: Store
    key: str


class ShardStreams(Generic[T]):
    """Iterator over the items of an input, and what opens the one that was taken last. For one thread at a time.

    Args:
        items: The input, which is taken ahead of what is read.
        locate: Returns where the object of an item lies; None if it is not read here. What it raises, ``open`` raises when
            the item's turn has come.

    Cost: The requests, memory and threads of ``Store.read_parts``.
    """

    def __init__(self, items: Iterable[T], *, locate: Callable[[T], Place | None]) -> None:
        self._items: Iterator[T] | None = iter(items)
        self._locate = locate
        self._pending: deque[_Taken[T]] = deque()  # taken from the input, not yet handed out
        self._entry: _Taken[T] | None = None  # handed out last
        self._stream: _ShardStream | None = None  # opened last
        self._chunks: Iterator[Chunk] | None = None
        self._has_keys = False  # whether the read-ahead may still ask for keys

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        self._leave()
        if not self._pending and not self._take():
            raise StopIteration
        entry = self._pending.popleft()
        if entry.item is None:  # the input failed here
            assert entry.error is not None
            raise entry.error
        self._entry = entry
        return entry.item

    def open(self) -> io.BufferedReader | None:
        """Open the item that was taken last; None if it is not read here.

        Raises:
            ConfigError: The URL or an option of the connection is not valid.
            StoreError: The object is missing, may not be read, ...
        """
        entry = self._entry
        assert entry is not None
        if entry.error is not None:
            raise entry.error
        if entry.place is None:
            return None
        if self._chunks is None or not (entry.is_requested or self._has_keys):
            self._start(entry)
        self._stream = _ShardStream(self, entry.place, self.next_chunk())
        return io.BufferedReader(self._stream, STREAM_BUFFER_BYTES)

    def next_chunk(self) -> Chunk:
        """Return the next chunk of the stream that was opened last."""
        assert self._chunks is not None
        try:
            return next(self._chunks)
        except BaseException:
            self._stop()
            raise

    def close(self) -> None:
        """Cancel the requests in flight; idempotent. The stream that was opened last can still be read."""
        self._leave()
        self._stop()

    # ── the read-ahead ─────────────────────────────────────────────────────────────────────────────────────────────

    def _leave(self) -> None:
        """Have the stream that was opened last go on without the read-ahead, if there is more of it."""
        stream, self._stream, self._entry = self._stream, None, None
        if stream is None or stream.is_complete or self._chunks is None:
            return
        stream.leave()
        with suppress(StoreError):  # it is no longer wanted, and the read-ahead has been stopped
            if not self.next_chunk().last:  # a tar file may end a little before its object does; this is more than that
                self._stop()

    def _start(self, first: _Taken[T]) -> None:
        self._stop()
        assert first.place is not None
        self._has_keys = True
        stores = MultiStore((first.place.store,))
        self._chunks = stores.read_parts(self._keys(first, stores))

    def _stop(self) -> None:
        chunks, self._chunks, self._has_keys = self._chunks, None, False
        for entry in self._pending:
            entry.is_requested = False
        if chunks is not None:
            chunks.close()  # type: ignore[attr-defined]

    def _keys(self, first: _Taken[T], stores: MultiStore) -> Iterator[str]:
        """Give the keys of the shards from `first` on, as `stores` has them, while there are any near."""
        foreign_count, following = 0, iter((first, *self._pending))
        while foreign_count < FOREIGN_MAX:
            entry = next(following, None)
            if entry is None:
                if not self._take():
                    break
                entry = self._pending[-1]
            foreign_count += 1
            if entry.place is not None:
                foreign_count, entry.is_requested = 0, True
                if entry.place.store not in stores.stores:
                    stores.add(entry.place.store)
                yield f"{stores.stores.index(entry.place.store)}/{entry.place.key}"
        self._has_keys = False

    def _take(self) -> bool:
        """Take one item of the input; False at its end."""
        if self._items is None:
            return False
        try:
            item = next(self._items)
        except StopIteration:
            self._items = None
            return False
        except Exception as error:  # raised again when everything before it was handed out
            self._items = None
            self._pending.append(_Taken(None, error=error))
            return True
        try:
            self._pending.append(_Taken(item, place=self._locate(item)))
        except Exception as error:
            self._pending.append(_Taken(item, error=error))
        return True


class _Taken(Generic[T]):
    """One item of the input: where its object lies, or why that is unknown; no item if the input failed."""

    __slots__ = ("error", "is_requested", "item", "place")

    def __init__(self, item: T | None, *, place: Place | None = None, error: Exception | None = None) -> None:
        self.item = item
        self.place = place
        self.error = error
        self.is_requested = False  # of the read-ahead that is under way


class _ShardStream(io.RawIOBase):
    """One object, read once from its beginning to its end.

    Args:
        streams: Source of its chunks, until it is left.
        place: Store and key of the object.
        chunk: First chunk of the object.
    """

    mode = "rb"

    def __init__(self, streams: ShardStreams[Any], place: Place, chunk: Chunk) -> None:
        super().__init__()
        self.name = place.store.describe(place.key)
        self._streams: ShardStreams[Any] | None = streams
        self._place = place
        self._etag = chunk.etag
        self._position = 0
        self._reader: ObjectReader | None = None  # once it was left
        self._error: Exception | None = None
        self._data = chunk.data
        self.is_complete = chunk.last

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        if self.closed:
            raise ValueError(f"{self.name} is closed")
        if self._error is not None:  # later bytes must not be taken for the continuation
            raise self._error
        try:
            return self._read_into(memoryview(buffer).cast("B"))
        except Exception as error:
            self._error = error
            raise

    def _read_into(self, target: memoryview) -> int:
        while not self._data and not self.is_complete and self._streams is not None:
            self._data = memoryview(b"")  # so that its memory may be used again for the next chunk
            chunk = self._streams.next_chunk()
            self._data, self.is_complete = chunk.data, chunk.last
        if not self._data:
            return 0 if self.is_complete else self._read_alone(target)
        length = min(len(target), len(self._data))
        target[:length] = self._data[:length]
        self._data = self._data[length:]
        self._position += length
        return length

    def leave(self) -> None:
        """Go on without the read-ahead: whatever is read from now on is requested again."""
        self._streams, self._data = None, memoryview(b"")

    def _read_alone(self, target: memoryview) -> int:
        if self._reader is None:
            self._reader = ObjectReader(self._place.store, self._place.key, etag=self._etag)
            self._reader.seek(self._position)
        length = self._reader.readinto(target)
        self._position += length
        return length

    def close(self) -> None:
        self._streams, self._data = None, memoryview(b"")
        if self._reader is not None:
            self._reader.close()
        super().close()


STORES_MAX = 64
"""Buckets whose stores are kept, with what they know of regions and credentials; the one that was added first goes first."""

WORKER_REQUESTS_MIN = 2
"""Parts of 8 MiB in flight at first in a DataLoader worker: several workers read at the same time, and the samples of the first
shard should not wait for those of the next ones. More are in flight as soon as a worker waits for data and that pays."""


class ShardStores:
    """The stores in which shards lie, one for each bucket. It pickles as its options.

    Args:
        **options: Options of ``penstock.connect``.

    Raises:
        ConfigError: An option does not exist.
    """

    def __init__(self, **options: Any) -> None:
        check_connect_options("register", options)
        self.options = options
        self._stores: dict[str, Store] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(ShardStores, **self.options), ()

    def with_options(self, options: dict[str, Any]) -> ShardStores:
        """Return stores with more options, or with others in place of these."""
        return ShardStores(**(self.options | options)) if options else self

    def locate(self, url: str) -> Place:
        """Return the store of the bucket that a URL names, and the key in it.

        Args:
            url: ``s3://bucket/key``, or the same after ``penstock+``.

        Raises:
            ConfigError: The URL names no object, or an option is not valid.
        """
        root, key = split(url.removeprefix("penstock+"))
        if not key or key.endswith("/"):
            raise ConfigError(f"{url!r} does not name an object", hint="s3://bucket/train-{000000..000099}.tar")
        store = self._stores.get(root)
        if store is None:
            while len(self._stores) >= STORES_MAX:
                del self._stores[next(iter(self._stores))]
            store = self._stores[root] = connect(root, **{"fetch": _fetch_here(), **self.options})
        return Place(store, key)


def _fetch_here() -> FetchConfig | None:
    """How a DataLoader worker reads: with its share of the machine's cores and of the bytes that a process may hold."""
    torch = sys.modules.get("torch")
    worker = None if torch is None else torch.utils.data.get_worker_info()
    if worker is None:
        return None
    share_machine(worker.num_workers)
    return FetchConfig(budget_bytes_max=default_budget_bytes() // worker.num_workers, requests_min=WORKER_REQUESTS_MIN)
