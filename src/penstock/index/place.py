"""Where an index is kept: beside the shards, or in a directory of this machine.

Beside the shards it is found by every host, and needs the right to write; its objects lie under ``.penstock/``, which
no listing of shards takes for one. Else it lies in ``index_dir``, in a folder named after the data set's URL and
endpoint. Both have the same two kinds of files: ``dataset.index``, and ``shards/KEY.index`` for each shard. Files are
replaced whole, so a reader sees the old one or the new one.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol
from urllib.parse import urlsplit

from penstock.compose import endpoint_of
from penstock.errors import ConfigError, DataError, ObjectMissingError, StoreError
from penstock.index import dataset_index, passes, shard_index
from penstock.index.asking import heads, read_at_once
from penstock.index.dataset_index import DatasetIndex
from penstock.private import check_private
from penstock.store.inflight import InFlight
from penstock.store.local import LocalStore
from penstock.types import ByteRange, Get

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from penstock.index.shard_index import ShardIndex, ShardRow
    from penstock.store import Store
    from penstock.types import Buffer, Key

FOLDER = ".penstock/"
"""Of an index beside its shards. Nothing under it is a shard."""

SUFFIX = ".index"
DATASET_KEY = f"dataset{SUFFIX}"
SHARDS_PREFIX = "shards/"

READS_BYTES_MAX = 32 << 20
"""Shards' indexes of fewer bytes in all are asked for at once: a job's first batch waits for them."""

_SAMPLE_BYTES = 16  # of a shard's index, about: position, checksum, key, members


class ShardLike(Protocol):
    """A shard as a listing gives it; ``penstock.sources.shards.Shard`` is one."""

    @property
    def store(self) -> Store:
        """That it lies in."""

    @property
    def key(self) -> Key:
        """In that store."""

    @property
    def url(self) -> str:
        """For people."""

    @property
    def etag(self) -> str | None:
        """Of its version; None where the listing did not say."""

    @property
    def size_bytes(self) -> int | None:
        """None where the listing did not say."""


class Found(NamedTuple):
    """A shard of which the version is known.

    Attributes:
        shard: As it was given.
        key: Relative to the data set's base URL: its name in the index.
        size_bytes: Of the shard.
        etag: Or the store's own pin; where it has neither, size and modification time.
        if_match: What to read the shard with: the ETag or pin; None where it has neither.
    """

    shard: ShardLike
    key: str
    size_bytes: int
    etag: str
    if_match: str | None


def base_url(shards: Sequence[ShardLike]) -> str:
    """The folder that holds all `shards`; for listed ones at least the folder that was listed. Ends with a slash.

    Raises:
        ConfigError: there is none: they lie in several buckets or hosts.
    """
    common: list[str] | None = None
    listed = {store: _listed_folder(store) for store in {shard.store for shard in shards}}
    folders = {listed[shard.store] or shard.url[: shard.url.rfind("/") + 1] for shard in shards}
    for folder in folders:
        parts = folder.split("/")
        if common is None:
            common = parts
            continue
        equal = 0
        while equal < min(len(common), len(parts)) and common[equal] == parts[equal]:
            equal += 1
        common = [*common[:equal], ""] if equal < len(common) else common
    url = "/".join(common or [])
    if not url or (not urlsplit(url).netloc and not url.startswith("file:")):
        raise ConfigError(
            "the shards have no folder in common, where one index could lie", hint="index each bucket by itself"
        )
    return url


def _listed_folder(store: Store) -> str:
    """What was listed; of a single file, its directory; "" for a whole bucket."""
    root = store.describe("")
    return root if root.startswith("file:") or urlsplit(root).path.strip("/") else ""


def resolve(shards: Iterable[ShardLike], base: str) -> list[Found]:
    """`shards` with their versions. Cost: one request for each whose listing did not say it, 64 at a time.

    Raises:
        StoreError: a shard is missing, or its store cannot be asked.
        ConfigError: a shard does not lie under `base`.
    """
    shards = list(shards)
    found: list[Found] = []
    unknown: dict[int, tuple[Store, list[tuple[int, Key]]]] = {}
    for index, shard in enumerate(shards):
        if not shard.url.startswith(base):
            raise ConfigError(f"{shard.url} does not lie under {base}")
        key = shard.url[len(base) :]
        found.append(Found(shard, key, shard.size_bytes or 0, shard.etag or "", shard.etag))
        if shard.size_bytes is None or shard.etag is None:
            unknown.setdefault(id(shard.store), (shard.store, []))[1].append((index, shard.key))
    for store, keys in unknown.values():
        for index, info in heads(store, keys):
            etag = info.etag or f"{info.size_bytes}-{info.last_modified_s}"
            found[index] = found[index]._replace(size_bytes=info.size_bytes, etag=etag, if_match=info.etag)
    return found


class IndexPlace:
    """The files of one data set's index.

    Args:
        store: That holds them.
        prefix: Of their keys in it; "" or ending with a slash.
        base: URL of the data set, which its keys are relative to.
    """

    def __init__(self, store: Store, prefix: str, *, base: str) -> None:
        self.store = store
        self.base_url = base
        self._prefix = prefix
        self._in_pass: dict[ShardRow, tuple[Key, ByteRange]] = {}  # where the index of a shard lies in a pass's file

    @property
    def url(self) -> str:
        """Of the folder that holds the files."""
        return self.store.describe(self._prefix)

    def load(self) -> DatasetIndex:
        """All that is known of the data set; an empty index where there is none, or it is damaged.

        Raises:
            StoreError: the store cannot be asked.

        Cost: one read, and in a directory of this machine one for each pass that left its own.
        """
        index = self.load_saved()
        if not isinstance(self.store, LocalStore) or self._prefix:
            return index  # beside the shards nothing is left by a pass
        root = self.store.root
        saved_s = _written_s(root / DATASET_KEY)
        self._in_pass.clear()
        for path in sorted((root / passes.FOLDER).glob(f"*{SUFFIX}"), key=_written_s):
            try:
                found = passes.read(path)
            except DataError:
                continue  # what it said is found out again
            for row, span in found:
                if row.key not in index.rows or _written_s(path) > saved_s:
                    index.add(row)
                    self._in_pass[row] = (passes.FOLDER + path.name, span)
        return index

    def save_pass(self, indexes: Sequence[ShardIndex]) -> None:
        """Keep what a pass over some shards found out, beside what is known already."""
        name, content = passes.encode(indexes)
        self._make_folder()
        self.store.write(self._prefix + passes.FOLDER + name, content)

    def load_saved(self) -> DatasetIndex:
        """The data set's index, without what passes left; an empty one where there is none. Cost: one read.

        Raises:
            StoreError: the store cannot be asked.
        """
        key = self._prefix + DATASET_KEY
        try:
            return self.decoded(self.store.read(key).data)
        except ObjectMissingError:
            return DatasetIndex(self.base_url)

    def exists(self) -> bool:
        """Whether the data set's index lies there, damaged or not. Cost: one request.

        Raises:
            StoreError: the store cannot be asked.
        """
        try:
            self.store.stat(self._prefix + DATASET_KEY)
        except ObjectMissingError:
            return False
        return True

    def decoded(self, data: Buffer) -> DatasetIndex:
        """The data set's index of its file; an empty one where that is damaged."""
        try:
            return dataset_index.decode(data, self.store.describe(self._prefix + DATASET_KEY))
        except DataError:
            return DatasetIndex(self.base_url)  # sidecars say of themselves what they describe: nothing is lost

    def is_below(self, store: Store) -> bool:
        """Whether it lies beside all that `store` has."""
        return self.store is store and self._prefix == FOLDER

    def save(self, index: DatasetIndex) -> None:
        """Write the data set's index, with the rows of shards that another process added meanwhile."""
        merged = self.load_saved()
        merged.base_url = self.base_url
        for row in index.rows.values():
            merged.add(row)
        self._make_folder()
        self.store.write(self._prefix + DATASET_KEY, merged.encode())

    def load_shard(self, row: ShardRow) -> ShardIndex:
        """The index of one shard. Cost: one read.

        Raises:
            ObjectMissingError: there is none.
            DataError: it is damaged, or of another version than `row`.
        """
        return next(self.load_shards([row]))

    def load_shards(self, rows: Iterable[ShardRow]) -> Iterator[ShardIndex]:
        """The indexes of `rows`, in order, read ahead. Cost: one request each, many at a time.

        Raises:
            ObjectMissingError: one is missing.
            DataError: one is damaged, or of another version than its row.
        """
        rows = list(rows)
        wanted: list[tuple[Key, ByteRange | None]] = [
            self._in_pass.get(row) or (self._shard_key(row.key), None) for row in rows
        ]
        if sum(_SAMPLE_BYTES * row.samples_count for row in rows) <= READS_BYTES_MAX:
            return self._iter_shards(rows, read_at_once(self.store, wanted))
        return self._iter_shards(rows, ((blob.key, blob.data) for blob in self.store.read_many(wanted)))

    def _iter_shards(self, rows: list[ShardRow], found: Iterator[tuple[Key, Buffer]]) -> Iterator[ShardIndex]:
        for row, (key, data) in zip(rows, found, strict=True):
            index = shard_index.decode(data, key)
            if index.row != row:
                raise DataError(
                    f"the index of the shard describes {index.row}, the data set's index {row}",
                    hint="run penstock index: what does not agree is made anew",
                    shard=row.key,
                )
            yield index

    def save_shard(self, index: ShardIndex) -> None:
        """Write the index of one shard."""
        self._make_folder()
        self.store.write(self._shard_key(index.row.key), index.encode())

    def saved_rows(self, keys: set[str]) -> list[ShardRow]:
        """What the shards' indexes that lie there say of `keys`; damaged ones are left out.

        For a build that was killed before it wrote the data set's index. Cost: a listing, and a read of 4 KiB for each.
        """
        prefix = self._prefix + SHARDS_PREFIX
        rows = []
        try:
            present = [info.key for info in self.store.list(prefix) if info.key[len(prefix) : -len(SUFFIX)] in keys]
            head = ByteRange(0, shard_index.HEAD_BYTES_MAX)
            for blob in self.store.try_read_many((key, head) for key in present):
                if isinstance(blob, StoreError):
                    continue
                try:
                    rows.append(shard_index.read_head(blob.data, blob.key))
                except DataError:
                    continue
        except ObjectMissingError:  # not even the folder
            return []
        return [row for row in rows if row.key in keys]

    def _shard_key(self, key: str) -> Key:
        return f"{self._prefix}{SHARDS_PREFIX}{key}{SUFFIX}"

    def _make_folder(self) -> None:
        if isinstance(self.store, LocalStore) and not self._prefix:
            try:
                self.store.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"an index cannot be kept in {self.store.root}: {error.strerror}",
                    hint="say where: index_dir=, --index-dir or XDG_CACHE_HOME; or keep it beside the shards",
                ) from error


