"""The sources that transforms read: one version of an object in a store, or the output of the transform before it.

A worker reads an object by a signed URL. S3 sends checksums only if they are asked for, and none with ranges, so the store
behind the URL has nothing to compare. The gateway has requested the source's head, and the call contains its headers: this
module compares a source that is read whole with the checksum in them.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.checksums import algorithms as checksums
from penstock.config import KIB, MIB
from penstock.errors import ProtocolError
from penstock.fetch.plan import PlanItem
from penstock.gateway.transforms.authoring import view_of
from penstock.store.file import ObjectReader
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from penstock.checksums.algorithms import Hasher
    from penstock.store import Store
    from penstock.types import Buffer, Chunk

READ_PART_BYTES = 2 * MIB
READ_REQUESTS_MAX = 16
"""With 30 ms of latency and 90 MB/s per connection these read 600 MB/s, and the first piece arrives after 50 ms."""

LINE_BYTES = 8 * KIB
"""Bytes of a piece in which the end of a line is looked for at a time."""
COMPARED = ("crc32c", "crc64nvme")
"""The algorithms of checksums that are compared, which takes 0.1 to 0.2 s per GB. Others take longer than many transforms."""


class SourceVersion(NamedTuple):
    """The version of an object that a transform reads.

    Attributes:
        key: Key of the source, for the transform.
        stored_key: Key in the store; over HTTP it may hold a signature.
        size_bytes: Size in bytes.
        etag: ETag; None if the store has none.
        headers: Headers of the object, with names in lower case.
    """

    key: str
    stored_key: str
    size_bytes: int
    etag: str | None
    headers: Mapping[str, str]


class VersionReader(io.RawIOBase):
    """One version of an object as a file and an iterator. Sequential reading and iteration are read ahead.

    Args:
        store: Store of the object.
        source: The version to read.
        check: Called before each read; raises if the call was cancelled.

    A source that is read whole, by iterating or by one ``read()``, is compared with the checksum in its headers.

    Cost: No request before the first read. Iterating sends one request for each 2 MiB, at most 16 at a time.
    """

    def __init__(self, store: Store, source: SourceVersion, *, check: Callable[[], None]) -> None:
        super().__init__()
        self.key = source.key
        self.size_bytes = source.size_bytes
        self.etag = source.etag
        self.headers = source.headers
        self._store = store
        self._source = source
        self._check = check
        self._position = 0  # until the file is opened
        self._file: ObjectReader | None = None

    def _opened(self) -> ObjectReader:
        if self._file is None:
            file = ObjectReader(self._store, self._source.stored_key, etag=self._source.etag)
            self._check_size(file.size_bytes)
            self._file = file
            file.seek(self._position)
        return self._file

    def _check_size(self, size_bytes: int) -> None:
        """Refuse a source whose size is not that of the version: of a cut answer, a short result would be made."""
        if size_bytes != self.size_bytes:
            raise ProtocolError(f"the source {self.key} has {size_bytes} bytes, not {self.size_bytes} as before")

    def _is_at_end(self) -> bool:
        self._check()
        return self.tell() >= self.size_bytes

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes; see ``SourceReader``.

        Raises:
            ChecksumError: These are all bytes of the source, and they do not match its checksum.
        """
        if self._is_at_end():
            return b""
        data = self._opened().read(size)
        if len(data) == self.size_bytes and (checksum := self._checksum()) is not None:
            checksum[1].update(data)
            checksums.check(*checksum)
        return data

    def _checksum(self) -> tuple[str, Hasher, str] | None:
        """Return what computes the source's checksum, its algorithm and its value; None if there is none to compare."""
        known = checksums.full_object({name.encode(): value.encode() for name, value in self.headers.items()})
        chosen = checksums.choose({name: value for name, value in known.items() if name in COMPARED})
        return None if chosen is None else (*chosen, known[chosen[0]])

    def readinto(self, buffer: Any, /) -> int:
        """Fill `buffer` with the next bytes; see ``SourceReader``."""
        return 0 if self._is_at_end() else self._opened().readinto(buffer)

    def readline(self, size: int | None = -1, /) -> bytes:
        """Return the next line; see ``SourceReader``."""
        return b"" if self._is_at_end() else self._opened().readline(size)

    def readable(self) -> bool:
        """Whether it can be read: always."""
        return True

    def seekable(self) -> bool:
        """Whether its offset can be moved: always."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move the current offset; see ``SourceReader``."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.tell(), io.SEEK_END: self.size_bytes}.get(whence)
        if base is None or base + offset < 0:
            raise ValueError(f"seek({offset}, {whence}) of {self.key} leads nowhere")
        self._position = base + offset
        if self._file is not None:
            self._file.seek(self._position)
        return self._position

    def tell(self) -> int:
        """Return the current offset."""
        return self._position if self._file is None else self._file.tell()

    def __iter__(self) -> Iterator[memoryview]:  # type: ignore[override]
        if self._is_at_end():
            return iter(())
        span = ByteRange(self.tell(), self.size_bytes)
        item = self._item(None if span.start == 0 else span)
        parts = self._store.read_parts([item], part_bytes=READ_PART_BYTES, requests_max=READ_REQUESTS_MAX)
        return self._pieces(parts, self._checksum() if span.start == 0 else None)

    def _pieces(self, parts: Iterator[Chunk], checksum: tuple[str, Hasher, str] | None) -> Iterator[memoryview]:
        end = self.tell()
        try:
            for chunk in parts:
                self._check()
                end = chunk.offset_bytes + len(chunk.data)
                self.seek(end)
                data = chunk.data.toreadonly()
                del chunk  # only the caller keeps the memory
                if checksum is not None:
                    checksum[1].update(data)
                    if end == self.size_bytes:
                        checksums.check(*checksum)
                yield data
                del data
            self._check_size(end)
        finally:
            close = getattr(parts, "close", None)
            if close is not None:
                close()

    def read_range(self, start: int, end: int) -> memoryview:
        """Return a range; see ``SourceReader``."""
        self._check()
        end = min(end, self.size_bytes)
        if not 0 <= start < end:
            return memoryview(b"")
        (blob,) = self._store.read_many([self._item(ByteRange(start, end))])
        return blob.data

    def _item(self, span: ByteRange | None) -> PlanItem:
        return PlanItem(self._source.stored_key, span, self.etag, self.size_bytes)

    def close(self) -> None:
        """Release the read-ahead; idempotent."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
        super().close()


