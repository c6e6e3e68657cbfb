"""Looking, once per loader: what is there, whose it is, and in which order it is read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from penstock.config import FetchConfig, cores_count, default_budget_bytes
from penstock.errors import ConfigError
from penstock.formats import FORMATS
from penstock.index import in_directory
from penstock.loader.lanes.feed import Batching
from penstock.loader.lanes.lane_parts import IndexedSource
from penstock.loader.lanes.recording import IndexRecorder
from penstock.loader.lanes.segments import ReadOptions, read_ahead
from penstock.loader.plan.indexed import IndexedReadPlan
from penstock.loader.plan.memory import MemoryNeeds
from penstock.loader.plan.ranks import rank_and_world_size
from penstock.loader.plan.sources import data_digest
from penstock.loader.plan.streaming import StreamReadPlan
from penstock.order import Batches, IndexedOrder, MixedSource, MixOrder, MixWeights, StreamOrder
from penstock.pipeline import Batch, BatchBySize, Evaluate, Filter, FlatMap, Shards, Shuffle, Take
from penstock.samples.transform import SampleTransform

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.index import ShardRow
    from penstock.loader.lanes.feed import EpochFeed
    from penstock.loader.lanes.segments import ReadAheadSizes
    from penstock.loader.options import Options
    from penstock.loader.plan.memory import MemoryPlan
    from penstock.loader.plan.request_estimate import RequestEstimate
    from penstock.loader.plan.sources import DataSource, DataSources, SourceFinder
    from penstock.loader.position import FeedPosition
    from penstock.loader.state import LoaderState
    from penstock.loader.statistics import Meter
    from penstock.pipeline import Pipeline
    from penstock.sources.shards import Shard

_AT_END: dict[str, Any] = {"all": "stop", "first": "first", "repeat": "repeat"}


class ReadPlan(Protocol):
    """How a rank reads its part of the data, epoch after epoch.

    Attributes:
        mode: ``"index"`` or ``"stream"``.
        order: Which sample comes when.
        reading: How lanes read.
        sources: What is read; without an index they have no rows.
        memory: What the rank holds at most; None where the first samples tell, which reading then checks.
    """

    mode: str
    order: Any
    reading: ReadOptions
    sources: Sequence[IndexedSource]
    memory: MemoryPlan | None

    def begin(self, epoch: int, position: FeedPosition | None, *, batching: Batching) -> EpochFeed:
        """The samples of an epoch from a position on; None is its beginning.

        Raises:
            ConfigError: there is no such position in this rank's part of the data.
        """

    def batches(self, epoch: int, *, batching: Batching) -> Batches | None:
        """Those of a whole epoch, where an index tells."""

    def estimate_requests(self, *, batching: Batching) -> RequestEstimate | None:
        """What the rank's first epoch asks of the stores; None where only reading tells.

        Raises:
            StoreError, DataError: an index or a table of contents cannot be read.
            ConfigError: a unit that is read at once does not fit the memory budget.
        """

    def divided(self, rank: int, world_size: int) -> ReadPlan:
        """The same data, in the same order, as another rank of another world reads it."""


class LoaderPlan(NamedTuple):
    """What was found out.

    Attributes:
        pipeline: What to do.
        read_plan: What to read.
        batching: How much at a time.
        facts: Everything that the order depends on, for the state.
        digest: Identity of the data set.
        rank: Of this process.
        world_size: Data-parallel ranks.
        is_masked: Whether batches always have all their rows, and ``__valid__`` says which of them count.
        ends_with_last: Whether a rank that ran out goes on with padding until all others have; else the first one ends all.
        is_plain: Whether batches are lists of members, as they are stored.
        said: One line on what is read, for people.
        carries: Whether stages change how many samples there are: one cursor per rank, and nobody knows how many batches.
        known_counts: Of each source, the shards that an index knows.
    """

    pipeline: Pipeline
    read_plan: ReadPlan
    batching: Batching
    facts: dict[str, Any]
    digest: str
    rank: int
    world_size: int
    is_masked: bool
    ends_with_last: bool
    is_plain: bool
    said: str
    carries: bool
    known_counts: tuple[int, ...]

    @property
    def weights_said(self) -> str:
        """The weights that began the epoch's order, and what they were changed to; "" where nothing is mixed."""
        return f", weights {self.facts['weights']}" if "weights" in self.facts else ""

    @property
    def read_batching(self) -> Batching:
        """How much at a time is read: where stages carry samples on, what comes out fills batches, not what goes in."""
        return self.batching._replace(drop_last=self.batching.drop_last and not self.carries)

    def estimate_requests(self) -> RequestEstimate | None:
        """What this rank asks of the stores in its first epoch; None where only reading tells.

        Raises:
            StoreError, DataError, ConfigError: as ``ReadPlan.estimate_requests``.
        """
        asks = self.read_plan.estimate_requests(batching=self.read_batching)
        batches = self.read_plan.batches(0, batching=self.read_batching)
        if asks is None or not self.is_masked or batches is None or not 0 <= self.rank - batches.stop < self.world_size:
            return asks
        # a rank without a sample pads its only batch with a row of another rank
        others = self.read_plan.divided(0, 1).estimate_requests(batching=self.read_batching)
        return None if others is None else asks + others.begun()

    @property
    def rows_count(self) -> int:
        """Of a full batch of this rank."""
        return self.batching.global_size // self.world_size


