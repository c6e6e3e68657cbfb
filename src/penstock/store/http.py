"""``HttpStore``: objects behind plain HTTP(S), read only: GET, HEAD and ranges; there is nothing to list."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from penstock.config import TransportConfig
from penstock.errors import CancelledOperationError, ConfigError, ObjectChangedError, ProtocolError, StoreError
from penstock.store.answers import (
    attempt_record,
    object_info,
    served_span,
    status_error,
    transport_error,
    unforeseen,
)
from penstock.store.base import Store
from penstock.store.checksums import full_object, verify
from penstock.store.keys import has_dot_segment
from penstock.transport import OVERLONG, HttpAnswer, HttpRequest, HttpTransfer, engine
from penstock.types import Completion, Get, Head, Key, Landing, Operation, Sink, Transfer

if TYPE_CHECKING:
    from penstock.types import ByteRange, ObjectInfo

_REDIRECTS_MAX = 5


class HttpStore(Store):
    """Read-only objects below a base URL.

    Args:
        base_url: ``http(s)://host/path/``; a query (a presigned URL's) is kept on every request and never shown.
        transport: Deadlines and connections.
    """

    def __init__(self, base_url: str, *, transport: TransportConfig | None = None) -> None:
        super().__init__()
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{parts.scheme}://{parts.hostname or ''} is not an http(s) URL")
        if parts.username or parts.password:
            raise ConfigError("the URL must not hold credentials")
        path = parts.path if parts.path.endswith("/") else parts.path + "/"
        self._base_url = base_url
        self._root = f"{parts.scheme}://{parts.netloc}{path}"
        self._query = f"?{parts.query}" if parts.query else ""
        self.transport = transport or TransportConfig()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._base_url, self.transport)

    def describe(self, key: Key) -> str:
        """The URL without its query."""
        return self._root + key

    def submit(self, operation: Operation, sink: Sink) -> Transfer:
        """See ``Store``. Anything but ``Get`` and ``Head`` raises ``ConfigError``."""
        if not isinstance(operation, (Get, Head)):
            raise ConfigError(f"{self._root} is read only over HTTP, and cannot be listed",
                              hint="give the keys, or a manifest")  # fmt: skip
        key = operation.key
        name, _, query = key.partition("?")
        if not name or has_dot_segment(name):
            raise ConfigError(f"the key {name!r} is empty, or has a '.' or '..' segment")
        headers = ["Accept-Encoding: identity"]
        if isinstance(operation, Get):
            if operation.span is not None:
                span = operation.span.checked()
                headers.append(f"Range: bytes={span.start}-{span.end - 1}")
            if operation.if_match is not None:
                headers.append(f"If-Match: {operation.if_match}")
        exchange = _Exchange(self, operation, sink)
        request = HttpRequest(
            "GET" if isinstance(operation, Get) else "HEAD",
            self._root
            + quote(name, safe="/~-._!$&'()*+,;=:@%" if query else "/~-._")
            + (f"?{query}" if query else self._query),
            sink=exchange,
            config=self.transport,
            headers=headers,
            landing=sink.landing if isinstance(operation, Get) else None,
            redirects_max=_REDIRECTS_MAX,
        )
        exchange.transfer = engine.submit(request)
        return exchange.transfer


def _rebuild(base_url: str, transport: TransportConfig) -> HttpStore:
    return HttpStore(base_url, transport=transport)


class _Exchange:
    """One GET or HEAD: the transport's sink."""

    __slots__ = ("info", "operation", "sink", "span", "store", "transfer")

    def __init__(self, store: HttpStore, operation: Get | Head, sink: Sink) -> None:
        self.store = store
        self.operation = operation
        self.sink = sink
        self.transfer: HttpTransfer | None = None
        self.info: ObjectInfo | None = None
        self.span: ByteRange | None = None

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> Landing | None:
        if not isinstance(self.operation, Get):
            return None
        info, span = self._learn(self.operation, status, headers)
        return self.sink.head(info, span) if span.length_bytes else None

    def _learn(self, operation: Get, status: int, headers: dict[bytes, bytes]) -> tuple[ObjectInfo, ByteRange]:
        size_bytes, span = served_span(status, headers, operation.span)
        info = object_info(operation.key, headers, size_bytes, full_object(headers))
        if operation.if_match is not None and info.etag is not None and info.etag != operation.if_match:
            # plain servers may ignore If-Match
            raise ObjectChangedError(f"the object is now {info.etag}, not {operation.if_match}")
        self.info, self.span = info, span
        return info, span

    def on_end(self, answer: HttpAnswer) -> None:
        completion = Completion(self.operation)
        try:
            self._fill(completion, answer)
        except Exception as failure:
            error = failure if isinstance(failure, StoreError) else unforeseen(failure)
            error.operation = "GET" if isinstance(self.operation, Get) else "HEAD"
            error.url = self.store.describe(self.operation.key.partition("?")[0])
            error.status = error.status or answer.status or None
            error.attempts_count, error.elapsed_s = 1, answer.queued_s + answer.total_s
            completion.error = error
        offset = self.span.start if self.span is not None else 0
        completion.attempts = (attempt_record(answer, offset, throttled=answer.status in (429, 503)),)
        self.sink.done(completion)

    def _fill(self, completion: Completion, answer: HttpAnswer) -> None:
        operation = self.operation
        if isinstance(operation, Get):
            if self.info is None and 200 <= answer.status < 300 and answer.refused is None:
                self._learn(operation, answer.status, answer.headers)
            completion.landing, completion.info, completion.span = answer.landing, self.info, self.span
        if isinstance(answer.refused, StoreError):
            raise answer.refused
        shortened = answer.curl_error == OVERLONG and self.span is not None
        if answer.curl_error and not shortened and not (answer.status >= 300 and answer.error_body):
            raise transport_error(answer)
        if not 200 <= answer.status < 300:
            raise status_error(answer.status, answer.headers, None, None)
        landing, info, span = answer.landing, self.info, self.span
        if isinstance(operation, Head):
            length = answer.headers.get(b"content-length", b"")
            if not length.isdigit():
                raise ProtocolError("the answer to HEAD has no Content-Length")
            completion.info = object_info(operation.key, answer.headers, int(length), full_object(answer.headers))
        elif shortened and landing is not None and span is not None:
            completion.span = span._replace(end=span.start + landing.length_bytes)
        elif span is None or info is None:
            raise CancelledOperationError("no answer")
        elif answer.received_bytes != span.length_bytes:
            raise ProtocolError(f"the body has {answer.received_bytes} of {span.length_bytes} bytes", retryable=True)
        elif info.checksums and landing is not None and span.length_bytes == info.size_bytes:
            completion.verified = verify(info.checksums, landing.view)
