"""``penstock.pack.convert``: shards into shards of another format or size, sample for sample.

The same machinery and guarantees as packing: a plan that names every source shard in its version, a shard that is
finished when its index says so, several at a time, memory within one budget.

Without a size one shard becomes one. With one, the sources are laid end to end, and cut by their sizes alone: a new
shard has the samples that begin in its piece, so the plan needs no look into the sources. Shards that begin in one
source are written one after the other, from one reading of it; of what the last of them takes from the next source,
that one's first shard reads over. Compressed sources are in one piece.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal, cast

from penstock import compose
from penstock.errors import ConfigError, DataError
from penstock.formats import FORMATS, HEAD_BYTES, detect, format_of_name
from penstock.pack import keeping
from penstock.pack.destination import Destination, refuse_inside, split_destination
from penstock.pack.entries import Entry, Member, relative_names, resolve_sizes
from penstock.pack.fields import parse_fields
from penstock.pack.identity import job_identity, source_digest
from penstock.pack.job import Job
from penstock.pack.options import check_format, check_key_field, check_pattern
from penstock.pack.packing import root_url
from penstock.pack.plan import Plan, ShardPlan
from penstock.pack.progress import Listener, OneAtATime, Packed, Silence
from penstock.pack.rewriting import ShardsRecipe
from penstock.pack.running import Crew, How, carry_out
from penstock.pack.shard_file import FORMATS_WRITTEN
from penstock.pipeline import Pipeline, Shards, shards
from penstock.sources.shards import ShardFinder
from penstock.tracebacks import boundary
from penstock.types import ByteRange

if TYPE_CHECKING:
    from typing import Unpack

    from penstock.pack.running import Unit
    from penstock.pipeline.sources import ConnectionOptions
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
    listener: Listener | None = None,
    **connection: Unpack[ConnectionOptions],
) -> Packed:
    """Write shards anew in another format, or of another size.

    Args:
        source: Shards, as for ``penstock.shards``, or what that gives (with ``format=`` and ``on_corrupt=``).
        destination: A folder; with `bytes_max` also a pattern of names in one.
        to: As ``format`` of ``pack``.
        bytes_max: About how large the new shards are, in bytes of the old ones; None: each becomes one of the same name
            with another suffix.
        key_field: A field that takes the samples' keys, for formats that keep none. ``"__key__"``: TFRecord keeps them
            so that penstock reads them back as the samples' keys.
        fields: ``"image/encoded=jpg,image/class/label=cls"``: which are taken, under which names; default all.
        allow_loss: Convert though the format cannot hold all: see ``penstock.pack.keeping``.
        append: Add to shards that are there.
        overwrite: Replace what penstock wrote there.
        verify: Read every shard back.
        jobs: As ``How.jobs``.
        memory_bytes_max: As ``How.memory_bytes_max``.
        executor: As for ``pack``.
        address: The same.
        listener: Told how it goes.
        **connection: As for ``penstock.connect``.

    Raises:
        ConfigError: something would be lost; the destination lies in the source, or is not empty.
        DataError: a source shard is corrupt, or a sample cannot be held.
        StoreError: something cannot be read or written; run again, it goes on.

    Cost: reads and writes every byte once; with `bytes_max` some sources twice, in part.
    """
    how = How(executor=executor, address=address, jobs=jobs, memory_bytes_max=memory_bytes_max, verify=verify)
    options = ConvertOptions(to=to, bytes_max=bytes_max, key_field=key_field, fields=fields, allow_loss=allow_loss)
    with Conversion(source, destination, options, connection=connection) as conversion:
        conversion.plan(append=append, overwrite=overwrite)
        conversion.save()
        return conversion.run(how, OneAtATime(listener or Silence()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """What a conversion is asked to do; each as in ``convert``.

    Raises:
        ConfigError: one is out of bounds.
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


