"""Looking: from the URLs of a pipeline to the shards that are there, in an order that the URLs fix."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, NamedTuple

from penstock import compose
from penstock.errors import ConfigError, ObjectMissingError
from penstock.formats import format_of_name
from penstock.index import FOLDER, EarlyIndex
from penstock.patterns import braces_unfolded, glob_matcher, glob_parts, has_glob
from penstock.pipeline import Objects, Shards
from penstock.store.listing import list_objects

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cache import CacheConfig
    from penstock.config import FetchConfig
    from penstock.store import Store
    from penstock.types import Key


class Shard:
    """One shard: where it is, and the version that this job reads.

    Attributes:
        store: That it lies in.
        key: In that store.
        url: For people, and for ``__shard__``.
        etag: From the listing, else from the first answer; a later answer with another one is an error.
        size_bytes: From the listing, else from the first pass; None while it is not known.
        format: As the pipeline says; None: to be found from the shard.
        listed_etag: From the listing alone.
        listed_size_bytes: The same.
    """

    __slots__ = ("_url", "etag", "format", "key", "listed_etag", "listed_size_bytes", "size_bytes", "store")

    def __init__(self, store: Store, key: Key, *, etag: str | None = None, size_bytes: int | None = None) -> None:
        self.store = store
        self.key = key
        self._url: str | None = None  # through a store's wrappers it takes as long as all else here
        self.format: str | None = None
        self.etag = self.listed_etag = etag
        self.size_bytes = self.listed_size_bytes = size_bytes

    @property
    def url(self) -> str:
        """See above."""
        if self._url is None:
            self._url = self.store.describe(self.key)
        return self._url


class _Listing(NamedTuple):
    """What was found: roots of stores, and of each shard the number of its root, its key there, its ETag and size."""

    roots: list[str]
    entries: list[tuple[int, Key, str | None, int | None]]


def _decoded(data: bytes) -> _Listing:
    return _Listing(*json.loads(data))


class ShardFinder:
    """Connects once per root and lists. The stores stay open until ``close()``.

    Args:
        source: Shards; or objects, of which none is left out for its name.
        fetch: For the stores.
        cache: See there.
        share: See ``Loader``: one of the job lists, and all get what it found.
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
        self._seeks_index = False  # beside what is listed

    def find(self) -> list[Shard]:
        """All shards, or objects, of the source; looked for the first time only.

        Raises:
            ObjectMissingError: a prefix or pattern has no shard.
            StoreError: the store could not be listed.
            ConfigError: a URL that no store takes.

        Cost: one listing per prefix or pattern (one request per 1 000 keys); one read of a manifest; none for shards
        given by name.
        """
        listing = self._listing
        if listing is None:
            listing = self._looked() if self._share is None else _decoded(self._share(self._encoded))
        shards = [
            Shard(self._store(listing.roots[root]), key, etag=etag, size_bytes=size_bytes)
            for root, key, etag, size_bytes in listing.entries
        ]
        if isinstance(self._source, Shards):
            self._listing = listing  # millions of objects are not kept twice
            for shard in shards:
                shard.format = self._source.format
        return shards

    def _looked(self) -> _Listing:
        shards: list[Shard] = self._manifested()
        for url in self._source.urls:
            for each in [url] if self._source.is_list else braces_unfolded(url):
                shards.extend(self._of(each))
        roots = {id(store): number for number, store in enumerate(self._stores.values())}
        entries = [(roots[id(shard.store)], shard.key, shard.etag, shard.size_bytes) for shard in shards]
        return _Listing(list(self._stores), entries)

    def _encoded(self) -> bytes:
        return json.dumps(self._looked()).encode()

    def early_index(self) -> EarlyIndex | None:
        """Ask for the index beside what ``find`` is going to list; None where that is more or less than one folder."""
        urls, source = self._source.urls, self._source
        self._seeks_index = True
        if len(urls) != 1 or source.is_list or source.manifest is not None:
            return None
        url = urls[0]
        if has_glob(url):
            return EarlyIndex(self._store(glob_parts(url)[0]))
        is_prefix = url.endswith("/") or format_of_name(url) is None
        return EarlyIndex(self._store(_as_folder(url))) if is_prefix and "{" not in url else None

    @property
    def stores(self) -> list[Store]:
        """Those that are open."""
        return list(self._stores.values())

    def close(self) -> None:
        """Close the stores; idempotent."""
        stores, self._stores = self._stores, {}
        for store in stores.values():
            store.close()

    def _manifested(self) -> list[Shard]:
        """What a manifest names, in its order."""
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
        base = base[: base.rfind("/") + 1]  # one store for all, also where a store is a directory
        shards = []
        for entry in entries:
            if base.startswith("s3://") or not base:
                root, key = compose.split(entry.url)
            else:
                root, key = base, compose.key_below(base, entry.url)
            shards.append(Shard(self._store(root), key, etag=entry.etag, size_bytes=entry.size_bytes))
        return shards

    def _of(self, url: str) -> list[Shard]:
        if has_glob(url) and not self._source.is_list:
            folder, pattern = glob_parts(url)
            return self._listed(folder, url, glob_matcher(pattern))
        is_prefix = self._takes_all or format_of_name(url) is None
        if url.endswith("/") or (not self._source.is_list and is_prefix):
            return self._listed(_as_folder(url), url, None)
        root, key = compose.split(url)
        if not key and not self._source.is_list:  # a directory that is called like a shard
            return self._listed(url + "/", url, None)
        if not key:
            raise ConfigError(
                f"{url!r} is a directory, and a list names single {self._what}",
                hint=f"as a prefix it ends with a slash: {url}/",
            )
        return [Shard(self._store(root), key)]

    def _listed(self, folder: str, url: str, matches: Callable[[str], object] | None) -> list[Shard]:
        store = self._store(folder)
        others_count = 0
        shards = []
        skip = "" if self._takes_all else FOLDER
        for info in list_objects(store, "", skip=skip, skips_at_once=self._seeks_index and bool(skip)):
            if info.is_prefix or (matches is not None and matches(info.key) is None):
                continue
            if self._is_other(info.key):
                others_count += 1
                continue
            shards.append(Shard(store, info.key, etag=info.etag, size_bytes=info.size_bytes))
        if not shards:
            what = f"no shards here ({others_count} objects of other kinds)" if others_count else "no shards here"
            hint = "the folder is empty; is it the right one?"
            if matches is not None:
                what, hint = "no shard has a name like this", "* and ? stay inside a folder, ** does not"
            elif others_count:
                hint = "a prefix takes objects whose names say their format, .tar and the like; single objects: ps.objects(url)"
            elif self._takes_all:
                what, hint = "no objects here", "is it the right folder? A single object is named in a list, [url]"
            where = store.describe("") if matches is None else url
            raise ObjectMissingError(what, operation="LIST", url=where, hint=hint)
        return shards

    def _is_other(self, key: str) -> bool:
        """Whether an object that was listed is none of the data."""
        if key.startswith(FOLDER) or f"/{FOLDER}" in key:  # indexes, plans: penstock's own
            return True
        return key.endswith("/") if self._takes_all else format_of_name(key) is None

    @property
    def _what(self) -> str:
        return "objects" if self._takes_all else "shards"

    def _store(self, root: str) -> Store:
        store = self._stores.get(root)
        if store is None:
            connection = self._source.connection
            store = self._stores[root] = compose.connect(
                root,
                endpoint_url=connection.endpoint_url,
                region=connection.region,
                profile=connection.profile,
                credentials=connection.credentials,
                anonymous=connection.anonymous,
                addressing=connection.addressing,
                transport=connection.transport,
                retry=connection.retry,
                hedge=connection.hedge,
                fetch=self._fetch,
                cache=self._cache,
                requester_pays=connection.requester_pays,
                sse_customer_key=connection.sse_customer_key,
                expected_bucket_owner=connection.expected_bucket_owner,
            )
        return store


def _as_folder(url: str) -> str:
    """`url` with a slash at its end; where it has several, they are part of the keys: ``s3://b/a//`` is not ``s3://b/a/``."""
    return url if url.endswith("/") else f"{url}/"
