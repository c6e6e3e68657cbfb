"""``penstock.build_index``: indexes the shards that the URLs of a pipeline name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import index
from penstock.config import check_path
from penstock.errors import ConfigError
from penstock.pipeline import Pipeline, Shards, check_rereadable, shards
from penstock.sources.shards import ShardFinder
from penstock.system.tracebacks import boundary

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    from penstock.sources.shards import Shard


@boundary
def build_index(
    source: Pipeline | str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    beside: bool | None = None,
    index_dir: str | os.PathLike[str] | None = None,
    again: bool = False,
    foreign_indexes: bool = True,
    listener: index.BuildListener | None = None,
) -> index.Built:
    """Index the shards of `source`. Shards whose present version is already indexed are not read again.

    Args:
        source: ``penstock.shards(...)`` with its options, or the first argument of ``penstock.shards``. A corrupt shard is
            left out of the index; with ``on_corrupt="skip_sample"``, its good samples are indexed.
        beside: Keep the index under ``.penstock/`` beside the shards, where every host finds it. None: update the index
            that lies there, if it exists and no `index_dir` is given.
        index_dir: Directory for the index otherwise; default ``$XDG_CACHE_HOME/penstock/index``.
        again: Read every shard, even if its present version is indexed.
        foreign_indexes: Take the extents of samples from the ``.idx`` files of other tools that lie beside the shards.
        listener: Receives the progress; see ``penstock.index.BuildListener``.

    Raises:
        ObjectMissingError: The source has no shards.
        ConfigError: `source` is not one set of shards, or the shards have no folder in common.
        StoreError: The shards cannot be listed, or the index cannot be read or written. Shards that cannot be read are
            listed in ``failed`` of the result.

    Cost: one listing; then each shard that is not indexed is read once. An interrupted run keeps the shards that it
        finished.
    """
    if beside and index_dir is not None:
        raise ConfigError("beside=True excludes index_dir=")
    check_path("index_dir", index_dir)
    pipeline = source if isinstance(source, Pipeline) else shards(source)
    check_rereadable(pipeline, "build_index")
    if not isinstance(pipeline.source, Shards):
        raise ConfigError(f"{pipeline.source!r} is not a single set of shards", hint="index its sources one by one")
    finder = ShardFinder(pipeline.source, fetch=None)
    try:
        all_shards = finder.find()
        place = _place(all_shards, beside=beside, index_dir=index_dir)
        return index.build(
            all_shards,
            place,
            again=again,
            foreign_indexes=foreign_indexes,
            on_corrupt=pipeline.source.on_corrupt,
            listener=listener,
        )
    finally:
        finder.close()


def _place(
    shards: Sequence[Shard], *, beside: bool | None, index_dir: str | os.PathLike[str] | None
) -> index.IndexPlace:
    if beside:
        return index.beside(shards)
    place = index.found_beside(shards) if beside is None and index_dir is None else None
    return place or index.in_directory(shards, index_dir)
