"""Where shards go: what lies there already, whose it is, and what is written beside them.

Under ``.penstock/`` beside the shards lie the index (``penstock.index``), ``packed.manifest`` (which shards there are,
with which versions they were made), and ``pack/ID.plan`` of each packing, with ``pack/ID.done`` when it is finished;
while parts of a shard are going up, ``pack/uploads/`` says which, and the next run drops what a killed one left. Beside
MDS shards lies the ``index.json`` that MosaicML reads, made of what ``mds/`` has of each. A shard is *ours* when a plan
gives its name and its own index describes the version that lies there; nothing else is ever deleted or replaced.
"""

from __future__ import annotations

import json
import platform
import zlib
from contextlib import suppress
from importlib import metadata
from typing import TYPE_CHECKING, Any

import penstock
from penstock.errors import BucketMissingError, ConfigError, DataError, StoreError
from penstock.formats.mds_writer import index_json
from penstock.index import FOLDER, DatasetIndex
from penstock.index.place import DATASET_KEY, SHARDS_PREFIX, SUFFIX
from penstock.pack import plan as plans
from penstock.pack.identity import differences, job_identity
from penstock.pack.options import check_pattern, number_in
from penstock.pack.shelf import ENTRIES, KEPT, UPLOADS, Shelf
from penstock.store.waiting import perform
from penstock.types import AbortMultipart

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.index import ShardRow
    from penstock.pack.plan import Plan
    from penstock.store import Store
    from penstock.types import ObjectInfo

INDEX_JSON = "index.json"
MANIFEST_KEY = f"{FOLDER}packed.manifest"


def split_destination(url: str) -> tuple[str, str | None]:
    """The folder of a destination, with a slash at its end, and the pattern of names where it has one.

    A folder called by ``{split}`` is part of the names.

    Raises:
        ConfigError: it is neither a folder nor a pattern of names, or it is an HTTP URL.
    """
    if url.startswith(("http://", "https://")):
        raise ConfigError(
            f"the destination {url} cannot be written: HTTP is read only",
            hint="s3://bucket/folder/ with --endpoint-url (endpoint_url=), or a directory",
        )
    if "%" in url.rpartition("/")[2]:
        start = url.rfind("/", 0, url.find("{split}")) if "{split}" in url else url.rfind("/")
        return (url[:start] if start > 0 else "." if start < 0 else "") + "/", check_pattern(url[start + 1 :])
    if "{split}" in url:
        raise ConfigError(f"the destination {url!r} has {{split}} and no number", hint="{split}/shard-%06d.tar")
    return url.rstrip("/") + "/", None


def refuse_inside(source_url: str, destination_url: str) -> None:
    """Refuse a destination that would become part of its own source.

    Raises:
        ConfigError: it lies in the source.
    """
    if destination_url.startswith(source_url.rstrip("/") + "/"):
        raise ConfigError(
            f"the destination {destination_url} lies inside the source {source_url}",
            hint="the next run would pack the shards; choose a folder beside it",
        )


