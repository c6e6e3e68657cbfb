"""Parses headers and queries of requests that write: the object that is written, ranges of copies, conditions, tags. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from penstock.checksums import algorithms as checksums
from penstock.gateway.objects import S3Error, invalid_argument, not_implemented, version_missing
from penstock.gateway.s3_text import date_s
from penstock.store.records import CONTENT_HEADERS, USER_METADATA
from penstock.types import PARTS_MAX, ByteRange

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Mapping

    from penstock.gateway.objects import GatewayRequest, RequestBody
    from penstock.types import Buffer

BODY_BYTES_MAX = 5 << 30
"""Largest body of one PUT or part; S3's limit."""

_STEP_BYTES = 1 << 20
"""Bytes that are collected before a thread writes them: MD5 takes 1.5 ms for them, handing them over 0.1 ms."""
_TAGS_MAX = 10
_PROTECTIONS = (
    "content-range",
    "if-",
    "x-amz-copy-source-server-side-encryption",
    "x-amz-expected-bucket-owner",
    "x-amz-if-",
    "x-amz-object-lock-",
    "x-amz-server-side-encryption",
    "x-amz-source-expected-bucket-owner",
    "x-amz-write-offset-bytes",
)
WRITE_CONDITIONS = ("if-match", "if-none-match")
"""Headers that ``check_write_conditions`` honours."""
DELETE_CONDITIONS = ("if-match", "x-amz-if-match-size", "x-amz-if-match-last-modified-time")
"""Headers that ``check_delete_conditions`` honours."""
_KEPT = {**CONTENT_HEADERS, "x-amz-website-redirect-location": "x-amz-website-redirect-location"}
_USER_METADATA_BYTES_MAX = 2048
_STORAGE_CLASSES = ("STANDARD", "REDUCED_REDUNDANCY", "STANDARD_IA", "ONEZONE_IA", "INTELLIGENT_TIERING")
_ACLS = ("private", "bucket-owner-full-control", "bucket-owner-read")


def refuse_unsupported(request: GatewayRequest, *, honoured: Collection[str] = ()) -> None:
    """Refuse a write with a condition, or a demand of encryption, locks or an owner, that would be ignored.

    A client that names one relies on it: if it were ignored, data would be overwritten or removed, or readable for others.

    Args:
        request: The request.
        honoured: Names of headers, in lower case, that the operation honours.

    Raises:
        S3Error: ``NotImplemented``.
    """
    for lower in map(str.lower, request.headers):
        if lower.startswith(_PROTECTIONS) and lower not in honoured:
            raise not_implemented(lower)


def check_version(request: GatewayRequest) -> None:
    """Refuse a request for a version other than the current one.

    Raises:
        S3Error: ``NoSuchVersion``.
    """
    version = request.query.get("versionId", "null")
    if version not in ("", "null"):
        raise version_missing(version)


def part_number(request: GatewayRequest) -> int:
    """Return the number of the part that a request of a multipart upload names.

    Raises:
        S3Error: It is not a number from 1 to 10 000, or the request names no upload.
    """
    text = request.query.get("partNumber", "")
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= PARTS_MAX):
        message = f"Part number must be an integer between 1 and {PARTS_MAX}, inclusive"
        raise invalid_argument("partNumber", message, text)
    if "uploadId" not in request.query:
        raise invalid_argument("uploadId", "This operation does not accept a query-string without an upload ID.")
    return int(text)


def copied_span(headers: Mapping[str, str], size_bytes: int) -> ByteRange:
    """Return the range that ``UploadPartCopy`` copies of an object.

    Raises:
        S3Error: The range is not ``bytes=first-last`` inside the object.
    """
    text = headers.get("x-amz-copy-source-range")
    if text is None:
        return ByteRange(0, size_bytes)
    match = re.fullmatch(r"bytes=([0-9]{1,19})-([0-9]{1,19})", text)
    if match is None:
        raise invalid_argument(
            "x-amz-copy-source-range", "The x-amz-copy-source-range value must be of the form bytes=first-last"
        )
    first, last = int(match[1]), int(match[2])
    if first > last or last >= size_bytes:
        raise invalid_argument(
            "x-amz-copy-source-range", f"Range specified is not valid for source object of size: {size_bytes}"
        )
    return ByteRange(first, last + 1)


