"""``S3Store``: the operations of ``types.py`` as S3 requests over the transport, one attempt each.

Retries, hedges and limits are wrappers. This module has the parts that are specific to S3: which request an operation is, how
an answer is read, and which answers correct the request (another region, another time, fresh keys).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from penstock.checksums.algorithms import full_object
from penstock.config import TransportConfig
from penstock.errors import (
    CancelledOperationError,
    ConfigError,
    CredentialsError,
    ObjectChangedError,
    ObjectExistsError,
    ProtocolError,
    StoreError,
    as_completion_error,
)
from penstock.store import xml
from penstock.store.answers import http_date_s, object_info, status_error
from penstock.store.base import Store, innermost
from penstock.store.credentials import provider
from penstock.store.exchange import Exchange, RemoteStore
from penstock.store.records import CLAIM_HEADER
from penstock.store.s3_requests import S3Options, S3Request, build_request, encoded_key
from penstock.transport import HttpAnswer, HttpRequest, Signing
from penstock.types import (
    AbortMultipart,
    BodyStream,
    CompleteMultipart,
    Completion,
    Copy,
    CopyPart,
    CreateMultipart,
    Forward,
    ForwardedAnswer,
    Get,
    ListPage,
    ObjectInfo,
    Operation,
    Page,
    Part,
    Put,
    PutPart,
    Sink,
    Transfer,
)

if TYPE_CHECKING:
    from penstock.store.credentials import CredentialProvider, Credentials
    from penstock.store.s3_endpoint import S3Endpoint
    from penstock.types import Head, Key


_DOCUMENT_BYTES_MAX = 64 << 20
"""Largest XML answer in bytes; a page of 1 000 keys of 1 024 bytes, percent-encoded, has 4 MiB."""
_OF_OBJECTS = frozenset({b"etag", b"last-modified", b"x-amz-request-id"})
_CORRECTIONS_MAX = 3
"""How often one operation may be sent again because the answer said how it should have been sent."""


class S3Store(RemoteStore):
    """One bucket, or the part of it below a prefix, at an S3-compatible endpoint.

    Without a bucket, ``ListPage`` returns the buckets as prefixes, and no other operation is possible.

    Args:
        endpoint: Endpoint, region, addressing and prefix of the bucket.
        provider: Provider of the credentials; None for anonymous requests.
        transport: Deadlines and connections; None means ``TransportConfig()``.
        options: Requester pays, SSE-C, expected owner; None means ``S3Options()``.
    """

    keeps_records = True

    def __init__(
        self,
        endpoint: S3Endpoint,
        *,
        provider: CredentialProvider | None,
        transport: TransportConfig | None = None,
        options: S3Options | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.provider = provider
        self.transport = transport or TransportConfig()
        self.options = options or S3Options()
        self.keeps_checksums = self.options.upload_checksums
        self.lands_in_files = not endpoint.over_tls  # what arrives encrypted passes through memory anyway
        self._signing: tuple[tuple[Credentials, str, float], Signing] | None = (
            None  # one value, because threads share it
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.endpoint, self.provider and self.provider.recipe(), self.transport, self.options)

    @property
    def address(self) -> str:
        """URL of the bucket, or of the endpoint."""
        return self.endpoint.base_url

    def describe(self, key: Key) -> str:
        """Return ``s3://bucket/prefix/key``; ``s3://`` without a bucket."""
        if not self.endpoint.bucket:
            return "s3://"
        return f"s3://{self.endpoint.bucket}/{self.endpoint.prefix}{key}"

    def submit(self, operation: Operation, sink: Sink) -> Transfer:
        """Start `operation`; see ``Store.submit``. Bad keys and ranges raise ``ConfigError``."""
        self.check_open()
        exchange = _S3Exchange(self, operation, sink)
        exchange.send()
        return exchange

    def signing(self, credentials: Credentials) -> Signing:
        """Return the signer for `credentials`; the same object as long as keys, region and the store's clock are the same."""
        endpoint = self.endpoint
        known, wanted = self._signing, (credentials, endpoint.region, endpoint.clock_offset_s)
        if known is not None and known[0] == wanted:
            return known[1]
        signing = Signing(
            credentials.access_key,
            credentials.secret_key,
            credentials.session_token,
            endpoint.region,
            clock_offset_s=endpoint.clock_offset_s,
            service=endpoint.service,
        )
        self._signing = wanted, signing
        return signing


def _rebuild(
    endpoint: S3Endpoint, recipe: tuple[Any, ...] | None, transport: TransportConfig, options: S3Options
) -> S3Store:
    """Unpickle a store: its credential provider is looked up in this process, and keys travel only if they were given."""
    found = provider(*recipe) if recipe is not None else None
    return S3Store(endpoint, provider=found, transport=transport, options=options)


class _S3Exchange(Exchange[S3Store]):
    """One operation as one request, sent again only if the answer says how it should have been sent."""

    __slots__ = ("corrections_count", "credentials", "wire")

    def __init__(self, store: S3Store, operation: Operation, sink: Sink) -> None:
        super().__init__(store, operation, sink)
        self.wire: S3Request = build_request(store.endpoint, store.options, operation)  # raises ConfigError
        self.credentials: Credentials | None = None
        self.corrections_count = 0

    @property
    def is_streamed(self) -> bool:
        """Whether the body comes from a stream, so that it cannot be sent a second time."""
        return self.wire.body is not None and isinstance(self.wire.body, BodyStream)

    # ── sending ────────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self) -> None:
        provider = self.store.provider
        if provider is None:
            self._send(None)
        elif (credentials := provider.now()) is not None:
            self._send(credentials)
        else:
            provider.when_known(self._send_when_known)

    def _send_when_known(self, found: Credentials | CredentialsError) -> None:
        if isinstance(found, CredentialsError):
            self._fail(CredentialsError(found.what, hint=found.hint, retryable=False))
        elif self.cancelled:
            self._fail(CancelledOperationError("cancelled"))
        else:
            try:
                self._send(found)
            except Exception as error:
                self._fail(as_completion_error(error))

    def _send(self, credentials: Credentials | None) -> None:
        store = self.store
        self.credentials = credentials
        wire = self.wire
        headers = wire.headers
        signing = None
        if credentials is not None:
            signing = store.signing(credentials)
            if wire.body is not None and not isinstance(wire.body, BodyStream):
                headers = [*headers, store.options.payload_header(wire.body, headers, over_tls=store.endpoint.over_tls)]
        operation = self.operation
        landing = self.sink.landing if isinstance(operation, Get) else None
        request = HttpRequest(
            wire.method,
            wire.url,
            sink=self,
            config=store.transport,
            headers=headers,
            body=wire.body,
            signing=signing,
            landing=landing,
        )
        self.submit(request)

    # ── answers ────────────────────────────────────────────────────────────────────────────────────────────────────

    def check_document(self, headers: dict[bytes, bytes]) -> None:
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > _DOCUMENT_BYTES_MAX:
            raise ProtocolError(f"a document of {int(length)} bytes exceeds the limit of {_DOCUMENT_BYTES_MAX}",
                                hint="is this an S3 endpoint?")  # fmt: skip

    def check_described(self, headers: dict[bytes, bytes]) -> None:
        """Refuse an answer without ETag, time and request ID: the page of a portal, or the empty answer of a broken proxy.

        Every S3 sends an object's ETag or time, and at least the request ID for a result of an Object Lambda.
        """
        if not headers.keys() & _OF_OBJECTS:
            raise ProtocolError("the answer has no ETag, no Last-Modified and no request id", retryable=True)

    def refusal(self, answer: HttpAnswer) -> StoreError:
        document = xml.parse_error(answer.error_body) if answer.error_body else None
        code, message = (document.code, document.message) if document else (None, None)
        return status_error(answer.status, answer.headers, code, message, is_signed=self.store.provider is not None)

    def fill_head(self, completion: Completion, operation: Head, headers: dict[bytes, bytes]) -> None:
        super().fill_head(completion, operation, headers)
        completion.value = headers.get(CLAIM_HEADER.encode(), b"").decode("latin-1") or None

    def fill_other(self, completion: Completion, answer: HttpAnswer) -> None:
        if isinstance(self.operation, ListPage) and not self.store.endpoint.bucket:
            completion.value = xml.parse_buckets(answer.landing.view if answer.landing is not None else b"")
        else:
            _fill_other(completion, self.operation, answer, self.store.endpoint.prefix)

    # ── corrections ────────────────────────────────────────────────────────────────────────────────────────────────

    def resend_if_corrected(self, answer: HttpAnswer) -> bool:
        """Send again if the answer says how: in another region, at the store's time, or with fresh keys."""
        status = answer.status
        if (
            status in (200, 206)
            or self.cancelled
            or self.is_streamed
            or self.corrections_count >= _CORRECTIONS_MAX
            or status not in (301, 307, 308, 400, 403)
        ):
            return False
        document = xml.parse_error(answer.error_body) if answer.error_body else None
        code = document.code if document else ""
        endpoint = self.store.endpoint
        region = (answer.headers.get(b"x-amz-bucket-region") or b"").decode("latin-1") or (
            document.region if document else ""
        )
        skewed = code == "RequestTimeTooSkewed" or (status == 403 and not code and endpoint.is_skewed(answer.headers))
        if status in (301, 307, 308, 400) and region and region != self.wire.region:
            endpoint.move(region)
        elif status in (307, 308) and self._inside(location := answer.headers.get(b"location", b"").decode("latin-1")):
            self.wire = self.wire._replace(url=location, redirected_url=location)
        elif skewed and (date_s := http_date_s(answer.headers.get(b"date", b""))) is not None:
            endpoint.set_clock(date_s)
        elif code in ("ExpiredToken", "TokenRefreshRequired") and self.store.provider is not None:
            if not self.store.provider.expired(self.credentials):
                return False
        else:
            return False
        self.corrections_count += 1
        self.info = self.span = None
        if self.wire.redirected_url is None:
            self.wire = build_request(endpoint, self.store.options, self.operation)
        self.send()
        return True

    def _inside(self, location: str) -> bool:
        """Whether a temporary redirect stays within the endpoint's domain; requests are never signed for another one."""
        try:
            target, here = urlsplit(location), urlsplit(self.wire.url)
            same_port = (target.scheme, target.port) == (here.scheme, here.port)
        except ValueError:
            return False
        host = target.hostname or ""
        domain = self.store.endpoint.domain
        return same_port and (host in (here.hostname, domain) or host.endswith("." + domain))

    # ── failing ────────────────────────────────────────────────────────────────────────────────────────────────────

    def with_context(self, error: StoreError) -> StoreError:
        if isinstance(error, ObjectChangedError) and getattr(self.operation, "if_absent", False):
            error = ObjectExistsError(
                "there is an object of this key",
                **{name: getattr(error, name) for name in error.FIELDS},
            )
        if isinstance(error, ProtocolError) and error.hint is None and not error.code:
            error.hint = "is this an S3 endpoint?"
        error.operation = self.wire.name
        error.url = self.store.describe(self.wire.key)
        if self.is_streamed:
            error.retryable = False
        span = getattr(self.operation, "span", None)
        error.span = tuple(span) if span is not None else None
        return error

    def _fail(self, error: StoreError) -> None:
        self.sink.done(Completion(self.operation, error=self.with_context(error)))


