"""S3's XML: errors, buckets and listings. Pure."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import TYPE_CHECKING

from penstock.gateway.s3_text import DECLARATION, NAMESPACE, OWNER, escaped, timestamp, url_encoded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from penstock.gateway.http.list_queries import ListQuery
    from penstock.gateway.objects import Bucket
    from penstock.types import ObjectInfo, Page

XML_TYPE = "application/xml"


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
        message: One sentence that explains the error.
        resource: Path that was requested.
        request_id: ID of the request.
        host_id: ID of the host, as in ``x-amz-id-2``.
        details: Further elements by name.
    """
    more = "".join(f"<{name}>{escaped(value)}</{name}>" for name, value in details.items())
    return (
        f"{DECLARATION}<Error><Code>{escaped(code)}</Code><Message>{escaped(message)}</Message>{more}"
        f"<Resource>{escaped(resource)}</Resource><RequestId>{request_id}</RequestId><HostId>{host_id}</HostId></Error>"
    ).encode()


def bucket_list(buckets: Iterable[tuple[Bucket, str]], *, prefix: str, next_token: str | None) -> bytes:
    """Return the answer to ListBuckets.

    Args:
        buckets: Buckets with their regions.
        prefix: Prefix that was asked for.
        next_token: Token of the next page; None if there is none.
    """
    rows = "".join(
        f"<Bucket><Name>{escaped(bucket.name)}</Name><CreationDate>{timestamp(bucket.created_s)}</CreationDate>"
        f"<BucketRegion>{escaped(region)}</BucketRegion></Bucket>"
        for bucket, region in buckets
    )
    more = f"<Prefix>{escaped(prefix)}</Prefix>" if prefix else ""
    more += f"<ContinuationToken>{next_token}</ContinuationToken>" if next_token else ""
    return (
        f'{DECLARATION}<ListAllMyBucketsResult xmlns="{NAMESPACE}">{_owner()}<Buckets>{rows}</Buckets>{more}'
        "</ListAllMyBucketsResult>"
    ).encode()


def bucket_location(region: str) -> bytes:
    """Return the answer to GetBucketLocation; S3 names ``us-east-1`` by an empty element."""
    text = "" if region in ("", "us-east-1") else escaped(region)
    return f'{DECLARATION}<LocationConstraint xmlns="{NAMESPACE}">{text}</LocationConstraint>'.encode()


def _owner() -> str:
    return "<Owner>" + "".join(f"<{name}>{text}</{name}>" for name, text in OWNER) + "</Owner>"


def object_list(bucket: str, query: ListQuery, page: Page) -> bytes:
    """Return the answer to ListObjects or ListObjectsV2.

    Args:
        bucket: Name of the bucket.
        query: Parameters of the request.
        page: The objects and prefixes.

    Cost: about 3 µs per key.
    """
    encode = url_encoded if query.is_url_encoded else escaped
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
        f'{DECLARATION}<ListBucketResult xmlns="{NAMESPACE}">{head}{"".join(rows)}{"".join(prefixes)}</ListBucketResult>'
    ).encode()


def _object_row(info: ObjectInfo, encode: Callable[[str], str], owner: str) -> str:
    etag = f"<ETag>{escaped(info.etag)}</ETag>" if info.etag else "<ETag></ETag>"
    return (
        f"<Contents><Key>{encode(info.key)}</Key><LastModified>{timestamp(info.last_modified_s)}</LastModified>{etag}"
        f"<Size>{info.size_bytes}</Size>{owner}<StorageClass>STANDARD</StorageClass></Contents>"
    )