def matches_etag(condition: str, etag: str | None) -> bool:
    """Whether the value of ``If-Match`` names an ETag; a missing object has none."""
    if etag is None:
        return False
    candidates = (candidate.strip().removeprefix("W/").strip('"') for candidate in condition.split(","))
    return any(candidate in ("*", etag.strip('"')) for candidate in candidates)


def check_copy_conditions(headers: Mapping[str, str], *, etag: str, modified_s: float) -> None:
    """Compare the source of a copy with the ``x-amz-copy-source-if-...`` headers.

    A true ``if-match`` overrules ``if-unmodified-since``, and a false ``if-none-match`` overrules ``if-modified-since``.

    Raises:
        S3Error: ``PreconditionFailed``.
    """
    prefix = "x-amz-copy-source-if-"
    match, none_match = headers.get(f"{prefix}match"), headers.get(f"{prefix}none-match")
    since_s = date_s(headers.get(f"{prefix}modified-since"))
    until_s = date_s(headers.get(f"{prefix}unmodified-since"))
    if match is not None:
        if not matches_etag(match, etag):
            raise precondition_failed(f"{prefix}match")
    elif until_s is not None and int(modified_s) > until_s:
        raise precondition_failed(f"{prefix}unmodified-since")
    if none_match is not None and matches_etag(none_match, etag):
        raise precondition_failed(f"{prefix}none-match")
    if since_s is not None and int(modified_s) <= since_s:
        raise precondition_failed(f"{prefix}modified-since")


def check_delete_conditions(
    conditions: Mapping[str, str | None], *, etag: str, size_bytes: int, modified_s: float
) -> None:
    """Compare the current version of an object that is about to be removed with the conditions of ``DELETE_CONDITIONS``.

    A version that does not exist meets all of them, as in S3.

    Raises:
        S3Error: ``PreconditionFailed``, or a condition is neither a size nor a date.
    """
    match, size, time = (conditions.get(name) for name in DELETE_CONDITIONS)
    if match is not None and not matches_etag(match, etag):
        raise precondition_failed("If-Match")
    if size is not None:
        if not (size.isascii() and size.isdigit() and len(size) < 20):
            raise invalid_argument("x-amz-if-match-size", "It is not a size in bytes.", size)
        if int(size) != size_bytes:
            raise precondition_failed("x-amz-if-match-size")
    if time is not None:
        wanted_s = date_s(time)
        if wanted_s is None:
            raise invalid_argument("x-amz-if-match-last-modified-time", "It is not an HTTP date.", time)
        if int(modified_s) != int(wanted_s):
            raise precondition_failed("x-amz-if-match-last-modified-time")


def check_write_conditions(headers: Mapping[str, str], etag: str | None) -> None:
    """Compare the current version of an object that is about to be replaced with ``If-None-Match`` and ``If-Match``.

    Args:
        headers: The headers of the request.
        etag: ETag of the current version; None if there is none.

    Raises:
        S3Error: ``PreconditionFailed``, or ``NoSuchKey`` if the version that is to be replaced does not exist.
    """
    none_match, match = headers.get("If-None-Match"), headers.get("If-Match")
    if none_match is not None:
        if none_match.strip() != "*":
            raise not_implemented("If-None-Match with an ETag")
        if etag is not None:
            raise precondition_failed("If-None-Match")
    if match is not None:
        if etag is None:
            raise S3Error("NoSuchKey", "The specified key does not exist.")
        if not matches_etag(match, etag):
            raise precondition_failed("If-Match")


