"""``GatewayProcess``: everything that one process of a gateway runs, from its configuration to its sockets."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import TYPE_CHECKING, Any

from penstock.config import default_budget_bytes, share_machine
from penstock.errors import PenstockError
from penstock.fetch import set_process_budget
from penstock.gateway.authentication.verifying import OpenAuthenticator, SignatureAuthenticator
from penstock.gateway.http.access_log import AccessLogWriter
from penstock.gateway.http.front import Front
from penstock.gateway.metrics import Metrics
from penstock.gateway.serving.assembly import Assembly
from penstock.gateway.serving.journal import Activity, ErrorHandler, Journal, JournalHandler
from penstock.gateway.serving.listening import TlsCertificate
from penstock.gateway.serving.readiness import Readiness
from penstock.gateway.serving.snapshots import memory_bytes, take_snapshot
from penstock.gateway.serving.status import StatusRoutes

if TYPE_CHECKING:
    import socket

    from penstock.gateway.authentication.keys import AccessKeys
    from penstock.gateway.http.exchanges import ClientExchange
    from penstock.gateway.metrics import LabelledName
    from penstock.gateway.serving.assembly import WorkerOrder
    from penstock.gateway.serving.snapshots import Peers, Snapshot

NOT_RELOADED = "access points, limits and everything else of the configuration need a restart"
LOGGER = logging.getLogger("penstock")


class GatewayProcess:
    """One process of a gateway.

    Args:
        order: The configuration and keys to serve with.
        peers: All processes of the gateway, this one included.
        journal: Takes messages other than those of requests.
    """

    def __init__(self, order: WorkerOrder, *, peers: Peers, journal: Journal) -> None:
        config = order.config
        self._order = order
        self._journal = journal
        self._metrics = Metrics()
        self._access_log = AccessLogWriter(sys.stderr, style=config.log_format)
        self._activity = Activity(self._access_log)
        self._routes = StatusRoutes(config, peers=peers, started_s=order.started_s)
        self._tls = TlsCertificate(config) if config.tls_certificate else None
        self._assembly: Assembly | None = None
        self._front: Front | None = None
        self._authenticator: SignatureAuthenticator | None = None
        self._handlers: list[logging.Handler] = []

    async def start(self, listener: socket.socket) -> None:
        """Open the stores, start the transforms, and answer requests that arrive at a listening socket.

        It then asks the upstreams whether they can be used, and logs what they say; it serves even if they cannot.

        Raises:
            ConfigError: The configuration cannot be served.
        """
        config = self._order.config
        loop = asyncio.get_running_loop()
        self._handlers = [ErrorHandler(self._activity, loop.call_soon_threadsafe), JournalHandler(self._journal)]
        for handler in self._handlers:
            LOGGER.addHandler(handler)
        if not LOGGER.isEnabledFor(logging.INFO):
            LOGGER.setLevel(logging.INFO)
        if config.workers > 1:
            share_machine(config.workers)
        set_process_budget(_budget_bytes(config.workers))
        authenticator = self._make_authenticator()
        self._assembly = Assembly(self._order, metrics=self._metrics, authenticator=authenticator)
        await self._assembly.start()
        self._front = Front(
            self._assembly.buckets,
            authenticator,
            limits=config.limits,
            metrics=self._metrics,
            log=self._activity,
            extra_routes={**self._routes.by_path(), **self._assembly.routes()},
            domain=config.domain,
            region=config.region,
            cors_origins=config.cors_origins,
        )
        await self._front.start([listener], tls=self._tls.context if self._tls else None)
        listener.close()  # the front has its own descriptor of it
        self._routes.state = "serving"
        readiness = self._routes.readiness = Readiness(
            {name: source.store for name, source in self._assembly.sources.items()}
        )
        if self._order.index == 0:  # the others would log the same
            await readiness.failures()

    def _make_authenticator(self) -> SignatureAuthenticator | OpenAuthenticator:
        keys, config = self._order.keys, self._order.config
        if keys is None:
            return OpenAuthenticator(domains=(config.domain,))
        self._authenticator = SignatureAuthenticator(
            keys.for_access_points(config.access_points),
            region=config.region,
            accepts_version_2=config.presigned_version_2,
        )
        return self._authenticator

    def reload(self, keys: AccessKeys | None) -> None:
        """Take new access keys, and load the certificate again; if either is not valid, the old one remains in force."""
        reloaded = []
        if self._authenticator is not None and keys is not None:
            try:
                self._authenticator.keys = keys.for_access_points(self._order.config.access_points)
                reloaded.append(f"{len(keys)} access key{'s' if len(keys) > 1 else ''}")
            except PenstockError as error:
                self._journal.say(f"the old access keys remain in force: {error}", level="error")
        if self._tls is not None:
            try:
                self._tls.reload()
                reloaded.append("the TLS certificate")
            except PenstockError as error:
                self._journal.say(f"the old TLS certificate remains in force: {error}", level="error")
        if self._order.index == 0:  # the others do the same
            self._journal.say(f"reloaded {' and '.join(reloaded) or 'nothing'}; {NOT_RELOADED}")

    def snapshot(self) -> Snapshot:
        """Return the facts about this process."""
        front, assembly = self._front, self._assembly
        gauges: dict[LabelledName, float] = {
            ("penstock_gateway_processes", ()): 1,
            ("penstock_gateway_memory_bytes", ()): memory_bytes(),
            ("penstock_gateway_memory_max_bytes", ()): default_budget_bytes() // self._order.config.workers,
        }
        if front is not None:
            gauges["penstock_gateway_requests_in_flight", ()] = front.requests_count
            gauges["penstock_gateway_connections", ()] = front.connections_count
        counters: dict[LabelledName, float] = {}
        if assembly is not None:
            assembly.measure(counters, gauges)
        live = () if front is None else front.exchanges
        details: dict[str, Any] = {"live": [live_row(each) for each in live], **self._activity.details()}
        return take_snapshot(self._metrics, counters=counters, gauges=gauges, details=details)

    async def drain(self) -> bool:
        """Accept no more connections, and finish transfers; return whether all of them were finished in time."""
        self._routes.state = "draining"
        if self._front is None:
            return True
        return await self._front.drain(self._order.config.drain_s_max)

    async def close(self) -> None:
        """End everything; idempotent."""
        if self._front is not None:
            await self._front.close()
        if self._assembly is not None:
            await self._assembly.close()
        self._access_log.close()
        while self._handlers:
            LOGGER.removeHandler(self._handlers.pop())


def live_row(exchange: ClientExchange) -> dict[str, Any]:
    """Return a request that is being answered, as snapshots have it."""
    target = f"/{exchange.bucket}/{exchange.key}" if exchange.bucket else "/"
    return {
        "what": f"{exchange.request.method} {target}",
        "seconds": exchange.elapsed_s,
        "sent_bytes": exchange.sent_bytes,
        "remote": exchange.request.remote or "",
        "request_id": exchange.request_id,
    }


def _budget_bytes(workers_count: int) -> int:
    """Return the budget for reading of one of several processes.

    The budget leaves a quarter of the memory for everything else: answers on their way to slow clients, the latest blocks of
    results that are being produced, and the processes themselves. bench/gateway_clients.py shows that it is enough.
    """
    return default_budget_bytes() // workers_count * 3 // 4
