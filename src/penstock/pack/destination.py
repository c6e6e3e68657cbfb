"""The destination of a packing: the objects that are stored there, who wrote them, and the files beside the shards.

The following objects lie under ``.penstock/`` beside the shards: the index (``penstock.index``); ``packed.manifest``,
which lists the shards and the software versions that made them; ``pack/ID.plan`` for each packing, and ``pack/ID.done``
when it is finished; and ``pack/uploads/``, which lists the multipart uploads in progress, so that the next run can drop
those that a killed run left. MDS shards also have an ``index.json``, which MosaicML reads; it is assembled from one entry
per shard under ``mds/``. Packing owns a shard if a plan gives its name and the shard's own index describes the stored
version. Nothing else is ever deleted or replaced.
"""

from __future__ import annotations

import json
import platform
import zlib
from contextlib import suppress
from importlib import metadata
from typing import TYPE_CHECKING, Any

from penstock.errors import BucketMissingError, ConfigError, DataError, StoreError
from penstock.formats.mds import index_json
from penstock.index import FOLDER, PACKED_KEY, DatasetIndex
from penstock.index.place import DATASET_KEY, SHARDS_PREFIX, SUFFIX
from penstock.pack import plan as plans
from penstock.pack.options import check_pattern, differences, job_identity, number_in
from penstock.pack.shard_file import MDS_ENTRIES_PREFIX, STATE_PREFIX, UPLOADS_PREFIX, ShardFolder
from penstock.store.inflight import perform
from penstock.text.json_text import parse_json
from penstock.types import AbortMultipart
from penstock.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.index import ShardRow
    from penstock.pack.plan import PackPlan
    from penstock.store import Store
    from penstock.types import Blob, ObjectInfo

INDEX_JSON = "index.json"


def split_destination(url: str) -> tuple[str, str | None]:
    """Return the folder of a destination, which ends with a slash, and the pattern of names; None if there is none.

    A folder named with ``{split}`` is part of the pattern.

    Raises:
        ConfigError: The URL is neither a folder nor a pattern of names, or it is an HTTP URL.
    """
    if url.startswith(("http://", "https://")):
        raise ConfigError(
            f"the destination {url} cannot be written: HTTP is read-only",
            hint="s3://bucket/folder/ with --endpoint-url (endpoint_url=), or a directory",
        )
    if "%" in url.rpartition("/")[2]:
        start = url.rfind("/", 0, url.find("{split}")) if "{split}" in url else url.rfind("/")
        return (url[:start] if start > 0 else "." if start < 0 else "") + "/", check_pattern(url[start + 1 :])
    if "{split}" in url:
        raise ConfigError(f"the destination {url!r} has {{split}} but no number", hint="{split}/shard-%06d.tar")
    return url.rstrip("/") + "/", None


def refuse_inside(source_url: str, destination_url: str) -> None:
    """Refuse a destination that would become part of its own source.

    Raises:
        ConfigError: The destination lies inside the source.
    """
    if destination_url.startswith(source_url.rstrip("/") + "/"):
        raise ConfigError(
            f"the destination {destination_url} lies inside the source {source_url}",
            hint="the next run would pack the shards themselves; choose a folder outside of the source",
        )


