"""The immutable plan of a loader: the data, the part of it that this rank reads, and the order."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from penstock.config import MIB, FetchConfig, default_budget_bytes
from penstock.errors import ConfigError
from penstock.formats import FORMATS
from penstock.index import in_directory
from penstock.loader.lanes.recording import IndexRecorder
from penstock.loader.lanes.segments import ReadAheadSizes, ReadOptions, lane_read_ahead_sizes
from penstock.loader.options import PREFETCH_BYTES, Batching, BatchPlan
from penstock.loader.plan.costs import MemoryNeeds
from penstock.loader.plan.indexed_read_plan import IndexedReadPlan
from penstock.loader.plan.ranks import rank_and_world_size
from penstock.loader.plan.streamed_read_plan import SequentialReadPlan, StreamedReadPlan
from penstock.order import Batches, IndexedOrder, MixedSource, MixOrder, MixWeights, StreamOrder
from penstock.pipeline import Batch, BatchBySize, Evaluate, Mix, Shards, Shuffle, Take, TokenBlocks
from penstock.samples.transform import SampleTransform, is_plain, may_drop, rebatches, row_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.loader.options import LoaderOptions
    from penstock.loader.plan.costs import RequestEstimate
    from penstock.loader.plan.source_finder import PipelineData, SourceFinder
    from penstock.loader.state import LoaderState
    from penstock.loader.statistics import Meter
    from penstock.pipeline import Pipeline
    from penstock.sources.shards import DataSource


ReadPlan: TypeAlias = IndexedReadPlan | StreamedReadPlan
"""The part of the data that a rank reads, epoch after epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPlan:
    """The plan of a loader for all epochs.

    Attributes:
        pipeline: The pipeline.
        options: Options of the loader.
        read_plan: Read plan of this rank.
        batching: Size of the batches.
        batch_plan: Size and finishing of this rank's batches.
        facts: The facts that the order depends on, for the state.
        digest: Identity of the data set.
        is_masked: Whether batches always have all their rows, and ``__valid__`` says which rows hold a sample.
        ends_with_last: Whether a rank that has run out of samples pads its batches until all ranks have run out; otherwise all
            ranks stop when the first one runs out.
        is_plain: Whether batches are lists of members, as they are stored.
        is_rebatched: Whether stages change the number of samples, so that batches cannot be counted before they are made.
        summary: One line about the data, for people.
    """

    pipeline: Pipeline
    options: LoaderOptions
    read_plan: ReadPlan
    batching: Batching
    batch_plan: BatchPlan
    facts: Mapping[str, Any]
    digest: str
    is_masked: bool
    ends_with_last: bool
    is_plain: bool
    is_rebatched: bool
    summary: str

    @property
    def rows_count(self) -> int:
        """Number of rows in a full batch of this rank."""
        return self.batch_plan.batch_size

    @property
    def read_batching(self) -> Batching:
        """Size of the batches that are read. Stages that change the number of samples need all samples of an epoch."""
        return self.batching._replace(drop_last=self.batching.drop_last and not self.is_rebatched)

    def batches(self, epoch: int) -> Batches | None:
        """The batches of a whole epoch; None if they are known only after reading."""
        return None if self.is_rebatched else self.read_plan.batches(epoch, batching=self.batching)

    def with_weights(
        self, weights: Sequence[float] | Mapping[Pipeline, float], *, epoch: int, position: int
    ) -> LoaderPlan:
        """This plan with other weights of its mix, from a position of an epoch on. The facts remember the change.

        Raises:
            ConfigError: The pipeline has no mix, or the weights do not fit its parts.
        """
        order = reweighted_order(self.read_plan.order, self.pipeline, weights, epoch=epoch, position=position)
        assert isinstance(self.read_plan, IndexedReadPlan)
        facts = {**self.facts, "weights": [each.as_json() for each in order.history], "has_set_weights": True}
        return replace(self, read_plan=replace(self.read_plan, order=order), facts=facts)

    def estimate_requests(self) -> RequestEstimate | None:
        """The requests of this rank's first epoch; None if they are known only after reading.

        Raises:
            StoreError, DataError: An index or a table of contents cannot be read.
            ConfigError: A unit that is read at once does not fit the memory budget.
        """
        own, order = self.read_plan.estimate_requests(batching=self.read_batching), self.read_plan.order
        batches = self.read_plan.batches(0, batching=self.read_batching)
        if (
            own is None
            or not self.is_masked
            or batches is None
            or not 0 <= order.rank - batches.stop < order.world_size
        ):
            return own
        # a rank without a sample pads its only batch with a row of another rank
        others = self.read_plan.for_rank(0, 1).estimate_requests(batching=self.read_batching)
        if others is None:
            return None
        # if stages drop all samples, no rank has a batch to pad for
        return own + (others.none_certain() if self.is_rebatched else others.first_certain())


