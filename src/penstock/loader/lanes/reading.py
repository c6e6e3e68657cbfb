"""The samples of a lane's segments, in stored order: streamed end to end, or read by ranges (``ranged.py``)."""

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
)
from penstock.loader.lanes.ranged import MetadataProbe, RangedShard
from penstock.loader.lanes.segments import ParsedRun, ParsedSamples, is_ranged, too_few

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.fetch import Chunk, PlanItem
    from penstock.formats import Parser, Sample
    from penstock.loader.lanes.recording import ShardPass
    from penstock.loader.lanes.segments import ReadOptions, ShardSegment

_FAR = 1 << 62


class LaneReader:
    """The samples of some segments, in stored order. Reading ahead begins at once.

    Args:
        segments: In reading order.
        reading: How.
    """

    def __init__(self, segments: Sequence[ShardSegment], *, reading: ReadOptions) -> None:
        self._left = deque(segments)
        self._open: deque[StreamedSegments | RangedShard] = deque()
        self._reading = reading
        self._closed = False
        self._open_next()

    def read(self) -> list[ParsedSamples] | None:
        """What the next chunk completed, perhaps nothing; None at the end.

        Raises:
            StoreError: as the store says.
            CorruptShardError: the shard is not of its format.
            ObjectChangedError: the shard is not the version that this job began with.
        """
        if not self._open:
            return None
        meter, current = self._reading.meter, self._open[0]
        began_s, stored_s = time.perf_counter(), meter.store_s
        runs = current.read()
        if runs is None:
            self._open.popleft()
            if isinstance(current, StreamedSegments):
                self._left.extendleft(reversed(current.unread))
            self._open_next()
        pieces = [
            ParsedSamples(run.samples, current.segment, run.first_sample, run.size_bytes // len(run.samples))
            for run in runs or ()
        ]
        if self._reading.copies:
            pieces = list(map(_copied, pieces))
        self._begin_ahead()
        meter.parse_s += time.perf_counter() - began_s - (meter.store_s - stored_s)
        return pieces

    def close(self) -> None:
        """Cancel what is being read; from any thread, idempotent."""
        self._closed = True
        for each in tuple(self._open):
            each.close()

    def _open_next(self) -> None:
        """Ask for the first bytes of what comes next, and for the tables of contents of the shards behind it."""
        while self._left and not self._closed:
            if not is_ranged(self._left[0]):
                if not self._open:
                    self._open.append(StreamedSegments(self._streamed(), reading=self._reading))
                return
            if len(self._open) >= self._reading.sizes.requests_max or (
                self._open and isinstance(self._open[0], StreamedSegments)
            ):
                return
            self._open.append(RangedShard(self._left.popleft(), reading=self._reading))

    def _streamed(self) -> list[ShardSegment]:
        """Segments that one reading takes: usually all; shards of several stores are read store by store."""
        segments = [self._left.popleft()]
        store = segments[0].shard.store
        while self._left and self._left[0].shard.store is store and not is_ranged(self._left[0]):
            segments.append(self._left.popleft())
        return segments

    def _begin_ahead(self) -> None:
        """Have the next shards' bytes on their way where those of the first are fewer than a lane reads ahead."""
        sizes, left_bytes = self._reading.sizes, 0
        for shard in self._open:
            if not isinstance(shard, RangedShard) or left_bytes >= sizes.part_bytes * sizes.requests_max:
                return
            shard.begin_ahead()
            left_bytes += shard.left_bytes


def _copied(piece: ParsedSamples) -> ParsedSamples:
    """`piece`, its members copied out of the parts, in columns; as it is where they are more than bytes and numbers."""
    columns = as_columns(piece.samples)
    return piece if columns is None else piece._replace(samples=columns, sample_bytes=0)


class StreamedSegments:
    """Segments that lie in one store, streamed one behind the other.

    Args:
        segments: In reading order.
        reading: How.

    Attributes:
        segment: That is being read.
        unread: Those that turned out to be read by ranges, and all behind; empty before ``read`` gave None.
    """

    def __init__(self, segments: list[ShardSegment], *, reading: ReadOptions) -> None:
        self._segments = segments
        self._meter = reading.meter
        self._on_corrupt = reading.on_corrupt
        self._copies = reading.copies
        self._recording = reading.recording
        self._noted: ShardPass | None = None  # of the segment that is being read
        self.segment = segments[0]
        self._parser: Parser | None = None
        self._places: list[tuple[int, int]] = []  # of the segment's chunks, as the parser counts bytes and in the shard
        self._read_count = 0  # samples of the current segment that the parser gave, skipped ones included
        self._bounds: Any = None  # of the segment's samples, once one was passed over
        self._unsaid_bytes = 0  # of chunks in which no sample ended
        self.unread: list[ShardSegment] = []
        self._items: list[PlanItem] = []
        self._owners: list[int] = []  # by item, its segment
        for index, segment in enumerate(segments):
            items = segment.plan_items()
            self._items += items
            self._owners += [index] * len(items)
        self._chunks = segments[0].shard.store.read_parts(
            self._items, part_bytes=reading.sizes.part_bytes, requests_max=reading.sizes.requests_max
        )
        self._looks: dict[
            int, MetadataProbe[Any]
        ] = {}  # by segment, of those that are entered behind what they need to know
        for index, segment in enumerate(segments):
            form = FORMATS.get(segment.format or "") if segment.offset_bytes else None
            look = None if form is None else form.head or form.decide
            if look is not None:
                self._looks[index] = MetadataProbe(segment.shard, look(), meter=self._meter)

    def read(self) -> list[ParsedRun] | None:
        """What the next chunk completed, perhaps nothing; None at the end."""
        began_s = time.perf_counter()
        chunk = next(self._chunks, None)
        self._meter.store_s += time.perf_counter() - began_s
        if chunk is None:
            return None
        self._meter.bytes += len(chunk.data)
        runs: list[ParsedRun] = []
        if self._parser is None and not self._begin(chunk):
            self.close()
            return None
        self._feed(chunk, runs)
        if chunk.last and self._is_last(chunk.request_index):
            segment = self._segments[self._owners[chunk.request_index]]
            if segment.end_bytes is None and segment.spans is None:
                segment.shard.versions.learn(segment.shard, size_bytes=chunk.offset_bytes + len(chunk.data))
            self._end(segment, runs)
        return runs

    def close(self) -> None:
        """Cancel what is being read; from any thread, idempotent."""
        self._chunks.close()  # type: ignore[attr-defined]
        for look in self._looks.values():
            look.close()

    def _is_last(self, item: int) -> bool:
        """Whether an item is the last of its segment's."""
        return item + 1 == len(self._owners) or self._owners[item + 1] != self._owners[item]

    def _begin(self, chunk: Chunk) -> bool:
        """Have a parser for the segment that begins with `chunk`; False where it is not to be streamed."""
        index = self._owners[chunk.request_index]
        segment = self._segments[index]
        shard = segment.shard
        shard.versions.learn(shard, etag=chunk.etag)  # later epochs read this version, or fail
        if segment.format is None:
            segment.format = self._detected(segment, chunk.data)
            if not chunk.last and is_ranged(segment):
                self.unread = self._segments[index:]
                return False
        look = self._looks.pop(index, None)
        known = None if look is None else look.finish()
        if look is not None and FORMATS[segment.format].decide is not None:
            segment.format, known = known, None
            assert segment.format is not None
        self._parser = parser_of(
            segment.format,
            shard=segment.url,
            start_offset_bytes=segment.offset_bytes if segment.spans is None else segment.spans[0].start,
            on_corrupt=self._on_corrupt[segment.source],
            head=known,
        )
        self.segment = segment
        self._noted = self._recording.started(segment) if self._recording is not None else None
        self._places = []
        self._bounds = None
        self._read_count = 0
        return True

    @property
    def _skipped(self) -> bool:
        """Whether something of the segment was passed over, where an index counts on it."""
        return self.segment.count is not None and self._parser is not None and self._parser.skipped_error is not None

    def _detected(self, segment: ShardSegment, data: memoryview) -> str:
        """The format of a shard that begins with `data`; where that is garbage its name says what is passed over."""
        try:
            return detect(segment.url, data[:HEAD_BYTES])
        except CorruptShardError:
            named = format_of_name(segment.shard.key)
            if named is None or self._on_corrupt[segment.source] == "raise":
                raise
            return named

    def _feed(self, chunk: Chunk, runs: list[ParsedRun]) -> None:
        parser = self._parser
        assert parser is not None
        if self.segment.spans is not None:
            self._places.append((parser.offset_bytes, chunk.offset_bytes))
        size_bytes = len(chunk.data)
        feed = feed_in_columns if self._copies and self.segment.spans is None else feed_in_pieces
        try:
            for samples in feed(parser, chunk.data):
                self._learn_format(parser)
                self._add(samples, size_bytes, runs)
                size_bytes = 0
        except CorruptShardError as error:
            if error.offset_bytes is not None:
                error.offset_bytes = self._place(error.offset_bytes)
            raise

    def _learn_format(self, parser: Parser) -> None:
        """Have the segment, and so a state and an index, say what the shard's first record decided."""
        if (decided := parser.decided_format) is not None:
            self.segment.format = narrowed(self.segment.shard.format, decided)
            if self._noted is not None:
                self._noted.format = decided

    def _place(self, offset_bytes: int) -> int:
        """Where in the shard lies what the parser, which was fed some spans of it, takes to lie at `offset_bytes`."""
        at = bisect_right(self._places, (offset_bytes, _FAR)) - 1
        return offset_bytes if at < 0 else offset_bytes - self._places[at][0] + self._places[at][1]

    def _end(self, segment: ShardSegment, runs: list[ParsedRun]) -> None:
        parser = self._parser
        assert parser is not None
        assert segment.format is not None
        is_cut = segment.end_bytes is not None
        if not is_cut or FORMATS[segment.format].head is None:  # a head says how many samples there are, and wants them
            self._add(parser.finish(), 0, runs)
        missing_count = 0 if segment.count is None else segment.skip_count + segment.count - self._read_count
        if missing_count > 0:
            if parser.skipped_error is None:
                raise too_few(segment, segment.first_sample + self._read_count)
            self._give([LOST] * missing_count, 0, runs)
        self._parser = None
        if parser.skipped_error is not None:
            self._meter.skipped(segment.url, parser)
        if self._recording is not None:
            self._recording.ended(segment, self._noted if parser.skipped_error is None else None)
        if segment.spans is not None:
            extent_bytes = (segment.end_bytes or segment.shard.size_bytes or 0) - segment.offset_bytes
            self._meter.saved_bytes += extent_bytes - sum(span.length_bytes for span in segment.spans)

    def _add(self, samples: Sequence[Sample], data_bytes: int, runs: list[ParsedRun]) -> None:
        """Make a piece of what is wanted of `samples`."""
        data_bytes += self._unsaid_bytes
        if not samples:
            self._unsaid_bytes = data_bytes
            return
        self._unsaid_bytes = 0
        if self._noted is not None:
            self._noted.add(samples)
        if self._places:
            for sample in samples:
                sample.offset_bytes, sample.size_bytes = self._place(sample.offset_bytes), None
        if self._skipped and self.segment.bounds is not None:
            samples = self._in_place(samples, self.segment.bounds)
        if samples:
            self._give(samples, data_bytes, runs)

    def _in_place(self, samples: Sequence[Sample], bounds: Callable[[], Any]) -> Sequence[Sample]:
        """`samples` where the index has them: others are corrupt and were passed over, ``LOST`` stands for each."""
        if self._bounds is None:
            self._bounds = bounds()
        numbers = np.searchsorted(self._bounds, [sample.offset_bytes for sample in samples], side="right") - 1
        begin = self.segment.first_sample + self._read_count
        placed: list[Sample] = []
        for number, sample in zip(numbers.tolist(), samples, strict=True):
            missing_count = number - begin - len(placed)
            if missing_count >= 0:  # else it is what recovery took for one
                placed += [LOST] * missing_count
                placed.append(sample)
        return placed

    def _give(self, samples: Sequence[Sample], data_bytes: int, runs: list[ParsedRun]) -> None:
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
        runs.append(ParsedRun(samples, segment.first_sample + first + begin, size_bytes))