class Conversion(Job):
    """One conversion.

    Args:
        source: As for ``convert``.
        destination: The same.
        options: How.
        connection: To both.
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
            raise ConfigError(f"{source!r} is not one set of shards")
        folder, self._name = split_destination(os.fspath(destination))
        if self._name is not None:
            self._check_name(self._name, options)
        super().__init__(connection)
        self._source = pipeline.source
        self._options = options
        self._job = {
            "kind": "convert",
            "source": source_digest(pipeline, pipeline.source.connection.given()),
            "name": self._name,
            "to": options.to,
            "bytes_max": options.bytes_max,
            "key_field": options.key_field,
            "fields": options.fields,
        }
        store = self._stack.enter_context(compose.connect(folder, **connection))
        try:
            self.destination = Destination(store)
        except BaseException:
            self._stack.close()
            raise

    @staticmethod
    def _check_name(name: str, options: ConvertOptions) -> None:
        if options.bytes_max is None:
            raise ConfigError(
                f"the destination has names ({name!r}), and each shard keeps its own",
                hint="with bytes_max= they are new",
            )
        if "{split}" in name:
            raise ConfigError(f"the destination's names ({name!r}) have {{split}}, and a conversion has no splits")
        if format_of_name(name) != FORMATS_WRITTEN[options.to].read_as:
            raise ConfigError(f"the destination's names ({name!r}) are not those of {options.to}")

    def plan(self, *, append: bool, overwrite: bool) -> Plan:
        """What is to be done: the plan that lies at the destination, where this conversion began before, else a new one.

        Nothing is written or removed before ``save``.

        Raises:
            As ``convert``.
        """
        target, options = self.destination, self._options
        plan = None if overwrite else target.plan(job_identity(self._job))
        if plan is not None:
            if target.is_done(plan) or plan.is_of_urls:
                now = self._planned(self._found(), plan.starts)
                if target.is_done(plan):
                    plan.check_source(now)
                plan.complete(now)
            given = self._source.connection.given()
            self._stores = [self._stack.enter_context(compose.connect(url, **given)) for url in plan.roots]
            self.made = plan
            return plan
        found = self._found()
        for folder in {shard.url[: shard.url.rfind("/") + 1] for shard in found}:
            refuse_inside(folder, target.url)
        _refuse_losses(found, self._source, options)
        plan = self._planned(found, target.begin(self._job, self._patterns(), append=append, overwrite=overwrite))
        names = [shard.name for shard in plan.shards]
        taken = [name for name in names if name in target.present]
        if taken:
            raise ConfigError(f"{target.store.describe(taken[0])} is there", hint="choose another destination")
        if FORMATS_WRITTEN[options.to].read_as.startswith("mds"):
            target.refuse_index_json(names)
        self.made = plan
        return plan

    def _found(self) -> list[Shard]:
        finder = ShardFinder(self._source, fetch=None)
        self._stack.callback(finder.close)
        found = finder.find()
        resolve_sizes(found)
        return found

    def _patterns(self) -> dict[str, str]:
        """Of the new shards' names; none where each keeps its own."""
        if self._options.bytes_max is None:
            return {}
        return {"": check_pattern(self._name or f"shard-%06d{FORMATS_WRITTEN[self._options.to].suffix}")}

    def _planned(self, found: list[Shard], starts: dict[str, int]) -> Plan:
        options, patterns = self._options, self._patterns()
        plan = Plan(
            identity=job_identity(self._job),
            kind="shards",
            format=options.to,
            patterns=patterns,
            starts=starts,
            job=self._job,
        )
        sources = self._sources(found, plan)
        if options.bytes_max is None:
            plan.shards = _one_from_one(sources, relative_names([shard.url for shard in found]), options.to)
        else:
            plan.shards = _recut(sources, self._source, patterns[""], options.bytes_max, starts[""])
        return plan

    def _sources(self, found: list[Shard], plan: Plan) -> list[Entry]:
        """The source shards as entries of the plan, whose roots they fill."""
        roots: dict[int, int] = {}
        entries = []
        for shard in found:
            if id(shard.store) not in roots:
                roots[id(shard.store)] = len(roots)
                self._stores.append(shard.store)
            member = Member("", roots[id(shard.store)], shard.key, shard.size_bytes or 0, shard.etag)
            entries.append(Entry(shard.url, (member,), {}))
        plan.roots = [root_url(store) for store in self._stores]
        return entries

    def run(self, how: How, listener: Listener) -> Packed:
        """Carry the plan out, but for what is finished; then the index and the manifest.

        Raises:
            As ``convert``.
        """
        assert self.made is not None
        plan, options, source = self.made, self._options, self._source
        recipe = ShardsRecipe(
            format=plan.format,
            source_format=source.format,
            on_corrupt=source.on_corrupt,
            specs=parse_fields(options.fields),
            key_field=options.key_field,
            bytes_max=options.bytes_max,
            allow_loss=options.allow_loss,
        )
        to_source = cast("ConnectionOptions", source.connection.given())
        url, run = root_url(self.destination.store), self.destination.run
        return carry_out(
            plan,
            _units,
            destination=self.destination,
            stores=self._stores,
            crew=Crew(recipe, url, self._connection, tuple(plan.roots), to_source, run),
            how=how,
            listener=listener,
        )


# ── what becomes of which shard ─────────────────────────────────────────────────────────────────────────────────────


def _one_from_one(sources: list[Entry], names: list[str], to: str) -> list[ShardPlan]:
    """Each under its name with the new suffix."""
    made: dict[str, ShardPlan] = {}
    for name, entry in zip(names, sources, strict=True):
        new = _renamed(name, to)
        if new in made:
            raise DataError(f"two shards would become {new!r}", shard=entry.key)
        made[new] = ShardPlan(new, (entry,), 0)
    return list(made.values())


def _renamed(name: str, to: str) -> str:
    known = format_of_name(name)
    suffixes = FORMATS[known].suffixes if known is not None else ()
    suffix = next((each for each in sorted(suffixes, key=len, reverse=True) if name.lower().endswith(each)), "")
    return name[: len(name) - len(suffix)] + FORMATS_WRITTEN[to].suffix


def _recut(sources: list[Entry], source: Shards, pattern: str, bytes_max: int, first: int) -> list[ShardPlan]:
    """Pieces of the sources: ``{"from": start, "to": end}``, in bytes of the source.

    Equal shards, as few as `bytes_max` allows; where there are sources that cannot be divided, each is filled to it.
    """
    made: list[list[Entry]] = [[]]
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


def _units(todo: list[ShardPlan]) -> list[Unit]:
    """New shards that begin in the same source together."""
    return [tuple(unit) for _, unit in groupby(todo, key=lambda shard: shard.entries[0].members)]


def _refuse_losses(found: list[Shard], source: Shards, options: ConvertOptions) -> None:
    if options.allow_loss:
        return
    for name in sorted({_format_of(shard, source) for shard in found}):
        if lost := keeping.losses(name, options.to, key_field=options.key_field):
            raise ConfigError(
                f"from {keeping.plain(name)} to {keeping.plain(options.to)} would be lost: {'; '.join(lost)}",
                hint="--allow-loss (allow_loss=True) accepts it",
            )


def _format_of(shard: Shard, source: Shards) -> str:
    known = source.format or format_of_name(shard.key)
    if known is not None:
        return known
    head = b"" if not shard.size_bytes else shard.store.read(shard.key, ByteRange(0, HEAD_BYTES)).data
    return detect(shard.url, head)