class OrderOptions(NamedTuple):
    """The options that all kinds of order share."""

    seed: int
    window: int
    shuffled: bool
    lanes: int | None
    rank: int
    world_size: int


_INDEX_OPTIONS = {"": "auto", "index": "require", "stream": "stream"}
"""What ``index="auto"`` means for a loader that resumes a state, by the mode of the state; empty if it has read nothing. A run
without a choice keeps the mode that it began with."""


@dataclass(kw_only=True, eq=False, repr=False)
class Planner:
    """Looks at the data, and makes the plan of a loader.

    Attributes:
        pipeline: The pipeline.
        options: Options of the loader.
        transforms: Transform of the samples of each source of the pipeline.
        meter: The counters of the loader.
        state: The saved state with which iteration begins, if any: a run keeps its mode, lanes and weights.

    Raises:
        ConfigError: Ranks may get different numbers of batches, or do not divide them.
    """

    pipeline: Pipeline
    options: LoaderOptions
    transforms: tuple[SampleTransform, ...]
    meter: Meter
    state: LoaderState | None = None

    def __post_init__(self) -> None:
        pipeline, options, state = self.pipeline, self.options, self.state
        rank, world_size = rank_and_world_size(options.rank, options.world_size, mesh=options.mesh)
        shuffle = pipeline.stage(Shuffle)
        self._saved = {} if state is None else state.kept_facts
        self._order_options = OrderOptions(
            seed=shuffle.seed if shuffle else 0,
            window=shuffle.window if shuffle else 1,
            shuffled=shuffle is not None,
            lanes=self._saved.get("lanes") if options.lanes is None else options.lanes,
            rank=rank,
            world_size=world_size,
        )
        self._batching = _batching(pipeline, world_size)
        self._is_rebatched = rebatches(pipeline)
        if self._is_rebatched and world_size > 1 and options.agree is None:
            raise ConfigError(
                f"world_size={world_size}: refill, flat_map, token_blocks and batch_by_size may give ranks different "
                "numbers of batches",
                hint="give Loader(agree=penstock.torch.agree), which asks all ranks before each batch",
            )

    def plan(self, finder: SourceFinder) -> LoaderPlan:
        """The plan.

        Args:
            finder: Lists the sources of the pipeline.

        Raises:
            StoreError, ConfigError: The data cannot be listed, or this loader cannot read it.

        Cost: one listing, and one or two reads of an index.
        """
        pipeline, options, order = self.pipeline, self.options, self._order_options
        asked = options.index
        data = finder.find(
            index=_INDEX_OPTIONS.get("" if self.state is None else self.state.mode, "require")
            if asked == "auto"
            else asked
        )
        read_plan: ReadPlan
        if data.sources[0].reader is not None:
            read_plan = self._sequential(data.sources[0])
            facts = self._facts(1)
        elif data.is_indexed:
            read_plan = self._indexed(data.sources)
            facts = self._facts(read_plan.order.lanes_count)
            if isinstance(read_plan.order, MixOrder):
                facts["stop"] = pipeline.flat().stop
                facts["weights"] = [weights.as_json() for weights in read_plan.order.history]
                if self._saved.get("has_set_weights"):
                    facts["has_set_weights"] = True
            if self._is_rebatched:
                facts.update(rank=order.rank, world_size=order.world_size)
        else:
            read_plan = self._streamed(data)
            facts = self._facts(read_plan.order.lanes_configured)
            facts["batch"] = self._batching.global_size // order.world_size
            facts.update(rank=order.rank, world_size=order.world_size)
        is_shared = order.world_size > 1
        ends_with_last = pipeline.stage(Evaluate) is not None or (is_shared and not self._batching.drop_last)
        return LoaderPlan(
            pipeline=pipeline,
            options=options,
            read_plan=read_plan,
            batching=self._batching,
            batch_plan=BatchPlan(
                transforms=self.transforms,
                batch=pipeline.stage(Batch) or pipeline.stage(BatchBySize) or Batch(size=1),
                token_blocks=pipeline.stage(TokenBlocks),
                batch_size=self._batching.global_size // order.world_size,
                drop_last=self._batching.drop_last,
                threads_count=options.threads_count,
                prefetch_batches=options.prefetch_count,
                prefetch_bytes=PREFETCH_BYTES if options.prefetch_batches is None else 0,
                seed=order.seed,
            ),
            facts=facts,
            digest=data.digest(),
            # a batch whose samples were all dropped must not be missing only on this rank
            is_masked=ends_with_last or (is_shared and not self._is_rebatched and may_drop(pipeline)),
            ends_with_last=ends_with_last,
            is_plain=is_plain(pipeline),
            is_rebatched=self._is_rebatched,
            summary=data.summary,
        )

    def _facts(self, lanes: int) -> dict[str, Any]:
        order = self._order_options
        return {"seed": order.seed, "shuffled": order.shuffled, "window": order.window, "lanes": lanes}

    def _indexed(self, sources: Sequence[DataSource]) -> IndexedReadPlan:
        counts = [source.counts for source in sources]
        for each, samples in zip(sources, counts, strict=True):
            if not sum(samples):
                raise ConfigError(f"{len(each.shards)} shards hold no samples: {each.shards[0].url} and the others")
        order: IndexedOrder | MixOrder
        if len(sources) == 1:
            order = IndexedOrder(samples=counts[0], **self._order_options._asdict())
        else:
            order = mixed_order(self.pipeline, counts, self._order_options, self._saved.get("weights"))
        lanes_count = len(order.lanes_owned)
        stored = [source for source in sources if source.objects is None]
        needs = self._needs(sources, lanes_count * len(sources))
        sample_bytes = sum(source.sample_bytes for source in stored) / max(1, len(stored))
        sizes = needs.read_ahead_sizes(sample_bytes)
        ranged = {name for name, form in FORMATS.items() if form.ranged is not None}
        return IndexedReadPlan(
            sources=sources,
            order=order,
            reading=self._reading(
                sizes,
                ranged_count=lanes_count * sum(any(row.format in ranged for row in source.rows) for source in stored),
            ),
            threads_count=self.options.threads_count,
            prefetched_count=self._batching.global_size,
            memory=needs.plan(sample_bytes, sizes),
        )

    def _streamed(self, data: PipelineData) -> StreamedReadPlan:
        self._check_stream(data)
        source = data.sources[0]
        order = StreamOrder(shards_count=len(source.shards), **self._order_options._asdict())
        lanes_count = len(order.lanes_owned)
        reading = self._reading(lane_read_ahead_sizes(lanes_count, self.options.fetch), ranged_count=lanes_count)
        if self.options.index == "auto":
            with suppress(
                ConfigError
            ):  # the shards lie in several buckets, so that the index cannot be stored anywhere
                reading = reading._replace(recording=IndexRecorder(in_directory(source.shards, self.options.index_dir)))
        return StreamedReadPlan(
            source=source, order=order, reading=reading, needs=self._needs(data.sources, lanes_count)
        )

    def _sequential(self, source: DataSource) -> SequentialReadPlan:
        self._check_sequential(source)
        order = self._order_options._replace(lanes=1)
        needs = self._needs([source], 1)._replace(window_count=order.window if order.shuffled else 0, data_bytes=None)
        return SequentialReadPlan(
            source=source,
            order=StreamOrder(shards_count=1, **order._asdict()),
            reading=self._reading(ReadAheadSizes(MIB, 1), ranged_count=0),
            needs=needs,
        )

    def _check_sequential(self, source: DataSource) -> None:
        """Refuse what needs more than one pass over the samples, from the first to the last, in one process."""
        options, world_size = self.options, self._order_options.world_size
        assert source.reader is not None
        name = source.reader.name
        if world_size > 1:
            raise ConfigError(
                f"world_size={world_size}: {name} is read by one rank",
                hint="give each rank a pipe of its own, by copies= or split= of the channel, and "
                "Loader(rank=0, world_size=1)",
            )
        if options.processes or options.workers is not None or options.stride[1] > 1:
            given = f"processes={options.processes}" if options.processes else f"{options.stride[1]} DataLoader workers"
            if options.workers is not None:
                given = f"workers={options.workers}"
            raise ConfigError(
                f"{given}: only one process can read {name}", hint="decode in threads: Loader(threads=...)"
            )
        if options.index not in ("auto", "stream"):
            raise ConfigError(f"index={options.index!r}: {name} has no index", hint="leave index= out")
        if options.lanes not in (None, 1):
            raise ConfigError(f"lanes={options.lanes}: {name} is one lane", hint="leave lanes= out")
        if self.pipeline.stage(Evaluate) is not None:
            raise ConfigError(
                f"{name} cannot be padded to full batches, because it is read once",
                hint="leave .evaluate() out: without .shuffle(), each sample comes once, in order",
            )

    def _check_stream(self, data: PipelineData) -> None:
        """Refuse a pipeline that cannot be read without an index."""
        hint, world_size = f"run `penstock index`: {data.summary}", self._order_options.world_size
        if len(data.sources) > 1:
            raise ConfigError("a mix needs to know how many samples its sources have", hint=hint)
        if world_size > 1 and self.options.agree is None:
            raise ConfigError(
                f"world_size={world_size}: shards without an index may give ranks different numbers of batches",
                hint="give Loader(agree=penstock.torch.agree), which asks all ranks before each batch; or " + hint,
            )
        if world_size > 1 and self.pipeline.stage(Take) is not None:
            raise ConfigError(".take() with several ranks needs to know how many samples each of them has", hint=hint)

    def _reading(self, sizes: ReadAheadSizes, *, ranged_count: int) -> ReadOptions:
        options, leaves = self.options, self.pipeline.flat().leaves
        budget_bytes = (options.fetch.budget_bytes_max if options.fetch else None) or default_budget_bytes()
        if options.cache is not None:
            from penstock.cache import CacheConfig

            sizes = sizes._replace(part_bytes=CacheConfig.of(options.cache).whole_blocks(sizes.part_bytes))
        sources = [leaf.source for leaf in leaves]
        return ReadOptions(
            sizes=sizes,
            pinned_bytes_max=budget_bytes // 8,
            copies=is_plain(self.pipeline),
            in_columns=len(leaves) == 1 and self.transforms[0].takes_columns,
            on_corrupt=tuple(source.on_corrupt if isinstance(source, Shards) else "raise" for source in sources),
            fields=tuple(leaf.members() for leaf in leaves),
            meter=self.meter,
            budget_bytes=budget_bytes,
            ranged_count=ranged_count,
        )

    def _needs(self, sources: Sequence[DataSource], readers_count: int) -> MemoryNeeds:
        order, options = self._order_options, self.options
        shard_sizes = [shard.size_bytes for source in sources if source.objects is None for shard in source.shards]
        object_sizes = [
            each.listed_size_bytes for source in sources if source.objects is not None for each in source.shards
        ]
        return MemoryNeeds(
            window_count=order.window // order.world_size if order.shuffled and shard_sizes else 0,
            rows_count=(options.prefetch_count + 1) * self._batching.global_size // order.world_size,
            row_bytes=row_bytes(self.pipeline),
            readers_count=readers_count,
            data_bytes=_total(shard_sizes),
            objects_bytes=_total(object_sizes),
            fetch=options.fetch or FetchConfig(),
        )


