"""``HttpStore``: objects behind plain HTTP(S). It only reads, with GET, HEAD and ranges, and cannot list."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from penstock.config import TransportConfig
from penstock.errors import ConfigError, ProtocolError, StoreError
from penstock.redaction import public_url, stored_key, url_parts
from penstock.store.answers import object_info, status_error
from penstock.store.base import has_dot_segment
from penstock.store.exchange import Exchange, RemoteStore
from penstock.transport import HttpAnswer, HttpRequest
from penstock.types import ByteRange, Get, Head, Key, Operation, Sink, Transfer, parse_size

if TYPE_CHECKING:
    from penstock.types import Completion

_REDIRECTS_MAX = 5
_HEAD_REFUSED = (401, 403, 405, 501)
_FIRST_BYTE = ByteRange(0, 1)
_IN_URLS = "/~-._!$&'()*+,;=:@%"
"""Characters that are not quoted in a key with a query, because it was cut out of a URL and is percent-encoded."""


class HttpStore(RemoteStore):
    """Read-only objects below a base URL.

    Args:
        base_url: ``http(s)://host/path/``; a query, such as a presigned URL's, is sent with every request and never shown.
        transport: Deadlines and connections; None means ``TransportConfig()``.

    Attributes:
        variant: Digest of the base URL's query, which ``describe`` does not show; empty if there is none.
        is_redirected: Whether a server has redirected a request. From then on libcurl sends all requests, because it follows
            redirects. Before that, plain HTTP takes the connections that cost half as much.
    """

    keys_have_queries = True

    def __init__(self, base_url: str, *, transport: TransportConfig | None = None) -> None:
        super().__init__()
        parts = url_parts(base_url)
        if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{base_url} is not an http(s) URL", hint="http(s)://host/path")
        if parts.username or parts.password:
            raise ConfigError("the URL must not hold credentials")
        path = parts.path if parts.path.endswith("/") else parts.path + "/"
        self._base_url = base_url
        self._root = f"{parts.scheme}://{parts.netloc}{path}"
        self._query = f"?{parts.query}" if parts.query else ""
        self.variant = stored_key(self._query)
        self.transport = transport or TransportConfig()
        self.is_redirected = False
        self.lands_in_files = parts.scheme == "http"

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(HttpStore, transport=self.transport), (self._base_url,)

    @property
    def address(self) -> str:
        """URL of the directory."""
        return self._root

    def describe(self, key: Key) -> str:
        """Return the URL of `key` without its query, which may be a signature."""
        return public_url(self._root + key)

    def submit(self, operation: Operation, sink: Sink) -> Transfer:
        """Start a ``Get`` or ``Head``; see ``Store.submit``. Any other operation raises ``ConfigError``."""
        if not isinstance(operation, (Get, Head)):
            raise ConfigError(f"{self._root} is served over HTTP, which cannot list",
                              hint="name the keys, or pass a manifest")  # fmt: skip
        if isinstance(operation, Get) and operation.span is not None:
            operation.span.checked()
        self.check_open()
        exchange = _HttpExchange(self, operation, sink)
        exchange.send()
        return exchange

    def url(self, key: Key) -> str:
        """Return the URL of `key` for requests.

        Raises:
            ConfigError: The key is empty, or has a ``.`` or ``..`` segment.
        """
        name, _, query = key.partition("?")
        if not name or has_dot_segment(name):
            raise ConfigError(f"the key {name!r} is empty, or has a '.' or '..' segment")
        if query:
            return f"{self._root}{quote(name, safe=_IN_URLS)}?{query}"
        return f"{self._root}{quote(name, safe='/~-._')}{self._query}"


class _HttpExchange(Exchange[HttpStore]):
    """One GET or HEAD. A HEAD that is refused, or does not tell the size, becomes a GET of one byte.

    Many URLs are signed only for GET, and some servers answer only GET. A request that is redirected is sent again, to be
    followed.
    """

    __slots__ = ("follows", "instead", "url")

    def __init__(self, store: HttpStore, operation: Get | Head, sink: Sink) -> None:
        super().__init__(store, operation, sink)
        self.url = store.url(operation.key)
        self.instead = False  # whether a GET is sent instead of a HEAD
        self.follows = store.is_redirected

    def send(self) -> None:
        """Send the request."""
        operation = self.operation
        headers = ["Accept-Encoding: identity"]
        span = operation.span if isinstance(operation, Get) else _FIRST_BYTE if self.instead else None
        if span is not None:
            headers.append(span.header)
        if isinstance(operation, Get) and operation.if_match is not None:
            headers.append(f"If-Match: {operation.if_match}")
        request = HttpRequest(
            "GET" if isinstance(operation, Get) or self.instead else "HEAD",
            self.url,
            sink=self,
            config=self.store.transport,
            headers=headers,
            landing=self.sink.landing if isinstance(operation, Get) else None,
            redirects_max=_REDIRECTS_MAX if self.follows else 0,
        )
        self.submit(request)

    def resend_if_corrected(self, answer: HttpAnswer) -> bool:
        is_redirect = 300 <= answer.status < 400 and b"location" in answer.headers  # as libcurl sees it
        if is_redirect and not self.follows and not self.cancelled:
            self.follows = self.store.is_redirected = True
            self.send()
            return True
        if not isinstance(self.operation, Head) or self.instead or self.cancelled:
            return False
        unsized = answer.status == 200 and b"content-length" not in answer.headers
        if answer.status not in _HEAD_REFUSED and not unsized:
            return False
        self.instead = True
        self.send()
        return True

    def check_document(self, headers: dict[bytes, bytes]) -> None:
        if self.instead and headers.get(b"content-length") != b"1":
            raise ProtocolError("the server ignores Range, so only the head of its answer is of use")

    def _fill(self, completion: Completion, answer: HttpAnswer) -> None:
        if not self.instead or answer.status not in (200, 206, 416):
            super()._fill(completion, answer)
            return
        size = answer.headers.get(b"content-range", b"").rpartition(b"/")[2]
        if answer.status == 200:
            size = answer.headers.get(b"content-length", b"")
        size_bytes = parse_size(size)
        if size_bytes is None:
            raise ProtocolError("the answer does not state the object's size")
        completion.info = object_info(self.operation.key, answer.headers, size_bytes, {})  # type: ignore[union-attr]

    def refusal(self, answer: HttpAnswer) -> StoreError:
        return status_error(answer.status, answer.headers, None, None)

    def with_context(self, error: StoreError) -> StoreError:
        operation = self.operation
        assert isinstance(operation, (Get, Head))
        error.operation = "GET" if isinstance(operation, Get) else "HEAD"
        error.url = self.store.describe(operation.key)
        span = getattr(operation, "span", None)
        error.span = tuple(span) if span is not None else None
        return error
