"""All errors that penstock raises, grouped by who can fix the cause.

::

    PenstockError
    ├── ConfigError            (ValueError)         the caller: an invalid argument, URL or limit
    ├── ClosedError            (RuntimeError)       the caller: used after close(), or inherited by a fork
    ├── WorkerDiedError        (RuntimeError)       a worker process of a loader ended: killed, or out of memory
    │   └── ClusterLostError                        a loader's workers on a cluster have all ended, and no other starts
    ├── StoreError             (OSError)            the store, or the connection to it
    │   ├── ObjectMissingError (FileNotFoundError)  no such key
    │   │   └── BucketMissingError                  no such bucket
    │   │       └── DirectoryMissingError           no such directory; for paths, which have no bucket
    │   ├── AccessDeniedError  (PermissionError)    the store refuses this user
    │   │   └── CredentialsError                    the credentials are wrong, expired or missing
    │   ├── ObjectChangedError                      the object was replaced between two requests
    │   ├── ObjectExistsError  (FileExistsError)    a write with if_absent found an object
    │   ├── StoreFullError                          the bucket, its quota or the disk is full
    │   ├── SpanError          (ValueError)         the range starts at or past the end
    │   ├── ThrottledError                          503 SlowDown, 429
    │   ├── UnavailableError   (ConnectionError)    5xx, refused, reset, DNS, TLS
    │   │   ├── ShortReadError                      the body is shorter than its header says
    │   │   └── DeadlineError  (TimeoutError)       a time limit: connect, first byte, stall or total
    │   ├── ChecksumError                           the bytes do not match the store's checksum
    │   ├── ProtocolError                           the answer is not valid S3, or answers something else
    │   ├── ClosedStoreError   (ClosedError)        the store was closed while an operation waited; internal
    │   └── CancelledOperationError                 the caller cancelled the operation; internal
    └── DataError              (ValueError)         the bytes arrived, but their contents are wrong
        ├── CorruptShardError                       not a valid tar, TFRecord, ...; names shard and offset
        ├── CheckpointError                         a checkpoint is not whole, or is of another model; names the file
        ├── UnsupportedFormatError                  valid, but penstock cannot read it; never skipped
        ├── UncheckedError                          read, but there is no checksum to compare it with
        ├── FieldMissingError  (KeyError)           a sample lacks a field that the pipeline needs
        └── DecodeError                             a field cannot be decoded; names stage, sample, shard

Each class also inherits the builtin exception that users already catch. Fields are keyword-only and have defaults, so errors
can be pickled. No message, field or repr contains a credential or a signed URL: the base class passes its arguments through
``penstock.redaction``, so code that raises an error may quote any URL.
"""

from __future__ import annotations

import errno
import logging
from functools import partial
from typing import Any, ClassVar

from penstock.redaction import printable, public_text, public_url

