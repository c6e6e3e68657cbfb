"""A client's request as a request to an S3 upstream, and the upstream's answer as one to the client. Pure.

The names of bucket and keys differ on the two sides: the gateway's bucket is a bucket or a prefix of the upstream. Whatever
names them is translated: the URL, the query, the source of a copy, and elements of documents.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote
from xml.sax.saxutils import unescape

from penstock.gateway.buckets.object_headers import content_encoding, refuse_shared_access
from penstock.gateway.buckets.requests import access_denied, not_implemented
from penstock.gateway.copy_sources import copy_source
from penstock.gateway.s3_text import escaped, url_encoded
from penstock.redaction import public_url
from penstock.store.s3_requests import encoded_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.gateway.objects import GatewayRequest
    from penstock.store.s3_endpoint import S3Endpoint
    from penstock.store.s3_requests import S3Options

_PASSED = frozenset(
    {
        "cache-control",
        "content-disposition",
        "content-language",
        "content-md5",
        "content-type",
        "expires",
        "if-match",
        "if-none-match",
    }
)
_NOT_PASSED = frozenset(
    {
        "x-amz-content-sha256",
        "x-amz-copy-source",
        "x-amz-date",
        "x-amz-decoded-content-length",
        "x-amz-request-payer",
        "x-amz-security-token",
        "x-amz-trailer",
        "x-amz-user-agent",
    }
)
_OF_ANSWERS = frozenset({"etag", "last-modified", "content-type", "location", "expires"})
_NOT_OF_ANSWERS = frozenset({"x-amz-request-id", "x-amz-id-2", "x-amz-bucket-region"})
_NOT_OF_WRITES = frozenset({"content-range", "if-modified-since", "if-range", "if-unmodified-since"})
_OWNER = "x-amz-expected-bucket-owner"
_BELOW_PREFIX = ("prefix", "key-marker")
_NAMES = re.compile(
    r"<(Key|Prefix|KeyMarker|NextKeyMarker|Bucket|Location)>([^<]*)</(?:Key|Prefix|KeyMarker|NextKeyMarker|Bucket|Location)>"
)
_ENTITIES = {"&quot;": '"', "&apos;": "'", "&#13;": "\r", "&#10;": "\n", "&#9;": "\t"}

OPERATIONS = frozenset(
    {
        ("PUT", ""),
        ("DELETE", ""),
        ("PUT", "uploadId"),
        ("GET", "uploadId"),
        ("POST", "uploadId"),
        ("DELETE", "uploadId"),
        ("POST", "uploads"),
        ("PUT", "tagging"),
        ("GET", "tagging"),
        ("DELETE", "tagging"),
        ("GET", "attributes"),
    }
)
"""Methods and sub-resources of objects that are passed on. Settings of the bucket are not: they belong to its owner."""

BUCKET_OPERATIONS = frozenset({("POST", "delete"), ("GET", "uploads")})
"""The same for the bucket itself."""


class PassedRequest(NamedTuple):
    """A request to the upstream, without its signature and what describes its body.

    Attributes:
        method: HTTP method.
        url: URL, percent-encoded.
        headers: Headers.
    """

    method: str
    url: str
    headers: dict[str, str]


def passed_request(request: GatewayRequest, endpoint: S3Endpoint, options: S3Options) -> PassedRequest:
    """Return what is sent to the upstream.

    Args:
        request: The client's request.
        endpoint: Endpoint, bucket and prefix of the upstream.
        options: Options of the upstream, some of which every request carries as headers.

    Raises:
        S3Error: The upstream cannot do this for the client.
        ConfigError: No request can carry the key.
    """
    refuse_shared_access(request.headers)
    if request.method != "GET" and (ignored := _NOT_OF_WRITES & set(map(str.lower, request.headers))):
        raise not_implemented(min(ignored))
    path = encoded_key(endpoint.prefix + request.key) if request.key else ""
    query = dict(request.query)
    query.pop("x-id", None)  # some SDKs name the operation in it
    if not request.key and endpoint.prefix:
        for name in _BELOW_PREFIX:
            if name == "prefix" or query.get(name):
                query[name] = endpoint.prefix + query.get(name, "")
    text = "&".join(f"{quote(name, safe='-_.~')}={quote(query[name], safe='-_.~')}" for name in sorted(query))
    headers = {name: value for name, value in request.headers.items() if _is_passed(name.lower())}
    if encoding := content_encoding(request.headers):
        headers["Content-Encoding"] = encoding
    lines = options.headers()
    if request.method in ("PUT", "POST") and request.key and "tagging" not in request.query:
        lines += options.key_headers()
    if "x-amz-copy-source" in request.headers:
        headers["x-amz-copy-source"] = _passed_source(request, endpoint)
        lines += options.key_headers("copy-source-")
    own = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    names = set(map(str.lower, own))
    if (owner := own.get(_OWNER)) and request.headers.get(_OWNER, owner) != owner:
        raise access_denied("The upstream's bucket belongs to another account than the one that the request expects.")
    headers = {name: value for name, value in headers.items() if name.lower() not in names} | own
    return PassedRequest(request.method, f"{endpoint.base_url}{path}{'?' if text else ''}{text}", headers)


def _is_passed(name: str) -> bool:
    return name in _PASSED or (name.startswith("x-amz-") and name not in _NOT_PASSED)


def _passed_source(request: GatewayRequest, endpoint: S3Endpoint) -> str:
    source = copy_source(request.headers)
    if source.bucket != request.bucket:
        raise not_implemented("copying from another bucket or access point than the one that is written")
    return f"{endpoint.copy_source}/{encoded_key(endpoint.prefix + source.key)}"


def passed_headers(headers: Mapping[str, str], request: GatewayRequest) -> dict[str, str]:
    """Return the headers of an upstream's answer that the client gets."""
    found = {}
    for name, value in headers.items():
        lower = name.lower()
        if lower in _OF_ANSWERS or (lower.startswith("x-amz-") and lower not in _NOT_OF_ANSWERS):
            found[name] = value
    if "Location" in found:
        found["Location"] = public_url(request.url)
    return found


def passed_document(body: bytes, request: GatewayRequest, endpoint: S3Endpoint) -> bytes:
    """Return a document of the upstream with the names by which the client knows bucket and keys."""
    is_encoded = b"<EncodingType>url</EncodingType>" in body
    prefix = url_encoded(endpoint.prefix) if is_encoded else endpoint.prefix

    def translated(match: re.Match[str]) -> str:
        name, text = match[1], unescape(match[2], _ENTITIES)
        if name == "Bucket":
            text = request.bucket
        elif name == "Location":
            text = public_url(request.url)
        else:
            text = text.removeprefix(prefix)
        return f"<{name}>{escaped(text)}</{name}>"

    return _NAMES.sub(translated, body.decode("utf-8", "replace")).encode()
