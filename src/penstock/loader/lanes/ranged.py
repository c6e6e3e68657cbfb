"""Shards that are read by ranges: their table of contents says which of their bytes hold which samples and fields.

Reading the table costs a round trip or two. So the tables of all lanes, and of the next shards of each, are requested
together, and each is waited for only when its shard is next. Then only the ranges of wanted samples and fields are
requested; near ranges become one request.
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
from penstock.loader.lanes.segments import ParsedSamples, missing_samples_error
from penstock.sources.shards import gap_bytes_of
from penstock.store.inflight import InFlight
from penstock.types import ByteRange, Head

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from penstock.fetch import Chunk
    from penstock.formats import RangedReader, Sample
    from penstock.formats.ranged import DecodedPiece, Unit
    from penstock.loader.lanes.segments import ReadOptions, ShardSegment
    from penstock.loader.statistics import Meter
    from penstock.sources.shards import Shard
    from penstock.types import Buffer

T = TypeVar("T")

_MANY = 1 << 62

COALESCED_COUNT = 1024
"""Number of ranges that are merged together: a zip has hundreds of thousands."""


class RangedShard:
    """The samples of a segment of a shard that is read by ranges, in stored order. The table of contents is requested at once.

    Args:
        segment: Segment of a shard to read.
        reading: Options of lanes for reading.

    Attributes:
        segment: The segment.
        left_bytes: Number of bytes that have not arrived yet; 0 until the table of contents is there.
    """

    def __init__(self, segment: ShardSegment, *, reading: ReadOptions) -> None:
        self.segment = segment
        self.left_bytes = 0
        self._reading = reading
        self._meter = reading.meter
        self._recording = reading.recording
        self._fields = reading.fields[segment.source]
        self._contents = table_of_contents(segment, fields=self._fields, reading=reading)
        self._reader: RangedReader | None = None  # None: the table is not there, or the shard is empty
        self._chunks: Iterator[Chunk] | None = None
        self._requested: deque[PlanItem] = deque()  # those whose bytes have not all arrived
        self._room: memoryview | None = None  # for an item that comes in several chunks
        self._views: deque[memoryview] = deque()  # the spans of the next units
        self._pieces: Iterator[DecodedPiece] | None = None  # of the unit that is being decoded
        self._unit_at = 0  # index in that unit of the next sample
        self._unit = self._stop = 0  # indexes of the next unit, and after the last
        start = segment.first_sample + segment.skip_count
        self._wanted = range(start, _MANY if segment.count is None else start + segment.count)
        self._sample = 0  # number of the next unit's first sample
        self._given_count = 0
        self._saved_bytes = 0
        self._ended = self._closed = False
        self._failure: PenstockError | None = None  # of a request ahead, to be raised when the shard is next
        self._parsed: list[ParsedSamples] = []

    def request(self) -> None:
        """Request the first bytes, if that has not been done. Blocks for the table of contents.

        Raises:
            StoreError: The shard cannot be read.
            CorruptShardError: The shard is not of its format.
            ClosedError: Another thread closed the shard.
            ConfigError: A unit is larger than half the memory budget, or those of all lanes are larger than all of it.
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
            self._remembered(self._items()), part_bytes=sizes.part_bytes, requests_max=sizes.requests_max
        )

    def planned(self) -> list[PlanItem]:
        """The ranges that ``request`` would request, without requesting them. Blocks for the table of contents.

        Raises:
            StoreError, CorruptShardError, ConfigError: The same as for ``request``.
        """
        self._find()
        return list(self._items())

    @property
    def probed(self) -> Sequence[ByteRange]:
        """The ranges that were requested for the table of contents."""
        return self._contents.spans

    def request_ahead(self) -> None:
        """``request`` before the shard is next. An error is raised once it is."""
        try:
            self.request()
        except PenstockError as error:
            self._failure = error

    def read(self) -> list[ParsedSamples] | None:
        """The samples that the next chunk completes, perhaps none; None at the end. Blocks for the chunk.

        Raises:
            StoreError, ConfigError, ClosedError: The same as for ``request``.
            CorruptShardError: The same as for ``request``, or a unit does not match the table of contents.
        """
        if self._ended:
            return None
        if self._chunks is None:
            self.request()
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
        if self._unit == self._stop:  # now, because the caller may not come back
            self._ended = True
            self._end()
        parsed, self._parsed = self._parsed, []
        return parsed

    def close(self) -> None:
        """Cancel the reads in progress; from any thread, idempotent."""
        self._closed = True
        self._contents.close()
        if self._chunks is not None:
            self._chunks.close()  # type: ignore[attr-defined]

    def _find(self) -> None:
        """Wait for the table of contents, and choose the units that hold the samples of the segment."""
        began_s = time.perf_counter()
        self._reader = self._contents.reader()
        self._meter.store_s += time.perf_counter() - began_s
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
                    hint="raise FetchConfig(budget_bytes_max=...), .select() fewer fields, or write smaller row groups",
                )
            self.left_bytes += size_bytes
            end += units[self._stop].samples_count
            self._stop += 1
        reading, unit_bytes = self._reading, self.left_bytes // max(1, self._stop - self._unit)  # each lane holds one
        if unit_bytes * reading.ranged_count > reading.budget_bytes:
            raise ConfigError(
                f"{self.segment.url}: units (row groups, or samples) of {unit_bytes} bytes on average, one for each of "
                f"{reading.ranged_count} lanes, are {unit_bytes * reading.ranged_count} bytes, more than the budget of "
                f"{reading.budget_bytes}",
                hint="use fewer lanes, Loader(lanes=...), .select() fewer fields, write smaller row groups, or raise "
                "FetchConfig(budget_bytes_max=...)",
            )

    @property
    def _units(self) -> Sequence[Unit]:
        return self._reader.units if self._reader is not None else ()

    def _items(self) -> Iterator[PlanItem]:
        """The ranges to request for the chosen units."""
        shard, sizes = self.segment.shard, self._reading.sizes
        gap_bytes = gap_bytes_of(shard)
        units = self._units
        spans = (span for unit in islice(units, self._unit, self._stop) for span in unit.spans)
        while some := list(islice(spans, COALESCED_COUNT)):
            etag, size_bytes = shard.version
            items = [PlanItem(shard.key, span=span, etag=etag, size_bytes=size_bytes) for span in some]
            yield from coalesce(items, gap_bytes=gap_bytes, length_bytes_max=sizes.part_bytes)

    def _remembered(self, items: Iterator[PlanItem]) -> Iterator[PlanItem]:
        for item in items:
            self._requested.append(item)
            yield item

    def _take(self, chunk: Chunk) -> None:
        self._meter.bytes += len(chunk.data)
        item = self._requested[0]
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
            self._requested.popleft()
            spans = [cut.span for cut in item.cuts] or [item.span]
            between_bytes = item.span.length_bytes - sum(span.length_bytes for span in spans)
            self._saved_bytes -= between_bytes
            self.left_bytes -= item.span.length_bytes - between_bytes
            for span in spans:
                self._views.append(data[span.start - item.span.start : span.end - item.span.start])
            self._advance()

    def _advance(self) -> None:
        """Decode the units whose bytes are here; if a unit is decoded in pieces, only its next piece."""
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
        """Begin to decode a unit; False if its bytes are not here yet."""
        assert self._reader is not None
        if len(self._views) < len(unit.spans):
            return False
        views = [self._views.popleft() for _ in unit.spans]
        self._saved_bytes += unit.size_bytes - sum(map(len, views))
        self._unit_at = max(0, self._wanted.start - self._sample)
        self._pieces = self._reader.pieces(self._unit, views, first=self._unit_at)
        return True

    def _give(self, samples: Sequence[Sample], first: int, size_bytes: int) -> None:
        self._given_count += len(samples)
        last = self._parsed[-1] if self._parsed else None
        if last is not None and last.first_sample + len(last.samples) == first:
            self._parsed[-1] = last._replace(
                samples=joined(last.samples, samples), size_bytes=last.size_bytes + size_bytes
            )
        else:
            self._parsed.append(ParsedSamples(samples, self.segment, first, size_bytes))

    def _end(self) -> None:
        segment, reader = self.segment, self._reader
        if self._fields is not None:
            self._meter.saved_bytes += max(0, self._saved_bytes)
        if reader is not None and reader.skipped_error is not None:
            self._meter.skipped(segment.url, reader)
        if segment.count is not None and self._given_count < segment.count:
            if reader is None or reader.skipped_error is None:
                raise missing_samples_error(segment, self._sample)
            missing_count = segment.count - self._given_count
            self._give([LOST] * missing_count, self._wanted.stop - missing_count, 0)
        if self._recording is not None:
            is_complete = reader is not None and reader.skipped_error is None
            shard_pass = self._recording.begin_shard(segment) if is_complete else None
            if shard_pass is not None:
                shard_pass.count = self._given_count
            self._recording.end_shard(segment, shard_pass)


