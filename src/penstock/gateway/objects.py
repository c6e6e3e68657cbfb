"""The contracts between the parts of the gateway: requests, buckets, objects that are being read, transforms.

The HTTP front (``http/``) turns a request into a ``GatewayRequest``, finds the ``Bucket`` that it names, and sends the
object that the bucket returns. Buckets (``buckets/``) know nothing of HTTP connections. Transforms (``transforms/``,
``aws_lambda/``, ``webhooks/``) know neither buckets nor connections: they read a ``Source`` and write to a
``ResultWriter``, which ``results/`` implements.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol
from urllib.parse import unquote

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from penstock.types import Buffer, ByteRange, ListPage, ObjectInfo, Page


_ACCESS_POINT = re.compile(r"arn:[^:]*:s3(?:-object-lambda)?:[^:]*:[^:]*:accesspoint[/:]([^/]+)/object/(.+)", re.DOTALL)
_BAD_SOURCE = "Copy Source must mention the source bucket and key: sourcebucket/sourcekey"

_FORBIDDEN = ("AccessDenied", "AccessForbidden", "InvalidAccessKeyId", "RequestTimeTooSkewed", "SignatureDoesNotMatch")
_MISSING = ("LambdaARNNotFound", "NoSuchBucket", "NoSuchKey", "NoSuchUpload", "NoSuchVersion", "NoSuchWebhook")
_STATUSES = {  # the HTTP status of each code of an error; of all others it is 400
    **dict.fromkeys(_FORBIDDEN, 403),
    **dict.fromkeys(_MISSING, 404),
    "MethodNotAllowed": 405,
    **dict.fromkeys(("BucketAlreadyExists", "BucketAlreadyOwnedByYou", "BucketNotEmpty", "OperationAborted"), 409),
    "MissingContentLength": 411,
    "PreconditionFailed": 412,
    **dict.fromkeys(("InvalidPartNumber", "InvalidRange"), 416),
    **dict.fromkeys(("InternalError", "LambdaResponseNotReceived"), 500),
    "NotImplemented": 501,
    **dict.fromkeys(("ServiceUnavailable", "SlowDown", "TransformUnavailable"), 503),
    "RequestTimeout": 504,
    "InsufficientStorage": 507,
}


class S3Error(Exception):
    """A refusal, in S3's terms; the front sends it as an error document.

    Attributes:
        code: Code of the error, e.g. ``"NoSuchKey"``.
        message: One sentence for people. It contains no secret and no path of this host.
        status: HTTP status; if it is not given, that of the code.
        headers: Further headers of the answer.
        details: Further elements of the error document, e.g. ``{"ActualObjectSize": "12"}``.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        status: int | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.status = _STATUSES.get(code, 400) if status is None else status
        self.headers = dict(headers or {})
        self.details = dict(details or {})


def invalid_argument(name: str, message: str, value: str = "") -> S3Error:
    """Return the error of an argument that is not valid."""
    details = {"ArgumentName": name, "ArgumentValue": value[:1024]}
    return S3Error("InvalidArgument", message, details=details)


def number_in(query: Mapping[str, str], name: str, *, default: int, most: int) -> int:
    """Return a number of a query or of headers, at most `most`.

    Raises:
        S3Error: It is not a number from 0 to 2^31 - 1.
    """
    text = query.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) < 1 << 31):
        raise invalid_argument(name, f"Provided {name} not an integer or within integer range", text)
    return min(int(text), most)


def not_implemented(what: str) -> S3Error:
    """Return the error of something that this gateway does not do."""
    message = f"A header or operation you provided implies functionality that is not implemented: {what}."
    return S3Error("NotImplemented", message)


def version_missing(version: str) -> S3Error:
    """Return the error of a version that does not exist; only ``null`` does."""
    return S3Error("NoSuchVersion", "The specified version does not exist.", details={"VersionId": version[:1024]})


def access_denied(message: str = "Access Denied") -> S3Error:
    """Return the error of a caller who may not do this."""
    return S3Error("AccessDenied", message)


