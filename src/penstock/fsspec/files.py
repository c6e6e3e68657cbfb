"""Files of the file system: the engine's readers and writers, with the attributes that users of fsspec expect.

The engine reads ahead and holds the memory for it, so fsspec's caches are not used. A half-written object never becomes
visible: neither after an exception inside ``with``, also in text and compressed files, nor if a file is dropped unclosed.
"""

from __future__ import annotations

import io
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fsspec.compression import compr
from fsspec.core import get_compression
from fsspec.spec import AbstractBufferedFile
from fsspec.utils import read_block

from penstock.errors import ConfigError
from penstock.store.file import ObjectReader
from penstock.store.writing import CommitOnExit, Writer
from penstock.system.tracebacks import boundary

if TYPE_CHECKING:
    from types import FrameType

    from penstock.store.base import Store
    from penstock.types import Key

BLOCK_BYTES = 8 << 20
"""What ``blocksize`` says; programs that ask read in pieces of this size."""

PART_BYTES_MIN = 5 << 20
"""S3's smallest part."""

_FRAMES_MAX = 10  # between the close of a compressed text file and the ``with`` statement around it


@boundary
class FsspecReader(ObjectReader):
    """One version of an object as a file of fsspec's kind: ``fs.open(path, "rb")`` returns it.

    Args:
        files: The file system.
        path: Path of the object.
        store: The store that it lies in.
        key: Key of the object in the store.
        etag: ETag of the version to read; None pins the current one.
    """

    blocksize = BLOCK_BYTES

    def __init__(self, files: Any, path: str, *, store: Store, key: Key, etag: str | None = None) -> None:
        super().__init__(store, key, etag=etag)
        self.fs = files
        self.path = path

    read = ObjectReader.read  # see there

    @property
    def size(self) -> int:
        """Size of the object in bytes."""
        return self.size_bytes

    @property
    def loc(self) -> int:
        """The current offset in the file."""
        return self.tell()

    @property
    def details(self) -> dict[str, Any]:
        """Path, size, type and ETag of the version that is being read."""
        return {"name": self.path, "size": self.size_bytes, "type": "file", "ETag": self.etag}

    @property
    def full_name(self) -> str:
        """The path with its protocol."""
        return str(self.fs.unstrip_protocol(self.path))

    def info(self) -> dict[str, Any]:
        """Return path, size, type and ETag of the version that is being read."""
        return self.details

    def url(self, **options: Any) -> str:
        """Return a URL with which anybody can read the object for a limited time."""
        return str(self.fs.url(self.path, **options))

    def readuntil(self, char: bytes = b"\n", blocks: int | None = None) -> bytes:
        """Read up to the next `char`, and including it; all the rest if there is none.

        Args:
            char: The bytes to look for.
            blocks: Bytes to read at a time; None takes 64 KiB.
        """
        step = blocks or 1 << 16
        pieces = b""
        while True:
            start = self.tell()
            piece = self.read(step)
            searched_from = max(0, len(pieces) - len(char) + 1)
            before = len(pieces)
            pieces += piece
            at = pieces.find(char, searched_from)
            if at >= 0:
                self.seek(start + at + len(char) - before)
                return pieces[: at + len(char)]
            if not piece:
                return pieces

    def read_block(self, offset: int, length: int | None, delimiter: bytes | None = None) -> bytes:
        """Read `length` bytes from `offset` on, moved to the ends of records if there is a delimiter, as fsspec says."""
        if length is None or offset + length > self.size:
            length = max(0, self.size - offset)
        return bytes(read_block(self, offset, length, delimiter))

    def __reduce__(self) -> tuple[Any, ...]:
        super().__reduce__()  # refuses a file that is closed
        return _reopened, (self.fs, self.path, self.etag, self.tell())


def _reopened(files: Any, path: str, etag: str | None, position: int) -> FsspecReader:
    reader: FsspecReader = files.open_version(path, etag=etag)
    reader.seek(position)
    return reader


