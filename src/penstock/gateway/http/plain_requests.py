"""GETs in their most common form, read by one regular expression.

aiohttp's parser takes every request that HTTP allows. A ``PlainRequest`` has a form that leaves nothing to interpret: only
ASCII, a path, HTTP/1.1, a host, header lines with CRLF and without folding, no header twice, no body, and nothing that changes
how the connection continues. The whole request must have arrived in one piece that ends where the request ends. Therefore two
parsers cannot disagree about its end, on which request smuggling depends.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from aiohttp import HttpVersion11
from aiohttp.streams import EMPTY_PAYLOAD
from multidict import CIMultiDict

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Mapping

    from aiohttp.web import RequestHandler

_NAME = r"[!#$%&'*+.^_`|~0-9A-Za-z-]++"
_REQUEST = re.compile(rf"GET (/[!-~]*+) HTTP/1\.1\r\n((?:{_NAME}:[ -~\t]*+\r\n)++)\r\n")
_FIELD = re.compile(r"([^:]++):[ \t]*+([ -~\t]*+)\r\n")
_FIELDS_COUNT_MAX = 64
_NOT_PLAIN = frozenset(
    {
        "connection",
        "content-length",
        "expect",
        "http2-settings",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""Headers of requests that are not plain. The only value of ``Connection`` that is, ``keep-alive``, says nothing new."""


class PlainRequest:
    """A GET without a body, with the attributes of aiohttp's requests that an answer needs.

    Attributes:
        raw_path: Path and query as they were sent; they begin with a slash.
        headers: Headers, each of which occurs once; looking one up ignores case.
        remote: Address of the client.
        drain: Waits until the operating system has taken everything that was written.
    """

    __slots__ = ("_connection", "drain", "headers", "raw_path", "remote")

    method = "GET"
    version = HttpVersion11
    keep_alive = True
    can_read_body = False
    content_length = None
    content = EMPTY_PAYLOAD

    def __init__(
        self,
        raw_path: str,
        headers: Mapping[str, str],
        *,
        connection: RequestHandler,
        drain: Callable[[], Awaitable[None]],
        remote: str | None,
    ) -> None:
        self.raw_path = raw_path
        self.headers = headers
        self.remote = remote
        self.drain = drain
        self._connection = connection

    @property
    def transport(self) -> asyncio.Transport | None:
        """The connection; None if it was closed."""
        return self._connection.transport

    @property
    def scheme(self) -> str:
        """``"http"`` or ``"https"``."""
        return "http" if self._connection.ssl_context is None else "https"

    @property
    def writer(self) -> PlainRequest:
        """The object whose ``drain`` waits for the client, as with aiohttp's requests."""
        return self


def parse_plain(data: bytes) -> tuple[str, Mapping[str, str]] | None:
    """Return target and headers if bytes are a plain request and nothing else; None for everything else.

    Args:
        data: All that has come since the end of the last request.

    Cost: 4 µs for a signed GET.
    """
    if not data.endswith(b"\r\n\r\n") or not data.isascii():
        return None
    match = _REQUEST.fullmatch(data.decode("ascii"))
    if match is None:
        return None
    headers = CIMultiDict([(name, value.rstrip(" \t")) for name, value in _FIELD.findall(match[2])])
    names = set(map(str.lower, headers))
    if len(names) != len(headers) or len(headers) > _FIELDS_COUNT_MAX or not headers.get("Host"):
        return None
    if not names.isdisjoint(_NOT_PLAIN) and not (
        names & _NOT_PLAIN == {"connection"} and headers["Connection"].lower() == "keep-alive"
    ):
        return None
    return match[1], headers
