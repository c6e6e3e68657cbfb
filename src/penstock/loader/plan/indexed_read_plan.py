"""Reading with an index: any position of the order is found by arithmetic, and read by range."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from penstock.loader.lanes.feed import LanesFeed
from penstock.loader.lanes.first_batch import (
    FirstBatchPrefetch,
    PrefetchedLane,
    ShardIndexes,
    part_of,
    parts_of,
    passes_of,
    positions_between,
    round_of,
)
from penstock.loader.lanes.lane import Lane, PinnedBytes
from penstock.loader.lanes.lane_reader import LaneReader
from penstock.loader.plan.costs import RequestEstimator, UnknownRequestsError
from penstock.loader.position import StreamPosition
from penstock.order import Batches, MixOrder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.loader.lanes.feed import Feed
    from penstock.loader.lanes.first_batch import LanePart, PrefetchedSamples
    from penstock.loader.lanes.lane import SampleLane
    from penstock.loader.lanes.segments import ReadOptions
    from penstock.loader.options import Batching
    from penstock.loader.plan.costs import MemoryPlan, RequestEstimate
    from penstock.loader.position import FeedPosition
    from penstock.order import IndexedOrder
    from penstock.sources.shards import DataSource


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedReadPlan:
    """The part of an indexed data set that this rank reads.

    Attributes:
        sources: The source, or the sources of a mix in its order.
        order: Order of epoch 0.
        reading: Options of the lanes.
        threads_count: Number of threads that call a user's read function.
        prefetched_count: Number of positions, of all ranks, whose samples need not wait for their runs: those of a batch.
        memory: Memory that the rank holds at most.
    """

    mode: ClassVar[str] = "index"

    sources: Sequence[DataSource]
    order: IndexedOrder | MixOrder
    reading: ReadOptions
    threads_count: int
    prefetched_count: int
    memory: MemoryPlan | None

    def begin(self, epoch: int, position: FeedPosition | None, *, batching: Batching) -> tuple[Feed, Batches]:
        """The samples of an epoch from a position on, and the batches that they form; None is the beginning of the epoch."""
        assert not isinstance(position, StreamPosition)  # a state of another mode has been refused
        origin = 0 if position is None else position.position
        batches = self.batches(epoch, batching=batching, origin=origin)
        return self.feed_between(epoch, origin, batches.stop), batches

    def feed_between(self, epoch: int, position: int, stop: int) -> Feed:
        """The rank's samples of an epoch with positions in [position, stop)."""
        order, objects = self.order.at_epoch(epoch), self.sources[0].objects
        if objects is None or isinstance(order, MixOrder):
            return self._feed(order, position, stop)
        from penstock.loader.lanes.feed import ObjectsFeed, RankPositions

        return ObjectsFeed(
            objects,
            order=order,
            positions=RankPositions(positions_between(order, position, stop)),
            meter=self.reading.meter,
            threads_count=self.threads_count,
        )

    def for_rank(self, rank: int, world_size: int) -> IndexedReadPlan:
        """The part of a rank in a world of any size, to be read beside this one: the same data in the same order."""
        order = replace(self.order, rank=rank, world_size=world_size, lanes=self.order.lanes_count)
        return replace(self, order=order, reading=self.reading.apart())

    def for_worker(self, number: int, workers_count: int) -> IndexedReadPlan:
        """The part of one worker process: to the order, a worker is a rank of a larger world.

        Args:
            number: Number of the worker, from 0.
            workers_count: Number of workers of this rank, each with an equal share of the memory.
        """
        rank, world_size = self.order.rank, self.order.world_size
        own = self.for_rank(rank + world_size * number, world_size * workers_count)
        return replace(own, reading=self.reading.share(workers_count))

    def batches(self, epoch: int, *, batching: Batching, origin: int = 0) -> Batches:
        """The batches of an epoch, from a position on.

        Args:
            epoch: Epoch number, from 0.
            batching: Size of the batches.
            origin: Position of the order at which the first of the batches begins.
        """
        order = self.order.at_epoch(epoch)
        return Batches(
            samples_count=order.samples_count,
            global_size=batching.global_size,
            rank=order.rank,
            world_size=order.world_size,
            drop_last=batching.drop_last,
            take=batching.take_count,
            origin=origin,
        )

    def estimate_requests(self, *, batching: Batching) -> RequestEstimate | None:
        """The requests of the rank's first epoch; None if they are known only after reading.

        Cost: the same index reads as before the first sample of an epoch: one for each shard that a lane enters or leaves
            inside, or that holds a sample of the first batch. For formats with a table of contents also this table, of at
            most ``TABLES_MAX`` shards.
        """
        order, stop = self.order, self.batches(0, batching=batching).stop
        estimator = RequestEstimator(self.reading)
        try:
            objects = self.sources[0].objects
            if objects is not None and not isinstance(order, MixOrder):
                from penstock.loader.lanes.feed import RankPositions, located

                estimator.add_objects(objects, located(order, RankPositions(positions_between(order, 0, stop))))
            else:
                self._estimate(estimator, order, stop)
        except UnknownRequestsError:
            return None
        return estimator.total

    def _estimate(self, estimator: RequestEstimator, order: IndexedOrder | MixOrder, stop: int) -> None:
        """Add the requests of the lanes, as ``_feed`` has them read."""
        indexes = ShardIndexes(self.sources)
        prefetch = self._prefetch(indexes)
        first_rounds = _first_rounds(order, 0, stop)
        parts = [(number, part) for number in first_rounds for part in parts_of(order, number, 0)]
        chosen = prefetch.choose(order, first_rounds, parts)
        estimator.add_spans(samples.span for samples in prefetch.ranges(chosen))
        opened: list[tuple[LanePart, int]] = []  # and the number of samples that are taken of it
        for number in first_rounds:
            for index, needed in enumerate(order.taken(number, round_of(number, stop, order))):
                chosen_count = len(chosen.get((number, index), ()))
                opened += passes_of(order, number, index, 0 if needed <= chosen_count else needed)
        indexes.load_for((part for part, _ in opened), self.reading.fields)
        for part, needed in opened:
            source = self.sources[part.source]
            if source.objects is not None:
                numbers = (shard % len(source.objects) for shard in part.order.locations(part.lane).shards.tolist())
                estimator.add_objects(source.objects, numbers, needed_count=needed)
            else:
                last = part.stored[-1]
                row = source.rows[last.shard % len(source.rows)]
                segments = indexes.segments(part, self.reading.fields[part.source])
                ends_inside = last.first + last.samples_count < row.samples_count
                estimator.add_lane(segments, needed_count=needed, ends_inside=ends_inside)

    def _feed(self, order: IndexedOrder | MixOrder, position: int, stop: int) -> LanesFeed[SampleLane]:
        """The rank's samples of an epoch with positions in [position, stop).

        Cost: a small read for each shard that holds samples of the first batch, and these samples; before the samples after
        them, or if nothing is prefetched, a small read for each shard that a lane enters or leaves inside, all at once.
        """
        indexes = ShardIndexes(self.sources)
        prefetch = self._prefetch(indexes)
        rounds, first_lane = divmod(position, order.lanes_count)
        first_rounds = _first_rounds(order, position, stop)
        parts = [(number, part) for number, first in first_rounds.items() for part in parts_of(order, number, first)]
        prefetched = prefetch.read(prefetch.choose(order, first_rounds, parts))
        later = [part for number, part in parts if (number, part.source) in prefetched]
        opener = _LaneOpener(self, indexes, prefetched, later, PinnedBytes(self.reading.pinned_bytes_max))
        indexes.load_for(
            (part for number, part in parts if (number, part.source) not in prefetched), self.reading.fields
        )
        prefetched_count = len(first_rounds) * prefetch.rounds_count(order) if prefetched else 0
        lanes: list[SampleLane] = []
        try:
            lanes.extend(opener.open(order, number, first) for number, first in first_rounds.items())
        except BaseException:
            for lane in lanes:
                lane.close()
            raise
        turn = sum(number < first_lane for number in first_rounds)
        if turn == len(first_rounds):  # all lanes of the rank have had their turn in this round
            rounds, turn = rounds + 1, 0
        return LanesFeed(
            lanes,
            lanes_count=order.lanes_count,
            round_count=rounds,
            turn=turn,
            count=len(positions_between(order, position, stop)),
            prefetched_count=prefetched_count,
            window_bytes=lambda: self._window_bytes(order),
        )

    def _prefetch(self, indexes: ShardIndexes) -> FirstBatchPrefetch:
        return FirstBatchPrefetch(
            sources=self.sources, indexes=indexes, reading=self.reading, positions_count=self.prefetched_count
        )

    def _window_bytes(self, order: IndexedOrder | MixOrder) -> int:
        """Number of bytes that the runs of the rank's lanes hold."""
        window_bytes = 0.0
        for number, source in enumerate(self.sources):
            part = order.sources[number] if isinstance(order, MixOrder) else order
            if part.shuffled:
                share = len(order.lanes_owned) / order.lanes_count
                window_bytes += share * min(part.window, source.samples_count) * source.sample_bytes
        return round(window_bytes)


