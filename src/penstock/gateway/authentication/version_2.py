"""Presigned URLs of Signature Version 2: ``AWSAccessKeyId``, ``Expires`` and ``Signature`` in the query.

boto3 makes them by default for custom endpoints in ``us-east-1``. Their signature covers the method, the path, the expiry
time, headers that begin with ``x-amz-``, and the query parameters in ``SIGNED_PARAMETERS``. It covers neither the host nor any
other parameter. Therefore the bucket of the host name is part of the text that is compared, and only parameters of listings
may be sent unsigned.

Source: Amazon S3 developer guide, "Signing and authenticating REST requests".
"""

from __future__ import annotations

import base64
import hmac
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote_plus

from penstock.gateway.authentication import canonical
from penstock.gateway.objects import S3Error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.gateway.objects import RequestHead

KEY_PARAMETER, EXPIRES_PARAMETER, SIGNATURE_PARAMETER = "AWSAccessKeyId", "Expires", "Signature"
QUERY_PARAMETERS = frozenset({KEY_PARAMETER, EXPIRES_PARAMETER, SIGNATURE_PARAMETER})
"""Query parameters that belong to the signature. The front removes them."""

SIGNED_PARAMETERS = frozenset(
    {
        *("accelerate", "acl", "analytics", "cors", "defaultObjectAcl", "delete", "inventory", "lifecycle"),
        *("location", "logging", "metrics", "notification", "object-lock", "partNumber", "policy", "replication"),
        *("requestPayment", "response-cache-control", "response-content-disposition", "response-content-encoding"),
        *("response-content-language", "response-content-type", "response-expires", "restore", "select"),
        *("select-type", "storageClass", "tagging", "torrent", "uploadId", "uploads", "versionId", "versioning"),
        *("versions", "website"),
    }
)
_UNSIGNED_PARAMETERS = frozenset(
    {
        *("continuation-token", "delimiter", "encoding-type", "fetch-owner", "key-marker", "list-type", "marker"),
        *("max-keys", "max-parts", "max-uploads", "part-number-marker", "prefix", "start-after"),
        *("upload-id-marker", "version-id-marker", "x-id"),
    }
)
_HEADERS_IN_QUERY = frozenset({"content-md5", "content-type"})
_METHODS = frozenset({"GET", "HEAD", "PUT", "DELETE", "POST"})
_EXPIRES_LENGTH_MAX = 12


class Version2Claim(NamedTuple):
    """The signature of a presigned URL of version 2, and how it was made.

    Attributes:
        access_key: ID of the access key.
        signature: The signature in Base64.
        expires_s: Time at which the URL expires, in seconds since 1970.
        headers: Headers that are sent as parameters of the query, by their names in lower case.
    """

    access_key: str
    signature: str
    expires_s: int
    headers: Mapping[str, str]


def is_version_2(raw_query: str) -> bool:
    """Return whether a query has a signature of version 2."""
    if SIGNATURE_PARAMETER not in raw_query or KEY_PARAMETER not in raw_query:
        return False
    names = {part.partition("=")[0] for part in raw_query.split("&")}
    return SIGNATURE_PARAMETER in names and KEY_PARAMETER in names


def read_claim_of_version_2(head: RequestHead) -> Version2Claim:
    """Return the claim of a presigned URL about its signature.

    Raises:
        S3Error: The URL cannot be read, or has parameters that its signature does not cover.
    """
    if head.method not in _METHODS:
        raise S3Error("AccessDenied", "A presigned URL is not valid for this method.")
    found: dict[str, str] = {}
    headers: dict[str, str] = {}
    for part in filter(None, head.raw_query.split("&")):
        name, _, value = part.partition("=")
        if name in QUERY_PARAMETERS:
            into = found
        elif _is_header(name):
            into = headers
        elif name in SIGNED_PARAMETERS or name in _UNSIGNED_PARAMETERS:
            continue
        else:
            raise _refused(f"Signature Version 2 does not cover the parameter {name[:64]!r}; please use Version 4.")
        name = name if into is found else name.lower()
        if name in into:
            raise _refused(f"The parameter {name[:64]!r} is given twice.")
        into[name] = unquote_plus(value, errors="surrogateescape")
    expires = found.get(EXPIRES_PARAMETER, "")
    if not (expires.isascii() and expires.isdigit() and len(expires) <= _EXPIRES_LENGTH_MAX):
        raise S3Error("AccessDenied", "Expires must be a time in seconds since 1970.")
    return Version2Claim(found[KEY_PARAMETER], found[SIGNATURE_PARAMETER], int(expires), headers)


def matches_version_2(head: RequestHead, claim: Version2Claim, secret_key: str) -> bool:
    """Return whether a signature is right, in constant time."""
    headers = {name.lower(): value for name, value in head.headers.items()}
    for name, value in claim.headers.items():
        if headers.setdefault(name, value) != value:
            return False
    lines = "".join(f"{name}:{value.strip()}\n" for name, value in sorted(headers.items()) if name.startswith("x-amz-"))
    begin = "\n".join(
        [head.method, headers.get("content-md5", "").strip(), headers.get("content-type", "").strip(), str(claim.expires_s), ""]
    )  # fmt: skip
    signed = _signed_parameters(head.raw_query)
    host_bucket = f"/{head.host_bucket}" if head.host_bucket else ""
    paths = {head.raw_path, canonical.canonical_path(head.raw_path)}
    if head.raw_path.count("/") == 1 and not head.host_bucket:
        paths.add(head.raw_path + "/")  # clients sign /bucket/ and send /bucket
    texts = [f"{begin}{lines}{host_bucket}{path}{signed}" for path in paths]
    return any([_is_signature(text, claim.signature, secret_key) for text in texts])  # noqa: C419 - compares all


def _is_signature(text: str, signature: str, secret_key: str) -> bool:
    digest = hmac.digest(secret_key.encode(), canonical.wire_bytes(text), "sha1")
    return hmac.compare_digest(base64.b64encode(digest), signature.encode("utf-8", "surrogateescape"))


def _signed_parameters(raw_query: str) -> str:
    pairs = [part.partition("=") for part in raw_query.split("&")]
    signed = sorted((pair for pair in pairs if pair[0] in SIGNED_PARAMETERS), key=lambda pair: pair[0])
    texts = [name + equals + unquote_plus(value, errors="surrogateescape") for name, equals, value in signed]
    return "?" + "&".join(texts) if texts else ""


def _is_header(name: str) -> bool:
    return name.lower().startswith("x-amz-") or name.lower() in _HEADERS_IN_QUERY


def _refused(message: str) -> S3Error:
    return S3Error("InvalidArgument", message)
