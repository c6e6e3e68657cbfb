"""``S3Reader`` and its two kinds: files of single objects that are opened at the first use."""

from __future__ import annotations

import io
import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.config import MIB, check_number, check_whole
from penstock.errors import ConfigError
from penstock.fetch import PlanItem
from penstock.memory.raw_file import RawFile
from penstock.store.file import ObjectReader
from penstock.system.tracebacks import boundary
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Iterator

    from _typeshed import WriteableBuffer

    from penstock.compat.s3torchconnector.objects import ObjectSource
    from penstock.types import Chunk

_READ_BYTES_MAX = 64 * MIB
"""The most that one call asks for at once; Python's buffered files call again until a read is complete."""


class S3Reader(io.BufferedIOBase):
    """A readable, seekable file of one object; the base class of all readers, including a user's own."""

    @property
    @abstractmethod
    def bucket(self) -> str:
        """Name of the bucket."""

    @property
    @abstractmethod
    def key(self) -> str:
        """Key of the object."""

    @abstractmethod
    def read(self, size: int | None = None) -> bytes:
        """Read at most `size` bytes; all the rest if `size` is negative or None."""

    @abstractmethod
    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move to an offset and return it; an offset past the end is the end."""

    @abstractmethod
    def tell(self) -> int:
        """Return the current offset."""

    @abstractmethod
    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Fill `buffer` with the next bytes, and return their number."""

    def seekable(self) -> bool:
        """Return True."""
        return True

    def readable(self) -> bool:
        """Return True."""
        return True

    def writable(self) -> bool:
        """Return False."""
        return False


