"""Forwards the client's own requests to an S3 upstream: with the upstream's names, signed with its keys by its store.

The names of bucket and keys differ on the two sides: the gateway's bucket is a bucket or a prefix of the upstream. All places
with such names are translated: the URL, the query, the source of a copy, and elements of documents.

A body is streamed and never held, unless it is small. Over TLS, and for bodies in chunks, it is sent without a hash of its own
(``UNSIGNED-PAYLOAD``); over plain HTTP the client's own SHA-256, if it sent one, is signed again. A checksum in the client's
trailer goes to the upstream in a trailer as well (Source: Amazon S3 API reference, "Signature calculations: transferring a
payload in multiple chunks", with unsigned chunks), and that of a small body in a header.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import threading
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import quote
from xml.sax.saxutils import unescape

from penstock.errors import CredentialsError, StoreError
from penstock.gateway.buckets.documents import completed_upload, default_setting, element, malformed, parsed
from penstock.gateway.buckets.operations import OPERATIONS, BucketOperations, operation_named, setting_named
from penstock.gateway.buckets.requests import content_encoding, read_document, refuse_shared_access
from penstock.gateway.buckets.submitting import perform_on_loop
from penstock.gateway.config import UPSTREAM_RETRY
from penstock.gateway.objects import Answer, S3Error, access_denied, copy_source, not_implemented
from penstock.gateway.s3_text import escaped, url_encoded
from penstock.redaction import public_url
from penstock.store.retrying import Retrying
from penstock.store.s3 import S3Store
from penstock.store.s3_requests import encoded_key
from penstock.store.upload import multipart_etag
from penstock.types import Forward, ForwardedAnswer, Head, ListPage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping

    from penstock.gateway.objects import GatewayRequest, RequestBody
    from penstock.store.s3_endpoint import S3Endpoint
    from penstock.types import Buffer

SMALL_BYTES_MAX = 1 << 20
"""Largest body that is held, hashed, and sent again if the connection was dead or the region wrong."""

CHUNK_BYTES = 64 << 10
"""Length of all chunks of a body with a trailer but the last; S3 refuses those below 8 KiB."""

CHECKSUM_CHARACTERS = {"crc32": 8, "crc32c": 8, "crc64nvme": 12, "sha1": 28, "sha256": 44}
"""Length of each checksum in base64."""

_DOCUMENT_BYTES_MAX = 4 << 20
_STREAM_BYTES_MAX = 1 << 20
"""Bytes of a streamed body that have arrived from the client and have not been sent."""
_ATTEMPTS_MAX = 3
_ANSWER_S_MAX = 300.0
"""Time in which the upstream has to answer at least: completing a long upload takes minutes."""
_UPLOAD_S_MAX = 7 * 24 * 3600.0
"""The front ends uploads that are too slow; this is longer than any."""
_UNSIGNED = "UNSIGNED-PAYLOAD"
_UNSIGNED_TRAILER = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"

_FORWARDED = OPERATIONS - {"get_object_acl", "put_object_acl", "list_object_versions"}
"""Operations that are passed on. Settings of the bucket are not: they belong to its owner."""

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
_OF_ANSWERS = {
    "etag": "ETag",
    "last-modified": "Last-Modified",
    "content-type": "Content-Type",
    "location": "Location",
    "expires": "Expires",
}
_NOT_OF_ANSWERS = frozenset({"x-amz-request-id", "x-amz-id-2", "x-amz-bucket-region"})
_NOT_OF_WRITES = frozenset({"content-range", "if-modified-since", "if-range", "if-unmodified-since"})
_OWNER = "x-amz-expected-bucket-owner"
_BELOW_PREFIX = ("prefix", "key-marker")
_NAMES = re.compile(
    r"<(Key|Prefix|KeyMarker|NextKeyMarker|Bucket|Location)>([^<]*)</(?:Key|Prefix|KeyMarker|NextKeyMarker|Bucket|Location)>"
)
_ENTITIES = {"&quot;": '"', "&apos;": "'", "&#13;": "\r", "&#10;": "\n", "&#9;": "\t"}

_WRITES = ("put_object", "copy_object", "delete_object", "complete_multipart_upload")


class ForwardedOperations(BucketOperations):
    """Passes requests on to an S3 upstream.

    Args:
        store: The upstream.
        note_written: Called with keys before and after they are written, so that the cache drops its metadata of them.
    """

    def __init__(self, store: S3Store, *, note_written: Callable[[Collection[str]], Awaitable[None]]) -> None:
        self._s3 = store
        config = store.transport
        patient = replace(
            config, first_byte_s_max=max(_ANSWER_S_MAX, config.first_byte_s_max), total_s_max=_UPLOAD_S_MAX
        )
        # Of its own, because a client that sends slowly must hold no permit that readers wait for.
        own = S3Store(store.endpoint, provider=store.provider, transport=patient, options=store.options)
        self._store = Retrying(own, config=UPSTREAM_RETRY, attempts_max=_ATTEMPTS_MAX)
        self._note_written = note_written
        self._is_region_known = False

    async def perform(self, request: GatewayRequest, body: RequestBody) -> Answer:
        """Pass a request on; see ``BucketOperations.perform``."""
        name = operation_named(request)
        if name not in _FORWARDED or request.method == "HEAD":
            setting = setting_named(request)
            if request.method == "GET" and setting is not None:
                return default_setting(request, setting)
            raise not_implemented(f"{request.method} {setting or ''}".strip())
        passed = self._passed(request)
        stream: StreamedBody | None = None
        written = [request.key] if name in _WRITES else []
        if name == "delete_objects":
            passed, written = await self._deletion(passed, body)
        elif request.method in ("PUT", "POST") and "x-amz-copy-source" not in request.headers:
            passed, stream = await self._with_body(passed, request, body)
        elif request.method == "PUT":
            passed = passed._replace(body=b"")
        await self._note_written(written)
        try:
            return self._answer(await _performed(self._store, passed, stream), request)
        except S3Error as error:
            if error.code != "NoSuchUpload" or name != "complete_multipart_upload":
                raise
            completed = await self._completed(request, passed.body)
            if completed is None:
                raise
            return completed
        finally:
            if written:  # even after a failure: the upstream may have written although its answer was lost
                await asyncio.shield(self._note_written(written))

    async def _completed(self, request: GatewayRequest, data: object) -> Answer | None:
        """Return the answer to an upload that was completed before; None if the object does not consist of its parts.

        If an answer is lost, the client or the store repeats the request. AWS then answers as before, but other servers
        have forgotten the upload.
        """
        assert isinstance(data, bytes)
        tree = parsed(data, root="CompleteMultipartUpload")
        expected = multipart_etag(part.findtext("ETag") or "" for part in tree.findall("Part"))
        try:
            info = (await perform_on_loop(self._store, Head(request.key))).info
        except StoreError:  # the client gets the upstream's first answer
            return None
        if info is None or expected is None or (info.etag or "").strip('"') != expected:
            return None
        return completed_upload(request, info.etag or "")

    # ── requests ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _passed(self, request: GatewayRequest) -> Forward:
        """Return the headers for the upstream, without those that describe its body.

        Raises:
            S3Error: The upstream cannot do this for the client.
        """
        endpoint, options = self._s3.endpoint, self._s3.options
        refuse_shared_access(request.headers)
        if request.method != "GET" and (ignored := _NOT_OF_WRITES & set(map(str.lower, request.headers))):
            raise not_implemented(min(ignored))
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
        lines: list[str] = []
        if request.method in ("PUT", "POST") and request.key and "tagging" not in request.query:
            lines += options.key_headers()
        if "x-amz-copy-source" in request.headers:
            lines += [f"x-amz-copy-source: {_passed_source(request, endpoint)}", *options.key_headers("copy-source-")]
        own = {line.partition(":")[0].lower() for line in (*lines, *options.headers())}
        owner = options.expected_bucket_owner
        if owner and request.headers.get(_OWNER, owner) != owner:
            raise access_denied(
                "The upstream's bucket belongs to another account than the one that the request expects."
            )
        lines += [f"{name}: {value}" for name, value in headers.items() if name.lower() not in own]
        return Forward(request.method, request.key, text, tuple(lines))

    async def _with_body(
        self, passed: Forward, request: GatewayRequest, body: RequestBody
    ) -> tuple[Forward, StreamedBody | None]:
        """Return the request with its body; None for the stream if the body is held."""
        length_bytes = body.length_bytes
        if length_bytes is None:
            if request.method == "PUT":
                raise S3Error("MissingContentLength", "You must provide the Content-Length HTTP header.")
            length_bytes = 0
        if length_bytes <= SMALL_BYTES_MAX or request.method == "POST":
            data = await read_document(body, max(SMALL_BYTES_MAX, _DOCUMENT_BYTES_MAX))
            sums = {
                f"x-amz-checksum-{name}": value for name, value in body.checksums.items() if name in CHECKSUM_CHARACTERS
            }
            return _with_headers(passed, sums)._replace(body=data), None
        await self._learn_region()
        trailer = request.headers.get("x-amz-trailer", "").strip().lower().removeprefix("x-amz-checksum-")
        if trailer in CHECKSUM_CHARACTERS:
            headers = {
                "x-amz-content-sha256": _UNSIGNED_TRAILER,
                "x-amz-decoded-content-length": str(length_bytes),
                "x-amz-trailer": f"x-amz-checksum-{trailer}",
                "Content-Encoding": ",".join(filter(None, ["aws-chunked", content_encoding(request.headers)])),
            }
            pieces = encoded(aiter(body), trailer, lambda: body.checksums[trailer])
            stream = StreamedBody(pieces, encoded_length_bytes(length_bytes, trailer))
        else:
            sent = request.headers.get("x-amz-content-sha256", "")
            is_hash = len(sent) == 64 and not self._s3.endpoint.over_tls
            headers = {"x-amz-content-sha256": sent if is_hash else _UNSIGNED}
            stream = StreamedBody(aiter(body), length_bytes)
        return _with_headers(passed, headers)._replace(body=stream), stream

    async def _deletion(self, passed: Forward, body: RequestBody) -> tuple[Forward, list[str]]:
        """Return ``DeleteObjects`` with the upstream's keys, and the client's keys."""
        tree = parsed(await read_document(body), root="Delete")
        rows = [[(child.tag, child.text or "") for child in row] for row in tree.findall("Object")]
        keys = [dict(row).get("Key", "") for row in rows]
        if not 0 < len(rows) <= 1000 or not all(keys):
            raise malformed()
        prefix = self._s3.endpoint.prefix
        objects = [("Object", [(name, prefix + text if name == "Key" else text) for name, text in row]) for row in rows]
        data = element("Delete", [("Quiet", (tree.findtext("Quiet") or "false").strip()), *objects]).encode()
        sums = ("x-amz-checksum-", "x-amz-sdk-", "content-md5")
        kept = tuple(line for line in passed.headers if not line.lower().startswith(sums))
        digest = hashlib.md5(data, usedforsecurity=False).digest()
        md5 = {"Content-MD5": base64.b64encode(digest).decode()}
        return _with_headers(passed._replace(headers=kept), md5)._replace(body=data), keys

    async def _learn_region(self) -> None:
        """Have the store find the bucket's region, because a body that is streamed cannot be sent a second time."""
        if not self._is_region_known:
            await perform_on_loop(self._store, ListPage(keys_max=1))
            self._is_region_known = True

    # ── answers ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _answer(self, answer: ForwardedAnswer, request: GatewayRequest) -> Answer:
        headers = _passed_headers(answer.headers, request)
        return Answer(answer.status, headers, self._passed_document(answer.body, request) if answer.body else b"")

    def _passed_document(self, body: bytes, request: GatewayRequest) -> bytes:
        """Return a document of the upstream with the names by which the client knows bucket and keys."""
        is_encoded = b"<EncodingType>url</EncodingType>" in body
        prefix = url_encoded(self._s3.endpoint.prefix) if is_encoded else self._s3.endpoint.prefix

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


