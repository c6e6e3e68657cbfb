"""``warm_cache``: reads the data of a pipeline into the cache on this node before a job needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache.warm import Warmed, warm
from penstock.errors import ConfigError
from penstock.fetch import PlanItem
from penstock.loader.plan.source_finder import SourceFinder
from penstock.pipeline import Pipeline, check_rereadable
from penstock.system.tracebacks import boundary

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from penstock.cache import CacheConfig
    from penstock.store import Store


@boundary
def warm_cache(
    pipeline: Pipeline,
    cache: CacheConfig | str | os.PathLike[str],
    *,
    index_dir: str | os.PathLike[str] | None = None,
    expect: Callable[[int | None], None] = lambda _: None,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Warmed:
    """Read every shard and object of `pipeline`, and its indexes, into `cache`. Blocks that are there already are verified.

    Args:
        pipeline: A pipeline, with or without stages; all its sources are read.
        cache: The cache that is passed to the job's ``Loader``.
        index_dir: The index directory that is passed to the job's ``Loader``.
        expect: Called once with the number of bytes to read, or with None if it is unknown.
        progress: Called with the number of requests and of bytes that arrived since the last call.

    Raises:
        ConfigError: `pipeline` is not a pipeline, or reads nothing from a store.
        ObjectMissingError: No object matches a prefix or pattern.
        StoreError: The store failed; what was read before is kept.

    Cost: a listing, and one request per part that is missing.
    """
    if not isinstance(pipeline, Pipeline):
        raise ConfigError(f"warm_cache({pipeline!r}) must be given a pipeline", hint="ps.shards(url)")
    check_rereadable(pipeline, "warm_cache")
    finder = SourceFinder(pipeline, fetch=None, index_dir=index_dir, cache=cache)
    try:
        by_store: dict[Store, list[PlanItem]] = {}
        for source in finder.find(index="auto").sources:  # reads the indexes, through the cache
            for shard in source.shards:
                item = PlanItem(shard.key, etag=shard.etag, size_bytes=shard.size_bytes)
                by_store.setdefault(shard.store, []).append(item)
        if not by_store:
            raise ConfigError("there is nothing to warm: this pipeline reads no store", hint="ps.shards(url)")
        sizes = [item.size_bytes for plan in by_store.values() for item in plan]
        expect(None if None in sizes else sum(size for size in sizes if size is not None))
        done = [warm(store, plan, progress=progress) for store, plan in by_store.items()]
    finally:
        finder.close()
    return Warmed(*map(sum, zip(*done, strict=True)))