class EarlyIndex:
    """The index beside all that a store has, asked for while that is being listed.

    Args:
        store: What is listed.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._in_flight: InFlight[None] = InFlight(store)
        self._in_flight.submit(Get(FOLDER + DATASET_KEY), None)

    def of(self, place: IndexPlace) -> DatasetIndex | None:
        """The index at `place`, if that is this; None: it is another, or could not be read. Asked once."""
        if not place.is_below(self._store):
            return None
        _, completion = self._in_flight.wait()
        if isinstance(completion.error, ObjectMissingError):
            return DatasetIndex(place.base_url)
        return None if completion.error is not None else place.decoded(completion.body)

    def close(self) -> None:
        """Nobody waits for it any more."""
        self._in_flight.cancel()


def beside(shards: Iterable[ShardLike]) -> IndexPlace:
    """The place beside `shards`.

    Raises:
        ConfigError: they have no folder in common.
    """
    shards = list(shards)
    base = base_url(shards)
    store = shards[0].store
    root = store.describe("")
    if not base.startswith(root):
        raise ConfigError(
            f"the shards' folder {base} is above {root}, which is what was listed", hint="name the folder itself"
        )
    return IndexPlace(store, base[len(root) :] + FOLDER, base=base)


def found_beside(shards: Iterable[ShardLike]) -> IndexPlace | None:
    """The place beside `shards` if their index lies there; None also where nobody may look. Cost: one request."""
    try:
        place = beside(shards)
        return place if place.exists() else None
    except (ConfigError, StoreError):
        return None


def in_directory(shards: Iterable[ShardLike], index_dir: str | os.PathLike[str] | None = None) -> IndexPlace:
    """The place of `shards`'s index in `index_dir`; default ``$XDG_CACHE_HOME/penstock/index``.

    Raises:
        ConfigError: they have no folder in common, or other users could have put an index there.
    """
    shards = list(shards)
    base = base_url(shards)
    identity = f"{endpoint_of(shards[0].store)}\n{base}"
    digest = hashlib.blake2b(identity.encode("utf-8", "surrogateescape"), digest_size=10).hexdigest()
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", base.rstrip("/").rpartition("/")[2])[:40].strip("-")
    parent = Path(index_dir) if index_dir is not None else default_directory()
    folder = (parent / f"{name or 'data'}-{digest}").absolute()
    check_private(folder, what="index")
    return IndexPlace(LocalStore(folder), "", base=base)


def default_directory() -> Path:
    """``$XDG_CACHE_HOME/penstock/index``, or ``~/.cache/penstock/index``."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if cache.startswith("/") else Path.home() / ".cache") / "penstock" / "index"


def _written_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
