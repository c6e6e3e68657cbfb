"""Decodes the bodies of requests, and compares them with every hash and checksum that came with them.

The last piece of a body is handed out only when everything has been compared, so that a reader who counts bytes cannot take
a damaged body for a whole one.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from typing import TYPE_CHECKING, NamedTuple

from penstock.checksums.algorithms import ALGORITHMS, Hasher, hasher
from penstock.gateway.authentication.chunks import ChunkDecoder, ChunkSignatures
from penstock.gateway.objects import S3Error
from penstock.transport import EMPTY_SHA256, UNSIGNED_PAYLOAD
from penstock.version import install_hint

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from penstock.gateway.authentication.chunks import ChunkSigner
    from penstock.gateway.objects import RequestBody, RequestHead

_CHECKSUM = "x-amz-checksum-"
_NOT_CHECKSUMS = frozenset({"algorithm", "mode", "type"})
_DIGEST_BYTES = {"crc32": 4, "crc32c": 4, "crc64nvme": 8, "sha1": 20, "sha256": 32}
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_LENGTH = re.compile(r"[0-9]{1,18}")


class Payload(NamedTuple):
    """The encoding and protection of a body, as ``x-amz-content-sha256`` says.

    Attributes:
        sha256: Hash of the whole body in lower-case hexadecimal; empty if it was not sent.
        is_chunked: Whether the body is encoded as ``aws-chunked``.
        is_signed: Whether every chunk is signed.
        has_trailer: Whether a trailer may follow the last chunk.
    """

    sha256: str = ""
    is_chunked: bool = False
    is_signed: bool = False
    has_trailer: bool = False


_PAYLOADS = {
    UNSIGNED_PAYLOAD: Payload(),
    EMPTY_SHA256: Payload(EMPTY_SHA256),
    "STREAMING-AWS4-HMAC-SHA256-PAYLOAD": Payload(is_chunked=True, is_signed=True),
    "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER": Payload(is_chunked=True, is_signed=True, has_trailer=True),
    "STREAMING-UNSIGNED-PAYLOAD-TRAILER": Payload(is_chunked=True, has_trailer=True),
}


def payload_of(text: str, *, is_presigned: bool) -> Payload:
    """Return what ``x-amz-content-sha256`` says.

    Args:
        text: The header.
        is_presigned: Whether the signature is in the query, where no chunk can be signed.

    Raises:
        S3Error: The value is unknown, or not supported.
    """
    found = _PAYLOADS.get(text)
    if found is None:
        if text.startswith("STREAMING-"):
            raise S3Error("NotImplemented", f"The payload {text[:64]!r} is not supported.")
        if not _SHA256.fullmatch(text):
            what = "x-amz-content-sha256 must be UNSIGNED-PAYLOAD, one of the values STREAMING-..., or a SHA-256."
            raise S3Error("InvalidArgument", what)
        found = Payload(text.lower())
    if is_presigned and found.is_signed:
        raise S3Error("InvalidRequest", "A presigned URL cannot promise signed chunks.")
    return found


def open_body(
    pieces: AsyncIterator[bytes], *, head: RequestHead, payload: Payload, signer: ChunkSigner | None
) -> RequestBody:
    """Return the decoded body of a request; see ``VerifiedRequest.open_body``.

    Args:
        pieces: The body as it arrives, cut anywhere.
        head: The request.
        payload: Encoding and signature of the body, as its headers declare them.
        signer: Signs the chunks of the body again; None if nothing was verified.

    Raises:
        S3Error: A length or a checksum in the headers is not valid or not supported.
    """
    headers = head.headers
    checks = _checks(head)
    if not payload.is_chunked:
        if payload.sha256:
            checks.append(_payload_check(payload.sha256))
        return DecodedBody(pieces, length_bytes=_length(headers, "content-length"), checks=checks)
    length_bytes = _length(headers, "x-amz-decoded-content-length")
    if length_bytes is None:
        raise S3Error("MissingContentLength", "You must provide the x-amz-decoded-content-length header.")
    announced = _announced(headers) if payload.has_trailer else frozenset()
    signatures = ChunkSignatures(is_signed=payload.is_signed, signer=signer)
    decoder = ChunkDecoder(signatures, length_bytes=length_bytes, may_trail=announced)
    trailing = {name.removeprefix(_CHECKSUM): _computed(name.removeprefix(_CHECKSUM)) for name in announced}
    return DecodedBody(pieces, length_bytes=length_bytes, checks=checks, decoder=decoder, trailing=trailing)


class BodyCheck:
    """One hash of the whole body, and its expected value. `algorithm` is the name of an S3 checksum, or empty."""

    __slots__ = ("_error", "_expected", "algorithm", "hasher")

    def __init__(self, computed: Hasher, expected: bytes, error: S3Error, *, algorithm: str = "") -> None:
        self.algorithm = algorithm
        self.hasher = computed
        self._expected = expected
        self._error = error

    def compare(self) -> None:
        """Raise the error if the hash is another one."""
        if self.hasher.digest() != self._expected:
            raise self._error


class DecodedBody:
    """A body that is decoded while it is read.

    Args:
        pieces: The body as it arrives.
        length_bytes: Length of the decoded body; None if the client did not send it.
        checks: Hashes with which the body is compared at its end.
        decoder: Decodes chunks; None leaves the body as it is.
        trailing: Computes the checksums that follow the last chunk, by algorithm.

    Attributes:
        length_bytes: Length of the decoded body.
        checksums: Checksums that the body matched, base64 by algorithm; complete when the iteration has ended.
    """

    def __init__(
        self,
        pieces: AsyncIterator[bytes],
        *,
        length_bytes: int | None,
        checks: list[BodyCheck],
        decoder: ChunkDecoder | None = None,
        trailing: Mapping[str, Hasher] | None = None,
    ) -> None:
        self.length_bytes = length_bytes
        self.checksums: Mapping[str, str] = {}
        self._pieces = pieces
        self._checks = checks
        self._decoder = decoder
        self._trailing = trailing or {}

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Iterate over the decoded body; see ``RequestBody``."""
        decoder, checks = self._decoder, self._checks
        hashers = [*self._trailing.values(), *(check.hasher for check in checks)]
        holds_back = bool(hashers) or decoder is not None
        held, total_bytes = b"", 0
        async for piece in self._pieces:
            for data in decoder.feed(piece) if decoder is not None else (piece,):
                total_bytes += len(data)
                if self.length_bytes is not None and total_bytes > self.length_bytes:
                    raise S3Error("IncompleteBody", "The body is longer than its length says.")
                for computed in hashers:
                    computed.update(data)
                ready, held = (held, data) if holds_back else (data, b"")
                if ready:
                    yield ready
        if decoder is not None:
            decoder.end()
            trailers = decoder.trailers
            trailing = self._trailing.items()
            checks = [*(_checksum_check(name, trailers[_CHECKSUM + name], each) for name, each in trailing), *checks]
        elif self.length_bytes is not None and total_bytes != self.length_bytes:
            message = "You did not provide the number of bytes specified by the Content-Length header."
            raise S3Error("IncompleteBody", message)
        for check in checks:
            check.compare()
        self.checksums = {
            check.algorithm: base64.b64encode(check.hasher.digest()).decode() for check in checks if check.algorithm
        }
        if held:
            yield held


