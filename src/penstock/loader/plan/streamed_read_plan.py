"""Reading without an index: lanes stream whole shards, and a position says how far each lane is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from penstock.errors import ConfigError
from penstock.formats import FORMATS, format_of_name
from penstock.loader.lanes.feed import OpenedFeed, StreamLanesFeed
from penstock.loader.lanes.lane import Lane, PinnedBytes
from penstock.loader.lanes.lane_reader import LaneReader
from penstock.loader.lanes.segments import PART_BYTES_MIN, ReadAheadSizes, ShardSegment
from penstock.loader.plan.request_estimate import RequestEstimator, UnknownRequestsError
from penstock.loader.plan.uncounted_read_plan import SIZED_COUNT, UncountedReadPlan, mean_bytes
from penstock.loader.position import LANE_BEGIN, IndexPosition
from penstock.types import strong_etag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.loader.batching import Batching
    from penstock.loader.plan.memory import MemoryPlan
    from penstock.loader.plan.request_estimate import RequestEstimate
    from penstock.loader.position import FeedPosition, LanePosition, RunStart, StreamPosition
    from penstock.order import StreamOrder
    from penstock.sources.shards import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedReadPlan(UncountedReadPlan):
    """The part of a data set without an index that this rank reads."""

    mode: ClassVar[str] = "stream"

    @property
    def _shards(self) -> Sequence[Shard]:
        return self.source.shards

    def begin(self, epoch: int, position: FeedPosition | None, *, batching: Batching) -> OpenedFeed:
        """The samples of an epoch from a position on; None is the beginning of the epoch.

        Raises:
            ConfigError: A lane has no such shard.
        """
        assert not isinstance(position, IndexPosition)  # a state of another mode has been refused
        order = self.order.at_epoch(epoch)
        lanes, segments = self._lanes(order, position)
        if self.reading.recording is not None:
            self.reading.recording.begin_epoch(segment.shard for segment in segments)
        feed = StreamLanesFeed(
            lanes,
            lanes_count=order.lanes_count,
            round_count=0 if position is None else position.round_count,
            turn=0 if position is None else position.turn,
            count=batching.take_count if position is None else position.remaining_count,
            window_bytes=lambda: self._window_bytes(lanes),
        )
        return OpenedFeed(feed, None)

    def for_worker(self, workers_count: int) -> StreamedReadPlan:
        """The part of one worker process, with its share of the memory. Its position names the lanes that it owns."""
        return replace(self, reading=self.reading.share(workers_count))

    def for_rank(self, rank: int, world_size: int) -> StreamedReadPlan:
        """The part of a rank in a world of any size, to be read beside this one."""
        order = replace(self.order, rank=rank, world_size=world_size, lanes=self.order.lanes_configured)
        return replace(self, order=order, reading=self.reading.apart())

    def sized(self) -> tuple[float, MemoryPlan]:
        """The mean size of a sample as stored, in bytes, and the memory of the rank, as ``begin`` estimates them.

        Raises:
            StoreError, DataError: The first samples cannot be read.

        Cost: the first samples of each of the rank's lanes, read in parts of 256 KiB.
        """
        reading = self.reading._replace(sizes=ReadAheadSizes(PART_BYTES_MIN, 1), recording=None)
        lanes, _ = replace(self, reading=reading)._lanes(self.order, None)
        try:
            for lane in lanes:
                while lane.is_waiting and len(lane.first(SIZED_COUNT)) < SIZED_COUNT:
                    lane.read_more()
            sample_bytes = mean_bytes(lanes)
        finally:
            for lane in lanes:
                lane.close()
        return sample_bytes, self.needs.plan(sample_bytes, self.reading.sizes)

    def estimate_requests(self, *, batching: Batching) -> RequestEstimate | None:
        """The requests of the rank's first epoch; None if they are known only after reading."""
        order, estimator = self.order, RequestEstimator(self.reading)
        may_end_early = order.world_size > 1 and batching.drop_last  # all ranks stop when the first one runs out
        needed = batching.take_count
        try:
            for turn, number in enumerate(order.lanes_owned):
                segments = [
                    ShardSegment(self._shards[shard], index) for index, shard in enumerate(order.shards_of(number))
                ]
                for segment in segments:
                    segment.format = segment.format or format_of_name(segment.shard.key)
                taken = None if needed is None else int(turn < needed)  # the lengths of shards are not known
                estimator.add_lane(segments, needed_count=1 if may_end_early and taken is None else taken)
        except UnknownRequestsError:
            return None
        return estimator.total

    def _lanes(self, order: StreamOrder, position: StreamPosition | None) -> tuple[list[Lane], list[ShardSegment]]:
        """The lanes of the rank that are not empty at `position`, and the segments that all of them read.

        Args:
            order: Order of the epoch.
            position: Position at which the lanes begin; None is the beginning of the epoch.
        """
        pins = PinnedBytes(self.reading.pinned_bytes_max)
        lanes: list[Lane] = []
        segments: list[ShardSegment] = []
        try:
            for number in order.lanes_owned:
                if position is None or number in position.lanes:
                    begin = LANE_BEGIN if position is None else position.lanes[number]
                    lane, lane_segments = self._lane(number, order, pins, begin)
                    lanes.append(lane)
                    segments += lane_segments
        except BaseException:
            for lane in lanes:
                lane.close()
            raise
        return lanes, segments

    def _lane(
        self, number: int, order: StreamOrder, pins: PinnedBytes, position: LanePosition
    ) -> tuple[Lane, list[ShardSegment]]:
        """A lane, and the segments that it reads."""
        segments = [ShardSegment(self._shards[shard], index) for index, shard in enumerate(order.shards_of(number))]
        start, given_count = position
        if start.segment_index is not None:
            first = _first_segment(segments, start)
            segments = [first, *segments[first.index + 1 :]]
            start = start._replace(etag=first.shard.etag)
        reader = LaneReader(segments, reading=self.reading)
        lane = Lane(number, runs=order, reader=reader, pins=pins, start=start, given_count=given_count)
        return lane, segments


def _first_segment(segments: Sequence[ShardSegment], start: RunStart) -> ShardSegment:
    """The rest of the shard in which a run begins."""
    index, format_name = start.segment_index, start.format
    assert index is not None
    assert format_name is not None
    if not 0 <= index < len(segments):
        raise ConfigError(f"the state names shard {index} of a lane that has {len(segments)}")
    shard = segments[index].shard
    shard.learn(etag=strong_etag(start.etag))  # older states hold the ETag as the store wrote it
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
