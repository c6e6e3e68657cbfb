"""The stored samples of a lane: segments of shards streamed end to end, cut into pieces of samples.

A lane's segments are read one after the other by one ``read_parts``, so that the end of a shard costs no round trip.
A segment is a whole shard, or what an index or a saved state says of it: where to begin, what to pass over, how many.
"""

from __future__ import annotations

import time
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from penstock.config import MIB, FetchConfig, default_budget_bytes
from penstock.errors import CorruptShardError
from penstock.fetch import PlanItem
from penstock.formats import detect, feed_in_pieces, parser_of
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.fetch import Chunk
    from penstock.formats import OnCorrupt, Parser, Sample
    from penstock.loader.shards import Shard
    from penstock.loader.statistics import Meter

READ_AHEAD_BYTES_MAX = 256 * MIB  # all lanes together; 128 requests of 0.7 MiB cover 30 ms at 2 GB/s
PART_BYTES_MIN = 256 * 1024
REQUESTS_MAX = 32  # of all lanes together, where there are few
REQUESTS_PER_LANE_MIN = 2
PARTS_PER_REQUEST = 3  # that `fetch` keeps for each request in flight: one on its way, two waiting


class Segment:
    """Consecutive samples of one shard.

    Attributes:
        shard: That they lie in.
        source: Number of the source in a mix; 0 where there is one.
        index: Of this segment in its lane, counted over the whole epoch.
        offset_bytes: Where in the shard reading begins; 0, or where a sample or block does.
        end_bytes: Where it ends; None is the shard's end.
        first_sample: Number in the shard of the first sample that is read there.
        skip_count: Samples to read and pass over before the first that is wanted.
        count: Samples wanted; None: all to the end.
        format: Name in ``formats``; None: to be found from the first bytes.
    """

    __slots__ = (
        "count",
        "end_bytes",
        "first_sample",
        "format",
        "index",
        "offset_bytes",
        "shard",
        "skip_count",
        "source",
        "url",
    )

    def __init__(
        self,
        shard: Shard,
        index: int,
        *,
        offset_bytes: int = 0,
        end_bytes: int | None = None,
        first_sample: int = 0,
        skip_count: int = 0,
        count: int | None = None,
        format_name: str | None = None,
        source: int = 0,
    ) -> None:
        self.shard = shard
        self.source = source
        self.index = index
        self.offset_bytes = offset_bytes
        self.end_bytes = end_bytes
        self.first_sample = first_sample
        self.skip_count = skip_count
        self.count = count
        self.format = format_name
        self.url = shard.url

    @property
    def is_whole(self) -> bool:
        """Whether the shard is read from its first byte to its last."""
        return not self.offset_bytes and self.end_bytes is None

    def plan_item(self) -> PlanItem:
        """What to ask the store for."""
        shard = self.shard
        if self.is_whole:
            return PlanItem(shard.key, etag=shard.etag, size_bytes=shard.size_bytes)
        end_bytes = self.end_bytes
        if end_bytes is None:
            if shard.size_bytes is None:
                info = shard.store.stat(shard.key)
                shard.size_bytes, shard.etag = info.size_bytes, shard.etag or info.etag
            end_bytes = shard.size_bytes
        return PlanItem(
            shard.key, span=ByteRange(self.offset_bytes, end_bytes), etag=shard.etag, size_bytes=shard.size_bytes
        )


class Piece(NamedTuple):
    """Samples that arrived together.

    Attributes:
        samples: In stored order.
        segment: That they belong to.
        first_sample: Number in the shard of the first of them.
        sample_bytes: Of the part that each of them keeps from being reused, on average.
    """

    samples: list[Sample]
    segment: Segment
    first_sample: int
    sample_bytes: int


class Reading(NamedTuple):
    """What all lanes of a loader read with.

    Attributes:
        sizes: Parts and requests of each.
        pinned_bytes_max: Of parts that samples may keep while they wait in runs.
        on_corrupt: What to do with corrupt bytes, by source.
        copies: Whether samples are copied out of the parts as they arrive: where nobody decodes them, their members are
            copied once in any case, now they are in the processor's cache, and nothing waits as a slice of a part.
        meter: Told of bytes, store and parse time.
    """

    sizes: ReadAhead
    pinned_bytes_max: int
    on_corrupt: Sequence[OnCorrupt]
    copies: bool
    meter: Meter


class ReadAhead(NamedTuple):
    """How each lane reads: parts of this size, so many at a time."""

    part_bytes: int
    requests_max: int