def _fill_other(completion: Completion, operation: Any, answer: HttpAnswer, prefix: str) -> None:
    """Set what operations other than ``Get`` and ``Head`` return, from a 2xx answer."""
    headers = answer.headers
    body = answer.landing.view if answer.landing is not None else memoryview(b"")
    if isinstance(operation, ListPage):
        completion.value = xml.parse_list(body)
        if prefix:
            completion.value = _relative(completion.value, len(prefix))
    elif isinstance(operation, Forward):
        completion.value = ForwardedAnswer(answer.status, headers, bytes(body))
    elif isinstance(operation, Put):
        if b"etag" not in headers:  # a portal's page, with status 200; nothing was stored
            raise ProtocolError("the answer to a write has no ETag", retryable=True)
        completion.info = object_info(
            operation.key, headers, len(memoryview(operation.body).cast("B")), full_object(headers)
        )
    elif isinstance(operation, CreateMultipart):
        completion.value = xml.parse_upload_id(body)
    elif isinstance(operation, PutPart):
        completion.value = _part(operation.part_number, headers)
    elif isinstance(operation, (CompleteMultipart, Copy, CopyPart)):
        number = operation.part_number if isinstance(operation, CopyPart) else 0
        value = xml.parse_complete(body) if isinstance(operation, CompleteMultipart) else xml.parse_copy(body, number)
        if isinstance(value, xml.ErrorDocument):
            raise status_error(500 if value.code == "InternalError" else 400, headers, value.code, value.message)
        completion.value = value
        if not isinstance(operation, CopyPart):
            key = operation.key if isinstance(operation, CompleteMultipart) else operation.target
            # The caller knows the size; the answer does not tell it.
            completion.info = ObjectInfo(key, 0, value.etag or None, checksums=value.checksums)
    elif isinstance(operation, AbortMultipart) or len(operation.keys) == 1:
        if answer.status != 204 and b"x-amz-request-id" not in headers:
            raise ProtocolError(
                f"status {answer.status} without a request id may not come from the store", retryable=True
            )
        completion.value = {}
    else:
        failed = xml.parse_delete(body)
        completion.value = {key[len(prefix) :]: why for key, why in failed.items()}


