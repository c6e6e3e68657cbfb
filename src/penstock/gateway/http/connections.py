"""Connections of clients: how many there are, how long a head may take to arrive, and who is too slow.

aiohttp closes connections on which nothing arrives between two requests. Two things are added here: a head must be complete a
limited time after its first byte, and a ``Sweeper`` looks at all exchanges from time to time, and breaks off those whose client
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
    from collections.abc import Awaitable, Callable

    from aiohttp.web import BaseRequest, StreamResponse

    from penstock.gateway.config import GatewayLimits
    from penstock.gateway.http.at_hand import AnswersAtHand
    from penstock.gateway.http.exchanges import WatchedExchange
    from penstock.gateway.http.records import RequestRecords

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
        handler: Answers one request.
        refusal: Makes the answer to what is not a valid HTTP request.
        limits: Bounds on what clients may use.
        at_hand: Answers what needs no waiting.
        sweeper: Watches the clients that have not taken such an answer yet.
        records: Takes the requests that were answered at once.
    """

    def __init__(
        self,
        handler: Callable[[BaseRequest], Awaitable[StreamResponse]],
        *,
        refusal: Callable[[BaseRequest, int], StreamResponse],
        limits: GatewayLimits,
        at_hand: AnswersAtHand,
        sweeper: Sweeper,
        records: RequestRecords,
    ) -> None:
        self.limits = limits
        self.at_hand = at_hand
        self.sweeper = sweeper
        self.records = records
        self.refusal = refusal
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
        super().__init__(handler, handler_cancellation=True, **self.handler_arguments)

    def drain(self) -> None:
        """Close idle connections now, and the others after their answer."""
        for connection in self.connections:
            if isinstance(connection, ClientConnection):
                connection.drain()

    def __call__(self) -> ClientConnection:
        """Make the protocol of a new connection."""
        return ClientConnection(self, loop=asyncio.get_running_loop(), **self.handler_arguments)


class ClientConnection(web.RequestHandler):
    """One connection. It adds limits to aiohttp's protocol, and answers at once what needs no waiting."""

    __slots__ = ("_head_timer", "_held", "_is_plain", "_leaving", "_pending_count", "_pool", "_remote")

    def __init__(self, pool: ConnectionPool, **arguments: Any) -> None:
        super().__init__(pool, **arguments)
        self._pool = pool
        self._head_timer: asyncio.TimerHandle | None = None
        self._is_plain = True  # all that came was plain requests, so aiohttp's parser holds no beginning of another one
        self._pending_count = 0  # plain requests that aiohttp has got and not answered
        self._leaving: WatchedExchange | None = (
            None  # answered at once, but the client has not taken all of the answer yet
        )
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
        if len(pool.connections) > pool.limits.connections_max:
            pool.refused_count += 1
            transport.write(_TOO_MANY)
            self.force_close()

    def data_received(self, data: bytes) -> None:
        """Take bytes, and answer a plain request at once if possible; everything else is aiohttp's."""
        if self._leaving is not None:
            self._hold(data)
            return
        if self._is_plain and self._answered_at_once(data):
            return
        super().data_received(data)
        if self._is_plain:
            self._pending_count += 1
        elif self._head_timer is None and self._is_waiting():
            loop = asyncio.get_running_loop()
            self._head_timer = loop.call_later(self._pool.limits.header_s_max, self._head_is_late)

    def _answered_at_once(self, data: bytes) -> bool:
        """Answer a plain request if its object is at hand; after the first other bytes, aiohttp reads the connection alone."""
        found = parse_plain(data) if len(data) <= self._pool.limits.header_bytes_max else None
        if found is None:
            self._is_plain = False
            return False
        transport = self.transport
        if transport is None or self._close or not self._is_idle():
            return False
        target, headers = found
        exchange = self._pool.at_hand.answer(PlainRequest(target, headers, transport=transport, remote=self._remote))
        if exchange is None:
            return False
        if not self.writing_paused:
            self._note_answered(exchange, is_complete=True)
        else:
            self._leaving = exchange
            exchange.waits_for_client = True
            self._pool.sweeper.active.add(exchange)
        return True

    def _note_answered(self, exchange: WatchedExchange, *, is_complete: bool) -> None:
        self._next_keepalive_close_time = self._loop.time() + self._pool.limits.idle_s_max
        self._pool.records.note(exchange, "", is_complete=is_complete)

    def _hold(self, data: bytes) -> None:
        """Keep the client's next request until the client has taken the answer that is leaving, and read no more."""
        self._held += data
        if self.transport is not None:
            self.transport.pause_reading()

    def _end_leaving(self, *, is_complete: bool) -> None:
        """End the exchange whose answer was leaving, if there is one."""
        exchange, self._leaving = self._leaving, None
        if exchange is not None:
            self._pool.sweeper.active.discard(exchange)
            self._note_answered(exchange, is_complete=is_complete)

    def resume_writing(self) -> None:
        """Go on, because the operating system has taken everything."""
        super().resume_writing()
        self._end_leaving(is_complete=True)
        held, self._held = self._held, b""
        if held and self.transport is not None:
            self.transport.resume_reading()
            self.data_received(held)

    def _is_idle(self) -> bool:
        """Whether the client has its answers to all requests.

        aiohttp's task takes some rounds of the loop to wait for the next request, and the client may be faster.
        """
        return (self._is_plain and self._pending_count == 0) or self._is_waiting()

    def _is_waiting(self) -> bool:
        """Whether aiohttp waits for the next request."""
        return self._waiter is not None and not self._waiter.done()

    def drain(self) -> None:
        """Close the connection, at once if it is idle, otherwise after its answer."""
        if self._is_idle():  # what was answered at once is sent before the transport closes
            self.force_close()
        else:
            self.close()

    def answer_ended(self) -> None:
        """Note that the answer to a request was sent to its end; not all answers are noted."""
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
        self._end_leaving(is_complete=False)
        super().connection_lost(exc)

    def handle_error(
        self, request: BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> StreamResponse:
        """Answer what is not valid HTTP, and errors of our own, with an error document."""
        if status >= 500:
            log.error("A request failed.", exc_info=exc)
        if request.writer.output_size > 0:
            break_off(request.transport)
            raise ConnectionResetError("the answer has begun")
        response = self._pool.refusal(request, status)
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
        self._watched: dict[WatchedExchange, tuple[float, int]] = {}  # seconds that we waited, and bytes before
        self._task: asyncio.Task[None] | None = None
        self.active: set[WatchedExchange] = set()
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

    def _look_at(self, exchange: WatchedExchange) -> tuple[float, int] | None:
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
