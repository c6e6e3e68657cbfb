"""``explain``: looks at the data of a pipeline, and says what a loader would do: its plan, requests and memory."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from penstock.config import FetchConfig
from penstock.errors import ConfigError
from penstock.formats import FORMATS, format_of_name, look_into, ranged_of
from penstock.loader.batches.samples import Steps
from penstock.loader.peek import peek
from penstock.loader.plan.finding import Finder
from penstock.loader.plan.memory import Holding, MemoryPlan, said
from penstock.loader.plan.ranks import rank_and_world_size
from penstock.loader.plan.strided import worker_factors
from penstock.pipeline import Batch, BatchBySize, FlatMap, Pipeline, Shards, Shuffle

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.loader.plan.finding import FoundSource
    from penstock.loader.shards import Shard

LISTED_PER_REQUEST = 1000
LANES_SHUFFLED = 64
PEEKED = 8  # samples from which sizes are estimated, where no index tells
_ENTRY = {
    "sample": "any sample can be read by itself",
    "block": "entering inside costs the row group from its start, and the shard's footer",
    "shard": "entering inside costs the shard from its start",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePlan:
    """One data set of a pipeline, as it was found."""

    what: str
    """The source as it was written."""
    share: float
    """Of the samples, at the epoch's start; 1 where nothing is mixed."""
    shards_count: int
    """Shards, or objects."""
    size_bytes: int | None
    """Of all shards; None where the listing did not say."""
    largest_bytes: int | None
    """Of the largest shard."""
    formats: tuple[str, ...]
    """By name; empty where only the content tells."""
    entry_bytes: int | None
    """Read in vain, on average, where reading begins inside a shard: half of one that is compressed whole, half a row group
    of Parquet, nothing where samples can be read by themselves. None where only the shards tell."""
    unit_bytes: int
    """Of a row group, the wanted columns as stored, on average in the first shard: each lane holds one. Else 0."""
    indexed_count: int
    """Shards of which an index knows the samples."""
    samples_count: int | None
    """Of all shards; None where some have no index."""
    sample_bytes: int
    """Of a sample as stored: a mean where the index tells, else of the first few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What a loader would do with a pipeline. ``str(explanation)`` is what ``explain`` prints."""

    pipeline: str
    """As it was written."""
    sources: tuple[SourcePlan, ...]
    """One, or those of the mix."""
    rank: int
    """Of this process."""
    world_size: int
    """Data-parallel ranks."""
    lanes_count: int
    """Of the job."""
    window: int
    """Samples of the job to draw from; 1 where nothing is shuffled."""
    batch_size: int | None
    """Samples of this rank's batches; None where they go by size, or there is no batch."""
    listing_requests: int
    """Before the first sample; an index or a manifest saves most of them."""
    epoch_requests: int | None
    """GETs of this rank per epoch; None where sizes are not known."""
    in_flight_max: int
    """GETs at a time."""
    part_bytes: int
    """Of each GET, at most."""
    row_bytes: int | None
    """Of a sample in a batch; None where it is not of one shape."""
    worker_factors: Mapping[int, float]
    """How often a ``DataLoader`` with 2, 4 and 8 workers reads each byte; without workers it is read once."""
    memory: MemoryPlan
    """What is held."""

    def __str__(self) -> str:
        return "\n".join([self.pipeline, *map(_of_source, self.sources), *_of_order(self), *_of_cost(self)])


