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
``open``, and no read ever mixes versions. If the store sends no ranges of the object, opening it reads it whole, and holds it.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from penstock import forks
from penstock.config import KIB, MIB, FetchConfig
from penstock.errors import ClosedError, ConfigError, ObjectChangedError, ProtocolError, ShortReadError, SpanError
from penstock.fetch import PlanItem
from penstock.raw_file import RawFile
from penstock.store.reading import read, read_parts
from penstock.store.waiting import WaitingSink, stat
from penstock.tracebacks import boundary
from penstock.types import ByteRange, Get, Landing, ObjectInfo, same_version

if TYPE_CHECKING:
    from collections.abc import Iterator

    from _typeshed import WriteableBuffer

    from penstock.fetch import Chunk
    from penstock.store.reading import Readable
    from penstock.types import Key

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

    Threads may share it: each call is atomic, and they share the position. It pickles as store, key, version and position,
    and opens again when it is unpickled. Reading it in a forked child raises ``ClosedError``.

    Args:
        store: The store.
        key: Key of the object.
        etag: ETag of the version to read; None pins the current one.

    Raises:
        ObjectMissingError: The object does not exist.
        ObjectChangedError: `etag` is not the current version, or, while reading, the object was replaced since.

    Cost: One GET to open. Sequential reading holds read-ahead within the process's budget; jumps hold at most 256 KiB. If the
    store sends no ranges of the object, it costs a second GET and holds the object, which must fit into half of the budget.
    """

    def __init__(self, store: Readable, key: Key, *, etag: str | None = None) -> None:
        self._object = _RawObject(store, key, etag)
        super().__init__(self._object, BUFFER_BYTES)

    def read(self, size: int | None = -1, /) -> bytes:
        """Read at most `size` bytes; all the rest if `size` is negative or None."""
        if size is None or size <= BUFFER_BYTES:
            return super().read(size)
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
        self.info = self._open(etag)

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
        self._position += taken
        return taken  # no further request for the rest: ``BufferedReader`` often needs less than it asks for

    def readall(self) -> bytes:
        """Read all the rest, in one allocation and one copy."""
        length = max(0, self.info.size_bytes - self._position)
        if not length:
            return b""
        if self._position == 0 and length >= STREAM_BYTES_MIN and len(self._held) < length:
            self._start_whole()
        whole = io.BytesIO()
        whole.seek(length - 1)
        whole.write(b"\0")
        with whole.getbuffer() as view:
            done = 0
            while done < length:
                done += self.readinto(view[done:])
        return whole.getvalue()

    def close(self) -> None:
        self._drop_stream()
        self._held = memoryview(b"")
        super().close()

    # ── fetching ────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _held_end(self) -> int:
        return self._held_start + len(self._held)

    def _take(self, target: memoryview) -> int:
        """Copy what is held to `target`, and return the number of bytes; 0 if nothing fits."""
        at = self._position - self._held_start
        if not 0 <= at < len(self._held):
            return 0
        length = min(len(target), len(self._held) - at)
        target[:length] = self._held[at : at + length]
        return length

    def _fetch(self, target: memoryview) -> int:
        """Fetch from the position on: into what is held (returns 0), or directly into `target` (returns its length)."""
        gap = self._position - self._held_end
        if gap != 0 and not (self._stream is not None and 0 < gap <= self._gap_bytes_max):
            self._drop_stream()
            self._run_fetches = 0
        if self._stream is not None and self._position < self._stream_end:
            self._advance(self._stream)
            return 0
        self._drop_stream()
        rest = self.info.size_bytes - self._position
        wanted = min(rest, max(len(target), self.wanted_end - self._position))
        if self._run_fetches >= 2:
            self._start_stream(rest, first_bytes=max(wanted, STREAM_BYTES_MIN // 2))
            return 0
        if wanted >= STREAM_BYTES_MIN:  # after a jump, fetch what was requested and no more
            self._start_stream(wanted, first_bytes=wanted)
            return 0
        length = min(rest, max(wanted, SECOND_BYTES if self._run_fetches else BUFFER_BYTES))
        span = ByteRange(self._position, self._position + length)
        self._run_fetches += 1
        if length == len(target):
            self._hold(span.end, memoryview(b""))
            return len(self._get(span, self.info.etag, Landing(target, 0, length))[1])
        self._hold(span.start, self._get(span, self.info.etag, None)[1])
        return 0

    def _get(self, span: ByteRange, etag: str | None, landing: Landing | None) -> tuple[ObjectInfo, memoryview]:
        sink = WaitingSink(landing)
        completion = sink.wait(self.store.submit(Get(self.key, span, etag), sink))
        if completion.error is not None:
            raise completion.error
        info, body = completion.info, completion.body
        assert info is not None  # the contract of Get, held by the contract suite
        if self.info.size_bytes and not same_version(info, self.info):
            raise self._changed(info)
        if len(body) != min(span.end, info.size_bytes) - span.start:
            raise ShortReadError(f"{len(body)} of {span.length_bytes} bytes arrived", operation="GET", url=self.name)
        return info, body

    def _start_stream(self, length: int, *, first_bytes: int) -> None:
        self._run_fetches += 1
        self._stream_end = self._position + length
        self._hold(self._position, memoryview(b""))
        spans = _spans(self._position, self._stream_end, first_bytes)
        self._stream = read_parts(self.store, [self._pinned(span) for span in spans])

    def _start_whole(self) -> None:
        """Stream the whole object, which is then checked against the checksum that the store keeps of it.

        The 64 KiB that opening brought are fetched a second time.
        """
        self._drop_stream()
        self._run_fetches, self._stream_end = 3, self.info.size_bytes
        self._hold(0, memoryview(b""))
        self._stream = read_parts(self.store, [self._pinned(None)])

    def _pinned(self, span: ByteRange | None) -> PlanItem:
        """Return a request for `span`, or for the whole object, in the version that was opened."""
        info = self.info
        return PlanItem(self.key, span, info.etag, info.size_bytes, last_modified_s=info.last_modified_s)

    def _advance(self, stream: Iterator[Chunk]) -> None:
        self._hold(self._held_end, memoryview(b""))  # so that its memory may be used again for the next chunk
        chunk = next(stream, None)
        if chunk is None:
            raise ShortReadError(f"the stream ended at {self._held_end} of {self._stream_end} bytes", url=self.name)
        if chunk.etag != self.info.etag:
            raise self._changed(self.info._replace(etag=chunk.etag))
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
