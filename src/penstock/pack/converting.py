"""``penstock.pack.convert``: shards into shards of another format, sample for sample, one from one.

The same machinery and guarantees as packing: a plan that names every source shard in its version, a shard that is
finished when its index says so, several at a time, memory within one budget.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

from penstock import compose
from penstock.errors import ConfigError, DataError
from penstock.fetch import set_process_budget
from penstock.fetch.plan import PlanItem
from penstock.formats import FORMATS, HEAD_BYTES, detect, feed_in_pieces, format_of_name, parser_of, ranged_of
from penstock.loader.shards import ShardFinder
from penstock.pack import keeping
from penstock.pack.destination import Destination, refuse_inside
from penstock.pack.entries import Entry, Member, relative_names, resolve_sizes
from penstock.pack.fields import parse_fields, take
from penstock.pack.packing import JOBS, root_url, shares, source_name
from penstock.pack.plan import Plan, ShardPlan
from penstock.pack.progress import Listener, OneAtATime, Packed, Silence
from penstock.pack.running import Runner
from penstock.pack.shard_file import FORMATS_WRITTEN, ShardFile
from penstock.pack.verifying import check_shard
from penstock.pipeline import Pipeline, Shards, shards
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Unpack

    from penstock.formats import Sample
    from penstock.index import ShardRow
    from penstock.loader.shards import Shard
    from penstock.pack.fields import Spec
    from penstock.pipeline.sources import ConnectionOptions
    from penstock.store import Store
    from penstock.types import Buffer


def convert(
    source: str | os.PathLike[str] | Pipeline,
    destination: str | os.PathLike[str],
    *,
    to: str,
    key_field: str | None = None,
    fields: str | None = None,
    allow_loss: bool = False,
    append: bool = False,
    overwrite: bool = False,
    verify: bool = False,
    jobs: int = JOBS,
    memory_bytes_max: int | None = None,
    listener: Listener | None = None,
    **connection: Unpack[ConnectionOptions],
) -> Packed:
    """Write shards anew in another format; each becomes one of the same name with another suffix.

    Args:
        source: Shards, as for ``penstock.shards``, or what that gives (with ``format=`` and ``on_corrupt=``).
        destination: A folder.
        to: ``tar``, ``tfrecord``, ``recordio``, ``jsonl`` or ``parquet``.
        key_field: A field that takes the samples' keys, for formats that have none.
        fields: ``"image/encoded=jpg,image/class/label=cls"``: which are taken, under which names; default all.
        allow_loss: Convert though the format cannot hold all: see ``penstock.pack.keeping``.
        append: Add to shards that are there.
        overwrite: Replace what penstock wrote there.
        verify: Read every shard back.
        jobs: Shards at a time.
        memory_bytes_max: As for ``pack``.
        listener: Told how it goes.
        **connection: As for ``penstock.connect``.

    Raises:
        ConfigError: something would be lost; the destination lies in the source, or is not empty.
        DataError: a source shard is corrupt, or a sample cannot be held.
        StoreError: something cannot be read or written; run again, it goes on.

    Cost: reads and writes every byte once.
    """
    if to not in FORMATS_WRITTEN:
        raise ConfigError(f"to={to!r} is not one of {', '.join(FORMATS_WRITTEN)}")
    if jobs < 1:
        raise ConfigError(f"jobs={jobs!r} must be at least 1")
    specs = parse_fields(fields)
    pipeline = source if isinstance(source, Pipeline) else shards(source, **connection)
    if not isinstance(pipeline.source, Shards) or pipeline.stages:
        raise ConfigError(f"{source!r} is not one set of shards")
    heard = OneAtATime(listener or Silence())
    budget, jobs = shares(memory_bytes_max, jobs)
    if memory_bytes_max is not None:
        set_process_budget(budget)
    with ExitStack() as stack:
        store = stack.enter_context(compose.connect(os.fspath(destination).rstrip("/") + "/", **connection))
        target = Destination(store)
        identity = _identity(source, to, key_field, fields, pipeline.source)
        plan = None if overwrite else target.plan(identity)
        if plan is None:
            finder = ShardFinder(pipeline.source, fetch=None)
            stack.callback(finder.close)
            found = finder.find()
            plan, roots = _planned(found, target, to, identity)
            _refuse_losses(found, pipeline.source, to, key_field, allow_loss=allow_loss)
            target.begin(identity, {}, append=append, overwrite=overwrite)
            taken = [shard.name for shard in plan.shards if shard.name in target.present]
            if taken:
                raise ConfigError(f"{store.describe(taken[0])} is there", hint="choose another destination")
            target.save(plan)
        else:
            given = pipeline.source.connection.given()
            roots = [stack.enter_context(compose.connect(url, **given)) for url in plan.roots]
        writer = _ShardsWriter(target, roots, pipeline.source, plan.format, specs, key_field, heard)
        return writer.run(plan, jobs=jobs, verify=verify)


def _identity(source: object, to: str, key_field: str | None, fields: str | None, described: Shards) -> str:
    parts = ["convert", source_name(source), to, key_field, fields, described.format, described.on_corrupt]
    text = "\n".join(map(repr, parts))
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


def _planned(found: list[Shard], target: Destination, to: str, identity: str) -> tuple[Plan, list[Store]]:
    """One shard from each, under its name with the new suffix."""
    resolve_sizes(found)
    roots: dict[int, tuple[int, Store]] = {}
    for shard in found:
        roots.setdefault(id(shard.store), (len(roots), shard.store))
    for folder in {shard.url[: shard.url.rfind("/") + 1] for shard in found}:
        refuse_inside(folder, target.url)
    names = relative_names([shard.url for shard in found])
    made: dict[str, ShardPlan] = {}
    for name, shard in zip(names, found, strict=True):
        new = _renamed(name, to)
        if new in made:
            raise DataError(f"two shards would become {new!r}", shard=shard.url)
        member = Member("", roots[id(shard.store)][0], shard.key, shard.size_bytes or 0, shard.etag)
        made[new] = ShardPlan(new, (Entry(shard.url, (member,), {}),), 0)
    stores = [store for _, store in roots.values()]
    plan = Plan(identity=identity, kind="shards", format=to, patterns={}, starts={})
    plan.shards, plan.roots = list(made.values()), [root_url(store) for store in stores]
    return plan, stores


def _renamed(name: str, to: str) -> str:
    known = format_of_name(name)
    suffixes = FORMATS[known].suffixes if known is not None else ()
    suffix = next((each for each in sorted(suffixes, key=len, reverse=True) if name.lower().endswith(each)), "")
    return name[: len(name) - len(suffix)] + FORMATS_WRITTEN[to].suffix


def _refuse_losses(found: list[Shard], source: Shards, to: str, key_field: str | None, *, allow_loss: bool) -> None:
    if allow_loss:
        return
    for name in sorted({_format_of(shard, source) for shard in found}):
        if lost := keeping.losses(name, to, key_field=key_field):
            raise ConfigError(
                f"from {keeping.plain(name)} to {to} would be lost: {'; '.join(lost)}",
                hint="--allow-loss (allow_loss=True) accepts it",
            )


def _format_of(shard: Shard, source: Shards) -> str:
    known = source.format or format_of_name(shard.key)
    if known is not None:
        return known
    head = b"" if not shard.size_bytes else shard.store.read(shard.key, ByteRange(0, HEAD_BYTES)).data
    return detect(shard.url, head)


class _ShardsWriter:
    """Converts the shards of a plan."""

    def __init__(
        self,
        target: Destination,
        roots: Sequence[Store],
        source: Shards,
        to: str,
        specs: tuple[Spec, ...] | None,
        key_field: str | None,
        listener: Listener,
    ) -> None:
        self._target = target
        self._roots = roots
        self._source = source
        self._to = to
        self._specs = specs
        self._key_field = key_field
        self._listener = listener
        self._runner: Runner | None = None

    def run(self, plan: Plan, *, jobs: int, verify: bool) -> Packed:
        """Convert what is not finished; then the index and the manifest."""
        target = self._target
        known = {row.key: row for row in target.rows([shard.name for shard in plan.shards])}
        for row in known.values():
            self._listener.finished(row, known=True)
            if verify:
                check_shard(target.store, target.place, row)
                self._listener.verified(row)
        todo = [shard for shard in plan.shards if shard.name not in known]
        self._listener.planned(len(todo), 0, sum(shard.source_bytes for shard in todo))
        self._runner = Runner(target, jobs=max(1, min(jobs, len(todo))), listener=self._listener, verify=verify)
        written = self._runner.run(todo, self)
        rows = [known.get(shard.name) or written[shard.name] for shard in plan.shards]
        target.finish(plan, rows)
        return Packed(target.url, tuple(rows), len(written), 0)

    def __call__(self, shard: ShardPlan) -> ShardRow:
        """One shard."""
        (member,) = shard.entries[0].members
        target = self._target
        with ShardFile(target.store, target.place, shard.name, format_name=self._to) as file:
            for samples, size_bytes, name in self._read(member, shard.entries[0].key):
                assert self._runner is not None
                self._runner.check()
                for sample in samples:
                    file.add(self._made(sample, keeping.plain(name)))
                self._listener.progressed(len(samples), size_bytes)
            return file.close()

    def _made(self, sample: Sample, source: str) -> dict[str, object]:
        if self._specs is not None:
            taken = take(sample.fields, self._specs, sample.key)
            sample = type(sample)(sample.key, {}, sample.offset_bytes)
            sample.fields = taken
            if any(not isinstance(value, memoryview) for value in taken.values()):
                made: dict[str, object] = {"__key__": sample.key, **taken}
                return made if self._key_field is None else {self._key_field: sample.key, **made}
        return keeping.converted(sample, source, self._to, key_field=self._key_field)

    def _read(self, member: Member, url: str) -> Iterator[tuple[list[Sample], int, str]]:
        """Samples of a shard, a part at a time; the bytes read for them; its format."""
        store, on_corrupt = self._roots[member.root], self._source.on_corrupt
        said = self._source.format or format_of_name(url)
        if said is not None and FORMATS[said].ranged is not None:
            yield from self._read_ranged(store, member, url, said)
            return
        if not member.size_bytes:
            yield [], 0, said or "tar"
            return
        parser, name = None, ""
        chunks = store.read_parts([PlanItem(member.key, etag=member.etag, size_bytes=member.size_bytes)])
        try:
            for chunk in chunks:
                if parser is None:
                    name = self._parsed_as(self._source.format or detect(url, bytes(chunk.data[:HEAD_BYTES])))
                    parser = parser_of(name, shard=url, on_corrupt=on_corrupt)
                size_bytes = len(chunk.data)
                for samples in feed_in_pieces(parser, chunk.data):
                    yield samples, size_bytes, name
                    size_bytes = 0
            assert parser is not None
            yield parser.finish(), 0, name
        finally:
            chunks.close()  # type: ignore[attr-defined]

    def _parsed_as(self, name: str) -> str:
        """Records that go into records are not looked into."""
        raw = f"{keeping.plain(name)}-raw{name[len(name.removesuffix('.gz').removesuffix('.zst')) :]}"
        into = {"tfrecord": ("tfrecord", "recordio"), "recordio": ("tfrecord", "recordio")}
        is_record = self._to in into.get(keeping.plain(name), ()) and self._specs is None and self._key_field is None
        return raw if is_record and raw in FORMATS else name

    def _read_ranged(
        self, store: Store, member: Member, url: str, name: str
    ) -> Iterator[tuple[list[Sample], int, str]]:
        reader = ranged_of(name, shard=url, size_bytes=member.size_bytes, on_corrupt=self._source.on_corrupt)

        def read(span: ByteRange) -> Buffer:
            return next(iter(store.read_many([PlanItem(member.key, span, member.etag)]))).data

        looking = reader.look()
        span = next(looking, None)
        while span is not None:
            try:
                span = looking.send(read(span))
            except StopIteration:
                break
        for number, unit in enumerate(reader.units):
            samples = reader.read(number, [read(part) for part in unit.spans])
            yield samples, sum(part.end - part.start for part in unit.spans), name