def _length(headers: Mapping[str, str], name: str) -> int | None:
    text = headers.get(name)
    if text is None:
        return None
    if not _LENGTH.fullmatch(text):
        raise S3Error("InvalidArgument", f"{name} must be a number of bytes.")
    return int(text)


def _announced(headers: Mapping[str, str]) -> frozenset[str]:
    names = frozenset(name.strip().lower() for name in headers.get("x-amz-trailer", "").split(",") if name.strip())
    for name in names:
        if not name.startswith(_CHECKSUM) or name.removeprefix(_CHECKSUM) in _NOT_CHECKSUMS:
            raise S3Error("InvalidRequest", "The value specified in the x-amz-trailer header is not supported.")
    if len(names) > 1:
        raise _several()
    return names


def _checks(head: RequestHead) -> list[BodyCheck]:
    """Parse the headers about the whole body."""
    headers = head.headers
    checks = []
    if (md5 := headers.get("content-md5")) is not None:
        expected = _decoded(md5, length_bytes=16)
        if expected is None:
            raise S3Error("InvalidDigest", "The Content-MD5 you specified is not valid.")
        wrong = S3Error("BadDigest", "The Content-MD5 you specified did not match what we received.")
        checks.append(BodyCheck(hashlib.md5(usedforsecurity=False), expected, wrong))
    if head.method == "POST" and "uploadId=" in head.raw_query:
        return checks  # completes an upload: the checksum is that of the object, and the body is a list of parts
    names = [name for name in map(str.lower, headers) if name.startswith(_CHECKSUM)]
    algorithms = {name.removeprefix(_CHECKSUM) for name in names} - _NOT_CHECKSUMS
    if len(algorithms) > 1:
        raise _several()
    named = [(algorithm, headers[_CHECKSUM + algorithm]) for algorithm in algorithms]
    return checks + [_checksum_check(algorithm, text, _computed(algorithm)) for algorithm, text in named]


def _payload_check(sha256: str) -> BodyCheck:
    wrong = S3Error("XAmzContentSHA256Mismatch", "The provided 'x-amz-content-sha256' header does not match what was "
                    "computed.")  # fmt: skip
    return BodyCheck(hashlib.sha256(), bytes.fromhex(sha256), wrong)


def _checksum_check(algorithm: str, text: str, computed: Hasher) -> BodyCheck:
    expected = _decoded(text, length_bytes=_DIGEST_BYTES[algorithm])
    if expected is None:
        raise S3Error("InvalidRequest", f"Value for {_CHECKSUM}{algorithm} header is invalid.")
    message = f"The {algorithm.upper()} you specified did not match the calculated checksum."
    return BodyCheck(computed, expected, S3Error("BadDigest", message), algorithm=algorithm)


def _computed(algorithm: str) -> Hasher:
    if algorithm not in ALGORITHMS:
        raise S3Error("InvalidRequest", f"The checksum algorithm {algorithm[:32]!r} is not supported.")
    fresh = hasher(algorithm)
    if fresh is None:
        what = f"{algorithm} cannot be verified here. Send CRC32C. The gateway's host needs: {install_hint('crt')}"
        raise S3Error("NotImplemented", what)
    return fresh


def _several() -> S3Error:
    what = "Expecting a single x-amz-checksum- header. Multiple checksum Types are not allowed."
    return S3Error("InvalidRequest", what)


def _decoded(text: str, *, length_bytes: int) -> bytes | None:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return data if len(data) == length_bytes else None
