"""One object before it is opened: its known size and version, its first part if it was read ahead, and the ways to open it."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.config import KIB, MIB
from penstock.errors import ObjectChangedError, SpanError, StoreError
from penstock.fetch import PlanItem
from penstock.memory.raw_file import RawFile
from penstock.store.file import ObjectReader
from penstock.types import Blob, ByteRange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.compat.s3torchconnector.stores import BucketStores
    from penstock.store.base import Store
    from penstock.types import Chunk, ObjectInfo

WHOLE_BYTES_MAX = 8 * MIB
"""Size up to which an object is read whole and ahead. One request still brings it, at most."""

FIRST_BYTES = 1 * MIB
"""What is read ahead of an object that is known to be larger: enough for headers, while its stream is opened."""

UNREAD_MAX = 16
"""At 100 KB an object this is less than one part of a large one, and far fewer readers than most batches have."""

UNKNOWN_BYTES_MIN = 256 * KIB
"""As much memory is reserved for an object of unknown size; most pictures are shorter."""


class ObjectLocation(NamedTuple):
    """Where an object is.

    Attributes:
        bucket: Name of its bucket.
        key: Key of the object.
        size_bytes: Size in bytes when the object was listed; None if it was not.
    """

    bucket: str
    key: str
    size_bytes: int | None = None


class ObjectSummary(NamedTuple):
    """The object that a user's own constructor of readers gets, with the connector's names.

    Attributes:
        key: Key of the object.
        size: Size in bytes.
        etag: ETag; None if the store has none.
        last_modified: Modification time in seconds since the epoch.
    """

    key: str
    size: int
    etag: str | None
    last_modified: float | None


class ReadCounter:
    """Decides from the latest readers whether and how far to read ahead. Any thread may drop readers.

    Attributes:
        is_wanted: Whether objects are to be read ahead.
        unknown_bytes: Bytes to request of an object of unknown size. The number grows while objects turn out to be longer.
    """

    def __init__(self) -> None:
        self.is_wanted = True
        self.unknown_bytes = UNKNOWN_BYTES_MIN
        self._against_count = 0  # in a row: readers that argue for the opposite of `is_wanted`

    def note_length(self, read_bytes: int) -> None:
        """So many bytes of an object were read ahead."""
        if read_bytes >= self.unknown_bytes:
            self.unknown_bytes = min(2 * self.unknown_bytes, WHOLE_BYTES_MAX)

    def note(self, *, is_read: bool) -> None:
        """A reader was read, or dropped unread."""
        if is_read is self.is_wanted:
            self._against_count = 0
            return
        self._against_count += 1
        if self._against_count >= UNREAD_MAX:
            self.is_wanted, self._against_count = is_read, 0


class ObjectSource:
    """One object that a reader will open.

    Args:
        stores: The stores.
        location: The object.
        answer: First part of the object, if it was read ahead, or the error that reading it ended with.
        demand: Counts whether objects are used.
    """

    def __init__(
        self,
        stores: BucketStores,
        location: ObjectLocation,
        *,
        answer: Blob | StoreError | None = None,
        demand: ReadCounter | None = None,
    ) -> None:
        self._stores = stores
        self.location = location
        # An empty object has no first byte, and an object that was replaced after it was listed has another size: opening
        # the object copes with both.
        self._answer = None if isinstance(answer, SpanError | ObjectChangedError) else answer
        self._demand = demand
        self._etag: str | None = None  # of the version that was opened, which is the one to open again

    def __del__(self) -> None:
        demand, self._demand = self._demand, None
        if demand is not None:
            demand.note(is_read=False)

    def __reduce__(self) -> tuple[Any, ...]:
        self._note_used()
        answer: Any = self._answer
        if isinstance(answer, Blob):
            answer = bytes(answer.data), answer.span, answer.etag
        return _restored, (self._stores, self.location, answer, self._etag)

    @property
    def store(self) -> Store:
        """The store of the object's bucket."""
        return self._stores.store(self.location.bucket)

    def open(self, *, whole: bool) -> io.BufferedIOBase:
        """Open the object as a file.

        Args:
            whole: Whether it will be read from its first byte to its last.

        Raises:
            StoreError: It is missing, may not be read, ...

        Cost: nothing if it was read ahead; else one request, which brings all of an object of up to 8 MiB if `whole`.
        """
        self._note_used()
        answer, self._answer = self._answer, None
        if isinstance(answer, StoreError):
            raise answer
        if answer is None:
            if not whole:
                return self.open_file()
            try:
                answer = next(self.store.read_many([self._first_part()]))
            except (SpanError, ObjectChangedError):
                return self.open_file()
        return self._file_of(answer.data, answer.span, answer.etag)

    def open_file(self) -> ObjectReader:
        """Open the object as the engine's file, which fetches the bytes that are read. Cost: one request."""
        self._note_used()
        file = ObjectReader(self.store, self.location.key, etag=self._etag)
        self._etag = file.etag
        return file

    def begin(self) -> Iterator[Chunk] | None:
        """Request what ``open(whole=True)`` would, without waiting; None if that was read ahead already."""
        if self._answer is not None:
            return None
        self._note_used()
        return self.store.read_parts([self._first_part()])

    def open_begun(self, chunks: Iterator[Chunk]) -> io.BufferedIOBase:
        """Open the object as a file that begins with what ``begin()`` requested."""
        request, etag, parts = self._first_part(), None, []
        try:
            for chunk in chunks:
                etag = chunk.etag
                parts.append(bytes(chunk.data))
        except (SpanError, ObjectChangedError):
            return self.open_file()
        return self._file_of(memoryview(b"".join(parts)), request.span, etag)

    def _first_part(self) -> PlanItem:
        return first_part(self.location)._replace(etag=self._etag)

    def stat(self) -> ObjectInfo:
        """Return size and version of the object; later opens use this version. Cost: one request.

        Raises:
            ObjectChangedError: The object was opened before, and has been replaced since.
        """
        self._note_used()
        info = self.store.stat(self.location.key)
        if self._etag is not None and info.etag != self._etag:
            raise ObjectChangedError(
                f"the object is now version {info.etag}, not {self._etag} as when it was opened",
                url=self.store.describe(self.location.key),
            )
        self._etag = info.etag
        return info

    def summary(self) -> ObjectSummary:
        """Return the store's facts about the object. Cost: one request."""
        info = self.store.stat(self.location.key)
        return ObjectSummary(self.location.key, info.size_bytes, info.etag, info.last_modified_s)

    def stream(self, start: int | None = None, end: int | None = None) -> Iterator[bytes]:
        """Return an iterator over the bytes of [start, end) of the object, or of all of it, in pieces.

        Cost: one request for each part, with parts read ahead.
        """
        self._note_used()
        key = self.location.key
        if start is None and end is None:
            request = PlanItem(key)
        else:
            last = self.summary().size if end is None else end
            request = PlanItem(key, ByteRange(start or 0, last).checked())
        return (bytes(chunk.data) for chunk in self.store.read_parts([request]))

    def _file_of(self, data: memoryview, span: ByteRange | None, etag: str | None) -> io.BufferedIOBase:
        """Return a file that begins with the bytes read ahead, and continues in the store if necessary."""
        self._etag = etag
        if span is None or len(data) < span.length_bytes or len(data) == self.location.size_bytes:
            return io.BytesIO(bytes(data))  # a reader of the whole file shares these bytes
        return io.BufferedReader(_Continued(data, self.open_file))

    def _note_used(self) -> None:
        demand, self._demand = self._demand, None
        if demand is not None:
            demand.note(is_read=True)


def _restored(stores: BucketStores, location: ObjectLocation, answer: Any, etag: str | None) -> ObjectSource:
    if isinstance(answer, tuple):
        data, span, version = answer
        answer = Blob(memoryview(data), key=location.key, span=span, etag=version, request_index=0, verified="length")
    source = ObjectSource(stores, location, answer=answer)
    source._etag = etag
    return source


def first_part(location: ObjectLocation, *, key: str | None = None, unknown_bytes: int = WHOLE_BYTES_MAX) -> PlanItem:
    """Return the request for an object, or for the beginning of one that is large or may be.

    Args:
        location: The object.
        key: Key in the store that is read, if it is not the object's own.
        unknown_bytes: Bytes to request of an object of unknown size; as much memory is reserved for it.
    """
    key, size_bytes = key or location.key, location.size_bytes
    if size_bytes is None:
        return PlanItem(key, ByteRange(0, unknown_bytes))
    if size_bytes > WHOLE_BYTES_MAX:
        return PlanItem(key, ByteRange(0, FIRST_BYTES))
    return PlanItem(key, size_bytes=size_bytes)


class _Continued(RawFile):
    """A file whose beginning is in memory; the rest is opened when it is needed, in the same version."""

    def __init__(self, begin: memoryview, open_rest: Callable[[], ObjectReader]) -> None:
        super().__init__()
        self._begin = begin
        self._open_rest = open_rest
        self._rest: ObjectReader | None = None

    @property
    def size_bytes(self) -> int:
        return self._opened().size_bytes

    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer).cast("B")
        begin = self._begin[self._position :]
        if begin:
            length = min(len(begin), len(target))
            target[:length] = begin[:length]
        else:
            rest = self._opened()
            rest.seek(self._position)
            length = rest.readinto(target)
        self._position += length
        return length

    def readall(self) -> bytes:
        rest = self._opened()
        rest.seek(self._position)  # the beginning is read again, so that all parts come at once and without a copy
        data = rest.read()
        self._position += len(data)
        return data

    def close(self) -> None:
        if self._rest is not None:
            self._rest.close()
        self._begin = memoryview(b"")
        super().close()

    def _opened(self) -> ObjectReader:
        if self._rest is None:
            self._rest = self._open_rest()
        return self._rest
