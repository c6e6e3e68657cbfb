"""``penstock.pack.convert``: rewrites shards in another format or size, sample for sample.

Converting uses the code of packing and gives the same guarantees: a plan names every source shard and its version, a
shard is finished when its index describes it, several shards are written at a time, and memory stays within one budget.

Without `bytes_max`, each shard becomes one shard. With it, the sources are treated as one sequence of bytes that is cut only by
size: a new shard has the samples that begin in its piece, so the plan is made without reading the sources. Shards
that begin in the same source are written one after the other, while it is read once. The last of them also needs a part of the
next source, which is read again for that source's own shards. Compressed sources are not cut.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal, cast

from penstock.errors import ConfigError, DataError
from penstock.formats import FORMATS, HEAD_BYTES, detect, format_of_name
from penstock.pack.destination import refuse_inside, split_destination
from penstock.pack.entries import PlanEntry, Roots, relative_names, resolve_sizes
from penstock.pack.fields import parse_fields
from penstock.pack.job import PackJob, root_url
from penstock.pack.options import check_format, check_key_field, check_pattern, job_identity, source_digest
from penstock.pack.plan import PackPlan, ShardPlan
from penstock.pack.recipes import NullListener, ShardsRecipe
from penstock.pack.workers import ExecutionOptions
from penstock.pack.written_formats import FORMATS_WRITTEN, base_format, losses
from penstock.pipeline import Pipeline, Shards, shards
from penstock.system.tracebacks import boundary
from penstock.types import ByteRange

if TYPE_CHECKING:
    from typing import Unpack

    from penstock.pack.recipes import Packed, PackListener, ShardGroup
    from penstock.pipeline.factories import ConnectionOptions
    from penstock.sources.shards import Shard


@boundary
def convert(
    source: str | os.PathLike[str] | Pipeline,
    destination: str | os.PathLike[str],
    *,
    to: str,
    bytes_max: int | None = None,
    key_field: str | None = None,
    fields: str | None = None,
    allow_loss: bool = False,
    append: bool = False,
    overwrite: bool = False,
    verify: bool = False,
    jobs: int | None = None,
    memory_bytes_max: int | None = None,
    executor: Literal["threads", "ray"] = "threads",
    address: str | None = None,
    listener: PackListener | None = None,
    **connection: Unpack[ConnectionOptions],
) -> Packed:
    """Rewrite shards in another format or size.

    Args:
        source: Shards, as in ``penstock.shards``, or a pipeline from it (with ``format=`` and ``on_corrupt=``).
        destination: A folder; with `bytes_max` also a pattern of names in a folder.
        to: Format of the new shards, see ``format`` in ``pack``.
        bytes_max: Approximate size of the new shards, in bytes of the old ones. None makes each shard one shard of the
            same name with another suffix.
        key_field: Name of a field that takes the samples' keys, for formats that store none. With ``"__key__"``, TFRecord
            stores them so that penstock reads them back as the samples' keys.
        fields: Fields that are taken, and their names: ``"image/encoded=jpg,image/class/label=cls"``; None takes all.
        allow_loss: Whether to convert although the format cannot hold everything, see ``penstock.pack.written_formats``.
        append: Whether to add shards to those that exist.
        overwrite: Whether to replace the shards that penstock wrote there.
        verify: Whether to read every shard back and compare it with its index.
        jobs: Number of shards at a time, see ``ExecutionOptions.jobs``.
        memory_bytes_max: Bytes that reading and writing may hold, see ``ExecutionOptions.memory_bytes_max``.
        executor: ``threads`` of this process, or ``ray``, see ``pack``.
        address: Address of the Ray cluster.
        listener: Receives progress.
        **connection: Connection options of source and destination, as in ``penstock.connect``.

    Raises:
        ConfigError: Something would be lost, or the destination lies in the source or is not empty.
        DataError: A source shard is corrupt, or the format cannot hold a sample.
        StoreError: Something cannot be read or written. The same call continues.

    Cost: reads and writes every byte once; with `bytes_max`, parts of some sources are read twice.
    """
    execution = ExecutionOptions(
        executor=executor, address=address, jobs=jobs, memory_bytes_max=memory_bytes_max, verify=verify
    )
    options = ConvertOptions(to=to, bytes_max=bytes_max, key_field=key_field, fields=fields, allow_loss=allow_loss)
    with Conversion(source, destination, options, connection=connection) as conversion:
        conversion.plan(append=append, overwrite=overwrite)
        conversion.save()
        return conversion.run(execution, listener or NullListener())


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """The options of a conversion, as in ``convert``.

    Raises:
        ConfigError: An option is invalid.
    """

    to: str
    bytes_max: int | None = None
    key_field: str | None = None
    fields: str | None = None
    allow_loss: bool = False

    def __post_init__(self) -> None:
        check_format(self.to, "to")
        parse_fields(self.fields)
        check_key_field(self.key_field, self.to)
        if self.bytes_max is not None and self.bytes_max < 1:
            raise ConfigError(f"bytes_max={self.bytes_max!r} must be at least 1")


class Conversion(PackJob):
    """One conversion.

    Args:
        source: A source that ``convert`` takes.
        destination: A destination that ``convert`` takes.
        options: Format, sizes and naming of the new shards.
        connection: Connection options of source and destination.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Pipeline,
        destination: str | os.PathLike[str],
        options: ConvertOptions,
        *,
        connection: ConnectionOptions,
    ) -> None:
        pipeline = source if isinstance(source, Pipeline) else shards(source, **connection)
        if not isinstance(pipeline.source, Shards) or pipeline.stages:
            raise ConfigError(f"{source!r} is not a plain set of shards")
        folder, self._name = split_destination(os.fspath(destination))
        if self._name is not None:
            self._check_name(self._name, options)
        super().__init__(folder, connection, cast("ConnectionOptions", pipeline.source.connection.given()))
        self._source = pipeline.source
        self._options = options
        self._job = {
            "kind": "convert",
            "source": source_digest(pipeline, self._source_connection),
            "name": self._name,
            "to": options.to,
            "bytes_max": options.bytes_max,
            "key_field": options.key_field,
            "fields": options.fields,
        }

    @staticmethod
    def _check_name(name: str, options: ConvertOptions) -> None:
        if options.bytes_max is None:
            raise ConfigError(
                f"the destination has the names {name!r}, but each shard keeps its own name",
                hint="bytes_max= gives the shards new names",
            )
        if "{split}" in name:
            raise ConfigError(f"the destination's names {name!r} have {{split}}, but a conversion has no splits")
        if format_of_name(name) != FORMATS_WRITTEN[options.to].read_as:
            raise ConfigError(f"the destination's names {name!r} do not have the suffix of {options.to}")

    def plan(self, *, append: bool, overwrite: bool) -> PackPlan:
        """Return the plan that an earlier run of this conversion stored, or a new one. Nothing changes before ``save``.

        Args:
            append: Whether to add shards to those that exist.
            overwrite: Whether to replace the shards that penstock wrote there.

        Raises:
            ConfigError, DataError, StoreError: For the reasons that ``convert`` names.
        """
        target, options = self.destination, self._options
        stored = None if overwrite else target.plan(job_identity(self._job))
        if stored is not None:
            return self._resume(
                stored,
                lambda: self._new_plan(self._find(self._source), stored.starts),
                must_match=target.is_done(stored),
                urls=None if self._source.manifest else self._source.urls,
            )
        found = self._find(self._source)
        for folder in {shard.url[: shard.url.rfind("/") + 1] for shard in found}:
            refuse_inside(folder, target.url)
        _refuse_losses(found, self._source, options)
        is_mds = FORMATS_WRITTEN[options.to].read_as.startswith("mds")
        starts = target.begin(self._job, self._patterns(), is_mds=is_mds, append=append, overwrite=overwrite)
        plan = self._new_plan(found, starts)
        names = [shard.name for shard in plan.shards]
        taken = [name for name in names if name in target.present]
        if taken:
            raise ConfigError(f"{target.store.describe(taken[0])} exists", hint="choose another destination")
        if is_mds:
            target.refuse_index_json(names)
        self._plan = plan
        return plan

    def _patterns(self) -> dict[str, str]:
        """Return the pattern of the new shards' names; empty if each shard keeps its own name."""
        if self._options.bytes_max is None:
            return {}
        return {"": check_pattern(self._name or f"shard-%06d{FORMATS_WRITTEN[self._options.to].suffix}")}

    def _new_plan(self, found: list[Shard], starts: dict[str, int]) -> PackPlan:
        options, patterns = self._options, self._patterns()
        plan = PackPlan(
            identity=job_identity(self._job),
            kind="shards",
            format=options.to,
            patterns=patterns,
            starts=starts,
            job=self._job,
        )
        resolve_sizes(found)
        roots = Roots()
        sources = [PlanEntry(shard.url, (roots.member("", shard),), {}) for shard in found]
        self._stores, plan.roots = roots.stores, [root_url(store) for store in roots.stores]
        if options.bytes_max is None:
            plan.shards = _one_from_one(sources, relative_names([shard.url for shard in found]), options.to)
        else:
            plan.shards = _recut(sources, self._source, patterns[""], options.bytes_max, starts[""])
        return plan

    def run(self, execution: ExecutionOptions, listener: PackListener) -> Packed:
        """Write the shards that are not finished, then the index and the manifest.

        Args:
            execution: Options for carrying out the plan.
            listener: Receives progress.

        Raises:
            ConfigError, DataError, StoreError: For the reasons that ``convert`` names.
        """
        options, source = self._options, self._source
        recipe = ShardsRecipe(
            format=self.planned.format,
            source_format=source.format,
            on_corrupt=source.on_corrupt,
            specs=parse_fields(options.fields),
            key_field=options.key_field,
            bytes_max=options.bytes_max,
            allow_loss=options.allow_loss,
        )
        return self._execute(recipe, by_first_source, options=execution, listener=listener)


