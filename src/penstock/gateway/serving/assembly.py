"""The parts of one gateway process, made of its configuration: stores, buckets, transforms, and their numbers."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.cache import CacheConfig
from penstock.cache.statistics import CacheStatistics
from penstock.compose import connect
from penstock.errors import PenstockError
from penstock.fetch import process_budget
from penstock.gateway.aws_lambda import LambdaBucket, LambdaTransform
from penstock.gateway.buckets.directory.table import DirectoryBuckets
from penstock.gateway.buckets.hot_bodies import HotBodies
from penstock.gateway.buckets.indexed import IndexedBucket
from penstock.gateway.buckets.transformed import TransformedBucket
from penstock.gateway.buckets.upstream import UpstreamBucket
from penstock.gateway.buckets.writes import writes_for
from penstock.gateway.results.identity import scope_of
from penstock.gateway.results.results import Results
from penstock.gateway.results.storage import open_storage
from penstock.gateway.serving.internal import InternalFront, InternalLinks
from penstock.gateway.serving.tables import AccessPointTable
from penstock.gateway.transforms.worker_transform import make_transform
from penstock.gateway.webhooks import PREFIX, ArnBucket, ServedTransform, WebhookService, WebhookTransform
from penstock.processes.starting import stay_on_one_processor
from penstock.store.carriers import is_read_by_tls
from penstock.store.presigning import presigned_get

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping

    from aiohttp.web import BaseRequest, StreamResponse

    from penstock.gateway.authentication.keys import AccessKey, AccessKeys
    from penstock.gateway.config import AccessPoint, GatewayConfig
    from penstock.gateway.metrics import LabelledName, Metrics
    from penstock.gateway.objects import Authenticator, Bucket, BucketTable, Transform
    from penstock.store.base import Store


_IDENTITIES = ("profile", "anonymous")
"""Options of an upstream that say on whose behalf it is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOrder:
    """The configuration and keys of a process. Workers get them by a message: others can read arguments and environments.

    Attributes:
        config: The configuration, checked.
        keys: The access keys; None lets everybody in.
        internal_key: Key that signs the URLs of the internal endpoints; all processes of a gateway share it.
        index: Number of this process, from 0.
        started_s: When the gateway was started, in seconds since 1970.
    """

    config: GatewayConfig
    keys: AccessKeys | None
    internal_key: AccessKey
    index: int
    started_s: float


class Assembly:
    """The stores, buckets and transforms of one process.

    Args:
        order: The configuration and keys of the process.
        metrics: Takes what the parts count.
        authenticator: Says who may use which webhook; None if no requests of clients are answered.

    Attributes:
        buckets: The table of all buckets, once ``start`` has returned.
        transforms: The transforms by name of their access points.
        sources: The untransformed buckets by name of their access points.
        transformed: The buckets of results by name of their access points.
        indexed: The same with the indexes of their results.
        results: The results that these buckets share; None if there is no transform.
    """

    buckets: BucketTable

    def __init__(self, order: WorkerOrder, *, metrics: Metrics, authenticator: Authenticator | None = None) -> None:
        self._config = order.config
        self._order = order
        self._metrics = metrics
        self._authenticator = authenticator
        self._stores: list[Store] = []
        self._hot = HotBodies(process_budget())
        self._points: dict[str, Bucket] = {}
        self._directory: DirectoryBuckets | None = None
        self._internal: InternalFront | None = None
        self._webhooks: WebhookService | None = None
        self.transforms: dict[str, Transform] = {}
        self.sources: dict[str, UpstreamBucket] = {}
        self.transformed: dict[str, TransformedBucket] = {}
        self.indexed: dict[str, IndexedBucket] = {}
        self.results: Results | None = None
        self._started_s = time.time()  # stands for the time of creation, which upstreams do not tell

    async def start(self) -> None:
        """Open everything, and start the transforms.

        Raises:
            ConfigError: A part cannot be made of the configuration; what was opened before is closed by ``close``.
        """
        config = self._config
        sources = self.sources
        for point in config.access_points:
            store = open_store(point, config)
            self._stores.append(store)
            writes = writes_for(point.name, store) if point.read_write else None
            sources[point.name] = UpstreamBucket(
                point.name, store, created_s=self._started_s, writes=writes, hot=self._hot
            )
        if stays_on_one_processor(config.cpu_affinity, self._stores):
            stay_on_one_processor(int(1000 * self._order.started_s) + self._order.index)
        transformed = [point for point in config.access_points if is_transformed(point)]
        if transformed:
            await self._start_transforms(transformed, sources)
        for point in config.access_points:
            if point.name not in self.transforms:
                self._points[point.name] = self._with_webhooks(point, sources)
        if config.directory:
            self._directory = DirectoryBuckets(config.directory, read_write=config.read_write)
        self.buckets = AccessPointTable(self._points, others=self._directory)
        if self._directory is not None:
            self._directory.sources = self.buckets

    async def _start_transforms(self, points: list[AccessPoint], sources: Mapping[str, UpstreamBucket]) -> None:
        internal = self._internal = InternalFront(self._order.internal_key)
        storage = await asyncio.to_thread(open_storage, cache_config(self._config))
        derived = connect(self._config.results, **self._config.results_options) if self._config.results else None
        results = self.results = Results(storage, metrics=self._metrics, derived_store=derived)
        for point in points:
            source = sources[point.name]
            transform = self.transforms[point.name] = transform_of(point, internal)
            links = InternalLinks(point, source.store, internal=internal)
            bucket = TransformedBucket(
                point,
                source,
                scope=scope_of(source.store),
                transform=transform,
                results=results,
                links=links,
                created_s=self._started_s,
            )
            self.transformed[point.name] = bucket
            indexed = self.indexed[point.name] = IndexedBucket(point, bucket, results=results)
            self._points[point.name] = _with_actions(point, indexed, source=source, transform=transform, links=links)
        await internal.start(sources)  # also those without a transform: a request may name a webhook for them
        await asyncio.gather(*(transform.start() for transform in self.transforms.values()))
        await asyncio.gather(*(asyncio.to_thread(_find_credentials, sources[point.name].store) for point in points))
        if self._config.webhook_service.token:
            served = {point.name: ServedTransform(point, self.transforms[point.name]) for point in points}
            self._webhooks = WebhookService(self._config.webhook_service, transforms=served)

    def _with_webhooks(self, point: AccessPoint, sources: Mapping[str, UpstreamBucket]) -> Bucket:
        """Return a bucket whose requests may name the webhooks of the gateway's access points, as on MinIO."""
        plain = sources[point.name]
        hooks = [each for each in self._config.access_points if each.webhook is not None]
        if not hooks or self.results is None or self._internal is None or self._authenticator is None:
            return plain
        links = InternalLinks(point, plain.store, internal=self._internal)
        scope = scope_of(plain.store)
        targets: dict[str, Bucket] = {
            hook.name: TransformedBucket(
                replace(hook, name=point.name),
                plain,
                scope=scope,
                transform=self.transforms[hook.name],
                results=self.results,
                links=links,
            )
            for hook in hooks
        }
        return ArnBucket(plain, targets=targets, authenticator=self._authenticator)

    def routes(self) -> dict[str, Callable[[BaseRequest], Awaitable[StreamResponse]]]:
        """Return handlers of paths at the public endpoint that are not S3's."""
        return {} if self._webhooks is None else {PREFIX: self._webhooks}

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
        """Close everything, runs of transforms first; idempotent."""
        results, self.results = self.results, None
        if results is not None:
            await results.close()
        points, self._points = self._points, {}
        await asyncio.gather(*(bucket.close() for bucket in points.values()))
        for part in (self._webhooks, self._internal, self._directory):
            if part is not None:
                await part.close()
        self._webhooks = self._internal = self._directory = None
        self._hot.close()
        stores, self._stores = self._stores, []
        for store in stores:
            await asyncio.to_thread(store.close)


