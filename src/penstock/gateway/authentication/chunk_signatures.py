"""Rules for the chunks of a streamed upload: signed one after the other, unsigned, or signed by a key that is not checked.

Each signature covers the one before it, so chunks cannot be left out, repeated or exchanged.

Source: Amazon S3 API reference, "Signature calculations: transferring payload in multiple chunks", with and without trailers.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING, Protocol

from penstock.gateway.objects import S3Error
from penstock.transport import EMPTY_SHA256

if TYPE_CHECKING:
    from penstock.types import Buffer


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


class ChunkRules(Protocol):
    """Checks the chunks of one body."""

    def begin(self, signature: str | None) -> None:
        """Begin a chunk whose header has this signature. Raises ``S3Error`` if it must have one, or must not."""

    def update(self, data: Buffer) -> None:
        """Take bytes of the chunk."""

    def end(self) -> None:
        """End the chunk. Raises ``S3Error`` if its signature is wrong."""

    def trailer(self, lines: str, signature: str | None) -> None:
        """Take the trailer, as lines ``name:value`` that end with a line break. Raises ``S3Error`` as the others do."""


class SignedChunks:
    """Every chunk is signed, and the trailer as well if there is one.

    Args:
        signer: Signs the same chunks again.
    """

    __slots__ = ("_hash", "_signature", "_signer")

    def __init__(self, signer: ChunkSigner) -> None:
        self._signer = signer
        self._signature = ""
        self._hash = hashlib.sha256()

    def begin(self, signature: str | None) -> None:
        """Begin a chunk, which must have a signature."""
        self._signature = _required(signature, "chunk")
        self._hash = hashlib.sha256()

    def update(self, data: Buffer) -> None:
        """Take bytes of the chunk."""
        self._hash.update(data)

    def end(self) -> None:
        """Compare the chunk's signature with the right one."""
        _compare(self._signer.chunk(self._hash.hexdigest()), self._signature, "chunk")

    def trailer(self, lines: str, signature: str | None) -> None:
        """Compare the trailer's signature with the right one."""
        expected = self._signer.trailer(hashlib.sha256(lines.encode()).hexdigest())
        _compare(expected, _required(signature, "trailer"), "trailer")


class UnsignedChunks:
    """No chunk is signed; only a checksum in the trailer protects the body."""

    __slots__ = ()

    def begin(self, signature: str | None) -> None:
        """Begin a chunk, which must have no signature."""
        _forbidden(signature, "chunk")

    def update(self, data: Buffer) -> None:
        """Take bytes of the chunk; nothing is computed of them."""

    def end(self) -> None:
        """End the chunk."""

    def trailer(self, lines: str, signature: str | None) -> None:
        """Take the trailer, which must have no signature."""
        del lines
        _forbidden(signature, "trailer")


class UnverifiedChunks:
    """Chunks are signed by a key that this gateway does not have, because it has no keys at all."""

    __slots__ = ()

    def begin(self, signature: str | None) -> None:
        """Begin a chunk, which must have a signature."""
        _required(signature, "chunk")

    def update(self, data: Buffer) -> None:
        """Take bytes of the chunk; nothing is computed of them."""

    def end(self) -> None:
        """End the chunk."""

    def trailer(self, lines: str, signature: str | None) -> None:
        """Take the trailer, which must have a signature."""
        del lines
        _required(signature, "trailer")


def _required(signature: str | None, what: str) -> str:
    if signature is None:
        message = f"The request promised signed chunks, but a {what} has no signature."
        raise S3Error("SignatureDoesNotMatch", message, status=403)
    return signature


def _forbidden(signature: str | None, what: str) -> None:
    if signature is not None:
        message = f"The request promised unsigned chunks, but a {what} has a signature."
        raise S3Error("InvalidRequest", message, status=400)


def _compare(expected: str, signature: str, what: str) -> None:
    if not hmac.compare_digest(expected, signature):
        message = f"The signature of a {what} does not match the one that we calculated."
        raise S3Error("SignatureDoesNotMatch", message, status=403)