# ── which sources become which shards ─────────────────────────────────────────────────────────────────────────────────────


def _one_from_one(sources: list[PlanEntry], names: list[str], to: str) -> list[ShardPlan]:
    """Return one shard for each source, of the same name with the new suffix."""
    plans: dict[str, ShardPlan] = {}
    for name, entry in zip(names, sources, strict=True):
        new = _renamed(name, to)
        if new in plans:
            raise DataError(f"two shards would become {new!r}", shard=entry.key)
        plans[new] = ShardPlan(new, (entry,), 0)
    return list(plans.values())


def _renamed(name: str, to: str) -> str:
    known = format_of_name(name)
    suffixes = FORMATS[known].suffixes if known is not None else ()
    suffix = next((each for each in sorted(suffixes, key=len, reverse=True) if name.lower().endswith(each)), "")
    return name[: len(name) - len(suffix)] + FORMATS_WRITTEN[to].suffix


def _recut(sources: list[PlanEntry], source: Shards, pattern: str, bytes_max: int, first: int) -> list[ShardPlan]:
    """Cut the sources into pieces; the values of an entry, ``{"from": start, "to": end}``, are bytes of the source.

    The shards are of equal size, and as few as `bytes_max` allows. If a source cannot be cut, shards are filled up to
    `bytes_max` instead.
    """
    made: list[list[PlanEntry]] = [[]]
    filled = 0
    wholes = [FORMATS[source.format or format_of_name(entry.key) or "tar"].unit == "shard" for entry in sources]
    if not any(wholes):
        total = sum(entry.size_bytes for entry in sources)
        bytes_max = -(-total // max(1, -(-total // bytes_max)))
    for entry, whole in zip(sources, wholes, strict=True):
        size, start = entry.size_bytes, 0
        while start < size:
            if filled and (filled >= bytes_max or (whole and filled + size > bytes_max)):
                made.append([])
                filled = 0
            end = size if whole else min(size, start + bytes_max - filled)
            made[-1].append(entry._replace(values={"from": start, "to": end}))
            filled += end - start
            start = end
    if not made[0]:
        raise DataError(f"all {len(sources)} shards are empty", shard=sources[0].key)
    return [
        ShardPlan(pattern % number, tuple(entries), sum(entry.values["to"] - entry.values["from"] for entry in entries))
        for number, entries in enumerate(made, first)
    ]


def by_first_source(todo: list[ShardPlan]) -> list[ShardGroup]:
    """Group the new shards that begin in the same source."""
    return [tuple(group) for _, group in groupby(todo, key=lambda shard: shard.entries[0].members)]


def _refuse_losses(found: list[Shard], source: Shards, options: ConvertOptions) -> None:
    if options.allow_loss:
        return
    for name in sorted({_format_of(shard, source) for shard in found}):
        if lost := losses(name, options.to, key_field=options.key_field):
            raise ConfigError(
                f"converting {base_format(name)} to {base_format(options.to)} would lose {'; '.join(lost)}",
                hint="--allow-loss (allow_loss=True) accepts this",
            )


def _format_of(shard: Shard, source: Shards) -> str:
    known = source.format or format_of_name(shard.key)
    if known is not None:
        return known
    head = b"" if not shard.size_bytes else shard.store.read(shard.key, ByteRange(0, HEAD_BYTES)).data
    return detect(shard.url, head)