def stays_on_one_processor(affinity: str, stores: Iterable[Store]) -> bool:
    """Whether a process with this setting of ``GatewayConfig.cpu_affinity`` and these upstreams uses one processor.

    What needs no interpreter, like encryption for an upstream that is read by TLS, gains from further processors.
    """
    return affinity == "one" or (affinity == "auto" and not any(map(is_read_by_tls, stores)))


def is_transformed(point: AccessPoint) -> bool:
    """Return whether an access point transforms its objects."""
    return bool(point.transform or point.handler or point.webhook)


def _with_actions(
    point: AccessPoint, bucket: Bucket, *, source: Bucket, transform: Transform, links: InternalLinks
) -> Bucket:
    """Return a bucket of which a handler answers the operations that it is configured for, and no others."""
    if not isinstance(transform, LambdaTransform) or point.handler is None:
        return bucket
    actions = point.handler.actions
    inner = bucket if "GetObject" in actions else source
    if set(actions) <= {"GetObject"}:
        return inner
    return LambdaBucket(inner, transform=transform, actions=actions, sign=links.sign)


def transform_of(point: AccessPoint, internal: InternalFront) -> Transform:
    """Return the transform of an access point, which was not started yet.

    Raises:
        ConfigError: There is no such transform, or its arguments are wrong.
    """
    if point.handler is not None:
        return LambdaTransform(point, internal.endpoint)
    if point.webhook is not None:
        return WebhookTransform(point)
    return make_transform(point, folder=point.folder)


def open_store(point: AccessPoint, config: GatewayConfig) -> Store:
    """Return the store of an access point, with the node's cache around it if there is one.

    Raises:
        ConfigError: The URL or an option is not valid.
    """
    options: dict[str, Any] = dict(point.upstream_options)
    cache = cache_config(config)
    if cache is not None:  # what one profile may read must not be known to access points with another one
        who = {name: options[name] for name in _IDENTITIES if options.get(name)}
        cache = replace(cache, namespace=" ".join([cache.namespace, *(f"{name}={who[name]}" for name in who)]).strip())
    return connect(point.upstream, cache=cache, **options)


def cache_config(config: GatewayConfig) -> CacheConfig | None:
    """Return the configuration of the node's cache; None if there is none."""
    if not config.cache:
        return None
    return replace(CacheConfig.of(config.cache), metadata_ttl_s=config.metadata_ttl_s)


def _find_credentials(store: Store) -> None:
    """Have the keys of the upstream found before the event loop needs them to sign a URL, because that may take seconds."""
    with suppress(PenstockError):  # a read will say what is wrong
        presigned_get(store, "x")