def checked_tags(pairs: list[tuple[str, str]]) -> dict[str, str]:
    """Return tags by name.

    Raises:
        S3Error: There are too many, one occurs twice, or one is too long.
    """
    tags = dict(pairs)
    if len(tags) != len(pairs):
        raise S3Error("InvalidTag", "Cannot provide multiple Tags with the same key")
    if len(tags) > _TAGS_MAX:
        raise S3Error("BadRequest", "Object tags cannot be greater than 10")
    for name, value in tags.items():
        if not 0 < len(name) <= 128:
            raise S3Error("InvalidTag", "The TagKey you have provided is invalid")
        if len(value) > 256:
            raise S3Error("InvalidTag", "The TagValue you have provided is invalid")
    return tags


def tags_in_header(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the tags in ``x-amz-tagging``, which has the form of a query."""
    return checked_tags(parse_qsl(headers.get("x-amz-tagging", ""), keep_blank_values=True))


async def read_document(body: RequestBody, bytes_max: int = 2 << 20) -> bytes:
    """Return the body of a request that holds a document.

    Raises:
        S3Error: It is longer than `bytes_max`.
    """
    pieces, total = [], 0
    async for piece in body:
        total += len(piece)
        if total > bytes_max:
            raise S3Error("MaxMessageLengthExceeded", "Your request was too big.")
        pieces.append(piece)
    return b"".join(pieces)


def checked_length_bytes(body: RequestBody) -> int:
    """Return the length of the body of a PUT.

    Raises:
        S3Error: The client did not send it, or it is longer than S3's limit.
    """
    length_bytes = body.length_bytes
    if length_bytes is None:
        raise S3Error("MissingContentLength", "You must provide the Content-Length HTTP header.")
    if length_bytes > BODY_BYTES_MAX:
        details = {"ProposedSize": str(length_bytes), "MaxSizeAllowed": str(BODY_BYTES_MAX)}
        raise S3Error("EntityTooLarge", "Your proposed upload exceeds the maximum allowed size", details=details)
    return length_bytes


def body_incomplete() -> S3Error:
    """Return the error of a body that is not as long as its header says."""
    message = "You did not provide the number of bytes specified by the Content-Length HTTP header"
    return S3Error("IncompleteBody", message)


async def collected(body: RequestBody | AsyncIterator[Buffer]) -> AsyncIterator[list[Buffer]]:
    """Iterate over a body in lists of pieces that have 1 MiB together, for threads that write them."""
    pieces: list[Buffer] = []
    held_bytes = 0
    async for piece in body:
        pieces.append(piece if isinstance(piece, bytes) else bytes(piece))  # others are valid only until the next one
        held_bytes += len(piece)
        if held_bytes >= _STEP_BYTES:
            yield pieces
            pieces, held_bytes = [], 0
    if pieces:
        yield pieces


def is_replacing(headers: Mapping[str, str], name: str) -> bool:
    """Whether a copy has headers or tags of its own, by the header ``x-amz-metadata-directive`` or ``x-amz-tagging-directive``.

    Raises:
        S3Error: The header says neither ``COPY`` nor ``REPLACE``.
    """
    value = headers.get(name, "COPY").upper()
    if value not in ("COPY", "REPLACE"):
        raise invalid_argument(name, f"Unknown {name.removeprefix('x-amz-')}.", value)
    return value == "REPLACE"


def precondition_failed(name: str) -> S3Error:
    """Return the error of a condition that does not hold."""
    message = "At least one of the pre-conditions you specified did not hold"
    return S3Error("PreconditionFailed", message, details={"Condition": name})


# ── the object that is written ───────────────────────────────────────────────────────────────────────────────────


def object_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that are kept with an object and sent with it.

    Raises:
        S3Error: A header needs what the gateway lacks (access for others), or the user metadata is too long.
    """
    refuse_shared_access(headers)
    kept: dict[str, str] = {}
    metadata_bytes = 0
    for name, value in headers.items():
        lower = name.lower()
        if lower in _KEPT:
            kept[_KEPT[lower]] = value
        elif lower.startswith(USER_METADATA):
            kept[lower] = value
            metadata_bytes += len(lower) - len(USER_METADATA) + len(value.encode("utf-8", "surrogateescape"))
    if metadata_bytes > _USER_METADATA_BYTES_MAX:
        details = {"Size": str(metadata_bytes), "MaxSizeAllowed": str(_USER_METADATA_BYTES_MAX)}
        message = "Your metadata headers exceed the maximum allowed metadata size"
        raise S3Error("MetadataTooLarge", message, details=details)
    storage_class = headers.get("x-amz-storage-class", "STANDARD")
    if storage_class not in _STORAGE_CLASSES:
        raise S3Error("InvalidStorageClass", "The storage class you specified is not valid")
    if storage_class != "STANDARD":
        kept["x-amz-storage-class"] = storage_class
    if encoding := content_encoding(headers):
        kept["Content-Encoding"] = encoding
    else:
        kept.pop("Content-Encoding", None)
    return kept


def refuse_shared_access(headers: Mapping[str, str]) -> None:
    """Refuse lists of others who may use an object: the gateway's keys decide that.

    Raises:
        S3Error: ``AccessControlListNotSupported``.
    """
    for name, value in headers.items():
        lower = name.lower()
        if lower.startswith("x-amz-grant-") or (lower == "x-amz-acl" and value not in _ACLS):
            raise S3Error("AccessControlListNotSupported", "The bucket does not allow ACLs")


def content_encoding(headers: Mapping[str, str]) -> str:
    """Return the encoding of an object: without ``aws-chunked``, which describes how the body was sent, else as it was sent."""
    text = headers.get("Content-Encoding", "")
    codings = [coding.strip() for coding in text.split(",")]
    return (
        ", ".join(coding for coding in codings if coding not in ("", "aws-chunked"))
        if "aws-chunked" in codings
        else text
    )


def checksum_wanted(headers: Mapping[str, str]) -> tuple[str, str]:
    """Return the algorithm and type of the checksum that an upload or a copy asks for; empty if it asks for none.

    Raises:
        S3Error: The algorithm is unknown, cannot be computed here, or has no checksum of this type.
    """
    name = headers.get("x-amz-checksum-algorithm", "").lower()
    kind = headers.get("x-amz-checksum-type", "").upper()
    if not name:
        if kind:
            message = "The x-amz-checksum-type header can only be used with the x-amz-checksum-algorithm header."
            raise S3Error("InvalidRequest", message)
        return "", "COMPOSITE"
    if name not in checksums.ALGORITHMS:
        message = "Checksum algorithm provided is unsupported. Please try again with any of the valid types: " + (
            ", ".join(sorted(known.upper() for known in checksums.ALGORITHMS))
        )
        raise S3Error("InvalidRequest", message)
    if checksums.hasher(name) is None:
        raise not_implemented(f"checksums of type {name}")
    kind = kind or ("FULL_OBJECT" if name == "crc64nvme" else "COMPOSITE")
    if kind not in ("FULL_OBJECT", "COMPOSITE"):
        raise invalid_argument("x-amz-checksum-type", "Value for x-amz-checksum-type header is invalid.", kind)
    if (kind == "FULL_OBJECT" and name.startswith("sha")) or (kind == "COMPOSITE" and name == "crc64nvme"):
        raise S3Error("InvalidRequest", f"The {kind} checksum type cannot be used with the {name} checksum algorithm.")
    return name, kind


def with_checksums(headers: Mapping[str, str]) -> bool:
    """Whether a GET or HEAD asks for the object's checksums."""
    return headers.get("x-amz-checksum-mode", "").upper() == "ENABLED"
