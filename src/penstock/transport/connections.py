"""Plain HTTP connections, the origins that they lead to, and how a connection is made.

An origin is a host and port with its addresses, its proxy and its idle connections. Its name is looked up, and its addresses
are tried one after the other within the deadline.
"""

from __future__ import annotations

import errno
import os
import random
import select
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.system.libcurl import pycurl

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.transport.http import Chunked, HttpTransfer

NAME_S_MAX = 60.0
"""Seconds after which the addresses of a name are looked up again; sooner if none of them can be reached."""
_NEXT_ADDRESS_S = 1.0
"""Seconds after which an address that does not answer gives way to the host's next one."""
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_PROXY_VARIABLES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
_random = random.SystemRandom()


class HttpOrigin:
    """A host and port, its addresses, and its idle connections.

    Args:
        authority: Host and port as in a URL.

    Raises:
        ValueError: `authority` is not a host and port.
    """

    __slots__ = ("addresses", "addresses_s", "host", "host_header", "idle", "port", "proxied", "waiting")

    def __init__(self, authority: str) -> None:
        host, port = _split(authority)
        self.host = host
        self.port = port
        self.host_header = authority.removesuffix(":80")
        self.proxied = _proxied(host)
        self.addresses: list[Any] = []
        self.addresses_s = -NAME_S_MAX
        self.waiting: list[HttpConnection] | None = None  # wait for the name's addresses; None if no look-up runs
        self.idle: list[HttpConnection] = []  # used last in, first out

    def order(self) -> list[Any]:
        """Return the addresses in the order to try: IPv4 first, and at random, to spread a job over the servers."""
        addresses = list(self.addresses)
        if len(addresses) > 1:
            _random.shuffle(addresses)
            addresses.sort(key=lambda entry: entry[0] != socket.AF_INET)
        return addresses

    def forget_addresses(self) -> None:
        """Look the name up again next time, because none of its addresses can be reached."""
        self.addresses_s = -NAME_S_MAX

    def look_up(self, *, numeric: bool = False) -> tuple[list[Any], str]:
        """Look up the host's addresses; blocks unless `numeric` is true, which takes a host that is an address.

        Returns:
            Family and address of each, and if there are none, the reason.
        """
        flags = socket.AI_NUMERICHOST if numeric else 0
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM, flags=flags)
        except OSError as error:
            return [], error.strerror or str(error)
        except UnicodeError as error:
            return [], str(error)
        return [(entry[0], entry[4]) for entry in found], ""


@dataclass(slots=True, eq=False, repr=False)
class HttpConnection:
    """One connection, and the exchange that it carries.

    Args:
        origin: The origin that it leads to.
    """

    origin: HttpOrigin
    socket: socket.socket | None = None
    fd: int = -1
    receive: Any = None  # socket.recv_into
    addresses: list[Any] = field(default_factory=list)
    requested_s: float = 0.0  # when the connection was requested
    since_s: float = 0.0  # when the attempt to connect to the current address began
    idle_s: float = 0.0  # when it became idle
    reused: bool = False  # whether it has carried another exchange before
    keep: bool = False  # whether it stays open after this exchange
    transfer: HttpTransfer | None = None
    message: bytes = b""  # the request, or the rest of it that is not sent
    on_ready: Any = None
    partial: bytes = b""  # the part of a head that has arrived
    view: memoryview | None = None  # where the rest of a body goes
    overlong: bool = False  # whether the body is longer than its landing
    left: int = 0  # bytes left of a body that goes through HttpTransfer.take
    chunks: Chunked | None = None


def _split(authority: str) -> tuple[str, int]:
    """Split an authority into host, without the brackets of an IPv6 address, and port; raises ``ValueError``."""
    host, colon, port = authority.rpartition(":")
    if not colon or port.endswith("]"):
        host, port = authority, "80"
    if not port.isdigit() or int(port) > 65_535 or not host.isascii() or not host.isprintable():
        raise ValueError(authority)
    if host.startswith("["):
        if not host.endswith("]") or "%" in host:
            raise ValueError(authority)
        return host[1:-1], int(port)
    if not host or any(character in host for character in ":%@?# "):
        raise ValueError(authority)
    return host, int(port)


def _proxied(host: str) -> bool:
    """Whether the environment names a proxy for `host`."""
    if not any(os.environ.get(name) for name in _PROXY_VARIABLES):
        return False
    from urllib.request import proxy_bypass

    return not proxy_bypass(host)


@dataclass(slots=True, eq=False, repr=False)
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

    epoll: select.epoll
    connections: dict[int, HttpConnection]
    connections_max: int
    call_soon: Callable[[Callable[[], None]], None]
    opened: Callable[[int, int], int]
    made: Callable[[HttpConnection], None]
    failed: Callable[[HttpConnection, int, str], None]
    close: Callable[[HttpConnection], None]
    close_idle: Callable[[], bool]

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
            self.close(connection)
            self._try_next(connection, pycurl.E_COULDNT_CONNECT, "no answer")
        return now_s - connection.requested_s

    def _look_up(self, origin: HttpOrigin, connection: HttpConnection) -> None:
        """Look up a name on a separate thread, because the lookup has no deadline."""
        waiting = origin.waiting = [connection]

        def resolve() -> None:
            addresses, problem = origin.look_up()
            self.call_soon(lambda: self._resolved(origin, addresses, problem, waiting))

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
        if len(self.connections) >= self.connections_max:
            self.close_idle()
        while connection.addresses:
            family, address = connection.addresses.pop(0)
            try:
                self._begin(connection, family, address)
            except OSError as error:
                code, problem = pycurl.E_COULDNT_CONNECT, error.strerror or str(error)
                if error.errno in _NO_DESCRIPTORS and self.close_idle():
                    connection.addresses.insert(0, (family, address))
                continue
            return
        connection.origin.forget_addresses()
        self.failed(connection, code, f"{connection.origin.host_header}: {problem}")

    def _begin(self, connection: HttpConnection, family: int, address: Any) -> None:
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            fd = sock.fileno()
            self.opened(fd, 0)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            reason = sock.connect_ex(address)
            if reason not in (0, errno.EINPROGRESS):
                raise OSError(reason, os.strerror(reason))
            self.epoll.register(fd, select.EPOLLOUT)
        except BaseException:
            sock.close()
            raise
        connection.socket, connection.fd, connection.receive = sock, fd, sock.recv_into
        connection.since_s = time.monotonic()
        self.connections[fd] = connection
        connection.on_ready = self._on_connected

    def _on_connected(self, connection: HttpConnection) -> None:
        assert connection.socket is not None
        reason = connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if reason:
            self.close(connection)
            self._try_next(connection, pycurl.E_COULDNT_CONNECT, os.strerror(reason))
            return
        self.epoll.modify(connection.fd, select.EPOLLIN | select.EPOLLRDHUP)
        connection.addresses = []
        if connection.transfer is not None:
            connection.transfer.connected_s = time.monotonic()
        self.made(connection)
