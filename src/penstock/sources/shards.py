"""Finds the shards or objects that the URLs of a pipeline name, in an order that only the URLs and the keys determine."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from penstock import compose
from penstock.config import FetchConfig
from penstock.errors import AccessDeniedError, ClosedError, ConfigError, DataError, ObjectMissingError
from penstock.formats import conversion_hint, format_of_name
from penstock.index import FOLDER, PACKED_KEY, EarlyIndex
from penstock.memory.ranges import merged_spans
from penstock.pipeline import Objects, Shards
from penstock.store.listing import list_objects
from penstock.text.json_text import parse_json
from penstock.text.patterns import expand_braces, glob_matcher, has_glob, split_glob
from penstock.types import ByteRange, lasting_etag

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.cache import CacheConfig
    from penstock.index import IndexPlace, ShardIndex, ShardRow
    from penstock.pipeline import Pipeline, SequentialReader
    from penstock.sources.readers import SampleReader
    from penstock.store import Store
    from penstock.types import Key


class ShardVersion(NamedTuple):
    """The version of a shard.

    Attributes:
        etag: ETag, or what the store uses instead to identify a version; None if it is not known or the store has none.
        size_bytes: Size in bytes; None if it is not known.
    """

    etag: str | None
    size_bytes: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """One shard or object of a source; `versions` holds its ETag and size.

    Attributes:
        store: The store that it lies in.
        key: Key in `store`.
        versions: The versions of shards of its source that indexes and responses have added to the listing. Shards
            themselves never change; only this table is written while a job reads, by the threads that read.
        format: Name of the format that the pipeline gives; None: the name or the first bytes of the shard tell.
        listed_etag: ETag in the listing; None if the listing has none or the shard was not listed.
        listed_size_bytes: Size in the listing, in bytes; None if the shard was not listed.
    """

    store: Store
    key: Key
    versions: dict[Shard, ShardVersion] = field(default_factory=dict)
    format: str | None = None
    listed_etag: str | None = None
    listed_size_bytes: int | None = None
    # made when it is first used: describing it through a store's wrappers is as slow as making a shard
    _url: str | None = None

    @property
    def url(self) -> str:
        """URL without secrets, as messages and ``__shard__`` show it."""
        if self._url is None:
            object.__setattr__(self, "_url", self.store.describe(self.key))
        assert self._url is not None
        return self._url

    @property
    def version(self) -> ShardVersion:
        """Version that this job reads; None if it is not known yet."""
        return self.versions.get(self) or ShardVersion(self.listed_etag, self.listed_size_bytes)

    @property
    def etag(self) -> str | None:
        """ETag of the version that this job reads; a later response with another ETag is an error."""
        learned = self.versions.get(self)
        return self.listed_etag if learned is None else learned.etag

    @property
    def size_bytes(self) -> int | None:
        """Size in bytes of the version that this job reads; None if it is not known."""
        learned = self.versions.get(self)
        return self.listed_size_bytes if learned is None else learned.size_bytes

    def learn(self, *, etag: str | None = None, size_bytes: int | None = None) -> None:
        """Record the version of this shard that a response or an index states.

        Args:
            etag: ETag; ignored if one is already known, because a job reads one version of each shard.
            size_bytes: Size in bytes; None keeps the known size.
        """
        known = self.version
        version = ShardVersion(known.etag or lasting_etag(etag), known.size_bytes if size_bytes is None else size_bytes)
        if version != known:
            self.versions[self] = version


_Entry: TypeAlias = "tuple[str, Key, str | None, int | None]"
"""A listed shard: the root of its store, its key in that store, its ETag, and its size in bytes."""


class _Listing(NamedTuple):
    """The shards of a source, as one rank sends them to the others."""

    roots: list[str]  # URLs that stores connect to
    entries: list[tuple[int, Key, str | None, int | None]]  # of each shard: index of its root, key, ETag, size in bytes


class ShardFinder:
    """Lists the shards of a source. It connects once per root, and its stores stay open until ``close()``.

    Args:
        source: Shards, or objects: a listing of shards leaves out keys whose names have no known format.
        fetch: Bounds for reading, for the stores.
        cache: Cache of the stores: a ``CacheConfig`` or its directory.
        share: As for ``Loader``: one rank of the job lists, and this function gives all ranks the result.
    """

    def __init__(
        self,
        source: Shards | Objects,
        *,
        fetch: FetchConfig | None,
        cache: CacheConfig | str | os.PathLike[str] | None = None,
        share: Callable[[Callable[[], bytes]], bytes] | None = None,
    ) -> None:
        self._cache = cache
        self._share = share
        self._listing: _Listing | None = None
        self._source = source
        self._takes_all = isinstance(source, Objects)
        self._fetch = fetch
        self._stores: dict[str, Store] = {}
        self._closed = False
        self._seeks_index = False  # whether an index is read from the folder that is listed

    def find(self) -> list[Shard]:
        """Return all shards or objects of the source. Shards are listed by the first call only, objects by every call.

        Raises:
            ObjectMissingError: No shard matches a prefix or pattern.
            StoreError: A store cannot be listed.
            ConfigError: No store can read a URL.
            ClosedError: ``close()`` was called before, or meanwhile.

        Cost: one listing per prefix or pattern (one request per 1 000 keys); one read of a manifest; no request for
            shards given by name.
        """
        listing = self._listing
        if listing is None:
            listing = self._list_all() if self._share is None else _Listing(*json.loads(self._share(self._encoded)))
        format_name = None
        if isinstance(self._source, Shards):
            self._listing = listing  # not of objects: millions of them would be held twice
            format_name = self._source.format
        stores = [self._store(root) for root in listing.roots]
        versions: dict[Shard, ShardVersion] = {}
        return [
            Shard(stores[root], key, versions, format_name, lasting_etag(etag), size_bytes)
            for root, key, etag, size_bytes in listing.entries
        ]

    def _list_all(self) -> _Listing:
        found = self._from_manifest()
        for url in self._source.urls:
            for each in [url] if self._source.is_list else expand_braces(url):
                found.extend(self._expand(each))
        roots = {root: number for number, root in enumerate(self._stores)}
        return _Listing(
            list(self._stores), [(roots[root], key, etag, size_bytes) for root, key, etag, size_bytes in found]
        )

    def _encoded(self) -> bytes:
        return json.dumps(self._list_all()).encode()

    def early_index(self) -> EarlyIndex | None:
        """Start to read the index beside the shards, before ``find`` lists them; None unless the source is one folder."""
        urls, source = self._source.urls, self._source
        self._seeks_index = True
        if len(urls) != 1 or source.is_list or source.manifest is not None:
            return None
        url = urls[0]
        if has_glob(url):
            return EarlyIndex(self._store(split_glob(url)[0]))
        is_prefix = url.endswith("/") or format_of_name(url) is None
        return EarlyIndex(self._store(_as_folder(url))) if is_prefix and "{" not in url else None

    @property
    def stores(self) -> list[Store]:
        """The open stores, one per root."""
        return [] if self._closed else list(self._stores.values())

    def close(self) -> None:
        """Close the stores, also while another thread lists, which then ends with ``ClosedError``; idempotent."""
        self._closed = True
        for store in list(self._stores.values()):
            store.close()

    def _from_manifest(self) -> list[_Entry]:
        """Return the shards that the manifest names, in its order."""
        url = self._source.manifest
        if url is None:
            return []
        root, key = compose.split(url)
        if not key:
            raise ConfigError(
                f"manifest={url!r} is a directory, not a list of shards", hint="shards(url) lists a directory"
            )
        from penstock.index import read_manifest

        entries = read_manifest(self._store(root).read(key).data, url=url)
        base = os.path.commonprefix([compose.folder_of(entry.url) for entry in entries])  # noqa: RUF071 - cut next
        base = base[: base.rfind("/") + 1]  # one store for all shards, even if each lies in a directory of its own
        found: list[_Entry] = []
        for entry in entries:
            if base.startswith("s3://") or not base:
                root, key = compose.split(entry.url)
            else:
                root, key = base, compose.key_below(base, entry.url)
            self._store(root)
            found.append((root, key, entry.etag, entry.size_bytes))
        return found

    def _expand(self, url: str) -> list[_Entry]:
        if has_glob(url) and not self._source.is_list:
            folder, pattern = split_glob(url)
            return self._list(folder, url, glob_matcher(pattern))
        is_prefix = self._takes_all or format_of_name(url) is None
        if url.endswith("/") or (not self._source.is_list and is_prefix):
            return self._list(_as_folder(url), url, None)
        root, key = compose.split(url)
        if not key and not self._source.is_list:  # a directory whose name looks like a shard's
            return self._list(url + "/", url, None)
        if not key:
            raise ConfigError(
                f"{url!r} is a directory, but a list names single {'objects' if self._takes_all else 'shards'}",
                hint=f"to list a directory, end its URL with a slash: {url}/",
            )
        self._store(root)
        return [(root, key, None, None)]

    def _list(self, folder: str, url: str, matches: Callable[[str], object] | None) -> list[_Entry]:
        store = self._store(folder)
        others_count = 0
        converting: str | None = None
        found: list[_Entry] = []
        skip = "" if self._takes_all else FOLDER
        for info in list_objects(store, "", skip=skip, skips_at_once=self._seeks_index and bool(skip)):
            if info.is_prefix or (matches is not None and matches(info.key) is None):
                continue
            if self._is_other(info.key):
                others_count += 1
                converting = converting or conversion_hint(folder + info.key)
                continue
            found.append((folder, info.key, info.etag, info.size_bytes))
        if not found:
            what = f"no shards here ({others_count} objects of other kinds)" if others_count else "no shards here"
            hint = "the folder is empty; is it the right one?"
            if matches is not None:
                what, hint = "no shard has a name like this", "* and ? do not match a slash, ** does"
            elif others_count:
                hint = (
                    converting or "shards end in .tar or another known format; for single objects use ps.objects(url)"
                )
            elif self._takes_all:
                what, hint = "no objects here", "is it the right folder? To name a single object, use a list: [url]"
            where = store.describe("") if matches is None else url
            raise ObjectMissingError(what, operation="LIST", url=where, hint=hint)
        return found

    def _is_other(self, key: str) -> bool:
        """Whether a listed object does not belong to the data."""
        if key.startswith(FOLDER) or f"/{FOLDER}" in key:  # penstock's own files, such as indexes
            return True
        return key.endswith("/") if self._takes_all else format_of_name(key) is None

    def _store(self, root: str) -> Store:
        store = self._stores.get(root)
        if store is None:
            options = self._source.connection.given()
            store = self._stores[root] = compose.connect(root, fetch=self._fetch, cache=self._cache, **options)
        if self._closed:  # perhaps after ``close()`` looked for stores to close
            store.close()
            raise ClosedError("the shards were closed while they were listed")
        return store


def _as_folder(url: str) -> str:
    """Return `url` with a slash at its end. Further slashes belong to the keys: ``s3://b/a//`` is not ``s3://b/a/``."""
    return url if url.endswith("/") else f"{url}/"


