"""``penstock.build_index``: from the URLs of a pipeline to an index of its shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import index
from penstock.config import check_path
from penstock.errors import ConfigError
from penstock.pipeline import Pipeline, Shards, shards
from penstock.sources.shards import ShardFinder
from penstock.tracebacks import boundary

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
    listener: index.Listener | None = None,
) -> index.Built:
    """Index the shards of `source`, those that are indexed in their present version left as they are.

    Args:
        source: ``penstock.shards(...)`` with its options, or what that takes first. A corrupt shard is not indexed; with
            its ``on_corrupt="skip_sample"``, its good samples are.
        beside: Keep the index under ``.penstock/`` beside the shards, where every host finds it. None: only if one lies
            there already, which is then brought up to date, and no `index_dir` is given.
        index_dir: Else where; default ``$XDG_CACHE_HOME/penstock/index``.
        again: Read every shard, whatever is known.
        foreign_indexes: Take the extents from ``.idx`` files of other tools where they lie beside the shards.
        listener: Told how it goes; see ``penstock.index.Listener``.

    Raises:
        ObjectMissingError: there is no shard.
        ConfigError: `source` is no set of shards, or they have no folder in common.
        StoreError: the shards cannot be listed, the index not be read or written. A shard that cannot be read is in
            the result's ``failed``.

    Cost: a listing, then every shard is streamed that nothing is known of. Interrupted, what is finished is kept.
    """
    if beside and index_dir is not None:
        raise ConfigError("beside=True excludes index_dir=")
    check_path("index_dir", index_dir)
    pipeline = source if isinstance(source, Pipeline) else shards(source)
    if not isinstance(pipeline.source, Shards):
        raise ConfigError(f"{pipeline.source!r} is not one set of shards", hint="index its sources one by one")
    finder = ShardFinder(pipeline.source, fetch=None)
    try:
        found = finder.find()
        place = _place(found, beside=beside, index_dir=index_dir)
        return index.build(
            found,
            place,
            again=again,
            foreign_indexes=foreign_indexes,
            on_corrupt=pipeline.source.on_corrupt,
            listener=listener,
        )
    finally:
        finder.close()


def _place(
    found: Sequence[Shard], *, beside: bool | None, index_dir: str | os.PathLike[str] | None
) -> index.IndexPlace:
    if beside:
        return index.beside(found)
    place = index.found_beside(found) if beside is None and index_dir is None else None
    return place or index.in_directory(found, index_dir)