def explain(
    pipeline: Pipeline,
    *,
    lanes: int | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    prefetch_batches: int = 2,
    fetch: FetchConfig | None = None,
    index_dir: str | os.PathLike[str] | None = None,
    file: TextIO | None = None,
) -> Explanation:
    """Look at a pipeline's data, and print what a ``Loader`` with these options would do.

    Args:
        pipeline: With or without ``.batch()``.
        lanes: As for ``Loader``, like the others.
        rank: See there.
        world_size: See there.
        prefetch_batches: See there.
        fetch: See there.
        index_dir: See there.
        file: Where to print; default standard output.

    Returns:
        What was printed, as a record.

    Raises:
        ConfigError: the plan does not fit its memory budget (it is printed nevertheless), or as ``Loader`` says.
        StoreError, DataError: the data cannot be listed, or its first samples not be read.

    Cost: the listing, one read of an index, of Parquet a footer, and a few samples of each source, on which the user's
        functions are run.
    """
    if not isinstance(pipeline, Pipeline):
        raise ConfigError(f"explain({pipeline!r}) must be given a pipeline", hint="ps.shards(url)")
    rank, world_size = rank_and_world_size(rank, world_size)
    flat = pipeline.flat()
    finder = Finder(pipeline, fetch=fetch, index_dir=index_dir)
    try:
        found = finder.find(index="auto")
        looks = [_look(*each) for each in zip(flat.leaves, flat.schedule[0][1], found.sources, strict=True)]
    finally:
        finder.close()
    made = _planned(
        pipeline,
        looks,
        rank=rank,
        world_size=world_size,
        lanes=lanes,
        prefetch_batches=prefetch_batches,
        fetch=fetch or FetchConfig(),
        sizes=[shard.size_bytes for source in found.sources for shard in source.shards],
        found=found.sources,
    )
    print(made, file=file or sys.stdout)
    made.memory.check()
    return made


def _look(leaf: Pipeline, share: float, found: FoundSource) -> SourcePlan:
    shards = found.shards
    sizes = [shard.size_bytes for shard in shards]
    rows = [row for row in found.rows if row is not None]
    samples_count = sum(row.samples_count for row in rows) if len(rows) == len(shards) else None
    total_bytes = sum(size for size in sizes if size is not None) if None not in sizes else None
    if samples_count and total_bytes is not None:
        sample_bytes = total_bytes // samples_count
    else:
        first = peek(Pipeline(leaf.source), PEEKED)
        sample_bytes = sum(map(_value_bytes, first)) // max(1, len(first))
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
        indexed_count=len(rows),
        samples_count=samples_count,
        sample_bytes=sample_bytes,
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


