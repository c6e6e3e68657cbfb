"""Looking: what a shard says of itself, asked for at once and waited for later, by all lanes that read it together."""

from __future__ import annotations

import copy
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakValueDictionary

from penstock.errors import PenstockError
from penstock.fetch import PlanItem
from penstock.formats import format_of_name, look_into, ranged_of
from penstock.store.inflight import InFlight
from penstock.types import ByteRange, Head

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from penstock.fetch import Chunk
    from penstock.formats import RangedReader
    from penstock.loader.lanes.reading import Reading, Segment
    from penstock.loader.statistics import Meter
    from penstock.sources.shards import Shard
    from penstock.types import Buffer

T = TypeVar("T")


class Look(Generic[T]):
    """What a format asks of a shard first: asked for at once, waited for later.

    Args:
        shard: That is looked into.
        looking: Yields spans, is sent their bytes, returns what it found out.
        meter: Told of bytes.

    Attributes:
        spans: What was asked for so far.
    """

    def __init__(self, shard: Shard, looking: Generator[ByteRange, Buffer, T], *, meter: Meter) -> None:
        self._shard = shard
        self._looking = looking
        self._meter = meter
        self.spans: list[ByteRange] = []
        self._chunks = self._asked(next(looking))

    def finish(self) -> T:
        """What was found out. Blocks.

        Raises:
            StoreError: as the store says.
            CorruptShardError: the shard is not of its format.
        """
        while True:
            parts: list[Buffer] = []
            for chunk in self._chunks:
                self._shard.etag = self._shard.etag or chunk.etag
                self._meter.bytes += len(chunk.data)
                parts.append(chunk.data)
            try:
                span = self._looking.send(parts[0] if len(parts) == 1 else b"".join(parts))
            except StopIteration as found:
                result: T = found.value
                return result
            self._chunks = self._asked(span)

    def close(self) -> None:
        """Cancel what is being read; from any thread, idempotent."""
        self._chunks.close()  # type: ignore[attr-defined]

    def _asked(self, span: ByteRange) -> Iterator[Chunk]:
        shard = self._shard
        self.spans.append(span)
        return shard.store.read_parts([PlanItem(shard.key, span=span, etag=shard.etag, size_bytes=shard.size_bytes)])


class Contents:
    """A shard's table of contents, asked for at once.

    Args:
        segment: Of the shard.
        fields: That are wanted; None: all.
        reading: How.

    Attributes:
        shard: The same.
        ends: int[units]: how many samples the units up to each hold together; empty before ``reader()``.
        is_closed: Whether it was given up before it was there.

    Cost: what the format holds of a table: 550 bytes per member of a zip.
    """

    def __init__(self, segment: Segment, *, fields: frozenset[str] | None, reading: Reading) -> None:
        self.shard = segment.shard
        self.ends: Sequence[int] = ()
        self.is_closed = False
        self._segment = segment
        self._fields = fields
        self._reading = reading
        self._reader: RangedReader | None = None
        self._look: Look[None] | None = None
        self._sizing: InFlight[None] | None = None
        self._failure: PenstockError | None = None
        self._is_there = False
        if self.shard.size_bytes is None:
            self._sizing = InFlight(self.shard.store)
            self._sizing.submit(Head(self.shard.key), None)
        else:
            self._open()

    def reader(self) -> RangedReader | None:
        """A reader that knows its units, and counts for itself. Blocks once.

        Raises:
            StoreError: as the store says.
            CorruptShardError: the shard is not of its format.
        """
        if self._failure is not None:
            raise self._failure
        if not self._is_there:
            try:
                self._finish()
            except PenstockError as error:
                self._failure = error
                raise
            self._is_there = True
        return copy.copy(self._reader)

    @property
    def spans(self) -> Sequence[ByteRange]:
        """What was asked for so far."""
        return self._look.spans if self._look is not None else ()

    def close(self) -> None:
        """Cancel what is being read, where it is not there; from any thread, idempotent."""
        if self._is_there:
            return
        self.is_closed = True
        if self._look is not None:
            self._look.close()
        if self._sizing is not None:
            self._sizing.cancel()

    def _finish(self) -> None:
        if self._sizing is not None:
            self._learn_size(self._sizing)
        if self._reader is not None:
            if self._look is not None:
                self._look.finish()
            else:
                look_into(self._reader, lambda _: b"")  # of no bytes: it says what that is
            self.ends = list(accumulate(unit.samples_count for unit in self._reader.units))

    def _learn_size(self, sizing: InFlight[None]) -> None:
        shard = self.shard
        _, completion = sizing.wait()
        if completion.error is not None:
            completion.error.url = completion.error.url or shard.url
            raise completion.error
        assert completion.info is not None
        shard.size_bytes, shard.etag = completion.info.size_bytes, shard.etag or completion.info.etag
        self._open()

    def _open(self) -> None:
        segment, shard = self._segment, self.shard
        assert shard.size_bytes is not None
        name = segment.format or format_of_name(shard.key)
        assert name is not None
        self._reader = ranged_of(
            name,
            shard=shard.url,
            size_bytes=shard.size_bytes,
            fields=self._fields,
            on_corrupt=self._reading.on_corrupt[segment.source],
        )
        if shard.size_bytes:
            self._look = Look(shard, self._reader.look(), meter=self._reading.meter)


_contents: WeakValueDictionary[Any, Contents] = WeakValueDictionary()  # by shard: each holds its own, so ids are theirs


def contents_of(segment: Segment, *, fields: frozenset[str] | None, reading: Reading) -> Contents:
    """The table of contents of a segment's shard: the one that another lane holds, else a new one, asked for now."""
    segment.format = segment.format or format_of_name(segment.shard.key)
    key = (id(segment.shard), fields)
    found = _contents.get(key)
    if found is None or found.is_closed:
        found = _contents[key] = Contents(segment, fields=fields, reading=reading)
    return found
