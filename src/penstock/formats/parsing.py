"""What all parsers of streamed formats share: the offset, the policy for corrupt bytes, and what spans two chunks.

The policy, the same for every format:

- ``raise``: the first corrupt byte is a ``CorruptShardError``; the parser is of no further use.
- ``skip_sample``: the sample is left out and counted, and parsing goes on after it. Where nobody can say where the next
  one begins (a wrong length, a broken gzip stream), the rest of the shard is passed over, as with
- ``skip_shard``: the rest of the shard is passed over and counted.

Nothing is skipped silently: ``skipped_samples`` (at least so many; of a rest that is passed over nobody knows how many
it holds, it counts as one), ``skipped_bytes``, and ``skipped_error``, the first of the errors.

What is valid but not supported is an ``UnsupportedFormatError`` under every policy: it is not damaged, so it is not skipped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias, get_args

from penstock.errors import ClosedError, ConfigError, CorruptShardError, PenstockError, UnsupportedFormatError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.formats.columnar import Samples
    from penstock.formats.sample import Parser, Sample
    from penstock.types import Buffer

OnCorrupt: TypeAlias = Literal["raise", "skip_sample", "skip_shard"]

RECORD_BYTES_MAX = 1 << 31
"""Bytes of one record, line or member that a parser believes; protobuf ends there, and so do all writers known."""


def byte_view(data: Buffer) -> memoryview:
    """uint8[length]: `data`, whatever it was typed as."""
    view = memoryview(data)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def feed_in_pieces(parser: Parser, data: Buffer) -> Iterator[list[Sample]]:
    """Feed `data` and what the parser left pending of it: the way to read compressed shards in bounded memory."""
    yield parser.feed(data)
    while parser.pending:
        yield parser.feed(b"")


def feed_in_columns(parser: Parser, data: Buffer) -> Iterator[Sequence[Sample]]:
    """As ``feed_in_pieces``, but ``Samples`` where the parser can: their values are copied, the others lie in `data`."""
    if isinstance(parser, ShardParser) and not parser.pending:
        yield from parser.feed_columns(data)
    else:
        yield from feed_in_pieces(parser, data)


class Skipping:
    """The policy and its counts.

    Attributes:
        skipped_samples: Left out so far.
        skipped_bytes: Passed over so far, as stored; of a compressed shard, decompressed.
        skipped_error: Why, the first time.
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

    def _unsupported(
        self, what: str, offset_bytes: int | None, *, hint: str | None = None, sample_key: str | None = None
    ) -> UnsupportedFormatError:
        """The error for what is valid but not read here; to be raised under every policy."""
        return UnsupportedFormatError(
            what, hint=hint, shard=self._shard, offset_bytes=offset_bytes, sample_key=sample_key
        )

    def _skip_sample(self, what: str, offset_bytes: int, size_bytes: int, *, hint: str | None = None) -> None:
        """Pass over one sample whose end is known.

        Raises:
            CorruptShardError: The policy says so.
        """
        error = CorruptShardError(what, hint=hint, shard=self._shard, offset_bytes=offset_bytes)
        if self._on_corrupt != "skip_sample":
            raise error
        self._note(error, size_bytes)