def _closed() -> ClosedError:
    return ClosedError("the loader was closed while it was iterated")


class MetadataProbe(Generic[T]):
    """The table of contents of a shard, which its format needs first: requested at once, and waited for later.

    Args:
        shard: The shard.
        steps: Yields spans, is sent their bytes, and returns the metadata.
        meter: Counts bytes.

    Attributes:
        spans: The ranges that were requested so far.
    """

    def __init__(self, shard: Shard, steps: Generator[ByteRange, Buffer, T], *, meter: Meter) -> None:
        self._shard = shard
        self._steps = steps
        self._meter = meter
        self.spans: list[ByteRange] = []
        self._chunks = self._request(next(steps))

    def finish(self) -> T:
        """The metadata. Blocks.

        Raises:
            StoreError: The shard cannot be read.
            CorruptShardError: The shard is not of its format.
        """
        while True:
            parts: list[Buffer] = []
            for chunk in self._chunks:
                self._shard.learn(etag=chunk.etag)
                self._meter.bytes += len(chunk.data)
                parts.append(chunk.data)
            if not parts:
                raise _closed()
            try:
                span = self._steps.send(parts[0] if len(parts) == 1 else b"".join(parts))
            except StopIteration as stop:
                metadata: T = stop.value
                return metadata
            self._chunks = self._request(span)

    def close(self) -> None:
        """Cancel the reads in progress; from any thread, idempotent."""
        self._chunks.close()  # type: ignore[attr-defined]

    def _request(self, span: ByteRange) -> Iterator[Chunk]:
        shard = self._shard
        self.spans.append(span)
        return shard.store.read_parts([PlanItem(shard.key, span=span, etag=shard.etag, size_bytes=shard.size_bytes)])


