"""The listening sockets of a gateway, one per worker process, all at the same address; and its TLS certificate.

With ``SO_REUSEPORT``, the kernel spreads connections evenly over the sockets. With one shared socket it would not: uvloop
accepts all waiting connections, so one process would take a whole burst. The supervisor opens all sockets and keeps them open,
so that connections wait while a dead process is started again. The certificate can be loaded again while connections are open.
"""

from __future__ import annotations

import calendar
import socket
import ssl
import time
from typing import TYPE_CHECKING

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.gateway.config import GatewayConfig


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


EXPIRY_WARNING_S = 14 * 86400.0
"""The gateway warns of a certificate that expires sooner than this."""

PEM_BYTES_MAX = 1024 * 1024
_BEGIN = "-----BEGIN CERTIFICATE-----"
_END = "-----END CERTIFICATE-----"
_VERSION, _UTC_TIME = 0xA0, 0x17


class TlsCertificate:
    """A server's certificate. New connections use the certificate that was loaded last; open ones keep theirs.

    Args:
        config: The configuration, with both paths.

    Attributes:
        context: TLS context that the server passes to its event loop. It stays the same when the certificate is loaded again.

    Raises:
        ConfigError: Certificate and key cannot be read, or do not belong together.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self._paths = config.tls_certificate, config.tls_key
        self.context = self._load()

    def reload(self) -> None:
        """Load certificate and key again.

        Raises:
            ConfigError: They are not usable; the old ones remain in force.
        """
        self._load()  # a context that could load only one of the files would be left with a wrong pair
        _load_into(self.context, *self._paths)

    def expires_s(self) -> float:
        """Return when the certificate expires, in seconds since 1970; ``inf`` if that cannot be read."""
        return _expires_s(self._paths[0])

    def warning(self) -> str:
        """Return a warning if the certificate has expired or soon will; otherwise an empty text."""
        left_s = self.expires_s() - time.time()
        if left_s > EXPIRY_WARNING_S:
            return ""
        if left_s <= 0:
            return f"the TLS certificate {self._paths[0]} expired {-left_s / 86400:.0f} days ago"
        return f"the TLS certificate {self._paths[0]} expires in {left_s / 86400:.0f} days"

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        _load_into(context, *self._paths)
        return context


def _load_into(context: ssl.SSLContext, certificate: str, key: str) -> None:
    def no_password() -> str:
        raise ConfigError(f"the TLS key {key} is encrypted", hint="openssl pkey -in KEY -out PLAIN; chmod 600 PLAIN")

    try:
        context.load_cert_chain(certificate, key, password=no_password)
    except ConfigError:
        raise
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ConfigError(f"the TLS certificate {certificate} with the key {key} cannot be used: {reason}") from None


def _expires_s(path: str) -> float:
    """Return when the first certificate of a PEM file ends.

    The standard library decodes only certificates that a peer has sent, so this walks to the field: version, serial number,
    algorithm, issuer, validity. Source: RFC 5280, section 4.1.
    """
    try:
        with open(path) as stream:  # noqa: PTH123 - paths are texts in a config
            text = stream.read(PEM_BYTES_MAX)
        begin = text.index(_BEGIN)
        der = ssl.PEM_cert_to_DER_cert(text[begin : text.index(_END, begin) + len(_END)])
        certificate = _children(_children(_children(der)[0][1])[0][1])
        skipped = 1 if certificate[0][0] == _VERSION else 0
        kind, value = _children(certificate[skipped + 3][1])[1]
        pattern = "%y%m%d%H%M%SZ" if kind == _UTC_TIME else "%Y%m%d%H%M%SZ"
        return calendar.timegm(time.strptime(value.decode(), pattern))
    except (OSError, ValueError, IndexError):
        return float("inf")


def _children(der: bytes) -> list[tuple[int, bytes]]:
    """Return the tags and contents of consecutive DER values."""
    found, at = [], 0
    while at < len(der):
        tag, length, at = der[at], der[at + 1], at + 2
        if length & 0x80:
            wide = length & 0x7F
            length, at = int.from_bytes(der[at : at + wide]), at + wide
        found.append((tag, der[at : at + length]))
        at += length
    return found