class _Order(NamedTuple):
    """What every kind of order is given."""

    seed: int
    window: int
    shuffled: bool
    lanes: int | None
    rank: int
    world_size: int


def make_plan(
    pipeline: Pipeline, *, options: Options, finder: SourceFinder, meter: Meter, state: LoaderState | None = None
) -> LoaderPlan:
    """Look at the data and the job.

    Args:
        pipeline: What to do.
        options: The loader's.
        finder: Looks.
        meter: For what reads.
        state: A saved one, from which iteration is to begin: a run keeps the mode it began with.

    Raises:
        StoreError, ConfigError: as ``Loader`` says of its first iteration.

    Cost: one listing, and one or two reads for the index.
    """
    rank, world_size = rank_and_world_size(options.rank, options.world_size, mesh=options.mesh)
    shuffle, take = pipeline.stage(Shuffle), pipeline.stage(Take)
    batching = _batching(pipeline, world_size, take.count if take is not None else None)
    saved = {} if state is None or state.position is None else state.facts
    mode = options.index if state is None else state.mode or options.index
    lanes = saved.get("lanes") if options.lanes is None else options.lanes
    asked = _Order(
        seed=shuffle.seed if shuffle else 0,
        window=shuffle.window if shuffle else 1,
        shuffled=shuffle is not None,
        lanes=lanes,
        rank=rank,
        world_size=world_size,
    )
    carries = _carries(pipeline)
    if carries and world_size > 1 and options.agree is None:
        raise ConfigError(
            f"world_size={world_size}: refill, flat_map and batch_by_size may give ranks different numbers of batches",
            hint="give Loader(agree=penstock.torch.agree), which asks all ranks before each batch",
        )
    found = finder.find(index=mode if options.index == "auto" else options.index)
    job: ReadPlan
    if found.is_indexed:
        job = _indexed(pipeline, found, asked, options, meter, saved, batching)
        facts = _facts(job.order, asked)
        if isinstance(job.order, MixOrder):
            facts["stop"] = pipeline.flat().stop
            facts["weights"] = [weights.as_json() for weights in job.order.history]
        if carries:
            facts.update(rank=rank, world_size=world_size)
    else:
        _check_stream(pipeline, found, asked, options)
        job = _streamed(found, asked, options, meter, batching)
        facts = {
            **_facts(job.order, asked),
            "batch": batching.global_size // world_size,
            "rank": rank,
            "world_size": world_size,
        }
    ends_with_last = pipeline.stage(Evaluate) is not None or (world_size > 1 and not batching.drop_last)
    return LoaderPlan(
        pipeline=pipeline,
        read_plan=job,
        batching=batching,
        facts=facts,
        digest=data_digest(found.sources),
        rank=rank,
        world_size=world_size,
        # a batch of which all samples were dropped must not be left out on this rank alone
        is_masked=ends_with_last or (world_size > 1 and not carries and may_drop(pipeline)),
        ends_with_last=ends_with_last,
        is_plain=is_plain(pipeline),
        said=found.said,
        carries=carries,
        known_counts=tuple(sum(row is not None for row in source.rows) for source in found.sources),
    )


def threads_count(options: Options) -> int:
    """Decode threads: as said, else one per core that this process may use."""
    return options.threads or cores_count()


