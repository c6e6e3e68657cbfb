"""Looking up: what is known of the shards of a job, before it starts."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import ConfigError, StoreError
from penstock.index.place import beside, in_directory, resolve

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from penstock.index.place import EarlyIndex, Found, IndexPlace, ShardLike
    from penstock.index.shard_index import ShardRow

_log = logging.getLogger("penstock.index")


class Lookup(NamedTuple):
    """What an index says of some shards.

    Attributes:
        place: Where it lies.
        found: The shards with their versions, in the order given.
        rows: What is known of each, in the same order; None: nothing, or it is of another version.
        outdated_count: Number of shards that an index knows, but in another version.
    """

    place: IndexPlace
    found: list[Found]
    rows: list[ShardRow | None]
    outdated_count: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether every shard is known."""
        return None not in self.rows

    @property
    def samples_count(self) -> int:
        """Of the shards that are known."""
        return sum(row.samples_count for row in self.rows if row is not None)


def lookup(
    shards: Sequence[ShardLike],
    *,
    index_dir: str | os.PathLike[str] | None = None,
    early: EarlyIndex | None = None,
) -> Lookup:
    """The index of `shards`: the one beside them, else the one in `index_dir`; of two incomplete ones, the fuller.

    Args:
        shards: As a listing gave them.
        index_dir: Default: ``$XDG_CACHE_HOME/penstock/index``.
        early: The index beside them, where it was asked for already.

    Raises:
        ConfigError: no shards, or they have no folder in common.
        StoreError: a shard whose version the listing did not say is missing, or cannot be asked for.

    Cost: one read beside the shards, and one here where that is missing or incomplete; a request for each shard whose
    version is not known from a listing.
    """
    if not shards:
        raise ConfigError("an index needs at least one shard")
    local = in_directory(shards, index_dir)
    found = resolve(shards, local.base_url)
    best = Lookup(local, found, [None] * len(found))
    places: tuple[Callable[[], IndexPlace], ...] = (lambda: beside(shards), lambda: local)
    for place_of in places:
        try:
            place = place_of()
            index = early.of(place) if early is not None else None
            if index is None:
                index = place.load()
        except (ConfigError, StoreError):  # nobody may look there; the job streams, or indexes elsewhere
            continue
        rows = [index.row_of(each.key, size_bytes=each.size_bytes, etag=each.etag) for each in found]
        outdated_count = sum(row is None and each.key in index.rows for each, row in zip(found, rows, strict=True))
        if best.rows.count(None) > rows.count(None):
            best = Lookup(place, found, rows)
        best = best._replace(outdated_count=max(best.outdated_count, outdated_count) if not best.is_complete else 0)
        if best.is_complete:
            break
    known_count = len(best.rows) - best.rows.count(None)
    _log.debug("the index at %s knows %d of %d shards", best.place.url, known_count, len(best.rows))
    return best
