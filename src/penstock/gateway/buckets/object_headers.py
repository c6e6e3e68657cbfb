"""The headers of a request that describe the object that it writes. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.checksums import algorithms as checksums
from penstock.gateway.buckets.requests import invalid_argument, not_implemented
from penstock.gateway.objects import S3Error

if TYPE_CHECKING:
    from collections.abc import Mapping

_KEPT = {
    name.lower(): name
    for name in (
        "Content-Type",
        "Cache-Control",
        "Content-Disposition",
        "Content-Encoding",
        "Content-Language",
        "Expires",
        "x-amz-website-redirect-location",
    )
}
_USER_METADATA = "x-amz-meta-"
_USER_METADATA_BYTES_MAX = 2048
_STORAGE_CLASSES = ("STANDARD", "REDUCED_REDUNDANCY", "STANDARD_IA", "ONEZONE_IA", "INTELLIGENT_TIERING")
_ACLS = ("private", "bucket-owner-full-control", "bucket-owner-read")


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
        elif lower.startswith(_USER_METADATA):
            kept[lower] = value
            metadata_bytes += len(lower) - len(_USER_METADATA) + len(value.encode("utf-8", "surrogateescape"))
    if metadata_bytes > _USER_METADATA_BYTES_MAX:
        details = {"Size": str(metadata_bytes), "MaxSizeAllowed": str(_USER_METADATA_BYTES_MAX)}
        message = "Your metadata headers exceed the maximum allowed metadata size"
        raise S3Error("MetadataTooLarge", message, status=400, details=details)
    storage_class = headers.get("x-amz-storage-class", "STANDARD")
    if storage_class not in _STORAGE_CLASSES:
        raise S3Error("InvalidStorageClass", "The storage class you specified is not valid", status=400)
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
            raise S3Error("AccessControlListNotSupported", "The bucket does not allow ACLs", status=400)


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
            raise S3Error("InvalidRequest", message, status=400)
        return "", "COMPOSITE"
    if name not in checksums.ALGORITHMS:
        message = "Checksum algorithm provided is unsupported. Please try again with any of the valid types: " + (
            ", ".join(sorted(known.upper() for known in checksums.ALGORITHMS))
        )
        raise S3Error("InvalidRequest", message, status=400)
    if checksums.hasher(name) is None:
        raise not_implemented(f"checksums of type {name}")
    kind = kind or ("FULL_OBJECT" if name == "crc64nvme" else "COMPOSITE")
    if kind not in ("FULL_OBJECT", "COMPOSITE"):
        raise invalid_argument("x-amz-checksum-type", "Value for x-amz-checksum-type header is invalid.", kind)
    if (kind == "FULL_OBJECT" and name.startswith("sha")) or (kind == "COMPOSITE" and name == "crc64nvme"):
        message = f"The {kind} checksum type cannot be used with the {name} checksum algorithm."
        raise S3Error("InvalidRequest", message, status=400)
    return name, kind


def with_checksums(headers: Mapping[str, str]) -> bool:
    """Whether a GET or HEAD asks for the object's checksums."""
    return headers.get("x-amz-checksum-mode", "").upper() == "ENABLED"
