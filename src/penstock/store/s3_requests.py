"""Turns operations into S3 requests: method, URL, headers, body. Pure: no clock, no credentials, no socket.

Source: Amazon S3 API reference, the page of each operation; conditional writes and full-object checksums as of 2025.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, urlencode

from penstock.checksums import algorithms as checksums
from penstock.errors import ConfigError
from penstock.store import xml
from penstock.store.base import KEY_BYTES_MAX, check_key, has_dot_segment
from penstock.store.records import CLAIM_HEADER, canonical_headers
from penstock.transport import EMPTY_SHA256, UNSIGNED_PAYLOAD
from penstock.types import (
    AbortMultipart,
    BodyStream,
    Buffer,
    CompleteMultipart,
    Copy,
    CopyPart,
    CreateMultipart,
    Delete,
    Forward,
    Get,
    Head,
    ListPage,
    Operation,
    Put,
    PutPart,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.store.s3_endpoint import S3Endpoint
    from penstock.types import Key

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_~/-][A-Za-z0-9_.~/-]*")
_CHECKSUM = "crc32c"
"""Checksum that is sent with data. Of those that S3 also keeps of whole objects made of parts, it is the cheapest: 18 to
23 GB/s. Whoever reads the object later verifies it at the same speed."""
_CHECKSUM_HEADER = f"x-amz-checksum-{_CHECKSUM}:"

_SIGNED_BODY_BYTES_MAX = 1 << 20
"""Bytes of a body up to which its hash is always signed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options:
    """Headers that some buckets demand of every request.

    Attributes:
        requester_pays: Whether to agree to pay for requests and transfer.
        sse_customer_key: 32 bytes, the AES-256 key of objects that are encrypted with a customer's key (SSE-C); None if
            they are not.
        expected_bucket_owner: 12-digit ID of the account that must own the bucket; None accepts any.
        upload_checksums: Whether to send a CRC32C with everything that is written; False is for stores that refuse it.
        sign_payloads: Whether to sign the SHA-256 of bodies of any size; see ``payload_header``.
    """

    requester_pays: bool = False
    sse_customer_key: bytes | None = field(default=None, repr=False)
    expected_bucket_owner: str | None = None
    upload_checksums: bool = True
    sign_payloads: bool = False

    def __post_init__(self) -> None:
        if self.sse_customer_key is not None and len(self.sse_customer_key) != 32:
            raise ConfigError(f"sse_customer_key has {len(self.sse_customer_key)} bytes, but AES-256 takes 32")

    def payload_header(self, body: Buffer, headers: Sequence[str], *, over_tls: bool) -> str:
        """Return the header with the SHA-256 of a body, which is signed with the other headers.

        A body of more than 1 MiB is not hashed (``UNSIGNED-PAYLOAD``), because that would take 0.6 s of CPU per GB, more than
        sending it, if TLS protects it or the signed headers hold its CRC32C; ``sign_payloads`` has it hashed.
        docs/decisions/0017-unsigned-payloads.md gives the reasons.

        Args:
            body: Body of the request, uint8[any length].
            headers: The other headers of the request, as lines ``Name: value``.
            over_tls: Whether the connection is encrypted.
        """
        size_bytes = memoryview(body).nbytes
        is_protected = over_tls or any(line.startswith(_CHECKSUM_HEADER) for line in headers)
        if size_bytes > _SIGNED_BODY_BYTES_MAX and is_protected and not self.sign_payloads:
            return f"x-amz-content-sha256: {UNSIGNED_PAYLOAD}"
        return f"x-amz-content-sha256: {hashlib.sha256(body).hexdigest() if size_bytes else EMPTY_SHA256}"

    def headers(self) -> list[str]:
        """Return the headers of every request."""
        lines = ["x-amz-request-payer: requester"] if self.requester_pays else []
        if self.expected_bucket_owner:
            lines.append(f"x-amz-expected-bucket-owner: {self.expected_bucket_owner}")
        return lines

    def key_headers(self, infix: str = "") -> list[str]:
        """Return the headers of requests that read or write an object's bytes; `infix` is ``"copy-source-"`` for a source."""
        key = self.sse_customer_key
        if key is None:
            return []
        name = f"x-amz-{infix}server-side-encryption-customer"
        md5 = base64.b64encode(hashlib.md5(key, usedforsecurity=False).digest()).decode()
        return [f"{name}-algorithm: AES256", f"{name}-key: {base64.b64encode(key).decode()}", f"{name}-key-MD5: {md5}"]


