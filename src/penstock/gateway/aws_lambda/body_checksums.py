"""Checksums that a handler sends with its answer, compared with the bytes that arrive."""

from __future__ import annotations

import base64
import hashlib
from typing import TYPE_CHECKING

from penstock.checksums.algorithms import ALGORITHMS, Hasher, hasher
from penstock.gateway.objects import S3Error

if TYPE_CHECKING:
    from penstock.types import Buffer

HASHLIB = ("sha512", "md5")


class BodyChecksum:
    """One checksum of a body.

    Cost: about 0.1 s per GB for CRCs, 1 s per GB for SHA.

    Args:
        algorithm: Name of the algorithm, as in ``x-amz-checksum-...``.
        expected: Checksum that the body must have, in base64.
    """

    def __init__(self, algorithm: str, expected: str) -> None:
        self._algorithm = algorithm
        self._expected = expected.strip()
        self._hasher = _hasher_of(algorithm)

    @property
    def is_checked(self) -> bool:
        """Whether this process can compute the algorithm; if not, the result must not promise the checksum."""
        return self._hasher is not None

    def update(self, data: Buffer) -> None:
        """Add bytes of the body."""
        if self._hasher is not None:
            self._hasher.update(data)

    def verify(self) -> None:
        """Compare. Raises ``S3Error`` if the body differs."""
        if self._hasher is None:
            return
        found = base64.b64encode(self._hasher.digest()).decode("ascii")
        if found != self._expected:
            message = f"The body does not match its checksum {self._algorithm}."
            raise S3Error("BadDigest", message, status=400)


def _hasher_of(algorithm: str) -> Hasher | None:
    if algorithm in HASHLIB:
        return hashlib.new(algorithm, usedforsecurity=False)
    return hasher(algorithm) if algorithm in ALGORITHMS else None
