"""Every n-th batch of a rank, for a worker of a DataLoader, read by the ranges of its own samples.

If each of n workers reads everything, all bytes are read n times. An index says where a worker's samples lie, so the worker
requests only these, run by run in the order in which they are needed; samples that lie closer together than
``FetchConfig.gap_bytes_max`` share one request. If that saves little, because samples are small and scattered by the
shuffle, whole parts are read (``SelectedBatchesFeed``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.index import Lookup, VersionedShard
from penstock.loader.lanes.feed import ObjectsFeed, SampleBlock, SampleOrigin
from penstock.loader.lanes.first_batch import is_enterable
from penstock.loader.lanes.lane import copied
from penstock.loader.plan.indexed_read_plan import IndexedReadPlan
from penstock.loader.position import IndexPosition
from penstock.order import IndexedOrder
from penstock.sources.indexed_reader import IndexedReader
from penstock.sources.shards import gap_bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.formats import Sample
    from penstock.loader.lanes.feed import Feed
    from penstock.loader.options import Batching
    from penstock.loader.plan.loader_plan import ReadPlan
    from penstock.loader.position import FeedPosition
    from penstock.loader.statistics import Meter
    from penstock.order import Batches
    from penstock.sources.shards import DataSource

SHARE_READ_MAX = 0.75
"""Largest share of what n workers would read otherwise: ranges that save less are not worth their requests."""

WORKERS_EXPLAINED = (2, 4, 8)
"""Numbers of workers of a DataLoader for which ``explain`` says how often each byte is read."""

INDEXES_MAX = 256
"""Number of shards whose indexes are kept, at 12 bytes per sample."""


def read_factor(*, sample_bytes: float, rows_count: int, every: int, gap_bytes: int, shuffled: bool) -> float:
    """How often all workers of a DataLoader together read each byte if they read by ranges.

    Args:
        sample_bytes: Mean size of a stored sample.
        rows_count: Number of samples of a batch that follow each other in a lane, and in a shard if nothing is shuffled.
        every: Number of workers.
        gap_bytes: The widest gap to read through.
        shuffled: Whether the samples of a worker are scattered over runs.
    """
    if not shuffled:
        return float(every) if (every - 1) * rows_count * sample_bytes <= gap_bytes else 1.0
    share = 1 / every
    gaps = np.arange(1 + min(10_000, int(gap_bytes / max(1.0, sample_bytes))))
    return 1.0 + float((gaps * share * (1 - share) ** gaps).sum())  # the lengths of gaps have a geometric distribution


def worker_factors(
    sources: Sequence[DataSource], *, sample_bytes: float, rows_count: int, shuffled: bool
) -> dict[int, float]:
    """How often a DataLoader reads each byte, by its number of workers.

    Args:
        sources: The sources of the pipeline.
        sample_bytes: Mean size of a stored sample.
        rows_count: Number of samples of a batch that follow each other in a lane, and in a shard if nothing is shuffled.
        shuffled: Whether the samples of a worker are scattered over runs.
    """
    source = sources[0]
    factors = {}
    for every in WORKERS_EXPLAINED:
        factor = float(every)
        if len(sources) == 1 and source.objects is not None:
            factor = 1.0
        elif len(sources) == 1 and source.rows and can_stride(source):
            gap_bytes = gap_bytes_of(source.shards[0])
            ranges = read_factor(
                sample_bytes=sample_bytes, rows_count=rows_count, every=every, gap_bytes=gap_bytes, shuffled=shuffled
            )
            factor = ranges if ranges < SHARE_READ_MAX * every else factor
        factors[every] = round(factor, 1)
    return factors


class Strides:
    """The batches of a worker, and the positions of their samples; a ``PositionSequence``.

    Args:
        batches: The batches of the rank, from `first` on.
        first: Number in the epoch of the first of them.
        stride: ``(j, n)``: the worker has the batches k with k mod n = j.

    Attributes:
        indexes: Indexes in `batches` of those of the worker.
        stop: A position after all samples.
    """

    def __init__(self, batches: Batches, *, first: int, stride: tuple[int, int]) -> None:
        self._batches = batches
        self.stop = batches.stop
        self._which, self._every = stride
        skipped = (self._which - first) % self._every
        self._first = first
        self.indexes = range(skipped, len(batches), self._every)

    def positions(self, index: int) -> NDArray[np.int64]:
        """The positions of the samples of a batch; int64[at most its size]."""
        positions, count = self._batches.batch(index)
        return np.asarray(positions, np.int64)[:count]

    def has(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each of some positions of the rank, not before the first batch, is in a batch of the worker; bool[n]."""
        numbers = self._first + (positions - self._batches.origin) // self._batches.global_size
        has: NDArray[np.bool_] = (numbers % self._every == self._which) & (positions < self.stop)
        return has

    def __len__(self) -> int:
        if not self.indexes:
            return 0
        return (len(self.indexes) - 1) * self._batches.batch_size + len(self.positions(self.indexes[-1]))

    def chunk(self, start: int, stop: int) -> NDArray[np.int64]:
        """The positions with indexes in [start, stop) among those of the worker; fewer at the end."""
        stop = min(stop, len(self))
        parts = [np.empty(0, np.int64)]
        while start < stop:
            batch, skip = divmod(start, self._batches.batch_size)
            parts.append(self.positions(self.indexes[batch])[skip : skip + stop - start])
            start += len(parts[-1])
        return np.concatenate(parts)


