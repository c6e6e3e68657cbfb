"""The base of all parsers of streamed formats: the offset, the policy for corrupt bytes, and data that spans two chunks.

Every format has the same policies for corrupt bytes:

- ``raise``: The first corrupt byte raises a ``CorruptShardError``, and the parser cannot be used any further.
- ``skip_sample``: The sample is skipped and counted, and parsing continues after it. If the start of the next sample cannot
  be determined (after a wrong length or a broken gzip stream), the rest of the shard is skipped, as with ``skip_shard``.
- ``skip_shard``: The rest of the shard is skipped and counted.

Nothing is skipped silently. ``skipped_samples`` is a lower bound, since a skipped rest of unknown content counts as one
sample; ``skipped_bytes`` is exact, and ``skipped_error`` is the first error.

Data that is valid but not supported raises ``UnsupportedFormatError`` under every policy: it is not damaged, so it is never
skipped.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias, get_args

from penstock.errors import ClosedError, ConfigError, CorruptShardError, PenstockError, UnsupportedFormatError
from penstock.memory.buffers import byte_view

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.formats.columnar import Samples
    from penstock.formats.sample import Sample
    from penstock.types import Buffer

_log = logging.getLogger("penstock.formats")

OnCorrupt: TypeAlias = Literal["raise", "skip_sample", "skip_shard"]

RECORD_BYTES_MAX = 1 << 31
"""Largest record, line or member that a parser accepts. It is the limit of protobuf, and no known writer exceeds it."""


_MAGIC = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\0", "xz"),
    (b"\x04\x22\x4d\x18", "lz4"),
    (b"PK\x03\x04", "zip"),
    (b"PAR1", "Parquet"),
    (b"\x89HDF\r\n", "HDF5"),
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"\x0a\x23\xd7\xce", "RecordIO"),
)


def look(head: Buffer) -> str | None:
    """Return a guess at what an object with the first bytes `head` is, or None if that is unknown."""
    start = bytes(head[:16])
    for magic, name in _MAGIC:
        if start.startswith(magic):
            return name
    if start.lstrip().startswith((b"<", b"{", b"[")):
        return "text (HTML, XML or JSON)"
    return None


def feed_in_pieces(parser: Parser, data: Buffer) -> Iterator[list[Sample]]:
    """Feed `data` and then the bytes that the parser leaves pending. This reads compressed shards in bounded memory."""
    yield parser.feed(data)
    while parser.pending:
        yield parser.feed(b"")


def feed_in_columns(parser: Parser, data: Buffer) -> Iterator[Sequence[Sample]]:
    """Do what ``feed_in_pieces`` does, but give ``Samples`` where the parser can.

    Values in ``Samples`` are copies; other samples are slices of `data`.
    """
    if parser.pending:
        yield from feed_in_pieces(parser, data)
    else:
        yield from parser.feed_columns(data)


class Skipping:
    """Applies a policy for corrupt bytes, and counts skipped samples and bytes.

    Attributes:
        skipped_samples: Number of samples skipped so far.
        skipped_bytes: Bytes skipped so far, as stored; decompressed bytes if the shard is compressed.
        skipped_error: The first error that led to skipping.
    """

    def __init__(self, shard: str, on_corrupt: OnCorrupt) -> None:
        if on_corrupt not in get_args(OnCorrupt):
            raise ConfigError(f"on_corrupt={on_corrupt!r} is not one of {', '.join(get_args(OnCorrupt))}")
        self._shard = shard
        self._on_corrupt = on_corrupt
        self.skipped_samples = 0
        self.skipped_bytes = 0
        self.skipped_error: CorruptShardError | None = None

    def _note(self, error: CorruptShardError, size_bytes: int) -> None:
        self.skipped_samples += 1
        self.skipped_bytes += size_bytes
        self.skipped_error = self.skipped_error or error

    def _corrupt(self, what: str, offset_bytes: int | None, *, hint: str | None = None) -> CorruptShardError:
        return CorruptShardError(what, hint=hint, shard=self._shard, offset_bytes=offset_bytes)

    def _unsupported(
        self, what: str, offset_bytes: int | None, *, hint: str | None = None, sample_key: str | None = None
    ) -> UnsupportedFormatError:
        """Return the error for data that is valid but not supported. It must be raised under every policy."""
        return UnsupportedFormatError(
            what, hint=hint, shard=self._shard, offset_bytes=offset_bytes, sample_key=sample_key
        )

    def _skip_sample(self, what: str, offset_bytes: int, size_bytes: int, *, hint: str | None = None) -> None:
        """Skip one sample whose end is known.

        Raises:
            CorruptShardError: The policy does not skip samples.
        """
        error = CorruptShardError(what, hint=hint, shard=self._shard, offset_bytes=offset_bytes)
        if self._on_corrupt != "skip_sample":
            raise error
        self._note(error, size_bytes)


class Parser(Skipping, ABC):
    """Turns the bytes of one shard into samples. Chunks may end at any byte, and a parser does no I/O.

    A subclass implements ``_parse`` and ``_end``. A format that can only be read from its start, such as gzip, refuses any
    other ``start_offset_bytes`` at construction.

    Attributes:
        decided_format: The more specific format that the shard's first record determined. None before that, and for formats
            whose name already states the content of records.

    Args:
        shard: URL or key, for error messages.
        start_offset_bytes: Offset in the shard at which the first chunk begins: 0, or a ``Sample.offset_bytes``.
        on_corrupt: Policy for corrupt bytes, as described at the top of this module.
    """

    MAY_BE_EMPTY: ClassVar[bool] = False
    """Whether 0 bytes are a valid shard without samples in this format, which only a warning tells from a lost upload;
    otherwise they are a truncated shard."""

    decided_format: str | None = None

    def __init__(self, shard: str, *, start_offset_bytes: int = 0, on_corrupt: OnCorrupt = "raise") -> None:
        super().__init__(shard, on_corrupt)
        self._start_offset_bytes = start_offset_bytes
        self._offset_bytes = start_offset_bytes  # offset in the shard of the byte after the last chunk
        self._refusal: PenstockError | None = None  # raised by every further call
        self._passing = False  # the rest of the shard
        self._groups: list[Sequence[Sample]] | None = None  # if columns are wanted: samples found before the rest

    @property
    def offset_bytes(self) -> int:
        """Offset in the shard up to which it was fed; bytes before the start count."""
        return self._offset_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes that are held because their sample is not complete yet."""
        return 0

    @property
    def pending(self) -> bool:
        """Whether bytes of the last chunk are waiting for ``feed(b"")``.

        Compressed shards are decompressed in pieces of bounded size.
        """
        return False

    def feed(self, data: Buffer) -> list[Sample]:
        """Parse the next bytes. Returns the samples that are now complete, as slices of `data` where possible.

        Raises:
            CorruptShardError: The data is corrupt; every later call raises the error again.
            UnsupportedFormatError: The data uses a part of the format that is not supported; every later call raises the
                error again.
        """
        if self._refusal is not None:
            raise self._refusal
        view = byte_view(data)
        samples: list[Sample] = []
        if self._passing:
            self.skipped_bytes += len(view)
        else:
            try:
                self._parse(view, samples)
            except CorruptShardError as error:
                self._give_up(error, self._offset_bytes + len(view))
            except UnsupportedFormatError as error:
                self._refusal = error
                raise
        self._offset_bytes += len(view)
        return samples

    def feed_columns(self, data: Buffer) -> list[Sequence[Sample]]:
        """Do what ``feed`` does, but give runs of samples with the same fields as ``Samples`` where the format supports it.

        Raises:
            CorruptShardError: The data is corrupt, as for ``feed``.
        """
        groups = self._groups = []
        try:
            rest = self.feed(data)
        finally:
            self._groups = None
        return [*groups, rest]

    def finish(self) -> list[Sample]:
        """Note the end of the shard. Returns the last samples.

        Raises:
            CorruptShardError: The shard ended inside a sample.
        """
        if self._refusal is not None:
            raise self._refusal
        samples: list[Sample] = []
        if not self._passing:
            try:
                if not self._offset_bytes:
                    self._end_empty()
                self._end(samples)
            except CorruptShardError as error:
                self._give_up(error, self._offset_bytes)
        self._refusal = ClosedError(f"the parser of {self._shard} is finished")
        return samples

    def _end_empty(self) -> None:
        """Refuse a shard without a byte, or warn of one that the format allows."""
        if not self.MAY_BE_EMPTY:
            raise self._corrupt("the object has 0 bytes, too few for its format: was its upload cut off?", 0)
        _log.warning("%s: the object has 0 bytes, and so no samples: was its upload cut off?", self._shard)

    def _add_columns(self, found: Samples, samples: list[Sample]) -> None:
        """Append samples in columns after those that were found one by one."""
        assert self._groups is not None
        self._groups += [samples[:], found]
        samples.clear()

    @abstractmethod
    def _parse(self, view: memoryview, samples: list[Sample]) -> None:
        """Parse `view`, which begins at ``self._offset_bytes``, and append complete samples to `samples`."""

    @abstractmethod
    def _end(self, samples: list[Sample]) -> None:
        """Append the last samples at the end of the shard, or raise ``CorruptShardError``."""

    @abstractmethod
    def _drop(self) -> int | None:
        """Drop the held bytes of an incomplete sample. Returns its offset in the shard, or None if nothing was held."""

    def _give_up(self, error: CorruptShardError, end_bytes: int) -> None:
        """Raise `error`, or skip everything from it on; the data fed so far ends at `end_bytes`."""
        if self._on_corrupt == "raise":
            self._refusal = error
            raise error
        self._passing = True
        begins_bytes = [at for at in (self._drop(), error.offset_bytes) if at is not None]
        self._note(error, end_bytes - min(begins_bytes, default=end_bytes))

    def _start_hint(self, head: Buffer, offset_bytes: int) -> str | None:
        """Return a hint for an error at the very start of the data, which begins with `head`."""
        if offset_bytes != self._start_offset_bytes:
            return None
        if offset_bytes:
            return "reading began there: is it a sample's offset in this version of the shard?"
        seems = look(head)
        return f"the object seems to be {seems}" if seems else None


