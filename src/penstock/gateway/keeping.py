"""Results in the cache and in the bucket of results: listing them (``gateway ls``), and removing them (``gateway gc``)."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from penstock.cache import CacheConfig
from penstock.compose import connect
from penstock.errors import ConfigError
from penstock.gateway.buckets.known_objects import etag_of
from penstock.gateway.results.derived import read_derived, remove_derived, remove_leftovers
from penstock.gateway.results.identity import scope_of
from penstock.gateway.results.storage import KeptResult, iter_kept, remove_kept
from penstock.gateway.serving.assembly import Assembly, assembly_of, is_transformed, open_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.gateway.config import GatewayConfig
    from penstock.gateway.results.record import ResultRecord
    from penstock.store.base import Store
    from penstock.types import ObjectInfo

Place = Literal["cache", "results"]
PLACES: tuple[Place, ...] = ("cache", "results")
LEFTOVER_S = 86400.0
"""Age in seconds from which unfinished results and uploads are leftovers. An upload may take long, and clocks differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A result in one place.

    Attributes:
        place: ``"cache"`` or ``"results"``, the bucket.
        kept: The result, as the place knows it.
        points: Names of the access points of the configuration that have its upstream and its transform.
        age_s: Time since its last use in the cache, or since it was stored in the bucket, in seconds.
    """

    place: Place
    kept: KeptResult
    points: tuple[str, ...]
    age_s: float

    @property
    def record(self) -> ResultRecord:
        """Record of the result."""
        return self.kept.record

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
    leftovers: list[ObjectInfo]


def _cache_path(config: GatewayConfig) -> Path | None:
    """Return the directory of the node's cache; None if there is no cache, or it was not used yet."""
    path = Path(CacheConfig.of(config.cache).path) if config.cache else None
    return path if path is not None and path.is_dir() else None


def _open_results(config: GatewayConfig) -> Store:
    """Return the store of the bucket of results."""
    return connect(config.results, **config.results_options)