class Destination(Shelf):
    """A folder that shards are written to, and what lies there.

    Args:
        store: Rooted at the folder.

    Raises:
        StoreError: it cannot be listed.

    Cost: a listing, and a read of each plan that lies there.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.present: dict[str, ObjectInfo] = {}
        self._plans: dict[str, Plan] = {}
        self._done: set[str] = set()
        self._notes: list[str] = []  # of uploads that a killed run had begun
        self._has_entries = False  # of MDS shards: packings wrote some, and so the index.json beside them
        self._obsolete: list[str] = []  # keys of what the packing that begins replaces
        self._replaced: set[str] = set()  # shards among them
        self._look()

    def _look(self) -> None:
        try:
            infos = list(self.store.list())
        except BucketMissingError:
            if not self.url.startswith("file:"):
                raise
            infos = []  # a directory that the first shard makes
        for info in infos:
            if info.key.startswith(ENTRIES):
                self._has_entries = True
            elif info.key.startswith(UPLOADS):
                self._notes.append(info.key)
            elif info.key.startswith(KEPT):
                name, _, kind = info.key[len(KEPT) :].rpartition(".")
                if kind == "done":
                    self._done.add(name)
                elif kind == "plan":
                    self._plans[name] = plans.decode(self.store.read(info.key).data, self.store.describe(info.key))
            elif not info.key.startswith(FOLDER):
                self.present[info.key] = info

    def plan(self, identity: str) -> Plan | None:
        """The plan of this packing, where one lies here."""
        return self._plans.get(identity)

    def is_done(self, plan: Plan) -> bool:
        """Whether all shards of a plan that lies here were written."""
        return plan.identity in self._done

    def begin(
        self, job: Mapping[str, Any], patterns: dict[str, str], *, append: bool, overwrite: bool
    ) -> dict[str, int]:
        """The first number of each split's names of a new packing; nothing is written before ``save``.

        Args:
            job: What the packing does.
            patterns: Of the shards' names, by split.
            append: Number on from the shards that are there.
            overwrite: Replace those that packings wrote.

        Raises:
            ConfigError: there are objects here and neither flag was given; another packing is unfinished; a name of the
                new shards is taken by what no packing wrote.
        """
        if append and overwrite:
            raise ConfigError("append=True excludes overwrite=True")
        if overwrite:
            self._give_up_ours()
        elif self.present and not append:
            first = min(self.present)
            raise ConfigError(
                f"the destination {self.url} is not empty ({len(self.present)} objects, the first {first!r})"
                + self._what_differs(job, self._plans),
                hint="--append adds shards, --overwrite replaces those that penstock packed",
            )
        unfinished = sorted(set(self._plans) - self._done - {job_identity(job)})
        if append and unfinished:
            raise ConfigError(
                f"an unfinished packing ({unfinished[0]}) lies in {self.url}{self._what_differs(job, unfinished)}",
                hint="finish it by its own command, or begin anew with --overwrite",
            )
        if not append:
            self._obsolete += [f"{KEPT}{name}.{kind}" for name in self._plans for kind in ("plan", "done")]
            self._plans, self._done = {}, set()
        starts = {}
        for split, pattern in patterns.items():
            numbers = [number for name in self.present if (number := number_in(pattern, name)) is not None]
            if numbers and not append:
                raise ConfigError(
                    f"{self.store.describe(pattern % min(numbers))} is there, and penstock did not pack it",
                    hint="move it away, or choose other names by --name",
                )
            starts[split] = max(numbers, default=-1) + 1
        return starts

    def _what_differs(self, job: Mapping[str, Any], names: Iterable[str]) -> str:
        """How this job differs from the one that is most like it of those that left the plans `names`."""
        given = [self._plans[name].job for name in names]
        known = sorted((differences(job, other) for other in given if other is not None), key=len)
        if known:
            return f": what was packed here has {', '.join(known[0])}"
        return ": an earlier version of penstock began it, and did not write down what it was" if given else ""

    def refuse_index_json(self, names: Iterable[str]) -> None:
        """Refuse to replace an ``index.json`` beside MDS shards of these names that no packing wrote.

        Raises:
            ConfigError: there is one.
        """
        for folder in {name[: name.rfind("/") + 1] for name in names}:
            if folder + INDEX_JSON in self.present and not self._has_entries:
                raise ConfigError(
                    f"{self.store.describe(folder + INDEX_JSON)} is there, and penstock did not write it",
                    hint="choose another destination: one index.json describes all MDS shards of a folder",
                )

    def _give_up_ours(self) -> None:
        """Count the shards that packings wrote here as gone; ``save`` deletes them."""
        patterns = [pattern for plan in self._plans.values() for pattern in plan.patterns.values()]
        names = {shard.name for plan in self._plans.values() for shard in plan.shards}
        ours = self._committed()
        for row in self.rows(self.present):
            if row.key in names or any(number_in(pattern, row.key) is not None for pattern in patterns):
                ours.add(row.key)
        self._replaced = set(ours)
        if self._has_entries:
            self._obsolete += [f"{ENTRIES}{name}.json" for name in sorted(ours)]
            ours |= {name for name in self.present if name.rpartition("/")[2] == INDEX_JSON}
        for name in ours:
            del self.present[name]
        self._obsolete += [*sorted(ours), *(f"{FOLDER}{SHARDS_PREFIX}{name}{SUFFIX}" for name in sorted(ours))]

    def _committed(self) -> set[str]:
        """Shards of exactly the planned size of runs that were killed before they wrote the shard's index."""
        return {
            shard.name
            for name, plan in self._plans.items()
            if name not in self._done and plan.kind == "entries"
            for shard in plan.shards
            if shard.name in self.present and self.present[shard.name].size_bytes == shard.size_bytes
        }

    def save(self, plan: Plan) -> None:
        """Drop what a killed run was sending; of a new plan, delete what it replaces and write it down, before any shard.

        From now on other runs that are still writing here stop, see ``penstock.pack.shelf``.
        """
        self.begin_run()
        self._drop_uploads(self._notes)
        if plan.identity in self._plans:
            return
        if self._replaced:
            index = self.place.load()
            for name in self._replaced:
                index.rows.pop(name, None)
            self.store.write(FOLDER + DATASET_KEY, index.encode())
        self.store.delete(self._obsolete)
        self._obsolete, self._replaced = [], set()
        self.store.write(f"{KEPT}{plan.identity}.plan", plan.encode())
        self._plans[plan.identity] = plan

    def _drop_uploads(self, notes: list[str]) -> None:
        """Have the store drop parts of shards that were not committed; what it has not, or keeps, is left to its rules."""
        for blob in self.store.read_many(notes):
            name, upload_id = json.loads(bytes(blob.data))
            with suppress(StoreError):
                perform(self.store, AbortMultipart(name, upload_id))
        self.store.delete(notes)

    def rows(self, names: Iterable[str]) -> list[ShardRow]:
        """What is finished of `names`: shards whose index describes the version that lies here, in the order given."""
        names = [name for name in names if name in self.present]
        known = dict(self.place.load().rows)
        missing = {name for name in names if name not in known or not self._is_here(known[name])}
        if missing:
            known.update({row.key: row for row in self.place.saved_rows(missing)})
        return [known[name] for name in names if name in known and self._is_here(known[name])]

    def _is_here(self, row: ShardRow) -> bool:
        info = self.present.get(row.key)
        if info is None:
            return False
        etag = info.etag or f"{info.size_bytes}-{info.last_modified_s}"
        return row.is_of(info.size_bytes, etag)

    def finish(self, plan: Plan, rows: list[ShardRow]) -> None:
        """Write the data set's index and the manifest, and mark the packing as finished.

        Raises:
            ConfigError: another run writes here now.
            DataError: not what this run wrote, and found, lies here.
        """
        self.check_run()
        self._check_undisturbed(plan, rows)
        self.place.save(DatasetIndex(self.url, rows))
        everything = self.place.load()
        if plan.format.startswith("mds"):
            self._write_index_json(everything)
        self._drop_uploads([info.key for info in self.store.list(UPLOADS)])  # of machines that were lost meanwhile
        self.store.write(MANIFEST_KEY, self._manifest(plan, everything))
        self.store.write(f"{KEPT}{plan.identity}.done", b"")
        self.end_run()

    def _check_undisturbed(self, plan: Plan, rows: list[ShardRow]) -> None:
        """Refuse shards that somebody replaced, or put among them, since this run began: nobody's count would be right."""
        known = {row.key: row for row in rows}
        for info in self.store.list():
            row = known.get(info.key)
            if row is not None:
                self.present[info.key] = info
                wrong = None if self._is_here(row) else "is not what this run wrote there"
            else:
                wrong = "is there, and this run did not write it" if self._is_of(plan, info.key) else None
            if wrong is not None:
                raise DataError(
                    f"{self.store.describe(info.key)} {wrong}",
                    hint="something else writes here; when it has ended, run this again, or with --overwrite",
                )

    def _is_of(self, plan: Plan, key: str) -> bool:
        """Whether `key` is a name that only shards of `plan` have, and none that was appended behind them."""
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
                folders.setdefault(name[: name.rfind("/") + 1], []).append(f"{ENTRIES}{name}.json")
        for folder, keys in folders.items():
            entries = [json.loads(bytes(blob.data)) for blob in self.store.read_many(keys)]
            self.store.write(folder + INDEX_JSON, index_json(entries))

    def _manifest(self, plan: Plan, index: DatasetIndex) -> bytes:
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


def _versions(format_name: str) -> dict[str, str]:
    """Of all that decides which bytes a shard of this format has."""
    versions = {"penstock": penstock.__version__, "python": platform.python_version()}
    if format_name.endswith(".gz"):
        versions["zlib"] = zlib.ZLIB_RUNTIME_VERSION
    library = "pyarrow" if format_name.startswith("parquet") else "zstandard" if format_name.endswith(".zst") else None
    for name in (library, "pillow"):  # which encodes pixels
        if name is not None:
            with suppress(metadata.PackageNotFoundError):
                versions[name] = metadata.version(name)
    return versions