async def _performed(store: Retrying, passed: Forward, stream: StreamedBody | None) -> ForwardedAnswer:
    """Send a request, and its body if it is streamed.

    Raises:
        S3Error: The upstream's refusal, or the defect of the client's body.
    """
    sending = asyncio.ensure_future(stream.send()) if stream is not None else None
    try:
        answer: ForwardedAnswer = (await perform_on_loop(store, passed)).value
    except StoreError as error:
        if stream is not None and stream.error is not None:
            raise stream.error from None
        if isinstance(error, CredentialsError):  # the gateway's own: its client is not to blame
            raise
        raise _refusal(error) from error
    else:
        return answer
    finally:
        if sending is not None:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)


def _refusal(error: StoreError) -> S3Error:
    """Return an error of the upstream as it said it."""
    if error.status and error.code:
        return S3Error(error.code, error.what, status=max(error.status, 400))
    if error.status:
        message = f"The upstream answered with status {error.status}."
        return S3Error("ServiceUnavailable", message, status=max(error.status, 400))
    message = "The upstream could not be reached, or broke the connection off; please try again."
    return S3Error("ServiceUnavailable", message)


def _with_headers(passed: Forward, headers: Mapping[str, str]) -> Forward:
    """Return a request with these headers in the place of its own ones of the same names."""
    names = tuple(f"{name.lower()}:" for name in headers)
    kept = (line for line in passed.headers if not line.lower().startswith(names))
    return passed._replace(headers=(*kept, *(f"{name}: {value}" for name, value in headers.items())))


