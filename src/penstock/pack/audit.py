"""``penstock.pack.verify``: a data set by its URL against its index."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.index import lookup
from penstock.pack.verifying import Verified, missing_shards, verify_shards
from penstock.patterns import is_pattern
from penstock.pipeline import Shards, shards
from penstock.sources.shards import ShardFinder

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from typing import Unpack

    from penstock.errors import PenstockError
    from penstock.index import ShardRow
    from penstock.pipeline.sources import ConnectionOptions


def _silent(url: str, row: ShardRow | None, error: PenstockError | None) -> None:
    """Nobody listens."""


def verify(
    url: str,
    *,
    index_dir: str | os.PathLike[str] | None = None,
    on_shard: Callable[[str, ShardRow | None, PenstockError | None], None] = _silent,
    **connection: Unpack[ConnectionOptions],
) -> Verified:
    """Read every shard at `url` and hold each sample's place, key and checksum against the index.

    Args:
        url: As for ``penstock.shards``.
        index_dir: Where the index lies, if not beside the shards or in the user's cache.
        on_shard: Told of each shard: its URL, its row, and what is wrong with it, or that it could not be checked.
        **connection: As for ``penstock.connect``.

    Returns:
        What was verified, and the problems: shards that fail, that no index knows, that the index knows and are not
        there, and those of which only lengths could be checked (``UncheckedError``; the index that an epoch leaves
        behind has no checksums). For a pattern or a list of shards, missing ones are not looked for.

    Raises:
        ObjectMissingError: there is no shard at all.
        ConfigError: no index knows any of them.
        StoreError: the shards cannot be listed.

    Cost: reads everything once.
    """
    source = shards(url, **connection).source
    assert isinstance(source, Shards)
    finder = ShardFinder(source, fetch=None)
    try:
        found = finder.find()
        known = lookup(found, index_dir=index_dir)
        if known.rows.count(None) == len(known.rows) and not len(known.place.load()):
            raise ConfigError(f"no index knows the shards at {url}", hint="penstock index")
        verified = verify_shards(found, known, on_shard=on_shard)
        gone = [] if is_pattern(url) else missing_shards(known, below=known.place.base_url)
        for problem in gone:
            on_shard(problem.url, None, problem.error)
        return verified._replace(problems=(*verified.problems, *gone))
    finally:
        finder.close()
