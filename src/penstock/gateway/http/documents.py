"""S3's XML: errors, buckets and listings. Pure."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import quote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from penstock.gateway.http.list_queries import ListQuery
    from penstock.gateway.objects import Bucket
    from penstock.types import ObjectInfo, Page

XML_TYPE = "application/xml"
NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_DECLARATION = '<?xml version="1.0" encoding="UTF-8"?>\n'
_ESCAPES = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "\r": "&#13;", "\n": "&#10;", "\t": "&#9;"}
)
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
OWNER_ID = "75aa57f09aa0c8caeab4f8c24e99d10f8e7faeebf76c078efc7c6caea54ba06a"
"""ID of the one owner of everything; clients only need that there is one."""
OWNER_NAME = "penstock"


def escaped(text: str) -> str:
    """Return text for an XML document. Characters that XML 1.0 cannot hold become ``U+FFFD``."""
    return _FORBIDDEN.sub("\ufffd", text).translate(_ESCAPES)


def timestamp(seconds: float | None) -> str:
    """Return a time in S3's form, e.g. ``2026-01-02T03:04:05.000Z``."""
    return datetime.fromtimestamp(seconds or 0, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def http_date(seconds: float) -> str:
    """Return a time in HTTP's form, e.g. ``Fri, 02 Jan 2026 03:04:05 GMT``."""
    return _http_date(max(0, int(seconds)))


@lru_cache(maxsize=4096)
def _http_date(seconds: int) -> str:
    moment = time.gmtime(seconds)
    return f"{_DAYS[moment.tm_wday]}, {moment.tm_mday:02d} {_MONTHS[moment.tm_mon - 1]} " + time.strftime(
        "%Y %H:%M:%S GMT", moment
    )


_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def error_document(
    code: str, message: str, *, resource: str, request_id: str, host_id: str, details: Mapping[str, str]
) -> bytes:
    """Return an ``<Error>``.

    Args:
        code: Code of the error.
        message: Message for people.
        resource: Path that was requested.
        request_id: ID of the request.
        host_id: ID of the host, as in ``x-amz-id-2``.
        details: Further elements by name.
    """
    more = "".join(f"<{name}>{escaped(value)}</{name}>" for name, value in details.items())
    return (
        f"{_DECLARATION}<Error><Code>{escaped(code)}</Code><Message>{escaped(message)}</Message>{more}"
        f"<Resource>{escaped(resource)}</Resource><RequestId>{request_id}</RequestId><HostId>{host_id}</HostId></Error>"
    ).encode()


def bucket_list(buckets: Iterable[Bucket]) -> bytes:
    """Return the answer to ListBuckets."""
    rows = "".join(
        f"<Bucket><Name>{escaped(bucket.name)}</Name><CreationDate>{timestamp(bucket.created_s)}</CreationDate></Bucket>"
        for bucket in buckets
    )
    return (
        f'{_DECLARATION}<ListAllMyBucketsResult xmlns="{NAMESPACE}">{_owner()}<Buckets>{rows}</Buckets>'
        "</ListAllMyBucketsResult>"
    ).encode()


def bucket_location(region: str) -> bytes:
    """Return the answer to GetBucketLocation; S3 names ``us-east-1`` by an empty element."""
    text = "" if region in ("", "us-east-1") else escaped(region)
    return f'{_DECLARATION}<LocationConstraint xmlns="{NAMESPACE}">{text}</LocationConstraint>'.encode()


def _owner() -> str:
    return f"<Owner><ID>{OWNER_ID}</ID><DisplayName>{OWNER_NAME}</DisplayName></Owner>"


def object_list(bucket: str, query: ListQuery, page: Page) -> bytes:
    """Return the answer to ListObjects or ListObjectsV2.

    Args:
        bucket: Name of the bucket.
        query: What was asked for.
        page: The objects and prefixes.

    Cost: about 3 µs per key.
    """
    encode = _url_encoded if query.is_url_encoded else escaped
    owner = _owner() if query.has_owner else ""
    rows = [_object_row(info, encode, owner) for info in page.objects]
    prefixes = [f"<CommonPrefixes><Prefix>{encode(prefix)}</Prefix></CommonPrefixes>" for prefix in page.prefixes]
    fields = [("Name", escaped(bucket)), ("Prefix", encode(query.prefix))]
    if query.delimiter:
        fields.append(("Delimiter", encode(query.delimiter)))
    fields += [("MaxKeys", str(query.keys_max)), ("IsTruncated", str(page.next_token is not None).lower())]
    if query.is_url_encoded:
        fields.append(("EncodingType", "url"))
    fields += query.fields_v2(page, encode) if query.is_v2 else query.fields_v1(page, encode)
    head = "".join(f"<{name}>{value}</{name}>" for name, value in fields)
    return (
        f'{_DECLARATION}<ListBucketResult xmlns="{NAMESPACE}">{head}{"".join(rows)}{"".join(prefixes)}</ListBucketResult>'
    ).encode()


def _object_row(info: ObjectInfo, encode: Callable[[str], str], owner: str) -> str:
    etag = f"<ETag>{escaped(info.etag)}</ETag>" if info.etag else "<ETag></ETag>"
    return (
        f"<Contents><Key>{encode(info.key)}</Key><LastModified>{timestamp(info.last_modified_s)}</LastModified>{etag}"
        f"<Size>{info.size_bytes}</Size>{owner}<StorageClass>STANDARD</StorageClass></Contents>"
    )


def _url_encoded(text: str) -> str:
    return quote(text, safe="/-_.~*", errors="surrogatepass")