def is_plain(pipeline: Pipeline) -> bool:
    """Whether nothing is done to single samples: batches are lists of their members."""
    stages = [stage for leaf in pipeline.flat().leaves for stage in leaf.stages]
    batch = pipeline.stage(Batch)
    shapes = batch is None or batch.collate is not None or batch.pad or batch.ragged
    return not shapes and all(isinstance(stage, Shuffle | Take | Evaluate | Batch) for stage in stages)


def may_drop(pipeline: Pipeline) -> bool:
    """Whether samples may be left out on the way to their batch: filtered, failed within ``max_errors``, or corrupt."""
    leaves = pipeline.flat().leaves
    skips = any(isinstance(leaf.source, Shards) and leaf.source.on_corrupt != "raise" for leaf in leaves)
    return skips or any(SampleTransform(leaf).may_drop for leaf in leaves)


def _carries(pipeline: Pipeline) -> bool:
    stages = [stage for leaf in pipeline.flat().leaves for stage in leaf.stages]
    return any(
        isinstance(stage, FlatMap | BatchBySize) or (isinstance(stage, Filter) and stage.refill) for stage in stages
    )


def _facts(order: Any, asked: _Order) -> dict[str, Any]:
    lanes = order.lanes_configured if isinstance(order, StreamOrder) else order.lanes_count
    return {"seed": asked.seed, "shuffled": asked.shuffled, "window": asked.window, "lanes": lanes}


def _batching(pipeline: Pipeline, world_size: int, take: int | None) -> Batching:
    batch = pipeline.stage(Batch)
    if batch is None:
        by_size = pipeline.stage(BatchBySize)
        return Batching(world_size, by_size is not None and by_size.drop_last, take)
    if batch.global_size is not None and batch.global_size % world_size:
        nearest = max(1, round(batch.global_size / world_size)) * world_size
        raise ConfigError(
            f"{world_size} ranks do not divide .batch(global_size={batch.global_size})",
            hint=f".batch(global_size={nearest})",
        )
    return Batching(batch.global_size or (batch.size or 1) * world_size, batch.drop_last, take)


def _reading(
    pipeline: Pipeline, sizes: ReadAheadSizes, options: Options, meter: Meter, *, ranged_count: int
) -> ReadOptions:
    budget_bytes = (options.fetch.budget_bytes_max if options.fetch else None) or default_budget_bytes()
    sources = [leaf.source for leaf in pipeline.flat().leaves]
    if options.cache is not None:
        from penstock.cache import CacheConfig

        part_bytes = CacheConfig.of(options.cache).whole_blocks(sizes.part_bytes)
        sizes = sizes._replace(part_bytes=part_bytes)
    return ReadOptions(
        sizes=sizes,
        pinned_bytes_max=budget_bytes // 8,
        copies=is_plain(pipeline),
        on_corrupt=tuple(source.on_corrupt if isinstance(source, Shards) else "raise" for source in sources),
        fields=tuple(leaf.members() for leaf in pipeline.flat().leaves),
        meter=meter,
        budget_bytes=budget_bytes,
        ranged_count=ranged_count,
    )


def _check_stream(pipeline: Pipeline, found: DataSources, asked: _Order, options: Options) -> None:
    hint = f"run `penstock index`: {found.said}"
    if len(found.sources) > 1:
        raise ConfigError("a mix needs to know how many samples its sources have", hint=hint)
    if asked.world_size > 1 and options.agree is None:
        raise ConfigError(
            f"world_size={asked.world_size}: shards without an index may give ranks different numbers of batches",
            hint="give Loader(agree=penstock.torch.agree), which asks all ranks before each batch; or " + hint,
        )
    if asked.world_size > 1 and pipeline.stage(Take) is not None:
        raise ConfigError(".take() with several ranks needs to know how many samples each of them has", hint=hint)


def _streamed(found: DataSources, asked: _Order, options: Options, meter: Meter, batching: Batching) -> StreamReadPlan:
    shards = found.sources[0].shards
    order = StreamOrder(shards_count=len(shards), **asked._asdict())
    readers_count = len(order.lanes_owned)
    sizes = read_ahead(readers_count, options.fetch)
    reading = _reading(found.pipeline, sizes, options, meter, ranged_count=readers_count)
    if options.index == "auto":
        reading = reading._replace(recording=_recording(shards, options))
    holding = _holding(found.pipeline, found.sources, asked, options, batching, readers_count)
    return StreamReadPlan(shards, order=order, reading=reading, holding=holding)