def read_contents(config: GatewayConfig, *, place: str | None = None) -> Contents:
    """Return the stored results.

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
    points = _points_by_scope(config)
    leftovers: list[ObjectInfo] = []
    found: list[tuple[Place, KeptResult]] = []
    path = _cache_path(config)
    if place != "results" and path is not None:
        found += [("cache", kept) for kept in iter_kept(path)]
    if place != "cache" and config.results:
        with _open_results(config) as store:
            results, leftovers = read_derived(store)
        found += [("results", kept) for kept in results]
    holdings = [
        Holding(place=where, kept=kept, points=points.get(kept.record.scope, ()), age_s=kept.unused_s)
        for where, kept in found
    ]
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


async def stale_reasons(config: GatewayConfig, holdings: Iterable[Holding]) -> dict[int, str]:
    """Return which results no request can find any more, and why.

    Results whose upstream or transform is not in the configuration are left out, because other gateways may use them. So are
    results whose upstream lists nothing, because that is more likely a mistake than an emptied bucket.

    Args:
        config: The gateway; its transforms are started to learn their versions.
        holdings: Results.

    Returns:
        The reasons by ``id`` of a holding.

    Raises:
        ConfigError: A transform cannot be started.
        StoreError: An upstream cannot be listed.

    Cost: one listing of each upstream that has results; memory for its keys and ETags.
    """
    wanted = [each for each in holdings if each.points]
    if not wanted:
        return {}
    named = {name for each in wanted for name in each.points}
    points = tuple(
        replace(point, processes=1) for point in config.access_points if point.name in named and is_transformed(point)
    )
    assembly = assembly_of(config, points, cache="", results="", results_options={})
    try:
        await assembly.start()
        etags = {}
        for point in points:
            scope = assembly.transformed[point.name].scope
            if scope not in etags:
                etags[scope] = await asyncio.to_thread(_etags, assembly.sources[point.name].store)
        reasons = {}
        for each in wanted:
            reason = _stale_reason(assembly, each, etags[each.record.scope])
            if reason:
                reasons[id(each)] = reason
        return reasons
    finally:
        await assembly.close()


def _etags(store: Store) -> dict[str, str]:
    return {info.key: etag_of(info) for info in store.list()}


def _stale_reason(assembly: Assembly, holding: Holding, etags: dict[str, str]) -> str:
    """Return why no request can find a result any more; empty if one can."""
    record = holding.record
    same = [name for name in holding.points if assembly.transforms[name].name == record.transform]
    if not same or not etags:
        return ""
    etag = etags.get(record.key)
    if etag is None:
        return "its source is gone"
    if any(assembly.transformed[name].is_current(record, etag) for name in same):
        return ""
    return "its source or its transform has changed"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionRules:
    """Which results are removed besides those that are out of date.

    Attributes:
        age_s_max: Results that were not used, or in the bucket not stored, for longer are removed; None for no limit.
        place_bytes_max: The oldest results of a place are removed until the others have no more bytes than this; None for no
            limit.
        leftover_s: Age from which unfinished results and uploads are leftovers.
    """

    age_s_max: float | None = None
    place_bytes_max: int | None = None
    leftover_s: float = LEFTOVER_S


class Removal(NamedTuple):
    """A result that is to be removed, and why."""

    holding: Holding
    reason: str


class Collection(NamedTuple):
    """The results and leftovers to remove.

    Attributes:
        removals: Results.
        leftovers: Objects that killed gateways left in the bucket.
    """

    removals: list[Removal]
    leftovers: list[ObjectInfo]

    @property
    def size_bytes(self) -> int:
        """Bytes that are removed, as far as they are known."""
        return sum(each.holding.size_bytes for each in self.removals) + sum(each.size_bytes for each in self.leftovers)


def plan_collection(contents: Contents, stale: Mapping[int, str], rules: CollectionRules) -> Collection:
    """Return the results and leftovers that the rules remove.

    Args:
        contents: The results that are kept.
        stale: The result of ``stale_reasons`` for `contents`.
        rules: Say which other results are removed.
    """
    removals: list[Removal] = []
    remaining: list[Holding] = []
    for each in contents.holdings:
        reason = stale.get(id(each), "") or _reason(each, rules)
        if reason:
            removals.append(Removal(each, reason))
        else:
            remaining.append(each)
    if rules.place_bytes_max is not None:
        for place in PLACES:
            mine = [each for each in remaining if each.place == place and each.record.is_complete]
            removals += _over(mine, rules.place_bytes_max)
    now_s = time.time()
    leftovers = [each for each in contents.leftovers if now_s - (each.last_modified_s or 0.0) >= rules.leftover_s]
    return Collection(removals, leftovers)


def _reason(holding: Holding, rules: CollectionRules) -> str:
    if not holding.record.is_complete:
        return "it was never finished" if holding.age_s >= rules.leftover_s else ""
    if rules.age_s_max is not None and holding.age_s > rules.age_s_max:
        return "it is too old"
    return ""


def _over(holdings: list[Holding], bytes_max: int) -> list[Removal]:
    """Return the oldest results, without which the others have no more than `bytes_max` bytes."""
    total_bytes = sum(each.size_bytes for each in holdings)
    removals = []
    for each in sorted(holdings, key=lambda each: -each.age_s):
        if total_bytes <= bytes_max:
            break
        removals.append(Removal(each, "there are too many bytes"))
        total_bytes -= each.size_bytes
    return removals


def collect(config: GatewayConfig, collection: Collection) -> None:
    """Remove the planned results.

    Raises:
        StoreError: The bucket of results refuses.
    """
    kept = [each.holding.kept for each in collection.removals if each.holding.place == "cache"]
    path = _cache_path(config)
    if kept and path is not None:
        remove_kept(path, kept)
    records = [each.holding.record for each in collection.removals if each.holding.place == "results"]
    if records or collection.leftovers:
        with _open_results(config) as store:
            remove_derived(store, records)
            remove_leftovers(store, collection.leftovers)
