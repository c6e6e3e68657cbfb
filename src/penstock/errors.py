"""Every error that penstock raises, by whose fault it is.

::

    PenstockError
    ├── ConfigError            (ValueError)         the caller: a bad argument, URL, limit
    ├── ClosedError            (RuntimeError)       the caller: used after close, or inherited by a fork
    ├── WorkerDiedError        (RuntimeError)       a loader's worker process ended: killed, out of memory
    ├── StoreError             (OSError)            the store, or the way to it
    │   ├── ObjectMissingError (FileNotFoundError)  no such key
    │   │   └── BucketMissingError                  no such bucket
    │   │       └── DirectoryMissingError           no such directory, where a path takes a bucket's place
    │   ├── AccessDeniedError  (PermissionError)    the store knows who asks, and refuses
    │   │   └── CredentialsError                    wrong, expired or no credentials at all
    │   ├── ObjectChangedError                      another version appeared between two requests
    │   ├── ObjectExistsError  (FileExistsError)    a write that must create found an object
    │   ├── SpanError          (ValueError)         the range starts past the end
    │   ├── ThrottledError                          503 SlowDown, 429
    │   ├── UnavailableError   (ConnectionError)    5xx, refused, reset, DNS, TLS
    │   │   ├── ShortReadError                      the body ended before what its header promised
    │   │   └── DeadlineError  (TimeoutError)       connect, first byte, stall or total deadline
    │   ├── ChecksumError                           the bytes are not those whose checksum the store keeps
    │   ├── ProtocolError                           the answer is not S3 (or not what was asked)
    │   ├── ClosedStoreError   (ClosedError)        the store was closed while an operation waited; engine only
    │   └── CancelledOperationError                 cancelled by whoever submitted it; engine only
    └── DataError              (ValueError)         the bytes arrived; what is in them is wrong
        ├── CorruptShardError                       not a tar, TFRecord, ...; names shard and offset
        ├── UnsupportedFormatError                  valid, but penstock does not read it; never skipped
        ├── UncheckedError                          read, but nothing tells whether it is what was indexed
        ├── FieldMissingError  (KeyError)           a sample lacks a field that the pipeline asks for
        └── DecodeError                             a field does not decode; names stage, sample, shard

Each also inherits the builtin that people already catch. Fields are keyword-only with defaults, so errors pickle.
No message, field or repr holds a credential or a signed URL: the base class passes what it is given through
``penstock.redaction``, so code that raises an error may quote a URL as it is.
"""

from __future__ import annotations

import errno
import logging
from typing import Any, ClassVar

from penstock.redaction import printable, public_text, public_url

__all__ = [
    "AccessDeniedError",
    "BucketMissingError",
    "ChecksumError",
    "ClosedError",
    "ConfigError",
    "CorruptShardError",
    "CredentialsError",
    "DataError",
    "DeadlineError",
    "DecodeError",
    "DirectoryMissingError",
    "FieldMissingError",
    "ObjectChangedError",
    "ObjectExistsError",
    "ObjectMissingError",
    "PenstockError",
    "ProtocolError",
    "ShortReadError",
    "SpanError",
    "StoreError",
    "ThrottledError",
    "UnavailableError",
    "UncheckedError",
    "UnsupportedFormatError",
    "WorkerDiedError",
]


_SHOWN = {
    "what": public_text,
    "hint": public_text,
    "url": public_url,
    "shard": public_url,
    "sample_key": public_url,
    "user_traceback": public_text,
}
"""Attributes that may quote a URL, and how each is made safe to show."""


class PenstockError(Exception):
    """Base of all errors of this package.

    Args:
        what: What happened, the value and the bound, in one line.
        hint: What the reader can do about it.
        **fields: The class's own fields (see ``FIELDS``); unknown names are a ``TypeError``.
    """

    FIELDS: ClassVar[tuple[str, ...]] = ()

    def __init__(self, what: str = "", *, hint: str | None = None, **fields: Any) -> None:
        self.what = what
        super().__init__(self.what)
        self.hint = hint
        if unknown := set(fields) - set(self.FIELDS):
            raise TypeError(f"{type(self).__name__} has no field {sorted(unknown)}")
        for name in self.FIELDS:
            setattr(self, name, fields.get(name))

    def __setattr__(self, name: str, value: object) -> None:
        shown = _SHOWN.get(name)
        super().__setattr__(name, shown(value) if shown is not None and isinstance(value, str) else value)

    def _context(self) -> str:
        return self.what

    def __str__(self) -> str:
        text = self._context()
        return printable(f"{text}. Hint: {self.hint}" if self.hint else text, lines=True)

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {name: getattr(self, name) for name in self.FIELDS}
        return _rebuild, (type(self), self.what, {"hint": self.hint, **fields})


def _rebuild(kind: type[PenstockError], what: str, fields: dict[str, Any]) -> PenstockError:
    return kind(what, **fields)


class ConfigError(PenstockError, ValueError):
    """The caller asked for what cannot be: the message names the value and the bound."""