class TableOfContents:
    """The table of contents of a shard, requested at once.

    Args:
        segment: A segment of the shard.
        fields: Fields to read; None: all.
        reading: Options of lanes for reading.

    Attributes:
        shard: The shard.
        ends: int[units]: for each unit, the number of samples up to its end; empty until ``reader()`` has returned.
        is_closed: Whether it was closed before it had arrived.

    Cost: the memory of the table that the format keeps, e.g. 550 bytes per member of a zip.
    """

    def __init__(self, segment: ShardSegment, *, fields: frozenset[str] | None, reading: ReadOptions) -> None:
        self.shard = segment.shard
        self.ends: Sequence[int] = ()
        self.is_closed = False
        self._segment = segment
        self._fields = fields
        self._reading = reading
        self._reader: RangedReader | None = None
        self._probe: MetadataProbe[None] | None = None
        self._sizing: InFlight[None] | None = None
        self._failure: PenstockError | None = None
        self._has_arrived = False
        if self.shard.size_bytes is None:
            self._sizing = InFlight(self.shard.store)
            self._sizing.submit(Head(self.shard.key, self.shard.etag), None)
        else:
            self._open()

    def reader(self) -> RangedReader | None:
        """A reader that knows its units, with counters of its own; None if the shard is empty. Blocks the first time.

        Raises:
            StoreError: The shard cannot be read.
            CorruptShardError: The shard is not of its format.
        """
        if self._failure is not None:
            raise self._failure
        if not self._has_arrived:
            try:
                self._finish()
            except PenstockError as error:
                self._failure = error
                raise
            self._has_arrived = True
        return copy.copy(self._reader)

    @property
    def spans(self) -> Sequence[ByteRange]:
        """The ranges that were requested so far."""
        return self._probe.spans if self._probe is not None else ()

    def close(self) -> None:
        """Cancel the reads in progress, unless the table has arrived; from any thread, idempotent."""
        if self._has_arrived:
            return
        self.is_closed = True
        if self._probe is not None:
            self._probe.close()
        if self._sizing is not None:
            self._sizing.cancel()

    def _finish(self) -> None:
        if self._sizing is not None:
            self._learn_size(self._sizing)
        if self._reader is not None:
            if self._probe is not None:
                self._probe.finish()
            else:
                # the reader says whether a shard without a byte is one of its format
                look_into(self._reader, lambda _: b"")
            self.ends = list(accumulate(unit.samples_count for unit in self._reader.units))

    def _learn_size(self, sizing: InFlight[None]) -> None:
        shard = self.shard
        _, completion = sizing.wait()
        if completion.error is not None:
            completion.error.url = completion.error.url or shard.url
            raise completion.error
        assert completion.info is not None
        shard.learn(etag=completion.info.etag, size_bytes=completion.info.size_bytes)
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
            in_columns=self._reading.in_columns,
        )
        if shard.size_bytes:
            self._probe = MetadataProbe(shard, self._reader.look(), meter=self._reading.meter)


_contents: WeakValueDictionary[Any, TableOfContents] = WeakValueDictionary()
"""Tables by fields and by the ids of their shard and of the options with which they are read, which each keeps alive."""


def table_of_contents(segment: ShardSegment, *, fields: frozenset[str] | None, reading: ReadOptions) -> TableOfContents:
    """The table of contents of a segment's shard: the one that another lane holds, else a new one, which is requested now.

    Only lanes that read with the same `reading` share a table: one thread reads them, and closes them together.
    """
    segment.format = segment.format or format_of_name(segment.shard.key)
    key = (id(segment.shard), id(reading), fields)
    held = _contents.get(key)
    if held is None or held.is_closed:
        held = _contents[key] = TableOfContents(segment, fields=fields, reading=reading)
    return held
