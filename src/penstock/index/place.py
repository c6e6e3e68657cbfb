"""Where an index is stored: beside the shards, or in a directory of this machine; ``lookup`` finds the indexes of shards.

Every host finds an index beside the shards, but writing it there needs permission; its objects lie under ``.penstock/``, which
no listing of shards includes. Otherwise it lies in ``index_dir``, in a folder named after the data set's URL and endpoint.
Both places have the same two kinds of files: ``dataset.index``, and ``shards/KEY.index`` for each shard. Files are replaced
as a whole, so a reader sees either the old file or the new one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol
from urllib.parse import urlsplit

from penstock.compose import endpoint_of
from penstock.errors import ConfigError, DataError, ObjectMissingError, StoreError
from penstock.index import dataset_index, shard_index
from penstock.index.dataset_index import PASSES_PREFIX, DatasetIndex, encode_pass, read_pass
from penstock.store.inflight import InFlight, perform_many
from penstock.store.local import LocalStore
from penstock.system.private import check_private
from penstock.text.patterns import common_folder
from penstock.types import ByteRange, Get, Head

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.index.shard_index import ShardIndex, ShardRow
    from penstock.store import Store
    from penstock.types import Buffer, Key

FOLDER = ".penstock/"
"""Folder of an index beside its shards. Nothing under it is a shard."""

PACKED_KEY = f"{FOLDER}packed.manifest"
"""The manifest of a packing, beside the shards; its first line has the names of the classes."""

SUFFIX = ".index"
DATASET_KEY = f"dataset{SUFFIX}"
SHARDS_PREFIX = "shards/"

READS_BYTES_MAX = 32 << 20
"""If shards' indexes have fewer bytes than this together, all are requested at once: a job's first batch waits for them."""

HEADS_IN_FLIGHT_MAX = 64
READS_IN_FLIGHT_MAX = 128

_log = logging.getLogger("penstock.index")
_SAMPLE_BYTES = 16  # approximate size of a sample in a shard's index: extent, checksum, key, members


class ShardLike(Protocol):
    """A shard as a listing gives it, for example ``penstock.sources.shards.Shard`` is one."""

    @property
    def store(self) -> Store:
        """Store of the shard."""

    @property
    def key(self) -> Key:
        """Key of the shard in that store."""

    @property
    def url(self) -> str:
        """URL of the shard, for people."""

    @property
    def etag(self) -> str | None:
        """ETag of its version; None if the listing did not give it."""

    @property
    def size_bytes(self) -> int | None:
        """Size of the shard in bytes; None if the listing did not give it."""


class VersionedShard(NamedTuple):
    """A shard whose version is known.

    Attributes:
        shard: The shard as it was listed.
        key: Name in the index: the URL relative to the data set's base URL.
        size_bytes: Size of the shard in bytes.
        etag: ETag of the shard, or the store's own pin; size and modification time if it has neither.
        if_match: The ETag or pin with which to read it; None if it has neither.
    """

    shard: ShardLike
    key: str
    size_bytes: int
    etag: str
    if_match: str | None


def base_url(shards: Sequence[ShardLike]) -> str:
    """Return the folder that contains all `shards`, with a slash at its end; for a listing, at least the listed folder.

    Raises:
        ConfigError: The shards have no folder in common, because they lie in several buckets or on several hosts.
    """
    listed = {store: _listed_folder(store) for store in {shard.store for shard in shards}}
    url = common_folder({listed[shard.store] or shard.url for shard in shards})
    if not url or (not urlsplit(url).netloc and not url.startswith("file:")):
        raise ConfigError(
            "the shards have no common folder in which their index could be stored",
            hint="index each bucket separately",
        )
    return url


def _listed_folder(store: Store) -> str:
    """Return the folder that was listed; the directory of a single file; "" for a whole bucket."""
    root = store.describe("")
    return root if root.startswith("file:") or urlsplit(root).path.strip("/") else ""


def resolve(shards: Iterable[ShardLike], base: str) -> list[VersionedShard]:
    """Return `shards` with their versions.

    Args:
        shards: Listed shards.
        base: URL that the keys are relative to; ends with a slash, or is "".

    Raises:
        StoreError: A shard is missing, or its store cannot be reached.
        ConfigError: A shard does not lie under `base`.

    Cost: one request for each shard whose version the listing did not give, 64 at a time.
    """
    shards = list(shards)
    found: list[VersionedShard] = []
    unknown: dict[int, tuple[Store, list[tuple[int, Key]]]] = {}
    for index, shard in enumerate(shards):
        if not shard.url.startswith(base):
            raise ConfigError(f"{shard.url} does not lie under {base}")
        key = shard.url[len(base) :]
        found.append(VersionedShard(shard, key, shard.size_bytes or 0, shard.etag or "", shard.etag))
        if shard.size_bytes is None or shard.etag is None:
            unknown.setdefault(id(shard.store), (shard.store, []))[1].append((index, shard.key))
    for store, keys in unknown.values():
        heads = perform_many(store, ((index, Head(key)) for index, key in keys), requests_max=HEADS_IN_FLIGHT_MAX)
        for index, completion in heads:
            info = completion.info
            assert info is not None
            etag = info.etag or f"{info.size_bytes}-{info.last_modified_s}"
            found[index] = found[index]._replace(size_bytes=info.size_bytes, etag=etag, if_match=info.etag)
    return found


class IndexPlace:
    """The files of one data set's index.

    Args:
        store: Store of the files.
        prefix: Prefix of their keys; "" or ending with a slash.
        base: URL of the data set, which the index's keys are relative to.
    """

    def __init__(self, store: Store, prefix: str, *, base: str) -> None:
        self.store = store
        self.base_url = base
        self._prefix = prefix
        self._in_pass: dict[ShardRow, tuple[Key, ByteRange]] = {}  # ranges of shards' indexes in files of passes

    @property
    def url(self) -> str:
        """URL of the folder that holds the files."""
        return self.store.describe(self._prefix)

    def load(self) -> DatasetIndex:
        """Return the whole index of the data set; an empty index if there is none, or it is damaged.

        Raises:
            StoreError: The store cannot be read.

        Cost: one read; in a directory of this machine, also one read for each file of a pass.
        """
        index = self.load_saved()
        if not isinstance(self.store, LocalStore) or self._prefix:
            return index  # passes leave nothing beside the shards
        root = self.store.root
        saved_s = _written_s(root / DATASET_KEY)
        self._in_pass.clear()
        for path in sorted((root / PASSES_PREFIX).glob(f"*{SUFFIX}"), key=_written_s):
            try:
                found = read_pass(path)
            except DataError:
                continue  # a later pass learns its content again
            for row, span in found:
                if row.key not in index.rows or _written_s(path) > saved_s:
                    index.add(row)
                    self._in_pass[row] = (PASSES_PREFIX + path.name, span)
        return index

    def save_pass(self, indexes: Sequence[ShardIndex]) -> None:
        """Store the records of a pass over some shards, in addition to the stored index."""
        name, content = encode_pass(indexes)
        self._make_folder()
        self.store.write(self._prefix + PASSES_PREFIX + name, content)

    def load_saved(self) -> DatasetIndex:
        """Return the data set's index without the records of passes; an empty one if there is none. Cost: one read.

        Raises:
            StoreError: The store cannot be read.
        """
        key = self._prefix + DATASET_KEY
        try:
            return self.decoded(self.store.read(key).data)
        except ObjectMissingError:
            return DatasetIndex(self.base_url)

    def exists(self) -> bool:
        """Return whether a data set's index is stored here, damaged or not. Cost: one request.

        Raises:
            StoreError: The store cannot be read.
        """
        try:
            self.store.stat(self._prefix + DATASET_KEY)
        except ObjectMissingError:
            return False
        return True

    def decoded(self, data: Buffer) -> DatasetIndex:
        """Return the data set's index from its file; an empty one if the file is damaged."""
        try:
            return dataset_index.decode(data, self.store.describe(self._prefix + DATASET_KEY))
        except DataError:
            return DatasetIndex(self.base_url)  # nothing is lost: the shards' own indexes name their shards

    def is_below(self, store: Store) -> bool:
        """Return whether this is the place beside everything in `store`."""
        return self.store is store and self._prefix == FOLDER

    def save(self, index: DatasetIndex) -> None:
        """Write the data set's index, together with rows that another process has added in the meantime."""
        merged = self.load_saved()
        merged.base_url = self.base_url
        for row in index.rows.values():
            merged.add(row)
        self._make_folder()
        self.store.write(self._prefix + DATASET_KEY, merged.encode())

    def load_shard(self, row: ShardRow) -> ShardIndex:
        """Return the index of one shard. Cost: one read.

        Raises:
            ObjectMissingError: The index does not exist.
            DataError: The index is damaged, or describes another version than `row`.
        """
        return next(self.load_shards([row]))

    def load_shards(self, rows: Iterable[ShardRow]) -> Iterator[ShardIndex]:
        """Yield the indexes of `rows`, in order, read ahead. Cost: one request each, many at a time.

        Raises:
            ObjectMissingError: An index is missing.
            DataError: An index is damaged, or describes another version than its row.
        """
        rows = list(rows)
        wanted: list[tuple[Key, ByteRange | None]] = [
            self._in_pass.get(row) or (self._shard_key(row.key), None) for row in rows
        ]
        if sum(_SAMPLE_BYTES * row.samples_count for row in rows) <= READS_BYTES_MAX:
            return self._iter_shards(rows, _get_many(self.store, wanted))
        return self._iter_shards(rows, ((blob.key, blob.data) for blob in self.store.read_many(wanted)))

    def _iter_shards(self, rows: list[ShardRow], found: Iterator[tuple[Key, Buffer]]) -> Iterator[ShardIndex]:
        for row, (key, data) in zip(rows, found, strict=True):
            index = shard_index.decode(data, key)
            if index.row != row:
                raise DataError(
                    f"the index of the shard describes {index.row}, but the data set's index has {row}",
                    hint="run penstock index, which replaces an index that disagrees",
                    shard=row.key,
                )
            yield index

    def save_shard(self, index: ShardIndex) -> None:
        """Write the index of one shard."""
        self._make_folder()
        self.store.write(self._shard_key(index.row.key), index.encode())

    def saved_rows(self, keys: set[str]) -> list[ShardRow]:
        """Return the rows in the stored indexes of the shards `keys`; damaged ones are left out.

        A build that was killed before it wrote the data set's index leaves them. Cost: a listing, and a read of 4 KiB each.
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
        except ObjectMissingError:  # the folder does not exist
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
                    f"an index cannot be stored in {self.store.root}: {error.strerror}",
                    hint="store it elsewhere with index_dir=, --index-dir or XDG_CACHE_HOME, or beside the shards",
                ) from error


class EarlyIndex:
    """The index beside everything in a store, which is requested while the store is being listed.

    Args:
        store: Store that is being listed.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._in_flight: InFlight[None] = InFlight(store)
        self._in_flight.submit(Get(FOLDER + DATASET_KEY), None)

    def of(self, place: IndexPlace) -> DatasetIndex | None:
        """Return the index at `place`; None if that is another place, or the index could not be read. Call it once."""
        if not place.is_below(self._store):
            return None
        _, completion = self._in_flight.wait()
        if isinstance(completion.error, ObjectMissingError):
            return DatasetIndex(place.base_url)
        return None if completion.error is not None else place.decoded(completion.body)

    def close(self) -> None:
        """Cancel the request."""
        self._in_flight.cancel()


