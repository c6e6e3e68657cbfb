"""Reading with an index: any position of the order is found by arithmetic, and read by range."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.errors import DataError
from penstock.loader.lanes.feed import EpochFeed, LanesFeed
from penstock.loader.lanes.first_batch import (
    RUNS_BYTES_MIN,
    RUNS_PER_LED_MIN,
    PrefetchedLane,
    PrefetchedSamples,
    SampleAddress,
    SampleRange,
    is_enterable,
    near_ranges,
    parsed,
    read,
)
from penstock.loader.lanes.lane import Lane, PinnedBytes
from penstock.loader.lanes.lane_parts import (
    LanePart,
    led_rows,
    part_of,
    parts_of,
    positions_between,
    row_of,
    segment_of,
)
from penstock.loader.lanes.reading import LaneReader
from penstock.loader.plan.request_estimate import RequestEstimator, UnknownRequestsError
from penstock.loader.position import StreamPosition
from penstock.order import Batches, MixOrder
from penstock.sources.selecting import may_pay

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from penstock.formats import Sample
    from penstock.index import IndexPlace, ShardIndex, ShardRow
    from penstock.loader.lanes.feed import Batching, Feed
    from penstock.loader.lanes.lane import SampleLane
    from penstock.loader.lanes.segments import ReadOptions, SampleSource, ShardSegment
    from penstock.loader.plan.memory import MemoryPlan
    from penstock.loader.plan.request_estimate import RequestEstimate
    from penstock.loader.position import FeedPosition
    from penstock.order import IndexedOrder
    from penstock.order import Segment as Stored
    from penstock.sources.readers import SampleReader
    from penstock.sources.shards import Shard


class IndexedSource(NamedTuple):
    """One data set, and what its index says.

    Attributes:
        shards: As listed.
        rows: Of the index, one for each.
        place: Where the shards' own indexes lie; None for objects.
        objects: What there is instead of shards.
    """

    shards: Sequence[Shard]
    rows: Sequence[ShardRow]
    place: IndexPlace | None
    objects: SampleReader | None

    @property
    def counts(self) -> Sequence[int]:
        """Samples of each shard; each object is one by itself."""
        return [1] * len(self.objects) if self.objects is not None else [row.samples_count for row in self.rows]

    @property
    def sample_bytes(self) -> float:
        """Of a sample as stored, on average; 0 for objects."""
        return sum(row.size_bytes for row in self.rows) / max(1, sum(self.counts)) if self.objects is None else 0.0


class IndexedReadPlan:
    """What this rank reads, in the order of an index.

    Args:
        sources: One, or those of the mix, in its order.
        order: Of epoch 0.
        reading: How.
        threads_count: For users' functions that read.
        led_count: The first positions to be read, which do not wait for their runs: those of a batch.
        memory: See ``ReadPlan``.
    """

    mode = "index"

    def __init__(
        self,
        sources: Sequence[IndexedSource],
        *,
        order: IndexedOrder | MixOrder,
        reading: ReadOptions,
        threads_count: int,
        led_count: int,
        memory: MemoryPlan | None,
    ) -> None:
        self.order = order
        self.memory: MemoryPlan | None = memory
        self._threads_count = threads_count
        self._led_count = led_count
        self.sources = sources
        self._sample_bytes = [source.sample_bytes for source in sources]
        self.reading = reading
        self._offsets: dict[tuple[int, int], ShardIndex] = {}  # by source and shard: of those entered or left inside

    def begin(self, epoch: int, position: FeedPosition | None, *, batching: Batching) -> EpochFeed:
        """See ``ReadPlan``."""
        assert not isinstance(position, StreamPosition)  # a state of another mode has been refused
        origin = 0 if position is None else position.position
        batches = self.batches(epoch, batching=batching, origin=origin)
        return EpochFeed(self.feed_between(epoch, origin, batches.stop), batches)

    def feed_between(self, epoch: int, position: int, stop: int) -> Feed:
        """The rank's samples of an epoch with positions in [position, stop)."""
        order, objects = self.order.at_epoch(epoch), self.sources[0].objects
        if objects is None or isinstance(order, MixOrder):
            return self._feed(order, position, stop)
        from penstock.loader.lanes.objects import ObjectsFeed

        return ObjectsFeed(
            objects,
            order=order,
            positions=positions_between(order, position, stop),
            meter=self.reading.meter,
            threads_count=self._threads_count,
        )

    def divided(self, rank: int, world_size: int) -> IndexedReadPlan:
        """The same job as another rank of another world sees it; the order of positions stays."""
        return self._divided(rank, world_size, self.reading)

    def for_worker(self, number: int, workers_count: int) -> IndexedReadPlan:
        """What one of several worker processes reads: to the order, a worker is a rank of a larger world.

        Args:
            number: Number of the worker, from 0.
            workers_count: Number of workers of this rank, each with an equal share of the memory.
        """
        rank, world_size = self.order.rank, self.order.world_size
        return self._divided(rank + world_size * number, world_size * workers_count, self.reading.share(workers_count))

    def _divided(self, rank: int, world_size: int, reading: ReadOptions) -> IndexedReadPlan:
        order = replace(self.order, rank=rank, world_size=world_size, lanes=self.order.lanes_count)
        return IndexedReadPlan(
            self.sources,
            order=order,
            reading=reading,
            threads_count=self._threads_count,
            led_count=self._led_count,
            memory=self.memory,
        )

    def batches(self, epoch: int, *, batching: Batching, origin: int = 0) -> Batches:
        """See ``ReadPlan``; those from position `origin` on."""
        order = self.order.at_epoch(epoch)
        return Batches(
            samples_count=order.samples_count,
            global_size=batching.global_size,
            rank=order.rank,
            world_size=order.world_size,
            drop_last=batching.drop_last,
            take=batching.take,
            origin=origin,
        )

    def estimate_requests(self, *, batching: Batching) -> RequestEstimate | None:
        """See ``ReadPlan``.

        Cost: what reading ahead of the first sample costs: an index of each shard that is entered or left inside or that
            holds samples of the first batch. For formats with a table of contents also that, of up to ``LOOKS_MAX`` shards.
        """
        order, stop = self.order, self.batches(0, batching=batching).stop
        asking = RequestEstimator(self.reading)
        try:
            objects = self.sources[0].objects
            if objects is not None and not isinstance(order, MixOrder):
                from penstock.loader.lanes.objects import located

                asking.add_objects(objects, located(order, positions_between(order, 0, stop)))
            else:
                self._ask(asking, order, stop)
        except UnknownRequestsError:
            return None
        return asking.total

    def _ask(self, asking: RequestEstimator, order: IndexedOrder | MixOrder, stop: int) -> None:
        """Add what the lanes ask, as ``_feed`` has them read."""
        self._offsets = {}
        owned = [number for number in order.lanes_owned if order.lane_length(number)]
        leading = self._leading(
            order, dict.fromkeys(owned, 0), [(number, part) for number in owned for part in parts_of(order, number, 0)]
        )
        asking.add_spans(stretch.span for stretch in self._stretches(leading))
        wanted: list[tuple[LanePart, int]] = []  # and how many samples of it are
        for number in owned:
            for source, needed in enumerate(order.taken(number, row_of(number, stop, order))):
                led_count = len(leading.get((number, source), ()))
                wanted += _passes(order, number, source, 0 if needed <= led_count else needed)
        self._load_offsets(part for part, _ in wanted)
        for part, needed in wanted:
            objects = self.sources[part.source].objects
            if objects is not None:
                numbers = part.order.locations(part.lane).shards.tolist()
                asking.add_objects(objects, (each % len(objects) for each in numbers), needed_count=needed)
            else:
                last = part.stored[-1]
                rows = self.sources[part.source].rows
                ends_inside = last.first + last.samples_count < rows[last.shard % len(rows)].samples_count
                asking.add_lane(self._segments(part), needed_count=needed, ends_inside=ends_inside)

    def _feed(self, order: IndexedOrder | MixOrder, position: int, stop: int) -> LanesFeed[SampleLane]:
        """The rank's samples of an epoch with positions in [position, stop).

        Cost: a small read for each shard that samples of the first batch lie in, and these samples; before the samples
        behind them, or where none are read first, one for each shard that a lane enters or leaves inside, all at once.
        """
        self._offsets = {}
        rounds, first_lane = divmod(position, order.lanes_count)
        owned = [number for number in order.lanes_owned if order.lane_length(number) > row_of(number, position, order)]
        rows = {number: row_of(number, position, order) for number in owned}
        parts = [(number, part) for number in owned for part in parts_of(order, number, rows[number])]
        led = self._led(self._leading(order, rows, parts))
        later = [part for number, part in parts if (number, part.source) in led]
        self._load_offsets(part for number, part in parts if (number, part.source) not in led)
        led_count = len(owned) * led_rows(self._led_count, order) if led else 0
        pins = PinnedBytes(self.reading.pinned_bytes_max)
        lanes: list[SampleLane] = []
        try:
            lanes.extend(self._lane(order, number, rows[number], pins, led, later) for number in owned)
        except BaseException:
            for lane in lanes:
                lane.close()
            raise
        count = len(positions_between(order, position, stop))
        turn = sum(number < first_lane for number in owned)
        if turn == len(owned):  # the rank's lanes had their turn in this round
            rounds, turn = rounds + 1, 0
        return LanesFeed(
            lanes,
            lanes_count=order.lanes_count,
            round_count=rounds,
            turn=turn,
            count=count,
            led_count=led_count,
            window_bytes=lambda: self._window_bytes(order),
        )

    def _window_bytes(self, order: IndexedOrder | MixOrder) -> int:
        """What the runs of the rank's lanes hold."""
        found = 0.0
        for number, sample_bytes in enumerate(self._sample_bytes):
            source = order.sources[number] if isinstance(order, MixOrder) else order
            if source.shuffled:
                share = len(order.lanes_owned) / order.lanes_count
                found += share * min(source.window, sum(self.sources[number].counts)) * sample_bytes
        return round(found)

    def _leading(
        self, order: IndexedOrder | MixOrder, rows: Mapping[int, int], parts: Sequence[tuple[int, LanePart]]
    ) -> dict[tuple[int, int], list[SampleAddress]]:
        """By lane and source, the samples of the first batch; none where their runs are here as soon."""
        count = led_rows(self._led_count, order)
        found: dict[tuple[int, int], list[SampleAddress]] = {}
        runs_bytes = led_bytes = 0.0
        parts = [(number, part) for number, part in parts if self.sources[part.source].objects is None]
        rows_read = chain.from_iterable(self.sources[number].rows for number in {part.source for _, part in parts})
        if not all(is_enterable(name) and has for name, has in {(row.format, row.has_offsets) for row in rows_read}):
            return {}
        for number, part in parts:
            turns = order.sources_of(number, rows[number], count)
            places = part.leading(int(np.count_nonzero(turns == part.source)))
            runs_bytes += part.run_count * self._sample_bytes[part.source]
            led_bytes += len(places) * self._sample_bytes[part.source]
            if places:
                found[number, part.source] = places
        pays = runs_bytes >= max(RUNS_BYTES_MIN, RUNS_PER_LED_MIN * led_bytes)
        return found if pays and led_bytes <= self.reading.pinned_bytes_max else {}

    def _led(
        self, leading: Mapping[tuple[int, int], Sequence[SampleAddress]]
    ) -> dict[tuple[int, int], PrefetchedSamples]:
        """The samples of `leading`, read; none where one is corrupt: whoever reads its run says so, where it is its turn."""
        here: dict[SampleAddress, tuple[Sample, SampleSource]] = {}
        try:
            for stretch, data in read(self._stretches(leading)):
                self.reading.meter.bytes += len(data)
                here.update(parsed(stretch, data))
            return {
                key: PrefetchedSamples([here[place][0] for place in places], [here[place][1] for place in places])
                for key, places in leading.items()
            }
        except (DataError, KeyError):
            return {}

    def _stretches(self, leading: Mapping[tuple[int, int], Sequence[SampleAddress]]) -> Iterator[SampleRange]:
        """Where the samples of `leading` lie, shard by shard, as the shards' indexes arrive."""
        by_source: dict[int, dict[int, list[int]]] = {}
        for place in chain.from_iterable(leading.values()):
            by_source.setdefault(place.source, {}).setdefault(place.shard, []).append(place.sample)
        for number, wanted in by_source.items():
            source = self.sources[number]
            count = len(source.shards)
            for shard, known in zip(wanted, self._loaded(number, [each % count for each in wanted]), strict=True):
                yield from near_ranges(
                    source.shards[shard % count], known, sorted(wanted[shard]), source=number, number=shard
                )

    def _loaded(self, number: int, shards: Sequence[int]) -> Iterator[ShardIndex]:
        """The indexes of some shards of a source, in order; those that were not there are all asked for at once."""
        source = self.sources[number]
        offsets = self._offsets
        missing = [shard for shard in dict.fromkeys(shards) if (number, shard) not in offsets]
        assert source.place is not None
        arriving = zip(missing, source.place.load_shards([source.rows[shard] for shard in missing]), strict=True)
        for shard in shards:
            while (number, shard) not in offsets:
                arrived, index = next(arriving)
                offsets[number, arrived] = index
            yield offsets[number, shard]

    def _lane(
        self,
        order: IndexedOrder | MixOrder,
        number: int,
        row: int,
        pins: PinnedBytes,
        led: dict[tuple[int, int], PrefetchedSamples],
        later: list[LanePart],
    ) -> SampleLane:
        """A lane from a row on; `later`: parts of which the offsets are wanted when the first of the led is opened."""

        def open_lane(source: int, taken: int) -> tuple[SampleLane, int]:
            part = part_of(order, number, source, taken)
            first = led.pop((number, source), None)
            if first is None:
                self._load_offsets([part])
            return self._source_lane(part, pins, first, later), part.left_count

        if isinstance(order, MixOrder):
            from penstock.loader.lanes.lane import MixedLane

            return MixedLane(number, order=order, row=row, open_lane=open_lane)
        return open_lane(0, row)[0]

    def _source_lane(
        self, part: LanePart, pins: PinnedBytes, led: PrefetchedSamples | None, later: list[LanePart]
    ) -> SampleLane:
        objects = self.sources[part.source].objects
        if objects is not None:
            from penstock.loader.lanes.objects import ObjectLane

            return ObjectLane(
                objects,
                source=part.source,
                order=part.order,
                lane=part.lane,
                taken=part.start.before_count + part.skip_count,
                meter=self.reading.meter,
                threads_count=self._threads_count,
            )
        led_count = len(led.samples) if led is not None else 0

        def opened() -> Lane:
            self._load_offsets(later)
            later.clear()
            return Lane(
                part.lane,
                runs=_Runs(part.order),
                reader=LaneReader(self._segments(part), reading=self.reading),
                pins=pins,
                start=part.start,
                skip_count=part.skip_count + led_count,
            )

        return opened() if led is None else PrefetchedLane(part.lane, led, opened)

    def _segments(self, part: LanePart) -> list[ShardSegment]:
        return [self._segment(part.source, stored, index) for index, stored in enumerate(part.stored)]

    def _segment(self, source: int, stored: Stored, index: int) -> ShardSegment:
        where = self.sources[source]
        number = stored.shard % len(where.shards)
        return segment_of(
            stored,
            index,
            shard=where.shards[number],
            row=where.rows[number],
            place=where.place,
            known=self._offsets.get((source, number)),
            fields=self.reading.fields[source],
            source=source,
        )

    def _load_offsets(self, parts: Iterable[LanePart]) -> None:
        """The indexes of the shards of which a lane reads a part, or some fields, where they are not there."""
        missing: dict[int, set[int]] = {}
        for part in parts:
            source = self.sources[part.source]
            for stored in part.stored if source.place is not None else ():
                shard = stored.shard % len(source.shards)
                row = source.rows[shard]
                is_part = row.has_offsets and stored.samples_count < row.samples_count
                if is_part or may_pay(source.shards[shard], row, self.reading.fields[part.source]):
                    missing.setdefault(part.source, set()).add(shard)
        for number, shards in missing.items():
            for _ in self._loaded(number, sorted(shards)):
                pass


def _passes(order: IndexedOrder | MixOrder, number: int, source: int, needed: int) -> Iterator[tuple[LanePart, int]]:
    """The parts of a source that a lane opens for its first `needed` samples, and how many of them it takes from each."""
    taken = 0
    while (part := part_of(order, number, source, taken)).left_count:
        yield part, needed - taken
        taken += part.left_count
        if taken >= needed:
            return


class _Runs:
    """An ``IndexedOrder`` as a lane asks it."""

    def __init__(self, order: IndexedOrder) -> None:
        self.shuffled = order.shuffled
        self.run_length = order.run_length
        self._order = order

    def permute_run(self, lane: int, run_index: int, count: int) -> list[int]:
        """See ``Runs``; `count` is the run's length, which the reader has seen to."""
        del count
        order: list[int] = self._order.permute_run(lane, run_index).tolist()
        return order
