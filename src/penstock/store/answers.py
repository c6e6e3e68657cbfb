"""Interprets HTTP answers: typed errors, ``ObjectInfo`` and spans, for the S3 store and the plain HTTP store."""

from __future__ import annotations

import errno
import os
import re
import time
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from penstock.errors import (
    DEFECT_HINT,
    AccessDeniedError,
    BucketMissingError,
    CancelledOperationError,
    ChecksumError,
    ClosedStoreError,
    CredentialsError,
    DeadlineError,
    ObjectChangedError,
    ObjectMissingError,
    ProtocolError,
    ShortReadError,
    SpanError,
    StoreError,
    StoreFullError,
    ThrottledError,
    UnavailableError,
)
from penstock.system.libcurl import pycurl
from penstock.transport import (
    CANCELLED,
    CLOSED,
    DEFECT,
    DESCRIPTORS_HINT,
    LATE_BODY,
    LATE_FIRST_BYTE,
    LATE_TOTAL,
    OVERLONG,
    HttpAnswer,
)
from penstock.types import UNKNOWN_BYTES, Attempt, ByteRange, Key, ObjectInfo, parse_size, strong_etag

if TYPE_CHECKING:
    from collections.abc import Mapping

THROTTLES = frozenset({"SlowDown", "ServiceUnavailable", "Throttling", "ThrottlingException", "RequestLimitExceeded",
                       "TooManyRequests", "BandwidthLimitExceeded"})  # fmt: skip
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken"})
_BAD_KEYS = frozenset({"InvalidAccessKeyId", "SignatureDoesNotMatch", "AuthorizationHeaderMalformed"})
_FULL = frozenset({"QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "InsufficientStorage"})
_TRANSIENT = frozenset({"InternalError", "RequestTimeout", "OperationAborted", "XMinioServerNotInitialized"})
_UPSTREAM_REFUSED = "UpstreamAccessDenied"
"""Code with which penstock's gateway says that its upstream refuses the gateway itself; trying again does not mend that."""

_WEIRD_SERVER_REPLY, _TOO_LARGE = 8, 100  # codes of libcurl that pycurl 7.49 does not name
_TLS_CODES = frozenset({pycurl.E_SSL_CONNECT_ERROR, pycurl.E_PEER_FAILED_VERIFICATION, pycurl.E_SSL_CACERT_BADFILE,
                        pycurl.E_SSL_CERTPROBLEM, pycurl.E_SSL_CIPHER, pycurl.E_SSL_ISSUER_ERROR})  # fmt: skip
_RANGES_IGNORED = "this server ignores Range; penstock cp and store.read(key) can read whole objects of it"
_NO_DESCRIPTORS = (os.strerror(errno.EMFILE), os.strerror(errno.ENFILE))
_CONNECTING = {
    pycurl.E_COULDNT_RESOLVE_HOST: (
        "name not found: ",
        "check the endpoint's host name, and that DNS works on this host",
    ),
    pycurl.E_COULDNT_RESOLVE_PROXY: ("name not found: ", "check HTTPS_PROXY, HTTP_PROXY and NO_PROXY"),
    pycurl.E_COULDNT_CONNECT: ("", "is the endpoint's address and port right, and is the server up?"),
    pycurl.E_OPERATION_TIMEDOUT: (
        "no connection was made in time: ",
        "are the endpoint's scheme, address and port right? A firewall may drop what is sent there, or a proxy be needed",
    ),
    pycurl.E_SSL_CONNECT_ERROR: (
        "TLS failed: ",
        "does the endpoint speak TLS on this port? If not, its URL begins with http://",
    ),
}
"""Failures to make a connection by their codes: how the message begins, and the hint."""
_PROXY_HINT = (
    "requests go by a proxy: check HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and NO_PROXY, or TransportConfig(proxy=...)"
)


_CONTENT_RANGE = re.compile(rb"bytes +([0-9]+)-([0-9]+)/([0-9]+)", re.IGNORECASE)


@lru_cache(maxsize=4096)
def http_date_s(text: bytes) -> float | None:
    """Return an HTTP date in seconds since the epoch; None if `text` is not a date."""
    try:
        return parsedate_to_datetime(text.decode("latin-1")).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


def object_info(key: Key, headers: Mapping[bytes, bytes], size_bytes: int, checksums: Mapping[str, str]) -> ObjectInfo:
    """Return the record of an object from the headers of the answer to a GET or HEAD."""
    etag = headers.get(b"etag")
    modified = headers.get(b"last-modified")
    return ObjectInfo(
        key,
        size_bytes,
        strong_etag(etag.decode("latin-1")) if etag is not None else None,
        http_date_s(modified) if modified is not None else None,
        False,
        checksums,
        headers,
    )


def served_span(status: int, headers: Mapping[bytes, bytes], requested: ByteRange | None) -> tuple[int, ByteRange]:
    """Return the object's size and the bytes that follow, from the head of a successful GET.

    Both are ``UNKNOWN_BYTES`` long if the whole object follows in chunks, because only the last chunk tells where it ends.

    Args:
        status: Status of the answer.
        headers: Headers of the answer, by lower-case name.
        requested: The range that was requested; None for the whole object.

    Raises:
        ProtocolError: The answer does not state its range, or does not provably hold the requested range.
        SpanError: The server ignores ranges, and the requested range starts past the object's end.
    """
    if status not in (200, 206):  # portals answer with 204, proxies that changed the body with 203
        raise ProtocolError(f"HTTP status {status} does not answer a GET", hint="is there a proxy in between?")
    length = headers.get(b"content-length", b"")
    coding = headers.get(b"transfer-encoding")
    if coding is not None and coding.lower() != b"chunked":
        raise ProtocolError(f"Transfer-Encoding {coding.decode('latin-1')!r} is not supported")
    if status == 206 or (requested is not None and b"content-range" in headers):  # rclone sends ranges with status 200
        span, total = _content_range(headers.get(b"content-range", b""))
        if (
            requested is None
            or span.start != requested.start
            or span.end > requested.end
            or (span.end < requested.end and span.end < total)
        ):
            shown = headers.get(b"content-range", b"").decode("latin-1")
            raise ProtocolError(f"requested {requested}, got Content-Range {shown!r}")
        if coding is None and length and parse_size(length) != span.length_bytes:
            raise ProtocolError(
                f"Content-Length {length.decode('latin-1')!r} contradicts a range of {span.length_bytes} bytes"
            )
        return total, span
    if coding is not None:
        total, size = UNKNOWN_BYTES, "unknown length"
    elif (stated := parse_size(length)) is not None:
        total, size = stated, f"{stated} bytes"
    else:
        raise ProtocolError(
            "the answer has neither Content-Length nor chunks, so nothing shows whether it is complete",
            hint="is this an S3 endpoint?",
        )
    if requested is not None and (requested.within(total).start != 0 or (coding is None and total > requested.end)):
        raise ignores_range(requested, size)
    return total, ByteRange(0, total)


def ignores_range(requested: ByteRange, size: str) -> ProtocolError:
    """Return the error for a whole object in answer to a range; `size` is the object's size in words."""
    return ProtocolError(
        f"requested {requested.length_bytes} bytes at {requested.start}, got the whole object of {size}",
        hint=_RANGES_IGNORED,
    )


def _content_range(text: bytes) -> tuple[ByteRange, int]:
    match = _CONTENT_RANGE.fullmatch(text)
    first, last, total = map(parse_size, match.groups()) if match is not None else (None, None, None)
    if first is None or last is None or total is None:
        raise ProtocolError(f"Content-Range {text.decode('latin-1')!r:.200} cannot be read")
    if not first <= last < total:
        raise ProtocolError(f"Content-Range {text.decode('latin-1')!r} contradicts itself")
    return ByteRange(first, last + 1), total


def unforeseen(error: Exception) -> StoreError:
    """Return the error for an unforeseen answer or a defect of penstock, so that the waiting operation ends."""
    failure = ProtocolError(
        f"the answer cannot be read: {type(error).__name__}: {error}",
        hint="this is a bug in penstock; please report it",
    )
    failure.__cause__ = error
    return failure


def transport_error(answer: HttpAnswer) -> StoreError:
    """Return the error that says why no complete answer arrived."""
    code, reason = answer.curl_error, answer.reason
    if "proxy syntax" in reason:  # libcurl quotes the URL that it cannot read
        reason = "the proxy's URL cannot be read"
    if code in (CLOSED, DEFECT):
        ended = ClosedStoreError(reason) if code == CLOSED else StoreError(reason, hint=DEFECT_HINT)
        ended.retryable = False
        return ended
    if code == CANCELLED:
        return CancelledOperationError("cancelled", retryable=False)
    if code in (LATE_FIRST_BYTE, LATE_BODY, LATE_TOTAL):
        return DeadlineError(reason)
    if code in (OVERLONG, pycurl.E_FILESIZE_EXCEEDED):
        return ProtocolError("the body is longer than the range that was requested", hint=_RANGES_IGNORED)
    if code in (pycurl.E_PARTIAL_FILE, pycurl.E_GOT_NOTHING) or (answer.status and code == pycurl.E_RECV_ERROR):
        what = f"the connection ended after {answer.received_bytes} bytes of body: {reason}"
        return ShortReadError(what)
    if code in _TLS_CODES and code != pycurl.E_SSL_CONNECT_ERROR:
        hint = "name the certificate authority in AWS_CA_BUNDLE or TransportConfig(ca_bundle=...)"
        return UnavailableError(f"TLS failed: {reason}", hint=hint, retryable=False)
    if code == pycurl.E_UNSUPPORTED_PROTOCOL and "HTTP/0.9" in reason:
        code = _WEIRD_SERVER_REPLY
    if code in (pycurl.E_URL_MALFORMAT, pycurl.E_UNSUPPORTED_PROTOCOL):
        return ProtocolError(f"not a URL that can be requested: {reason}", hint="check endpoint_url and bucket")
    if code in (_WEIRD_SERVER_REPLY, _TOO_LARGE):
        return ProtocolError(f"the answer is not HTTP: {reason}", retryable=True, hint="is this an S3 endpoint?")
    if any(words in reason for words in _NO_DESCRIPTORS):
        return UnavailableError(f"no connection: {reason}", hint=DESCRIPTORS_HINT)
    if code not in _CONNECTING:
        return UnavailableError(reason or f"libcurl error {code}")
    what, hint = _CONNECTING[code]
    kind = DeadlineError if code == pycurl.E_OPERATION_TIMEDOUT else UnavailableError
    error = kind(f"{what}{reason}", hint=_PROXY_HINT if "proxy" in reason else hint)
    error.is_unconnected = True
    return error


def is_throttled(status: int, code: str | None) -> bool:
    """Return whether an answer asks to slow down.

    Args:
        status: Status of the answer.
        code: Code in its error document; None if there is none.
    """
    return code in THROTTLES or status in (429, 503)


def status_error(  # noqa: C901 - a table
    status: int, headers: Mapping[bytes, bytes], code: str | None, message: str | None, *, is_signed: bool = True
) -> StoreError:
    """Return the error that an answer outside 2xx means.

    Args:
        status: Status of the answer.
        headers: Headers of the answer, by lower-case name.
        code: Code in the error document; None if there is none.
        message: Message in the error document; None if there is none.
        is_signed: Whether the request was signed with keys.
    """
    what = message or f"HTTP status {status}"
    fields: dict[str, Any] = {
        "status": status,
        "code": code,
        "retry_after_s": _retry_after_s(headers.get(b"retry-after", b"")),
    }
    if code in _EXPIRED:
        return CredentialsError(what, hint="the session's keys have expired; renew them", **fields)
    if code in _BAD_KEYS:
        return CredentialsError(what, **fields)
    if code == "RequestTimeTooSkewed":
        return AccessDeniedError(what, hint="this host's clock is wrong", **fields)
    if is_throttled(status, code):
        return ThrottledError(what, **fields)
    if status == 507 or code in _FULL:
        return StoreFullError(what, **fields)
    if code == "NoSuchBucket":
        return BucketMissingError(what, **fields)
    if code == "NoSuchUpload":
        return ObjectMissingError(what, hint="the upload was already completed or aborted; write it again", **fields)
    if code == _UPSTREAM_REFUSED:
        reason = "check the gateway's own credentials and bucket: its log says why, and so does /-/ready"
        return UnavailableError(what, hint=reason, retryable=False, **fields)
    if code in _TRANSIENT or status in (500, 502, 504, 408):
        return UnavailableError(what, **fields)
    if code in ("BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"):
        return ChecksumError(
            f"the store received different bytes from those that were sent: {what}",
            hint=UnavailableError.HINT,
            **fields,
        )
    if status == 404:
        hint = (
            None
            if message
            else "check the key, the bucket and the endpoint; the answer does not say which one is wrong"
        )
        return ObjectMissingError(what if message else "no such object", hint=hint, **fields)
    if status in (401, 403):
        denied = "these credentials (or the bucket's policy) do not allow it; without ListBucket a missing key looks the same"
        if not message:  # the answer to a HEAD has no body
            denied = "the keys are wrong, or they do not allow it; without ListBucket a missing key looks the same"
        if not is_signed:
            denied = "the request was anonymous, which suffices for public objects only; sign it with keys"
        return AccessDeniedError(what if message else "access denied", hint=denied, **fields)
    if status in (409, 412):
        changed = what if message else "the object is not the requested version"
        return ObjectChangedError(changed, **fields)
    if status == 416:
        return SpanError(what if message else "the range starts past the end of the object", **fields)
    if status == 501:
        return ProtocolError(f"the store does not implement this: {what}", hint="ask the store's operators", **fields)
    if status in (301, 302, 303, 307, 308):
        return ProtocolError(
            what, hint="redirects out of the endpoint's domain are not followed; check endpoint_url", **fields
        )
    hint = None if code else "is this an S3 endpoint? The answer is not an S3 error document"
    return ProtocolError(what, hint=hint, **fields)


def _retry_after_s(text: bytes) -> float | None:
    if not text:
        return None
    if text.isdigit():
        return float(text)
    date_s = http_date_s(text)
    return max(0.0, date_s - time.time()) if date_s is not None else None


def attempt_record(answer: HttpAnswer, offset_bytes: int, *, throttled: bool) -> Attempt:
    """Return the transport's timings as the record to which ``fetch`` adapts."""
    headers = answer.headers
    request_id = headers.get(b"x-amz-request-id") or headers.get(b"x-request-id")
    return Attempt(
        answer.start_s,
        answer.status,
        offset_bytes,
        answer.received_bytes,
        answer.queued_s,
        answer.connect_s,
        answer.first_byte_s,
        answer.total_s,
        throttled,
        request_id.decode("latin-1") if request_id else None,
        answer.resent,
    )
