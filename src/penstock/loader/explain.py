"""``explain``: shows what a loader would do with a pipeline. ``warm_cache``: reads the data of a pipeline into a cache."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TextIO, Unpack

from penstock.config import FetchConfig, check_names
from penstock.errors import ConfigError
from penstock.fetch import PlanItem
from penstock.formats import FORMATS, format_of_name, look_into, ranged_of
from penstock.loader.options import LoaderArguments, LoaderOptions
from penstock.loader.plan.loader_plan import Planner
from penstock.loader.plan.source_finder import SourceFinder
from penstock.loader.plan.streamed_read_plan import StreamedReadPlan
from penstock.loader.plan.strided import worker_factors
from penstock.loader.statistics import Meter
from penstock.pipeline import Batch, Pipeline, Shards, Shuffle, check_rereadable
from penstock.samples.transform import SampleTransform, row_bytes
from penstock.system.tracebacks import boundary
from penstock.text.sizes import format_bytes

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from penstock.cache import CacheConfig
    from penstock.cache.warm import Warmed
    from penstock.loader.plan.costs import MemoryPlan, RequestEstimate
    from penstock.loader.plan.loader_plan import LoaderPlan
    from penstock.sources.shards import DataSource, Shard
    from penstock.store import Store


LISTED_PER_REQUEST = 1000
_ENTRY = {
    "sample": "any sample can be read by itself",
    "block": "entering inside costs the row group from its start, and the shard's footer",
    "shard": "entering inside costs the shard from its start",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePlan:
    """One source of a pipeline."""

    what: str
    """The source as it was written."""
    share: float
    """Share of the samples at the beginning of the epoch; 1 if nothing is mixed."""
    shards_count: int
    """Number of shards, or of objects."""
    size_bytes: int | None
    """Size of all shards; None if the listing does not say it."""
    largest_bytes: int | None
    """Size of the largest shard; None if the listing does not say it."""
    formats: tuple[str, ...]
    """Names of the formats; empty if only the content of the shards tells."""
    entry_bytes: int | None
    """Bytes that are read in vain, on average, when reading begins inside a shard: half of a shard that is compressed as a
    whole, half a row group of Parquet, none if samples can be read by themselves. None if only the shards tell."""
    unit_bytes: int
    """Mean size of a row group in the first shard, of the wanted columns as stored; each lane holds one. 0 for others."""
    indexed_count: int
    """Number of shards whose samples an index knows."""
    samples_count: int | None
    """Number of samples; None if the index does not know all shards."""
    sample_bytes: int
    """Mean size of a sample as stored, by the index or the listing; otherwise by the first samples of each lane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The plan of a loader for a pipeline. ``str(explanation)`` is what ``explain`` prints."""

    pipeline: str
    """As it was written."""
    sources: tuple[SourcePlan, ...]
    """One, or those of the mix."""
    rank: int
    """Rank of this process."""
    world_size: int
    """Number of data-parallel ranks."""
    lanes_count: int
    """Number of lanes of the whole job."""
    window: int
    """Number of samples in the shuffle window of the whole job; 1 if nothing is shuffled."""
    batch_size: int | None
    """Number of samples in a batch of this rank; None if batches are made by size, or not at all."""
    listing_requests: int
    """Number of requests that list the data, at least; none for shards that are given by name."""
    epoch_requests: int | None
    """Number of GETs of this rank in its first epoch, at most, without retries and hedges; None if not known before reading."""
    epoch_requests_min: int | None
    """The same, at least. It is less if the epoch ends before the last byte of a shard (``take``, ``drop_last``, a mix), by at
    most the rest of that shard for each lane; and if lanes may read a table of contents once each."""
    epoch_bytes: int | None
    """Bytes of shards that these GETs request, at most."""
    epoch_bytes_min: int | None
    """The same, at least."""
    in_flight_max: int
    """Number of GETs of data that are in flight at a time, at most."""
    part_bytes: int
    """Bytes of each GET, at most."""
    row_bytes: int | None
    """Size of a sample in a batch; None if the stages do not tell it, and it is counted as stored."""
    worker_factors: Mapping[int, float]
    """How often a ``DataLoader`` with 2, 4 and 8 workers reads each byte, by number of workers. Without workers: once."""
    memory: MemoryPlan
    """The memory that the loader holds at most."""

    def __str__(self) -> str:
        return "\n".join([self.pipeline, *map(_of_source, self.sources), *_of_order(self), *_of_cost(self)])


@boundary
def explain(pipeline: Pipeline, *, file: TextIO | None = None, **options: Unpack[LoaderArguments]) -> Explanation:
    """Look at the data of a pipeline, and print what a ``Loader`` with these options would do.

    It prints the loader's own plan of one epoch. It raises the same errors as the loader.

    Args:
        pipeline: A pipeline with or without ``.batch()``.
        file: Stream to print to; None is standard output.
        **options: Options of ``Loader``. Neither `agree` nor `on_epoch` is called. `processes` and `stride` divide the
            printed numbers among processes.

    Returns:
        The printed plan, as a record.

    Raises:
        ConfigError: The plan does not fit its memory budget (it is printed nevertheless), or the loader would raise it.
        StoreError, DataError: The data cannot be listed, or data on which the plan depends cannot be read.

    Cost: the listing and one read of an index; without an index, the first samples of each of the rank's lanes, in parts of
        256 KiB. With an index, the small reads that a loader makes before its first sample. For formats with a table of
        contents (Parquet, zip) also this table, of up to 64 shards. No function of the pipeline is called.
    """
    check_rereadable(pipeline, "explain")
    check_names("explain", options, ("file", *LoaderOptions.__dataclass_fields__))
    given = LoaderOptions(**options)
    # The plan is compared with the budget that it names, but explaining it does not change the process's budget.
    fetch = None if given.fetch is None else replace(given.fetch, budget_bytes_max=None)
    finder = SourceFinder(pipeline, fetch=fetch, index_dir=given.index_dir, cache=given.cache, share=given.share)
    try:
        transforms = tuple(map(SampleTransform, pipeline.flat().leaves))
        plan = Planner(pipeline=pipeline, options=given, transforms=transforms, meter=Meter()).plan(finder)
        made, refusal = _explanation(pipeline, plan, given)
    finally:
        finder.close()
    print(made, file=file or sys.stdout)
    if refusal is not None:
        raise refusal
    return made


def _source(leaf: Pipeline, share: float, found: DataSource, *, sample_bytes: float | None) -> SourcePlan:
    """Describe a source.

    Args:
        leaf: The part of the pipeline that reads it.
        share: Share of the samples.
        found: The source.
        sample_bytes: Mean size of a sample; None if an index or the listing tells it.
    """
    shards = found.shards
    sizes = [shard.size_bytes for shard in shards]
    samples_count = found.samples_count if found.is_indexed else None
    total_bytes = sum(size for size in sizes if size is not None) if None not in sizes else None
    if sample_bytes is None:
        sample_bytes = (total_bytes or 0) / max(1, samples_count or 0)
    unit_bytes = _unit_bytes(leaf, shards)
    names = {name for shard in shards if (name := shard.format or format_of_name(shard.key)) is not None}
    return SourcePlan(
        what=repr(leaf.source),
        share=share,
        shards_count=len(shards),
        size_bytes=total_bytes,
        largest_bytes=max((size for size in sizes if size is not None), default=None),
        formats=tuple(sorted(names)) if isinstance(leaf.source, Shards) else (),
        entry_bytes=_entry_bytes(shards, unit_bytes) if isinstance(leaf.source, Shards) else 0,
        unit_bytes=unit_bytes,
        indexed_count=found.indexed_count,
        samples_count=samples_count,
        sample_bytes=round(sample_bytes),
    )


def _unit_bytes(leaf: Pipeline, shards: Sequence[Shard]) -> int:
    shard = shards[0] if shards else None
    name = None if shard is None else shard.format or format_of_name(shard.key)
    if shard is None or name not in FORMATS or FORMATS[name].unit != "block":
        return 0
    size_bytes = shard.store.stat(shard.key).size_bytes if shard.size_bytes is None else shard.size_bytes
    if not size_bytes:
        return 0
    reader = ranged_of(name, shard=shard.url, size_bytes=size_bytes, fields=leaf.members())
    look_into(reader, lambda span: shard.store.read(shard.key, span).data)
    wanted_bytes = sum(span.length_bytes for unit in reader.units for span in unit.spans)
    return wanted_bytes // max(1, len(reader.units))


def _entry_bytes(shards: Sequence[Shard], unit_bytes: int) -> int | None:
    total_bytes = 0
    for shard in shards:
        name = shard.format or format_of_name(shard.key)
        unit = FORMATS[name].unit if name in FORMATS else None
        if unit is None or (unit == "shard" and shard.size_bytes is None):
            return None
        total_bytes += {"sample": 0, "block": unit_bytes // 2, "shard": (shard.size_bytes or 0) // 2}[unit]
    return total_bytes // max(1, len(shards))


def _requests(plan: LoaderPlan, memory: MemoryPlan) -> tuple[RequestEstimate | None, ConfigError | None]:
    """The requests of an epoch, and the error with which the loader would refuse it."""
    try:
        memory.check()
        return plan.estimate_requests(), None
    except ConfigError as refusal:
        return None, refusal


def _explanation(
    pipeline: Pipeline, plan: LoaderPlan, options: LoaderOptions
) -> tuple[Explanation, ConfigError | None]:
    read_plan, fetch = plan.read_plan, options.fetch or FetchConfig()
    sample_bytes, memory = None, read_plan.memory
    if isinstance(read_plan, StreamedReadPlan):
        sample_bytes, memory = read_plan.sized()
    assert memory is not None
    estimate, refusal = _requests(plan, memory)
    flat, shuffle = pipeline.flat(), pipeline.stage(Shuffle)
    looks = zip(flat.leaves, flat.schedule[0][1], read_plan.sources, strict=True)
    sources = tuple(_source(*look, sample_bytes=sample_bytes) for look in looks)
    lanes_owned = len(read_plan.order.lanes_owned)
    is_objects = all(source.objects is not None for source in read_plan.sources)
    sizes = read_plan.reading.sizes
    explanation = Explanation(
        pipeline=repr(pipeline),
        sources=sources,
        rank=read_plan.order.rank,
        world_size=read_plan.order.world_size,
        lanes_count=read_plan.order.lanes_count,
        window=plan.facts["window"],
        batch_size=None if pipeline.stage(Batch) is None else plan.rows_count,
        listing_requests=sum(map(_listing_requests, read_plan.sources)),
        epoch_requests=None if estimate is None else estimate.requests_max,
        epoch_requests_min=None if estimate is None else estimate.requests_min,
        epoch_bytes=None if estimate is None else estimate.bytes_max,
        epoch_bytes_min=None if estimate is None else estimate.bytes_min,
        in_flight_max=fetch.requests_max if is_objects else lanes_owned * sizes.requests_max,
        part_bytes=fetch.part_bytes if is_objects else sizes.part_bytes,
        row_bytes=row_bytes(pipeline),
        worker_factors=worker_factors(
            read_plan.sources,
            sample_bytes=sources[0].sample_bytes,
            rows_count=max(1, plan.rows_count // max(1, lanes_owned)),
            shuffled=shuffle is not None,
        ),
        memory=memory,
    )
    return explanation, refusal


def _listing_requests(source: DataSource) -> int:
    """Number of pages of 1 000 keys. Shards that are given by name are not listed."""
    listed_count = sum(shard.listed_size_bytes is not None for shard in source.shards)
    return -(-listed_count // LISTED_PER_REQUEST)


# ── the text ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _of_source(source: SourcePlan) -> str:
    share = f" {source.share:.1%} of the samples" if source.share < 1 else ""
    size = "sizes unknown" if source.size_bytes is None else format_bytes(source.size_bytes)
    largest = "" if source.largest_bytes is None else f", largest {format_bytes(source.largest_bytes)}"
    what = "shards" if source.formats or source.samples_count is None else "objects"
    data = f"{source.shards_count} {what}, {size}{largest}"
    if not source.shards_count and source.samples_count is not None:  # picked by number
        data = f"{source.samples_count} samples"
    lines = [f"source   {source.what}{share}", f"  data   {data}"]
    cost = f", on average {format_bytes(source.entry_bytes)}" if source.entry_bytes else ""
    for name in source.formats:
        unit = FORMATS[name].unit if name in FORMATS else "shard"
        lines.append(f"  format {name}: {_ENTRY[unit]}{cost if unit != 'sample' else ''}")
    if source.formats and source.samples_count is not None:
        lines.append(f"  index  complete: {source.samples_count} samples of {format_bytes(source.sample_bytes)}")
    elif source.formats:
        lines.append(
            f"  index  knows {source.indexed_count} of {source.shards_count} shards; samples of about "
            f"{format_bytes(source.sample_bytes)}. `penstock index` gives a length, and several ranks equal batches"
        )
    return "\n".join(lines)


def _of_order(plan: Explanation) -> list[str]:
    order = "as stored" if plan.window == 1 else f"shuffled, window of {plan.window} samples"
    batch = "" if plan.batch_size is None else f", batches of {plan.batch_size}"
    return [f"order    {order}; {plan.lanes_count} lanes, rank {plan.rank} of {plan.world_size}{batch}"]


def _of_cost(plan: Explanation) -> list[str]:
    memory = plan.memory
    row = "" if plan.row_bytes is None else f", a row {format_bytes(plan.row_bytes)}"
    if not memory.batches_bytes:
        row = ", batches of objects as stored not counted"
    verdict = "fits" if memory.total_bytes <= memory.budget_bytes else "does NOT fit"
    factors = plan.worker_factors
    workers = f"a DataLoader with {_listed(factors)} workers reads each byte {_listed(factors.values())}"
    held = " + ".join(
        f"{name} {format_bytes(held)}"
        for name, held in (
            ("window", memory.window_bytes),
            ("read-ahead", memory.read_ahead_bytes),
            ("batches", memory.batches_bytes),
        )
    )
    requests = f"{plan.listing_requests} to list; {_of_epoch(plan)}, of up to {format_bytes(plan.part_bytes)}"
    return [
        f"requests {requests}, {plan.in_flight_max} at a time",
        f"workers  {workers} times; without, and with processes=, once",
        f"memory   {held} = {format_bytes(memory.total_bytes)}{row}; {verdict} into {format_bytes(memory.budget_bytes)}",
    ]


def _of_epoch(plan: Explanation) -> str:
    if plan.epoch_requests is None or plan.epoch_bytes is None:
        return "per epoch unknown before it is read"
    at_least = f"{plan.epoch_requests_min} to " if plan.epoch_requests_min != plan.epoch_requests else ""
    return f"per epoch {at_least}{plan.epoch_requests} of {format_bytes(plan.epoch_bytes)} in all"


def _listed(values: Iterable[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


@boundary
def warm_cache(
    pipeline: Pipeline,
    cache: CacheConfig | str | os.PathLike[str],
    *,
    index_dir: str | os.PathLike[str] | None = None,
    expect: Callable[[int | None], None] = lambda _: None,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Warmed:
    """Read every shard and object of `pipeline`, and its indexes, into `cache`. Blocks in the cache are verified.

    Args:
        pipeline: A pipeline, with or without stages; all its sources are read.
        cache: The cache that is passed to the job's ``Loader``.
        index_dir: The index directory that is passed to the job's ``Loader``.
        expect: Called once with the number of bytes to read, or with None if it is unknown.
        progress: Called with the number of requests and of bytes that arrived since the last call.

    Raises:
        ConfigError: `pipeline` is not a pipeline, or reads nothing from a store.
        ObjectMissingError: No object matches a prefix or pattern.
        StoreError: The store failed; blocks that were read before are kept.

    Cost: a listing, and one request per part that is missing.
    """
    check_rereadable(pipeline, "warm_cache")
    from penstock.cache.warm import Warmed, warm  # imported here, so that `explain` does not import the cache

    finder = SourceFinder(pipeline, fetch=None, index_dir=index_dir, cache=cache)
    try:
        by_store: dict[Store, list[PlanItem]] = {}
        for source in finder.find(index="auto").sources:  # reads the indexes, through the cache
            for shard in source.shards:
                item = PlanItem(shard.key, etag=shard.etag, size_bytes=shard.size_bytes)
                by_store.setdefault(shard.store, []).append(item)
        if not by_store:
            raise ConfigError("there is nothing to warm: this pipeline reads no store", hint="ps.shards(url)")
        sizes = [item.size_bytes for plan in by_store.values() for item in plan]
        expect(None if None in sizes else sum(size for size in sizes if size is not None))
        done = [warm(store, plan, progress=progress) for store, plan in by_store.items()]
    finally:
        finder.close()
    return Warmed(*map(sum, zip(*done, strict=True)))
