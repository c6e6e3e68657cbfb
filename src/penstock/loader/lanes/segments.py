"""The segments of shards that lanes read, the samples parsed from them, and the sizes of parts.

A segment is a whole shard, or a part of one that an index or a saved state describes: where to begin, how many samples to
pass over, and how many to read.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from penstock.config import MIB, FetchConfig, default_budget_bytes
from penstock.errors import CorruptShardError
from penstock.fetch import PARTS_PER_REQUEST, PlanItem
from penstock.formats import FORMATS, format_of_name, narrowed
from penstock.sources.shards import gap_bytes_of
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.formats import OnCorrupt, Sample
    from penstock.loader.lanes.recording import IndexRecorder
    from penstock.loader.statistics import Meter
    from penstock.sources.shards import Shard

READ_AHEAD_BYTES_MAX = 256 * MIB
"""Most bytes that all lanes together read ahead: 128 requests of 0.7 MiB cover 30 ms at 2 GB/s."""

PART_BYTES_MIN = 256 * 1024

PART_GRAIN_BYTES = 64 * 1024
"""Parts begin at multiples of this, so that numpy can read the headers of tar members as words and not byte by byte."""

REQUESTS_MAX = 24
"""Most requests of all lanes together, if there are few lanes: they give 1.3 GB/s over connections of 90 MB/s, 30 ms away.

More requests for the same bytes are slower: parsing a part takes dozens of steps whatever its size, and in each of them
another thread may get the interpreter."""

REQUESTS_PER_LANE_MIN = 2


class SampleSource(Protocol):
    """Where a sample came from: a segment of a shard, or an object."""

    @property
    def url(self) -> str:
        """URL of the shard or object, without secrets, for messages and for ``__shard__``."""

    @property
    def source(self) -> int:
        """Number of the source in a mix; 0 if there is only one source."""


SourcedSamples: TypeAlias = "tuple[Sequence[Sample], list[SampleSource]]"
"""Samples, and where each came from.

