"""Makes plain connections: looks up names, and tries one address after the other within the deadline."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from penstock.system.libcurl import pycurl
from penstock.transport.connections import NAME_S_MAX, HttpConnection, HttpOrigin

if TYPE_CHECKING:
    from collections.abc import Callable

_NEXT_ADDRESS_S = 1.0
"""Seconds after which an address that does not answer gives way to the host's next one."""
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


class Connector:
    """Makes the connections of one pool; everything runs on the loop's thread.

    Args:
        epoll: The epoll of the loop.
        connections: The pool's connections by descriptor; one that begins to connect is added.
        connections_max: The most connections.
        call_soon: Runs a function on the loop's thread; callable from any thread.
        opened: Called as ``opened(descriptor, purpose)`` for every new socket.
        made: Called with a connection that is open.
        failed: Called as ``failed(connection, code, reason)`` for a connection that cannot be made.
        close: Closes a connection.
        close_idle: Closes the connection that has been idle for longest; returns False if none is idle.
    """

    def __init__(
        self,
        epoll: select.epoll,
        connections: dict[int, HttpConnection],
        *,
        connections_max: int,
        call_soon: Callable[[Callable[[], None]], None],
        opened: Callable[[int, int], int],
        made: Callable[[HttpConnection], None],
        failed: Callable[[HttpConnection, int, str], None],
        close: Callable[[HttpConnection], None],
        close_idle: Callable[[], bool],
    ) -> None:
        self._epoll = epoll
        self._connections = connections
        self._connections_max = connections_max
        self._call_soon = call_soon
        self._opened = opened
        self._made = made
        self._failed = failed
        self._close = close
        self._close_idle = close_idle

    def connect(self, connection: HttpConnection) -> None:
        """Begin to connect; the name is looked up first if its addresses are unknown."""
        origin = connection.origin
        connection.requested_s = now_s = time.monotonic()
        if now_s - origin.addresses_s < NAME_S_MAX:
            connection.addresses = origin.order()
            self._try_next(connection, pycurl.E_COULDNT_CONNECT, "the name has no address")
        elif origin.waiting is not None:
            origin.waiting.append(connection)
        elif numeric := origin.look_up(numeric=True)[0]:
            self._resolved(origin, numeric, "", [connection])
        else:
            self._look_up(origin, connection)

    def waited_s(self, connection: HttpConnection, now_s: float) -> float | None:
        """Return how long a connection has been in the making; None if it is open.

        If its address has not answered for a while, the host's next one is tried.
        """
        if connection.on_ready is not None and connection.on_ready != self._on_connected:
            return None
        if connection.addresses and connection.socket is not None and now_s - connection.since_s > _NEXT_ADDRESS_S:
            self._close(connection)
            self._try_next(connection, pycurl.E_COULDNT_CONNECT, "no answer")
        return now_s - connection.requested_s

    def _look_up(self, origin: HttpOrigin, connection: HttpConnection) -> None:
        """Look up a name on a separate thread, because the lookup has no deadline."""
        waiting = origin.waiting = [connection]

        def resolve() -> None:
            addresses, problem = origin.look_up()
            self._call_soon(lambda: self._resolved(origin, addresses, problem, waiting))

        try:
            threading.Thread(target=resolve, name="penstock-resolve", daemon=True).start()
        except RuntimeError as error:  # no more threads
            self._resolved(origin, [], str(error), waiting)

    def _resolved(self, origin: HttpOrigin, addresses: list[Any], problem: str, waiting: list[HttpConnection]) -> None:
        origin.waiting = None
        if addresses:
            origin.addresses, origin.addresses_s = addresses, time.monotonic()
        for connection in waiting:
            connection.addresses = origin.order() if addresses else []
            if connection.transfer is not None:
                self._try_next(connection, pycurl.E_COULDNT_RESOLVE_HOST, problem)

    def _try_next(self, connection: HttpConnection, code: int, problem: str) -> None:
        """Begin to connect to the next address; if there is none, fail with `code` and `problem`."""
        if len(self._connections) >= self._connections_max:
            self._close_idle()
        while connection.addresses:
            family, address = connection.addresses.pop(0)
            try:
                self._begin(connection, family, address)
            except OSError as error:
                code, problem = pycurl.E_COULDNT_CONNECT, error.strerror or str(error)
                if error.errno in _NO_DESCRIPTORS and self._close_idle():
                    connection.addresses.insert(0, (family, address))
                continue
            return
        connection.origin.forget_addresses()
        self._failed(connection, code, f"{connection.origin.host_header}: {problem}")

    def _begin(self, connection: HttpConnection, family: int, address: Any) -> None:
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            fd = sock.fileno()
            self._opened(fd, 0)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            reason = sock.connect_ex(address)
            if reason not in (0, errno.EINPROGRESS):
                raise OSError(reason, os.strerror(reason))
            self._epoll.register(fd, select.EPOLLOUT)
        except BaseException:
            sock.close()
            raise
        connection.socket, connection.fd, connection.receive = sock, fd, sock.recv_into
        connection.since_s = time.monotonic()
        self._connections[fd] = connection
        connection.on_ready = self._on_connected

    def _on_connected(self, connection: HttpConnection) -> None:
        assert connection.socket is not None
        reason = connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if reason:
            self._close(connection)
            self._try_next(connection, pycurl.E_COULDNT_CONNECT, os.strerror(reason))
            return
        self._epoll.modify(connection.fd, select.EPOLLIN | select.EPOLLRDHUP)
        connection.addresses = []
        if connection.transfer is not None:
            connection.transfer.connected_s = time.monotonic()
        self._made(connection)
