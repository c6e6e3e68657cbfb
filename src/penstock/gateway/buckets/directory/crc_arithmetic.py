"""The CRC of joined parts from the CRCs of the parts, without reading them again. Pure.

Appending n zero bytes to a message multiplies its CRC, as a polynomial over GF(2), by x^(8n). All CRCs of S3 are reflected:
the most significant bit holds the lowest power.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable


class CrcKind(NamedTuple):
    """A CRC.

    Attributes:
        polynomial: Reflected polynomial.
        bits: Length of the CRC in bits.
    """

    polynomial: int
    bits: int


CRCS = {
    "crc32": CrcKind(0xEDB88320, 32),
    "crc32c": CrcKind(0x82F63B78, 32),
    "crc64nvme": CrcKind(0x9A6C9329AC4BC9B5, 64),
}


def _product(kind: CrcKind, one: int, other: int) -> int:
    """Return the product of two polynomials, modulo that of the CRC."""
    result = 0
    bit = 1 << (kind.bits - 1)
    while bit:
        if one & bit:
            result ^= other
        other = (other >> 1) ^ (kind.polynomial if other & 1 else 0)
        bit >>= 1
    return result


@lru_cache(maxsize=4096)
def _power(kind: CrcKind, length_bytes: int) -> int:
    """Return x^(8 * length), modulo the polynomial of the CRC."""
    result = 1 << (kind.bits - 1)
    factor = 1 << (kind.bits - 9)  # x^8
    while length_bytes:
        if length_bytes & 1:
            result = _product(kind, result, factor)
        factor = _product(kind, factor, factor)
        length_bytes >>= 1
    return result


def joined_crc(name: str, parts: Iterable[tuple[int, int]]) -> int:
    """Return the CRC of parts in a row.

    Args:
        name: Name of the CRC, one of ``CRCS``.
        parts: CRC and length in bytes of each part.

    Cost: 10 µs per part if the parts have the same length, and up to 1 ms for each further length.
    """
    kind = CRCS[name]
    crc = 0
    for part_crc, length_bytes in parts:
        crc = _product(kind, _power(kind, length_bytes), crc) ^ part_crc
    return crc
