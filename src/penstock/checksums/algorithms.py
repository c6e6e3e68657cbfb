"""Checksums that S3 keeps of whole objects: compared with what arrives, and computed for what is sent.

One core computes CRC32C at 18 GB/s (package crc32c), CRC64NVME at 10 GB/s (awscrt, the extra ``[crt]``), CRC32 at 26 GB/s
(``penstock.checksums.crc32``), and SHA-1 and SHA-256 at 1 to 2 GB/s (OpenSSL).
Source: S3 API reference, "Checking object integrity": header ``x-amz-checksum-ALGORITHM``, big-endian base64.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from typing import TYPE_CHECKING, Protocol

from penstock.checksums.combining import combined_crc
from penstock.checksums.crc32 import crc32
from penstock.errors import ChecksumError
from penstock.version import install_hint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.types import Buffer

HEADER = b"x-amz-checksum-"
ALGORITHMS = ("crc32c", "crc64nvme", "crc32", "sha256", "sha1")
"""Algorithms in order of preference, cheapest first."""


class Hasher(Protocol):
    """A checksum that is computed over bytes in order."""

    def update(self, data: Buffer, /) -> None:
        """Add bytes."""

    def digest(self) -> bytes:
        """Return the checksum of all bytes so far, big-endian."""


class _Crc:
    """A CRC as a ``Hasher``."""

    __slots__ = ("_function", "_length_bytes", "_value")

    def __init__(self, function: Callable[[Buffer, int], int], length_bytes: int) -> None:
        self._function = function
        self._length_bytes = length_bytes
        self._value = 0

    def update(self, data: Buffer, /) -> None:
        self._value = self._function(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(self._length_bytes, "big")


class PartsCrc:
    """The CRC-32C of an object as a ``Hasher`` that takes those of its parts, so that no byte is read twice."""

    __slots__ = ("_value",)

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Buffer, /) -> None:
        """Add bytes."""
        self.add(data)

    def add(self, data: Buffer) -> int:
        """Add a part, and return its own CRC-32C."""
        from penstock.checksums.crc32c import crc32c

        crc: int = crc32c(data)
        self._value = combined_crc(self._value, crc, len(data))
        return crc

    def digest(self) -> bytes:
        """Return the checksum of all parts so far, big-endian."""
        return self._value.to_bytes(4, "big")


@cache
def _crc_function(name: str) -> Callable[[Buffer, int], int] | None:
    if name == "crc32c":
        from penstock.checksums.crc32c import crc32c

        return crc32c  # type: ignore[no-any-return, unused-ignore]
    if name == "crc32":
        return crc32
    try:
        from awscrt import checksums
    except ImportError:
        return None
    return checksums.crc64nvme  # type: ignore[no-any-return, unused-ignore]


def hasher(name: str) -> Hasher | None:
    """Return a hasher for one of ``ALGORITHMS``; None if the library for it is not installed."""
    if name in ("sha1", "sha256"):
        return hashlib.new(name, usedforsecurity=False)
    function = _crc_function(name)
    return _Crc(function, 8 if name == "crc64nvme" else 4) if function is not None else None


def full_object(headers: Mapping[bytes, bytes]) -> Mapping[str, str]:
    """Return the full-object checksums in the headers of an answer, by algorithm; composite ones are left out."""
    found: dict[str, str] = {}
    for name in headers:
        if name.startswith(HEADER):
            algorithm = name[len(HEADER) :].decode("latin-1")
            value = headers[name].decode("latin-1")
            if algorithm in ALGORITHMS and "-" not in value:
                found[algorithm] = value
    if found and headers.get(b"x-amz-checksum-type", b"FULL_OBJECT") != b"FULL_OBJECT":
        return {}
    return found


def choose(checksums: Mapping[str, str]) -> tuple[str, Hasher] | None:
    """Return the cheapest algorithm of `checksums` that can be computed here, and a fresh hasher; None if there is none."""
    for name in ALGORITHMS:
        if name in checksums and (fresh := hasher(name)) is not None:
            return name, fresh
    return None


def verify(checksums: Mapping[str, str], data: memoryview) -> str:
    """Compare a whole object with a checksum that the store keeps of it.

    Args:
        checksums: Full-object checksums by algorithm, base64.
        data: uint8[n], the object.

    Returns:
        The algorithm that was compared, or ``"length"`` if none can be.

    Raises:
        ChecksumError: The object does not match the checksum.
    """
    chosen = choose(checksums)
    if chosen is None:
        return "length"
    name, fresh = chosen
    fresh.update(data)
    check(name, fresh, checksums[name])
    return name


def check(name: str, computed: Hasher, expected: str) -> None:
    """Compare a finished hasher with the checksum that the store keeps.

    Raises:
        ChecksumError: The checksums differ.
    """
    value = text(computed)
    if value != expected:
        raise ChecksumError(f"{name} of the bytes received is {value}, but the store keeps {expected}")


def encode(name: str, data: Buffer) -> str:
    """Compute the checksum of `data` as S3 writes it in a header.

    Raises:
        ChecksumError: The library for it is not installed.
    """
    fresh = hasher(name)
    if fresh is None:
        raise ChecksumError(f"{name} cannot be computed here", hint=install_hint("crt"))
    fresh.update(data)
    return text(fresh)


def text(computed: Hasher) -> str:
    """Return a finished checksum as S3 writes it: base64, big-endian."""
    return base64.b64encode(computed.digest()).decode()