class S3Request(NamedTuple):
    """A request before it is signed.

    Attributes:
        name: Name of the operation for messages: ``GET``, ``LIST``, ...
        key: Key that it is about; the prefix of a listing.
        method: HTTP method.
        url: URL with query, percent-encoded.
        headers: Lines ``Name: value``.
        body: uint8[n] to send, or a stream of it; None if there is none.
        region: Region to sign for.
        redirected_url: URL that a temporary redirect named; None if there was none.
    """

    name: str
    key: Key
    method: str
    url: str
    headers: list[str]
    body: Buffer | BodyStream | None
    region: str
    redirected_url: str | None = None


def encoded_key(key: Key) -> str:
    """Percent-encode `key` for a path.

    Raises:
        ConfigError: The key is empty, longer than 1 024 bytes, or has a ``.`` or ``..`` segment. HTTP clients and proxies
            resolve such segments away, which would name another object.
    """
    if not key:
        raise ConfigError("the key is empty")
    if _PLAIN_KEY.fullmatch(key) and len(key) <= KEY_BYTES_MAX and "/." not in key:
        return key
    check_key(key)
    if has_dot_segment(key):
        raise ConfigError(f"the key {key!r} has a '.' or '..' segment, which HTTP clients and proxies resolve away",
                          hint="rename the object with another tool; penstock never reads a different one instead")  # fmt: skip
    return quote(key, safe="/~-._")


def build_request(endpoint: S3Endpoint, options: S3Options, operation: Operation) -> S3Request:
    """Return the request for `operation`.

    Raises:
        ConfigError: No request can carry the key or range.
    """
    if isinstance(operation, Get):
        return _get(endpoint, options, operation)
    build = _BUILDERS[type(operation)]
    name, key, method, query, headers, body = build(endpoint, options, operation)  # type: ignore[operator]
    keyless = isinstance(operation, ListPage) or (isinstance(operation, Delete) and body is not None)
    keyless = keyless or (isinstance(operation, Forward) and not key)
    url = endpoint.base_url + ("" if keyless else _path(endpoint, key)) + query
    if body is not None:
        headers = [*headers, "Expect:"]  # saves a round trip; a body that is refused is small or a part
    return S3Request(name, key, method, url, options.headers() + headers, body, endpoint.region)


def _path(endpoint: S3Endpoint, key: Key) -> str:
    if not key:
        raise ConfigError("the key is empty")
    return encoded_key(endpoint.prefix + key)


def _get(endpoint: S3Endpoint, options: S3Options, operation: Get) -> S3Request:
    key, span, if_match = operation
    headers = ["x-amz-checksum-mode: ENABLED"]
    if span is not None:
        if not 0 <= span.start < span.end:
            span.checked()
        headers.append(span.header)
    if if_match is not None:
        headers.append(f"If-Match: {if_match}")
    if options is not _PLAIN:
        headers += options.headers() + options.key_headers()
    return S3Request("GET", key, "GET", endpoint.base_url + _path(endpoint, key), headers, None, endpoint.region)


_PLAIN = S3Options()
_Built = tuple[str, str, str, str, list[str], Buffer | BodyStream | None]


def _head(_endpoint: S3Endpoint, options: S3Options, operation: Head) -> _Built:
    return "HEAD", operation.key, "HEAD", "", ["x-amz-checksum-mode: ENABLED", *options.key_headers()], None


def _list(endpoint: S3Endpoint, _options: S3Options, operation: ListPage) -> _Built:
    if not endpoint.bucket:
        token = f"&continuation-token={quote(operation.token, safe='-_.~')}" if operation.token else ""
        return "LIST", "", "GET", f"?max-buckets={operation.keys_max}{token}", [], None
    query = [f"?list-type=2&encoding-type=url&max-keys={operation.keys_max}"]
    for name, value in (
        ("prefix", endpoint.prefix + operation.prefix),
        ("delimiter", operation.delimiter),
        ("continuation-token", operation.token or ""),
        ("start-after", endpoint.prefix + operation.start_after if operation.start_after else ""),
    ):
        if value:
            query.append(f"{name}={quote(value, safe='-_.~')}")
    return "LIST", operation.prefix, "GET", "&".join(query), [], None


def _checksum_headers(options: S3Options, body: Buffer, crc32c: int | None = None) -> list[str]:
    if not options.upload_checksums:
        return []
    known = base64.b64encode(crc32c.to_bytes(4, "big")).decode() if crc32c is not None else None
    return [f"{_CHECKSUM_HEADER} {known or checksums.encode(_CHECKSUM, body)}"]


def _put(_endpoint: S3Endpoint, options: S3Options, operation: Put) -> _Built:
    headers = _checksum_headers(options, operation.body) + options.key_headers()
    headers += _condition_headers(operation) + _claim_headers(operation.claim)
    headers += _kept_headers(operation.headers, operation.tags)
    return "PUT", operation.key, "PUT", "", headers, operation.body