def _batching(pipeline: Pipeline, world_size: int) -> Batching:
    batch, take = pipeline.stage(Batch), pipeline.stage(Take)
    taken_count = None if take is None else take.count
    if batch is None:
        by_size = pipeline.stage(BatchBySize)
        return Batching(world_size, by_size is not None and by_size.drop_last, taken_count)
    if batch.global_size is not None and batch.global_size % world_size:
        nearest = max(1, round(batch.global_size / world_size)) * world_size
        raise ConfigError(
            f"{world_size} ranks do not divide .batch(global_size={batch.global_size})",
            hint=f".batch(global_size={nearest})",
        )
    return Batching(batch.global_size or (batch.size or 1) * world_size, batch.drop_last, taken_count)


def _total(sizes: Sequence[int | None]) -> int | None:
    return None if None in sizes else sum(size for size in sizes if size is not None)


SEEN_MIN = 200
"""Samples of each source with a filter from which its yield is known well enough."""

SHARE_RATIO_MAX = 1.5
"""Largest ratio of a source's share before and after filters about which users are not warned."""


def mixed_order(
    pipeline: Pipeline, counts: Sequence[Sequence[int]], options: OrderOptions, saved: Sequence[Any] | None
) -> MixOrder:
    """The order of a mix.

    Args:
        pipeline: The pipeline that mixes.
        counts: Number of samples in each shard, by source.
        options: Options that every order takes.
        saved: All weights in a saved state; those of the pipeline if None, or if the mix has other parts now: whether another
            data set is accepted is decided later.
    """
    flat = pipeline.flat()
    history = [MixWeights(shares, 0, position) for position, shares in flat.schedule]
    if saved is not None:
        kept = [MixWeights.from_json(entry) for entry in saved]
        history = kept if all(each.sources_count == len(counts) for each in kept) else history
    window = max(1, options.window // len(counts))
    return MixOrder(
        sources=tuple(MixedSource(samples=samples, window=window, shuffled=options.shuffled) for samples in counts),
        history=tuple(history),
        stop=flat.stop,
        seed=options.seed,
        lanes=options.lanes,
        rank=options.rank,
        world_size=options.world_size,
    )


def filtered_shares(order: object, transforms: Sequence[SampleTransform]) -> str | None:
    """Return a warning for users whose filters change the shares of a mix by more than ``SHARE_RATIO_MAX``.

    Args:
        order: Order of epoch 0, so far.
        transforms: Transform of the samples of each source, which count what their filters leave out.

    Returns:
        A warning, or an empty text if the shares are near the weights; None while too few samples were seen.
    """
    if not isinstance(order, MixOrder) or any(each.has_filter and each.seen_count < SEEN_MIN for each in transforms):
        return None
    shares = list(map(float, order.history[-1].shares([True] * len(transforms))))
    yields = [1 - each.filtered_count / max(1, each.seen_count) for each in transforms]
    left = [share * each for share, each in zip(shares, yields, strict=True)]
    left = [each / (sum(left) or 1) for each in left]
    if all(SHARE_RATIO_MAX * min(pair) >= max(pair) for pair in zip(shares, left, strict=True)):
        return ""
    needed = [share / each if each else 0.0 for share, each in zip(shares, yields, strict=True)]
    return (
        f"weights of a mix hold before filters, which leave {_percent(left)} of shares {_percent(shares)}. Hint: weights "
        f"{_percent(needed)} make up for them; .pick() chooses samples before they are mixed"
    )


def _percent(shares: Sequence[float]) -> str:
    return " : ".join(f"{share / (sum(shares) or 1):.1%}" for share in shares)


def reweighted_order(
    order: object,
    pipeline: Pipeline,
    weights: Sequence[float] | Mapping[Pipeline, float],
    *,
    epoch: int,
    position: int,
) -> MixOrder:
    """The order of a mix with other weights from a position of an epoch on.

    Args:
        order: Order of epoch 0, so far.
        pipeline: The pipeline that mixes.
        weights: Weights of the parts of the mix, in its order or by pipeline.
        epoch: Epoch number, from 0.
        position: Position in this epoch from which the weights hold.

    Raises:
        ConfigError: The pipeline has no mix, or the weights do not fit its parts.
    """
    if not isinstance(order, MixOrder) or not isinstance(pipeline.source, Mix):
        raise ConfigError(f"set_weights() needs a mix, but this loader reads {pipeline.source!r}")
    parts = pipeline.source.parts
    if not isinstance(weights, list | tuple | Mapping):
        raise ConfigError(f"set_weights({weights!r}) must be a list of weights, or a mapping")
    given = [weights.get(part, 0.0) for part in parts] if isinstance(weights, Mapping) else list(weights)
    unknown = [part for part in weights if part not in parts] if isinstance(weights, Mapping) else []
    if unknown or len(given) != len(parts):
        raise ConfigError(
            f"set_weights() got {weights!r} for a mix of {len(parts)} parts",
            hint="pass a mapping whose keys are the pipelines of the mix",
        )
    shares: list[float] = []
    for part, weight in zip(parts, given, strict=True):
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ConfigError(f"set_weights() weight {weight!r} must be a number of at least 0")
        shares += [weight * share for share in part.flat().shares_at(position)]
    return order.at_epoch(epoch).with_weights(shares, position=position).at_epoch(0)
