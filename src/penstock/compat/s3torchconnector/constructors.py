"""``S3ReaderConstructor``: the kind of reader that a data set or checkpoint creates for its objects."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from penstock.compat.s3torchconnector.readers import RangedS3Reader, S3Reader, SequentialS3Reader
from penstock.config import MIB, check_number, check_whole
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.compat.s3torchconnector.objects import ObjectSource


class ReaderKind(Protocol):
    """One of the kinds of readers that ``S3ReaderConstructor`` names.

    Attributes:
        name: Name of the type, which ``get_reader_type_string`` returns.
        is_ahead: Whether a data set reads objects ahead for these readers.
    """

    name: ClassVar[str]
    is_ahead: ClassVar[bool]

    def make(self, source: ObjectSource) -> S3Reader:
        """Return a reader of an object; sends no request."""


ReaderConstructor: TypeAlias = ReaderKind | Callable[..., S3Reader]
"""A kind of reader, or a function of the user's that makes one. It is called with ``bucket``, ``key``, ``get_object_info``
(returns ``key``, ``size``, ``etag`` and ``last_modified``) and ``get_stream(start, end)`` (returns pieces of bytes)."""


@dataclass(frozen=True, slots=True)
class WholeObjects:
    """Objects that are read from beginning to end."""

    name: ClassVar[str] = "sequential"
    is_ahead: ClassVar[bool] = True

    def make(self, source: ObjectSource) -> S3Reader:
        """Return a reader of an object; sends no request."""
        return SequentialS3Reader(source)


@dataclass(frozen=True, slots=True)
class RangeBased:
    """Objects of which parts are read.

    Attributes:
        buffer_size: Bytes that a smaller read fetches; 0 fetches exactly what is read, None leaves it to the engine.
    """

    buffer_size: int | None = None
    name: ClassVar[str] = "range_based"
    is_ahead: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.buffer_size is not None:
            check_whole("buffer_size", self.buffer_size, 0)

    def make(self, source: ObjectSource) -> S3Reader:
        """Return a reader of an object; sends no request."""
        return RangedS3Reader(source, buffer_size=self.buffer_size)


@dataclass(frozen=True, slots=True)
class DcpOptimized:
    """Files of a distributed checkpoint, which ``S3StorageReader`` reads by its load plan, not through a reader.

    Attributes:
        max_gap_size: Largest gap in bytes between two ranges that are read with one request.
    """

    max_gap_size: float = 32 * MIB
    name: ClassVar[str] = "dcp_optimized"
    is_ahead: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.max_gap_size != math.inf:
            check_number("max_gap_size", self.max_gap_size, 0)

    def make(self, source: ObjectSource) -> S3Reader:
        """Return a reader of an object; sends no request."""
        return RangedS3Reader(source)


class S3ReaderConstructor:
    """Names the kinds of readers, for the argument ``reader_constructor`` of data sets and checkpoints."""

    @staticmethod
    def sequential() -> ReaderKind:
        """Return the default kind: for objects that are read from beginning to end. Data sets read these ahead."""
        return WholeObjects()

    @staticmethod
    def range_based(buffer_size: int | None = None) -> ReaderKind:
        """Return the kind for objects of which only parts are read. Nothing is read ahead.

        Args:
            buffer_size: Bytes that a smaller read fetches; 0 fetches exactly what is read. None leaves it to the engine.

        Raises:
            ConfigError: `buffer_size` is not a whole number of at least 0.
        """
        return RangeBased(buffer_size)

    @staticmethod
    def dcp_optimized(max_gap_size: float = 32 * MIB) -> ReaderKind:
        """Return the default kind of ``S3StorageReader``; elsewhere it means ``range_based()``.

        Args:
            max_gap_size: Largest gap in bytes between two ranges that are read with one request; 0 merges only neighbours,
                and infinity merges all.

        Raises:
            ConfigError: `max_gap_size` is not a number of at least 0.
        """
        return DcpOptimized(max_gap_size)

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
    if isinstance(constructor, WholeObjects | RangeBased | DcpOptimized):
        return constructor
    if not callable(constructor):
        raise ConfigError(
            f"reader_constructor={constructor!r} is not a constructor of readers",
            hint="S3ReaderConstructor.sequential()",
        )
    return UsersReaders(constructor)


@dataclass(frozen=True, slots=True)
class UsersReaders:
    """Readers that a function of the user's makes.

    Attributes:
        make_reader: The function.
    """

    make_reader: Callable[..., Any]
    name: ClassVar[str] = "unknown"
    is_ahead: ClassVar[bool] = False

    def make(self, source: ObjectSource) -> S3Reader:
        """Return what the function makes of an object."""
        location = source.location
        reader: S3Reader = self.make_reader(
            bucket=location.bucket, key=location.key, get_object_info=source.summary, get_stream=source.stream
        )
        return reader
