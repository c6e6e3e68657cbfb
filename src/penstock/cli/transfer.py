"""Moves objects: one ordered stream of parts in; files, or objects of another store, out.

Everything happens in the calling thread; what runs in parallel are the requests, under the store's own read-ahead and a
window of ``PUTS_MAX`` writes. So Ctrl-C has one place to arrive, and cleaning up is ``finally``.
"""

from __future__ import annotations

import queue
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from penstock.cli.files import FATAL, Download
from penstock.errors import BucketMissingError, ConfigError, CredentialsError, StoreError
from penstock.fetch import PlanItem
from penstock.types import Copy, Put

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.fetch import Chunk
    from penstock.store.base import Store
    from penstock.store.writing import Writer
    from penstock.types import ByteRange, Completion, Key, Landing, ObjectInfo, Operation, Transfer

PUTS_MAX = 32
"""Writes in flight: 32 of 8 MiB are 256 MiB, and cover 30 ms at 1 000 small objects/s."""

FAILURES_MAX = 10
"""Failures in a row after which the rest is not tried: then it is the store that fails, not an object."""

COPY_BYTES_MAX = 5_000_000_000
"""A larger object is copied in parts; S3's limit is 5 GiB."""


@dataclass(frozen=True, slots=True)
class Item:
    """One object to move."""

    info: ObjectInfo
    """Of the source."""
    key: Key
    """In the target store."""
    path: Path | None
    """The target, where it is a file."""


class Listener(Protocol):
    """Hears how it goes."""

    def moved(self, item: Item) -> None:
        """`item` is there, whole."""

    def failed(self, item: Item, error: Exception) -> None:
        """`item` is not."""

    def progressed(self, size_bytes: int) -> None:
        """So many more bytes arrived."""


class Receiver(Protocol):
    """Takes an object's chunks, in order."""

    def receive(self, item: Item, chunk: Chunk) -> None:
        """The next chunk of `item`; with the last, the object is complete or on its way."""

    def receive_empty(self, item: Item) -> None:
        """An object without bytes."""

    def abort(self) -> None:
        """Leave nothing of the object that is being received."""


def stream(source: Store, items: Iterator[Item], receiver: Receiver, listener: Listener) -> None:
    """Read `items` in order and hand them to `receiver`; what cannot be moved is reported, and the rest goes on.

    Raises:
        StoreError: listing failed, credentials or bucket are wrong, or ``FAILURES_MAX`` objects in a row failed.
        OSError: this machine failed: no space left, ...
    """
    todo = _Todo(items)
    failures = 0
    while True:
        try:
            for item in _pass(source, todo, receiver, listener):
                failures = 0 if item is not None else failures
        except BaseException as error:
            receiver.abort()
            if todo.listing_error is not None:
                raise todo.listing_error from None
            if not todo.waiting or not isinstance(error, Exception) or not _is_of_one_object(error):
                raise
            failures += 1
            listener.failed(todo.take_culprit(source, error), error)
            if failures >= FAILURES_MAX:
                raise
        else:
            return


def _is_of_one_object(error: Exception) -> bool:
    if isinstance(error, CredentialsError | BucketMissingError):
        return False
    if isinstance(error, StoreError | ConfigError):
        return True
    return isinstance(error, OSError) and error.errno not in FATAL and not isinstance(error, BrokenPipeError)


class _Todo:
    """Items in order; those asked for but not yet delivered can be asked for again."""

    def __init__(self, items: Iterator[Item]) -> None:
        self._items = items
        self.waiting: deque[Item] = deque()
        self.listing_error: StoreError | None = None

    def requests(self) -> Iterator[PlanItem]:
        """What waits, then what comes, as it was listed; consumed by the store, ahead of delivery."""
        for item in list(self.waiting):
            if item.info.size_bytes:
                yield _as_listed(item.info)
        while (more := self._next()) is not None:
            self.waiting.append(more)
            if more.info.size_bytes:
                yield _as_listed(more.info)

    def take_culprit(self, source: Store, error: Exception) -> Item:
        """The item that `error` names, else the one whose turn it was; it waits no longer."""
        url = error.url if isinstance(error, StoreError) else None
        found = next((item for item in self.waiting if source.describe(item.info.key) == url), self.waiting[0])
        self.waiting.remove(found)
        return found

    def _next(self) -> Item | None:
        try:
            return next(self._items, None)
        except StoreError as error:
            self.listing_error = error
            return None


def _as_listed(info: ObjectInfo) -> PlanItem:
    """To be read in the listed version: no request is needed to ask which one it is, and a cache may have it."""
    return PlanItem(info.key, etag=info.etag, size_bytes=info.size_bytes)


def _pass(source: Store, todo: _Todo, receiver: Receiver, listener: Listener) -> Iterator[Item | None]:
    """Move what `todo` has until something fails; yields each finished item, and None for a chunk of one."""
    for chunk in source.read_parts(todo.requests()):
        yield from _empty_ones(todo, receiver, listener)
        item = todo.waiting[0]
        receiver.receive(item, chunk)
        listener.progressed(len(chunk.data))
        if chunk.last:
            yield todo.waiting.popleft()
    if todo.listing_error is not None:
        raise todo.listing_error
    yield from _empty_ones(todo, receiver, listener)


def _empty_ones(todo: _Todo, receiver: Receiver, listener: Listener) -> Iterator[Item]:
    """Objects without bytes are never asked for; their turn is when they head the queue."""
    while todo.waiting and not todo.waiting[0].info.size_bytes:
        receiver.receive_empty(todo.waiting[0])
        yield todo.waiting.popleft()