def _planned(
    pipeline: Pipeline,
    sources: Sequence[SourcePlan],
    *,
    rank: int,
    world_size: int,
    lanes: int | None,
    prefetch_batches: int,
    fetch: FetchConfig,
    sizes: Sequence[int | None],
    found: Sequence[FoundSource],
) -> Explanation:
    shuffle, batch = pipeline.stage(Shuffle), pipeline.stage(Batch)
    lanes_count = lanes or (LANES_SHUFFLED if shuffle else world_size)
    if any(source.samples_count is None for source in sources):
        lanes_count = min(lanes_count, sum(source.shards_count for source in sources))
    lanes_owned = max(1, lanes_count // world_size)
    window = shuffle.window if shuffle else 1
    row_bytes = _row_bytes(pipeline)
    size = None if batch is None else batch.size or -(-(batch.global_size or 1) // world_size)
    rows_count = size or _rows_by_size(pipeline)
    sample_bytes = round(sum(source.share * source.sample_bytes for source in sources))
    holding = Holding(
        window_count=window // world_size if shuffle else 0,
        rows_count=(prefetch_batches + 1) * rows_count,
        row_bytes=row_bytes,
        readers_count=lanes_owned,
        data_bytes=None if None in sizes else sum(each or 0 for each in sizes),
        fetch=fetch,
    )
    reading = holding.sizes(sample_bytes)
    memory = holding.plan(sample_bytes, reading)
    units_bytes = lanes_owned * sum(source.unit_bytes for source in sources)
    memory = replace(memory, read_ahead_bytes=max(memory.read_ahead_bytes, units_bytes))
    parts = None if None in sizes else sum(-(-(each or 1) // reading.part_bytes) for each in sizes)
    return Explanation(
        pipeline=repr(pipeline),
        sources=tuple(sources),
        rank=rank,
        world_size=world_size,
        lanes_count=lanes_count,
        window=window,
        batch_size=size,
        listing_requests=sum(-(-source.shards_count // LISTED_PER_REQUEST) for source in sources),
        epoch_requests=None if parts is None else -(-parts // world_size),
        in_flight_max=min(fetch.requests_max, lanes_owned * reading.requests_max),
        part_bytes=reading.part_bytes,
        row_bytes=row_bytes,
        worker_factors=worker_factors(
            found,
            sample_bytes=sample_bytes,
            rows_count=max(1, rows_count // lanes_owned),
            shuffled=shuffle is not None,
        ),
        memory=memory,
    )


def _row_bytes(pipeline: Pipeline) -> int | None:
    """Of a sample in a batch: what the stages say, else what the first sample is."""
    steps = Steps(pipeline.flat().leaves[0])
    specs = steps.specs()
    if specs is not None and all(spec.dtype != "object" for spec in specs.values()):
        return sum(np.dtype(spec.dtype).itemsize * int(np.prod(spec.shape)) for spec in specs.values())
    if steps.is_empty or steps.is_many or pipeline.stage(FlatMap) is not None:
        return None
    first = peek(pipeline, 1)
    return _value_bytes(first[0]) if first else None


def _rows_by_size(pipeline: Pipeline) -> int:
    """Samples of a batch by size, if all are like the first."""
    stage = pipeline.stage(BatchBySize)
    first = peek(pipeline, 1) if stage is not None else []
    if stage is None or not first:
        return 1
    fitting = max(1, stage.size_max // max(1, stage.size_of(first[0])))
    return min(fitting, stage.samples_max or fitting)


def _value_bytes(sample: dict[str, Any]) -> int:
    total = 0
    for name, value in sample.items():
        if not name.startswith("__"):
            if isinstance(value, int | float):
                total += np.int64().nbytes  # as a batch holds it
            else:
                total += value.nbytes if hasattr(value, "nbytes") else sys.getsizeof(value) if value is not None else 0
    return total


# ── the text ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _of_source(source: SourcePlan) -> str:
    share = f" {source.share:.1%} of the samples" if source.share < 1 else ""
    size = "sizes unknown" if source.size_bytes is None else said(source.size_bytes)
    largest = "" if source.largest_bytes is None else f", largest {said(source.largest_bytes)}"
    lines = [f"source   {source.what}{share}", f"  data   {source.shards_count} shards, {size}{largest}"]
    cost = f", on average {said(source.entry_bytes)}" if source.entry_bytes else ""
    for name in source.formats:
        unit = FORMATS[name].unit if name in FORMATS else "shard"
        lines.append(f"  format {name}: {_ENTRY[unit]}{cost if unit != 'sample' else ''}")
    if source.samples_count is not None:
        lines.append(f"  index  complete: {source.samples_count} samples of {said(source.sample_bytes)}")
    elif source.formats:
        lines.append(
            f"  index  of {source.indexed_count} of {source.shards_count} shards; samples of about "
            f"{said(source.sample_bytes)}. `penstock index` gives a length, and several ranks equal batches"
        )
    return "\n".join(lines)


def _of_order(plan: Explanation) -> list[str]:
    order = "as stored" if plan.window == 1 else f"shuffled, window of {plan.window} samples"
    batch = "" if plan.batch_size is None else f", batches of {plan.batch_size}"
    return [f"order    {order}; {plan.lanes_count} lanes, rank {plan.rank} of {plan.world_size}{batch}"]


def _of_cost(plan: Explanation) -> list[str]:
    memory = plan.memory
    epoch = "unknown, sizes are not listed" if plan.epoch_requests is None else f"about {plan.epoch_requests}"
    row = "" if plan.row_bytes is None else f", a row {said(plan.row_bytes)}"
    verdict = "fits" if memory.total_bytes <= memory.budget_bytes else "does NOT fit"
    requests = f"{plan.listing_requests} to list; per epoch {epoch}, of up to {said(plan.part_bytes)}"
    factors = plan.worker_factors
    workers = f"a DataLoader with {_listed(factors)} workers reads each byte {_listed(factors.values())}"
    held = " + ".join(
        f"{name} {said(held)}"
        for name, held in (
            ("window", memory.window_bytes),
            ("read-ahead", memory.read_ahead_bytes),
            ("batches", memory.batches_bytes),
        )
    )
    return [
        f"requests {requests}, {plan.in_flight_max} at a time",
        f"workers  {workers} times; without, and with processes=, once",
        f"memory   {held} = {said(memory.total_bytes)}{row}; {verdict} into {said(memory.budget_bytes)}",
    ]


def _listed(values: Iterable[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