class SpanningParser(Parser):
    """Base for formats of records. One that spans chunks is collected in memory of its own, so that no chunk is pinned."""

    _tail: bytearray | None = None  # the incomplete last record
    _tail_offset_bytes = 0  # its offset in the shard

    @property
    def held_bytes(self) -> int:
        """Bytes that are held because their sample is not complete yet."""
        return 0 if self._tail is None else len(self._tail)

    def _drop(self) -> int | None:
        begin_bytes = None if self._tail is None else self._tail_offset_bytes
        self._tail = None
        return begin_bytes


class FramedParser(SpanningParser):
    """Base for formats whose records start with their length. A subclass implements ``_scan`` and ``RECORD``."""

    RECORD = "record"

    _need_bytes = 0  # length of the tail from which parsing it is worth another attempt
    _view_offset_bytes = 0  # offset in the shard of what `_scan` is given

    @abstractmethod
    def _scan(self, view: memoryview, at: int, samples: list[Sample]) -> tuple[int, int]:
        """Parse complete records from view[at] on.

        Returns:
            Where the first incomplete record begins, or len(view), and how many bytes of that record, more than are
            present, the next attempt needs.
        """

    def _parse(self, view: memoryview, samples: list[Sample]) -> None:
        at = 0
        if self._tail is not None:
            at = self._fill(self._tail, view, samples)
            if self._tail is not None:
                return
        self._view_offset_bytes = self._offset_bytes
        at, need_bytes = self._scan(view, at, samples)
        if at < len(view):
            self._tail, self._need_bytes = bytearray(view[at:]), need_bytes
            self._tail_offset_bytes = self._offset_bytes + at

    def _fill(self, tail: bytearray, view: memoryview, samples: list[Sample]) -> int:
        """Complete the record in `tail`. Returns where in `view` to continue."""
        at = 0
        while True:
            piece = view[at : at + self._need_bytes - len(tail)]
            tail += piece
            at += len(piece)
            if len(tail) < self._need_bytes:
                return at
            self._view_offset_bytes = self._tail_offset_bytes
            joined = memoryview(tail)
            done, need_bytes = self._scan(joined, 0, samples)
            if done == len(tail):
                self._tail = None
                return at
            if done:
                self._tail = tail = bytearray(joined[done:])
                self._tail_offset_bytes += done
            else:
                joined.release()  # nothing of it was consumed, so it has to grow
            self._need_bytes = need_bytes

    def _end(self, samples: list[Sample]) -> None:
        del samples
        if self._tail is not None:
            missing = self._need_bytes - len(self._tail)
            raise self._corrupt(
                f"the shard is cut off inside a {self.RECORD}: at least {missing} bytes missing",
                self._tail_offset_bytes,
            )