class _OpenedLater(S3Reader):
    """A reader over a file that is opened at the first use; until then it has only an offset.

    Args:
        source: The object.
    """

    _file: io.BufferedIOBase | None = None

    def __init__(self, source: ObjectSource) -> None:
        super().__init__()
        self._source = source
        self._size_bytes: int | None = None
        self._position = 0  # while no file is open

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._source.store.describe(self.key)!r}{', closed' if self.closed else ''}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (type(self), self._arguments(), self._source, self.tell())

    @property
    def bucket(self) -> str:
        """Name of the bucket."""
        return self._source.location.bucket

    @property
    def key(self) -> str:
        """Key of the object."""
        return self._source.location.key

    def tell(self) -> int:
        """Return the current offset."""
        return self._position if self._file is None else self._file.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move to an offset and return it; an offset past the end is the end.

        Raises:
            TypeError: An argument is not an integer.
            ValueError: The offset is negative, `whence` is unknown, or the reader is closed.
            StoreError: The size is needed, and the object cannot be read.

        Cost: one request if the size is needed and unknown.
        """
        if not isinstance(offset, int) or not isinstance(whence, int):
            raise TypeError(f"seek() takes integers, not {type(offset).__name__} and {type(whence).__name__}")
        if self.closed:
            raise ValueError(f"{self!r} is closed")
        if whence not in (io.SEEK_SET, io.SEEK_CUR, io.SEEK_END):
            raise ValueError(f"whence={whence!r} must be 0, 1 or 2")
        base = 0 if whence == io.SEEK_SET else self.tell() if whence == io.SEEK_CUR else self._size()
        position = base + offset
        if position < 0:
            raise ValueError(f"seek to {position}, before the start")
        if position > 0 and position != self.tell():
            position = min(position, self._size())
        self._position = position if self._file is None else self._file.seek(position)
        return position

    def read(self, size: int | None = None) -> bytes:
        """Read at most `size` bytes; all the rest if `size` is negative or None.

        Raises:
            TypeError: `size` is neither an integer nor None.
            StoreError: The object is missing, may not be read, was replaced meanwhile, or did not arrive completely.
        """
        if size is not None and not isinstance(size, int):
            raise TypeError(f"read() takes an integer or None, not {type(size).__name__}")
        file = self._opened(size)
        if size is None or size < 0:
            return file.read()  # Python's buffered files refuse a negative number other than -1
        if size > _READ_BYTES_MAX:  # they allocate the requested size, even if the object is shorter
            size = min(size, self._size() - file.tell())
        return file.read(size)

    def read1(self, size: int = -1, /) -> bytes:
        """Read at most `size` bytes, as few as come without another request."""
        return self._opened(size).read1(min(size, _READ_BYTES_MAX))

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Fill `buffer` with the next bytes, and return their number, which is smaller than the buffer only at the end.

        Raises:
            StoreError: As for ``read``.
        """
        return self._opened(memoryview(buffer).nbytes).readinto(buffer)

    def readline(self, size: int | None = -1, /) -> bytes:
        """Read up to the end of the line, or at most `size` bytes of it."""
        return self._opened(0).readline(-1 if size is None else size)

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        line = self.readline()
        if not line:
            raise StopIteration
        return line

    def close(self) -> None:
        """Close the file, and cancel the requests in flight; idempotent."""
        file, self._file = self._file, None
        if file is not None:
            self._position = 0
            file.close()
        super().close()

    def _opened(self, size: int | None) -> io.BufferedIOBase:
        """Return the file at the reader's offset, and open it if this is the first use.

        Args:
            size: Bytes that will be read; None or a negative number for all.
        """
        if self.closed:
            raise ValueError(f"{self!r} is closed")
        if self._file is None:
            known = self._source.location.size_bytes
            is_whole = size is None or size < 0 or (known is not None and size >= known)
            file = self._open(whole=is_whole and self._position == 0)
            self._size_bytes = None  # of the version that is open now
            self._file = file
            if self._position:
                file.seek(min(self._position, self._size()))
        return self._file

    def _size(self) -> int:
        if self._size_bytes is None:
            listed = self._source.location.size_bytes
            if self._file is None and listed is not None:
                return listed
            file = self._opened(0)
            if isinstance(file, ObjectReader):
                self._size_bytes = file.size_bytes
            else:
                position = file.tell()
                self._size_bytes = file.seek(0, io.SEEK_END)
                file.seek(position)
        return self._size_bytes

    def _arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of the constructor besides the object."""
        return {}

    def _open(self, *, whole: bool) -> io.BufferedIOBase:
        raise io.UnsupportedOperation("_open")


@boundary
class SequentialS3Reader(_OpenedLater):
    """A reader for objects that are read from beginning to end, which also seeks.

    In a dataset, the object, or the first part of a large one, is read ahead. Elsewhere nothing is requested before the first
    use; large objects are then streamed with parts in parallel.

    Args:
        source: The object.
    """

    def __init__(self, source: ObjectSource) -> None:
        super().__init__(source)
        self._begun: Iterator[Chunk] | None = None

    read = _OpenedLater.read  # see ObjectReader.read

    def prefetch(self) -> None:
        """Request the object, or the first part of a large one, without waiting; the next use waits for it.

        Cost: one request.
        """
        if self.closed:
            raise ValueError(f"{self!r} is closed")
        if self._file is None and self._begun is None and self._position == 0:
            self._begun = self._source.begin()

    def _open(self, *, whole: bool) -> io.BufferedIOBase:
        begun, self._begun = self._begun, None
        return self._source.open(whole=whole) if begun is None else self._source.open_begun(begun)


@boundary
class RangedS3Reader(_OpenedLater):
    """A reader for objects of which only parts are read.

    Args:
        source: The object.
        buffer_size: Bytes that a smaller read fetches, so that its neighbours cost no request; 0 fetches exactly what is
            read. None leaves it to the engine: 64 KiB for a jump, more while reading goes on in sequence, then a stream.
    """

    def __init__(self, source: ObjectSource, *, buffer_size: int | None = None) -> None:
        super().__init__(source)
        self._buffer_size = buffer_size

    read = _OpenedLater.read  # see ObjectReader.read

    def _arguments(self) -> dict[str, Any]:
        return {"buffer_size": self._buffer_size}

    def _open(self, *, whole: bool) -> io.BufferedIOBase:
        if self._buffer_size is None:
            return self._source.open_file()
        return io.BufferedReader(ExactRanges(self._source), max(1, self._buffer_size))


class ExactRanges(RawFile):
    """A file each of whose reads is one request for exactly these bytes, all of one version.

    Args:
        source: The object.

    Cost: one request to open it, for size and version, and one for each read of up to about two parts.
    """

    def __init__(self, source: ObjectSource) -> None:
        super().__init__()
        self._source = source
        self._store, self._key = source.store, source.location.key
        self._info = source.stat()

    @property
    def size_bytes(self) -> int:
        """Size of the object in bytes."""
        return self._info.size_bytes

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Fill `buffer` with the next bytes by one request, and return their number."""
        target = memoryview(buffer).cast("B")
        info, start = self._info, self._position
        end = min(start + len(target), start + _READ_BYTES_MAX, info.size_bytes)
        if end <= start:
            return 0
        request = PlanItem(self._key, ByteRange(start, end), info.etag, info.size_bytes)
        data = next(self._store.read_many([request])).data
        target[: len(data)] = data
        self._position = end
        return len(data)

    def readall(self) -> bytes:
        """Read all the rest, with parts in parallel."""
        with self._source.open_file() as file:
            file.seek(self._position)
            data = file.read()
        self._position += len(data)
        return data


