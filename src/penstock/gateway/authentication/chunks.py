r"""Decodes ``aws-chunked`` bodies piece by piece, wherever the pieces are cut, and checks the signatures of the chunks.

A chunk is ``SIZE[;chunk-signature=SIGNATURE]\r\nDATA\r\n``; after the chunk of size 0 come trailers and an empty line. All
except the data itself is bounded. Each signature covers the previous one, so chunks cannot be left out, repeated or exchanged.

Source: Amazon S3 API reference, "Signature calculations: transferring payload in multiple chunks", with and without trailers.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import TYPE_CHECKING

from penstock.gateway.objects import S3Error
from penstock.transport import EMPTY_SHA256

if TYPE_CHECKING:
    from penstock.types import Buffer

HEADER_BYTES_MAX = 128
"""Longest header of a chunk in bytes: 16 digits, ``;chunk-signature=``, 64 digits and the line break have 99."""

TRAILER_BYTES_MAX = 2048
"""Largest trailer in bytes; a SHA-256 and a signature have less than 200."""

_HEADER = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;chunk-signature=([0-9a-f]{64}))?")
_TRAILER = re.compile(r"(x-amz-[a-z0-9-]{1,64}):[ \t]*([!-~]{1,256})[ \t\n]*", re.IGNORECASE)
_TRAILER_SIGNATURE = "x-amz-trailer-signature"


class ChunkSigner:
    """Signs chunk after chunk, beginning with the signature of the request.

    Args:
        day_key: Key of the scope.
        stamp: Time of signing: ``20260102T030405Z``.
        scope: Scope of the signature.
        seed: Signature of the request's head.
    """

    __slots__ = ("_day_key", "_place", "_previous")

    def __init__(self, day_key: bytes, stamp: str, scope: str, seed: str) -> None:
        self._day_key = day_key
        self._place = f"{stamp}\n{scope}\n"
        self._previous = seed

    def __repr__(self) -> str:
        return "<ChunkSigner>"

    def chunk(self, payload_sha256: str) -> str:
        """Return the signature of the next chunk, whose bytes have this hash."""
        return self._sign(f"AWS4-HMAC-SHA256-PAYLOAD\n{self._place}{self._previous}\n{EMPTY_SHA256}\n{payload_sha256}")

    def trailer(self, trailer_sha256: str) -> str:
        """Return the signature of the trailer, whose lines have this hash."""
        return self._sign(f"AWS4-HMAC-SHA256-TRAILER\n{self._place}{self._previous}\n{trailer_sha256}")

    def _sign(self, text: str) -> str:
        self._previous = hmac.digest(self._day_key, text.encode(), "sha256").hex()
        return self._previous


class ChunkSignatures:
    """Checks the signatures of the chunks and of the trailer of one body.

    Args:
        is_signed: Whether every chunk must be signed, and the trailer as well if there is one. Otherwise none may be: only a
            checksum in the trailer protects the body.
        signer: Signs the same chunks again; None compares nothing, because the gateway has no keys.
    """

    __slots__ = ("_hash", "_is_signed", "_signature", "_signer")

    def __init__(self, *, is_signed: bool, signer: ChunkSigner | None) -> None:
        self._is_signed = is_signed
        self._signer = signer if is_signed else None
        self._signature = ""
        self._hash = hashlib.sha256()

    def begin(self, signature: str | None) -> None:
        """Begin a chunk whose header has this signature. Raises ``S3Error`` if it must have one, or must not."""
        self._signature = self._checked(signature, "chunk")
        self._hash = hashlib.sha256()

    def update(self, data: Buffer) -> None:
        """Take bytes of the chunk."""
        if self._signer is not None:
            self._hash.update(data)

    def end(self) -> None:
        """End the chunk. Raises ``S3Error`` if its signature is wrong."""
        if self._signer is not None:
            _compare(self._signer.chunk(self._hash.hexdigest()), self._signature, "chunk")

    def trailer(self, lines: str, signature: str | None) -> None:
        """Take the trailer, as lines ``name:value`` that end with a line break. Raises ``S3Error`` as the others do."""
        found = self._checked(signature, "trailer")
        if self._signer is not None:
            _compare(self._signer.trailer(hashlib.sha256(lines.encode()).hexdigest()), found, "trailer")

    def _checked(self, signature: str | None, what: str) -> str:
        if self._is_signed and signature is None:
            message = f"The request promised signed chunks, but a {what} has no signature."
            raise S3Error("SignatureDoesNotMatch", message)
        if not self._is_signed and signature is not None:
            raise S3Error("InvalidRequest", f"The request promised unsigned chunks, but a {what} has a signature.")
        return signature or ""


class ChunkDecoder:
    """Takes an encoded body in pieces, and returns its data.

    Args:
        signatures: Checks the chunks' signatures.
        length_bytes: Length of the decoded body, which the request's head promised.
        may_trail: Names of the trailers that the request's head announced, in lower case.

    Attributes:
        trailers: Values of the trailers by name, complete after ``end``.
    """

    __slots__ = ("_expects_break", "_is_ended", "_left_bytes", "_line", "_may_trail", "_open_bytes", "_signatures",
                 "_trailer_bytes", "_trailing", "trailers")  # fmt: skip

    def __init__(
        self, signatures: ChunkSignatures, *, length_bytes: int, may_trail: frozenset[str] = frozenset()
    ) -> None:
        self.trailers: dict[str, str] = {}
        self._signatures = signatures
        self._may_trail = may_trail
        self._open_bytes = length_bytes  # of the body that no chunk has announced yet
        self._left_bytes = 0  # of the current chunk
        self._expects_break = False
        self._trailing = False
        self._is_ended = False
        self._line = b""
        self._trailer_bytes = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data in the next piece of the body.

        Raises:
            S3Error: The encoding or a signature is wrong, or the body is longer than promised.
        """
        found, offset, length = [], 0, len(piece)
        while offset < length:
            if self._left_bytes:
                end = min(length, offset + self._left_bytes)
                data = piece[offset:end]  # the piece itself if it is all data
                self._signatures.update(data)
                self._left_bytes -= end - offset
                found.append(data)
                offset = end
                self._expects_break = not self._left_bytes
            else:
                offset = self._take_line(piece, offset)
        return found

    def end(self) -> None:
        """Take the end of the body.

        Raises:
            S3Error: The last chunk is missing, or the body is shorter than promised.
        """
        if not self._is_ended or self._open_bytes:
            message = "The body ended before its last chunk, or is shorter than x-amz-decoded-content-length."
            raise S3Error("IncompleteBody", message)

    def _take_line(self, piece: bytes, offset: int) -> int:
        if self._is_ended:
            raise _malformed("there is data after the last chunk")
        bound = TRAILER_BYTES_MAX - self._trailer_bytes if self._trailing else HEADER_BYTES_MAX
        room = bound - len(self._line)
        end = piece.find(b"\n", offset, offset + room) + 1
        if not end:
            self._line += piece[offset : offset + room]
            if len(self._line) >= bound:
                raise _malformed(f"a line has more than {bound} bytes")
            return min(len(piece), offset + room)
        line, self._line = self._line + piece[offset:end], b""
        if not line.endswith(b"\r\n"):
            raise _malformed("a line does not end with CR LF")
        self._end_line(line[:-2])
        return end

    def _end_line(self, line: bytes) -> None:
        if self._expects_break:
            if line:
                raise _malformed("a chunk is longer than its header says")
            self._expects_break = False
            self._signatures.end()
        elif not self._trailing:
            self._begin_chunk(line)
        elif line:
            self._trailer_bytes += len(line)
            self._add_trailer(line)
        else:
            self._end_trailer()

    def _begin_chunk(self, line: bytes) -> None:
        match = _HEADER.fullmatch(line)
        if match is None:
            raise _malformed("the header of a chunk cannot be read")
        size_bytes = int(match[1], 16)
        if size_bytes > self._open_bytes:
            raise S3Error("IncompleteBody", "The body is longer than x-amz-decoded-content-length says.")
        self._signatures.begin(match[2].decode() if match[2] is not None else None)
        self._open_bytes -= size_bytes
        self._left_bytes = size_bytes
        if not size_bytes:
            self._signatures.end()
            self._trailing = True

    def _add_trailer(self, line: bytes) -> None:
        match = _TRAILER.fullmatch(line.decode("latin-1"))
        name = match[1].lower() if match is not None else ""
        if match is None or name in self.trailers or (name not in self._may_trail and name != _TRAILER_SIGNATURE):
            raise _bad_trailer("it has a line that was not announced, or cannot be read")
        if _TRAILER_SIGNATURE in self.trailers:
            raise _bad_trailer("there is a line after its signature")
        self.trailers[name] = match[2]

    def _end_trailer(self) -> None:
        signature = self.trailers.pop(_TRAILER_SIGNATURE, None)
        if missing := self._may_trail - self.trailers.keys():
            raise _bad_trailer(f"{min(missing)} was announced and is missing")
        if self._may_trail or signature is not None:
            lines = "".join(f"{name}:{value}\n" for name, value in self.trailers.items())
            self._signatures.trailer(lines, signature)
        self._is_ended = True


def _malformed(what: str) -> S3Error:
    return S3Error("InvalidRequest", f"The body is not encoded as aws-chunked: {what}.")


def _bad_trailer(what: str) -> S3Error:
    return S3Error("MalformedTrailerError", f"The trailer of the body is not as it was announced: {what}.")


def _compare(expected: str, signature: str, what: str) -> None:
    if not hmac.compare_digest(expected, signature):
        raise S3Error("SignatureDoesNotMatch", f"The signature of a {what} does not match the one that we calculated.")
