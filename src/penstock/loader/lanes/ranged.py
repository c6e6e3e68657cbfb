"""Shards that are looked into before they are read: a table of contents says which of their bytes hold what.

A look costs a round trip or two. So the looks of all lanes, and of the next shards of each, are under way together, and
nobody waits for one before it is its turn. Then only the spans of wanted samples and fields are asked for; those that lie
closer than the break-even gap are read as one.
"""

from __future__ import annotations

import copy
import time
from bisect import bisect_right
from collections import deque
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakValueDictionary

from penstock.errors import ClosedError, ConfigError, PenstockError
from penstock.fetch import PlanItem, coalesce
from penstock.formats import LOST, format_of_name, joined, look_into, ranged_of
from penstock.loader.lanes.segments import ParsedRun, too_few
from penstock.sources.selecting import gap_bytes_of
from penstock.store.inflight import InFlight
from penstock.types import ByteRange, Head

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from penstock.fetch import Chunk
    from penstock.formats import RangedReader, Sample
    from penstock.formats.ranged import Piece, Unit
    from penstock.loader.lanes.segments import ReadOptions, ShardSegment
    from penstock.loader.statistics import Meter
    from penstock.sources.shards import Shard
    from penstock.types import Buffer

T = TypeVar("T")

_MANY = 1 << 62

COALESCED_COUNT = 1024
"""Spans that are looked at together: a zip has hundreds of thousands."""


