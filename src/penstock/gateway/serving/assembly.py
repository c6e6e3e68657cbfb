"""The parts of one gateway process, made of its configuration: stores, buckets, transforms, and their numbers.

The internal endpoint, on a loopback port of its own, is one of them: handlers and transforms in other processes read their
source there, by URLs that this gateway's internal key has signed for one object and a limited time, and send the answers of
``WriteGetObjectResponse``. The upstream's keys stay in this process.
"""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.cache import CacheConfig
from penstock.cache.statistics import CacheStatistics
from penstock.compose import connect, split
from penstock.errors import ConfigError, PenstockError
from penstock.fetch import process_budget
from penstock.gateway.authentication.keys import AccessKey, AccessKeys, presign
from penstock.gateway.authentication.verifying import SignatureAuthenticator
from penstock.gateway.aws_lambda import PATH, InternalEndpoint, LambdaBucket, LambdaTransform, WriteGetObjectResponse
from penstock.gateway.buckets.directory.bucket import DirectoryBuckets
from penstock.gateway.buckets.indexed import IndexedBucket
from penstock.gateway.buckets.known_objects import BodyCache
from penstock.gateway.buckets.store_operations import operations_for
from penstock.gateway.buckets.transformed import TransformedBucket
from penstock.gateway.buckets.upstream import UpstreamBucket
from penstock.gateway.config import UPSTREAM_RETRY, GatewayLimits, WebhookServiceConfig
from penstock.gateway.http.front import Front
from penstock.gateway.metrics import Metrics
from penstock.gateway.objects import S3Error
from penstock.gateway.results.identity import scope_of
from penstock.gateway.results.results import Results
from penstock.gateway.results.storage import open_storage
from penstock.gateway.serving.listening import listen
from penstock.gateway.transforms.worker_transform import make_transform
from penstock.gateway.webhooks import PREFIX, ArnBucket, ServedTransform, WebhookService, WebhookTransform
from penstock.processes.starting import stay_on_one_processor
from penstock.store.exchange import is_read_by_tls
from penstock.store.s3 import presigned_get
from penstock.store.s3_requests import encoded_key

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping

    from aiohttp.web import BaseRequest, StreamResponse

    from penstock.gateway.config import AccessPoint, GatewayConfig
    from penstock.gateway.metrics import LabelledName
    from penstock.gateway.objects import Authenticator, Bucket, BucketTable, CachedBucket, Caller, ObjectHead, Transform
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
        metrics: Takes the counts of the parts.
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
        self._bodies = BodyCache(process_budget())
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
            ConfigError: A part cannot be made of the configuration; ``close`` closes the parts that were opened before.
        """
        config = self._config
        sources = self.sources
        for point in config.access_points:
            store = open_store(point, config)
            self._stores.append(store)
            operations = operations_for(store) if point.read_write else None
            sources[point.name] = UpstreamBucket(
                point.name, store, created_s=self._started_s, operations=operations, bodies=self._bodies
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
        derived = (
            connect(self._config.results, retry=UPSTREAM_RETRY, **self._config.results_options)
            if self._config.results
            else None
        )
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
        self._bodies.close()
        stores, self._stores = self._stores, []
        for store in stores:
            await asyncio.to_thread(store.close)


def assembly_of(config: GatewayConfig, points: tuple[AccessPoint, ...], **changes: Any) -> Assembly:
    """Return the parts of some access points, for a process that answers no requests of clients.

    Args:
        config: The configuration.
        points: The access points.
        changes: Other settings that it has here.
    """
    changes |= {"directory": "", "read_write": False, "webhook_service": WebhookServiceConfig()}
    config = replace(config, access_points=points, **changes)
    order = WorkerOrder(config=config, keys=None, internal_key=AccessKey.generate(), index=0, started_s=time.time())
    return Assembly(order, metrics=Metrics())


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
    options: dict[str, Any] = {"retry": UPSTREAM_RETRY, **point.upstream_options}
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


_GRACE_S = 60
_EXPIRES_S_MAX = 7 * 86400
_STALL_S_MAX = 86400.0


class InternalFront:
    """The internal endpoint. Its port is open from the beginning, so that URLs can be made before it answers.

    Args:
        key: The key that signs and verifies URLs; all processes of a gateway share it.

    Attributes:
        endpoint: Port and keys of this endpoint, for handlers.
    """

    def __init__(self, key: AccessKey) -> None:
        self._key = key
        self._socket: socket.socket = listen("127.0.0.1", 0, count=1)[0]
        self.port = int(self._socket.getsockname()[1])
        self.endpoint = InternalEndpoint(self.port)
        self._front: Front | None = None

    async def start(self, sources: Mapping[str, Bucket]) -> None:
        """Answer requests.

        Args:
            sources: Buckets with the untransformed objects, by the names of the access points.
        """
        # A handler may work for as long as it is allowed to before it goes on reading.
        limits = GatewayLimits(stall_s_max=_STALL_S_MAX, bytes_per_s_min=0)
        self._front = Front(
            AccessPointTable(sources),
            SignatureAuthenticator(AccessKeys([self._key])),
            limits=limits,
            extra_routes={PATH: WriteGetObjectResponse(self.endpoint)},
        )
        await self._front.start([self._socket])

    def sign(
        self, method: str, name: str, *, query: Mapping[str, str], headers: Mapping[str, str], expires_s: int
    ) -> str:
        """Return a signed URL of this endpoint.

        Args:
            method: HTTP method that the URL permits.
            name: Name of the access point, or the name, a slash and a key.
            query: Parameters of the query, which the signature covers.
            headers: Headers that must be sent with the request.
            expires_s: Seconds for which it is valid.
        """
        url = f"http://127.0.0.1:{self.port}/{encoded_key(name)}"
        return presign(url, self._key, method=method, expires_s=expires_s, query=query, headers=headers)

    async def close(self) -> None:
        """Close all connections; idempotent."""
        if self._front is not None:
            await self._front.close()
        self._socket.close()


class InternalLinks:
    """Gives other processes access to the sources of one access point. Implements ``SourceLinks``.

    Args:
        point: The access point.
        store: Store of the sources.
        internal: The internal endpoint of this process.
    """

    def __init__(self, point: AccessPoint, store: Store, *, internal: InternalFront) -> None:
        self._name = point.name
        self._path = point.upstream if "://" not in point.upstream else ""
        self._is_s3 = point.is_s3
        self._store = store
        self._internal = internal
        reader = point.handler or point.webhook or point
        self._expires_s = min(math.ceil(reader.time_s_max) + _GRACE_S, _EXPIRES_S_MAX)

    def worker_url(self, key: str, head: ObjectHead) -> tuple[str, str]:
        """Return the path of a directory, a URL that the upstream's keys signed, or one at the internal endpoint."""
        if self._path:
            return self._path, key
        if self._is_s3:
            try:
                return split(presigned_get(self._store, key, expires_s=self._expires_s))
            except ConfigError:  # objects encrypted with a customer's key cannot be read by only a URL
                pass
        return split(self.signed_url(key, head, {}))

    def signed_url(self, key: str, head: ObjectHead, headers: Mapping[str, str]) -> str:
        """Return a URL at the internal endpoint."""
        return self.sign("GET", key, query={}, headers=headers)

    def sign(self, method: str, key: str, *, query: Mapping[str, str], headers: Mapping[str, str]) -> str:
        """Return a URL of an object, or with an empty key of the bucket, at the internal endpoint."""
        name = f"{self._name}/{key}" if key else self._name
        return self._internal.sign(method, name, query=query, headers=headers, expires_s=self._expires_s)