These are two lists rather than one list of pairs, because the garbage collector visits every object that can refer to
another, again and again: a window of 16 384 pairs cost 2 µs per sample."""


@dataclass(slots=True, eq=False, repr=False)
class ShardSegment:
    """Consecutive samples of one shard.

    Attributes:
        shard: The shard that holds them.
        source: Number of the source in a mix; 0 if there is only one source.
        index: Number of this segment in its lane, counted over the whole epoch.
        offset_bytes: Offset in the shard at which reading begins: 0, or where a sample or block begins.
        end_bytes: Offset at which reading ends; None: at the end of the shard.
        first_sample: Number in the shard of the first sample that is read.
        skip_count: Number of samples to read and pass over before the first that is wanted.
        count: Number of samples that are wanted; None: all to the end.
        spans: The ranges between offset and end that hold the wanted fields; None: everything.
        bounds: Looks up where the samples of the shard begin and end, int64[samples + 1]; None: no index says it.
        format: A name in ``formats``, as the user says it, else as the index or a state does; None: the first bytes tell. If
            it leaves open what records hold, it is completed once the first sample has been read.
        url: URL of the shard, without secrets.
    """

    shard: Shard
    index: int
    _: KW_ONLY
    offset_bytes: int = 0
    first_sample: int = 0
    skip_count: int = 0
    count: int | None = None
    bounds: Callable[[], Any] | None = None
    format: str | None = None
    source: int = 0
    end_bytes: int | None = None
    spans: Sequence[ByteRange] | None = None
    url: str = field(init=False)

    def __post_init__(self) -> None:
        self.format = narrowed(self.shard.format, self.format)
        self.url = self.shard.url

    @property
    def is_whole(self) -> bool:
        """Whether the shard is read from its first byte to its last."""
        return not self.offset_bytes and self.end_bytes is None

    @property
    def etag(self) -> str | None:
        """ETag of the shard; None if it is not known or the store has none."""
        return self.shard.etag

    def plan_items(self) -> list[PlanItem]:
        """The request to the store. Cost: a HEAD if the end of the shard is needed and not known."""
        shard = self.shard
        if self.is_whole and self.spans is None:
            return [PlanItem(shard.key, etag=shard.etag, size_bytes=shard.size_bytes)]
        end_bytes = self.end_bytes
        if end_bytes is None:
            end_bytes = shard.size_bytes
        if end_bytes is None:
            info = shard.store.stat(shard.key)
            shard.learn(etag=info.etag, size_bytes=info.size_bytes)
            end_bytes = info.size_bytes
        spans = [ByteRange(self.offset_bytes, end_bytes)] if self.spans is None else self.spans
        etag, size_bytes = shard.version
        return [PlanItem(shard.key, span=span, etag=etag, size_bytes=size_bytes) for span in spans]


def is_ranged(segment: ShardSegment) -> bool:
    """Whether the shard of a segment is read by ranges.

    A shard that is no longer than a gap to read through is streamed, which takes one request less.
    """
    name = segment.format or format_of_name(segment.shard.key)
    if name is None or name not in FORMATS or FORMATS[name].ranged is None:
        return False
    shard = segment.shard
    return shard.size_bytes is None or shard.size_bytes > gap_bytes_of(shard)


def missing_samples_error(segment: ShardSegment, found_count: int) -> CorruptShardError:
    """The error for a shard that has fewer samples than its index says.

    Args:
        segment: Segment that was to be read.
        found_count: Number of samples that the shard has.
    """
    indexed_count = segment.first_sample + segment.skip_count + (segment.count or 0)
    return CorruptShardError(
        f"its index says that it has at least {indexed_count} samples, but it has {found_count}",
        hint="run `penstock index --again`, or read without an index: Loader(index='stream')",
        shard=segment.url,
    )


@dataclass(frozen=True, slots=True)
class ReaderSegment:
    """All samples of an epoch of a reader, which lie in no shard."""

    url: str
    source: int = 0
    index: int = 0
    format: str | None = None
    etag: str | None = None


class ParsedSamples(NamedTuple):
    """Consecutive samples of a segment that arrived together.

    Attributes:
        samples: The samples, in stored order.
        segment: The segment that they belong to.
        first_sample: Number in the shard of the first of them.
        size_bytes: Size of the memory that they keep from being reused: the part that they are slices of.
    """

    samples: Sequence[Sample]
    segment: ShardSegment | ReaderSegment
    first_sample: int
    size_bytes: int

    @property
    def sample_bytes(self) -> int:
        """Mean size of the memory that a sample keeps from being reused."""
        return self.size_bytes // len(self.samples)


class ReadOptions(NamedTuple):
    """The settings with which all lanes of a loader read.

    Attributes:
        sizes: Size of parts, and number of requests, of each lane.
        pinned_bytes_max: Most bytes of parts that samples may keep alive while they wait in runs.
        on_corrupt: Policy for corrupt bytes, by source.
        fields: Fields to read, by source, if others can be left out; None: all.
        copies: Whether samples are copied out of the parts as they arrive. If nothing decodes them, their members have to be
            copied once in any case; on arrival they are in the processor's cache, and no slice keeps a part alive.
        meter: Counts bytes and the seconds that the store and the parsers take.
        recording: Makes an index of what whole shards turn out to hold; None: there is one, or none is wanted.
        budget_bytes: Memory budget of the rank.
        ranged_count: Number of lanes that may read a shard by ranges at the same time; each holds one unit.
        in_columns: Whether tables are read in columns, because no stage needs single samples.
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
    in_columns: bool = False

    def share(self, workers_count: int) -> ReadOptions:
        """The settings of one of several worker processes: an equal share of the memory."""
        return self._replace(pinned_bytes_max=self.pinned_bytes_max // workers_count)

    def apart(self) -> ReadOptions:
        """Settings of lanes that run beside others of this process: they share no table of contents, and record no index."""
        return self._replace(recording=None)


class ReadAheadSizes(NamedTuple):
    """The read-ahead of each lane.

    Attributes:
        part_bytes: Size of a part.
        requests_max: Most parts that are requested at a time.
    """

    part_bytes: int
    requests_max: int


def lane_read_ahead_sizes(
    lanes_count: int, fetch: FetchConfig | None, *, room_bytes: int | None = None
) -> ReadAheadSizes:
    """Sizes with which the parts of all lanes fit into a quarter of the memory budget, and into `room_bytes` if they can.

    Few lanes read with many large requests each, and many lanes with two small ones, because the first batch of an epoch
    waits for one part of every lane.

    Args:
        lanes_count: Number of lanes of all sources.
        fetch: Bounds for reading; None: the defaults.
        room_bytes: Bytes of the budget that the window and the batches do not need; None is as many as are needed.
    """
    fetch = fetch or FetchConfig()
    bytes_max = min(READ_AHEAD_BYTES_MAX, (fetch.budget_bytes_max or default_budget_bytes()) // 4)
    bytes_max = bytes_max if room_bytes is None else min(bytes_max, room_bytes)
    requests = min(fetch.requests_max, max(REQUESTS_PER_LANE_MIN, REQUESTS_MAX // max(lanes_count, 1)))
    part_bytes = bytes_max // (max(lanes_count, 1) * requests * PARTS_PER_REQUEST)
    part_bytes = part_bytes // PART_GRAIN_BYTES * PART_GRAIN_BYTES
    return ReadAheadSizes(max(PART_BYTES_MIN, min(part_bytes, fetch.part_bytes)), requests)