SUB_RESOURCES = frozenset(
    {
        "accelerate",
        "acl",
        "analytics",
        "attributes",
        "cors",
        "delete",
        "encryption",
        "intelligent-tiering",
        "inventory",
        "legal-hold",
        "lifecycle",
        "logging",
        "metadataConfiguration",
        "metadataTable",
        "metrics",
        "notification",
        "object-lock",
        "ownershipControls",
        "policy",
        "policyStatus",
        "publicAccessBlock",
        "replication",
        "requestPayment",
        "restore",
        "retention",
        "select",
        "tagging",
        "torrent",
        "uploadId",
        "uploads",
        "versioning",
        "versions",
        "website",
    }
)
"""Names in a query that make a request one for ``Bucket.perform``, and not for the object, the listing or the bucket itself."""


class Caller(NamedTuple):
    """The sender of a request, after its signature was verified.

    Attributes:
        access_key: ID of the access key; empty if the request is anonymous.
        may_write: Whether the key may change objects.
    """

    access_key: str
    may_write: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayRequest:
    """A request whose signature was verified.

    Attributes:
        method: HTTP method in capital letters.
        bucket: Name of the bucket or access point that is addressed; empty for the service itself.
        key: Key, percent-decoded; empty if the bucket itself is addressed.
        query: Parameters of the query, percent-decoded, without those that sign it. A sub-resource such as ``?uploads`` has
            the value ``""``.
        headers: Headers as they were sent; looking one up ignores case. Repeated headers are joined with commas.
        caller: The sender of the request.
        url: URL without the parameters that sign it, e.g. ``http://127.0.0.1:9000/bucket/key?x=1``.
        remote: Address of the client.
        request_id: ID of the request, which the answer and the log carry.
    """

    method: str
    bucket: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    caller: Caller
    url: str
    remote: str
    request_id: str


class CopySource(NamedTuple):
    """The object that ``x-amz-copy-source`` names.

    Attributes:
        bucket: Name of a bucket or access point.
        key: Key in it.
    """

    bucket: str
    key: str


def copy_source(headers: Mapping[str, str]) -> CopySource:
    """Return the source of a copy.

    The front, which checks whether the caller may use the source's bucket, and the buckets, which read it, both ask here. If
    each had its own reading of the header, a caller could name one bucket to the first and another one to the second.

    Raises:
        S3Error: The header names no object, or a version other than the current one.
    """
    text, mark, version = headers["x-amz-copy-source"].partition("?versionId=")
    if mark and version not in ("", "null"):
        raise version_missing(version)
    try:
        text = unquote(text, errors="strict").removeprefix("/")
    except UnicodeDecodeError as error:
        raise invalid_argument("x-amz-copy-source", _BAD_SOURCE) from error
    point = _ACCESS_POINT.fullmatch(text)
    bucket, _, key = (point[1], "/", point[2]) if point else text.partition("/")
    if not bucket or not key:
        raise invalid_argument("x-amz-copy-source", _BAD_SOURCE)
    return CopySource(bucket, key)


class RequestHead(NamedTuple):
    """A request as it was sent, whose signature has not been verified yet.

    Attributes:
        method: HTTP method in capital letters.
        raw_path: Path as it was sent, percent-encoded, without the query, e.g. ``/bucket/a%20b``.
        raw_query: Query as it was sent, without the question mark; empty if there is none.
        headers: Headers; looking one up ignores case. Repeated headers are joined with commas.
        host_bucket: Bucket that the host name names; empty if the path names it.
    """

    method: str
    raw_path: str
    raw_query: str
    headers: Mapping[str, str]
    host_bucket: str = ""


class VerifiedRequest(NamedTuple):
    """A request whose signature is right: who sent it, and how its body is read.

    Attributes:
        caller: The sender of the request.
        open_body: Makes the decoded and verified body of the bytes that arrive. The front calls it only if somebody reads the
            body, and at most once. The argument yields the body without the transfer coding of HTTP.
    """

    caller: Caller
    open_body: Callable[[AsyncIterator[bytes]], RequestBody]


