"""``AllowAll``: no keys, for a gateway on loopback."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from penstock.gateway.objects import Caller, RequestHead, S3Error, VerifiedRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from penstock.gateway.objects import RequestBody


class AllowAll:
    """Takes every request for an anonymous one, whatever its signature.

    A web page could reach a gateway without keys through the browser of a user of this machine, if the page's host name
    resolves to loopback. Therefore the request must name a loopback address, ``localhost`` or one of its subdomains, or one of
    `domains`.

    Args:
        may_write: Whether clients may change objects.
        domains: Further host names by which the gateway is reached, with their subdomains.
    """

    def __init__(self, *, may_write: bool = False, domains: tuple[str, ...] = ()) -> None:
        self._caller = Caller("", may_write)
        self._domains = ("localhost", *(domain.lower() for domain in domains if domain))
        self._is_known: dict[str, bool] = {}

    def verify(self, head: RequestHead) -> VerifiedRequest:
        """Return the anonymous caller; see ``Authenticator.verify``.

        Raises:
            S3Error: The request names a foreign host.
        """
        host = head.headers.get("Host", "")
        known = self._is_known.get(host)
        if known is None:
            known = _is_loopback(host, self._domains)
            if len(self._is_known) < 1000:
                self._is_known[host] = known
        if not known:
            raise S3Error("AccessDenied", "A gateway without keys answers only to names of this machine.", status=403)
        return VerifiedRequest(self._caller, plain_body(head))

    def may_use(self, caller: Caller, bucket: str) -> bool:
        """Return True; see ``Authenticator.may_use``."""
        return True


def _is_loopback(host: str, domains: tuple[str, ...]) -> bool:
    name = host.lower()
    if not name.endswith("]") and name.rpartition(":")[2].isdigit():
        name = name.rpartition(":")[0]
    name = name.strip("[]").removesuffix(".")
    if any(name == domain or name.endswith(f".{domain}") for domain in domains):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class PlainBody:
    """A body that is taken as it arrives.

    Args:
        pieces: The bytes.
        length_bytes: Their number; None if the client did not send it.
    """

    def __init__(self, pieces: AsyncIterator[bytes], length_bytes: int | None) -> None:
        self._pieces = pieces
        self.length_bytes = length_bytes
        self.checksums: Mapping[str, str] = {}

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._pieces


def plain_body(head: RequestHead) -> Callable[[AsyncIterator[bytes]], RequestBody]:
    """Return what makes the body of a request, as it arrives."""
    length = head.headers.get("Content-Length", "")

    def open_body(pieces: AsyncIterator[bytes]) -> RequestBody:
        return PlainBody(pieces, int(length) if length.isascii() and length.isdigit() else None)

    return open_body
