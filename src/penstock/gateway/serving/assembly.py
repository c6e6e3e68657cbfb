"""The parts of one gateway process, made of its configuration: stores, buckets, transforms, and their numbers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.cache import CacheConfig
from penstock.cache.statistics import CacheStatistics
from penstock.compose import connect
from penstock.errors import ConfigError
from penstock.fetch import process_budget
from penstock.gateway.buckets.directory.table import DirectoryBuckets
from penstock.gateway.buckets.upstream import UpstreamBucket
from penstock.gateway.serving.tables import AccessPointTable

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from penstock.gateway.config import AccessPoint, GatewayConfig
    from penstock.gateway.metrics import LabelledName, Metrics
    from penstock.gateway.objects import Bucket, BucketTable
    from penstock.gateway.serving.control import WorkerOrder
    from penstock.store.base import Store


class Assembly:
    """The stores and buckets of one process.

    Args:
        order: What the process serves.
        metrics: Takes what the parts count.

    Attributes:
        buckets: The table of all buckets, once ``start`` has returned.
    """

    buckets: BucketTable

    def __init__(self, order: WorkerOrder, *, metrics: Metrics) -> None:
        self._order = order
        self._metrics = metrics
        self._stores: list[Store] = []
        self._points: dict[str, Bucket] = {}
        self._directory: DirectoryBuckets | None = None

    async def start(self) -> None:
        """Open everything.

        Raises:
            ConfigError: A part cannot be made of the configuration; what was opened before is closed by ``close``.
        """
        for point in self._order.config.access_points:
            self._points[point.name] = self._bucket(point)
        self.buckets = AccessPointTable(self._points, others=self._open_directory())

    def _open_directory(self) -> DirectoryBuckets | None:
        config = self._order.config
        if config.directory:
            self._directory = DirectoryBuckets(config.directory, read_write=config.read_write)
        return self._directory

    def _bucket(self, point: AccessPoint) -> Bucket:
        if point.transform or point.handler or point.webhook:
            raise ConfigError(f"access point {point.name!r}: this version serves objects as they are")
        return UpstreamBucket(point.name, self._connect(point))

    def _connect(self, point: AccessPoint) -> Store:
        store = open_store(point, self._order.config)
        self._stores.append(store)
        return store

    def measure(
        self, counters: MutableMapping[LabelledName, float], gauges: MutableMapping[LabelledName, float]
    ) -> None:
        """Add the numbers of the budget and of the cache.

        Args:
            counters: Takes sums that only grow.
            gauges: Takes values that rise and fall.
        """
        budget = process_budget().statistics()
        gauges["penstock_budget_used_bytes", ()] = budget.used_bytes
        gauges["penstock_budget_max_bytes", ()] = budget.bytes_max
        for store in self._stores:
            statistics: Any = store.statistics()
            if not isinstance(statistics, CacheStatistics):
                continue
            for name in ("hit_bytes", "fetched_bytes", "stored_bytes", "evicted_bytes"):
                key = f"penstock_cache_{name}_total", ()
                counters[key] = counters.get(key, 0.0) + getattr(statistics, name)
            if self._order.index == 0:  # all processes share one directory, and gauges are added up
                gauges["penstock_cache_used_bytes", ()] = statistics.used_bytes
                gauges["penstock_cache_max_bytes", ()] = statistics.bytes_max

    async def close(self) -> None:
        """Close everything; idempotent."""
        points, self._points = self._points, {}
        for bucket in points.values():
            await bucket.close()
        directory, self._directory = self._directory, None
        if directory is not None:
            await directory.close()
        stores, self._stores = self._stores, []
        for store in stores:
            await asyncio.to_thread(store.close)


def open_store(point: AccessPoint, config: GatewayConfig) -> Store:
    """Return the store of an access point, with the node's cache around it if there is one.

    Raises:
        ConfigError: The URL or an option is not valid.
    """
    options: dict[str, Any] = dict(point.upstream_options)
    return connect(point.upstream, cache=cache_config(config), **options)


def cache_config(config: GatewayConfig) -> CacheConfig | None:
    """Return the configuration of the node's cache; None if there is none."""
    if not config.cache:
        return None
    return replace(CacheConfig.of(config.cache), metadata_ttl_s=config.metadata_ttl_s)
