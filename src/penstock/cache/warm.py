"""Filling a cache before the job does."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.cache.cached import Cached
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.fetch import Request
    from penstock.store.base import Store


class Warmed(NamedTuple):
    """What warming did.

    Attributes:
        requests_count: Objects or ranges read.
        size_bytes: That they have.
        fetched_bytes: Of those, asked of the store; the rest was there.
        refused_count: Blocks that could not be kept: the limit, or the disk.
        evicted_bytes: At least so much of it is gone again, to stay within the limit: the cache is too small for it.
    """

    requests_count: int
    size_bytes: int
    fetched_bytes: int
    refused_count: int
    evicted_bytes: int


def warm(
    store: Store, requests: Iterable[Request], *, progress: Callable[[int, int], None] = lambda *_: None
) -> Warmed:
    """Read `requests` through a cached store and drop the bytes; what is there already is verified.

    Args:
        store: Of ``connect(..., cache=...)``.
        requests: Keys, (key, ByteRange), or ``PlanItem``.
        progress: Told requests and bytes as they come.

    Raises:
        ConfigError: the store has no cache.
        StoreError: as the store says; what was read before is kept.

    Cost: as reading: one request per part that is missing.
    """
    if not isinstance(store, Cached):
        raise ConfigError("there is nothing to warm: the store has no cache", hint="connect(url, cache='PATH:SIZE')")
    before = store.statistics()
    requests_count = size_bytes = 0
    for chunk in store.read_parts(requests):
        requests_count += chunk.last
        size_bytes += len(chunk.data)
        progress(chunk.last, len(chunk.data))
    after = store.statistics()
    return Warmed(
        requests_count,
        size_bytes,
        fetched_bytes=after.fetched_bytes - before.fetched_bytes,
        refused_count=after.refused_count - before.refused_count,
        evicted_bytes=max(0, size_bytes - after.used_bytes) if after.evicted_bytes > before.evicted_bytes else 0,
    )
