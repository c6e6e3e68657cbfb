"""The sockets that a gateway listens on: one per worker process, all at the same address.

With ``SO_REUSEPORT``, the kernel spreads connections evenly over the sockets. With one shared socket it would not: uvloop
accepts all waiting connections, so one process would take a whole burst. The supervisor opens all sockets and keeps them open,
so that connections wait while a process that died is started again.
"""

from __future__ import annotations

import socket

from penstock.errors import ConfigError

BACKLOG_MAX = 4096


def listen(host: str, port: int, *, count: int) -> list[socket.socket]:
    """Open listening sockets at one address.

    Args:
        host: Name or address to listen on.
        port: Port; 0 takes a free one.
        count: Number of sockets.

    Raises:
        ConfigError: The address is in use, needs rights that this process lacks, or is not one of this machine.
    """
    family, _, _, _, address = _resolve(host, port)
    opened: list[socket.socket] = []
    try:
        # With SO_REUSEPORT a second gateway could share the port unnoticed, so the first socket is bound without it.
        with _bound(family, address, shared=False) as probe:
            address = (address[0], probe.getsockname()[1], *address[2:])
            if count == 1:
                opened.append(probe.dup())
        while len(opened) < count:
            opened.append(_bound(family, address, shared=True))
        for each in opened:
            each.listen(BACKLOG_MAX)
            each.setblocking(False)
    except OSError as error:
        for each in opened:
            each.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}", hint="--port 0 takes a free port"
        ) from None
    return opened


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, object, int, str, tuple[str, int]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host = {host!r} is not an address: {error}") from None
    return found[0]  # type: ignore[return-value]


def _bound(family: int, address: tuple[str, int], *, shared: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if address[0] == "::" else 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock
