"""Objects as files: ``open_file`` makes what ``Store.open`` and ``penstock.open`` return.

A reader is Python's own ``BufferedReader`` (lines, ``peek``, small reads and the lock are C) over a raw file that decides
what to fetch. There are two ways:

* *Jumps* fetch little: 64 KiB, then 256 KiB if reading continues from there. zip directories, Parquet footers and indexes
  need no more, and anything else would cost bandwidth.
* *Runs* stream: the third fetch in sequence, or a single read of 1 MiB and more, is ``Store.read_parts``, with its parallel
  parts, its budget and its retries. The first spans of a run are small and grow (``_spans``), so that its first bytes do not
  wait for 8 MiB. A jump elsewhere drops the run and cancels what was in flight; a jump forward by less than
  ``FetchConfig.gap_bytes_max`` reads through the gap instead, as merging would.

Opening a file sends one GET, which pins the version and brings the first 64 KiB. A missing object is therefore an error at
``open``, and no read ever mixes versions. If the store sends no ranges of the object, ``open`` reads and holds all of it.

An answer to a range has no checksum. A file whose bytes arrive in order from the first to the last, by whatever reads, is
compared with the checksum of the object (``_WholeCheck``). The first 64 KiB are kept and padding of up to 64 KiB is read, so
this includes ``torch.load``, which goes to the end first and passes over padding.
"""

from __future__ import annotations

import io
from copy import copy
from traceback import clear_frames
from typing import TYPE_CHECKING, Any

from penstock.checksums import algorithms as checksums
from penstock.config import KIB, MIB, FetchConfig
from penstock.errors import (
    ChecksumError,
    ClosedError,
    ConfigError,
    ObjectChangedError,
    ProtocolError,
    ShortReadError,
    SpanError,
)
from penstock.fetch import PlanItem
from penstock.memory.raw_file import RawFile
from penstock.store.inflight import WaitingSink, stat
from penstock.store.reading import read, read_parts
from penstock.system import forks
from penstock.system.tracebacks import boundary
from penstock.types import ByteRange, Get, Head, Landing, ObjectInfo, same_version

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from _typeshed import WriteableBuffer

    from penstock.checksums.algorithms import Hasher
    from penstock.fetch import Chunk
    from penstock.store.reading import Readable
    from penstock.types import Buffer, Key, Transfer


BUFFER_BYTES = 64 * KIB
"""Bytes that a jump fetches at least: at 90 MB/s they take 0.7 ms, far less than the round trip before them."""

SECOND_BYTES = 256 * KIB
"""Bytes that the second fetch of a run brings; the third one streams."""

STREAM_BYTES_MIN = 1 * MIB
"""Length from which a single read streams at once, because its parts come in parallel."""

_MODES = ("rb", "wb", "xb")


def open_file(store: Readable, key: Key, mode: str = "rb") -> io.IOBase:
    """Open an object as a real file object.

    Args:
        store: The store.
        key: Key of the object.
        mode: ``"rb"`` returns an ``ObjectReader``, ``"wb"`` a ``Writer``, and ``"xb"`` a ``Writer`` that never replaces an
            object.

    Raises:
        ConfigError: The mode is another one. For text use ``io.TextIOWrapper(store.open(key))``; objects cannot be
            appended to.
        StoreError: The mode is ``"rb"``, and the object is missing, may not be read, ...

    Cost: For ``"rb"``, one request for the first 64 KiB.
    """
    if mode == "rb":
        return ObjectReader(store, key)
    if mode in ("wb", "xb"):
        from penstock.store.writing import Writer  # programs that only read do not pay for its import

        return Writer(store, key, if_absent=mode == "xb")
    hint = None
    if mode in ("r", "rt", "w", "wt"):
        hint = 'wrap it: io.TextIOWrapper(store.open(key, "rb"), encoding="utf-8")'
    elif isinstance(mode, str) and ("a" in mode or "+" in mode):
        hint = "objects are written whole; read it, and write it anew"
    raise ConfigError(f"mode={mode!r} must be one of {', '.join(map(repr, _MODES))}", hint=hint)


