"""The event loop: HTTP requests in, answers out. README.md in this folder says what is where."""

from penstock.transport.engine import engine
from penstock.transport.http import (
    CANCELLED,
    CLOSED,
    DEFECT,
    DESCRIPTORS_HINT,
    LATE_BODY,
    LATE_FIRST_BYTE,
    LATE_TOTAL,
    OVERLONG,
    HttpAnswer,
    HttpRequest,
    HttpSink,
    HttpTransfer,
)
from penstock.transport.signing import (
    EMPTY_SHA256,
    EXPIRES_S_MAX,
    UNSIGNED_PAYLOAD,
    Signing,
    presigned_url,
    signing_key,
)

__all__ = [
    "CANCELLED",
    "CLOSED",
    "DEFECT",
    "DESCRIPTORS_HINT",
    "EMPTY_SHA256",
    "EXPIRES_S_MAX",
    "LATE_BODY",
    "LATE_FIRST_BYTE",
    "LATE_TOTAL",
    "OVERLONG",
    "UNSIGNED_PAYLOAD",
    "HttpAnswer",
    "HttpRequest",
    "HttpSink",
    "HttpTransfer",
    "Signing",
    "engine",
    "presigned_url",
    "signing_key",
]
