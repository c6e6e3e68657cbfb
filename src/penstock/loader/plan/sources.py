"""What there is to read: the shards of each source, and whether an index knows them."""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import ConfigError, StoreError
from penstock.index import beside, in_directory, lookup
from penstock.pipeline import Mix, Objects, Shards
from penstock.sources.shards import ShardFinder

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence

    from penstock.cache import CacheConfig
    from penstock.config import FetchConfig
    from penstock.index import EarlyIndex, IndexPlace, Lookup, ShardRow
    from penstock.pipeline import Pipeline
    from penstock.sources.readers import SampleReader
    from penstock.sources.shards import Shard
    from penstock.store import Store

_log = logging.getLogger("penstock.loader")


class DataSource(NamedTuple):
    """One source.

    Attributes:
        shards: In an order that the URLs fix.
        rows: What an index knows of each.
        place: Where that index lies; None: there is none.
        objects: Samples that are objects of their own; they need no index.
        outdated_count: Number of shards that an index knows, but in another version.
    """

    shards: list[Shard]
    rows: Sequence[ShardRow | None]
    place: IndexPlace | None
    objects: SampleReader | None = None
    outdated_count: int = 0

    @property
    def samples_count(self) -> int:
        """As far as it is known."""
        return len(self.objects) if self.objects is not None else sum(row.samples_count for row in self.rows if row)


class DataSources(NamedTuple):
    """All sources of a pipeline.

    Attributes:
        pipeline: Whose they are.
        sources: In the order of its mix.
        is_indexed: Whether an index knows all of them, and is to be used.
        said: One line on that, for people.
    """

    pipeline: Pipeline
    sources: list[DataSource]
    is_indexed: bool
    said: str


def data_digest(sources: Iterable[DataSource]) -> str:
    """Identity of a data set: a digest of its shards' URLs, sizes and versions, as far as the listing tells."""
    digest = hashlib.blake2b(digest_size=16)
    for source in sources:
        lines = [f"{shard.url}\n{shard.listed_size_bytes}\n{shard.listed_etag}\n" for shard in source.shards]
        if source.objects is not None:
            lines += [f"{key}\n" for key in source.objects.iter_keys()]
        digest.update("".join(lines).encode(errors="surrogateescape"))  # at once: there may be millions
    return digest.hexdigest()


class SourceFinder:
    """Lists a pipeline's sources and looks for indexes. The stores stay open until ``close()``.

    Args:
        pipeline: Whose sources.
        fetch: For the stores.
        index_dir: Where an index may lie besides its data set.
        cache: For the stores.
        share: See ``Loader``.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        fetch: FetchConfig | None,
        index_dir: str | os.PathLike[str] | None,
        cache: CacheConfig | str | os.PathLike[str] | None = None,
        share: Callable[[Callable[[], bytes]], bytes] | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._index_dir = index_dir
        self._sources: list[tuple[Shards | Objects, ShardFinder]] = []
        for leaf in pipeline.flat().leaves:
            assert not isinstance(leaf.source, Mix)
            self._sources.append((leaf.source, ShardFinder(leaf.source, fetch=fetch, cache=cache, share=share)))

    def find(self, *, index: str) -> DataSources:
        """Look.

        Args:
            index: ``"stream"``: whatever an index says; ``"require"`` or ``"index"``: refuse where there is none;
                ``"auto"``: use it where there is one of all shards.

        Raises:
            ObjectMissingError: a prefix or pattern has no shard.
            StoreError: the store could not be listed.
            ConfigError: a URL that no store takes; no index, and one is required.
        """
        sources = [self._found(number, index) for number in range(len(self._sources))]
        unknown = [row for source in sources if source.objects is None for row in source.rows].count(None)
        total = sum(len(source.shards) for source in sources)
        samples = sum(source.samples_count for source in sources)
        if all(source.objects is not None for source in sources):
            return DataSources(self._pipeline, sources, True, f"reading {samples} samples that are objects")
        if index == "stream":
            return DataSources(self._pipeline, sources, False, f"reading {total} shards without an index, as asked")
        if not unknown:
            places = ", ".join(source.place.url for source in sources if source.place is not None)
            return DataSources(self._pipeline, sources, True, f"reading {total} shards, {samples} samples, by {places}")
        said = f"no index knows {unknown} of {total} shards"
        if index != "auto":
            raise ConfigError(f"{said}, and this loader reads with one", hint="run `penstock index URL`")
        if unknown < total or any(source.outdated_count for source in sources):
            # shards were added, replaced or copied: without a warning, length and order would change unnoticed
            _log.warning(
                "the index knows %d of %d shards in their present version: all are read without it, in another order. "
                "Run `penstock index` to bring it up to date",
                total - unknown,
                total,
            )
        return DataSources(self._pipeline, sources, False, f"reading {total} shards without an index: {said}")

    @property
    def stores(self) -> list[Store]:
        """Those that are open."""
        return [store for _, finder in self._sources for store in finder.stores]

    def close(self) -> None:
        """Close the stores; idempotent."""
        for _, finder in self._sources:
            finder.close()

    def _found(self, number: int, index: str) -> DataSource:
        source, finder = self._sources[number]
        if isinstance(source, Objects):
            return _of_objects(source, finder)
        if index == "stream":
            shards = finder.find()
            return DataSource(shards, [None] * len(shards), None)
        early = finder.early_index()
        try:
            return self._looked_up(finder.find(), needed=index != "auto", early=early)
        finally:
            if early is not None:
                early.close()

    def _looked_up(self, shards: list[Shard], *, needed: bool, early: EarlyIndex | None) -> DataSource:
        nothing = DataSource(shards, [None] * len(shards), None)
        is_listed = all(shard.etag is not None and shard.size_bytes is not None for shard in shards)
        # versions that were not listed cost a request each: asked only where there is something to compare them with
        if not needed and not is_listed and not self._any_index(shards):
            return nothing
        try:
            found: Lookup = lookup(shards, index_dir=self._index_dir, early=early)
        except (ConfigError, StoreError):
            if needed:
                raise
            return nothing
        for shard, each in zip(shards, found.shards, strict=True):
            if shard.etag is None or shard.size_bytes is None:
                shard.versions.learn(shard, etag=each.if_match, size_bytes=each.size_bytes)
        return DataSource(shards, found.rows, found.place, outdated_count=found.outdated_count)

    def _any_index(self, shards: list[Shard]) -> bool:
        for place_of in (beside, lambda given: in_directory(given, self._index_dir)):
            try:
                if len(place_of(shards).load()):
                    return True
            except (ConfigError, StoreError):
                continue
        return False


def _of_objects(source: Objects, finder: ShardFinder) -> DataSource:
    if source.read is not None:
        from penstock.sources.functions import FunctionReader

        return DataSource([], [], None, FunctionReader(source))
    from penstock.sources.objects import ObjectReader

    shards = finder.find()
    return DataSource(shards, [None] * len(shards), None, ObjectReader(source, shards))