class PipedReader(io.BufferedIOBase):
    """The output of one transform as the source of the next: a file and an iterator, in sequence only.

    Args:
        key: Key of the first transform's source.
        headers: Headers of the output.
        size_bytes: Length of the output if it is known.
        pieces: The output.
    """

    etag: str | None = None

    def __init__(
        self, key: str, *, headers: Mapping[str, str], size_bytes: int | None, pieces: Iterator[Buffer]
    ) -> None:
        super().__init__()
        self.key = key
        self.headers = headers
        self.size_bytes = size_bytes
        self._pieces = pieces
        self._rest = memoryview(b"")
        self._position = 0

    def _fill(self) -> bool:
        """Have at least one byte in `_rest`; False at the end."""
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return False
            view = view_of(piece).cast("B")
            # The transform before may use its memory again for its next piece, while the one after still has this one.
            self._rest = view if view.readonly else memoryview(bytes(view))
        return True

    def _take(self, length_bytes: int) -> memoryview:
        taken, self._rest = self._rest[:length_bytes], self._rest[length_bytes:]
        self._position += len(taken)
        return taken

    def readable(self) -> bool:
        """Whether it can be read: always."""
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes; see ``SourceReader``."""
        parts, missing = [], -1 if size is None or size < 0 else size
        while missing and self._fill():
            taken = self._take(len(self._rest) if missing < 0 else missing)
            parts.append(bytes(taken))
            missing -= len(taken) if missing > 0 else 0
        return b"".join(parts)

    def readinto(self, buffer: Any, /) -> int:
        """Fill `buffer` with the next bytes; see ``SourceReader``."""
        target = memoryview(buffer).cast("B")
        done = 0
        while done < len(target) and self._fill():
            taken = self._take(len(target) - done)
            target[done : done + len(taken)] = taken
            done += len(taken)
        return done

    def read1(self, size: int = -1, /) -> bytes:
        """Return at most `size` bytes that are there."""
        return bytes(self._take(len(self._rest) if size < 0 else size)) if self._fill() else b""

    def readline(self, size: int | None = -1, /) -> bytes:
        """Return the next line; see ``SourceReader``."""
        parts: list[bytes] = []
        missing = -1 if size is None or size < 0 else size
        while missing and self._fill():
            held = bytes(self._rest[: LINE_BYTES if missing < 0 else min(missing, LINE_BYTES)])
            line = held[: held.find(b"\n") + 1] or held
            parts.append(bytes(self._take(len(line))))
            missing -= len(line) if missing > 0 else 0
            if line.endswith(b"\n"):
                break
        return b"".join(parts)

    def tell(self) -> int:
        """Return the number of bytes that were read."""
        return self._position

    def __iter__(self) -> Iterator[memoryview]:  # type: ignore[override]
        while self._fill():
            yield self._take(len(self._rest))

    def read_range(self, start: int, end: int) -> memoryview:
        """Refuse to jump; see ``SourceReader``."""
        raise io.UnsupportedOperation(
            f"another transform makes this source, so bytes {start} to {end} cannot be read by themselves"
        )