@boundary
class ObjectReader(io.BufferedReader):
    """One version of an object as a seekable, readable binary file; ``Store.open`` returns it.

    Threads may share it: each call is atomic, and they share the offset. It pickles as store, key, version and offset,
    and opens again when it is unpickled. Reading it in a forked child raises ``ClosedError``.

    Args:
        store: The store.
        key: Key of the object.
        etag: ETag of the version to read; None pins the current one.

    Raises:
        ObjectMissingError: The object does not exist.
        ObjectChangedError: `etag` is not the current version, or, while reading, the object was replaced since.
        ChecksumError: While reading: all bytes have arrived in order, and do not match the checksum that the store keeps.
            Bytes that were read before may be damaged; every later read raises this error again.

    Cost: One GET to open. Sequential reading holds read-ahead within the process's budget, and costs a HEAD for the checksum;
    jumps hold at most 320 KiB. If the store sends no ranges of the object, it costs a second GET and holds the object, which
    must fit into half of the budget.
    """

    def __init__(self, store: Readable, key: Key, *, etag: str | None = None) -> None:
        self._object = _RawObject(store, key, etag)
        super().__init__(self._object, BUFFER_BYTES)

    def read(self, size: int | None = -1, /) -> bytes:
        """Read at most `size` bytes; all the rest if `size` is negative or None."""
        # When readinto() has failed, torch.load calls read() while the exception is still set, and Python then finds methods
        # of the file's own class only: a subclass has to name this one, or its users see an AttributeError.
        if size is None or size <= BUFFER_BYTES:
            return super().read(-1 if size is not None and size < 0 else size)  # Python's own refuses -2
        size = min(size, self.size_bytes)  # as many bytes are allocated
        self._object.wanted_end = self.tell() + size
        try:
            return super().read(size)
        finally:
            self._object.wanted_end = 0

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Fill `buffer` with the next bytes, and return their number, which is smaller than the buffer only at the end."""
        size = memoryview(buffer).nbytes
        if size <= BUFFER_BYTES:
            return super().readinto(buffer)
        self._object.wanted_end = self.tell() + size
        try:
            return super().readinto(buffer)
        finally:
            self._object.wanted_end = 0

    @property
    def size_bytes(self) -> int:
        """Size of the object in bytes."""
        return self._object.info.size_bytes

    @property
    def etag(self) -> str | None:
        """ETag of the version that is being read; None if the store has none."""
        return self._object.info.etag

    def __repr__(self) -> str:
        return f"<ObjectReader {self._object.name!r}, {self.size_bytes} bytes{', closed' if self.closed else ''}>"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self.__reduce__()  # from Python 3.12 on, that of ``io.BufferedReader`` refuses

    def __reduce__(self) -> tuple[Any, ...]:
        if self.closed:
            raise ClosedError(f"{self._object.name} is closed")
        return _reopen, (self._object.store, self._object.info._replace(headers={}), self.tell())


def _reopen(store: Readable, info: ObjectInfo, position: int) -> ObjectReader:
    reader = ObjectReader(store, info.key, etag=info.etag)
    found, reader._object.info = reader._object.info, info
    if not same_version(found, info):  # of a store without ETags
        raise reader._object._changed(found)
    reader.seek(position)
    return reader


@boundary
class _RawObject(RawFile):
    """Decides what to fetch, as the module's docstring says. The ``BufferedReader`` around it serialises its callers."""

    mode = "rb"
    _stream: Iterator[Chunk] | None = None

    def __init__(self, store: Readable, key: Key, etag: str | None) -> None:
        super().__init__()
        self.store = store
        self.key = key
        self.name = store.describe(key)
        self._made_in = forks.generation()
        self._gap_bytes_max = (store.fetch_config or FetchConfig()).gap_bytes_max
        # ``BufferedReader`` makes two calls for a large read, whole buffers and the rest; ``ObjectReader`` says here how
        # far the read goes, so that the rest costs no second request.
        self.wanted_end = 0
        self._held: memoryview = memoryview(b"")  # bytes of the object from _held_start on
        self._held_start = 0
        self._run_fetches = 1  # fetches in sequence since the last jump; opening is the first
        self._stream_end = 0  # the stream continues from the end of _held to here
        self.info = ObjectInfo(key, 0, etag)
        self._first = self._held
        self._check = _WholeCheck(store, self.info, self._first)  # for ``close``, if the object cannot be opened
        self.info = self._open(etag)
        self._first = self._held[:BUFFER_BYTES]
        self._check = _WholeCheck(store, self.info, self._first)

    def _open(self, etag: str | None) -> ObjectInfo:
        try:
            info, self._held = self._get(ByteRange(0, BUFFER_BYTES), etag, None)
        except SpanError:  # an empty object has no first byte
            info = stat(self.store, self.key)
            if info.size_bytes or (etag is not None and info.etag != etag):
                raise self._changed(info) from None
        except ProtocolError:
            info = self._hold_whole(etag)
        return info

    def _hold_whole(self, etag: str | None) -> ObjectInfo:
        """Read and hold the whole object, because the store sends no ranges of it, as for a result that is being made."""
        blob = read(self.store, self.key, None)
        if etag is not None and blob.etag != etag:
            raise self._changed(ObjectInfo(self.key, len(blob.data), blob.etag))
        self._held = blob.data
        return ObjectInfo(self.key, len(blob.data), blob.etag)

    # ── io.RawIOBase ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def size_bytes(self) -> int:
        return self.info.size_bytes

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        forks.check(self._made_in, self.name)
        target = memoryview(buffer).cast("B")
        target = target[: max(0, min(len(target), self.info.size_bytes - self._position))]
        taken = self._take(target)
        while not taken and target:
            taken = self._fetch(target) or self._take(target)
        if self._check.error is not None:
            raise copy(self._check.error)  # in a frame that holds none of the bytes
        self._position += taken
        return taken  # no further request for the rest: ``BufferedReader`` often needs less than it asks for

    def readall(self) -> bytes:
        """Read all the rest, in one allocation and one copy."""
        length = max(0, self.info.size_bytes - self._position)
        if not length:
            return b""
        whole = io.BytesIO()
        whole.seek(length - 1)
        whole.write(b"\0")
        with whole.getbuffer() as view:
            done = 0
            if self._position == 0 and len(self._first) < length < STREAM_BYTES_MIN:
                # Only an answer without a range has a checksum, which is worth 64 KiB that are fetched twice.
                done = self._position = len(self._get(None, self.info.etag, Landing(view, 0, length))[1])
            try:
                while done < length:
                    done += self.readinto(view[done:])
            except BaseException as error:
                clear_frames(error.__traceback__)  # that still refer to the memory, of which Python 3.13 complains
                raise
        return whole.getvalue()

    def close(self) -> None:
        self._drop_stream()
        if self._made_in == forks.generation():
            self._check.close()
        self._held = self._first = memoryview(b"")
        super().close()

    # ── fetching ────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _held_end(self) -> int:
        return self._held_start + len(self._held)

    def _take(self, target: memoryview) -> int:
        """Copy the held bytes to `target`, and return the number of bytes; 0 if nothing fits."""
        for start, data in ((self._held_start, self._held), (0, self._first)):
            at = self._position - start
            if 0 <= at < len(data):
                length = min(len(target), len(data) - at)
                target[:length] = data[at : at + length]
                return length
        return 0

    def _fetch(self, target: memoryview) -> int:
        """Fetch from the current offset on: into the held bytes (returns 0), or directly into `target` (returns its length)."""
        start, gap = self._position, self._position - self._held_end
        gap_bytes_max = BUFFER_BYTES if self._held_end == self._check.end else 0
        if self._stream is not None:
            gap_bytes_max = max(gap_bytes_max, self._gap_bytes_max)  # at least the padding with which a stream begins
        if gap != 0 and not 0 < gap <= gap_bytes_max:
            self._drop_stream()
            self._run_fetches = 0
        if self._stream is not None and self._position < self._stream_end:
            self._advance(self._stream)
            return 0
        self._drop_stream()
        if 0 < start - self._check.end <= BUFFER_BYTES:
            start = self._check.end  # padding
        rest = self.info.size_bytes - start
        wanted = min(rest, max(len(target), self.wanted_end - self._position) + self._position - start)
        if self._run_fetches >= 2:
            self._start_stream(start, rest, first_bytes=max(wanted, STREAM_BYTES_MIN // 2))
            return 0
        if wanted >= STREAM_BYTES_MIN:  # after a jump, fetch only the requested bytes
            self._start_stream(start, wanted, first_bytes=wanted)
            return 0
        length = min(rest, max(wanted, SECOND_BYTES if self._run_fetches else BUFFER_BYTES))
        span = ByteRange(start, start + length)
        self._run_fetches += 1
        if start == self._position and length == len(target):
            self._hold(span.end, memoryview(b""))
            self._check.add(start, self._get(span, self.info.etag, Landing(target, 0, length))[1])
            return length
        data = self._get(span, self.info.etag, None)[1]
        self._check.add(start, data)
        self._hold(start, data)
        return 0

    def _get(self, span: ByteRange | None, etag: str | None, landing: Landing | None) -> tuple[ObjectInfo, memoryview]:
        sink = WaitingSink(landing)
        completion = sink.wait(self.store.submit(Get(self.key, span, etag), sink))
        if completion.error is not None:
            raise completion.error
        info, body = completion.info, completion.body
        assert info is not None  # the contract of Get, held by the contract suite
        if self.info.size_bytes and not same_version(info, self.info):
            raise self._changed(info)
        wanted = ByteRange(0, info.size_bytes) if span is None else span
        if len(body) != min(wanted.end, info.size_bytes) - wanted.start:
            raise ShortReadError(f"{len(body)} of {wanted.length_bytes} bytes arrived", operation="GET", url=self.name)
        return info, body

    def _start_stream(self, start: int, length: int, *, first_bytes: int) -> None:
        self._run_fetches += 1
        self._stream_end = start + length
        self._hold(start, memoryview(b""))
        if start == self._check.end:
            self._check.request()
        info = self.info
        self._stream = read_parts(
            self.store,
            [
                PlanItem(self.key, span, info.etag, info.size_bytes, last_modified_s=info.last_modified_s)
                for span in _spans(start, self._stream_end, first_bytes)
            ],
        )

    def _advance(self, stream: Iterator[Chunk]) -> None:
        self._hold(self._held_end, memoryview(b""))  # so that its memory may be used again for the next chunk
        chunk = next(stream, None)
        if chunk is None:
            raise ShortReadError(f"the stream ended at {self._held_end} of {self._stream_end} bytes", url=self.name)
        if chunk.etag != self.info.etag:
            raise self._changed(self.info._replace(etag=chunk.etag))
        self._check.add(chunk.offset_bytes, chunk.data)
        self._hold(chunk.offset_bytes, chunk.data)

    def _hold(self, start: int, data: memoryview) -> None:
        self._held, self._held_start = data, start

    def _drop_stream(self) -> None:
        stream, self._stream = self._stream, None
        close = getattr(stream, "close", None)
        if close is not None:
            close()

    def _changed(self, info: ObjectInfo) -> ObjectChangedError:
        return ObjectChangedError(
            f"the object is now version {info.etag}, not {self.info.etag} as when it was opened",
            operation="GET",
            url=self.name,
        )


class _WholeCheck:
    """Compares an object with the checksum that the store keeps of it, if its bytes arrive in order, from first to last.

    Bytes that do not continue those before, as after a jump, are passed over, and so are those that arrive again.

    Args:
        store: The store.
        info: The version of the object.
        first: First bytes of the object, at most 64 KiB.

    Attributes:
        end: The bytes before this one have arrived in order.
        error: The mismatch, if there was one.
    """

    def __init__(self, store: Readable, info: ObjectInfo, first: memoryview) -> None:
        self._store = store
        self._info = info
        self._unhashed: list[Buffer] = [first]  # until the checksum is known
        self._requested: tuple[WaitingSink, Transfer] | None = None
        self._chosen: tuple[str, Hasher] | None = None
        self._expected = ""
        self.end = len(first)
        self.error: ChecksumError | None = None

    def request(self) -> None:
        """Request the checksum, without waiting for it."""
        if self._unhashed and self._requested is None:
            sink, info = WaitingSink(), self._info
            self._requested = sink, self._store.submit(Head(info.key, info.etag, info.size_bytes), sink)

    def add(self, start: int, data: memoryview) -> None:
        """Take the bytes from `start` on."""
        if not start <= self.end < start + len(data):
            return
        data = data[self.end - start :]
        self.end += len(data)
        if self._requested is not None:
            self._choose(*self._requested)
        if self._chosen is not None:
            self._chosen[1].update(data)
        elif self._unhashed:
            self._unhashed.append(bytes(data))  # the caller's memory will hold something else
            if self.end > STREAM_BYTES_MIN:
                self.request()
                if self.end == self._info.size_bytes and self._requested is not None:
                    self._choose(*self._requested)
        if self._chosen is not None and self.end == self._info.size_bytes:
            try:
                checksums.check(*self._chosen, self._expected)
            except ChecksumError as error:
                error.operation, error.url = "GET", self._store.describe(self._info.key)
                self.error = error.with_traceback(None)  # its frames hold the bytes

    def _choose(self, sink: WaitingSink, transfer: Transfer) -> None:
        """Wait for the answer to the HEAD, which was sent before the data was requested, and hash the arrived bytes."""
        info, self._requested = sink.wait(transfer).info, None
        if info is not None and same_version(info, self._info):
            self._chosen = checksums.choose(info.checksums)
        if info is not None and self._chosen is not None:
            name, hasher = self._chosen
            self._expected = info.checksums[name]
            for piece in self._unhashed:
                hasher.update(piece)
        self._unhashed.clear()

    def close(self) -> None:
        """Cancel the request, and drop the held bytes; nothing is compared any more. Idempotent."""
        if self._requested is not None:
            self._requested[1].cancel()
        self._unhashed.clear()
        self._chosen = None


def _spans(start: int, end: int, first: int) -> Iterator[ByteRange]:
    """Cover [start, end) with spans: two of `first` bytes, two of twice as many, ... and, from 8 MiB on, the rest."""
    length, at = first, start
    while at < end and length < 8 * MIB:
        for _ in range(2):
            if at < end:
                yield ByteRange(at, min(end, at + length))
                at += length
        length *= 2
    if at < end:
        yield ByteRange(at, end)


# ── text ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class ObjectText(io.TextIOWrapper):
    """A text file around a reader or a ``Writer``: an exception inside ``with`` discards the written text."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and hasattr(self.buffer, "abort"):
            self.buffer.abort()
        self.close()