def _is_passed(name: str) -> bool:
    return name in _PASSED or (name.startswith("x-amz-") and name not in _NOT_PASSED)


def _passed_source(request: GatewayRequest, endpoint: S3Endpoint) -> str:
    source = copy_source(request.headers)
    if source.bucket != request.bucket:
        raise not_implemented("copying from another bucket or access point than the one that is written")
    return f"{endpoint.copy_source}/{encoded_key(endpoint.prefix + source.key)}"


def _passed_headers(headers: Mapping[bytes, bytes], request: GatewayRequest) -> dict[str, str]:
    """Return the headers of an upstream's answer that the client gets."""
    found = {}
    for raw, value in headers.items():
        name = raw.decode("latin-1")
        if name in _OF_ANSWERS or (name.startswith("x-amz-") and name not in _NOT_OF_ANSWERS):
            found[_OF_ANSWERS.get(name, name)] = value.decode("utf-8", "surrogateescape")
    if "Location" in found:
        found["Location"] = public_url(request.url)
    return found


class StreamedBody:
    """A client's body on its way to the upstream: a ``BodyStream`` that the event loop fills and the transport empties.

    Args:
        pieces: The body.
        length_bytes: Number of bytes of the body.

    Attributes:
        length_bytes: Number of bytes of the body.
        error: The error of the client's body; None if it is right so far.
    """

    def __init__(self, pieces: AsyncIterator[bytes], length_bytes: int) -> None:
        self.length_bytes = length_bytes
        self.error: Exception | None = None
        self._source = pieces
        self._loop = asyncio.get_running_loop()
        self._has_room = asyncio.Event()
        self._lock = threading.Lock()
        self._pieces: deque[Buffer] = deque()
        self._held_bytes = 0
        self._is_ended = False
        self._on_more: Callable[[], None] | None = None

    async def send(self) -> None:
        """Take the client's pieces as they come, and as the transport takes them."""
        held = b""
        try:
            async for piece in self._source:
                if held:
                    await self._add(held)
                held = piece
            if held:  # only now, because a body may be refused at its end, and the upstream stores complete bodies
                await self._add(held)
        except Exception as error:
            self.error = error
        else:
            self._is_ended = True
        self._wake()

    async def _add(self, piece: bytes) -> None:
        while self._held_bytes >= _STREAM_BYTES_MAX:
            self._has_room.clear()
            if self._held_bytes >= _STREAM_BYTES_MAX:  # the transport may have taken some before the event was cleared
                await self._has_room.wait()
        with self._lock:
            self._pieces.append(piece)
            self._held_bytes += len(piece)
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            on_more, self._on_more = self._on_more, None
        if on_more is not None:
            on_more()

    def read_nowait(self, size_bytes: int, on_more: Callable[[], None]) -> bytes | None:
        """Return the next bytes; see ``types.BodyStream``."""
        with self._lock:
            if self.error is not None:
                raise self.error
            if not self._pieces:
                if self._is_ended:
                    return b""
                self._on_more = on_more
                return None
            piece = memoryview(self._pieces.popleft())
            if len(piece) > size_bytes:
                self._pieces.appendleft(piece[size_bytes:])
                piece = piece[:size_bytes]
            self._held_bytes -= len(piece)
        with suppress(RuntimeError):  # the process is ending
            self._loop.call_soon_threadsafe(self._has_room.set)
        return bytes(piece)


