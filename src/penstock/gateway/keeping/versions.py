"""Which results a request may still find: those of the present versions of sources and transforms."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.gateway.authentication.keys import AccessKey
from penstock.gateway.buckets.known_objects import etag_of
from penstock.gateway.config import WebhookServiceConfig
from penstock.gateway.metrics import Metrics
from penstock.gateway.serving.assembly import Assembly, WorkerOrder, is_transformed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.gateway.config import GatewayConfig
    from penstock.gateway.keeping.contents import Holding
    from penstock.store.base import Store


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
    alone = replace(
        config,
        access_points=points,
        cache="",
        results="",
        results_options={},
        directory="",
        read_write=False,
        webhook_service=WebhookServiceConfig(),
    )
    order = WorkerOrder(config=alone, keys=None, internal_key=AccessKey.generate(), index=0, started_s=time.time())
    assembly = Assembly(order, metrics=Metrics())
    try:
        await assembly.start()
        etags = {}
        for point in points:
            scope = assembly.transformed[point.name].scope
            if scope not in etags:
                etags[scope] = await asyncio.to_thread(_etags, assembly.sources[point.name].store)
        reasons = {}
        for each in wanted:
            reason = _reason(assembly, each, etags[each.record.scope])
            if reason:
                reasons[id(each)] = reason
        return reasons
    finally:
        await assembly.close()


def _etags(store: Store) -> dict[str, str]:
    return {info.key: etag_of(info) for info in store.list()}


def _reason(assembly: Assembly, holding: Holding, etags: dict[str, str]) -> str:
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
