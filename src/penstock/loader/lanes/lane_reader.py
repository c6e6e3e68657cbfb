"""``LaneReader``: the samples of a lane's segments, in stored order.

Neighbouring segments are streamed by one ``read_parts``, so that the end of a shard costs no round trip. Shards with a table
of contents are read by ranges (``ranged.py``).
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import CorruptShardError
from penstock.formats import (
    FORMATS,
    HEAD_BYTES,
    LOST,
    as_columns,
    detect,
    feed_in_columns,
    feed_in_pieces,
    format_of_name,
    narrowed,
    parser_of,
    with_fields,
)
from penstock.loader.lanes.ranged import MetadataProbe, RangedShard
from penstock.loader.lanes.segments import ParsedSamples, ReaderSegment, is_ranged, missing_samples_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.fetch import Chunk, PlanItem
    from penstock.formats import Parser, Sample
    from penstock.loader.lanes.recording import ShardPass
    from penstock.loader.lanes.segments import ReadOptions, ShardSegment
    from penstock.pipeline import SequentialReader


_FAR = 1 << 62


class LaneReader:
    """Reads the samples of some segments, in stored order. Reading ahead begins at once.

    Args:
        segments: The segments, in the order in which they are read.
        reading: Options of lanes for reading.
    """

    def __init__(self, segments: Sequence[ShardSegment], *, reading: ReadOptions) -> None:
        self._remaining = deque(segments)
        self._open: deque[StreamedSegments | RangedShard] = deque()
        self._reading = reading
        self._closed = False
        self._open_next()

    def read(self) -> list[ParsedSamples] | None:
        """The samples that the next chunk completes, perhaps none; None at the end. Blocks for the chunk.

        Raises:
            StoreError: The shard cannot be read.
            CorruptShardError: The shard is not of its format.
            ObjectChangedError: The shard is not the version that this job began with.
        """
        if not self._open:
            return None
        meter, current = self._reading.meter, self._open[0]
        began_s, stored_s = time.perf_counter(), meter.store_s
        parsed = current.read()
        if parsed is None:
            self._open.popleft()
            if isinstance(current, StreamedSegments):
                self._remaining.extendleft(reversed(current.unread))
            self._open_next()
            parsed = []
        if self._reading.copies:
            parsed = list(map(_copied, parsed))
        self._request_ahead()
        meter.parse_s += time.perf_counter() - began_s - (meter.store_s - stored_s)
        return parsed

    def close(self) -> None:
        """Cancel the reads in progress; from any thread, idempotent."""
        self._closed = True
        for each in tuple(self._open):
            each.close()

    def _open_next(self) -> None:
        """Request the first bytes of the next segment, and the tables of contents of the shards after it."""
        while self._remaining and not self._closed:
            if not is_ranged(self._remaining[0]):
                if not self._open:
                    self._open.append(StreamedSegments(self._next_streamed(), reading=self._reading))
                return
            if len(self._open) >= self._reading.sizes.requests_max or (
                self._open and isinstance(self._open[0], StreamedSegments)
            ):
                return
            self._open.append(RangedShard(self._remaining.popleft(), reading=self._reading))

    def _next_streamed(self) -> list[ShardSegment]:
        """The segments that can be streamed together: usually all, otherwise those up to a shard of another store."""
        segments = [self._remaining.popleft()]
        store = segments[0].shard.store
        while self._remaining and self._remaining[0].shard.store is store and not is_ranged(self._remaining[0]):
            segments.append(self._remaining.popleft())
        return segments

    def _request_ahead(self) -> None:
        """Request bytes of the next shards as well if the first has fewer left than a lane reads ahead."""
        sizes, left_bytes = self._reading.sizes, 0
        for shard in self._open:
            if not isinstance(shard, RangedShard) or left_bytes >= sizes.part_bytes * sizes.requests_max:
                return
            shard.request_ahead()
            left_bytes += shard.left_bytes


def _copied(parsed: ParsedSamples) -> ParsedSamples:
    """The same samples in columns, copied out of their part; unchanged if their members are more than bytes and numbers."""
    columns = as_columns(parsed.samples)
    return parsed if columns is None else parsed._replace(samples=columns, size_bytes=0)


class StreamedSegments:
    """Segments in one store, streamed one after the other.

    Args:
        segments: The segments, in the order in which they are read.
        reading: Options of lanes for reading.

    Attributes:
        segment: The segment that is being read.
        unread: After ``read`` has returned None: a segment that turned out to be one to read by ranges, and all after it.
    """

    def __init__(self, segments: list[ShardSegment], *, reading: ReadOptions) -> None:
        self._segments = segments
        self._meter = reading.meter
        self._on_corrupt = reading.on_corrupt
        self._fields = reading.fields
        self._copies = reading.copies
        self._recording = reading.recording
        self.segment = segments[0]
        self.unread: list[ShardSegment] = []
        # the segment that is being read
        self._parser: Parser | None = None
        self._shard_pass: ShardPass | None = None
        self._chunk_offsets: list[tuple[int, int]] = []  # of each chunk, as the parser counts bytes, and in the shard
        self._read_count = 0  # samples that the parser gave, those to pass over included
        self._bounds: Any = None  # of the samples in the shard, once the parser has skipped one
        self._pending_bytes = 0  # of chunks in which no sample ended
        self._items: list[PlanItem] = []
        self._owners: list[int] = []  # by item, the index of its segment
        for index, segment in enumerate(segments):
            items = segment.plan_items()
            self._items += items
            self._owners += [index] * len(items)
        self._chunks = segments[0].shard.store.read_parts(
            self._items, part_bytes=reading.sizes.part_bytes, requests_max=reading.sizes.requests_max
        )
        # by segment: for those that begin after what their parser has to know of the shard's beginning
        self._probes: dict[int, MetadataProbe[Any]] = {}
        for index, segment in enumerate(segments):
            form = FORMATS.get(segment.format or "") if segment.offset_bytes else None
            look = None if form is None else form.head or form.decide
            if look is not None:
                self._probes[index] = MetadataProbe(segment.shard, look(), meter=self._meter)

    def read(self) -> list[ParsedSamples] | None:
        """The samples that the next chunk completes, perhaps none; None at the end."""
        began_s = time.perf_counter()
        chunk = next(self._chunks, None)
        self._meter.store_s += time.perf_counter() - began_s
        if chunk is None:
            return None
        self._meter.bytes += len(chunk.data)
        parsed: list[ParsedSamples] = []
        if self._parser is None and not self._begin(chunk):
            self.close()
            return None
        self._feed(chunk, parsed)
        owner, *owners_after = self._owners[chunk.request_index : chunk.request_index + 2]
        if chunk.last and owner not in owners_after:  # it was the last item of its segment
            segment = self._segments[owner]
            if segment.end_bytes is None and segment.spans is None:
                segment.shard.learn(size_bytes=chunk.offset_bytes + len(chunk.data))
            self._end(segment, parsed)
        return parsed

    def close(self) -> None:
        """Cancel the reads in progress; from any thread, idempotent."""
        self._chunks.close()  # type: ignore[attr-defined]
        for probe in self._probes.values():
            probe.close()

    def _begin(self, chunk: Chunk) -> bool:
        """Make the parser of the segment that begins with `chunk`; False if the segment has to be read by ranges."""
        index = self._owners[chunk.request_index]
        segment = self._segments[index]
        shard = segment.shard
        shard.learn(etag=chunk.etag)  # later epochs read this version, or fail
        if segment.format is None:
            segment.format = self._detected(segment, chunk.data)
            if not chunk.last and is_ranged(segment):
                self.unread = self._segments[index:]
                return False
        probe = self._probes.pop(index, None)
        head = None if probe is None else probe.finish()
        if probe is not None and FORMATS[segment.format].decide is not None:
            segment.format, head = head, None
            assert segment.format is not None
        self._parser = parser_of(
            with_fields(segment.format, self._fields[segment.source]),
            shard=segment.url,
            start_offset_bytes=segment.offset_bytes if segment.spans is None else segment.spans[0].start,
            on_corrupt=self._on_corrupt[segment.source],
            head=head,
        )
        self.segment = segment
        self._shard_pass = self._recording.begin_shard(segment) if self._recording is not None else None
        self._chunk_offsets = []
        self._bounds = None
        self._read_count = 0
        return True

    def _detected(self, segment: ShardSegment, data: memoryview) -> str:
        """The format of a shard that begins with `data`; if that is corrupt and is to be skipped, the format of its name."""
        try:
            return detect(segment.url, data[:HEAD_BYTES])
        except CorruptShardError:
            named = format_of_name(segment.shard.key)
            if named is None or self._on_corrupt[segment.source] == "raise":
                raise
            return named

    def _feed(self, chunk: Chunk, parsed: list[ParsedSamples]) -> None:
        parser = self._parser
        assert parser is not None
        if self.segment.spans is not None:
            self._chunk_offsets.append((parser.offset_bytes, chunk.offset_bytes))
        size_bytes = len(chunk.data)
        feed = feed_in_columns if self._copies and self.segment.spans is None else feed_in_pieces
        try:
            for samples in feed(parser, chunk.data):
                self._learn_format(parser)
                self._add(samples, size_bytes, parsed)
                size_bytes = 0
        except CorruptShardError as error:
            if error.offset_bytes is not None:
                error.offset_bytes = self._offset_in_shard(error.offset_bytes)
            raise

    def _learn_format(self, parser: Parser) -> None:
        """Complete the format of the segment, which states and indexes keep, once the first record has decided it."""
        if (decided := parser.decided_format) is not None:
            self.segment.format = narrowed(self.segment.shard.format, decided)
            if self._shard_pass is not None:
                self._shard_pass.format = decided

    def _offset_in_shard(self, offset_bytes: int) -> int:
        """The offset in the shard of an offset of the parser, which was fed only some spans of the shard."""
        at = bisect_right(self._chunk_offsets, (offset_bytes, _FAR)) - 1
        return offset_bytes if at < 0 else offset_bytes - self._chunk_offsets[at][0] + self._chunk_offsets[at][1]

    def _end(self, segment: ShardSegment, parsed: list[ParsedSamples]) -> None:
        parser = self._parser
        assert parser is not None
        assert segment.format is not None
        is_cut = segment.end_bytes is not None
        if not is_cut or FORMATS[segment.format].head is None:  # a head tells the parser how many samples to expect
            self._add(parser.finish(), 0, parsed)
        missing_count = 0 if segment.count is None else segment.skip_count + segment.count - self._read_count
        if missing_count > 0:
            if parser.skipped_error is None:
                raise missing_samples_error(segment, segment.first_sample + self._read_count)
            self._give([LOST] * missing_count, 0, parsed)
        self._parser = None
        if parser.skipped_error is not None:
            self._meter.skipped(segment.url, parser)
        if self._recording is not None:
            self._recording.end_shard(segment, self._shard_pass if parser.skipped_error is None else None)
        if segment.spans is not None:
            extent_bytes = (segment.end_bytes or segment.shard.size_bytes or 0) - segment.offset_bytes
            self._meter.saved_bytes += extent_bytes - sum(span.length_bytes for span in segment.spans)

    def _add(self, samples: Sequence[Sample], data_bytes: int, parsed: list[ParsedSamples]) -> None:
        """Add those of `samples` that are wanted, and which the next `data_bytes` of the shard completed."""
        data_bytes += self._pending_bytes
        if not samples:
            self._pending_bytes = data_bytes
            return
        self._pending_bytes = 0
        if self._shard_pass is not None:
            self._shard_pass.add(samples)
        if self._chunk_offsets:
            for sample in samples:
                sample.offset_bytes, sample.size_bytes = self._offset_in_shard(sample.offset_bytes), None
        skips = self._parser is not None and self._parser.skipped_error is not None
        if skips and self.segment.count is not None and self.segment.bounds is not None:
            samples = self._in_place(samples, self.segment.bounds)
        if samples:
            self._give(samples, data_bytes, parsed)

    def _in_place(self, samples: Sequence[Sample], bounds: Callable[[], Any]) -> Sequence[Sample]:
        """`samples` at their places in the index, with ``LOST`` for each sample that was corrupt and was skipped."""
        if self._bounds is None:
            self._bounds = bounds()
        numbers = np.searchsorted(self._bounds, [sample.offset_bytes for sample in samples], side="right") - 1
        begin = self.segment.first_sample + self._read_count
        placed: list[Sample] = []
        for number, sample in zip(numbers.tolist(), samples, strict=True):
            missing_count = number - begin - len(placed)
            if missing_count >= 0:  # otherwise it is none: recovery took something else for a sample
                placed += [LOST] * missing_count
                placed.append(sample)
        return placed

    def _give(self, samples: Sequence[Sample], data_bytes: int, parsed: list[ParsedSamples]) -> None:
        segment = self.segment
        sample_bytes = data_bytes / len(samples)
        first = self._read_count
        self._read_count += len(samples)
        begin = max(0, segment.skip_count - first)
        end = len(samples)
        if segment.count is not None:
            end = min(end, segment.skip_count + segment.count - first)
        if begin or end < len(samples):
            samples = samples[begin:end] if begin < end else []
        if not samples:
            return
        size_bytes = round(sample_bytes * len(samples))
        parsed.append(ParsedSamples(samples, segment, segment.first_sample + first + begin, size_bytes))


class SequentialLaneReader:
    """Reads the samples of one epoch, and passes over the first of them.

    Args:
        reader: Gives the samples.
        epoch: Epoch number, from 0.
        skip_count: Number of samples to pass over.
        reading: Options of lanes for reading.

    Raises:
        ConfigError: The reader has begun this epoch before.
    """

    def __init__(self, reader: SequentialReader, *, epoch: int, skip_count: int, reading: ReadOptions) -> None:
        self._segment = ReaderSegment(reader.name)
        self._skip_count = skip_count
        self._read_count = 0
        self._reading = reading
        self._epoch = reader.open_epoch(epoch)

    def read(self) -> list[ParsedSamples] | None:
        """The samples that arrive next, perhaps none; None at the end. Blocks for them.

        Raises:
            DataError: They are not of the reader's format.
        """
        meter, began_s = self._reading.meter, time.perf_counter()
        samples = self._epoch.read()
        meter.store_s += time.perf_counter() - began_s
        if samples is None:
            return None
        first = self._read_count
        self._read_count += len(samples)
        if first < self._skip_count:
            samples = samples[self._skip_count - first :]
            first = self._skip_count
        if not samples:
            return []
        size_bytes = sum(value.nbytes for sample in samples for value in sample.fields.values())
        meter.bytes += size_bytes
        columns = as_columns(samples) if self._reading.copies else None
        if columns is not None:
            return [ParsedSamples(columns, self._segment, first, 0)]
        return [ParsedSamples(samples, self._segment, first, size_bytes)]

    def close(self) -> None:
        """Leave the epoch; from any thread, idempotent."""
        self._epoch.close()