def encoded_length_bytes(length_bytes: int, algorithm: str) -> int:
    """Return the length of a body in chunks, which has a trailer with a checksum."""
    whole, rest = divmod(length_bytes, CHUNK_BYTES)
    total = whole * (len(f"{CHUNK_BYTES:x}") + CHUNK_BYTES + 4)
    if rest:
        total += len(f"{rest:x}") + rest + 4
    return total + 3 + len(f"x-amz-checksum-{algorithm}:") + CHECKSUM_CHARACTERS[algorithm] + 4


async def encoded(pieces: AsyncIterator[bytes], algorithm: str, checksum: Callable[[], str]) -> AsyncIterator[bytes]:
    """Iterate over a body in chunks, and its trailer.

    Args:
        pieces: The body.
        algorithm: Name of the checksum.
        checksum: Returns the checksum in base64, when the body has ended.
    """
    held = bytearray()
    async for piece in pieces:
        held += piece
        while len(held) >= CHUNK_BYTES:
            yield b"%x\r\n%b\r\n" % (CHUNK_BYTES, bytes(held[:CHUNK_BYTES]))
            del held[:CHUNK_BYTES]
    if held:
        yield b"%x\r\n%b\r\n" % (len(held), bytes(held))
    yield b"0\r\n" + f"x-amz-checksum-{algorithm}:{checksum()}".encode() + b"\r\n\r\n"