class RecordParser(FramedParser):
    """Base for formats whose shards do not state what their records hold. A subclass implements ``_scan`` and ``format_of``.

    Args:
        shard: URL or key, for error messages.
        start_offset_bytes: Offset in the shard at which the first chunk begins: 0, or a ``Sample.offset_bytes``.
        on_corrupt: Policy for corrupt bytes, as described at the top of this module.
        content: The second part of a name in ``FORMATS``, such as ``raw``; ``auto`` lets the first record decide.

    Raises:
        ConfigError: Reading begins inside the shard and `content` is ``auto``, because another record may hold something else.
    """

    MAY_BE_EMPTY = True

    FORMATS: ClassVar[tuple[str, ...]]
    """The formats as which a shard may be read; ``-raw`` gives one field, ``record``."""

    def __init__(
        self, shard: str, *, start_offset_bytes: int = 0, on_corrupt: OnCorrupt = "raise", content: str = "auto"
    ) -> None:
        super().__init__(shard, start_offset_bytes=start_offset_bytes, on_corrupt=on_corrupt)
        if content == "auto" and start_offset_bytes:
            formats = " or ".join(self.FORMATS)
            raise ConfigError(
                f"{shard}: reading begins at byte {start_offset_bytes}, and only the shard's first record "
                "decides what its records hold",
                hint=f"say it by the format: {formats}; decided_format() gives it for the shard's first bytes",
            )
        self._content = content
        self._is_first = not start_offset_bytes  # whether the next valid record is the first of the shard

    @staticmethod
    @abstractmethod
    def format_of(record: memoryview) -> str:
        """Return the format that `record`, the first of a shard, determines."""

    def _decide(self, record: memoryview) -> str:
        """Determine the content of all records from the first. Returns the format to read them as."""
        self.decided_format = self.format_of(record)
        self._is_first = False
        if self._content == "auto":
            self._content = self.decided_format.partition("-")[2]
        return self._content