def _holding(
    pipeline: Pipeline,
    sources: Sequence[DataSource],
    asked: _Order,
    options: Options,
    batching: Batching,
    readers_count: int,
) -> MemoryNeeds:
    sizes = [shard.size_bytes for source in sources if source.objects is None for shard in source.shards]
    objects = [shard.size_bytes for source in sources if source.objects is not None for shard in source.shards]
    return MemoryNeeds(
        window_count=asked.window // asked.world_size if asked.shuffled and sizes else 0,
        rows_count=(options.prefetch_count + 1) * batching.global_size // asked.world_size,
        row_bytes=row_bytes(pipeline),
        readers_count=readers_count,
        data_bytes=_total(sizes),
        objects_bytes=_total(objects),
        fetch=options.fetch or FetchConfig(),
    )


def row_bytes(pipeline: Pipeline) -> int | None:
    """Of a sample in a batch, where the stages alone tell."""
    specs = SampleTransform(pipeline.flat().leaves[0]).specs()
    if specs is None or any(spec.dtype == "object" for spec in specs.values()):
        return None
    return sum(np.dtype(spec.dtype).itemsize * math.prod(spec.shape) for spec in specs.values())


def _total(sizes: Sequence[int | None]) -> int | None:
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _recording(shards: Sequence[Shard], options: Options) -> IndexRecorder | None:
    """What keeps an index of a streamed epoch; None where it could have no place."""
    try:
        return IndexRecorder(in_directory(shards, options.index_dir))
    except ConfigError:  # shards of several buckets
        return None


def _indexed(
    pipeline: Pipeline,
    found: DataSources,
    asked: _Order,
    options: Options,
    meter: Meter,
    saved: Mapping[str, Any],
    batching: Batching,
) -> IndexedReadPlan:
    sources = [
        IndexedSource(each.shards, [row for row in each.rows if row is not None], each.place, each.objects)
        for each in found.sources
    ]
    counts = [source.counts for source in sources]
    for each, samples in zip(found.sources, counts, strict=True):
        if not sum(samples):
            raise ConfigError(f"{len(each.shards)} shards hold no sample at all, {each.shards[0].url} and the others")
    order: IndexedOrder | MixOrder
    order = (
        IndexedOrder(samples=counts[0], **asked._asdict())
        if len(sources) == 1
        else mixed(pipeline, counts, asked, saved)
    )
    stored = [source for source in sources if source.objects is None]
    readers_count = len(order.lanes_owned) * len(sources)
    holding = _holding(pipeline, found.sources, asked, options, batching, readers_count)
    sample_bytes = sum(source.sample_bytes for source in stored) / max(1, len(stored))
    sizes = holding.sizes(sample_bytes)
    memory = holding.plan(sample_bytes, sizes)
    ranged_count = len(order.lanes_owned) * sum(any(map(_is_ranged, source.rows)) for source in stored)
    return IndexedReadPlan(
        sources,
        order=order,
        reading=_reading(pipeline, sizes, options, meter, ranged_count=ranged_count),
        threads_count=threads_count(options),
        prefetched_count=batching.global_size,
        memory=memory,
    )


def _is_ranged(row: ShardRow) -> bool:
    return row.format in FORMATS and FORMATS[row.format].ranged is not None


def mixed(pipeline: Pipeline, counts: Sequence[Sequence[int]], asked: _Order, saved: Mapping[str, Any]) -> MixOrder:
    """The order of a mix, with the weights of its schedule, or those of a saved state, which remembers all changes."""
    flat = pipeline.flat()
    history = [MixWeights(shares, 0, position) for position, shares in flat.schedule]
    if "weights" in saved:
        history = [MixWeights.from_json(entry) for entry in saved["weights"]]
    window = max(1, asked.window // len(counts))
    return MixOrder(
        sources=tuple(MixedSource(samples=samples, window=window, shuffled=asked.shuffled) for samples in counts),
        history=tuple(history),
        at_end=_AT_END[flat.stop],
        seed=asked.seed,
        lanes=asked.lanes,
        rank=asked.rank,
        world_size=asked.world_size,
    )