def _condition_headers(operation: Put | CompleteMultipart) -> list[str]:
    headers = ["If-None-Match: *"] if operation.if_absent else []
    return headers if operation.if_match is None else [*headers, f"If-Match: {operation.if_match}"]


def _claim_headers(claim: str) -> list[str]:
    return [f"{CLAIM_HEADER}: {claim}"] if claim else []


def _kept_headers(headers: Mapping[str, str], tags: Mapping[str, str]) -> list[str]:
    """Return the lines that have headers and tags kept with an object."""
    lines = [f"{name}: {value}" for name, value in canonical_headers(headers).items()] if headers else []
    return [*lines, f"x-amz-tagging: {urlencode(tags, quote_via=quote)}"] if tags else lines


def _create(_endpoint: S3Endpoint, options: S3Options, operation: CreateMultipart) -> _Built:
    headers = options.key_headers() + _claim_headers(operation.claim) + _kept_headers(operation.headers, operation.tags)
    if options.upload_checksums and operation.checksum:
        headers += ["x-amz-checksum-algorithm: CRC32C", "x-amz-checksum-type: FULL_OBJECT"]
    return "CREATE", operation.key, "POST", "?uploads=", headers, b""


def _put_part(_endpoint: S3Endpoint, options: S3Options, operation: PutPart) -> _Built:
    query = f"?partNumber={operation.part_number}&uploadId={quote(operation.upload_id, safe='')}"
    headers = _checksum_headers(options, operation.body, operation.crc32c) + options.key_headers()
    return "PUT part", operation.key, "PUT", query, headers, operation.body


def _complete(_endpoint: S3Endpoint, options: S3Options, operation: CompleteMultipart) -> _Built:
    query = f"?uploadId={quote(operation.upload_id, safe='')}"
    headers = ["Content-Type: application/xml", *options.key_headers()]
    if options.upload_checksums and operation.checksum:
        headers.append("x-amz-checksum-type: FULL_OBJECT")
    headers += _condition_headers(operation)
    return "COMPLETE", operation.key, "POST", query, headers, xml.complete_body(operation.parts)


def _abort(_endpoint: S3Endpoint, _options: S3Options, operation: AbortMultipart) -> _Built:
    return "ABORT", operation.key, "DELETE", f"?uploadId={quote(operation.upload_id, safe='')}", [], None


def _delete(endpoint: S3Endpoint, _options: S3Options, operation: Delete) -> _Built:
    if len(operation.keys) == 1:
        return "DELETE", operation.keys[0], "DELETE", "", [], None
    for key in operation.keys:
        encoded_key(endpoint.prefix + key)
    body = xml.delete_body(endpoint.prefix + key for key in operation.keys)
    md5 = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
    return "DELETE", "", "POST", "?delete=", ["Content-Type: application/xml", f"Content-MD5: {md5}"], body


def _source_headers(endpoint: S3Endpoint, options: S3Options, source: Key, if_match: str | None) -> list[str]:
    headers = [f"x-amz-copy-source: {endpoint.copy_source}/{encoded_key(endpoint.prefix + source)}"]
    if if_match is not None:
        headers.append(f"x-amz-copy-source-if-match: {if_match}")
    return headers + options.key_headers() + options.key_headers("copy-source-")


def _copy(endpoint: S3Endpoint, options: S3Options, operation: Copy) -> _Built:
    headers = _source_headers(endpoint, options, operation.source, operation.if_match)
    if operation.headers is not None:
        headers += ["x-amz-metadata-directive: REPLACE", *_kept_headers(operation.headers, {})]
    if operation.tags is not None:
        headers += ["x-amz-tagging-directive: REPLACE", *_kept_headers({}, operation.tags)]
    return "COPY", operation.target, "PUT", "", headers, b""


def _copy_part(endpoint: S3Endpoint, options: S3Options, operation: CopyPart) -> _Built:
    query = f"?partNumber={operation.part_number}&uploadId={quote(operation.upload_id, safe='')}"
    headers = _source_headers(endpoint, options, operation.source, operation.if_match)
    headers.append(f"x-amz-copy-source-range: bytes={operation.span.start}-{operation.span.end - 1}")
    return "COPY part", operation.target, "PUT", query, headers, b""


def _forward(_endpoint: S3Endpoint, _options: S3Options, operation: Forward) -> _Built:
    query = f"?{operation.query}" if operation.query else ""
    return operation.method, operation.key, operation.method, query, list(operation.headers), operation.body


_BUILDERS = {
    Head: _head,
    ListPage: _list,
    Put: _put,
    CreateMultipart: _create,
    PutPart: _put_part,
    CompleteMultipart: _complete,
    AbortMultipart: _abort,
    Delete: _delete,
    Copy: _copy,
    CopyPart: _copy_part,
    Forward: _forward,
}
