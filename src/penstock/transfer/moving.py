"""Moves objects: turns one ordered stream of parts into files, or into objects of another store.

Everything happens in the calling thread. Only requests run in parallel: those of the store's read-ahead and up to
``PUTS_MAX`` writes. So Ctrl-C arrives in one place, and ``finally`` is enough to clean up.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from penstock.cache import Cached
from penstock.errors import BucketMissingError, ConfigError, CredentialsError, StoreError
from penstock.fetch import PlanItem
from penstock.memory.file_landings import LandingFileError
from penstock.store.base import innermost
from penstock.store.inflight import InFlight, WaitingSink
from penstock.store.local import LocalStore
from penstock.store.records import written_headers
from penstock.transfer.download import FATAL
from penstock.types import Copy, Head, Put

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.fetch import Chunk
    from penstock.memory.file_landings import LandingFile
    from penstock.store.base import Store
    from penstock.store.writing import Writer
    from penstock.types import Key, ObjectInfo, Operation, Transfer

PUTS_MAX = 32
"""Writes in flight: 32 of 8 MiB are 256 MiB, and cover 30 ms at 1 000 small objects/s."""

FAILURES_MAX = 10
"""After this many failures in a row the store is at fault, not an object, and the other objects are not tried."""

COPY_BYTES_MAX = 5_000_000_000
"""Larger objects are copied in parts; the limit of S3 is 5 GiB."""


@dataclass(frozen=True, slots=True)
class TransferItem:
    """One object to be moved.

    Attributes:
        info: The object in the source.
        key: Key in the target store.
        path: Target file; None if the target is not on this machine.
    """

    info: ObjectInfo
    key: Key
    path: Path | None

    def with_size(self, size_bytes: int) -> TransferItem:
        """Return the item with the size that its object turned out to have."""
        if size_bytes == self.info.size_bytes:
            return self
        return TransferItem(self.info._replace(size_bytes=size_bytes), self.key, self.path)


class TransferListener(Protocol):
    """Receives the progress of a transfer."""

    def moved(self, item: TransferItem) -> None:
        """`item` was moved completely."""

    def failed(self, item: TransferItem, error: Exception) -> None:
        """`item` could not be moved."""

    def progressed(self, size_bytes: int) -> None:
        """This many more bytes arrived."""


class RaisingListener:
    """Raises the first failure of a transfer, and ignores its progress."""

    def moved(self, item: TransferItem) -> None:
        """Do nothing."""

    def failed(self, item: TransferItem, error: Exception) -> None:
        """Raise `error`."""
        raise error

    def progressed(self, size_bytes: int) -> None:
        """Do nothing."""


class FirstFailure:
    """Keeps the first failure of a transfer, whose other objects are moved nevertheless.

    Args:
        listener: Hears of every event, too; None if nobody else does.

    Attributes:
        failures_count: Number of objects that could not be moved.
    """

    def __init__(self, listener: TransferListener | None = None) -> None:
        self._listener = listener
        self._error: Exception | None = None
        self.failures_count = 0

    def moved(self, item: TransferItem) -> None:
        """Pass the event on."""
        if self._listener is not None:
            self._listener.moved(item)

    def failed(self, item: TransferItem, error: Exception) -> None:
        """Keep the first error, and pass the event on."""
        self.failures_count += 1
        self._error = self._error or error
        if self._listener is not None:
            self._listener.failed(item, error)

    def progressed(self, size_bytes: int) -> None:
        """Pass the event on."""
        if self._listener is not None:
            self._listener.progressed(size_bytes)

    def check(self) -> None:
        """Raise the first error, if there was one."""
        if self._error is not None:
            raise self._error


class Receiver(Protocol):
    """Takes the chunks of objects, in order.

    Attributes:
        keeps_records: Whether it keeps headers, tags and checksums; items then have them.
    """

    keeps_records: bool

    def prepare(self, item: TransferItem) -> LandingFile | None:
        """Return the file that `item`, which is requested next, may land in; None for memory.

        If it does land there, its chunks are ``in_file``.
        """

    def receive(self, item: TransferItem, chunk: Chunk) -> None:
        """Take the next chunk of `item`; the last one completes the object, or starts its last write."""

    def receive_empty(self, item: TransferItem) -> None:
        """Take an object of 0 bytes."""

    def abort(self) -> None:
        """Drop the object that is being received."""


def stream(source: Store, items: Iterator[TransferItem], receiver: Receiver, listener: TransferListener) -> None:
    """Read `items` in order and give them to `receiver`. Objects that cannot be moved are reported and skipped.

    Raises:
        StoreError: The listing failed, credentials or bucket are wrong, or ``FAILURES_MAX`` objects in a row failed.
        OSError: This machine failed, for example because its disk is full.
    """
    queue = _ItemQueue(items, receiver if source.lands_in_files else None)
    if receiver.keeps_records:
        queue.descriptions = _Descriptions(source)
    failures = 0
    while True:
        try:
            for item in _move_until_error(source, queue, receiver, listener):
                failures = 0 if item is not None else failures
        except BaseException as error:
            receiver.abort()
            if queue.listing_error is not None:
                raise queue.listing_error from None
            if not queue.waiting or not isinstance(error, Exception) or not _concerns_one_object(error):
                raise
            failures += 1
            listener.failed(queue.remove_failed(source, error), error)
            if failures >= FAILURES_MAX:
                raise
        else:
            return


def _concerns_one_object(error: Exception) -> bool:
    if isinstance(error, CredentialsError | BucketMissingError):
        return False
    if isinstance(error, StoreError | ConfigError):
        return True
    return isinstance(error, OSError) and error.errno not in FATAL and not isinstance(error, BrokenPipeError)


class _ItemQueue:
    """Items in order. Those that were requested but not delivered can be requested again."""

    def __init__(self, items: Iterator[TransferItem], receiver: Receiver | None) -> None:
        self._items = items
        self._receiver = receiver  # None if no object can land in a file
        self.descriptions: _Descriptions | None = None  # None if nobody wants headers
        self.waiting: deque[TransferItem] = deque()
        self.listing_error: StoreError | None = None

    def requests(self) -> Iterator[PlanItem]:
        """Yield requests for the waiting items, then for new ones; the store consumes them ahead of delivery."""
        for item in list(self.waiting):
            if item.info.size_bytes:
                yield self._request(item)
        while (more := self._next()) is not None:
            self.waiting.append(more)
            if self.descriptions is not None:
                self.descriptions.request(more)
            if more.info.size_bytes:
                yield self._request(more)

    def _request(self, item: TransferItem) -> PlanItem:
        """Return a request for the listed version: no further request asks for the version, and a cache may have it."""
        file = self._receiver.prepare(item) if self._receiver is not None else None
        return PlanItem(item.info.key, etag=item.info.etag, size_bytes=item.info.size_bytes, target=file)

    def remove_failed(self, source: Store, error: Exception) -> TransferItem:
        """Remove and return the item that `error` names, or the first one if it names none."""
        if isinstance(error, StoreError):
            named = (item for item in self.waiting if source.describe(item.info.key) == error.url)
        else:
            named = (item for item in self.waiting if str(item.path) == getattr(error, "filename", None))
        found = next(named, self.waiting[0])
        self.waiting.remove(found)
        return found

    def _next(self) -> TransferItem | None:
        try:
            return next(self._items, None)
        except StoreError as error:
            self.listing_error = error
            return None


def _move_until_error(
    source: Store, queue: _ItemQueue, receiver: Receiver, listener: TransferListener
) -> Iterator[TransferItem | None]:
    """Move the items of `queue` until one fails; yield each finished item, and None after other chunks."""
    for chunk in _chunks(source, queue):
        yield from _move_empty(queue, receiver)
        item = queue.waiting[0]
        if queue.descriptions is not None and chunk.offset_bytes == 0:
            item = queue.waiting[0] = queue.descriptions.described(item, chunk)
        elif queue.descriptions is not None and chunk.last and chunk.info is not None:  # by now all answers have come
            checksums = chunk.info.checksums or item.info.checksums
            item = queue.waiting[0] = replace(item, info=item.info._replace(checksums=checksums))
        if chunk.last:  # a store that transforms objects while they are read may have listed another size
            item = queue.waiting[0] = item.with_size(chunk.offset_bytes + len(chunk.data))
        receiver.receive(item, chunk)
        listener.progressed(len(chunk.data))
        if chunk.last:
            yield queue.waiting.popleft()
    if queue.listing_error is not None:
        raise queue.listing_error
    yield from _move_empty(queue, receiver)


def _chunks(source: Store, queue: _ItemQueue) -> Iterator[Chunk]:
    """Yield the chunks of the waiting items.

    Raises:
        OSError: A file in which an object lands cannot be written.
    """
    try:
        yield from source.read_parts(queue.requests())
    except LandingFileError as error:
        raise (error.__cause__ or error) from None


def _move_empty(queue: _ItemQueue, receiver: Receiver) -> Iterator[TransferItem]:
    """Move the objects of 0 bytes at the head of the queue, which are never requested."""
    while queue.waiting and not queue.waiting[0].info.size_bytes:
        item = queue.waiting[0]
        receiver.receive_empty(queue.descriptions.described(item) if queue.descriptions is not None else item)
        yield queue.waiting.popleft()


class _Descriptions:
    """Headers, tags and checksums of objects that are moved: from the answers that bring their bytes, or by requests ahead.

    Args:
        source: The store of the objects.
    """

    def __init__(self, source: Store) -> None:
        self._source = source
        core = innermost(source)
        self._files = core if isinstance(core, LocalStore) else None  # whose reads tell no headers
        self._is_cached = isinstance(source, Cached)  # neither do reads from a cache
        self._asked: dict[Key, tuple[WaitingSink, Transfer]] = {}

    def request(self, item: TransferItem) -> None:
        """Ask about an object if reading it tells nothing. Folders that consoles make have nothing to keep."""
        if self._files is not None or not self._source.keeps_headers or item.info.key.endswith("/"):
            return
        if self._is_cached or not item.info.size_bytes:  # an object of 0 bytes is never read
            sink = WaitingSink()
            self._asked[item.info.key] = sink, self._source.submit(Head(item.info.key, headers=True), sink)

    def described(self, item: TransferItem, chunk: Chunk | None = None) -> TransferItem:
        """Return an item with what is known about its object.

        Raises:
            StoreError: The store was asked, and could not answer.
        """
        info = item.info
        found = chunk.info if chunk is not None and chunk.info is not None else info
        if self._files is not None:
            found = self._files.with_record(info)
        elif asked := self._asked.pop(info.key, None):
            sink, transfer = asked
            completion = sink.wait(transfer)
            if completion.error is not None:
                raise completion.error
            assert completion.info is not None  # the contract of Head
            if chunk is None or completion.info.etag == chunk.etag:
                found = completion.info
        return replace(
            item,
            info=info._replace(
                headers=found.headers or info.headers,
                tags=found.tags or info.tags,
                checksums=found.checksums or info.checksums,
            ),
        )


class _Writes:
    """Up to ``PUTS_MAX`` writes in flight; their results are reported to the listener in the calling thread."""

    def __init__(self, target: Store, listener: TransferListener) -> None:
        self._target = target
        self._listener = listener
        self._in_flight: InFlight[TransferItem] = InFlight(target)

    def start(self, item: TransferItem, operation: Operation) -> None:
        """Submit `operation`; wait if ``PUTS_MAX`` are in flight."""
        while len(self._in_flight) >= PUTS_MAX:
            self._report_next()
        self._in_flight.submit(operation, item)

    def report(self, item: TransferItem, info: ObjectInfo | None) -> None:
        """Report `item` as moved, or as failed if the store has another size than the source."""
        if info is not None and info.size_bytes != item.info.size_bytes:
            what = f"{info.size_bytes} bytes are stored, but the source has {item.info.size_bytes}"
            self._listener.failed(item, StoreError(what, url=self._target.describe(item.key)))
        else:
            self._listener.moved(item)

    def wait(self) -> None:
        """Wait until all writes have ended."""
        while self._in_flight:
            self._report_next()

    def cancel(self) -> None:
        """Cancel all writes and wait for their ends, which come at once."""
        self._in_flight.cancel()
        self._in_flight.drain()

    def _report_next(self) -> None:
        item, completion = self._in_flight.wait()
        if completion.error is None:
            # the answer to a copy has no size, but the copy was of the listed version, by its ETag
            self.report(item, completion.info if isinstance(completion.operation, Put) else None)
        elif _concerns_one_object(completion.error):
            self._listener.failed(item, completion.error)
        else:
            raise completion.error


class StoreReceiver(_Writes):
    """Writes objects to a store: objects of one part by parallel puts, larger ones with the store's writer."""

    def __init__(self, target: Store, listener: TransferListener) -> None:
        super().__init__(target, listener)
        self.keeps_records = target.keeps_records
        self._writer: Writer | None = None

    def prepare(self, item: TransferItem) -> None:
        """Return None: bodies are sent from memory; see ``Receiver.prepare``."""

    def receive(self, item: TransferItem, chunk: Chunk) -> None:
        """Take the next chunk; see ``Receiver.receive``."""
        if self._writer is None and chunk.last:
            self.start(item, Put(item.key, chunk.data, **self._kept(item)))
            return
        if self._writer is None:
            self._writer = self._target.writer(item.key, **self._kept(item))
        self._writer.write(chunk.data)
        if chunk.last:
            writer, self._writer = self._writer, None
            writer.close()
            self.report(item, writer.info)

    def receive_empty(self, item: TransferItem) -> None:
        """Put an object of 0 bytes."""
        self.start(item, Put(item.key, b"", **self._kept(item)))

    def _kept(self, item: TransferItem) -> dict[str, Any]:
        """Return what is written besides the bytes."""
        if not self.keeps_records:
            return {}
        return {"headers": written_headers(item.info), "tags": dict(item.info.tags)}

    def abort(self) -> None:
        """Drop the object that is being received. Puts in flight continue; ``cancel`` ends them."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.abort()

    def cancel(self) -> None:
        """Cancel everything in flight."""
        self.abort()
        super().cancel()


def copy_between(source: Store, target: Store, items: Iterator[TransferItem], listener: TransferListener) -> None:
    """Copy objects from one store to another, through the memory of this process; return when all of them are written.

    Raises:
        StoreError: The listing failed, credentials or bucket are wrong, or ``FAILURES_MAX`` objects in a row failed. Other
            objects that cannot be copied are reported.
        OSError: This machine failed.
    """
    receiver = StoreReceiver(target, listener)
    try:
        stream(source, items, receiver, listener)
        receiver.wait()
    except BaseException:
        receiver.cancel()
        raise


def copy_inside(store: Store, items: Iterator[TransferItem], listener: TransferListener) -> None:
    """Let a store copy objects within itself, so that no bytes pass through this process.

    Raises:
        StoreError: The listing failed, or credentials or bucket are wrong. Objects that cannot be copied are reported.
    """
    writes = _Writes(store, listener)
    try:
        for item in items:
            try:
                if item.info.size_bytes <= COPY_BYTES_MAX:
                    writes.start(item, Copy(item.info.key, item.key, item.info.etag))
                else:
                    store.copy(item.info.key, item.key)
                    listener.moved(item)
            except (StoreError, ConfigError) as error:  # among others, a key that the store does not allow
                if not _concerns_one_object(error):
                    raise
                listener.failed(item, error)
        writes.wait()
    except BaseException:
        writes.cancel()
        raise