class RangedShard:
    """The samples of a segment of a shard that is read by ranges, in stored order. Its look begins at once.

    Args:
        segment: What to read.
        reading: How.

    Attributes:
        left_bytes: That did not arrive yet, once it has begun.
    """

    def __init__(self, segment: ShardSegment, *, reading: ReadOptions) -> None:
        self.segment = segment
        self.left_bytes = 0
        self._reading = reading
        self._meter = reading.meter
        self._recording = reading.recording
        self._fields = reading.fields[segment.source]
        self._contents = table_of_contents(segment, fields=self._fields, reading=reading)
        self._reader: RangedReader | None = None  # None: not begun, or the shard holds nothing
        self._chunks: Iterator[Chunk] | None = None
        self._asked: deque[PlanItem] = deque()  # whose bytes did not all arrive
        self._room: memoryview | None = None  # for one that comes in several chunks
        self._views: deque[memoryview] = deque()  # of the units that are next
        self._pieces: Iterator[Piece] | None = None  # of the unit that is being decoded
        self._unit_at = 0  # in that unit, the next sample
        self._unit = self._stop = 0  # that is next, and behind the last
        start = segment.first_sample + segment.skip_count
        self._wanted = range(start, _MANY if segment.count is None else start + segment.count)
        self._sample = 0  # number of the next unit's first sample
        self._given_count = 0
        self._saved_bytes = 0
        self._ended = self._closed = False
        self._failure: PenstockError | None = None  # to begin
        self._runs: list[ParsedRun] = []

    def begin(self) -> None:
        """Finish the look and ask for the first bytes, if that has not been done. Blocks.

        Raises:
            StoreError: as the store says.
            CorruptShardError: the shard is not of its format.
            ClosedError: by another thread.
            ConfigError: a unit is larger than half the byte budget.
        """
        if self._chunks is not None:
            return
        if self._closed:
            raise _closed()
        if self._failure is not None:
            raise self._failure
        self._find()
        self._advance()  # units without a byte
        sizes = self._reading.sizes
        self._chunks = self.segment.shard.store.read_parts(
            self._noted(self._requests()), part_bytes=sizes.part_bytes, requests_max=sizes.requests_max
        )

    def planned(self) -> list[PlanItem]:
        """What ``begin`` would ask for, without asking. Blocks for the table of contents.

        Raises:
            StoreError, CorruptShardError, ConfigError: as ``begin``.
        """
        self._find()
        return list(self._requests())

    @property
    def looked(self) -> Sequence[ByteRange]:
        """What was asked for in order to know the table of contents."""
        return self._contents.spans

    def begin_ahead(self) -> None:
        """The same before it is its turn: what is in the way is raised when it is."""
        try:
            self.begin()
        except PenstockError as error:
            self._failure = error

    def read(self) -> list[ParsedRun] | None:
        """What the next chunk completed, perhaps nothing; None at the end. Blocks.

        Raises:
            StoreError, CorruptShardError: as ``begin``, or a unit is not what the table of contents says.
        """
        if self._ended:
            return None
        if self._chunks is None:
            self.begin()
        elif self._pieces is not None:
            self._advance()
        else:
            began_s = time.perf_counter()
            chunk = next(self._chunks, None)
            self._meter.store_s += time.perf_counter() - began_s
            if chunk is not None:
                self._take(chunk)
            elif self._unit < self._stop:
                raise _closed()
        if self._unit == self._stop:  # said now: nobody may ask again
            self._ended = True
            self._end()
        runs, self._runs = self._runs, []
        return runs

    def close(self) -> None:
        """Cancel what is being read; from any thread, idempotent."""
        self._closed = True
        self._contents.close()
        if self._chunks is not None:
            self._chunks.close()  # type: ignore[attr-defined]

    def _find(self) -> None:
        """Finish the look, and choose what to read."""
        began_s = time.perf_counter()
        self._reader = self._contents.reader()
        self._meter.store_s += time.perf_counter() - began_s
        self._choose()

    def _choose(self) -> None:
        """The units in which the segment's samples lie: whole ones before it are passed over unread."""
        units = self._units
        ends, wanted = self._contents.ends, self._wanted
        self._unit = bisect_right(ends, wanted.start)
        self._sample = end = ends[self._unit - 1] if self._unit else 0
        self._stop = self._unit
        bytes_max = self.segment.shard.store.budget.bytes_max // 2
        while self._stop < len(units) and end < wanted.stop:
            size_bytes = sum(span.length_bytes for span in units[self._stop].spans)
            if size_bytes > bytes_max:
                raise ConfigError(
                    f"{self.segment.url}: a unit of {size_bytes} bytes (a row group, or a sample) is more than half of the "
                    f"budget of {2 * bytes_max} bytes",
                    hint="FetchConfig(budget_bytes_max=...), .select() fewer fields, or smaller row groups",
                )
            self.left_bytes += size_bytes
            end += units[self._stop].samples_count
            self._stop += 1
        self._check_all_lanes(self.left_bytes // max(1, self._stop - self._unit))

    def _check_all_lanes(self, unit_bytes: int) -> None:
        """Refuse what all lanes together cannot hold: each has the unit that it reads."""
        reading = self._reading
        if unit_bytes * reading.ranged_count > reading.budget_bytes:
            raise ConfigError(
                f"{self.segment.url}: units (row groups, or samples) of {unit_bytes} bytes on average, one for each of "
                f"{reading.ranged_count} lanes, are {unit_bytes * reading.ranged_count} bytes, more than the budget of "
                f"{reading.budget_bytes}",
                hint="Loader(lanes=...) with fewer, .select() fewer fields, smaller row groups, or "
                "FetchConfig(budget_bytes_max=...)",
            )

    @property
    def _units(self) -> Sequence[Unit]:
        return self._reader.units if self._reader is not None else ()

    def _requests(self) -> Iterator[PlanItem]:
        shard, sizes = self.segment.shard, self._reading.sizes
        gap_bytes = gap_bytes_of(shard)
        units = self._units
        spans = (span for unit in islice(units, self._unit, self._stop) for span in unit.spans)
        while some := list(islice(spans, COALESCED_COUNT)):
            etag, size_bytes = shard.version
            items = [PlanItem(shard.key, span=span, etag=etag, size_bytes=size_bytes) for span in some]
            yield from coalesce(items, gap_bytes=gap_bytes, length_bytes_max=sizes.part_bytes)

    def _noted(self, items: Iterator[PlanItem]) -> Iterator[PlanItem]:
        for item in items:
            self._asked.append(item)
            yield item

    def _take(self, chunk: Chunk) -> None:
        self._meter.bytes += len(chunk.data)
        item = self._asked[0]
        assert item.span is not None
        data = chunk.data
        if self._room is not None or not chunk.last:
            if self._room is None:
                room = self.segment.shard.store.budget.acquire(item.span.length_bytes, force=True)
                assert room is not None
                self._room = room.view
            at = chunk.offset_bytes - item.span.start
            self._room[at : at + len(data)] = data
            data = self._room
        if chunk.last:
            self._room = None
            self._asked.popleft()
            spans = [cut.span for cut in item.cuts] or [item.span]
            between_bytes = item.span.length_bytes - sum(span.length_bytes for span in spans)
            self._saved_bytes -= between_bytes
            self.left_bytes -= item.span.length_bytes - between_bytes
            for span in spans:
                self._views.append(data[span.start - item.span.start : span.end - item.span.start])
            self._advance()

    def _advance(self) -> None:
        """Decode the units whose bytes are here; of one that is decoded in pieces, the next of them."""
        while self._unit < self._stop:
            unit = self._units[self._unit]
            if self._pieces is None and not self._enter(unit):
                return
            stop = min(unit.samples_count, self._wanted.stop - self._sample)
            piece = next(self._pieces, None) if self._pieces is not None and self._unit_at < stop else None
            if piece is not None:
                self._give(piece.samples[: stop - self._unit_at], self._sample + self._unit_at, piece.size_bytes)
                self._unit_at += len(piece.samples)
                if self._unit_at < stop:
                    return
            elif self._unit_at < stop and self.segment.count is not None:
                self._give([LOST] * (stop - self._unit_at), self._sample + self._unit_at, 0)
            self._pieces = None
            self._unit += 1
            self._sample += unit.samples_count

    def _enter(self, unit: Unit) -> bool:
        """Begin to decode a unit, if its bytes are here."""
        assert self._reader is not None
        if len(self._views) < len(unit.spans):
            return False
        views = [self._views.popleft() for _ in unit.spans]
        self._saved_bytes += unit.size_bytes - sum(map(len, views))
        self._unit_at = max(0, self._wanted.start - self._sample)
        self._pieces = self._reader.pieces(self._unit, views, first=self._unit_at)
        return True

    def _give(self, samples: list[Sample], first: int, size_bytes: int) -> None:
        self._given_count += len(samples)
        last = self._runs[-1] if self._runs else None
        if last is not None and last.first_sample + len(last.samples) == first:
            self._runs[-1] = last._replace(
                samples=joined(last.samples, samples), size_bytes=last.size_bytes + size_bytes
            )
        else:
            self._runs.append(ParsedRun(samples, first, size_bytes))

    def _end(self) -> None:
        segment, reader = self.segment, self._reader
        if self._fields is not None:
            self._meter.saved_bytes += max(0, self._saved_bytes)
        if reader is not None and reader.skipped_error is not None:
            self._meter.skipped(segment.url, reader)
        if segment.count is not None and self._given_count < segment.count:
            if reader is None or reader.skipped_error is None:
                raise too_few(segment, self._sample)
            missing_count = segment.count - self._given_count
            self._give([LOST] * missing_count, self._wanted.stop - missing_count, 0)
        if self._recording is not None:
            noted = None if reader is None or reader.skipped_error is not None else self._recording.started(segment)
            if noted is not None:
                noted.count = self._given_count
            self._recording.ended(segment, noted)


def _closed() -> ClosedError:
    return ClosedError("the loader was closed while it was iterated")


class MetadataProbe(Generic[T]):
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
                self._shard.versions.learn(self._shard, etag=chunk.etag)
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


class TableOfContents:
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

    def __init__(self, segment: ShardSegment, *, fields: frozenset[str] | None, reading: ReadOptions) -> None:
        self.shard = segment.shard
        self.ends: Sequence[int] = ()
        self.is_closed = False
        self._segment = segment
        self._fields = fields
        self._reading = reading
        self._reader: RangedReader | None = None
        self._look: MetadataProbe[None] | None = None
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
        shard.versions.learn(shard, etag=completion.info.etag, size_bytes=completion.info.size_bytes)
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
            self._look = MetadataProbe(shard, self._reader.look(), meter=self._reading.meter)


_contents: WeakValueDictionary[Any, TableOfContents] = (
    WeakValueDictionary()
)  # by shard: each holds its own, so ids are theirs


def table_of_contents(segment: ShardSegment, *, fields: frozenset[str] | None, reading: ReadOptions) -> TableOfContents:
    """The table of contents of a segment's shard: the one that another lane holds, else a new one, asked for now."""
    segment.format = segment.format or format_of_name(segment.shard.key)
    key = (id(segment.shard), fields)
    found = _contents.get(key)
    if found is None or found.is_closed:
        found = _contents[key] = TableOfContents(segment, fields=fields, reading=reading)
    return found
