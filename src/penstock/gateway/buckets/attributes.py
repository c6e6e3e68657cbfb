"""``GetObjectAttributes``: an object's head as a document. Pure."""

from __future__ import annotations

from email.utils import formatdate
from typing import TYPE_CHECKING

from penstock.gateway.buckets.documents import CHECKSUM_ELEMENTS, checksum_elements, document
from penstock.gateway.buckets.requests import check_write_conditions, invalid_argument, number_in

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.gateway.objects import Answer, GatewayRequest, ObjectHead

_ATTRIBUTES = ("ETag", "Checksum", "ObjectParts", "StorageClass", "ObjectSize")
_PREFIX = "x-amz-checksum-"


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
    sums = {name: value for name in CHECKSUM_ELEMENTS if (value := head.headers.get(f"{_PREFIX}{name}"))}
    rows: dict[str, object] = {
        "ETag": head.etag.strip('"'),
        "Checksum": checksum_elements(sums, head.headers.get(f"{_PREFIX}type")) or None,
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
