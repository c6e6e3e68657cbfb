"""XML documents, in both directions: operations that write, attributes of an object, settings that do not exist. Pure."""

from __future__ import annotations

import re
from email.utils import formatdate
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from penstock.gateway.buckets.requests import check_write_conditions
from penstock.gateway.objects import Answer, S3Error, invalid_argument, not_implemented, number_in
from penstock.gateway.s3_text import DECLARATION, NAMESPACE, OWNER, escaped
from penstock.redaction import public_url
from penstock.types import PARTS_MAX, Part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from penstock.gateway.objects import GatewayRequest, ObjectHead

CHECKSUM_ELEMENTS = {
    "crc32": "ChecksumCRC32",
    "crc32c": "ChecksumCRC32C",
    "crc64nvme": "ChecksumCRC64NVME",
    "sha1": "ChecksumSHA1",
    "sha256": "ChecksumSHA256",
}
_ATTRIBUTES = ("ETag", "Checksum", "ObjectParts", "StorageClass", "ObjectSize")
_CHECKSUM_PREFIX = "x-amz-checksum-"
_MISSING = {
    "policy": ("NoSuchBucketPolicy", "The bucket policy does not exist"),
    "policyStatus": ("NoSuchBucketPolicy", "The bucket policy does not exist"),
    "cors": ("NoSuchCORSConfiguration", "The CORS configuration does not exist"),
    "lifecycle": ("NoSuchLifecycleConfiguration", "The lifecycle configuration does not exist"),
    "encryption": (
        "ServerSideEncryptionConfigurationNotFoundError",
        "The server side encryption configuration was not found",
    ),
    "tagging": ("NoSuchTagSet", "The TagSet does not exist"),
    "object-lock": (
        "ObjectLockConfigurationNotFoundError",
        "Object Lock configuration does not exist for this bucket",
    ),
    "website": ("NoSuchWebsiteConfiguration", "The specified bucket does not have a website configuration"),
    "replication": ("ReplicationConfigurationNotFoundError", "The replication configuration was not found"),
    "publicAccessBlock": (
        "NoSuchPublicAccessBlockConfiguration",
        "The public access block configuration was not found",
    ),
    "ownershipControls": ("OwnershipControlsNotFoundError", "The bucket ownership controls were not found"),
    "metadataTable": ("MetadataTableConfigurationNotFound", "The metadata table configuration was not found"),
}
_MISSING_OF_OBJECTS = {
    "retention": ("NoSuchObjectLockConfiguration", "The specified object does not have a ObjectLock configuration"),
    "legal-hold": ("NoSuchObjectLockConfiguration", "The specified object does not have a ObjectLock configuration"),
}
_EMPTY = {
    "versioning": "VersioningConfiguration",
    "logging": "BucketLoggingStatus",
    "notification": "NotificationConfiguration",
    "accelerate": "AccelerateConfiguration",
}
_EMPTY_LISTS = {
    "analytics": "ListBucketAnalyticsConfigurationResult",
    "inventory": "ListInventoryConfigurationsResult",
    "metrics": "ListMetricsConfigurationsResult",
    "intelligent-tiering": "ListBucketIntelligentTieringConfigurationsOutput",
}
_DELETED_COUNT_MAX = 1000
_CONTROL = re.compile("[\x01-\x08\x0b\x0c\x0e-\x1f]")
_REFERENCE = re.compile(r"&#(?:x0*([0-9a-fA-F]{1,2})|0*([0-9]{1,2}));")
_STAND_IN = 0x10FE00  # private use: what a control character is while an XML parser, which refuses it, looks at it


def element(name: str, content: object, *, encode: Callable[[str], str] | None = None) -> str:
    """Return an element.

    Args:
        name: Name of the element.
        content: Text of the element, or its children as pairs of name and content. A child whose content is None is left out.
        encode: Function that writes a text; None escapes it.
    """
    if isinstance(content, str | int):
        text = str(content)
        return f"<{name}>{encode(text) if encode else escaped(text)}</{name}>"
    children = "".join(element(child, value) for child, value in content if value is not None)  # type: ignore[attr-defined]
    return f"<{name}>{children}</{name}>"


def document(name: str, content: object, *, headers: Mapping[str, str] | None = None) -> Answer:
    """Return an answer whose body is a document with one root element."""
    body = element(name, content).replace(f"<{name}>", f'<{name} xmlns="{NAMESPACE}">', 1)
    return Answer(200, {"Content-Type": "application/xml", **(headers or {})}, f"{DECLARATION}{body}".encode())


