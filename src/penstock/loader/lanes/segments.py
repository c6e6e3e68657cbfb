"""What lanes read, and how: segments of shards, pieces of their samples, and the sizes of parts.

A segment is a whole shard, or what an index or a saved state says of it: where to begin, what to pass over, how many.
Neighbours are streamed end to end by one ``read_parts``, so that the end of a shard costs no round trip; shards that
say at their end what they hold are read by ranges (``ranges.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from penstock.config import MIB, FetchConfig, default_budget_bytes
from penstock.errors import CorruptShardError
from penstock.fetch import PARTS_PER_REQUEST, PlanItem
from penstock.formats import FORMATS, format_of_name, narrowed
from penstock.sources.selecting import gap_bytes_of
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.formats import OnCorrupt, Sample
    from penstock.loader.lanes.recording import IndexRecorder
    from penstock.loader.statistics import Meter
    from penstock.sources.shards import Shard

READ_AHEAD_BYTES_MAX = 256 * MIB  # all lanes together; 128 requests of 0.7 MiB cover 30 ms at 2 GB/s
PART_BYTES_MIN = 256 * 1024
PART_GRAIN_BYTES = 64 * 1024
"""Parts begin at multiples of it: headers of tar members then lie where numpy reads them as words, not byte by byte."""
REQUESTS_MAX = 24
"""Of all lanes together, where there are few: 1.3 GB/s over connections of 90 MB/s, 30 ms away. Not more, of the same bytes
in all: a part is taken apart in dozens of steps, in each of which another thread may get the interpreter, whatever its size."""
REQUESTS_PER_LANE_MIN = 2


class SampleSource(Protocol):
    """Where a sample came from: a ``ShardSegment`` of a shard, or an object."""

    @property
    def url(self) -> str:
        """For people, and for ``__shard__``."""

    @property
    def source(self) -> int:
        """Number of the source in a mix; 0 where there is one."""


SourcedSamples: TypeAlias = "tuple[Sequence[Sample], list[SampleSource]]"
"""Samples on their way, and where each came from. Two lists and no pairs: the garbage collector visits every object that
can refer to another, again and again, and a window of 16 384 pairs cost 2 µs per sample."""


class ShardSegment:
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
        spans: Of the bytes from offset to end, those that hold wanted fields; None: all of them.
        bounds: Looks up where the shard's samples begin and end, int64[samples + 1]; None: no index says.
        format: Name in ``formats``: as the user says it, else as the index or a state does; None: to be found from the
            first bytes. Where it leaves open what records hold, reading says it from the first sample on.
    """

    __slots__ = (
        "bounds",
        "count",
        "end_bytes",
        "first_sample",
        "format",
        "index",
        "offset_bytes",
        "shard",
        "skip_count",
        "source",
        "spans",
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
        spans: Sequence[ByteRange] | None = None,
        bounds: Callable[[], Any] | None = None,
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
        self.spans = spans
        self.bounds = bounds
        self.format = narrowed(shard.format, format_name)
        self.url = shard.url

    @property
    def is_whole(self) -> bool:
        """Whether the shard is read from its first byte to its last."""
        return not self.offset_bytes and self.end_bytes is None

    def plan_items(self) -> list[PlanItem]:
        """What to ask the store for."""
        shard = self.shard
        if self.is_whole and self.spans is None:
            return [PlanItem(shard.key, etag=shard.etag, size_bytes=shard.size_bytes)]
        end_bytes = self.end_bytes
        if end_bytes is None:
            end_bytes = shard.size_bytes
        if end_bytes is None:
            info = shard.store.stat(shard.key)
            shard.versions.learn(shard, etag=info.etag, size_bytes=info.size_bytes)
            end_bytes = info.size_bytes
        spans = [ByteRange(self.offset_bytes, end_bytes)] if self.spans is None else self.spans
        etag, size_bytes = shard.version
        return [PlanItem(shard.key, span=span, etag=etag, size_bytes=size_bytes) for span in spans]


def is_ranged(segment: ShardSegment) -> bool:
    """Whether its shard is read by ranges: one that is no longer than a gap is read whole, in one request less."""
    name = segment.format or format_of_name(segment.shard.key)
    if name is None or name not in FORMATS or FORMATS[name].ranged is None:
        return False
    shard = segment.shard
    return shard.size_bytes is None or shard.size_bytes > gap_bytes_of(shard)


def too_few(segment: ShardSegment, there_count: int) -> CorruptShardError:
    """The error for a shard of which an index says more samples than are there."""
    said_count = segment.first_sample + segment.skip_count + (segment.count or 0)
    return CorruptShardError(
        f"its index says that it has {said_count} samples, {there_count} were there",
        hint="run `penstock index --again`, or read without an index: Loader(index='stream')",
        shard=segment.url,
    )


class ParsedSamples(NamedTuple):
    """Samples that arrived together.

    Attributes:
        samples: In stored order.
        segment: That they belong to.
        first_sample: Number in the shard of the first of them.
        sample_bytes: Of the part that each of them keeps from being reused, on average.
    """

    samples: Sequence[Sample]
    segment: ShardSegment
    first_sample: int
    sample_bytes: int


class ParsedRun(NamedTuple):
    """Consecutive samples that arrived together; `first_sample`: number in the shard of the first of them."""

    samples: Sequence[Sample]
    first_sample: int
    size_bytes: int


class ReadOptions(NamedTuple):
    """What all lanes of a loader read with.

    Attributes:
        sizes: Parts and requests of each.
        pinned_bytes_max: Of parts that samples may keep while they wait in runs.
        on_corrupt: What to do with corrupt bytes, by source.
        fields: That are read where others can be left out, by source; None: all.
        copies: Whether samples are copied out of the parts as they arrive: where nobody decodes them, their members are
            copied once in any case, now they are in the processor's cache, and nothing waits as a slice of a part.
        meter: Told of bytes, store and parse time.
        recording: Keeps what is found out about whole shards; None: an index knows it, or nobody wants it.
        budget_bytes: That the rank may hold.
        ranged_count: Lanes that may read a unit by its ranges at a time, and hold it.
    """

    sizes: ReadAheadSizes
    pinned_bytes_max: int
    on_corrupt: Sequence[OnCorrupt]
    fields: Sequence[frozenset[str] | None]
    copies: bool
    meter: Meter
    recording: IndexRecorder | None = None
    budget_bytes: int = 1 << 62
    ranged_count: int = 1

    def share(self, workers_count: int) -> ReadOptions:
        """What one of several worker processes reads with: an equal share of the memory."""
        return self._replace(pinned_bytes_max=self.pinned_bytes_max // workers_count)


class ReadAheadSizes(NamedTuple):
    """How each lane reads: parts of this size, so many at a time."""

    part_bytes: int
    requests_max: int


def read_ahead(lanes_count: int, fetch: FetchConfig | None, *, room_bytes: int | None = None) -> ReadAheadSizes:
    """Sizes with which all lanes' parts fit into a quarter of the byte budget, and into `room_bytes` as far as they can.

    Few lanes read with many large requests each, many lanes with two small ones: the first batch of an epoch waits for
    one part of every lane.
    """
    fetch = fetch or FetchConfig()
    bytes_max = min(READ_AHEAD_BYTES_MAX, (fetch.budget_bytes_max or default_budget_bytes()) // 4)
    bytes_max = bytes_max if room_bytes is None else min(bytes_max, room_bytes)
    requests = min(fetch.requests_max, max(REQUESTS_PER_LANE_MIN, REQUESTS_MAX // max(lanes_count, 1)))
    part_bytes = bytes_max // (max(lanes_count, 1) * requests * PARTS_PER_REQUEST)
    part_bytes = part_bytes // PART_GRAIN_BYTES * PART_GRAIN_BYTES
    return ReadAheadSizes(max(PART_BYTES_MIN, min(part_bytes, fetch.part_bytes)), requests)