class AccessPointTable:
    """The access points of a gateway, before another table. Implements ``BucketTable``.

    Args:
        access_points: Buckets by name.
        others: Table of the buckets that are not access points; None if there are no others.
    """

    def __init__(self, access_points: Mapping[str, Bucket], *, others: BucketTable | None = None) -> None:
        self._access_points = dict(access_points)
        self._others = others

    async def get(self, name: str, caller: Caller) -> Bucket | None:
        """Return the bucket of a name."""
        found = self._access_points.get(name)
        if found is None and self._others is not None:
            return await self._others.get(name, caller)
        return found

    def get_nowait(self, name: str) -> CachedBucket | None:
        """Return an access point that serves a store's objects as they are."""
        found = self._access_points.get(name)
        return found if isinstance(found, UpstreamBucket) else None

    async def names(self, caller: Caller) -> list[Bucket]:
        """Return all buckets, in the order of their names."""
        buckets = dict(self._access_points)
        if self._others is not None:
            buckets = {bucket.name: bucket for bucket in await self._others.names(caller)} | buckets
        return [buckets[name] for name in sorted(buckets)]

    async def create(self, name: str, caller: Caller, *, region: str) -> None:
        """Create a bucket in the other table."""
        if name in self._access_points:
            raise S3Error("BucketAlreadyExists", "An access point of the gateway has this name.")
        await self._writable().create(name, caller, region=region)

    async def delete(self, name: str, caller: Caller) -> None:
        """Remove a bucket from the other table."""
        if name in self._access_points:
            raise S3Error("AccessDenied", "This is an access point of the gateway, which its configuration names.")
        await self._writable().delete(name, caller)

    def _writable(self) -> BucketTable:
        if self._others is None:
            raise S3Error("AccessDenied", "This gateway serves the buckets of its configuration, and no others.")
        return self._others
