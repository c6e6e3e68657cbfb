"""Shards with a table of contents: zip and Parquet keep it at their end. They are read by ranges, still without I/O.

A reader asks for spans and is sent their bytes; the caller fetches them in whatever way it likes. First the reader looks at
the table of contents::

    reader = ranged_of("zip", shard=url, size_bytes=info.size_bytes)
    looking = reader.look()
    span = next(looking)  # a ByteRange of the shard
    span = looking.send(store.read(...))  # until StopIteration; two or three spans in all

Then ``reader.units`` lists the units of the shard in stored order, each with the spans that hold it. Units can be read in any
order: ``reader.read(unit_index, parts)``, with one part for each span. ``samples_of`` does all of this, in stored order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import ConfigError, CorruptShardError, UnsupportedFormatError
from penstock.formats.parsing import OnCorrupt, Parser, Skipping
from penstock.memory.buffers import byte_view

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterator, Sequence

    from penstock.formats.sample import Sample
    from penstock.types import Buffer, ByteRange

TAIL_BYTES = 64 << 10
"""Bytes at the end of a shard that are read first: they hold a directory or footer of a few hundred entries."""

WHOLE_BYTES_MAX = 2 << 30
"""Largest shard that ``WholeShardParser`` collects."""


class Unit(NamedTuple):
    """The smallest part of a shard that can be read by itself: a sample of a zip, a row group of Parquet.

    Attributes:
        spans: Ranges of the wanted fields in the shard, ascending; empty if the unit has none of them.
        samples_count: Number of samples.
        size_bytes: Size of all fields, wanted or not.
    """

    spans: tuple[ByteRange, ...]
    samples_count: int
    size_bytes: int


class DecodedPiece(NamedTuple):
    """Samples of a unit that were decoded together.

    Attributes:
        samples: The samples, in stored order.
        size_bytes: Size of the memory that they share, and keep alive; 0 for ``Samples``.
    """

    samples: Sequence[Sample]
    size_bytes: int


def look_into(reader: RangedReader, read: Callable[[ByteRange], Buffer]) -> None:
    """Run ``reader.look()``.

    Args:
        reader: The reader of a shard.
        read: Returns the bytes of a span of the shard.

    Raises:
        CorruptShardError: The shard is not of the format.
    """
    looking = reader.look()
    span = next(looking, None)
    while span is not None:
        try:
            span = looking.send(read(span))
        except StopIteration:
            return


def samples_of(reader: RangedReader, read: Callable[[ByteRange], Buffer]) -> Iterator[list[Sample]]:
    """Yield all samples of a shard, unit by unit.

    Args:
        reader: The reader of a shard.
        read: Returns the bytes of a span of the shard.

    Raises:
        CorruptShardError: The shard is not of the format, or a unit is corrupt.
    """
    look_into(reader, read)
    for unit_index, unit in enumerate(reader.units):
        yield reader.read(unit_index, [read(span) for span in unit.spans])


class RangedReader(Skipping, ABC):
    """Reads one shard by ranges, without I/O. A subclass defines ``_look`` and ``_pieces``.

    Args:
        shard: URL or key of the shard, for errors.
        size_bytes: Size of the shard.
        fields: Fields to read; None: all. A sample that has none of them is given without fields.
        on_corrupt: Policy for corrupt bytes, see ``parsing.py``.
        in_columns: Whether to give ``Samples``, copied out of the parts, where the format and the types allow it.

    Attributes:
        units: The units of the shard, in stored order; empty until ``look`` has ended.
    """

    def __init__(
        self,
        shard: str,
        *,
        size_bytes: int,
        fields: Collection[str] | None = None,
        on_corrupt: OnCorrupt = "raise",
        in_columns: bool = False,
    ) -> None:
        super().__init__(shard, on_corrupt)
        self._size_bytes = size_bytes
        self._in_columns = in_columns
        self._fields = None if fields is None else frozenset(fields)
        self._skips_rest = False
        self.units: tuple[Unit, ...] = ()

    def look(self) -> Generator[ByteRange, Buffer, None]:
        """Find the units: yields spans, at least one if the shard is not empty, and is sent their bytes.

        Raises:
            CorruptShardError: The shard is not of the format. If corrupt data is skipped, it has no units instead.
        """
        try:
            yield from self._look()
        except CorruptShardError as error:
            if self._on_corrupt == "raise":
                raise
            self.units = ()
            self._note(error, self._size_bytes)

    def read(self, unit_index: int, parts: Sequence[Buffer]) -> list[Sample]:
        """Return the samples of a unit except skipped ones, as slices of `parts` if the format allows it.

        Args:
            unit_index: Index in ``units``.
            parts: The bytes of each of the unit's spans.

        Raises:
            CorruptShardError: The bytes do not match the table of contents.
            UnsupportedFormatError: The bytes are valid, but of a kind that is not supported; raised under every policy.
        """
        return [sample for piece in self.pieces(unit_index, parts) for sample in piece.samples]

    def pieces(self, unit_index: int, parts: Sequence[Buffer], *, first: int = 0) -> Iterator[DecodedPiece]:
        """Yield the samples of a unit, as many at a time as are decoded together.

        Args:
            unit_index: Index in ``units``.
            parts: The bytes of each of the unit's spans.
            first: Index in the unit of the first sample to yield.

        Raises:
            CorruptShardError: The unit is damaged. The samples before the damage have been yielded.
        """
        unit = self.units[unit_index]
        views = [byte_view(part) for part in parts]
        size_bytes = sum(map(len, views))
        if self._skips_rest:
            self.skipped_bytes += size_bytes
            return
        given_count = first
        try:
            for span, view in zip(unit.spans, views, strict=True):
                if len(view) != span.end - span.start:
                    raise ValueError(f"{len(view)} bytes were given for {span}")
            for piece in self._pieces(unit_index, views, first):
                given_count += len(piece.samples)
                yield piece
        except ConfigError:
            raise
        except UnsupportedFormatError as error:
            error.shard = error.shard or self._shard
            raise
        except ValueError as error:
            corrupt = self._corrupt(str(error), unit.spans[0].start if unit.spans else 0)
            if self._on_corrupt == "raise":
                raise corrupt from None
            self._skips_rest = self._on_corrupt == "skip_shard"
            self._note(corrupt, size_bytes)
            self.skipped_samples += unit.samples_count - given_count - 1

    @abstractmethod
    def _look(self) -> Generator[ByteRange, Buffer, None]:
        """``look`` for this format; sets ``units``."""

    @abstractmethod
    def _pieces(self, unit_index: int, views: list[memoryview], first: int) -> Iterator[DecodedPiece]:
        """``pieces`` for this format. Raises ``ValueError`` with a description if the bytes are corrupt."""


class WholeShardParser(Parser):
    """A ``Parser`` over a ranged reader, for callers that stream: it collects the shard and returns all samples at the end.

    Args:
        shard: URL or key of the shard, for errors.
        reader: Makes the ranged reader of the format.
        start_offset_bytes: Must be 0.
        on_corrupt: Policy for corrupt bytes, see ``parsing.py``.

    Cost: holds the whole shard, at most ``WHOLE_BYTES_MAX`` bytes.
    """

    def __init__(
        self,
        shard: str,
        *,
        reader: Callable[..., RangedReader],
        start_offset_bytes: int = 0,
        on_corrupt: OnCorrupt = "raise",
    ) -> None:
        super().__init__(shard, start_offset_bytes=start_offset_bytes, on_corrupt=on_corrupt)
        self._reader = reader
        self._whole = bytearray()
        if start_offset_bytes:
            raise ConfigError(f"{shard} cannot be streamed from byte {start_offset_bytes}", hint="use ranged_of()")

    @property
    def held_bytes(self) -> int:
        """Size of the collected bytes; see ``Parser``."""
        return len(self._whole)

    def _parse(self, view: memoryview, samples: list[Sample]) -> None:
        del samples
        if len(self._whole) + len(view) > WHOLE_BYTES_MAX:
            what = f"the shard has more than {WHOLE_BYTES_MAX} bytes, which is too much to collect"
            raise self._corrupt(what, 0, hint="read it by ranges: ranged_of()")
        self._whole += view

    def _end(self, samples: list[Sample]) -> None:
        whole = memoryview(self._whole)
        reader = self._reader(self._shard, size_bytes=len(whole), on_corrupt=self._on_corrupt)
        try:
            for some in samples_of(reader, lambda span: whole[span.start : span.end]):
                samples += some
        finally:
            self.skipped_samples, self.skipped_bytes = reader.skipped_samples, reader.skipped_bytes
            self.skipped_error = reader.skipped_error

    def _drop(self) -> int | None:
        self._whole = bytearray()
        return 0