def _reopened(kind: type[_OpenedLater], arguments: dict[str, Any], source: ObjectSource, position: int) -> _OpenedLater:
    reader = kind(source, **arguments)
    reader._position = position
    return reader


@dataclass(frozen=True, slots=True)
class ReaderKind:
    """One of the kinds of readers that ``S3ReaderConstructor`` names, or a function of the user's.

    Attributes:
        name: Name of the type, which ``get_reader_type_string`` returns.
        make: Returns a reader of an object; sends no request.
        is_ahead: Whether a data set reads objects ahead for these readers.
        max_gap_size: Largest gap in bytes between two ranges that ``S3StorageReader`` reads with one request; None keeps its
            default.
    """

    name: str
    make: Callable[[ObjectSource], S3Reader]
    is_ahead: bool = False
    max_gap_size: float | None = None


ReaderConstructor: TypeAlias = ReaderKind | Callable[..., S3Reader]
"""A kind of reader, or a function of the user's that makes one. It is called with ``bucket``, ``key``, ``get_object_info``
(returns ``key``, ``size``, ``etag`` and ``last_modified``) and ``get_stream(start, end)`` (returns pieces of bytes)."""


class S3ReaderConstructor:
    """Names the kinds of readers, for the argument ``reader_constructor`` of data sets and checkpoints."""

    @staticmethod
    def sequential() -> ReaderKind:
        """Return the default kind: for objects that are read from beginning to end. Data sets read these ahead."""
        return ReaderKind("sequential", SequentialS3Reader, is_ahead=True)

    @staticmethod
    def range_based(buffer_size: int | None = None) -> ReaderKind:
        """Return the kind for objects of which only parts are read. Nothing is read ahead.

        Args:
            buffer_size: Bytes that a smaller read fetches; 0 fetches exactly the requested bytes. None leaves it to the engine.

        Raises:
            ConfigError: `buffer_size` is not a whole number of at least 0.
        """
        if buffer_size is not None:
            check_whole("buffer_size", buffer_size, 0)
        return ReaderKind("range_based", partial(RangedS3Reader, buffer_size=buffer_size))

    @staticmethod
    def dcp_optimized(max_gap_size: float = 32 * MIB) -> ReaderKind:
        """Return the default kind of ``S3StorageReader``; elsewhere it means ``range_based()``.

        Args:
            max_gap_size: Largest gap in bytes between two ranges that are read with one request; 0 merges only neighbours,
                and infinity merges all.

        Raises:
            ConfigError: `max_gap_size` is not a number of at least 0.
        """
        if max_gap_size != math.inf:
            check_number("max_gap_size", max_gap_size, 0)
        return ReaderKind("dcp_optimized", RangedS3Reader, max_gap_size=max_gap_size)

    @staticmethod
    def default() -> ReaderKind:
        """Return ``sequential()``."""
        return S3ReaderConstructor.sequential()

    @staticmethod
    def get_reader_type_string(constructor: ReaderConstructor | None) -> str:
        """Return ``"sequential"``, ``"range_based"`` or ``"dcp_optimized"``; ``"unknown"`` for a function of the user's."""
        if constructor is None:
            return S3ReaderConstructor.default().name
        return str(getattr(constructor, "name", "unknown"))


def kind_of(constructor: ReaderConstructor | None) -> ReaderKind:
    """Return the kind of reader that an argument ``reader_constructor`` names.

    Raises:
        ConfigError: The argument is neither a kind of reader nor a function.
    """
    if constructor is None:
        return S3ReaderConstructor.default()
    if isinstance(constructor, ReaderKind):
        return constructor
    if not callable(constructor):
        raise ConfigError(
            f"reader_constructor={constructor!r} is not a constructor of readers",
            hint="S3ReaderConstructor.sequential()",
        )
    return ReaderKind("unknown", partial(_make_own, constructor))


def _make_own(constructor: Callable[..., S3Reader], source: ObjectSource) -> S3Reader:
    """Return the result of a user's function for an object."""
    return constructor(
        bucket=source.location.bucket,
        key=source.location.key,
        get_object_info=source.summary,
        get_stream=source.stream,
    )
