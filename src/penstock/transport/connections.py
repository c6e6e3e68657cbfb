"""Plain HTTP connections and the origins that they lead to: host and port, addresses, proxy, idle connections."""

from __future__ import annotations

import os
import random
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.transport.head import Chunked
    from penstock.transport.http import HttpRequest, HttpTransfer

NAME_S_MAX = 60.0
"""Seconds after which the addresses of a name are looked up again; sooner if none of them can be reached."""
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


class HttpConnection:
    """One connection, and the exchange that it carries.

    Args:
        origin: The origin that it leads to.
    """

    __slots__ = (
        "addresses",
        "chunks",
        "fd",
        "idle_s",
        "keep",
        "left",
        "message",
        "on_ready",
        "origin",
        "overlong",
        "partial",
        "receive",
        "requested_s",
        "reused",
        "since_s",
        "socket",
        "transfer",
        "view",
    )  # fmt: skip

    def __init__(self, origin: HttpOrigin) -> None:
        self.origin = origin
        self.socket: socket.socket | None = None
        self.fd = -1
        self.receive: Any = None  # socket.recv_into
        self.addresses: list[Any] = []
        self.requested_s = 0.0  # when the connection was requested
        self.since_s = 0.0  # when the attempt to connect to the current address began
        self.idle_s = 0.0  # when it became idle
        self.reused = False  # whether it has carried another exchange before
        self.keep = False  # whether it stays open after this exchange
        self.transfer: HttpTransfer | None = None
        self.message = b""  # the request, or what is left to send of it
        self.on_ready: Any = None
        self.partial = b""  # the part of a head that has arrived
        self.view: memoryview | None = None  # where the rest of a body goes
        self.overlong = False  # whether the body is longer than its landing
        self.left = 0  # bytes left of a body that goes through HttpTransfer.take
        self.chunks: Chunked | None = None


class HttpOrigins:
    """The origins of one pool, by the authority in their URLs."""

    def __init__(self) -> None:
        self._known: dict[str, HttpOrigin] = {}

    def find(self, request: HttpRequest) -> HttpOrigin | None:
        """Return the origin of `request`; None unless it is a plain GET or HEAD without proxy and redirects."""
        url = request.url
        if (
            url[:7] != "http://"
            or request.method not in ("GET", "HEAD")
            or request.redirects_max
            or request.config.proxy
        ):
            return None
        slash = url.find("/", 7)
        authority = url[7:slash] if slash > 0 else url[7:]
        origin = self._known.get(authority)
        if origin is None:
            try:
                origin = self._known[authority] = HttpOrigin(authority)
            except ValueError:
                return None  # libcurl will say what is wrong with it
        return None if origin.proxied else origin

    def take_oldest_idle(self) -> HttpConnection | None:
        """Remove and return the connection that has been idle for longest; None if none is idle."""
        idle = [origin.idle for origin in self._known.values() if origin.idle]
        return min(idle, key=lambda each: each[0].idle_s).pop(0) if idle else None

    def clear(self) -> None:
        """Forget all of them."""
        self._known.clear()


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