class Authenticator(Protocol):
    """Decides who sent a request. It is pure: it reads no socket and waits for nothing."""

    def verify(self, head: RequestHead) -> VerifiedRequest:
        """Verify the signature of a request, in its headers or its query.

        Raises:
            S3Error: The signature is missing, wrong, expired or of an unknown key.
        """

    def may_use(self, caller: Caller, bucket: str) -> bool:
        """Return whether a caller may use a bucket or access point.

        The front calls this before it looks the bucket up, and also for the bucket that ``x-amz-copy-source`` names. A list of
        buckets leaves out those that the caller may not use.
        """


class RequestBody(Protocol):
    """The body of a request, decoded and verified: chunk signatures, ``x-amz-content-sha256``, checksums, ``Content-MD5``."""

    @property
    def length_bytes(self) -> int | None:
        """Length of the decoded body; None if the client did not send it."""

    @property
    def checksums(self) -> Mapping[str, str]:
        """Checksums that the client sent in headers or trailers and that the body matched.

        Base64 by algorithm, such as ``{"crc32c": "yZRlqg=="}``. Complete when the iteration has ended.
        """

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Iterate over the body. Raises ``S3Error`` if it is damaged, too long, too slow or cut off."""


class Answer(NamedTuple):
    """A complete answer to anything but reading an object.

    Attributes:
        status: HTTP status.
        headers: Headers, without Content-Length, Date, Server and the request's ID.
        body: Body; XML if `headers` name no other type.
    """

    status: int = 200
    headers: Mapping[str, str] = {}
    body: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectHead:
    """The description of an object, which is known before its bytes are read.

    Attributes:
        key: Key of the object, as the client names it.
        size_bytes: Size in bytes; None if it is known only when the object has been produced to its end.
        etag: ETag with its quotes.
        last_modified_s: Time of the last change, in seconds since 1970.
        headers: Further headers of the object with the names that are sent: ``Content-Type``, ``Cache-Control``,
            ``x-amz-meta-...``, ``x-amz-checksum-...``.
        part_sizes_bytes: Sizes of the parts of a multipart upload, for ``partNumber``; empty if it was not one, or they are
            not known.
        part_checksums: Checksums of the parts in base64, of the algorithm of which `headers` have the object's checksum; empty
            if they are not known.
    """

    key: str
    size_bytes: int | None
    etag: str
    last_modified_s: float
    headers: Mapping[str, str] = field(default_factory=dict)
    part_sizes_bytes: tuple[int, ...] = ()
    part_checksums: tuple[str, ...] = ()


class OpenObject(Protocol):
    """One version of an object that is being read. All its methods run on the event loop.

    Opening a result starts no transform: that happens when its size or its first byte is requested, so conditions on the
    ETag are answered without it.

    Attributes:
        head: Attributes of the object. Its key, ETag and time never change. ``wait_size_bytes`` and the first piece of
            ``read`` may replace it by one that knows more (size, headers), so an answer's head is made after the first piece.
    """

    head: ObjectHead

    async def wait_size_bytes(self) -> int:
        """Return the object's size in bytes; if the object is being produced, wait for its end."""

    def read(self, span: ByteRange | None) -> AsyncIterator[Buffer]:
        """Iterate over the bytes of a range; None reads to the end of the object.

        A piece is valid until the next one is requested. An error after the first piece means that the client's connection
        must be broken off.

        Raises:
            S3Error: The bytes cannot be read.
            PenstockError: The bytes cannot be read; the front turns the error into an ``S3Error`` (``http/exchanges.py``).
        """

    async def close(self) -> None:
        """End reading; idempotent."""


class Bucket(Protocol):
    """One bucket or access point, which answers the requests for it.

    All methods run on the event loop, and may raise ``S3Error`` or ``PenstockError``.

    Attributes:
        name: Name of the bucket.
        created_s: When it was created, in seconds since 1970; 0 if that is not known.
    """

    name: str
    created_s: float

    async def head(self, request: GatewayRequest) -> ObjectHead:
        """Describe the object of ``request.key``, always with its size; a result may have to be produced for that."""

    async def open(self, request: GatewayRequest, hint: ByteRange | None) -> OpenObject:
        """Begin to read the object of ``request.key``.

        Args:
            request: The request. The front evaluates its conditions and its range; a bucket may look at its other headers
                and its query.
            hint: Range that the client will probably want, so that it can be requested at once; None for the whole object.
        """

    async def list_objects(self, request: GatewayRequest, operation: ListPage) -> Page | Answer:
        """Return one page of the listing; an ``Answer`` is sent as it is."""

    async def perform(self, request: GatewayRequest, body: RequestBody) -> Answer:
        """Perform any other operation: writing, deleting, sub-resources. Raises ``S3Error`` if the bucket is read-only."""

    async def close(self) -> None:
        """Release the resources of the bucket; idempotent."""