class Files:
    """Receives into files."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._download: Download | None = None

    def receive(self, item: Item, chunk: Chunk) -> None:
        """See ``Receiver``."""
        if self._download is None:
            assert item.path is not None
            self._download = Download(item.path, item.info)
        self._download.write(chunk.data)
        if chunk.last:
            self._commit(item)

    def receive_empty(self, item: Item) -> None:
        """An empty file; for a key that ends with a slash, as consoles make them for folders, a directory."""
        assert item.path is not None
        if item.info.key.endswith("/"):
            item.path.mkdir(parents=True, exist_ok=True)
            self._listener.moved(item)
        else:
            self._download = Download(item.path, item.info)
            self._commit(item)

    def abort(self) -> None:
        """See ``Receiver``."""
        download, self._download = self._download, None
        if download is not None:
            download.abort()

    def _commit(self, item: Item) -> None:
        assert self._download is not None
        self._download.commit()
        self._download = None
        self._listener.moved(item)


class Objects:
    """Receives into a store: objects of one part as parallel puts, larger ones through its writer."""

    def __init__(self, target: Store, listener: Listener) -> None:
        self._target = target
        self._flight = Flight(target, listener)
        self._writer: Writer | None = None

    def receive(self, item: Item, chunk: Chunk) -> None:
        """See ``Receiver``."""
        if self._writer is None and chunk.last:
            self._flight.start(item, Put(item.key, chunk.data))
            return
        if self._writer is None:
            self._writer = self._target.writer(item.key)
        self._writer.write(chunk.data)
        if chunk.last:
            writer, self._writer = self._writer, None
            writer.close()
            self._flight.check(item, writer.info)

    def receive_empty(self, item: Item) -> None:
        """See ``Receiver``."""
        self._flight.start(item, Put(item.key, b""))

    def abort(self) -> None:
        """See ``Receiver``. Puts in flight go on; ``cancel`` ends them."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.abort()

    def wait(self) -> None:
        """Until all puts ended."""
        self._flight.wait()

    def cancel(self) -> None:
        """Give up what is in flight."""
        self.abort()
        self._flight.cancel()


class Flight:
    """Writes in flight, at most ``PUTS_MAX``; their ends are told to the listener from the calling thread."""

    def __init__(self, target: Store, listener: Listener) -> None:
        self._target = target
        self._listener = listener
        self._ended: queue.SimpleQueue[_Landing] = queue.SimpleQueue()
        self._flying: dict[_Landing, Transfer] = {}

    def start(self, item: Item, operation: Operation) -> None:
        """Submit `operation`; waits while the window is full."""
        while len(self._flying) >= PUTS_MAX:
            self._take()
        sink = _Landing(item, self._ended.put)
        self._flying[sink] = self._target.submit(operation, sink)

    def check(self, item: Item, info: ObjectInfo | None) -> None:
        """Report `item` as moved, or as failed where the store says another size."""
        if info is not None and info.size_bytes != item.info.size_bytes:
            what = f"{info.size_bytes} bytes are stored, not {item.info.size_bytes} as at the source"
            self._listener.failed(item, StoreError(what, url=self._target.describe(item.key)))
        else:
            self._listener.moved(item)

    def wait(self) -> None:
        """Until all ended."""
        while self._flying:
            self._take()

    def cancel(self) -> None:
        """Give them up, and wait for their ends, which come at once."""
        for transfer in self._flying.values():
            transfer.cancel()
        while self._flying:
            del self._flying[self._ended.get()]

    def _take(self) -> None:
        sink = self._ended.get()
        del self._flying[sink]
        completion = sink.completion
        assert completion is not None
        if completion.error is None:
            # a copy's answer tells no size; it was of the listed version, by its ETag
            self.check(sink.item, completion.info if isinstance(completion.operation, Put) else None)
        elif _is_of_one_object(completion.error):
            self._listener.failed(sink.item, completion.error)
        else:
            raise completion.error


class _Landing:
    """The sink of one write."""

    __slots__ = ("_tell", "completion", "item", "landing")

    def __init__(self, item: Item, tell: Callable[[_Landing], None]) -> None:
        self.item = item
        self.landing: Landing | None = None
        self.completion: Completion | None = None
        self._tell = tell

    def head(self, info: ObjectInfo, span: ByteRange) -> Landing | None:
        """Never called."""
        return None

    def done(self, completion: Completion) -> None:
        """Tell the flight."""
        if isinstance(completion.operation, Put):
            completion.operation = completion.operation._replace(body=b"")  # the part's memory goes back at once
        self.completion = completion
        self._tell(self)


def copy_inside(store: Store, items: Iterator[Item], listener: Listener) -> None:
    """Copy within one store, by the store: no bytes pass through here. What cannot be copied is reported.

    Raises:
        StoreError: listing failed, credentials or bucket are wrong.
    """
    flight = Flight(store, listener)
    try:
        for item in items:
            try:
                if item.info.size_bytes <= COPY_BYTES_MAX:
                    flight.start(item, Copy(item.info.key, item.key, item.info.etag))
                else:
                    store.copy(item.info.key, item.key)
                    listener.moved(item)
            except (StoreError, ConfigError) as error:  # a key that the store cannot be asked for, among others
                if not _is_of_one_object(error):
                    raise
                listener.failed(item, error)
        flight.wait()
    except BaseException:
        flight.cancel()
        raise