def beside(shards: Iterable[ShardLike]) -> IndexPlace:
    """Return the place beside `shards`.

    Raises:
        ConfigError: The shards have no folder in common.
    """
    shards = list(shards)
    base = base_url(shards)
    store = shards[0].store
    root = store.describe("")
    if not base.startswith(root):
        raise ConfigError(
            f"the shards' folder {base} is above the listed folder {root}", hint="name the shards' folder itself"
        )
    return IndexPlace(store, base[len(root) :] + FOLDER, base=base)


def found_beside(shards: Iterable[ShardLike]) -> IndexPlace | None:
    """Return the place beside `shards`; None if no index is stored there, or it may not be read. Cost: one request."""
    try:
        place = beside(shards)
        return place if place.exists() else None
    except (ConfigError, StoreError):
        return None


def in_directory(shards: Iterable[ShardLike], index_dir: str | os.PathLike[str] | None = None) -> IndexPlace:
    """Return the place of the shards' index in a directory of this machine.

    Args:
        shards: Listed shards.
        index_dir: Directory of indexes; None means ``$XDG_CACHE_HOME/penstock/index``.

    Raises:
        ConfigError: The shards have no folder in common, or other users could have written an index there.
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
    """Return ``$XDG_CACHE_HOME/penstock/index``, or ``~/.cache/penstock/index``."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if cache.startswith("/") else Path.home() / ".cache") / "penstock" / "index"