class BucketWrapper:
    """A bucket around another bucket, which performs all operations that a subclass does not; implements ``Bucket``.

    Args:
        inner: The other bucket; it is closed with this one.
    """

    def __init__(self, inner: Bucket) -> None:
        self.name = inner.name
        self.created_s = inner.created_s
        self._inner = inner

    async def head(self, request: GatewayRequest) -> ObjectHead:
        """Describe an object; see ``Bucket.head``."""
        return await self._inner.head(request)

    async def open(self, request: GatewayRequest, hint: ByteRange | None) -> OpenObject:
        """Begin to read an object; see ``Bucket.open``."""
        return await self._inner.open(request, hint)

    async def list_objects(self, request: GatewayRequest, operation: ListPage) -> Page | Answer:
        """Return one page of the listing; see ``Bucket.list_objects``."""
        return await self._inner.list_objects(request, operation)

    async def perform(self, request: GatewayRequest, body: RequestBody) -> Answer:
        """Perform any other operation; see ``Bucket.perform``."""
        return await self._inner.perform(request, body)

    async def close(self) -> None:
        """Close the inner bucket; idempotent."""
        await self._inner.close()


class CachedObject(OpenObject, Protocol):
    """An object that was opened without waiting for anything; its bytes are in memory, or will be read when they are wanted.

    Attributes:
        span: Range of the bytes in memory; None if there are none.
        body: The bytes: uint8[span], read-only; None if they must be read.
    """

    span: ByteRange | None
    body: memoryview | None


class CachedBucket(Bucket, Protocol):
    """A bucket that may know objects, and have their bytes in memory. Its ``open`` is ``open_nowait``, else ``fetch``."""

    def open_nowait(self, key: str, within: Callable[[int], ByteRange] | None = None) -> CachedObject | None:
        """Open an object if that needs neither the store nor the disk nor another thread; None if it does.

        Args:
            key: Key of the object.
            within: Returns the range that is wanted of an object of a size in bytes; None for all of it.
        """

    async def fetch(self, request: GatewayRequest, hint: ByteRange | None) -> OpenObject:
        """Open an object that ``open_nowait`` does not open; otherwise as ``Bucket.open``."""


class BucketTable(Protocol):
    """The buckets and access points of a gateway. All methods run on the event loop.

    Each raises ``S3Error`` with the code ``AccessDenied`` if the caller's key is not allowed to use the bucket.
    """

    async def get(self, name: str, caller: Caller) -> Bucket | None:
        """Return the bucket or access point of a name; None if there is none."""

    def get_nowait(self, name: str) -> CachedBucket | None:
        """Return the bucket that ``get`` would return if it knows objects; None if it does not, or if only ``get`` can tell."""

    async def names(self, caller: Caller) -> list[Bucket]:
        """Return the buckets that the caller may use, in the order of the names."""

    async def create(self, name: str, caller: Caller, *, region: str) -> None:
        """Create a bucket, in a region unless that is empty.

        Raises:
            S3Error: It exists, or this gateway cannot create buckets.
        """

    async def delete(self, name: str, caller: Caller) -> None:
        """Remove an empty bucket. Raises ``S3Error`` if it is not empty, or if this gateway cannot remove buckets."""


# ── transforms ──────────────────────────────────────────────────────────────────────────────────────────────────────