class StridedFeed:
    """A worker's samples, each read by its own range; a ``Feed``.

    Args:
        source: The source of the samples: shards of one store, whose samples the index locates.
        order: The order of the epoch.
        strides: Say which batches are the worker's.
        pinned_bytes_max: Most bytes of parts that waiting samples may keep alive; beyond that, they are copied.
        meter: Counts bytes.
    """

    def __init__(
        self, source: DataSource, *, order: IndexedOrder, strides: Strides, pinned_bytes_max: int, meter: Meter
    ) -> None:
        self._reader = IndexedReader(_lookup_of(source), fields=None, indexes_max=INDEXES_MAX)
        self._order = order
        self._strides = strides
        self._bytes_max = pinned_bytes_max
        self._meter = meter
        self._batches = iter(strides.indexes)
        self._remaining = np.empty(0, np.int64)  # positions of the batch that is being given
        self._next_position = 0
        self._arrived: dict[int, tuple[Sample, SampleOrigin]] = {}  # by position
        self._held_bytes = 0
        self._positions: dict[int, int] = {}  # by the number of a sample that was requested
        self._requested_rounds: dict[int, int] = {}  # by lane, the round after the last that was requested
        self._stream = self._reader.stream(self._numbers())

    def take(self, count: int) -> SampleBlock | None:
        """Up to `count` samples, never across the end of a batch; see ``Feed``."""
        if not len(self._remaining):
            index = next(self._batches, None)
            if index is None:
                return None
            self._remaining = self._strides.positions(index)
        positions, self._remaining = self._remaining[:count], self._remaining[count:]
        samples, origins = [], []
        for position in positions.tolist():
            while position not in self._arrived:
                self._read()
            sample, origin = self._arrived.pop(position)
            self._held_bytes -= sample.size_bytes or 0
            samples.append(sample)
            origins.append(origin)
        self._next_position = int(positions[-1]) + 1
        return SampleBlock(samples, origins, positions)

    def position(self) -> IndexPosition:
        """The position after the samples that were taken."""
        return IndexPosition(self._next_position)

    def close(self) -> None:
        """Cancel the reads in progress; idempotent."""
        self._stream.close()

    def _read(self) -> None:
        number, sample, url = next(self._stream)
        size_bytes = sample.size_bytes or 0
        self._meter.bytes += size_bytes
        self._held_bytes += size_bytes
        is_much = self._held_bytes > self._bytes_max
        self._arrived[self._positions.pop(number)] = copied(sample) if is_much else sample, SampleOrigin(url, 0)

    def _numbers(self) -> Iterator[int]:
        """The numbers of the worker's samples in the order in which they are requested, so that neighbours are adjacent.

        The reading thread pulls them ahead of the samples that it takes.
        """
        for index in self._strides.indexes:
            rounds, lanes = np.divmod(self._strides.positions(index), self._order.lanes_count)
            groups: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]] = []
            for lane in np.unique(lanes).tolist():
                own = rounds[lanes == lane]
                groups += self._groups(lane, int(own[0]), int(own[-1]))
            self._reader.load_indexes({shard for shards, _, _ in groups for shard in shards.tolist()})
            for shards, samples, positions in groups:
                numbers = self._reader.numbers(shards, samples)
                self._positions.update(zip(numbers.tolist(), positions.tolist(), strict=True))
                yield from np.sort(numbers).tolist()

    def _groups(
        self, lane: int, first: int, last: int
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
        """Shards, samples and positions of the worker's samples that a lane hands out in rounds `first` to `last`.

        If the order is shuffled, whole runs are yielded, without the samples that an earlier call yielded.
        """
        order, round_index = self._order, max(first, self._requested_rounds.get(lane, 0))
        while round_index <= last:
            end = last + 1
            if order.shuffled:
                run_index, _ = order.run_at(lane, round_index)
                end = max(end, order.run_start(lane, run_index) + order.run_length(lane, run_index))
            positions = np.arange(round_index, end, dtype=np.int64) * order.lanes_count + lane
            own = self._strides.has(positions)
            locations = order.locations(lane, round_index, end - round_index)
            yield locations.shards[own], locations.samples[own], positions[own]
            round_index = end
        self._requested_rounds[lane] = round_index


def _lookup_of(source: DataSource) -> Lookup:
    assert source.place is not None
    pairs = zip(source.shards, source.rows, strict=True)
    found = [VersionedShard(shard, row.key, row.size_bytes, row.etag, shard.etag) for shard, row in pairs]
    return Lookup(source.place, found, list(source.rows))


def begin_strided(
    plan: ReadPlan,
    epoch: int,
    position: FeedPosition | None,
    *,
    batching: Batching,
    first_batch: int,
    stride: tuple[int, int],
) -> tuple[Feed, Batches] | None:
    """Begin an epoch, or the rest of one, in which only the batches of a worker are read.

    Args:
        plan: Read plan of the rank.
        epoch: Epoch number, from 0.
        position: Position from which the epoch continues; None is its beginning.
        batching: Size of the batches.
        first_batch: Number of the batch at `position`.
        stride: ``(j, n)``: the worker has the batches k with k mod n = j.

    Returns:
        The feed, and all batches of the rank; None if all of them have to be read.
    """
    if not isinstance(plan, IndexedReadPlan) or not isinstance(plan.order, IndexedOrder):
        return None
    order, source = plan.order.at_epoch(epoch), plan.sources[0]
    batches = plan.batches(
        epoch, batching=batching, origin=position.position if isinstance(position, IndexPosition) else 0
    )
    strides = Strides(batches, first=first_batch, stride=stride)
    reading = plan.reading
    feed: Feed
    if source.objects is not None:
        feed = ObjectsFeed(
            source.objects, order=order, positions=strides, meter=reading.meter, threads_count=plan.threads_count
        )
    elif can_stride(source) and reading.on_corrupt[0] == "raise" and _pays(source, order, batches, stride[1]):
        feed = StridedFeed(
            source, order=order, strides=strides, pinned_bytes_max=reading.pinned_bytes_max, meter=reading.meter
        )
    else:
        return None
    return feed, batches


def can_stride(source: DataSource) -> bool:
    """Whether each sample can be read separately, from one store."""
    enterable = all(is_enterable(row.format) and row.has_offsets for row in source.rows)
    return source.place is not None and enterable and len({id(shard.store) for shard in source.shards}) == 1


def _pays(source: DataSource, order: IndexedOrder, batches: Batches, every: int) -> bool:
    gap_bytes = gap_bytes_of(source.shards[0])
    rows_count = max(1, batches.batch_size // len(order.lanes_owned))
    factor = read_factor(
        sample_bytes=source.sample_bytes,
        rows_count=rows_count,
        every=every,
        gap_bytes=gap_bytes,
        shuffled=order.shuffled,
    )
    return factor < SHARE_READ_MAX * every