def checksum_elements(checksums: Mapping[str, str], kind: str | None = None) -> list[tuple[str, str]]:
    """Return checksums as pairs for ``element``, and their type if there are any."""
    rows = [(CHECKSUM_ELEMENTS[name], value) for name, value in checksums.items() if name in CHECKSUM_ELEMENTS]
    return [*rows, ("ChecksumType", kind)] if rows and kind else rows


def parsed(body: bytes, *, root: str) -> ET.Element:
    """Parse the body of a request. Namespaces are dropped, and control characters are accepted although XML forbids them.

    Args:
        body: The body.
        root: Name of its root element.

    Raises:
        S3Error: ``MalformedXML``.
    """
    try:
        text = body.decode("utf-8")
        if "<!DOCTYPE" in text or "<!ENTITY" in text:
            raise malformed()
        text = _REFERENCE.sub(_stand_in, text)
        text = _CONTROL.sub(lambda match: chr(_STAND_IN + ord(match[0])), text)
        tree = ET.fromstring(text)
    except (UnicodeDecodeError, ET.ParseError) as error:
        raise malformed() from error
    for node in tree.iter():
        node.tag = node.tag.rpartition("}")[2]
        if node.text:
            node.text = "".join(
                chr(ord(letter) - _STAND_IN) if _STAND_IN <= ord(letter) < _STAND_IN + 0x20 else letter
                for letter in node.text
            )
    if tree.tag != root:
        raise malformed()
    return tree


def _stand_in(match: re.Match[str]) -> str:
    code = int(match[1], 16) if match[1] else int(match[2])
    return chr(_STAND_IN + code) if code < 0x20 and code not in (9, 10, 13) else match[0]


def named_parts(body: bytes) -> list[Part]:
    """Return the parts that ``CompleteMultipartUpload`` names, with their ETags without quotes.

    Raises:
        S3Error: ``MalformedXML``.
    """
    rows = parsed(body, root="CompleteMultipartUpload").findall("Part")
    if not 0 < len(rows) <= PARTS_MAX:
        raise malformed()
    parts = []
    for row in rows:
        number, etag = (row.findtext("PartNumber") or "").strip(), row.findtext("ETag")
        if not (number.isascii() and number.isdigit() and len(number) <= 5) or etag is None:
            raise malformed()
        sums = {name: value.strip() for name, tag in CHECKSUM_ELEMENTS.items() if (value := row.findtext(tag))}
        parts.append(Part(int(number), etag.strip().strip('"'), sums))
    return parts


def completed_upload(request: GatewayRequest, etag: str, checksums: Sequence[tuple[str, str]] = ()) -> Answer:
    """Return the answer to ``CompleteMultipartUpload``."""
    rows = [("Location", public_url(request.url)), ("Bucket", request.bucket), ("Key", request.key), ("ETag", etag)]
    return document("CompleteMultipartUploadResult", [*rows, *checksums])


def parsed_deletion(body: bytes) -> tuple[list[ET.Element], bool]:
    """Return the objects of ``DeleteObjects``, and whether only failures are to be answered.

    Raises:
        S3Error: ``MalformedXML``.
    """
    tree = parsed(body, root="Delete")
    rows = tree.findall("Object")
    if not 0 < len(rows) <= _DELETED_COUNT_MAX:
        raise malformed()
    return rows, (tree.findtext("Quiet") or "").strip().lower() == "true"


def deletion(outcomes: Iterable[tuple[str, S3Error | None]], *, is_quiet: bool) -> Answer:
    """Return the answer to ``DeleteObjects``.

    Args:
        outcomes: Each key, and why it was not removed; None if it was.
        is_quiet: Whether only failures are answered.
    """
    rows: list[tuple[str, object]] = []
    for key, error in outcomes:
        if error is not None:
            rows.append(("Error", [("Key", key), ("Code", error.code), ("Message", error.message)]))
        elif not is_quiet:
            rows.append(("Deleted", [("Key", key)]))
    return document("DeleteResult", rows)


def malformed() -> S3Error:
    """Return the error of a malformed document."""
    return S3Error(
        "MalformedXML", "The XML you provided was not well-formed or did not validate against our published schema"
    )


# ── attributes of an object ──────────────────────────────────────────────────────────────────────────────────────