def _first_rounds(order: IndexedOrder | MixOrder, position: int, stop: int) -> dict[int, int]:
    """The rank's lanes that have a sample with a position in [position, stop), and the round of the first of them in each."""
    rounds = ((number, round_of(number, position, order)) for number in order.lanes_owned)
    return {number: first for number, first in rounds if first < round_of(number, stop, order)}


@dataclass(slots=True, eq=False, repr=False)
class _LaneOpener:
    """Opens the lanes of one feed.

    Attributes:
        plan: Read plan of the rank.
        indexes: Says where samples lie.
        prefetched: By lane and source, the samples that are here already.
        later: Parts whose indexes are loaded when the first prefetched lane continues after its samples.
        pins: Counts pinned bytes, for all lanes of this rank.
    """

    plan: IndexedReadPlan
    indexes: ShardIndexes
    prefetched: dict[tuple[int, int], PrefetchedSamples]
    later: list[LanePart]
    pins: PinnedBytes

    def open(self, order: IndexedOrder | MixOrder, number: int, round_index: int) -> SampleLane:
        """A lane after its first `round_index` samples."""

        def open_lane(source: int, taken: int) -> tuple[SampleLane, int]:
            part = part_of(order, number, source, taken)
            prefetched = self.prefetched.pop((number, source), None)
            if prefetched is None:
                self.indexes.load_for([part], self.plan.reading.fields)
                return self._source_lane(part), part.remaining_count
            return PrefetchedLane(part.lane, prefetched, partial(self._rest, part, prefetched)), part.remaining_count

        if isinstance(order, MixOrder):
            from penstock.loader.lanes.lane import MixedLane

            return MixedLane(number, order=order, round_index=round_index, open_lane=open_lane)
        return open_lane(0, round_index)[0]

    def _source_lane(self, part: LanePart) -> SampleLane:
        plan = self.plan
        objects = plan.sources[part.source].objects
        if objects is None:
            return self._shard_lane(part, part.given_count)
        from penstock.loader.lanes.feed import ObjectLane

        return ObjectLane(
            objects,
            source=part.source,
            order=part.order,
            lane=part.lane,
            taken=part.taken_count,
            meter=plan.reading.meter,
            threads_count=plan.threads_count,
        )

    def _rest(self, part: LanePart, prefetched: PrefetchedSamples) -> Lane:
        self.indexes.load_for(self.later, self.plan.reading.fields)
        self.later = []
        return self._shard_lane(part, part.given_count + len(prefetched.samples))

    def _shard_lane(self, part: LanePart, given_count: int) -> Lane:
        reading = self.plan.reading
        return Lane(
            part.lane,
            order=part.order,
            reader=LaneReader(self.indexes.segments(part, reading.fields[part.source]), reading=reading),
            pins=self.pins,
            start=part.start,
            given_count=given_count,
        )
