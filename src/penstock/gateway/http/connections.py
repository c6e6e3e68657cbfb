"""Connections of clients: limits on their number and on the time of a head, and disconnecting slow clients.

aiohttp closes connections on which nothing arrives between two requests. This module adds two rules: a head must be complete
a limited time after its first byte, and a ``Sweeper`` checks all exchanges from time to time, and breaks off those whose client
takes or sends too little. The sweeper costs a request nothing; a timer for each write would cost 5 µs.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, cast

from aiohttp import web

from penstock.gateway.http.exchanges import break_off
from penstock.gateway.http.plain_requests import PlainRequest, parse_plain

if TYPE_CHECKING:
    from aiohttp.web import BaseRequest, StreamResponse

    from penstock.gateway.config import GatewayLimits
    from penstock.gateway.http.exchanges import ClientExchange
    from penstock.gateway.http.front import Front

log = logging.getLogger("penstock.gateway")

_FIELDS_COUNT_MAX = 128
_LINGER_S = 2.0
"""How long the rest of a request's body is read and dropped, after an answer that did not need it, in seconds."""
_TOO_MANY_BODY = (
    b'<?xml version="1.0" encoding="UTF-8"?>\n'
    b"<Error><Code>SlowDown</Code><Message>This gateway has too many connections; try again.</Message></Error>"
)
_TOO_MANY = (
    b"HTTP/1.1 503 Slow Down\r\nServer: penstock\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Type: application/xml\r\nContent-Length: %d\r\n\r\n%b" % (len(_TOO_MANY_BODY), _TOO_MANY_BODY)
)


class ConnectionPool(web.Server):
    """The connections of one front.

    Args:
        front: Answers the requests.
    """

    def __init__(self, front: Front) -> None:
        limits = front.limits
        self.front = front
        self.refused_count = 0
        self.handler_arguments: dict[str, Any] = {
            "keepalive_timeout": limits.idle_s_max,
            "max_line_size": limits.header_bytes_max,
            "max_field_size": limits.header_bytes_max,
            "max_headers": _FIELDS_COUNT_MAX,
            "lingering_time": _LINGER_S,
            "auto_decompress": False,
            "access_log": None,
            "logger": log,
        }
        super().__init__(front.handle, handler_cancellation=True, **self.handler_arguments)

    def drain(self) -> None:
        """Close idle connections now, and the others after their answer."""
        for connection in self.connections:
            if isinstance(connection, ClientConnection):
                connection.end_soon()

    def __call__(self) -> ClientConnection:
        """Make the protocol of a new connection."""
        return ClientConnection(self, loop=asyncio.get_running_loop(), **self.handler_arguments)