class SourceLinks(Protocol):
    """Gives other processes access to objects of a source bucket. ``serving/`` passes one to each bucket with a transform."""

    def worker_url(self, key: str, head: ObjectHead) -> tuple[str, str]:
        """Return the result of ``Source.worker_url`` for the object of `key`."""

    def signed_url(self, key: str, head: ObjectHead, headers: Mapping[str, str]) -> str:
        """Return what ``Source.signed_url`` returns for the object of `key`."""


class Source(Protocol):
    """The untransformed object that a transform reads.

    Attributes:
        key: Key in the source bucket.
        head: Version, size and headers of the object.
    """

    key: str
    head: ObjectHead

    def worker_url(self) -> tuple[str, str]:
        """Return a URL for ``penstock.connect``, and the key in it, by which another process of this user reads the object.

        The other process needs no credentials: it gets the path of a directory, or a URL that the upstream's keys have
        signed for a limited time. The ETag that it sees there is the one in `head`: if the upstream has no ETags, it reads
        at the gateway's own endpoint.
        """

    def signed_url(self, headers: Mapping[str, str]) -> str:
        """Return a URL at the gateway's own endpoint for a handler that reads with any HTTP client.

        Args:
            headers: Headers of the caller's request that the URL must sign.
        """

    def read(self, span: ByteRange | None = None) -> AsyncIterator[Buffer]:
        """Iterate over the object's bytes, all of the version in `head`."""


class ResultWriter(Protocol):
    """Where a transform writes its output. It is bounded, and its bytes become visible to readers immediately."""

    def begin(self, headers: Mapping[str, str], *, size_bytes: int | None = None) -> None:
        """Describe the output before its first byte. If it is not called, the result has the default ``Content-Type``.

        Args:
            headers: Headers of the result: ``Content-Type``, ``x-amz-meta-...``; never its length or ETag.
            size_bytes: Length of the output in bytes if it is known; an output of another length is an error.
        """

    async def write(self, data: Buffer) -> None:
        """Append bytes to the output; waits while too much of it is in memory. The bytes are copied.

        Raises:
            S3Error: The output is longer than allowed, or no reader is left that wants it.
        """

    def buffer(self) -> memoryview:
        """Return memory, at least one byte, into which the next bytes may be written directly: uint8[n]."""

    async def filled(self, length_bytes: int) -> None:
        """Append the first `length_bytes` bytes of ``buffer()`` to the output; otherwise as ``write``."""


class Transform(Protocol):
    """Turns a source into a result.

    Attributes:
        name: Name for logs and metrics, e.g. ``"tar2tfrecord"``.
        identity: Text that changes whenever equal sources and arguments may give other bytes: name, version, code.
        is_deterministic: Whether equal sources and arguments give equal bytes.
        maps_ranges: Whether ``run`` can produce a range by itself; then ``size_bytes`` never returns None.

    ``start`` may change every attribute but `name`, because it imports the code that declares them.
    """

    name: str
    identity: str
    is_deterministic: bool
    maps_ranges: bool

    async def start(self) -> None:
        """Start the worker processes and import the code. The gateway calls this once, before it is ready.

        Raises:
            ConfigError: The transform cannot work as it is configured; the message says why, with the user's traceback.
        """

    def arguments(self, request: GatewayRequest) -> Mapping[str, str]:
        """Return the arguments by which this request's result differs from others of the source, e.g. ``{"epoch": "3"}``."""

    async def size_bytes(self, source: ObjectInfo, arguments: Mapping[str, str]) -> int | None:
        """Return the size of a result in bytes, or None if only producing it tells. A listing calls it for all keys at once."""

    async def run(
        self,
        source: Source,
        request: GatewayRequest,
        arguments: Mapping[str, str],
        output: ResultWriter,
        span: ByteRange | None = None,
    ) -> None:
        """Write the result. Returning means that it is complete; any exception means that it is not, and nothing is kept.

        Cancelling the task ends the work and releases everything.

        Args:
            source: The object to read.
            request: The request that caused the run. Requests with equal arguments share the result.
            arguments: The result of ``arguments`` for the request.
            output: Takes the result.
            span: Range of the result to write, which is allowed only if `maps_ranges` is true. None writes all of it.
        """

    async def close(self) -> None:
        """End what runs, release processes and connections; idempotent."""