def read_ahead(lanes_count: int, fetch: FetchConfig | None) -> ReadAhead:
    """Sizes with which all lanes' parts fit into a quarter of the byte budget.

    Few lanes read with many large requests each, many lanes with two small ones: the first batch of an epoch waits for
    one part of every lane.
    """
    fetch = fetch or FetchConfig()
    bytes_max = min(READ_AHEAD_BYTES_MAX, (fetch.budget_bytes_max or default_budget_bytes()) // 4)
    requests = min(fetch.requests_max, max(REQUESTS_PER_LANE_MIN, REQUESTS_MAX // max(lanes_count, 1)))
    part_bytes = bytes_max // (max(lanes_count, 1) * requests * PARTS_PER_REQUEST)
    return ReadAhead(max(PART_BYTES_MIN, min(part_bytes, fetch.part_bytes)), requests)


class LaneReader:
    """The samples of some segments, in stored order. Reading ahead begins at once.

    Args:
        segments: In reading order.
        reading: How.
    """

    def __init__(self, segments: Sequence[Segment], *, reading: Reading) -> None:
        # usually one group; shards of several stores are read store by store
        self._groups = [list(group) for _, group in groupby(segments, key=attrgetter("shard.store"))]
        self._sizes = reading.sizes
        self._meter = reading.meter
        self._on_corrupt = reading.on_corrupt
        self._copies = reading.copies
        self._chunks: Iterator[Chunk] | None = None
        self._group: list[Segment] = []
        self._index = -1
        self._parser: Parser | None = None
        self._read_count = 0  # samples of the current segment that the parser gave, skipped ones included
        self._unsaid_bytes = 0  # of chunks in which no sample ended
        self._closed = False
        self._open_next()

    def read(self) -> list[Piece] | None:
        """What the next chunk completed, perhaps nothing; None at the end.

        Raises:
            StoreError: as the store says.
            CorruptShardError: the shard is not of its format.
            ObjectChangedError: the shard is not the version that this job began with.
        """
        if self._chunks is None:
            return None
        began_s = time.perf_counter()
        chunk = next(self._chunks, None)
        got_s = time.perf_counter()
        self._meter.store_s += got_s - began_s
        pieces: list[Piece] = []
        if chunk is None:
            self._end_segment(pieces)
            self._open_next()
        else:
            self._parse(chunk, pieces)
        self._meter.parse_s += time.perf_counter() - got_s
        return pieces

    def close(self) -> None:
        """Cancel what is being read; from any thread, idempotent."""
        self._closed = True
        close = getattr(self._chunks, "close", None)
        if close is not None:
            close()

    def _open_next(self) -> None:
        self._chunks = None
        if self._groups and not self._closed:
            self._group = self._groups.pop(0)
            self._index = -1
            self._chunks = self._group[0].shard.store.read_parts(
                [segment.plan_item() for segment in self._group],
                part_bytes=self._sizes.part_bytes,
                requests_max=self._sizes.requests_max,
            )

    def _parse(self, chunk: Chunk, pieces: list[Piece]) -> None:
        data = chunk.data
        self._meter.bytes += len(data)
        if chunk.request_index != self._index:
            self._end_segment(pieces)
            self._begin_segment(chunk)
        assert self._parser is not None
        size_bytes = len(data)
        for samples in feed_in_pieces(self._parser, data):
            self._add(samples, size_bytes, pieces)
            size_bytes = 0
        if chunk.last:
            segment = self._group[self._index]
            if segment.end_bytes is None:
                segment.shard.size_bytes = chunk.offset_bytes + len(data)
            self._end_segment(pieces)

    def _begin_segment(self, chunk: Chunk) -> None:
        self._index = chunk.request_index
        segment = self._group[self._index]
        shard = segment.shard
        if shard.etag is None:
            shard.etag = chunk.etag  # later epochs read this version, or fail
        if segment.format is None:
            segment.format = shard.format or detect(segment.url, bytes(chunk.data[:512]))
        self._parser = parser_of(
            segment.format,
            shard=segment.url,
            start_offset_bytes=segment.offset_bytes,
            on_corrupt=self._on_corrupt[segment.source],
        )
        self._read_count = 0

    def _end_segment(self, pieces: list[Piece]) -> None:
        parser, self._parser = self._parser, None
        if parser is None:
            return
        self._add(parser.finish(), 0, pieces)
        segment = self._group[self._index]
        if segment.count is not None and self._read_count < segment.skip_count + segment.count:
            raise CorruptShardError(
                f"its index says that it has {segment.first_sample + segment.skip_count + segment.count} samples, "
                f"{segment.first_sample + self._read_count} were there",
                hint="run `penstock index --again`, or read without an index: Loader(index='stream')",
                shard=segment.url,
            )
        if parser.skipped_error is not None:
            self._meter.skipped(segment.url, parser)

    def _add(self, samples: list[Sample], data_bytes: int, pieces: list[Piece]) -> None:
        """Make a piece of what is wanted of `samples`."""
        data_bytes += self._unsaid_bytes
        if not samples:
            self._unsaid_bytes = data_bytes
            return
        self._unsaid_bytes = 0
        segment = self._group[self._index]
        sample_bytes = data_bytes // len(samples)
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
        if self._copies and all(value.format == "B" for value in samples[0].fields.values()):
            sample_bytes = 0
            for sample in samples:
                fields = sample.fields
                sample.fields = dict(zip(fields, map(bytes, fields.values()), strict=True))  # type: ignore[arg-type]
        pieces.append(Piece(samples, segment, segment.first_sample + first + begin, sample_bytes))