class Destination(ShardFolder):
    """A folder that shards are written to, and the objects that are stored there.

    Args:
        store: Store rooted at the folder.

    Raises:
        StoreError: The folder cannot be listed.

    Cost: a listing, and one read for each plan stored there.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.present: dict[str, ObjectInfo] = {}
        self._plans: dict[str, PackPlan] = {}
        self._done: set[str] = set()
        self._upload_notes: list[str] = []  # keys of notes about uploads that a killed run had started
        self._has_mds_entries = False  # whether packings wrote MDS shards here, and so the index.json
        self._obsolete: list[str] = []  # keys that the new packing replaces
        self._replaced: set[str] = set()  # shards among these
        self._scan()

    def _scan(self) -> None:
        try:
            infos = list(self.store.list())
        except BucketMissingError:
            if not self.url.startswith("file:"):
                raise
            infos = []  # the first shard makes the directory
        for info in infos:
            if info.key.startswith(MDS_ENTRIES_PREFIX):
                self._has_mds_entries = True
            elif info.key.startswith(UPLOADS_PREFIX):
                self._upload_notes.append(info.key)
            elif info.key.startswith(STATE_PREFIX):
                name, _, kind = info.key[len(STATE_PREFIX) :].rpartition(".")
                if kind == "done":
                    self._done.add(name)
                elif kind == "plan":
                    self._plans[name] = plans.decode(self.store.read(info.key).data, self.store.describe(info.key))
            elif not info.key.startswith(FOLDER):
                self.present[info.key] = info

    def plan(self, identity: str) -> PackPlan | None:
        """Return the stored plan of a packing; None if there is none."""
        return self._plans.get(identity)

    def is_done(self, plan: PackPlan) -> bool:
        """Return whether all shards of a stored plan were written."""
        return plan.identity in self._done

    def begin(
        self, job: Mapping[str, Any], patterns: dict[str, str], *, is_mds: bool, append: bool, overwrite: bool
    ) -> dict[str, int]:
        """Return the first number in the shards' names of a new packing, by split. Nothing is written before ``save``.

        Args:
            job: Description of the packing, from ``PackOptions.job``.
            patterns: Pattern of the shards' names, by split.
            is_mds: Whether the shards are MDS, whose folder has an ``index.json``.
            append: Whether to continue the numbers of the shards that are stored here.
            overwrite: Whether to replace the shards that packings wrote here.

        Raises:
            ConfigError: The folder is not empty and neither flag was given; another packing is unfinished; or an object
                that no packing wrote has a name of the new shards.
        """
        if append and overwrite:
            raise ConfigError("append=True and overwrite=True exclude each other")
        if overwrite:
            self._plan_to_replace()
        elif self.present and not append:
            first = min(self.present)
            raise ConfigError(
                f"the destination {self.url} is not empty ({len(self.present)} objects, the first is {first!r})"
                + self._what_differs(job, self._plans),
                hint="--append adds shards, --overwrite replaces those that penstock packed",
            )
        unfinished = sorted(set(self._plans) - self._done - {job_identity(job)})
        if append and unfinished:
            raise ConfigError(
                f"{self.url} has an unfinished packing ({unfinished[0]}){self._what_differs(job, unfinished)}",
                hint="finish it with its own command, or start again with --overwrite",
            )
        if not append:
            self._obsolete += [f"{STATE_PREFIX}{name}.{kind}" for name in self._plans for kind in ("plan", "done")]
            self._plans, self._done = {}, set()
        starts = {}
        for split, pattern in patterns.items():
            numbers = [number for name in self.present if (number := number_in(pattern, name)) is not None]
            if numbers and not append:
                raise ConfigError(
                    f"{self.store.describe(pattern % min(numbers))} exists, and penstock did not pack it",
                    hint="move it away, or choose other names with --name",
                )
            starts[split] = max(numbers, default=-1) + 1
        if is_mds:
            self.refuse_index_json(patterns.values())
        return starts

    def _what_differs(self, job: Mapping[str, Any], names: Iterable[str]) -> str:
        """Describe how this job differs from the most similar one among those that stored the plans `names`."""
        given = [self._plans[name].job for name in names]
        known = sorted((differences(job, other) for other in given if other is not None), key=len)
        if known:
            return f": what was packed here has {', '.join(known[0])}"
        return ": an earlier version of penstock started it, and did not record its options" if given else ""

    def refuse_index_json(self, names: Iterable[str]) -> None:
        """Refuse to replace an ``index.json`` that no packing wrote.

        Args:
            names: Names of MDS shards, or patterns of names, in the folders to be checked.

        Raises:
            ConfigError: A folder has an ``index.json`` that no packing wrote.
        """
        for folder in {name[: name.rfind("/") + 1] for name in names}:
            if folder + INDEX_JSON in self.present and not self._has_mds_entries:
                raise ConfigError(
                    f"{self.store.describe(folder + INDEX_JSON)} exists, and penstock did not write it",
                    hint="choose another destination: one index.json describes all MDS shards of a folder",
                )

    def _plan_to_replace(self) -> None:
        """Treat the shards that packings wrote here as deleted; ``save`` deletes them."""
        patterns = [pattern for plan in self._plans.values() for pattern in plan.patterns.values()]
        names = {shard.name for plan in self._plans.values() for shard in plan.shards}
        ours = self._committed()
        for row in self.rows(self.present):
            if row.key in names or any(number_in(pattern, row.key) is not None for pattern in patterns):
                ours.add(row.key)
        self._replaced = set(ours)
        if self._has_mds_entries:
            self._obsolete += [f"{MDS_ENTRIES_PREFIX}{name}.json" for name in sorted(ours)]
            ours |= {name for name in self.present if name.rpartition("/")[2] == INDEX_JSON}
        for name in ours:
            del self.present[name]
        self._obsolete += [*sorted(ours), *(f"{FOLDER}{SHARDS_PREFIX}{name}{SUFFIX}" for name in sorted(ours))]

    def _committed(self) -> set[str]:
        """Return shards with exactly the planned size, of runs that were killed before they wrote the shard's index."""
        return {
            shard.name
            for name, plan in self._plans.items()
            if name not in self._done and plan.kind == "entries"
            for shard in plan.shards
            if shard.name in self.present and self.present[shard.name].size_bytes == shard.size_bytes
        }

    def save(self, plan: PackPlan) -> None:
        """Drop the uploads that a killed run left. If the plan is new, delete the shards that it replaces, then store the plan.

        Any other run that is still writing here stops, see ``penstock.pack.shard_file``.
        """
        self.begin_run()
        self._drop_uploads(self._upload_notes)
        if plan.identity in self._plans:
            return
        if self._replaced:
            index = self.place.load()
            for name in self._replaced:
                index.rows.pop(name, None)
            self.store.write(FOLDER + DATASET_KEY, index.encode())
        self.store.delete(self._obsolete)
        self._obsolete, self._replaced = [], set()
        self.store.write(f"{STATE_PREFIX}{plan.identity}.plan", plan.encode())
        self._plans[plan.identity] = plan

    def _drop_uploads(self, notes: list[str]) -> None:
        """Abort uploads that were not committed, if the store still knows them and allows it."""
        for blob in self.store.read_many(notes):
            with suppress(StoreError, ConfigError, ValueError, TypeError):  # somebody else may have written the note
                name, upload_id = parse_json(blob.data)
                perform(self.store, AbortMultipart(name, upload_id))
        self.store.delete(notes)

    def rows(self, names: Iterable[str]) -> list[ShardRow]:
        """Return the rows of finished shards among `names`, in their order: those whose index describes the stored version."""
        names = [name for name in names if name in self.present]
        known = dict(self.place.load().rows)
        missing = {name for name in names if name not in known or not self._is_current(known[name])}
        if missing:
            known.update({row.key: row for row in self.place.saved_rows(missing)})
        return [known[name] for name in names if name in known and self._is_current(known[name])]

    def _is_current(self, row: ShardRow) -> bool:
        info = self.present.get(row.key)
        if info is None:
            return False
        etag = info.etag or f"{info.size_bytes}-{info.last_modified_s}"
        return row.is_of(info.size_bytes, etag)

    def finish(self, plan: PackPlan, rows: list[ShardRow]) -> None:
        """Write the data set's index and the manifest, and mark the packing as finished.

        Raises:
            ConfigError: Another run writes here now.
            DataError: The stored shards are not those that this run wrote or found.
        """
        self.check_run()
        self._check_undisturbed(plan, rows)
        self.place.save(DatasetIndex(self.url, rows))
        everything = self.place.load()
        if plan.format.startswith("mds"):
            self._write_index_json(everything)
        self._drop_uploads([info.key for info in self.store.list(UPLOADS_PREFIX)])  # left by machines that were lost
        self.store.write(PACKED_KEY, self._manifest(plan, everything))
        self.store.write(f"{STATE_PREFIX}{plan.identity}.done", b"")
        self.end_run()

    def _check_undisturbed(self, plan: PackPlan, rows: list[ShardRow]) -> None:
        """Refuse to finish if another program replaced or added shards since this run began: the counts would be wrong."""
        known = {row.key: row for row in rows}
        for info in self.store.list():
            row = known.get(info.key)
            if row is not None:
                self.present[info.key] = info
                wrong = None if self._is_current(row) else "is not what this run wrote"
            else:
                wrong = "exists, and this run did not write it" if self._is_named_by(plan, info.key) else None
            if wrong is not None:
                raise DataError(
                    f"{self.store.describe(info.key)} {wrong}",
                    hint="another program is writing here; when it has ended, run this again, perhaps with --overwrite",
                )

    def _is_named_by(self, plan: PackPlan, key: str) -> bool:
        """Return whether `key` is a name of `plan`'s shards, and not of shards that were appended after them."""
        for split, pattern in plan.patterns.items():
            number, start = number_in(pattern, key), plan.starts[split]
            if number is not None and number >= start:
                later = (other.starts[split] for other in self._plans.values() if other.patterns.get(split) == pattern)
                return not any(start < first <= number for first in later)
        return False

    def _write_index_json(self, index: DatasetIndex) -> None:
        folders: dict[str, list[str]] = {}
        for name, row in sorted(index.rows.items()):
            if row.format.startswith("mds"):
                folders.setdefault(name[: name.rfind("/") + 1], []).append(f"{MDS_ENTRIES_PREFIX}{name}.json")
        for folder, keys in folders.items():
            entries = [_entry_of(blob) for blob in self.store.read_many(keys)]
            self.store.write(folder + INDEX_JSON, index_json(entries))

    def _manifest(self, plan: PackPlan, index: DatasetIndex) -> bytes:
        head = {
            "penstock_manifest": 1,
            "base_url": self.url,
            "plan": plan.identity,
            "format": plan.format,
            "samples_count": index.samples_count,
            "classes": plan.classes,
            "versions": _versions(plan.format),
        }
        lines = [head]
        for key in sorted(index.rows):
            row = index.rows[key]
            lines.append(
                {"key": key, "size_bytes": row.size_bytes, "etag": row.etag, "samples_count": row.samples_count}
            )
        return "".join(json.dumps(line) + "\n" for line in lines).encode()


def _entry_of(blob: Blob) -> dict[str, Any]:
    """Return what ``index.json`` says of a shard, from the file that its packing has left."""
    try:
        entry: dict[str, Any] = parse_json(blob.data)
    except ValueError as error:
        raise DataError(
            f"it is not JSON ({error})", hint="--overwrite packs the shard again", shard=blob.key
        ) from error
    return entry


def _versions(format_name: str) -> dict[str, str]:
    """Return the versions of all software that decides which bytes a shard of this format has."""
    versions = {"penstock": __version__, "python": platform.python_version()}
    if format_name.endswith(".gz"):
        versions["zlib"] = zlib.ZLIB_RUNTIME_VERSION
    library = "pyarrow" if format_name.startswith("parquet") else "zstandard" if format_name.endswith(".zst") else None
    for name in (library, "pillow"):  # Pillow encodes pixels
        if name is not None:
            with suppress(metadata.PackageNotFoundError):
                versions[name] = metadata.version(name)
    return versions
