"""The results that the node's cache and the bucket of results keep."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from penstock.cache import CacheConfig
from penstock.compose import connect
from penstock.errors import ConfigError
from penstock.gateway.results.derived import StoredLeftover, read_derived
from penstock.gateway.results.identity import scope_of
from penstock.gateway.results.kept import KeptResult, iter_kept
from penstock.gateway.serving.assembly import is_transformed, open_store

if TYPE_CHECKING:
    from penstock.gateway.config import GatewayConfig
    from penstock.gateway.results.record import ResultRecord
    from penstock.store.base import Store

Place = Literal["cache", "results"]
PLACES: tuple[Place, ...] = ("cache", "results")


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A result in one place.

    Attributes:
        place: ``"cache"`` or ``"results"``, the bucket.
        record: Record of the result.
        points: Names of the access points of the configuration that have its upstream and its transform.
        age_s: Time since its last use in the cache, or since it was stored in the bucket, in seconds.
        kept: How the cache knows it; None in the bucket.
    """

    place: Place
    record: ResultRecord
    points: tuple[str, ...]
    age_s: float
    kept: KeptResult | None = None

    @property
    def size_bytes(self) -> int:
        """Size of the result; 0 if it is not known, because the result was never finished."""
        return self.record.size_bytes or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The results that are kept.

    Attributes:
        holdings: The results, by place, upstream and key.
        leftovers: Objects that killed gateways left in the bucket.
    """

    holdings: list[Holding]
    leftovers: list[StoredLeftover]


def cache_path(config: GatewayConfig) -> Path | None:
    """Return the directory of the node's cache; None if there is no cache, or it was not used yet."""
    path = Path(CacheConfig.of(config.cache).path) if config.cache else None
    return path if path is not None and path.is_dir() else None


def open_results(config: GatewayConfig) -> Store:
    """Return the store of the bucket of results."""
    return connect(config.results, **config.results_options)


def read_contents(config: GatewayConfig, *, place: str | None = None) -> Contents:
    """Return what is kept.

    Args:
        config: The gateway.
        place: ``"cache"`` or ``"results"``; None for both.

    Raises:
        ConfigError: The place does not exist, or the path is not a cache directory.
        StoreError: The bucket of results cannot be read.

    Cost: a scan of the cache; a listing of the bucket, and one request for each result in it.
    """
    if place is not None and place not in PLACES:
        raise ConfigError(f"--place {place!r} must be one of {', '.join(PLACES)}")
    if place == "results" and not config.results:
        raise ConfigError("there is no bucket of results", hint="--results s3://bucket/derived/")
    now_s = time.time()
    points = _points_by_scope(config)
    holdings: list[Holding] = []
    leftovers: list[StoredLeftover] = []
    path = cache_path(config)
    if place != "results" and path is not None:
        for kept in iter_kept(path):
            named = points.get(kept.record.scope, ())
            holdings.append(Holding(place="cache", record=kept.record, points=named, age_s=kept.unused_s, kept=kept))
    if place != "cache" and config.results:
        with open_results(config) as store:
            content = read_derived(store)
        for each in content.results:
            named = points.get(each.record.scope, ())
            age_s = max(0.0, now_s - each.stored_s)
            holdings.append(Holding(place="results", record=each.record, points=named, age_s=age_s))
        leftovers = content.leftovers
    holdings.sort(key=lambda each: (each.place, each.record.scope, each.record.key, each.record.etag))
    return Contents(holdings=holdings, leftovers=leftovers)


def _points_by_scope(config: GatewayConfig) -> dict[str, tuple[str, ...]]:
    """Return the names of the access points with a transform, by their upstreams."""
    found: dict[str, tuple[str, ...]] = {}
    for point in filter(is_transformed, config.access_points):
        with open_store(point, replace(config, cache="")) as store:
            scope = scope_of(store)
        found[scope] = (*found.get(scope, ()), point.name)
    return found
