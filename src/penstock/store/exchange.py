"""One operation as one HTTP request: the common part of the S3 store and the plain HTTP store.

The head of an answer is compared with the request before any of its body is taken. The end of an exchange, with or without an
error, becomes a ``Completion``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from penstock.checksums.algorithms import full_object, verify
from penstock.errors import ClosedError, ObjectChangedError, ProtocolError, StoreError
from penstock.store.answers import (
    attempt_record,
    ignores_range,
    is_throttled,
    object_info,
    served_span,
    transport_error,
    unforeseen,
)
from penstock.store.base import Resent, Store, innermost
from penstock.transport import OVERLONG, engine
from penstock.types import UNKNOWN_BYTES, ByteRange, Completion, Get, GrowingLanding, Head, parse_size

if TYPE_CHECKING:
    from penstock.config import TransportConfig
    from penstock.transport import HttpAnswer, HttpRequest
    from penstock.types import Landing, Operation, Sink, Transfer

StoreT = TypeVar("StoreT", bound=Store)

_NO_CHECKSUMS: dict[str, str] = {}


class RemoteStore(Store):
    """A store whose operations are HTTP requests. Connections and threads belong to the process; closing ends its use."""

    keeps_headers = True
    _closed = False
    transport: TransportConfig

    @property
    @abstractmethod
    def address(self) -> str:
        """The URL with which all URLs of requests begin."""

    def close(self) -> None:
        """Refuse further operations; those in flight continue. Idempotent."""
        self._closed = True

    def check_open(self) -> None:
        """Refuse an operation if the store was closed.

        Raises:
            ClosedError: ``close()`` was called.
        """
        if self._closed:
            raise ClosedError(f"{self.describe('')} was closed", hint="connect() returns a new store")


def is_read_by_tls(store: Store) -> bool:
    """Whether what is read of a store arrives encrypted."""
    core = innermost(store)
    return isinstance(core, RemoteStore) and core.address.startswith("https:")


def plain_transport_of(store: Store) -> TransportConfig | None:
    """Return the configuration of a store's plain HTTP connections; None for a store that has none, or encrypts them."""
    core = innermost(store)
    return core.transport if isinstance(core, RemoteStore) and core.address.startswith("http:") else None


