"""Reading without an index: whole shards in lanes, and a cursor that says where each lane is."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.formats import FORMATS, format_of_name
from penstock.loader.lanes.feed import EpochFeed, StreamLanesFeed
from penstock.loader.lanes.lane import Lane, PinnedBytes
from penstock.loader.lanes.lane_parts import IndexedSource
from penstock.loader.lanes.reading import LaneReader
from penstock.loader.lanes.segments import PART_BYTES_MIN, ReadAheadSizes, ShardSegment
from penstock.loader.plan.request_estimate import RequestEstimator, UnknownRequestsError
from penstock.loader.position import LANE_BEGIN, IndexPosition
from penstock.types import strong_etag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.loader.lanes.feed import Batching
    from penstock.loader.lanes.segments import ReadOptions
    from penstock.loader.plan.memory import MemoryNeeds, MemoryPlan
    from penstock.loader.plan.request_estimate import RequestEstimate
    from penstock.loader.position import FeedPosition, LanePosition, RunStart, StreamPosition
    from penstock.order import StreamOrder
    from penstock.sources.shards import Shard


SIZED_COUNT = 8
"""Samples of each lane from which the size of all is estimated."""


class StreamReadPlan:
    """What this rank reads, in the order that needs no index.

    Args:
        shards: Of the data set, as listed.
        order: Of epoch 0.
        reading: How.
        holding: What that holds, once the size of samples is known.
    """

    mode = "stream"
    memory: MemoryPlan | None = None

    def __init__(
        self, shards: Sequence[Shard], *, order: StreamOrder, reading: ReadOptions, holding: MemoryNeeds
    ) -> None:
        self.order = order
        self._holding = holding
        self._shards = shards
        self.sources: Sequence[IndexedSource] = [IndexedSource(shards, [], None, None)]
        self.reading = reading

    def begin(self, epoch: int, position: FeedPosition | None, *, batching: Batching) -> EpochFeed:
        """See ``ReadPlan``."""
        assert not isinstance(position, IndexPosition)  # a state of another mode has been refused
        order = self.order.at_epoch(epoch)
        read: list[ShardSegment] = []
        lanes = self._lanes(order, position, read)
        if self.reading.recording is not None:
            self.reading.recording.begin(segment.shard for segment in read)
        feed = StreamLanesFeed(
            lanes,
            lanes_count=order.lanes_count,
            round_count=0 if position is None else position.round_count,
            turn=0 if position is None else position.turn,
            count=batching.take if position is None else position.left_count,
            window_bytes=lambda: self._checked(lanes),
        )
        return EpochFeed(feed, None)

    def divided(self, rank: int, world_size: int) -> StreamReadPlan:
        """See ``ReadPlan``; nothing is recorded of what it reads."""
        order = replace(self.order, rank=rank, world_size=world_size, lanes=self.order.lanes_configured)
        return StreamReadPlan(
            self._shards, order=order, reading=self.reading._replace(recording=None), holding=self._holding
        )

    def for_worker(self, workers_count: int) -> StreamReadPlan:
        """What one of several worker processes reads, with its share of the memory; its position says which lanes it owns."""
        return StreamReadPlan(
            self._shards, order=self.order, reading=self.reading.share(workers_count), holding=self._holding
        )

    def _checked(self, lanes: Sequence[Lane]) -> int:
        """What the window of these lanes holds, now that samples are here; a plan that the budget cannot hold is refused."""
        plan = self._holding.plan(_mean_bytes(lanes), self.reading.sizes)
        plan.check()
        return plan.window_bytes * len(lanes) // self._holding.readers_count

    def sized(self) -> tuple[float, MemoryPlan]:
        """Bytes of a sample as stored, on average, and what the rank holds: what ``begin`` checks, by the same samples.

        Raises:
            StoreError, DataError: they cannot be read.

        Cost: the first samples of each of the rank's lanes, read in parts of 256 KiB.
        """
        reading = self.reading._replace(sizes=ReadAheadSizes(PART_BYTES_MIN, 1), recording=None)
        small = StreamReadPlan(self._shards, order=self.order, reading=reading, holding=self._holding)
        lanes = small._lanes(self.order, None, [])
        try:
            for lane in lanes:
                while lane.is_waiting and len(lane.first(SIZED_COUNT)) < SIZED_COUNT:
                    lane.read_more()
            sample_bytes = _mean_bytes(lanes)
        finally:
            for lane in lanes:
                lane.close()
        return sample_bytes, self._holding.plan(sample_bytes, self.reading.sizes)

    def estimate_requests(self, *, batching: Batching) -> RequestEstimate | None:
        """See ``ReadPlan``."""
        order, asking = self.order, RequestEstimator(self.reading)
        may_end_early = order.world_size > 1 and batching.drop_last  # with the first rank that runs out
        needed = batching.take
        try:
            for turn, number in enumerate(order.lanes_owned):
                segments = [
                    ShardSegment(self._shards[shard], index) for index, shard in enumerate(order.shards_of(number))
                ]
                for segment in segments:
                    segment.format = segment.format or format_of_name(segment.shard.key)
                taken = None if needed is None else int(turn < needed)  # how long shards are, nobody knows
                asking.add_lane(segments, needed_count=1 if may_end_early and taken is None else taken)
        except UnknownRequestsError:
            return None
        return asking.total

    def batches(self, epoch: int, *, batching: Batching) -> None:
        """See ``ReadPlan``; nobody knows."""

    def _lanes(self, order: StreamOrder, position: StreamPosition | None, read: list[ShardSegment]) -> list[Lane]:
        """The rank's lanes that have something left; `read` grows by what they read."""
        pins = PinnedBytes(self.reading.pinned_bytes_max)
        lanes: list[Lane] = []
        try:
            for number in order.lanes_owned:
                if position is None or number in position.lanes:
                    begin = LANE_BEGIN if position is None else position.lanes[number]
                    lanes.append(self._lane(number, order, pins, begin, read))
        except BaseException:
            for lane in lanes:
                lane.close()
            raise
        return lanes

    def _lane(
        self, number: int, order: StreamOrder, pins: PinnedBytes, position: LanePosition, read: list[ShardSegment]
    ) -> Lane:
        """A lane; `read` grows by what it reads."""
        segments = [ShardSegment(self._shards[shard], index) for index, shard in enumerate(order.shards_of(number))]
        start, emitted_count = position
        if start.segment_index is not None:
            first = _first_segment(segments, start)
            segments = [first, *segments[first.index + 1 :]]
            start = start._replace(etag=first.shard.etag)
        read += segments
        reader = LaneReader(segments, reading=self.reading)
        return Lane(number, runs=order, reader=reader, pins=pins, start=start, skip_count=emitted_count)


def _mean_bytes(lanes: Sequence[Lane]) -> float:
    """Of the first samples of all lanes as stored, those that have arrived."""
    samples = [sample for lane in lanes for sample in lane.first(SIZED_COUNT)]
    return sum(value.nbytes for sample in samples for value in sample.fields.values()) / max(1, len(samples))


def _first_segment(segments: Sequence[ShardSegment], start: RunStart) -> ShardSegment:
    """The rest of the shard in which a run begins."""
    index, format_name = start.segment_index, start.format
    assert index is not None
    assert format_name is not None
    if not 0 <= index < len(segments):
        raise ConfigError(f"the state names shard {index} of a lane that has {len(segments)}")
    shard = segments[index].shard
    shard.versions.learn(shard, etag=strong_etag(start.etag))  # older states hold the ETag as the store wrote it
    form = FORMATS[format_name]
    if form.unit == "sample" and form.ranged is None:
        return ShardSegment(
            shard,
            index,
            offset_bytes=start.offset_bytes,
            first_sample=start.sample,
            format_name=format_name,
        )
    # the shard's table of contents tells where the run begins; a shard without one is read from its beginning again
    return ShardSegment(shard, index, skip_count=start.sample, format_name=format_name)