class ShardParser(Skipping, ABC):
    """Base of the parsers of this package: a subclass has ``_parse`` and ``_end``.

    Args:
        shard: URL or key, for errors.
        start_offset_bytes: Where in the shard the first chunk begins: 0, or a ``Sample.offset_bytes``.
        on_corrupt: See the module.
    """

    MAY_BE_EMPTY: ClassVar[bool] = False
    """Whether a shard without samples has 0 bytes in this format; else 0 bytes are a shard that was cut off."""

    decided_format: str | None = None  # see ``Parser``

    def __init__(self, shard: str, *, start_offset_bytes: int = 0, on_corrupt: OnCorrupt = "raise") -> None:
        super().__init__(shard, on_corrupt)
        self._start_offset_bytes = start_offset_bytes
        self._offset_bytes = start_offset_bytes  # in the shard, of the byte after the last chunk
        self._refusal: PenstockError | None = None  # what every further call gets
        self._passing = False  # over the rest of the shard
        self._groups: list[Sequence[Sample]] | None = None  # where columns are wanted: what was found before the rest

    @property
    def offset_bytes(self) -> int:
        """Bytes of the shard that were fed, those before the start included."""
        return self._offset_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of a sample that is not complete, which are held until it is."""
        return 0

    @property
    def pending(self) -> bool:
        """Whether bytes of the last chunk wait for ``feed(b"")``."""
        return False

    def feed(self, data: Buffer) -> list[Sample]:
        """Take the next bytes; give the samples that are complete now, as slices of `data` where they lie in it.

        Raises:
            CorruptShardError: Not of the format from some offset on; every later call raises it again.
            UnsupportedFormatError: Of the format, but of a kind that is not read here; every later call raises it again.
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
        """As ``feed``, but stretches of samples that are alike as ``Samples``, where the format has a way to find them.

        Raises:
            CorruptShardError: As ``feed``.
        """
        groups = self._groups = []
        try:
            rest = self.feed(data)
        finally:
            self._groups = None
        return [*groups, rest]

    def finish(self) -> list[Sample]:
        """The shard ended: give the last samples.

        Raises:
            CorruptShardError: It ended inside a sample.
        """
        if self._refusal is not None:
            raise self._refusal
        samples: list[Sample] = []
        if not self._passing:
            try:
                if not self._offset_bytes and not self.MAY_BE_EMPTY:
                    raise self._corrupt("the object has 0 bytes, too few for its format: was its upload cut off?", 0)
                self._end(samples)
            except CorruptShardError as error:
                self._give_up(error, self._offset_bytes)
        self._refusal = ClosedError(f"the parser of {self._shard} is finished")
        return samples

    def _add_columns(self, found: Samples, samples: list[Sample]) -> None:
        """Keep what was found at once behind what was found one by one."""
        assert self._groups is not None
        self._groups += [samples[:], found]
        samples.clear()

    @abstractmethod
    def _parse(self, view: memoryview, samples: list[Sample]) -> None:
        """Parse `view`, which begins at ``self._offset_bytes``; append what is complete to `samples`."""

    @abstractmethod
    def _end(self, samples: list[Sample]) -> None:
        """The shard ended: append what is left, or raise ``CorruptShardError``."""

    @abstractmethod
    def _drop(self) -> int | None:
        """Let go of what is held of an incomplete sample; where in the shard it began, None where nothing is held."""

    def _give_up(self, error: CorruptShardError, end_bytes: int) -> None:
        """Raise `error`, or pass over everything from it on; `end_bytes`: where what was fed ends."""
        if self._on_corrupt == "raise":
            self._refusal = error
            raise error
        self._passing = True
        begins_bytes = [at for at in (self._drop(), error.offset_bytes) if at is not None]
        self._note(error, end_bytes - min(begins_bytes, default=end_bytes))

    def _corrupt(self, what: str, offset_bytes: int | None, *, hint: str | None = None) -> CorruptShardError:
        return CorruptShardError(what, hint=hint, shard=self._shard, offset_bytes=offset_bytes)


class FramedParser(ShardParser):
    """Base for formats whose records say how long they are. A subclass has ``_scan`` and ``RECORD``.

    A record that spans chunks is collected in memory of its own: no chunk is pinned while the next ones arrive.
    """

    RECORD = "record"

    def __init__(self, shard: str, *, start_offset_bytes: int = 0, on_corrupt: OnCorrupt = "raise") -> None:
        super().__init__(shard, start_offset_bytes=start_offset_bytes, on_corrupt=on_corrupt)
        self._tail: bytearray | None = None  # of a record that is not whole yet
        self._tail_offset_bytes = 0  # in the shard
        self._need_bytes = 0  # of the tail, until it is worth another look
        self._view_offset_bytes = start_offset_bytes  # in the shard, of what `_scan` is given

    @abstractmethod
    def _scan(self, view: memoryview, at: int, samples: list[Sample]) -> tuple[int, int]:
        """Parse whole records from view[at] on.

        Returns:
            Where the first incomplete record begins, or len(view), and how many bytes of it (more than are there) the
            next look needs.
        """

    @property
    def held_bytes(self) -> int:
        """See ``Parser``."""
        return 0 if self._tail is None else len(self._tail)

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
        """Complete the record in `tail`; where in `view` to go on."""
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
                joined.release()  # nothing of it was taken, and it has to grow
            self._need_bytes = need_bytes

    def _end(self, samples: list[Sample]) -> None:
        del samples
        if self._tail is not None:
            missing = self._need_bytes - len(self._tail)
            raise self._corrupt(
                f"the shard is cut off inside a {self.RECORD}: at least {missing} bytes missing",
                self._tail_offset_bytes,
            )

    def _drop(self) -> int | None:
        begin_bytes = None if self._tail is None else self._tail_offset_bytes
        self._tail = None
        return begin_bytes

    def _check_entry(self, content: str, formats: str) -> None:
        """Refuse to guess what records hold by one that is not the shard's first: it may not be like the first.

        Raises:
            ConfigError: `content` is ``auto`` and reading begins inside the shard.
        """
        if content == "auto" and self._start_offset_bytes:
            raise ConfigError(
                f"{self._shard}: reading begins at byte {self._start_offset_bytes}, and only the shard's first record "
                "decides what its records hold",
                hint=f"say it by the format: {formats}; decided_format() gives it for the shard's first bytes",
            )

    def _start_hint(self, offset_bytes: int) -> str | None:
        """For an error at the very start of a reading that began inside the shard."""
        if offset_bytes == self._start_offset_bytes and offset_bytes:
            return "reading began there: is it a sample's offset in this version of the shard?"
        return None
