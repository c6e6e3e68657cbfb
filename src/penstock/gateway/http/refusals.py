"""Every error that a bucket may raise, in S3's terms."""

from __future__ import annotations

from penstock.errors import (
    WIRE,
    AccessDeniedError,
    BucketMissingError,
    CancelledOperationError,
    ConfigError,
    DeadlineError,
    ObjectChangedError,
    ObjectExistsError,
    ObjectMissingError,
    PenstockError,
    SpanError,
    ThrottledError,
    UnavailableError,
    UnsupportedFormatError,
)
from penstock.gateway.objects import S3Error

_CODES: tuple[tuple[type[PenstockError], str, str], ...] = (
    (BucketMissingError, "NoSuchBucket", "The specified bucket does not exist"),
    (ObjectMissingError, "NoSuchKey", "The specified key does not exist."),
    (AccessDeniedError, "AccessDenied", "The gateway may not read this from its upstream."),
    (ObjectChangedError, "PreconditionFailed", "The object was replaced while it was being read."),
    (ObjectExistsError, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold."),
    (SpanError, "InvalidRange", "The requested range is not satisfiable"),
    (ThrottledError, "SlowDown", "Please reduce your request rate."),
    (DeadlineError, "GatewayTimeout", "The upstream did not answer in time."),
    (UnavailableError, "ServiceUnavailable", "The upstream is not available."),
    (UnsupportedFormatError, "NotImplemented", "The object is of a kind that cannot be read."),
    (ConfigError, "InvalidRequest", "The upstream cannot perform this request."),
)
"""Code and message of each class of error, subclasses first. The messages of the errors themselves may name hosts and paths."""


def as_s3_error(error: Exception, *, is_conditional: bool) -> S3Error:
    """Return an error in S3's terms. Its message names neither the upstream nor a path; the log has the original.

    Args:
        error: The error.
        is_conditional: Whether the request named a version. Otherwise its client, which did nothing wrong, gets a status
            with which AWS's clients try again, and reads the new version.
    """
    if isinstance(error, S3Error):
        return error
    if isinstance(error, ObjectChangedError) and not is_conditional:
        return S3Error("ServiceUnavailable", "The object was replaced while it was being read.", status=503)
    if isinstance(error, PenstockError):
        _, status = WIRE.get(type(error), WIRE[PenstockError])
        if isinstance(error, CancelledOperationError):
            status = 503
        for kind, code, message in _CODES:
            if isinstance(error, kind):
                return S3Error(code, message, status=status)
        return S3Error("InternalError", "The object could not be read; the gateway's log says why.", status=status)
    return S3Error("InternalError", "We encountered an internal error. Please try again.", status=500)
