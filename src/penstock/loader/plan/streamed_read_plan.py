"""Reading without an index: lanes stream whole shards, and a position says how far each lane is.

A source that can be read only from its first sample to its last is one such lane, and its position is a number of samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from penstock.errors import ConfigError
from penstock.formats import FORMATS, format_of_name
from penstock.loader.lanes.feed import LanesFeed, StreamLanesFeed
from penstock.loader.lanes.lane import Lane, PinnedBytes
from penstock.loader.lanes.lane_reader import LaneReader, SequentialLaneReader
from penstock.loader.lanes.segments import PART_BYTES_MIN, ReadAheadSizes, ShardSegment
from penstock.loader.plan.costs import RequestEstimator, UnknownRequestsError
from penstock.loader.position import LANE_BEGIN, IndexPosition, RunStart, StreamPosition
from penstock.types import strong_etag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.loader.lanes.feed import Feed
    from penstock.loader.lanes.segments import ReadOptions
    from penstock.loader.options import Batching
    from penstock.loader.plan.costs import MemoryNeeds, MemoryPlan, RequestEstimate
    from penstock.loader.position import FeedPosition
    from penstock.order import StreamOrder
    from penstock.sources.shards import DataSource


SIZED_COUNT = 8
"""Number of samples of each lane from which the size of all samples is estimated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedReadPlan:
    """The part of a data set without an index that this rank reads. Only reading tells the number and size of its samples.

    Attributes:
        source: The data set.
        order: Order of epoch 0.
        reading: Options of the lanes.
        needs: Memory that reading needs, once the size of a sample is known.
    """

    mode: ClassVar[str] = "stream"
    memory: ClassVar[None] = None  # only the first samples tell

    source: DataSource
    order: StreamOrder
    reading: ReadOptions
    needs: MemoryNeeds

    @property
    def sources(self) -> Sequence[DataSource]:
        """The source, as a list."""
        return [self.source]

    def batches(self, epoch: int, *, batching: Batching) -> None:
        """None, because the batches are known only after reading."""

    def begin(self, epoch: int, position: FeedPosition | None, *, batching: Batching) -> tuple[Feed, None]:
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
        return feed, None

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
            sample_bytes = _mean_bytes(lanes)
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
                segments = self._segments(order, number)
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
        all_segments: list[ShardSegment] = []
        try:
            for number in order.lanes_owned:
                if position is not None and number not in position.lanes:
                    continue
                start, given_count = LANE_BEGIN if position is None else position.lanes[number]
                segments = self._segments(order, number)
                if start.segment_index is not None:
                    first = _first_segment(segments, start)
                    segments = [first, *segments[first.index + 1 :]]
                    start = start._replace(etag=first.shard.etag)
                reader = LaneReader(segments, reading=self.reading)
                lanes.append(Lane(number, order=order, reader=reader, pins=pins, start=start, given_count=given_count))
                all_segments += segments
        except BaseException:
            for lane in lanes:
                lane.close()
            raise
        return lanes, all_segments

    def _segments(self, order: StreamOrder, number: int) -> list[ShardSegment]:
        """The shards of a lane, each as a whole."""
        return [ShardSegment(self.source.shards[shard], index) for index, shard in enumerate(order.shards_of(number))]

    def _window_bytes(self, lanes: Sequence[Lane]) -> int:
        """Bytes that the window of these lanes holds, estimated from their first samples.

        Raises:
            ConfigError: The memory that the rank needs exceeds its budget.
        """
        plan = self.needs.plan(_mean_bytes(lanes), self.reading.sizes)
        plan.check()
        return plan.window_bytes * len(lanes) // self.needs.readers_count


def _mean_bytes(lanes: Sequence[Lane]) -> float:
    """Mean size of the first samples of all lanes as stored, of those that have arrived."""
    samples = [sample for lane in lanes for sample in lane.first(SIZED_COUNT)]
    return sum(value.nbytes for sample in samples for value in sample.fields.values()) / max(1, len(samples))


def _first_segment(segments: Sequence[ShardSegment], start: RunStart) -> ShardSegment:
    """The rest of the shard in which a run begins."""
    index, name = start.segment_index, start.format
    assert index is not None
    assert name is not None
    if not 0 <= index < len(segments):
        raise ConfigError(f"the state names shard {index} of a lane that has {len(segments)}")
    shard = segments[index].shard
    shard.learn(etag=strong_etag(start.etag))  # older states hold the ETag as the store wrote it
    form = FORMATS[name]
    if form.unit == "sample" and form.ranged is None:
        return ShardSegment(
            shard,
            index,
            offset_bytes=start.offset_bytes,
            first_sample=start.sample,
            format=name,
        )
    # the shard's table of contents tells where the run begins; a shard without one is read from its beginning again
    return ShardSegment(shard, index, skip_count=start.sample, format=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequentialReadPlan(StreamedReadPlan):
    """The samples of a reader that gives them once per epoch, such as a pipe, as one lane of one rank.

    All runs of a lane have the same length, so a number of samples is a position.
    """

    mode: ClassVar[str] = "sequential"

    def begin(self, epoch: int, position: FeedPosition | None, *, batching: Batching) -> tuple[Feed, None]:
        """The samples of an epoch from a position on; None is the beginning of the epoch.

        Raises:
            ConfigError: The reader has begun this epoch before.

        Cost: reads all samples before the position, and decodes none of them.
        """
        assert not isinstance(position, StreamPosition)  # a state of another mode has been refused
        reader = self.source.reader
        assert reader is not None
        taken = 0 if position is None else position.position
        order = self.order.at_epoch(epoch)
        run_index, given_count = divmod(taken, order.run_length(0, 0))
        before_count = taken - given_count
        lane = Lane(
            0,
            order=order,
            reader=SequentialLaneReader(reader, epoch=epoch, skip_count=before_count, reading=self.reading),
            pins=PinnedBytes(self.reading.pinned_bytes_max),
            start=RunStart(run_index, None, 0, 0, before_count),
            given_count=given_count,
        )
        feed = LanesFeed(
            [lane],
            lanes_count=1,
            round_count=taken,
            count=None if batching.take_count is None else max(0, batching.take_count - taken),
            window_bytes=lambda: self._window_bytes([lane]),
        )
        return feed, None

    def estimate_requests(self, *, batching: Batching) -> None:
        """None, because the reader makes the requests."""

    def for_rank(self, rank: int, world_size: int) -> SequentialReadPlan:
        """The same plan: there is only one rank."""
        assert (rank, world_size) == (0, 1)  # the planner has refused other ranks
        return self
