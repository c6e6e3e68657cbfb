"""``AllowAll``: no keys, for a gateway on loopback."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from penstock.gateway.authentication import OpenAuthenticator
from penstock.gateway.objects import S3Error

if TYPE_CHECKING:
    from penstock.gateway.objects import Caller, RequestHead, VerifiedRequest


class AllowAll:
    """Takes every request for an anonymous one, whatever its signature, if it names this machine.

    A web page could reach a gateway without keys through the browser of a user of this machine, if the page's host name
    resolves to loopback. Therefore the request must name a loopback address, ``localhost`` or one of its subdomains, or one of
    `domains`.

    Args:
        may_write: Whether clients may change objects.
        domains: Further host names by which the gateway is reached, with their subdomains.
    """

    def __init__(self, *, may_write: bool = False, domains: tuple[str, ...] = ()) -> None:
        self._open = OpenAuthenticator(may_write=may_write)
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
        return self._open.verify(head)

    def may_use(self, caller: Caller, bucket: str) -> bool:
        """Return True; see ``Authenticator.may_use``."""
        return self._open.may_use(caller, bucket)


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