__all__ = [
    "AccessDeniedError",
    "BucketMissingError",
    "CheckpointError",
    "ChecksumError",
    "ClosedError",
    "ClusterLostError",
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
    "StoreFullError",
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
"""Attributes that may contain a URL, and the function that makes each safe to show."""


class PenstockError(Exception):
    """Base class of all errors of this package.

    Args:
        what: Description of the error with the value and the bound, in one line.
        hint: Advice on how to fix it.
        **fields: The fields that the class lists in ``FIELDS``.

    Raises:
        TypeError: The class has no field of this name.
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

    def __repr__(self) -> str:
        """Return the class and all that ``str`` tells: many libraries report an error by its repr alone."""
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {name: getattr(self, name) for name in self.FIELDS}
        return partial(type(self), self.what, hint=self.hint, **fields), ()


class ConfigError(PenstockError, ValueError):
    """An argument is invalid; the message names the value and the bound."""


class ClosedError(PenstockError, RuntimeError):
    """An object was used after ``close()``, or was inherited through ``fork`` from the process that created it."""


class WorkerDiedError(PenstockError, RuntimeError):
    """A worker process of a ``Loader`` ended before its work was done: a signal killed it, or it exited.

    Attributes:
        worker: Number of the worker, from 0.
        process_id: Process id of the worker.
        exit_code: Exit status of the process, or the negative number of the signal that killed it.
    """

    FIELDS = ("worker", "process_id", "exit_code")
    worker: int | None
    process_id: int | None
    exit_code: int | None


class ClusterLostError(WorkerDiedError):
    """No worker of a ``Loader(workers=)`` is left on the cluster, and no other has started in time."""


class StoreError(PenstockError, OSError):
    """The store, or the connection to it, failed.

    Fields that do not apply are None.

    Attributes:
        operation: The operation that failed: ``GET``, ``LIST``, ``PUT``, ...
        url: URL of the object or prefix, without query and credentials.
        span: The requested range, ``(start, end)`` in bytes, half-open.
        status: HTTP status of the answer.
        code: The store's own code for the error, e.g. ``NoSuchKey``.
        request_id: The store's id of the request, for its operators.
        request_index: Position of the request in the input of ``read_many`` or a similar method, from 0.
        attempts_count: Number of attempts, including the first.
        elapsed_s: Time from submission to this error, in seconds.
        retryable: Whether the same request may succeed later; ``Retrying`` decides by it.
        retry_after_s: Time that the store asks to wait before the next attempt, in seconds.
    """

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
    FIELDS = tuple(__annotations__)
    HINT: ClassVar[str | None] = None
    RETRYABLE: ClassVar[bool] = False

    def __init__(self, what: str = "", *, hint: str | None = None, **fields: Any) -> None:
        super().__init__(what, hint=hint or self.HINT, **fields)
        if self.retryable is None:
            self.retryable = self.RETRYABLE
        self.errno = errno_of(self)

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


class BucketMissingError(ObjectMissingError):
    """No bucket has this name at this endpoint."""

    HINT = "check the bucket's name and the endpoint"


class DirectoryMissingError(BucketMissingError):
    """The directory of a store on paths does not exist. The directory takes the place of the bucket."""

    HINT = "check the path"


class AccessDeniedError(StoreError, PermissionError):
    """The store refuses the operation to this user."""

    HINT = "check the permissions of this user or of these keys"


class CredentialsError(AccessDeniedError):
    """The credentials are wrong, expired or missing."""

    HINT = "check the access key, the secret key and the region"


class ObjectChangedError(StoreError):
    """The object was replaced while it was being read. Bytes of different versions were not mixed."""

    HINT = "somebody replaced this object: open it again to read the new version; if it is indexed, run `penstock index` first"


class ObjectExistsError(StoreError, FileExistsError):
    """A write that must create an object found an existing one."""

    HINT = 'choose another key, or write without if_absent (mode "wb") to replace the object'


class StoreFullError(StoreError):
    """Nothing more can be written: the bucket's quota is used up, or the store or its disk is full."""

    HINT = "free some space there, or raise the quota"


class SpanError(StoreError, ValueError):
    """The range starts at or past the end of the object."""

    HINT = "stat() returns the size of the object"


class ThrottledError(StoreError):
    """The store asks to slow down (503 SlowDown, 429)."""

    HINT = "send fewer requests at once (FetchConfig(requests_max=...)), or retry for longer (RetryConfig)"
    RETRYABLE = True


class UnavailableError(StoreError, ConnectionError):
    """The store cannot be reached, or answered with a server error (5xx)."""

    is_unconnected = False  # whether there was no connection, so that the request cannot be what is wrong

    HINT = "the store or the network failed; look for the request id in the store's logs"
    RETRYABLE = True


class ShortReadError(UnavailableError):
    """A body ended before the length that its header announced."""


class DeadlineError(UnavailableError, TimeoutError):
    """A time limit was exceeded: connect, first byte, stall or total."""

    HINT = "TransportConfig sets the time limits"


class ChecksumError(StoreError):
    """The bytes do not match the checksum that the store keeps for them."""

    HINT = "read the object again; if the error persists, the object is damaged, or something on the way corrupts it"
    RETRYABLE = True


class ProtocolError(StoreError):
    """The answer is not a valid answer of S3, or does not answer the request."""


class ClosedStoreError(StoreError, ClosedError):
    """The store was closed before an operation began. The operation ends with this error; users catch ``ClosedError``."""


class CancelledOperationError(StoreError):
    """The code that submitted the operation cancelled it. Users do not see this error."""


DEFECT_HINT = "this is a bug in penstock: please report it with the traceback in the log of 'penstock'"


def as_completion_error(error: Exception) -> StoreError:
    """Return the error with which an operation ends after a store raised `error` instead of accepting it.

    A ``ClosedError`` becomes a ``ClosedStoreError``. An exception that this module does not define is a defect: its traceback
    is logged, and the operation's error names it.
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
    """The bytes arrived as they are stored, but their contents are wrong.

    Fields that do not apply are None.

    Attributes:
        shard: URL or key of the shard.
        offset_bytes: Position in the shard, in bytes.
        sample_key: ``__key__`` of the sample.
        field: Name of the field.
        stage: Stage of the pipeline, e.g. ``decode`` or ``map[1]``.
        user_traceback: Traceback of a user's function that failed, as Python prints it; not part of the message.
    """

    FIELDS: ClassVar[tuple[str, ...]] = ("shard", "offset_bytes", "sample_key", "field", "stage", "user_traceback")
    shard: str | None
    offset_bytes: int | None
    sample_key: str | None
    field: str | None
    stage: str | None
    user_traceback: str | None

    def _context(self) -> str:
        names = [name for name in DataError.FIELDS if name != "user_traceback"]
        facts = [f"{name} {value!r}" for name in names if (value := getattr(self, name)) is not None]
        return f"{self.what} ({', '.join(facts)})" if facts else self.what


class CorruptShardError(DataError):
    """From the given offset on, the shard does not follow its format."""


class CheckpointError(DataError):
    """A checkpoint cannot be used: it is unfinished, truncated, mixed, damaged, or of another model.

    Attributes:
        url: URL of the file that is wrong, or of the checkpoint's directory.
    """

    FIELDS = ("url", *DataError.FIELDS)
    url: str | None

    def _context(self) -> str:
        names = [name for name in DataError.FIELDS if name != "user_traceback"]
        facts = [f"{name} {value!r}" for name in names if (value := getattr(self, name)) is not None]
        text = f"{self.url}: {self.what}" if self.url else self.what
        return f"{text} ({', '.join(facts)})" if facts else text


class UnsupportedFormatError(DataError):
    """The data is valid, but of a kind that penstock cannot read, e.g. an encrypted zip member.

    It is never skipped, whatever ``on_corrupt=`` says: nothing is damaged, and skipping it would silently lose good samples.
    """


class UncheckedError(DataError):
    """A shard was read and looks right, but there are no checksums to compare its contents with."""


class FieldMissingError(DataError, KeyError):
    """A sample lacks a field that the pipeline needs."""


class DecodeError(DataError):
    """The bytes of a field cannot be decoded, or a user's function failed on a sample."""


WIRE: dict[type[PenstockError], tuple[int, int]] = {
    ConfigError: (errno.EINVAL, 400),
    ClosedError: (errno.EBADF, 503),
    WorkerDiedError: (errno.EIO, 500),
    ClusterLostError: (errno.EIO, 500),
    StoreError: (errno.EIO, 502),
    ObjectMissingError: (errno.ENOENT, 404),
    BucketMissingError: (errno.ENOENT, 404),
    DirectoryMissingError: (errno.ENOENT, 404),
    AccessDeniedError: (errno.EACCES, 403),
    CredentialsError: (errno.EACCES, 403),
    ObjectChangedError: (errno.ESTALE, 412),
    ObjectExistsError: (errno.EEXIST, 412),
    StoreFullError: (errno.ENOSPC, 507),
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
    CheckpointError: (errno.EIO, 500),
    UnsupportedFormatError: (errno.EOPNOTSUPP, 501),
    UncheckedError: (errno.EIO, 500),
    FieldMissingError: (errno.EIO, 500),
    DecodeError: (errno.EIO, 500),
    PenstockError: (errno.EIO, 500),
}
"""The errno of each class, for mounts and files, and its HTTP status, for gateways. A test requires a row for each class."""


def errno_of(error: BaseException) -> int:
    """Return the errno for an exception: that of the closest class in ``WIRE``, or ``EIO`` if it is none of this module's."""
    return next((WIRE[kind][0] for kind in type(error).__mro__ if kind in WIRE), errno.EIO)