class ClientConnection(web.RequestHandler):
    """One connection. It adds limits to aiohttp's protocol, and has the front answer plain requests without aiohttp."""

    __slots__ = (
        "_exchange",
        "_front",
        "_head_timer",
        "_held",
        "_is_ending",
        "_is_plain",
        "_pending_count",
        "_pool",
        "_remote",
        "_task",
    )

    def __init__(self, pool: ConnectionPool, **arguments: Any) -> None:
        super().__init__(pool, **arguments)
        self._pool = pool
        self._front = pool.front
        self._head_timer: asyncio.TimerHandle | None = None
        self._is_plain = True  # all that came was plain requests, so aiohttp's parser holds no beginning of another one
        self._pending_count = 0  # plain requests that aiohttp has got and not answered
        self._exchange: ClientExchange | None = None  # a plain request whose answer the client has not taken completely
        self._task: asyncio.Task[None] | None = (
            None  # produces that answer; None if all of it was given to the transport
        )
        self._is_ending = False  # the connection closes after that answer
        self._held = b""
        self._remote: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, or refuse the connection if there are too many."""
        pool = self._pool
        super().connection_made(transport)
        transport = cast("asyncio.Transport", transport)  # uvloop's class does not inherit from it
        peer = transport.get_extra_info("peername")
        self._remote = peer[0] if isinstance(peer, tuple) else peer
        # A write has ended when the memory behind it is free. TLS transports pause at the limit, not above it: with 0
        # they would pause on an empty buffer, and the write would never end.
        is_tls = transport.get_extra_info("sslcontext") is not None
        transport.set_write_buffer_limits(high=int(is_tls), low=0)
        if len(pool.connections) > self._front.limits.connections_max:
            pool.refused_count += 1
            transport.write(_TOO_MANY)
            self.force_close()

    def data_received(self, data: bytes) -> None:
        """Take bytes, and have a plain request answered; everything else is aiohttp's."""
        if self._exchange is not None:  # read no more until the client has its answer
            self._held += data
            if self.transport is not None:
                self.transport.pause_reading()
            return
        if self._is_plain and self._begin_plain(data):
            return
        super().data_received(data)
        if self._is_plain:
            self._pending_count += 1
        elif self._head_timer is None and self._is_waiting():
            loop = asyncio.get_running_loop()
            self._head_timer = loop.call_later(self._front.limits.header_s_max, self._head_is_late)

    # ── plain requests ─────────────────────────────────────────────────────────────────────────────────────────────

    def _begin_plain(self, data: bytes) -> bool:
        """Have a plain request answered; after the first other bytes, only aiohttp reads the connection."""
        found = parse_plain(data) if len(data) <= self._front.limits.header_bytes_max else None
        if found is None:
            self._is_plain = False
            return False
        if self.transport is None or self._close or not self._is_idle():
            return False
        request = PlainRequest(*found, connection=self, drain=self._drain_helper, remote=self._remote)
        begun = self._front.begin_plain(request)
        if begun is None:
            return False
        self._exchange, rest = begun
        if rest is not None:
            self._task = self._loop.create_task(rest)
            self._task.add_done_callback(self._task_ended)
        elif not self.writing_paused:
            self._end_sent(is_complete=True)
        else:
            self._exchange.waits_for_client = True
            self._front.sweeper.active.add(self._exchange)
        return True

    def _end_sent(self, *, is_complete: bool) -> None:
        """End an exchange whose answer was given to the transport at once."""
        assert self._exchange is not None
        self._front.end(self._exchange, "", is_complete=is_complete)
        self._end_plain()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("A request failed.", exc_info=error)
            self.force_close()
        self._end_plain()

    def _end_plain(self) -> None:
        """Go on with the client's next request, or end the connection."""
        self._exchange = self._task = None
        self._next_keepalive_close_time = self._loop.time() + self._front.limits.idle_s_max
        held, self._held = self._held, b""
        if self._is_ending:
            self.force_close()
        elif held and self.transport is not None:
            self.transport.resume_reading()
            self.data_received(held)

    def resume_writing(self) -> None:
        """Go on, because the operating system has taken everything."""
        super().resume_writing()
        if self._exchange is not None and self._task is None:
            self._end_sent(is_complete=True)

    def _process_keepalive(self) -> None:
        if self._exchange is not None:  # for aiohttp, the connection is idle
            self._next_keepalive_close_time = self._loop.time() + self._front.limits.idle_s_max
        super()._process_keepalive()

    # ── the end ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _is_idle(self) -> bool:
        """Whether the client has its answers to all requests that aiohttp got.

        aiohttp's task takes some rounds of the loop to wait for the next request, and the client may be faster.
        """
        return (self._is_plain and self._pending_count == 0) or self._is_waiting()

    def _is_waiting(self) -> bool:
        """Whether aiohttp waits for the next request."""
        return self._waiter is not None and not self._waiter.done()

    def end_soon(self) -> None:
        """Close the connection, at once if it is idle, otherwise after its answer."""
        if self._task is not None:
            self._is_ending = True
        elif self._is_idle():  # what was answered at once is sent before the transport closes
            self.force_close()
        else:
            self.close()

    def answer_ended(self) -> None:
        """Note that aiohttp has sent the answer to a request to its end; not all answers are noted."""
        self._pending_count -= self._pending_count > 0

    def head_arrived(self) -> None:
        """Stop the clock of the head."""
        timer, self._head_timer = self._head_timer, None
        if timer is not None:
            timer.cancel()

    def _head_is_late(self) -> None:
        self._head_timer = None
        self.force_close()

    def connection_lost(self, exc: BaseException | None) -> None:
        """End."""
        self.head_arrived()
        self._held = b""
        if self._task is not None:
            self._task.cancel()
        elif self._exchange is not None:
            self._end_sent(is_complete=False)
        super().connection_lost(exc)

    def handle_error(
        self, request: BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> StreamResponse:
        """Answer invalid HTTP, and our own errors, with an error document."""
        if status >= 500:
            log.error("A request failed.", exc_info=exc)
        if request.writer.output_size > 0:
            break_off(request.transport)
            raise ConnectionResetError("the answer has begun")
        response = self._front.refuse_malformed(request, status)
        response.force_close()
        return response


class Sweeper:
    """Breaks off exchanges whose client takes or sends too little.

    Args:
        limits: The least rate, and the longest time without progress.
    """

    def __init__(self, limits: GatewayLimits) -> None:
        self._limits = limits
        self._tick_s = max(0.05, min(1.0, limits.stall_s_max / 8))
        self._watched: dict[ClientExchange, tuple[float, int]] = {}  # seconds that we waited, and bytes before
        self._task: asyncio.Task[None] | None = None
        self.active: set[ClientExchange] = set()
        self.broken_off_count = 0

    def start(self) -> None:
        """Begin to sweep."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """End; idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            self._watched = {exchange: state for exchange in list(self.active) if (state := self._look_at(exchange))}

    def _look_at(self, exchange: ClientExchange) -> tuple[float, int] | None:
        """Return how long the gateway has been waiting for a client, and the bytes at the beginning of that time."""
        progress_bytes = exchange.progress_bytes()
        waited_s, before_bytes = self._watched.get(exchange, (0.0, progress_bytes))
        if not exchange.waits_for_client:
            return waited_s, before_bytes
        waited_s += self._tick_s
        if waited_s < self._limits.stall_s_max:
            return waited_s, before_bytes
        if progress_bytes - before_bytes < max(1.0, self._limits.bytes_per_s_min * waited_s):
            self.broken_off_count += 1
            log.info(
                "Request %s: the gateway waited %.1f s for the client, which %s only %d bytes, and is disconnected.",
                exchange.request_id,
                waited_s,
                "took" if exchange.has_begun else "sent",
                progress_bytes - before_bytes,
            )
            exchange.break_off()
            return None
        return 0.0, progress_bytes