class Exchange(Resent, ABC, Generic[StoreT]):
    """An operation and its HTTP exchange: the transport's sink and the caller's transfer in one object.

    Args:
        store: The store.
        operation: The operation.
        sink: The caller's sink.
    """

    __slots__ = ("cancelled", "info", "operation", "sink", "span", "store", "transfers", "whole")

    def __init__(self, store: StoreT, operation: Operation, sink: Sink) -> None:
        self.store = store
        self.operation = operation
        self.sink = sink
        self.transfers: list[Transfer] = []
        self.cancelled = False
        self.info: Any = None  # ObjectInfo of a Get, once the head of its answer has arrived
        self.span: Any = None  # ByteRange of its body, likewise
        self.whole = False  # whether that is the whole object

    # ── Transfer ───────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, request: HttpRequest) -> None:
        """Submit a request to the transport, on any thread; it is cancelled at once if the operation already was."""
        transfer = engine.submit(request)
        self.transfers.append(transfer)
        if self.cancelled:
            transfer.cancel()

    # ── HttpSink ───────────────────────────────────────────────────────────────────────────────────────────────────

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> Landing | None:
        """Check the head of an answer, and ask the caller's sink where the body goes; see ``HttpSink.on_head``."""
        operation = self.operation
        if not isinstance(operation, Get):
            self.check_document(headers)
            return None
        self._learn(operation, status, headers)
        if self.span.length_bytes == 0:
            return None
        unknown = self.span.end == UNKNOWN_BYTES
        if unknown and operation.span is not None:  # the sink's landing is as long as the range; the body may be longer
            return GrowingLanding(self._check_length)
        landing: Landing | None = self.sink.head(self.info, self.span)
        return GrowingLanding(self._check_length) if unknown and landing is None else landing

    def _check_length(self, length_bytes: int) -> None:
        """Bound a body of unknown length for which the sink has no landing."""
        requested: ByteRange | None = self.operation.span  # type: ignore[union-attr]
        if requested is not None and length_bytes > requested.end:
            raise ignores_range(requested, f"{length_bytes} bytes or more")
        budget_bytes = self.store.budget.bytes_max
        if length_bytes > budget_bytes // 2:
            raise StoreError(
                f"a body of unknown length has {length_bytes} bytes or more, which is more than half of the budget of "
                f"{budget_bytes} bytes",
                hint="raise FetchConfig(budget_bytes_max=...)",
                retryable=False,
            )

    def _learn(self, operation: Get, status: int, headers: dict[bytes, bytes]) -> None:
        """Take in the head of a successful GET.

        Raises:
            ProtocolError: The answer does not match the request.
            ObjectChangedError: The answer describes another version.
        """
        size_bytes, self.span = served_span(status, headers, operation.span)
        self.whole = self.span.length_bytes == size_bytes
        checksums = full_object(headers) if status == 200 or self.whole else _NO_CHECKSUMS
        info = object_info(operation.key, headers, size_bytes, checksums)
        self.check_described(headers)
        pin = operation.if_match
        if pin is not None and info.etag is not None and info.etag != pin:  # some servers ignore If-Match
            raise ObjectChangedError(f"the object is now {info.etag}, not {pin}")
        self.info = info

    def on_end(self, answer: HttpAnswer) -> None:
        """Turn the end of the exchange into a completion; see ``HttpSink.on_end``."""
        completion = Completion(self.operation)
        try:
            if self.resend_if_corrected(answer):
                return
            self._fill(completion, answer)
        except Exception as error:
            explained = self._explained(error if isinstance(error, StoreError) else unforeseen(error), answer)
            # Its frames refer to the completion, and so would keep the landing until the collector finds the cycle.
            completion.error = explained.with_traceback(None)
        self.transfers.clear()
        try:
            failure = completion.error
            throttled = failure is not None and is_throttled(answer.status, failure.code)
            offset = self.span.start if self.span is not None else 0
            completion.attempts = (attempt_record(answer, offset, throttled=throttled),)
        finally:
            self.sink.done(completion)

    def _fill(self, completion: Completion, answer: HttpAnswer) -> None:
        operation = self.operation
        if isinstance(operation, Get):
            if self.info is None and 200 <= answer.status < 300 and not isinstance(answer.refused, StoreError):
                self._learn(operation, answer.status, answer.headers)
            completion.landing = answer.landing
            completion.info = self.info
            completion.span = self.span
        if isinstance(answer.refused, StoreError):
            raise answer.refused
        known = self.info is not None and self.info.size_bytes != UNKNOWN_BYTES
        shortened = answer.curl_error == OVERLONG and known
        if answer.curl_error != 0 and not shortened and not (answer.status >= 300 and answer.error_body):
            raise transport_error(answer)
        if not 200 <= answer.status < 300:
            raise self.refusal(answer)
        if isinstance(operation, Get):
            self._fill_get(completion, answer, shortened=shortened)
        elif isinstance(operation, Head):
            self.fill_head(completion, operation, answer.headers)
        else:
            self.fill_other(completion, answer)

    def _fill_get(self, completion: Completion, answer: HttpAnswer, *, shortened: bool) -> None:
        landing = answer.landing
        if shortened:
            assert landing is not None
            completion.span = self.span._replace(end=self.span.start + landing.length_bytes)
            return
        received = answer.received_bytes
        if self.span.end == UNKNOWN_BYTES:  # the last chunk has arrived, so the length is known
            requested: ByteRange | None = self.operation.span  # type: ignore[union-attr]
            whole = ByteRange(0, received)
            self.span = completion.span = whole if requested is None else requested.within(received)
            self.info = completion.info = self.info._replace(size_bytes=received)
        if received != self.span.length_bytes:
            raise ProtocolError(f"the body has {received} of {self.span.length_bytes} bytes", retryable=True)
        if self.whole and self.info.checksums and landing is not None:
            try:
                completion.verified = verify(self.info.checksums, landing.view)
            except StoreError:
                landing.offset = landing.start
                raise

    def _explained(self, error: StoreError, answer: HttpAnswer) -> StoreError:
        request_id = answer.headers.get(b"x-amz-request-id")
        if request_id and error.request_id is None:
            error.request_id = request_id.decode("latin-1")
        if error.status is None and answer.status:
            error.status = answer.status
        error.elapsed_s = answer.queued_s + answer.total_s
        error.attempts_count = 1
        return self.with_context(error)

    # ── differences between the stores ─────────────────────────────────────────────────────────────────────────────

    def resend_if_corrected(self, answer: HttpAnswer) -> bool:
        """Send the request again if the answer says how it should have been sent, and return whether it was."""
        return False

    def check_document(self, headers: dict[bytes, bytes]) -> None:
        """Refuse the body of an answer to any operation but a ``Get``; raises ``ProtocolError``."""

    def check_described(self, headers: dict[bytes, bytes]) -> None:
        """Refuse an answer that cannot describe an object; raises ``ProtocolError``."""

    def fill_head(self, completion: Completion, operation: Head, headers: dict[bytes, bytes]) -> None:
        """Set the ``info`` of a ``Head``."""
        size_bytes = parse_size(headers.get(b"content-length", b""))
        if size_bytes is None:
            raise ProtocolError(
                "the answer to HEAD has no Content-Length, so the object's size is not known before it is read",
                hint="read it whole: with read(), read_parts() or penstock cat",
            )
        completion.info = object_info(operation.key, headers, size_bytes, full_object(headers))
        self.check_described(headers)

    def fill_other(self, completion: Completion, answer: HttpAnswer) -> None:
        """Set what other operations than ``Get`` and ``Head`` return, if the store has them."""

    @abstractmethod
    def refusal(self, answer: HttpAnswer) -> StoreError:
        """Return the error that an answer outside 2xx means."""

    @abstractmethod
    def with_context(self, error: StoreError) -> StoreError:
        """Return `error` with operation, URL and span."""
