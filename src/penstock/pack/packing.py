"""``penstock.pack(source, destination)``: plans a packing and carries the plan out."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from penstock import compose
from penstock.config import check_names
from penstock.errors import ConfigError, DataError
from penstock.formats import format_of_name
from penstock.index import is_manifest_name
from penstock.pack import entries
from penstock.pack.destination import refuse_inside, split_destination
from penstock.pack.job import PackJob, root_url
from penstock.pack.options import BYTES_MAX, PackOptions, is_table_name, job_identity, source_digest
from penstock.pack.plan import PackPlan, cut
from penstock.pack.recipes import EntriesRecipe, NullListener, Packed
from penstock.pack.sequence import TokenRows, is_map, write_iterable
from penstock.pack.verification import check_shard
from penstock.pack.workers import ExecutionOptions, memory_shares
from penstock.pipeline import Batch, Objects, Pipeline, TokenBlocks, check_rereadable, objects
from penstock.system.argument_names import arguments_of
from penstock.system.tracebacks import boundary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Unpack

    from penstock.pack.recipes import PackListener
    from penstock.pipeline.factories import ConnectionOptions


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
    listener: PackListener | None = None,
    **connection: Unpack[ConnectionOptions],
) -> Packed:
    """Pack samples into shards, with an index and a manifest beside them.

    After any interruption, the same call continues: finished shards stay, no shard is ever partly visible, and no sample
    is packed twice. A call after everything is packed does nothing, or raises an error if the source has changed. Until
    everything is packed, a run follows the plan that was first made of a folder, even if the folder has changed since; a
    table or manifest must not change in that time.

    Args:
        source: A directory or prefix of files, a manifest of them, a table (CSV, JSON lines, Parquet) with a column of
            file names, ``penstock.objects(...)``, an iterable or data set of dicts or tuples, or a pipeline that ends with
            ``token_blocks``, whose blocks become the samples.
        destination: A folder, or a pattern of names in a folder: ``s3://bucket/train-%06d.tar``.
        format: ``tar``, ``tfrecord``, ``recordio``, ``jsonl``, ``mds`` or ``parquet``. The suffixes ``.gz`` and ``.zst``
            compress it (``parquet`` also takes ``.snappy``). None takes the format of `name`'s suffix, or tar, or mds for
            blocks of tokens.
        name: Pattern of the shards' names, with ``{split}`` if there are splits.
        bytes_max: Size limit of a shard in bytes before compression; a shard ends before the sample that would exceed
            it. Exact for tar without `transform`, otherwise approximate.
        samples_max: Limit of samples in a shard.
        group_by: ``stem`` makes files with the same name up to the first dot one sample; ``file`` makes each file one.
        fields: Fields that are taken, and how: ``"image=png,label=cls:int"``, see ``penstock.pack.fields``.
        labels: ``"folders"`` numbers the topmost folders of the samples; otherwise the URL of a table of names and labels.
        label_field: Name of the field that takes the label.
        split: Shares by name, ``{"train": 0.9, "val": 0.1}``; a hash of each sample's key decides.
        shuffle: Whether to permute the samples before they are cut into shards.
        seed: Seed of the permutation and of the split.
        transform: ``fn(sample) -> sample``, on dicts of bytes; runs on `jobs` threads, or in Ray's processes.
        transform_version: Any text that changes whenever the transform does. By default penstock compares the
            transform's code and the values that it uses; it needs this argument if one of them cannot be compared (an
            open file, a lock, a generator).
        key_field: Name of a field that takes the samples' keys, for formats that store none (TFRecord, RecordIO, MDS).
            With ``"__key__"``, TFRecord stores them so that penstock reads them back as the samples' keys.
        allow_loss: Whether to pack into such a format without a `key_field`, although the keys of the source are lost.
        skip_unnamed: Whether to pass over files whose names are not sample keys.
        append: Whether to add shards to those that exist.
        overwrite: Whether to replace the shards that penstock packed there; nothing else is touched.
        verify: Whether to read every shard back and compare it with its index.
        jobs: Number of shards at a time, see ``ExecutionOptions.jobs``.
        memory_bytes_max: Bytes that reading and writing may hold, see ``ExecutionOptions.memory_bytes_max``.
        executor: ``ray`` runs one task per shard on a cluster; if a machine is lost, its unfinished shards are repeated.
        address: Address of the cluster.
        listener: Receives progress.
        **connection: Connection options of source and destination, as in ``penstock.connect``.

    Raises:
        ConfigError: An argument is invalid; the destination lies inside the source, or is not empty; or the shards there
            were packed from another source, or with other options or another transform (the message says which).
        DataError: The source is empty, a name is not a key, two files are one field, a label is missing, a sample is
            larger than a shard, and so on; or the source changed after it was packed.
        StoreError: Something cannot be read or written. The same call continues.

    Cost: a listing; each object of the source is read once. Memory: the plan, about 500 bytes per sample, and
        `memory_bytes_max`.
    """
    check_names("pack", connection, [*arguments_of(compose.connect), *arguments_of(pack)])
    if not isinstance(destination, str | os.PathLike):
        raise ConfigError(f"the destination {destination!r} must be a URL or a path")
    if not isinstance(source, str | os.PathLike | Pipeline) and not hasattr(source, "__iter__") and not is_map(source):
        raise ConfigError(
            f"the source {source!r} is neither a URL nor an iterable of samples",
            hint="penstock.objects(...), a list, ...",
        )
    folder, named = split_destination(os.fspath(destination))
    if named is not None and name is not None:
        raise ConfigError(f"the destination has the names {named!r}, which name={name!r} contradicts")
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
    execution = ExecutionOptions(
        executor=executor, address=address, jobs=jobs, memory_bytes_max=memory_bytes_max, verify=verify
    )
    if execution.executor == "ray" and (is_blocks(source) or not isinstance(source, str | os.PathLike | Pipeline)):
        raise ConfigError(
            f"executor='ray' needs a source that can be listed, not {type(source).__name__}",
            hint="write the items to files or a table first, or pack them with threads",
        )
    with Packing(source, folder, options, connection=connection) as packing:
        packing.plan(append=append, overwrite=overwrite, memory_bytes_max=memory_bytes_max)
        packing.save()
        return packing.run(execution, listener or NullListener())


def is_blocks(source: object) -> bool:
    """Return whether a source is a pipeline that ends with ``token_blocks``."""
    return isinstance(source, Pipeline) and source.stage(TokenBlocks) is not None


class Packing(PackJob):
    """Packs a source into a folder: plans the shards, and writes those that are missing.

    Args:
        source: A source that ``pack`` takes.
        folder: URL of the destination, which ends with a slash.
        options: Options of the shards.
        connection: Connection options of source and destination.
    """

    def __init__(self, source: Any, folder: str, options: PackOptions, *, connection: ConnectionOptions) -> None:
        has_connection = isinstance(source, Pipeline) and hasattr(source.source, "connection")
        super().__init__(folder, connection, source.source.connection.given() if has_connection else connection)
        self._source = source
        self._is_blocks = is_blocks(source)
        if self._is_blocks and options.format is None and format_of_name(options.name or "") is None:
            options = replace(options, format="mds")  # it stores arrays of one size as they are
        self._options = options
        self._is_python = self._is_blocks or not isinstance(source, str | os.PathLike | Pipeline)

    def _check_source(self) -> None:
        """Refuse a source that cannot be read again or listed, or in which the destination lies."""
        if isinstance(self._source, Pipeline):
            check_rereadable(self._source, "pack")
            if not self._is_blocks:
                _check_listable(self._source)
            elif self._source.stage(Batch) is not None:
                raise ConfigError("pack() takes blocks of tokens, not batches of them", hint="leave out .batch()")
        for url in self._source_urls() or ():
            root, key = compose.split(url.rstrip("/") + "/")
            with compose.connect(root, **self._source_connection) as store:
                refuse_inside(store.describe(key), self.destination.url)

    def _source_urls(self) -> tuple[str, ...] | None:
        """Return the URLs of the source; None if a manifest or a table names its objects."""
        if isinstance(self._source, Pipeline):
            leaves = [leaf.source for leaf in self._source.flat().leaves]
            if any(getattr(source, "manifest", None) is not None for source in leaves):
                return None
            return tuple(url for source in leaves for url in getattr(source, "urls", ()))
        if self._is_python:
            return ()
        url = os.fspath(self._source)
        return None if is_table_name(url) or is_manifest_name(url) else (url,)

    # ── planning ────────────────────────────────────────────────────────────────────────────────────────────────────

    def plan(self, *, append: bool, overwrite: bool, memory_bytes_max: int | None = None) -> PackPlan:
        """Return the plan that an earlier run of this packing stored, or a new one. Nothing changes before ``save``.

        Args:
            append: Whether to add shards to those that exist.
            overwrite: Whether to replace the shards that penstock packed there.
            memory_bytes_max: Bytes that reading and writing may hold; None uses the process's budget.

        Raises:
            ConfigError, DataError, StoreError: For the reasons that ``pack`` names.
        """
        self._check_source()
        job = self._options.job(source_digest(self._source, self._source_connection))
        stored = None if overwrite else self._stored_plan(job)
        if stored is not None:
            return self._resume(
                stored,
                lambda: self._new_plan(job, self._listed(), stored.starts),
                must_match=self._must_be_as_planned(stored),
                urls=self._source_urls(),
            )
        if self._is_python:
            self._check_python()
            starts = self._begin(job, append=append, overwrite=overwrite)
            self._plan = PackPlan.of_options(self._options, job, "sequence", starts)
            return self._plan
        listing = self._listed()
        self._check_memory(listing, memory_bytes_max)
        if not listing.are_keys_counted:
            self._options.refuse_lost_key(listing.entries[0].key)
        self._plan = self._new_plan(job, listing, self._begin(job, append=append, overwrite=overwrite))
        self._stores = listing.roots
        return self._plan

    def _stored_plan(self, job: dict[str, Any]) -> PackPlan | None:
        """Return the plan that an earlier run of this packing stored, perhaps with an earlier version of penstock."""
        stored = self.destination.plan(job_identity(job))
        if stored is None and isinstance(self._source, str | os.PathLike) and self._options.transform is None:
            stored = self.destination.plan(self._options.identity_before(os.fspath(self._source)))
        return stored

    def _must_be_as_planned(self, plan: PackPlan) -> bool:
        """Return whether a changed source is an error; a folder may change until everything is packed."""
        if self._is_python:
            return False
        is_written_down = not isinstance(self._source, Pipeline) and self._source_urls() is None
        return is_written_down or self._options.labels not in (None, "folders") or self.destination.is_done(plan)

    def _begin(self, job: dict[str, Any], *, append: bool, overwrite: bool) -> dict[str, int]:
        options = self._options
        return self.destination.begin(job, options.patterns, is_mds=options.is_mds, append=append, overwrite=overwrite)

    def _new_plan(self, job: dict[str, Any], listing: entries.SourceListing, starts: dict[str, int]) -> PackPlan:
        plan = PackPlan.of_options(self._options, job, "entries", starts)
        plan.shards = cut(listing.entries, self._options, starts)
        plan.roots = [root_url(store) for store in listing.roots]
        plan.passed_over, plan.classes = listing.passed_over, listing.classes
        return plan

    def _check_python(self) -> None:
        options = self._options
        refused = {"labels": options.labels, "split": options.split, "shuffle": options.shuffle or None}
        given = [name for name, value in refused.items() if value is not None]
        if given:
            raise ConfigError(
                f"{given[0]}= needs a source that can be listed, not {type(self._source).__name__}",
                hint="do it in the iterable",
            )

    def _check_memory(self, listing: entries.SourceListing, memory_bytes_max: int | None) -> None:
        largest = max(listing.entries, key=lambda entry: max((m.size_bytes for m in entry.members), default=0))
        size = max((member.size_bytes for member in largest.members), default=0)
        budget, _ = memory_shares(memory_bytes_max, 1, self._options.format_name)
        if size > budget // 2:
            raise ConfigError(
                f"a file of sample {largest.key!r} has {size} bytes, more than half of the {budget} bytes for reading",
                hint="raise --memory-bytes-max (memory_bytes_max=)",
            )

    def _listed(self) -> entries.SourceListing:
        options = self._options
        if isinstance(self._source, Pipeline):
            source = self._source.source
            assert isinstance(source, Objects)
            listing = self._of_objects(source)
        else:
            url = os.fspath(self._source)
            if is_manifest_name(url):
                listing = self._of_objects(self._objects(manifest=url))
            elif is_table_name(url):
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

    def _of_objects(self, source: Objects) -> entries.SourceListing:
        relative = not source.is_list and source.manifest is None
        return entries.entries_of_objects(self._find(source), self._options, relative=relative)

    def _table(self, url: str) -> list[dict[str, Any]]:
        root, key = compose.split(url)
        with compose.connect(root, **self._connection) as store:
            return entries.read_table(store.read(key).data, url=url)

    def _of_table(self, url: str) -> entries.SourceListing:
        table = self._table(url)
        rows = entries.rows_of_table(table, self._options.specs, url=url)
        base = compose.folder_of(url)
        urls = [
            file if "://" in file or file.startswith("/") else base + file
            for row in rows
            for file in row.files.values()
        ]
        for each in urls:
            compose.check_reach(each, named_by=url)
        listing = entries.entries_of_rows(rows, self._find(self._objects(urls=urls)) if urls else [])
        return listing._replace(are_keys_counted=not any(row.get("__key__") for row in table))

    # ── running ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, execution: ExecutionOptions, listener: PackListener) -> Packed:
        """Write the shards that are not finished, then the index and the manifest.

        Args:
            execution: Options for carrying out the plan.
            listener: Receives progress.

        Raises:
            ConfigError, DataError, StoreError: For the reasons that ``pack`` names.
        """
        plan, options = self.planned, self._options
        if plan.kind == "sequence":
            return self._run_sequence(plan, execution, listener)
        if options.transform is not None and execution.jobs is None and execution.executor == "threads":
            execution = replace(execution, jobs=os.cpu_count() or 1)
        recipe = EntriesRecipe(format=plan.format, transform=options.transform, key_field=options.key_field)
        return self._execute(
            recipe, lambda shards: [(shard,) for shard in shards], options=execution, listener=listener
        )

    def _run_sequence(self, plan: PackPlan, execution: ExecutionOptions, listener: PackListener) -> Packed:
        samples = TokenRows(self._source, processes=execution.jobs or 0) if self._is_blocks else self._source
        known, written = write_iterable(samples, self.destination, plan, self._options, listener)
        rows = [*known, *written]
        if not rows:
            raise DataError("the iterable is empty")
        if execution.verify:
            for row in rows:
                check_shard(self.destination.store, self.destination.place, row)
                listener.verified(row)
        self.destination.finish(plan, rows)
        return Packed(self.destination.url, tuple(rows), len(written), 0)


def _check_listable(pipeline: Pipeline) -> None:
    """Check that the samples of a pipeline are the objects of its source.

    Raises:
        ConfigError: They are not.
    """
    source = pipeline.source
    if not isinstance(source, Objects):
        raise ConfigError(f"{source!r} already describes shards", hint="penstock.pack.convert rewrites shards")
    if source.read is not None or pipeline.stages:
        raise ConfigError(
            "a source with read= or with stages cannot be listed", hint="pack an iterable that yields its samples"
        )
