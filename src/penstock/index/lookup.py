"""``lookup``: what is known of a job's shards before it starts."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import ConfigError, StoreError
from penstock.index.place import beside, in_directory, resolve

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from penstock.index.place import EarlyIndex, IndexPlace, ShardLike, VersionedShard
    from penstock.index.shard_index import ShardRow

_log = logging.getLogger("penstock.index")


class Lookup(NamedTuple):
    """What an index says of some shards.

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
    """Return what the index beside `shards`, or else the one in `index_dir`, says of them.

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
