"""Shards whose table of contents is at their end: read by ranges, and still without I/O.

A reader asks for spans and is sent their bytes; whoever drives it fetches them as he likes. First it looks::

    reader = ranged_of("zip", shard=url, size_bytes=info.size_bytes)
    looking = reader.look()
    span = next(looking)                      # a ByteRange of the shard
    span = looking.send(store.read(...))      # until StopIteration; two or three spans in all

Then ``reader.units`` says what there is, each unit with the spans that hold it, in stored order; units are read in any
order: ``reader.read(unit_index, parts)``, one part per span. ``samples_of`` does all of that, in order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.errors import ConfigError, CorruptShardError, UnsupportedFormatError
from penstock.formats.parsing import OnCorrupt, ShardParser, Skipping, byte_view

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterator, Sequence

    from penstock.formats.sample import Sample
    from penstock.types import Buffer, ByteRange

TAIL_BYTES = 64 << 10
"""Of the first look at a shard's end: a directory or footer of a few hundred entries comes with it."""

WHOLE_BYTES_MAX = 2 << 30
"""Of a shard that is collected whole, where it is not read by ranges."""


class Unit(NamedTuple):
    """What is read at once: a sample of a zip, a row group of Parquet.

    Attributes:
        spans: Of the shard, the bytes of the wanted fields, ascending; none where the unit has none of them.
        samples_count: In it.
        size_bytes: Of all of its fields, wanted or not.
    """

    spans: tuple[ByteRange, ...]
    samples_count: int
    size_bytes: int


class Piece(NamedTuple):
    """Samples of a unit that were decoded together.

    Attributes:
        samples: In stored order.
        size_bytes: Of the memory that they keep.
    """

    samples: list[Sample]
    size_bytes: int


class RangedReader(Protocol):
    """One shard, read by ranges; pure.

    Attributes:
        units: What there is, in stored order; empty before ``look`` has ended.
        skipped_samples: Left out, where the policy is to skip what is corrupt.
        skipped_bytes: Of their units.
        skipped_error: Why, the first time.
    """

    units: tuple[Unit, ...]
    skipped_samples: int
    skipped_bytes: int
    skipped_error: CorruptShardError | None

    def look(self) -> Generator[ByteRange, Buffer, None]:
        """Yields spans, at least one of a shard that is not empty, and is sent their bytes.

        Raises:
            CorruptShardError: The shard is not of the format; while skipping, it has no units instead.
        """

    def read(self, unit_index: int, parts: Sequence[Buffer]) -> list[Sample]:
        """The samples of a unit, as slices of `parts` where the format allows.

        Raises:
            CorruptShardError: Its bytes are not what the shard's table of contents says.
            UnsupportedFormatError: They are valid, but of a kind that is not read here; raised under every policy.
        """

    def pieces(self, unit_index: int, parts: Sequence[Buffer], *, first: int = 0) -> Iterator[Piece]:
        """The same from its `first`-th sample on, as many at a time as are decoded together.

        Raises:
            CorruptShardError: As ``read``, behind the samples that are before the damage.
        """


def look_into(reader: RangedReader, read: Callable[[ByteRange], Buffer]) -> None:
    """Have a reader know its units; ``read(span)`` gives the shard's bytes.

    Raises:
        CorruptShardError: As the reader says.
    """
    looking = reader.look()
    span = next(looking, None)
    while span is not None:
        try:
            span = looking.send(read(span))
        except StopIteration:
            return


def samples_of(reader: RangedReader, read: Callable[[ByteRange], Buffer]) -> Iterator[list[Sample]]:
    """All samples of a shard, unit by unit; ``read(span)`` gives its bytes.

    Raises:
        CorruptShardError: As the reader says.
    """
    look_into(reader, read)
    for unit_index, unit in enumerate(reader.units):
        yield reader.read(unit_index, [read(span) for span in unit.spans])


class ShardReader(Skipping, ABC):
    """Base of the ranged readers of this package: a subclass has ``_look`` and ``_read``.

    Args:
        shard: URL or key, for errors.
        size_bytes: Of the shard.
        fields: Only these are read; None: all. The samples are the same: one that has none of them has no fields.
        on_corrupt: See ``parsing.py``.
    """

    def __init__(
        self,
        shard: str,
        *,
        size_bytes: int,
        fields: Collection[str] | None = None,
        on_corrupt: OnCorrupt = "raise",
    ) -> None:
        super().__init__(shard, on_corrupt)
        self._size_bytes = size_bytes
        self._fields = None if fields is None else frozenset(fields)
        self._passing = False  # over the rest of the shard
        self.units: tuple[Unit, ...] = ()

    def look(self) -> Generator[ByteRange, Buffer, None]:
        """Yields spans, is sent their bytes; see ``RangedReader``."""
        try:
            yield from self._look()
        except CorruptShardError as error:
            if self._on_corrupt == "raise":
                raise
            self.units = ()
            self._note(error, self._size_bytes)

    def read(self, unit_index: int, parts: Sequence[Buffer]) -> list[Sample]:
        """The samples of that unit, but for those that were skipped; see ``RangedReader``."""
        return [sample for piece in self.pieces(unit_index, parts) for sample in piece.samples]

    def pieces(self, unit_index: int, parts: Sequence[Buffer], *, first: int = 0) -> Iterator[Piece]:
        """The same, some at a time; see ``RangedReader``."""
        unit = self.units[unit_index]
        views = [byte_view(part) for part in parts]
        size_bytes = sum(map(len, views))
        if self._passing:
            self.skipped_bytes += size_bytes
            return
        given_count = first
        try:
            for span, view in zip(unit.spans, views, strict=True):
                if len(view) != span.end - span.start:
                    raise ValueError(f"{len(view)} bytes are there of {span}")
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
            self._passing = self._on_corrupt == "skip_shard"
            self._note(corrupt, size_bytes)
            self.skipped_samples += unit.samples_count - given_count - 1

    @abstractmethod
    def _look(self) -> Generator[ByteRange, Buffer, None]:
        """As ``look``; fills ``units``."""

    @abstractmethod
    def _pieces(self, unit_index: int, views: list[memoryview], first: int) -> Iterator[Piece]:
        """As ``pieces``; ``ValueError`` with a sentence where the bytes are corrupt."""

    def _corrupt(self, what: str, offset_bytes: int) -> CorruptShardError:
        return CorruptShardError(what, shard=self._shard, offset_bytes=offset_bytes)


class WholeShardParser(ShardParser):
    """A ``Parser`` over a ranged reader, for whoever streams: collects the shard, and gives all at the end.

    Cost: holds the whole shard, ``WHOLE_BYTES_MAX`` at most.
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
            raise ConfigError(f"{shard} is not streamed from byte {start_offset_bytes}", hint="use ranged_of()")

    @property
    def held_bytes(self) -> int:
        """See ``Parser``: the shard."""
        return len(self._whole)

    def _parse(self, view: memoryview, samples: list[Sample]) -> None:
        del samples
        if len(self._whole) + len(view) > WHOLE_BYTES_MAX:
            what = f"the shard has more than {WHOLE_BYTES_MAX} bytes"
            raise self._corrupt(what, 0, hint="read it by ranges, by ranged_of()")
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