@boundary
class FsspecWriter(Writer):
    """A file that becomes an object when it is closed: ``fs.open(path, "wb")`` returns it.

    Args:
        files: The file system.
        path: Path of the object.
        store: The store that it lies in.
        key: Key of the object in the store.
        part_bytes: Size of the first parts in bytes; None takes the engine's default.
        if_absent: Whether to refuse to replace an object.
        content_type: Media type that S3, a directory or memory keeps with the object; empty for the store's default.
        autocommit: Whether ``close()`` makes the object visible; otherwise ``commit()`` does, as in a transaction.
    """

    blocksize = BLOCK_BYTES

    def __init__(
        self,
        files: Any,
        path: str,
        *,
        store: Store,
        key: Key,
        part_bytes: int | None = None,
        if_absent: bool = False,
        content_type: str = "",
        autocommit: bool = True,
    ) -> None:
        self._sealed = False
        self._handled = id(sys.exc_info()[1])
        headers = {"Content-Type": content_type} if content_type and store.keeps_records else {}
        super().__init__(store, key, part_bytes=part_bytes, if_absent=if_absent, headers=headers)
        self.fs = files
        self.path = path
        self.autocommit = autocommit

    @property
    def closed(self) -> bool:
        """Whether the file takes no more bytes."""
        return self._sealed or super().closed

    @property
    def loc(self) -> int:
        """Number of bytes written."""
        return self.tell()

    @property
    def size(self) -> int:
        """Number of bytes written."""
        return self.tell()

    @property
    def full_name(self) -> str:
        """The path with its protocol."""
        return str(self.fs.unstrip_protocol(self.path))

    def write(self, data: Any, /) -> int:
        """Take all of `data`, as ``Writer.write`` does.

        Raises:
            ValueError: The file was closed.
        """
        if self._sealed:
            raise ValueError(f"{self.path} is closed")
        return super().write(data)

    def close(self) -> None:
        """Make the object visible, or in a transaction keep it for ``commit()``.

        The file is discarded instead if a ``with`` statement that ends by an exception closes it, such as that of
        ``fsspec.open``.
        """
        if self.closed:
            return
        if _is_closed_by_exception(self._handled):
            self.abort()
        elif self.autocommit:
            self._finish()
        else:
            self._sealed = True

    def commit(self) -> None:
        """Make the object visible that a transaction has kept; does nothing if it is visible already."""
        self._finish()

    def discard(self) -> None:
        """Drop the bytes that were sent, so that no object becomes visible."""
        self.abort()

    def _finish(self) -> None:
        super().close()
        self.fs.invalidate_cache(self.path)


def _is_closed_by_exception(known: int) -> bool:
    """Whether a ``with`` statement that ends by an exception is closing the file, without passing the exception on.

    The ``__exit__`` of ``fsspec.open``, of pandas' handles and of ``contextlib.closing`` call ``close()`` however the block
    ends, so that a program that failed would commit half a file.

    Args:
        known: ``id`` of the exception that was being handled when the file was opened: a file may report an error.
    """
    frame = sys._getframe(2).f_back
    for _ in range(_FRAMES_MAX):
        if frame is None:
            break
        if frame.f_code.co_name == "__exit__" and _exits_by_exception(frame, known):
            return True
        frame = frame.f_back
    return False


def _exits_by_exception(frame: FrameType, known: int) -> bool:
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount + 1]  # one more than the arguments is *args
    values = [frame.f_locals.get(name) for name in names]
    flat = [item for value in values for item in (value if isinstance(value, tuple) else (value,))]
    return any(isinstance(value, BaseException) and id(value) != known for value in flat)


class FsspecCompressor(CommitOnExit, io.RawIOBase):
    """A file that compresses into a writer, and closes it: fsspec's own compressed files leave it open.

    Args:
        writer: Takes the compressed bytes.
        compression: fsspec's name of the compression.
    """

    def __init__(self, writer: FsspecWriter, *, compression: str) -> None:
        super().__init__()
        self._writer = writer
        self._compressed = compr[compression](writer, mode="w")

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any, /) -> int:
        """Compress all of `data`, and return its length in bytes."""
        self._compressed.write(data)
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Do nothing: a flushed compressor compresses badly, and nothing is visible before ``close()``."""

    def close(self) -> None:
        """Compress the rest, and close the writer."""
        if self.closed:
            return
        try:
            self._compressed.close()
            self._writer.close()
        except BaseException:
            self._writer.abort()
            raise
        finally:
            super().close()

    def abort(self) -> None:
        """Drop the bytes that were written. Idempotent."""
        with suppress(Exception):  # first, because its finaliser would write the rest to a closed writer, and complain
            self._compressed.close()
        self._writer.abort()
        super().close()

    def __del__(self) -> None:
        """Do nothing, because ``io.IOBase`` would close the file and so commit it."""


class FsspecUncachedReader(AbstractBufferedFile):  # type: ignore[misc]  # fsspec has no types
    """One version of an object as a file of fsspec's own, which asks for every range by itself.

    ``cache_type="none"`` returns it, which is how fsspec's block cache opens a file that it caches.
    """

    def _fetch_range(self, start: int, end: int) -> bytes:
        return bytes(self.fs.cat_version(self.path, start, end, info=self.details))


def compressed(file: Any, path: str, *, mode: str, compression: str) -> Any:
    """Return a file that compresses or decompresses.

    Args:
        file: A reader or a writer of this module.
        path: Path of the file, from whose suffix ``"infer"`` takes the compression.
        mode: Mode in which `file` was opened.
        compression: fsspec's name of the compression.

    Raises:
        ConfigError: There is no such compression.
    """
    try:
        name = get_compression(path, compression)
    except ValueError as error:
        raise ConfigError(f"compression={compression!r}: {error}") from None
    if name is None:
        return file
    if "r" in mode:
        return compr[name](file, mode="r")
    return FsspecCompressor(file, compression=name)