class ClosedError(PenstockError, RuntimeError):
    """Used after ``close()``, or inherited through ``fork`` from a process whose engine it belonged to."""


class WorkerDiedError(PenstockError, RuntimeError):
    """A worker process of a ``Loader`` ended before its work did, by a signal or by itself.

    Attributes:
        worker: Its number, from 0.
        process_id: Of the process that ended.
        exit_code: Its exit status; the negative number of the signal that killed it.
    """

    FIELDS = ("worker", "process_id", "exit_code")
    worker: int | None
    process_id: int | None
    exit_code: int | None


class StoreError(PenstockError, OSError):
    """The store, or the way to it, failed.

    Attributes:
        operation: What was asked: ``GET``, ``LIST``, ``PUT``...
        url: Of the object or prefix, without query and credentials.
        span: ``(start, end)`` in bytes, half-open, where a range was asked.
        status: The HTTP status, where there was one.
        code: The store's own word, e.g. ``NoSuchKey``.
        request_id: The store's name for the request, for its operators.
        request_index: Position of the request in the input of ``read_many`` and its kin; None elsewhere.
        attempts_count: Attempts made, the first included.
        elapsed_s: Seconds from submission to this error.
        retryable: Whether the same request may succeed later; ``Retrying`` goes by it.
        retry_after_s: Seconds the store asked to wait.
    """

    FIELDS = (
        "operation",
        "url",
        "span",
        "status",
        "code",
        "request_id",
        "request_index",
        "attempts_count",
        "elapsed_s",
        "retryable",
        "retry_after_s",
    )
    operation: str | None
    url: str | None
    span: tuple[int, int] | None
    status: int | None
    code: str | None
    request_id: str | None
    request_index: int | None
    attempts_count: int | None
    elapsed_s: float | None
    retryable: bool | None
    retry_after_s: float | None
    HINT: ClassVar[str | None] = None
    RETRYABLE: ClassVar[bool] = False
    ERRNO: ClassVar[int] = errno.EIO

    def __init__(self, what: str = "", *, hint: str | None = None, **fields: Any) -> None:
        super().__init__(what, hint=hint or self.HINT, **fields)
        if self.retryable is None:
            self.retryable = self.RETRYABLE
        self.errno = self.ERRNO

    def _context(self) -> str:
        head = " ".join(part for part in (self.operation, self.url) if part)
        if self.span is not None:
            head += f" bytes [{self.span[0]}, {self.span[1]})"
        facts = []
        if self.status is not None or self.code:
            facts.append(" ".join(str(part) for part in (self.status, self.code) if part))
        if self.attempts_count:
            plural = "" if self.attempts_count == 1 else "s"
            facts.append(
                f"{self.attempts_count} attempt{plural}" + (f" in {self.elapsed_s:.2f} s" if self.elapsed_s else "")
            )
        if self.request_id:
            facts.append(f"request id {self.request_id}")
        text = f"{head}: {self.what}" if head else self.what
        return f"{text} ({', '.join(facts)})" if facts else text


class ObjectMissingError(StoreError, FileNotFoundError):
    """No object has this key."""

    HINT = "check the key: list its prefix"
    ERRNO = errno.ENOENT


class BucketMissingError(ObjectMissingError):
    """No bucket has this name at this endpoint."""

    HINT = "check the bucket's name and the endpoint"


class DirectoryMissingError(BucketMissingError):
    """There is no such directory: what a bucket is to S3, the directory is to a path."""

    HINT = "check the path"


class AccessDeniedError(StoreError, PermissionError):
    """The store refuses this to whoever asks."""

    HINT = "check what this user, or these keys, may do"
    ERRNO = errno.EACCES


class CredentialsError(AccessDeniedError):
    """The credentials are wrong, expired, or there are none."""

    HINT = "check access key, secret key and region"


class ObjectChangedError(StoreError):
    """Another version of the object appeared while it was being read; nothing was mixed."""

    HINT = "somebody writes this object while it is read; read it again for the new version"
    ERRNO = errno.ESTALE


class ObjectExistsError(StoreError, FileExistsError):
    """A write that must create an object found one."""

    HINT = 'choose another key; without if_absent (by mode "wb") a write replaces the object'
    ERRNO = errno.EEXIST


class SpanError(StoreError, ValueError):
    """The range starts at or past the end of the object."""

    HINT = "stat() tells the object's size"
    ERRNO = errno.EINVAL


class ThrottledError(StoreError):
    """The store asks to slow down (503 SlowDown, 429)."""

    HINT = "fewer requests at once (FetchConfig(requests_max=...)), or more patience (RetryConfig)"
    RETRYABLE = True
    ERRNO = errno.EBUSY


class UnavailableError(StoreError, ConnectionError):
    """The store cannot be reached, or failed on its side (5xx)."""

    HINT = "the trouble is the store's, or on the way to it; see the store's logs for the request id"
    RETRYABLE = True


