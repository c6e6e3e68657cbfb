"""The stored samples of a lane: segments of shards, cut into pieces of samples.

A segment is a whole shard, or what an index or a saved state says of it: where to begin, what to pass over, how many.
Neighbours are streamed end to end by one ``read_parts``, so that the end of a shard costs no round trip; shards that
say at their end what they hold are read by ranges (``ranges.py``).
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.config import MIB, FetchConfig, default_budget_bytes
from penstock.fetch import PARTS_PER_REQUEST, PlanItem
from penstock.formats import as_columns, narrowed
from penstock.loader.lanes.ranges import RangedShard, is_ranged
from penstock.loader.lanes.streamed import Streamed
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.formats import OnCorrupt, Sample
    from penstock.loader.lanes.recording import Recording
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
            if shard.size_bytes is None:
                info = shard.store.stat(shard.key)
                shard.size_bytes, shard.etag = info.size_bytes, shard.etag or info.etag
            end_bytes = shard.size_bytes
        spans = [ByteRange(self.offset_bytes, end_bytes)] if self.spans is None else self.spans
        return [PlanItem(shard.key, span=span, etag=shard.etag, size_bytes=shard.size_bytes) for span in spans]


class Piece(NamedTuple):
    """Samples that arrived together.

    Attributes:
        samples: In stored order.
        segment: That they belong to.
        first_sample: Number in the shard of the first of them.
        sample_bytes: Of the part that each of them keeps from being reused, on average.
    """

    samples: Sequence[Sample]
    segment: Segment
    first_sample: int
    sample_bytes: int


class Reading(NamedTuple):
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

    sizes: ReadAhead
    pinned_bytes_max: int
    on_corrupt: Sequence[OnCorrupt]
    fields: Sequence[frozenset[str] | None]
    copies: bool
    meter: Meter
    recording: Recording | None = None
    budget_bytes: int = 1 << 62
    ranged_count: int = 1


class ReadAhead(NamedTuple):
    """How each lane reads: parts of this size, so many at a time."""

    part_bytes: int
    requests_max: int


def read_ahead(lanes_count: int, fetch: FetchConfig | None, *, room_bytes: int | None = None) -> ReadAhead:
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
    return ReadAhead(max(PART_BYTES_MIN, min(part_bytes, fetch.part_bytes)), requests)


class LaneReader:
    """The samples of some segments, in stored order. Reading ahead begins at once.

    Args:
        segments: In reading order.
        reading: How.
    """

    def __init__(self, segments: Sequence[Segment], *, reading: Reading) -> None:
        self._left = deque(segments)
        self._open: deque[Streamed | RangedShard] = deque()
        self._reading = reading
        self._closed = False
        self._open_next()

    def read(self) -> list[Piece] | None:
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
            if isinstance(current, Streamed):
                self._left.extendleft(reversed(current.unread))
            self._open_next()
        pieces = [
            Piece(run.samples, current.segment, run.first_sample, run.size_bytes // len(run.samples))
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
                    self._open.append(Streamed(self._streamed(), reading=self._reading))
                return
            if len(self._open) >= self._reading.sizes.requests_max or (
                self._open and isinstance(self._open[0], Streamed)
            ):
                return
            self._open.append(RangedShard(self._left.popleft(), reading=self._reading))

    def _streamed(self) -> list[Segment]:
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


def _copied(piece: Piece) -> Piece:
    """`piece`, its members copied out of the parts, in columns; as it is where they are more than bytes and numbers."""
    columns = as_columns(piece.samples)
    return piece if columns is None else piece._replace(samples=columns, sample_bytes=0)
