"""``penstock.pack(source, destination)``: plans, and carries the plan out."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from penstock import compose
from penstock.errors import ConfigError, DataError
from penstock.index import is_manifest_name
from penstock.pack import entries, tables
from penstock.pack.destination import Destination, refuse_inside, split_destination
from penstock.pack.identity import job_identity, source_digest
from penstock.pack.job import Job
from penstock.pack.options import BYTES_MAX, PackOptions
from penstock.pack.plan import Plan, cut
from penstock.pack.progress import Listener, OneAtATime, Packed, Silence
from penstock.pack.running import Crew, EntriesRecipe, How, carry_out, shares
from penstock.pack.sequence import is_map, write_iterable
from penstock.pack.verifying import check_shard
from penstock.pipeline import Objects, Pipeline, objects
from penstock.sources.shards import Shard, ShardFinder
from penstock.tracebacks import boundary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Unpack

    from penstock.pipeline.sources import ConnectionOptions
    from penstock.store import Store


@boundary
def pack(
    source: str | os.PathLike[str] | Pipeline | Iterable[Any],
    destination: str | os.PathLike[str],
    *,
    format: str | None = None,  # noqa: A002 - the word that users look for
    name: str | None = None,
    bytes_max: int = BYTES_MAX,
    samples_max: int | None = None,
    group_by: Literal["stem", "file"] = "stem",
    fields: str | None = None,
    labels: str | None = None,
    label_field: str = "cls",
    split: Mapping[str, float] | None = None,
    shuffle: bool = False,
    seed: int = 0,
    transform: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
    transform_version: str | None = None,
    key_field: str | None = None,
    allow_loss: bool = False,
    skip_unnamed: bool = False,
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
    """Pack samples into shards, with an index and a manifest beside them.

    Interrupted in any way, the same call goes on where it was: shards that are finished stay, none is visible in part,
    none has a sample twice. Called again when all is done, it does nothing, unless the source changed: then it raises
    an error. Until all is done it follows the plan that it made of a folder at first, whatever the folder holds by then;
    a table or manifest must be the one that it began with.

    Args:
        source: A directory or prefix of files, a manifest of them, a table (CSV, JSON lines, Parquet) whose columns
            name them, ``penstock.objects(...)``; or an iterable or data set of dicts or tuples.
        destination: A folder, or a pattern of names in one: ``s3://bucket/train-%06d.tar``.
        format: ``tar``, ``tfrecord``, ``recordio``, ``jsonl``, ``mds`` or ``parquet``, compressed with ``.gz`` or
            ``.zst`` behind it (Parquet's pages also with ``.snappy``); default by `name`, else tar.
        name: Pattern of the shards' names, with ``{split}`` where there are splits.
        bytes_max: A shard ends before the sample that would make it larger; exact for tar without `transform`, a target
            else; before compression.
        samples_max: The same, in samples.
        group_by: ``stem``: files with one name up to the first dot are one sample; ``file``: each is one.
        fields: ``"image=png,label=cls:int"``: what is taken, as what; see ``penstock.pack.fields``.
        labels: ``"folders"``: the number of a sample's topmost folder; or the URL of a table of names and labels.
        label_field: The field that takes it.
        split: ``{"train": 0.9, "val": 0.1}``: by a hash of each sample's key.
        shuffle: Permute the samples before they are cut into shards.
        seed: Of that, and of the split.
        transform: ``fn(sample) -> sample``, on dicts of bytes; runs on `jobs` threads, or in Ray's processes.
        transform_version: Any text that changes whenever the transform does. By default penstock compares the
            transform's code and the values that it uses; a value that cannot be compared (an open file, a lock, a
            generator) makes this argument necessary.
        key_field: A field that takes the samples' keys, for formats that keep none (TFRecord, RecordIO, MDS).
            ``"__key__"``: TFRecord keeps them so that penstock reads them back as the samples' keys.
        allow_loss: Pack to such a format without a `key_field`, though keys that the source gave are lost.
        skip_unnamed: Pass over files whose names make no key.
        append: Add shards to those that are there.
        overwrite: Replace the shards that penstock packed there; nothing else is touched.
        verify: Read every shard back and hold it against its index.
        jobs: As ``How.jobs``.
        memory_bytes_max: As ``How.memory_bytes_max``.
        executor: ``ray``: on a cluster, a task for each shard; a machine that is lost costs what it had begun.
        address: Of the cluster.
        listener: Told how it goes.
        **connection: As for ``penstock.connect``, of source and destination.

    Raises:
        ConfigError: an argument, or the destination lies inside the source, or is not empty; what was packed there
            came from another source, or with other options or another transform (the message says which).
        DataError: the source is empty, a name is no key, two files are one field, a label is missing, a sample is
            larger than a shard, ...; the source changed since it was packed.
        StoreError: something cannot be read or written; run again, it goes on.

    Cost: a listing; each object of the source is read once. Memory: the plan, some 500 bytes per sample, and what
        `memory_bytes_max` says.
    """
    if not isinstance(destination, str | os.PathLike):
        raise ConfigError(f"the destination {destination!r} must be a URL or a path")
    if not isinstance(source, str | os.PathLike | Pipeline) and not hasattr(source, "__iter__") and not is_map(source):
        raise ConfigError(
            f"the source {source!r} is neither a URL nor an iterable of samples",
            hint="penstock.objects(...), a list, ...",
        )
    folder, named = split_destination(os.fspath(destination))
    if named is not None and name is not None:
        raise ConfigError(f"the destination has names ({named!r}), and name={name!r} has others")
    options = PackOptions(
        format=format,
        name=named or name,
        bytes_max=bytes_max,
        samples_max=samples_max,
        group_by=group_by,
        fields=fields,
        labels=labels,
        label_field=label_field,
        split=split,
        shuffle=shuffle,
        seed=seed,
        key_field=key_field,
        allow_loss=allow_loss,
        skip_unnamed=skip_unnamed,
        transform=transform,
        transform_version=transform_version,
    )
    how = How(executor=executor, address=address, jobs=jobs, memory_bytes_max=memory_bytes_max, verify=verify)
    if how.executor == "ray" and not isinstance(source, str | os.PathLike | Pipeline):
        raise ConfigError(
            f"executor='ray' needs a source that can be listed, not {type(source).__name__}",
            hint="write the items as files or a table first, or pack them here",
        )
    with Packing(source, folder, options, connection=connection) as packing:
        packing.plan(append=append, overwrite=overwrite, memory_bytes_max=memory_bytes_max)
        packing.save()
        return packing.run(how, OneAtATime(listener or Silence()))


class Packing(Job):
    """One packing.

    Args:
        source: As for ``pack``.
        folder: URL of the destination, with a slash at its end.
        options: How.
        connection: To both.
    """

    def __init__(self, source: Any, folder: str, options: PackOptions, *, connection: ConnectionOptions) -> None:
        super().__init__(connection)
        self._source = source
        self._options = options
        self._to_source: ConnectionOptions = source.source.connection.given() if _has_connection(source) else connection
        self.is_resumed = False
        self._is_python = not isinstance(source, str | os.PathLike | Pipeline)
        self._store = self._stack.enter_context(compose.connect(folder, **connection))
        try:
            if not self._is_python:
                self._refuse_inside()
            self.destination = Destination(self._store)
        except BaseException:
            self._stack.close()
            raise

    def _refuse_inside(self) -> None:
        if isinstance(self._source, Pipeline):
            source = self._source.source
            if not isinstance(source, Objects):
                raise ConfigError(f"{source!r} are shards already", hint="penstock.pack.convert rewrites shards")
            if source.read is not None or self._source.stages:
                raise ConfigError("a source with read= or with stages cannot be listed", hint="pack an iterable of it")
            urls: tuple[str, ...] = source.urls
        else:
            urls = (os.fspath(self._source),)
        for url in urls:
            if not tables.is_table_name(url) and not is_manifest_name(url):
                root, key = compose.split(url.rstrip("/") + "/")
                with compose.connect(root, **self._to_source) as store:
                    refuse_inside(store.describe(key), self._store.describe(""))

    # ── planning ────────────────────────────────────────────────────────────────────────────────────────────────────

    def plan(self, *, append: bool, overwrite: bool, memory_bytes_max: int | None = None) -> Plan:
        """What is to be done: the plan that lies at the destination, where this packing began before, else a new one.

        Nothing is written or removed before ``save``.

        Raises:
            As ``pack``.
        """
        job = self._options.job(source_digest(self._source, self._to_source))
        found = None if overwrite else self._begun(job)
        if found is not None:
            if self._must_be_as_planned(found) or found.is_of_urls:
                now = self._planned(job, self._listed(), found.starts)
                if self._must_be_as_planned(found):
                    found.check_source(now)
                found.complete(now)
            self.made, self.is_resumed = found, True
            self._stores = [self._stack.enter_context(compose.connect(url, **self._to_source)) for url in found.roots]
            return found
        if self._is_python:
            self._check_python()
            self.made = self._new(job, "sequence", self._begin(job, append=append, overwrite=overwrite))
            return self.made
        listing = self._listed()
        self._check_memory(listing, memory_bytes_max)
        if not listing.are_keys_counted:
            self._options.refuse_lost_key(listing.entries[0].key)
        self.made = self._planned(job, listing, self._begin(job, append=append, overwrite=overwrite))
        self._stores = listing.roots
        return self.made

    def _begun(self, job: dict[str, Any]) -> Plan | None:
        """The plan that lies at the destination, if this packing was begun there, also by an earlier version."""
        found = self.destination.plan(job_identity(job))
        if found is None and isinstance(self._source, str | os.PathLike) and self._options.transform is None:
            found = self.destination.plan(self._options.identity_before(os.fspath(self._source)))
        return found

    def _must_be_as_planned(self, plan: Plan) -> bool:
        """Whether a source that holds something else by now is an error; of a folder only once all was packed."""
        if self._is_python:
            return False
        urls = [os.fspath(self._source)] if not isinstance(self._source, Pipeline) else []
        is_written_down = any(is_manifest_name(url) or tables.is_table_name(url) for url in urls)
        return is_written_down or self._options.labels not in (None, "folders") or self.destination.is_done(plan)

    def _begin(self, job: dict[str, Any], *, append: bool, overwrite: bool) -> dict[str, int]:
        options = self._options
        starts = self.destination.begin(job, options.patterns, append=append, overwrite=overwrite)
        if options.is_mds:
            self.destination.refuse_index_json(options.patterns.values())
        return starts

    def _planned(self, job: dict[str, Any], listing: entries.Listing, starts: dict[str, int]) -> Plan:
        plan = self._new(job, "entries", starts)
        plan.shards = cut(listing.entries, self._options, starts)
        plan.roots = [root_url(store) for store in listing.roots]
        plan.passed_over, plan.classes = listing.passed_over, listing.classes
        return plan

    def _new(self, job: dict[str, Any], kind: str, starts: dict[str, int]) -> Plan:
        options = self._options
        return Plan(
            identity=job_identity(job),
            kind=kind,
            format=options.format_name,
            patterns=options.patterns,
            starts=starts,
            job=job,
        )

    def _check_python(self) -> None:
        options = self._options
        refused = {"labels": options.labels, "split": options.split, "shuffle": options.shuffle or None}
        given = [name for name, value in refused.items() if value is not None]
        if given:
            raise ConfigError(
                f"{given[0]}= needs a source that can be listed, not {type(self._source).__name__}",
                hint="do it in the iterable itself",
            )

    def _check_memory(self, listing: entries.Listing, memory_bytes_max: int | None) -> None:
        largest = max(listing.entries, key=lambda entry: max((m.size_bytes for m in entry.members), default=0))
        size = max((member.size_bytes for member in largest.members), default=0)
        budget, _ = shares(memory_bytes_max, 1, self._options.format_name)
        if size > budget // 2:
            raise ConfigError(
                f"a file of sample {largest.key!r} has {size} bytes, more than half of the {budget} for reading",
                hint="raise --memory-bytes-max (memory_bytes_max=)",
            )

    def _listed(self) -> entries.Listing:
        options = self._options
        if isinstance(self._source, Pipeline):
            source = self._source.source
            assert isinstance(source, Objects)
            listing = self._of_objects(source)
        else:
            url = os.fspath(self._source)
            if is_manifest_name(url):
                listing = self._of_objects(self._objects(manifest=url))
            elif tables.is_table_name(url):
                listing = self._of_table(url)
            else:
                listing = self._of_objects(self._objects(urls=url))
        if options.labels == "folders":
            return entries.labelled_by_folders(listing, options.label_field)
        if options.labels is not None:
            rows = self._table(options.labels)
            return entries.labelled_by_table(listing, options.label_field, rows, url=options.labels)
        return listing

    def _objects(self, *, urls: str | list[str] | None = None, manifest: str | None = None) -> Objects:
        source = objects(urls, manifest=manifest, **self._connection).source
        assert isinstance(source, Objects)
        return source

    def _found(self, source: Objects) -> list[Shard]:
        finder = ShardFinder(source, fetch=None)
        self._stack.callback(finder.close)
        return finder.find()

    def _of_objects(self, source: Objects) -> entries.Listing:
        relative = not source.is_list and source.manifest is None
        return entries.entries_of_objects(self._found(source), self._options, relative=relative)

    def _table(self, url: str) -> list[dict[str, Any]]:
        root, key = compose.split(url)
        with compose.connect(root, **self._connection) as store:
            return tables.read_table(store.read(key).data, url=url)

    def _of_table(self, url: str) -> entries.Listing:
        table = self._table(url)
        rows = entries.rows_of_table(table, self._options.specs, url=url)
        base = compose.folder_of(url)
        urls = [
            file if "://" in file or file.startswith("/") else base + file
            for row in rows
            for file in row.files.values()
        ]
        listing = entries.entries_of_rows(rows, self._found(self._objects(urls=urls)) if urls else [])
        return listing._replace(are_keys_counted=not any(row.get("__key__") for row in table))

    # ── running ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, how: How, listener: Listener) -> Packed:
        """Carry the plan out, but for what is finished; then the index and the manifest.

        Raises:
            As ``pack``.
        """
        assert self.made is not None
        plan, options = self.made, self._options
        if plan.kind == "sequence":
            return self._run_sequence(plan, verify=how.verify, listener=listener)
        if options.transform is not None and how.jobs is None and how.executor == "threads":
            how = replace(how, jobs=os.cpu_count() or 1)
        recipe = EntriesRecipe(format=plan.format, transform=options.transform, key_field=options.key_field)
        url, run = root_url(self._store), self.destination.run
        return carry_out(
            plan,
            lambda shards: [(shard,) for shard in shards],
            destination=self.destination,
            stores=self._stores,
            crew=Crew(recipe, url, self._connection, tuple(plan.roots), self._to_source, run),
            how=how,
            listener=listener,
        )

    def _run_sequence(self, plan: Plan, *, verify: bool, listener: Listener) -> Packed:
        known, written = write_iterable(self._source, self.destination, plan, self._options, listener)
        rows = [*known, *written]
        if not rows:
            raise DataError("the iterable gave no sample")
        if verify:
            for row in rows:
                check_shard(self.destination.store, self.destination.place, row)
                listener.verified(row)
        self.destination.finish(plan, rows)
        return Packed(self.destination.url, tuple(rows), len(written), 0)


def _has_connection(source: Any) -> bool:
    """Whether the source says itself how to reach it; the destination goes by the call's own arguments."""
    return isinstance(source, Pipeline) and hasattr(source.source, "connection")


def root_url(store: Store) -> str:
    """A URL from which ``compose.connect`` makes `store` again."""
    url = store.describe("")
    if url.startswith("file://"):
        return url.removeprefix("file://")  # a path: nothing in it is quoted
    return url.rstrip("/") if url.startswith("memory://") else url