def _written_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _get_many(store: Store, requests: Sequence[tuple[Key, ByteRange | None]]) -> Iterator[tuple[Key, Buffer]]:
    """Yield the key and bytes of small objects or ranges in order, without a window that has to grow first.

    A range of None reads the whole object.
    """
    operations = ((number, Get(*request)) for number, request in enumerate(requests))
    answers = perform_many(store, operations, requests_max=READS_IN_FLIGHT_MAX)
    arrived: dict[int, Buffer] = {}
    for number, (key, _) in enumerate(requests):
        while number not in arrived:
            ended, completion = next(answers)
            arrived[ended] = completion.body
        yield key, arrived.pop(number)


# ── what is known of shards ─────────────────────────────────────────────────────────────────────────────────────────


class Lookup(NamedTuple):
    """The rows of an index for some shards.

    Attributes:
        place: Place of the index.
        shards: The shards with their versions, in the order given.
        rows: The row of each shard, in the same order; None if there is none for its version.
        outdated_count: Number of shards that an index has only in another version.
    """

    place: IndexPlace
    shards: list[VersionedShard]
    rows: list[ShardRow | None]
    outdated_count: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether every shard has a row."""
        return None not in self.rows

    @property
    def samples_count(self) -> int:
        """Number of samples in the shards that have a row."""
        return sum(row.samples_count for row in self.rows if row is not None)


def lookup(
    shards: Sequence[ShardLike],
    *,
    index_dir: str | os.PathLike[str] | None = None,
    early: EarlyIndex | None = None,
) -> Lookup:
    """Return the rows for `shards` in the index beside them, or else in `index_dir`.

    If neither has all shards, the one that has more of them is used.

    Args:
        shards: Listed shards.
        index_dir: Folder of indexes on this machine; None means ``$XDG_CACHE_HOME/penstock/index``.
        early: The index beside the shards, if it was requested already.

    Raises:
        ConfigError: `shards` is empty, or they have no folder in common.
        StoreError: A shard whose version the listing did not give is missing, or its store cannot be reached.

    Cost: one read beside the shards, and one on this machine if that index is missing or incomplete; one request for each
    shard whose version the listing did not give.
    """
    if not shards:
        raise ConfigError("an index needs at least one shard")
    local = in_directory(shards, index_dir)
    versioned = resolve(shards, local.base_url)
    best = Lookup(local, versioned, [None] * len(versioned))
    places: tuple[Callable[[], IndexPlace], ...] = (lambda: beside(shards), lambda: local)
    for place_of in places:
        try:
            place = place_of()
            index = early.of(place) if early is not None else None
            if index is None:
                index = place.load()
        except (ConfigError, StoreError):  # no permission to read there; the job streams, or indexes elsewhere
            continue
        rows = [index.row_of(each.key, size_bytes=each.size_bytes, etag=each.etag) for each in versioned]
        outdated_count = sum(row is None and each.key in index.rows for each, row in zip(versioned, rows, strict=True))
        if best.rows.count(None) > rows.count(None):
            best = Lookup(place, versioned, rows)
        best = best._replace(outdated_count=max(best.outdated_count, outdated_count) if not best.is_complete else 0)
        if best.is_complete:
            break
    known_count = len(best.rows) - best.rows.count(None)
    _log.debug("the index at %s has %d of %d shards", best.place.url, known_count, len(best.rows))
    return best