class ShortReadError(UnavailableError):
    """A body ended before the length that its header promised."""


class DeadlineError(UnavailableError, TimeoutError):
    """A deadline passed: connect, first byte, stall or total."""

    HINT = "the limits are TransportConfig's"
    ERRNO = errno.ETIMEDOUT


class ChecksumError(StoreError):
    """The bytes do not have the checksum that the store keeps for them."""

    HINT = "read it again; if it stays, the object or the way to it is damaged"
    RETRYABLE = True


class ProtocolError(StoreError):
    """The answer is not S3's, or not the answer to what was asked."""


class ClosedStoreError(StoreError, ClosedError):
    """The store was closed before an operation began: what the operation ends with. Users see and catch ``ClosedError``."""


class CancelledOperationError(StoreError):
    """The operation was cancelled by whoever submitted it; inside the engine only, no user sees it."""


DEFECT_HINT = "this should not happen; the log of 'penstock' has the traceback, please report it"


def as_completion_error(error: Exception) -> StoreError:
    """What an operation ends with when a store refused to take it with `error`: a ``ClosedError`` stays one.

    An exception that is not from this module is a defect: its traceback is logged, and the operation's error names it.
    """
    if isinstance(error, StoreError):
        return error
    if not isinstance(error, PenstockError):
        logging.getLogger("penstock").error("A callback failed, which ends its operation.", exc_info=error)
        failure = StoreError(f"a callback failed: {type(error).__name__}: {error}", hint=DEFECT_HINT, retryable=False)
        failure.__cause__ = error
        return failure
    kind = ClosedStoreError if isinstance(error, ClosedError) else StoreError
    return kind(error.what, hint=error.hint, retryable=False)


class DataError(PenstockError, ValueError):
    """The bytes arrived as stored; what is in them is wrong.

    Attributes:
        shard: URL or key of the shard.
        offset_bytes: Where in the shard.
        sample_key: ``__key__`` of the sample, where there is one.
        field: Name of the field.
        stage: Stage of the pipeline, e.g. ``decode`` or ``map[1]``.
        user_traceback: Where a function of the user's failed: its frames as Python prints them; not part of the message.
    """

    FIELDS = ("shard", "offset_bytes", "sample_key", "field", "stage", "user_traceback")
    shard: str | None
    offset_bytes: int | None
    sample_key: str | None
    field: str | None
    stage: str | None
    user_traceback: str | None

    def _context(self) -> str:
        names = [name for name in self.FIELDS if name != "user_traceback"]
        facts = [f"{name} {value!r}" for name in names if (value := getattr(self, name)) is not None]
        return f"{self.what} ({', '.join(facts)})" if facts else self.what


class CorruptShardError(DataError):
    """The shard is not of its format, from the given offset on."""


class UnsupportedFormatError(DataError):
    """The data is valid, but of a kind that penstock does not read, e.g. an encrypted zip member.

    It is never skipped, whatever ``on_corrupt=`` says: nothing is damaged, and skipping would lose good samples silently.
    """


class UncheckedError(DataError):
    """A shard was read and looks right, but there are no checksums that its contents could be compared with."""


class FieldMissingError(DataError, KeyError):
    """A sample lacks a field that the pipeline asks for."""


class DecodeError(DataError):
    """A field's bytes do not decode, or user code failed on a sample."""


WIRE: dict[type[PenstockError], tuple[int, int]] = {
    ConfigError: (errno.EINVAL, 400),
    ClosedError: (errno.EBADF, 503),
    WorkerDiedError: (errno.EIO, 500),
    StoreError: (errno.EIO, 502),
    ObjectMissingError: (errno.ENOENT, 404),
    BucketMissingError: (errno.ENOENT, 404),
    DirectoryMissingError: (errno.ENOENT, 404),
    AccessDeniedError: (errno.EACCES, 403),
    CredentialsError: (errno.EACCES, 403),
    ObjectChangedError: (errno.ESTALE, 412),
    ObjectExistsError: (errno.EEXIST, 412),
    SpanError: (errno.EINVAL, 416),
    ThrottledError: (errno.EBUSY, 503),
    UnavailableError: (errno.EIO, 503),
    ShortReadError: (errno.EIO, 502),
    DeadlineError: (errno.ETIMEDOUT, 504),
    ChecksumError: (errno.EIO, 502),
    ProtocolError: (errno.EIO, 502),
    ClosedStoreError: (errno.EIO, 500),
    CancelledOperationError: (errno.ECANCELED, 499),
    DataError: (errno.EIO, 500),
    CorruptShardError: (errno.EIO, 500),
    UnsupportedFormatError: (errno.EOPNOTSUPP, 501),
    UncheckedError: (errno.EIO, 500),
    FieldMissingError: (errno.EIO, 500),
    DecodeError: (errno.EIO, 500),
    PenstockError: (errno.EIO, 500),
}
"""Every class's errno (mount, files) and HTTP status (gateway). A test demands a row for each class."""