def _relative(page: Page, length: int) -> Page:
    """Return a page with its keys relative to the store's prefix, which has `length` characters."""
    objects = [info._replace(key=info.key[length:]) for info in page.objects]
    return Page(objects, [prefix[length:] for prefix in page.prefixes], page.next_token)


def _part(number: int, headers: dict[bytes, bytes]) -> Part:
    etag = headers.get(b"etag")
    if not etag:
        raise ProtocolError("the answer to a part has no ETag", retryable=True)
    return Part(number, etag.decode("latin-1"), full_object(headers))


# ── presigned URLs ────────────────────────────────────────────────────────────────────────────────────────────────────────


def presigned_get(store: Store, key: Key, *, expires_s: int = 3600) -> str:
    """Return a URL with which anybody can read one object, by any number of requests, whole or by ranges.

    ``split`` and ``connect`` of ``penstock.compose`` take the URL apart and read it: the key keeps the query. The URL ends
    sooner than `expires_s` if the store's keys are temporary and expire.

    Args:
        store: Store of the object, with or without its wrappers; the innermost one must be an ``S3Store``.
        key: Key of the object.
        expires_s: Seconds for which the URL is valid, from 1 to 604 800.

    Returns:
        The URL, which is a secret. If the store is anonymous, the URL is not signed.

    Raises:
        ConfigError: The store is not S3, has objects that are encrypted with a customer's key (every request would have to
            carry that key), or `key` or `expires_s` is not valid.
        CredentialsError: No keys were found.

    Cost: no request; if the keys are not known yet, it waits until they are found.
    """
    core = innermost(store)
    if not isinstance(core, S3Store):
        raise ConfigError(f"{type(core).__name__} has no presigned URLs; only S3 has")
    if core.options.sse_customer_key is not None:
        raise ConfigError("objects that are encrypted with a customer's key (SSE-C) cannot be read by a URL alone",
                          hint="every request must carry the key; read them with the store itself")  # fmt: skip
    endpoint = core.endpoint
    if not endpoint.bucket:
        raise ConfigError("a presigned URL names one object, and this store has no bucket")
    url = endpoint.base_url + encoded_key(endpoint.prefix + key)
    query = {
        name.lower(): value for name, value in (line.split(": ", 1) for line in core.options.headers())
    }  # S3 takes its own headers from the query, too
    if core.provider is None:
        return url + ("?" + "&".join(f"{name}={value}" for name, value in query.items()) if query else "")
    signing = core.signing(core.provider.now() or core.provider.resolve())
    return signing.presigned("GET", url, expires_s=expires_s, query=query)
