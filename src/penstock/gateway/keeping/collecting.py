"""Removing results: those that no request can find any more, old ones, and files that killed gateways left behind."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from penstock.gateway.keeping.contents import PLACES, cache_path, open_results
from penstock.gateway.results.derived import remove_derived, remove_leftovers
from penstock.gateway.results.kept import remove_kept

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.gateway.config import GatewayConfig
    from penstock.gateway.keeping.contents import Contents, Holding
    from penstock.gateway.results.derived import StoredLeftover

LEFTOVER_S = 86400.0
"""Age in seconds from which unfinished results and uploads are leftovers. An upload may take long, and clocks differ."""


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
    leftovers: list[StoredLeftover]

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
    leftovers = [each for each in contents.leftovers if now_s - each.stored_s >= rules.leftover_s]
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
    """Remove what was planned.

    Raises:
        StoreError: The bucket of results refuses.
    """
    kept = [each.holding.kept for each in collection.removals if each.holding.kept is not None]
    path = cache_path(config)
    if kept and path is not None:
        remove_kept(path, kept)
    records = [each.holding.record for each in collection.removals if each.holding.place == "results"]
    if records or collection.leftovers:
        with open_results(config) as store:
            remove_derived(store, records)
            remove_leftovers(store, collection.leftovers)