def read_classes(pipeline: Pipeline) -> tuple[str, ...] | None:
    """Return the names of the classes that ``pack(labels=)`` left beside the shards, in the order of their numbers.

    Args:
        pipeline: The pipeline; of a mix, all sources must have the same classes.

    Returns:
        The names; None if the data was not packed with labels that are words.

    Raises:
        StoreError, DataError: The manifest of the packing cannot be read.

    Cost: one request for each source.
    """
    found = {_classes_beside(leaf.source) for leaf in pipeline.flat().leaves if isinstance(leaf.source, Shards)}
    return found.pop() if len(found) == 1 else None


def _classes_beside(source: Shards) -> tuple[str, ...] | None:
    url = source.manifest or source.urls[0]
    if not source.is_list:
        url = expand_braces(url)[0]
        url = split_glob(url)[0] if has_glob(url) else url
    is_folder = url.endswith("/") or (format_of_name(url) is None and source.manifest is None)
    folder = _as_folder(url) if is_folder else compose.folder_of(url)
    with compose.connect(folder, **source.connection.given()) as store:
        try:
            head = bytes(store.read(PACKED_KEY).data).partition(b"\n")[0]
        except (ObjectMissingError, AccessDeniedError):  # without the right to list, a missing key is a 403
            return None
    try:
        classes = parse_json(head).get("classes")
        return None if classes is None else tuple(map(str, classes))
    except (ValueError, AttributeError, TypeError) as error:
        raise DataError(f"it is not the manifest of a packing ({error})", shard=f"{folder}{PACKED_KEY}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """One source of a pipeline.

    Attributes:
        shards: Shards, or objects, in an order that their URLs fix.
        rows: Rows of an index, one for each shard; empty unless an index knows all shards.
        place: Place of this index; None if there is no index, and for objects.
        objects: Samples that are objects of their own and need no index; None for shards.
        indexed_count: Number of shards that an index knows.
        outdated_count: Number of shards that an index knows in another version only.
        reader: Gives the samples of a source that cannot be listed; None for shards and objects.
    """

    shards: Sequence[Shard]
    rows: Sequence[ShardRow] = ()
    place: IndexPlace | None = None
    objects: SampleReader | None = None
    indexed_count: int = 0
    outdated_count: int = 0
    reader: SequentialReader | None = None

    @property
    def is_indexed(self) -> bool:
        """Whether the number of samples is known without reading them."""
        return self.objects is not None or (self.reader is None and self.indexed_count == len(self.shards))

    @property
    def counts(self) -> Sequence[int]:
        """Number of samples in each shard; an object is one sample."""
        return [1] * len(self.objects) if self.objects is not None else [row.samples_count for row in self.rows]

    @property
    def samples_count(self) -> int:
        """Number of samples that are known so far."""
        return len(self.objects) if self.objects is not None else sum(row.samples_count for row in self.rows)

    @property
    def sample_bytes(self) -> float:
        """Mean size of a sample as stored, in bytes; 0 for objects."""
        return sum(row.size_bytes for row in self.rows) / max(1, self.samples_count)


def gap_bytes_of(shard: Shard) -> int:
    """Return the widest gap to read through, in bytes: up to this size reading it costs less than another request."""
    return (shard.store.fetch_config or FetchConfig()).gap_bytes_max


def may_pay(shard: Shard, row: ShardRow, fields: frozenset[str] | None) -> bool:
    """Whether skipping members may save anything: only if the average sample is longer than the gap to read through.

    Args:
        shard: The shard.
        row: Row of the shard in the index of the data set.
        fields: Members that the pipeline needs; None: all.
    """
    long_enough = row.size_bytes > gap_bytes_of(shard) * row.samples_count
    return fields is not None and long_enough and row.format == "tar" and row.has_offsets


def wanted_spans(
    index: ShardIndex, first: int, count: int, *, fields: frozenset[str], gap_bytes: int
) -> list[ByteRange] | None:
    """Return the spans to read of samples ``[first, first + count)``: the members in `fields`, and gaps not worth skipping.

    Args:
        index: The index of the shard.
        first: Number of the first sample in the shard, from 0.
        count: Number of samples.
        fields: Members that the pipeline needs.
        gap_bytes: The widest gap to read through.

    Returns:
        Spans in ascending order; None: read all bytes, because skipping saves at most `gap_bytes` or the index does not
        say where the members lie.
    """
    members = index.members
    if members is None or index.offsets is None or not fields.issubset(members.names):
        return None
    extent_bytes = int(index.offsets[first + count] - index.offsets[first])
    found = index.member_spans(first, count, sorted(fields))
    assert found is not None
    spans = merged_spans(map(ByteRange._make, found.reshape(-1, 2).tolist()), gap_bytes=gap_bytes)
    saved_bytes = extent_bytes - sum(span.length_bytes for span in spans)
    return list(spans) if saved_bytes > gap_bytes else None