def object_attributes(head: ObjectHead, request: GatewayRequest) -> Answer:
    """Return the answer to ``GetObjectAttributes``.

    Args:
        head: Description of the object, with its size, and with its checksums if they are known.
        request: The request, which names the attributes.

    Raises:
        S3Error: It names none or an unknown one, or its ``If-Match`` does not hold.
    """
    wanted = [name.strip() for name in request.headers.get("x-amz-object-attributes", "").split(",")]
    if not wanted[0] or any(name not in _ATTRIBUTES for name in wanted):
        raise invalid_argument("x-amz-object-attributes", "Invalid attribute name specified.", ",".join(wanted))
    check_write_conditions({"If-Match": request.headers.get("If-Match", "*")}, head.etag)
    sums = {name: value for name in CHECKSUM_ELEMENTS if (value := head.headers.get(f"{_CHECKSUM_PREFIX}{name}"))}
    rows: dict[str, object] = {
        "ETag": head.etag.strip('"'),
        "Checksum": checksum_elements(sums, head.headers.get(f"{_CHECKSUM_PREFIX}type")) or None,
        "ObjectParts": _part_rows(head, request.headers, next(iter(sums), "")) if head.part_sizes_bytes else None,
        "StorageClass": head.headers.get("x-amz-storage-class", "STANDARD"),
        "ObjectSize": head.size_bytes,
    }
    return document(
        "GetObjectAttributesResponse",
        [(name, rows[name]) for name in _ATTRIBUTES if name in wanted],
        headers={"Last-Modified": formatdate(int(head.last_modified_s), usegmt=True)},
    )


def _part_rows(head: ObjectHead, headers: Mapping[str, str], algorithm: str) -> list[tuple[str, object]]:
    """Return the parts of an object: one by one only if they have checksums."""
    count = len(head.part_sizes_bytes)
    rows: list[tuple[str, object]] = [("PartsCount", count)]
    if not head.part_checksums:
        return rows
    most = number_in(headers, "x-amz-max-parts", default=1000, most=1000)
    marker = number_in(headers, "x-amz-part-number-marker", default=0, most=1 << 31)
    last = min(count, marker + most)
    rows += [
        ("PartNumberMarker", marker),
        ("NextPartNumberMarker", last),
        ("MaxParts", most),
        ("IsTruncated", str(last < count).lower()),
    ]
    for index in range(min(marker, count), last):
        part = [
            ("PartNumber", index + 1),
            ("Size", head.part_sizes_bytes[index]),
            (CHECKSUM_ELEMENTS[algorithm], head.part_checksums[index]),
        ]
        rows.append(("Part", part))
    return rows


# ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────────


def default_setting(request: GatewayRequest, name: str) -> Answer:
    """Answer a GET for a setting with S3's answer for a setting that was not made.

    Args:
        request: The request.
        name: Name of the setting, as ``operations.setting_named`` returned it.

    Raises:
        S3Error: S3 answers with an error if the setting was not made, or the setting does not exist.
    """
    missing = _MISSING_OF_OBJECTS.get(name) if request.key else _MISSING.get(name)
    if missing is not None:
        code, message = missing
        raise S3Error(code, message, status=404, details={"BucketName": request.bucket})
    if name == "acl":
        return access_control_list()
    if not request.key:
        if name in _EMPTY:
            return document(_EMPTY[name], ())
        if name in _EMPTY_LISTS:
            return document(_EMPTY_LISTS[name], [("IsTruncated", "false")])
        if name == "requestPayment":
            return document("RequestPaymentConfiguration", [("Payer", "BucketOwner")])
    raise not_implemented(name)


def access_control_list() -> Answer:
    """Return the list that grants everything to the one owner."""
    grantee = "".join(
        (
            '<Grantee xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" xsi:type="CanonicalUser">',
            *(f"<{name}>{value}</{name}>" for name, value in OWNER),
            "</Grantee>",
        )
    )
    answer = document(
        "AccessControlPolicy", [("Owner", OWNER), ("AccessControlList", [("Grant", [("Permission", "FULL_CONTROL")])])]
    )
    return answer._replace(body=answer.body.replace(b"<Grant>", b"<Grant>" + grantee.encode()))


def tagging(tags: Mapping[str, str]) -> Answer:
    """Return the answer that tells the tags of an object."""
    return document("Tagging", [("TagSet", [("Tag", [("Key", name), ("Value", tags[name])]) for name in tags])])
