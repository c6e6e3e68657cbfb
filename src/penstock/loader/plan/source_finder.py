"""The sources of a pipeline: their shards or objects, and the indexes of these."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import ConfigError, StoreError
from penstock.index import beside, in_directory, lookup
from penstock.pipeline import Mix, Objects, Sequential, Shards
from penstock.sources.shards import DataSource, ShardFinder

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from penstock.cache import CacheConfig
    from penstock.config import FetchConfig
    from penstock.index import EarlyIndex
    from penstock.pipeline import Pipeline, SequentialReader
    from penstock.sources.shards import Shard
    from penstock.store import Store

_log = logging.getLogger("penstock.loader")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineData:
    """The sources of a pipeline.

    Attributes:
        sources: The source, or the sources of a mix in its order.
        is_indexed: Whether an index knows all shards and is used.
        summary: One line about this, for people.
    """

    sources: Sequence[DataSource]
    is_indexed: bool
    summary: str

    def digest(self) -> str:
        """Identity of the data: a digest of the URLs, sizes and ETags of the listing, or of the reader's identity."""
        digest = hashlib.blake2b(digest_size=16)
        for source in self.sources:
            lines = [f"{shard.url}\n{shard.listed_size_bytes}\n{shard.listed_etag}\n" for shard in source.shards]
            if source.objects is not None:
                lines += [f"{key}\n" for key in source.objects.iter_keys()]
            if source.reader is not None:
                lines.append(f"{source.reader.identity}\n")
            digest.update("".join(lines).encode(errors="surrogateescape"))  # one call: there may be millions of lines
        return digest.hexdigest()


class SourceFinder:
    """Lists the sources of a pipeline and looks for indexes. The stores stay open until ``close()``.

    Args:
        pipeline: The pipeline.
        fetch: Read options of the stores.
        index_dir: Directory that may hold an index; None is the default directory.
        cache: Cache around the stores, if any.
        share: The ``share=`` of ``Loader``: lists on one rank, and gives the listing to all.
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
        self._index_dir = index_dir
        self._reader: SequentialReader | None = None
        self._sources: list[tuple[Shards | Objects, ShardFinder]] = []
        self._members = [leaf.members() for leaf in pipeline.flat().leaves]
        for leaf in pipeline.flat().leaves:
            assert not isinstance(leaf.source, Mix)
            if isinstance(leaf.source, Sequential):  # it is the only source: mix() refuses it
                self._reader = leaf.source.reader
            else:
                self._sources.append((leaf.source, ShardFinder(leaf.source, fetch=fetch, cache=cache, share=share)))

    def find(self, *, index: str) -> PipelineData:
        """List the sources, and look for indexes of their shards.

        Args:
            index: ``"stream"`` ignores indexes; ``"require"`` needs one; ``"auto"`` uses one if it knows all
                shards.

        Raises:
            ObjectMissingError: A prefix or pattern has no shard.
            StoreError: A store cannot be listed.
            ConfigError: No store can read a URL; or an index is needed, and no index knows all shards.
        """
        if self._reader is not None:
            return PipelineData(
                sources=[DataSource(shards=[], reader=self._reader)],
                is_indexed=False,
                summary=f"reading {self._reader.name} in its own order",
            )
        sources = [self._source(number, index) for number in range(len(self._sources))]
        total = sum(len(source.shards) for source in sources)
        samples = sum(source.samples_count for source in sources)

        def data(summary: str, *, is_indexed: bool) -> PipelineData:
            return PipelineData(sources=sources, is_indexed=is_indexed, summary=summary)

        if all(source.objects is not None for source in sources):
            return data(f"reading {samples} samples by number", is_indexed=True)
        if index == "stream":
            return data(f"reading {total} shards in mode 'stream', without an index", is_indexed=False)
        if all(source.is_indexed for source in sources):
            places = ", ".join(source.place.url for source in sources if source.place is not None)
            return data(f"reading {total} shards, {samples} samples, by {places}", is_indexed=True)
        unknown = sum(len(source.shards) - source.indexed_count for source in sources if source.objects is None)
        summary = f"no index knows {unknown} of {total} shards"
        if index != "auto":
            raise ConfigError(f"{summary}, and this loader reads with one", hint="run `penstock index URL`")
        if unknown < total or any(source.outdated_count for source in sources):
            # shards were added, replaced or copied: without a warning, length and order would change unnoticed
            _log.warning(
                "the index knows %d of %d shards in their present version: all are read without it, in another order. "
                "Run `penstock index` to bring it up to date",
                total - unknown,
                total,
            )
        return data(f"reading {total} shards without an index: {summary}", is_indexed=False)

    @property
    def stores(self) -> list[Store]:
        """The stores that are open."""
        return [store for _, finder in self._sources for store in finder.stores]

    def close(self) -> None:
        """Close the stores; idempotent."""
        for _, finder in self._sources:
            finder.close()

    def _source(self, number: int, index: str) -> DataSource:
        source, finder = self._sources[number]
        if isinstance(source, Objects):
            return _of_objects(source, finder)
        if source.picked is not None:
            from penstock.sources.indexed_reader import PickedReader

            found = lookup(finder.find(), index_dir=self._index_dir)
            if not found.is_complete:
                raise ConfigError(f"{source!r} needs to know where samples lie", hint="run `penstock index URL`")
            return DataSource(shards=[], objects=PickedReader(found, source.picked, fields=self._members[number]))
        if index == "stream":
            return DataSource(shards=finder.find())
        early = finder.early_index()
        try:
            return self._with_index(finder.find(), needed=index != "auto", early=early)
        finally:
            if early is not None:
                early.close()

    def _with_index(self, shards: list[Shard], *, needed: bool, early: EarlyIndex | None) -> DataSource:
        """The source, with the rows of an index for its shards."""
        is_listed = all(shard.etag is not None and shard.size_bytes is not None for shard in shards)
        # A version that was not listed costs a request: those are made only if there is an index to compare with.
        if not needed and not is_listed and not self._has_index(shards):
            return DataSource(shards=shards)
        try:
            found = lookup(shards, index_dir=self._index_dir, early=early)
        except (ConfigError, StoreError):
            if needed:
                raise
            return DataSource(shards=shards)
        for shard, each in zip(shards, found.shards, strict=True):
            if shard.etag is None or shard.size_bytes is None:
                shard.learn(etag=each.if_match, size_bytes=each.size_bytes)
        rows = [row for row in found.rows if row is not None]
        return DataSource(
            shards=shards,
            rows=rows if found.is_complete else (),
            place=found.place,
            indexed_count=len(rows),
            outdated_count=found.outdated_count,
        )

    def _has_index(self, shards: list[Shard]) -> bool:
        """Whether there is any index beside the shards or in the index directory."""
        for place_of in (beside, lambda given: in_directory(given, self._index_dir)):
            try:
                if len(place_of(shards).load()):
                    return True
            except (ConfigError, StoreError):
                continue
        return False


def _of_objects(source: Objects, finder: ShardFinder) -> DataSource:
    if source.read is not None:
        from penstock.sources.objects import FunctionReader

        return DataSource(shards=[], objects=FunctionReader(source))
    from penstock.sources.objects import ObjectSampleReader

    shards = finder.find()
    return DataSource(shards=shards, objects=ObjectSampleReader(source, shards))
