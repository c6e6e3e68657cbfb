"""Looking: from the URLs of a pipeline to the shards that are there, in an order that the URLs fix."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from penstock import compose
from penstock.errors import ObjectMissingError
from penstock.formats import format_of_name
from penstock.pipeline.source import braces_unfolded, has_glob

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.config import FetchConfig
    from penstock.pipeline import Shards
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

    __slots__ = ("etag", "format", "key", "listed_etag", "listed_size_bytes", "size_bytes", "store", "url")

    def __init__(self, store: Store, key: Key, *, etag: str | None = None, size_bytes: int | None = None) -> None:
        self.store = store
        self.key = key
        self.url = store.describe(key)
        self.format: str | None = None
        self.etag = self.listed_etag = etag
        self.size_bytes = self.listed_size_bytes = size_bytes


class ShardFinder:
    """Connects once per root and lists. The stores stay open until ``close()``."""

    def __init__(self, source: Shards, *, fetch: FetchConfig | None) -> None:
        self._source = source
        self._fetch = fetch
        self._stores: dict[str, Store] = {}

    def find(self) -> list[Shard]:
        """All shards of the source.

        Raises:
            ObjectMissingError: a prefix or pattern has no shard.
            StoreError: the store could not be listed.
            ConfigError: a URL that no store takes.

        Cost: one listing per prefix or pattern (one request per 1 000 keys); none for shards given by name.
        """
        shards: list[Shard] = []
        for url in self._source.urls:
            for each in [url] if self._source.is_list else braces_unfolded(url):
                shards.extend(self._of(each))
        for shard in shards:
            shard.format = self._source.format
        return shards

    def close(self) -> None:
        """Close the stores; idempotent."""
        stores, self._stores = self._stores, {}
        for store in stores.values():
            store.close()

    def _of(self, url: str) -> list[Shard]:
        if has_glob(url) and not self._source.is_list:
            folder, pattern = _glob_parts(url)
            matches = re.compile(_glob_regex(pattern)).fullmatch
            return self._listed(folder, url, matches)
        if url.endswith("/") or (not self._source.is_list and format_of_name(url) is None):
            return self._listed(url.rstrip("/") + "/", url, None)
        root, key = compose.split(url)
        return [Shard(self._store(root), key)]

    def _listed(self, folder: str, url: str, matches: Callable[[str], object] | None) -> list[Shard]:
        store = self._store(folder)
        others_count = 0
        shards = []
        for info in store.list():
            if info.is_prefix or (matches is not None and matches(info.key) is None):
                continue
            if format_of_name(info.key) is None:
                others_count += 1
                continue
            shards.append(Shard(store, info.key, etag=info.etag, size_bytes=info.size_bytes))
        if not shards:
            raise ObjectMissingError(
                f"no shards here ({others_count} objects of other kinds)",
                operation="LIST",
                url=store.describe("") if matches is None else url,
                hint="a prefix takes objects whose name ends in .tar; is it the right folder?",
            )
        return shards

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
                requester_pays=connection.requester_pays,
                sse_customer_key=connection.sse_customer_key,
                expected_bucket_owner=connection.expected_bucket_owner,
            )
        return store


def _glob_parts(url: str) -> tuple[str, str]:
    """The folder above the first wildcard, which is listed, and the pattern below it."""
    match = re.search(r"[*?\[]", url)
    at = url.rfind("/", 0, match.start() if match else None) + 1
    return url[:at] or "./", url[at:]


def _glob_regex(pattern: str) -> str:
    """`pattern` as a regular expression: ``*`` and ``?`` stay inside a path segment, ``**`` does not."""
    out = []
    for token in re.findall(r"\*\*/?|\*|\?|\[!?\]?[^\]]*\]|.", pattern, re.DOTALL):
        if token.startswith("**"):
            out.append("(?:.*/)?" if token.endswith("/") else ".*")
        elif token == "*":
            out.append("[^/]*")
        elif token == "?":
            out.append("[^/]")
        elif len(token) > 2 and token[0] == "[":
            inside = token[1:-1].replace("\\", "\\\\")
            out.append(f"[^{inside[1:]}]" if inside.startswith("!") else f"[{inside}]")
        else:
            out.append(re.escape(token))
    return "(?s:" + "".join(out) + ")"
