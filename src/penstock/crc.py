"""CRC-32C. This is the only module that imports the ``crc32c`` library.

Importing the library takes 10 to 30 ms, because it imports ``importlib.metadata``, ``email`` and ``argparse``. A run that
computes no checksum should not pay for that, so modules that rarely compute one import this module inside the function
that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from crc32c import crc32c

from penstock.config import MIB

if TYPE_CHECKING:
    from penstock.types import Buffer

__all__ = ["combined_crc", "crc32c", "sample_crc"]

_KEEP_GIL, _RELEASE_GIL = 0, 1
_POLYNOMIAL = 0x82F63B78
_zeros: list[tuple[int, ...]] = []  # _zeros[k]: what 2**k zero bytes make of each bit of a CRC


def sample_crc(data: Buffer, crc: int = 0) -> int:
    """Return the CRC-32C of a sample's bytes. Below 1 MiB it keeps the GIL.

    Releasing the GIL for the 4 to 12 µs that 100 KB take costs two context switches: with them a conversion took 2.2 s of CPU
    per GB, without them 1.8 s.
    Source: docs/development/experiments.md.

    Args:
        data: The bytes, uint8[any length].
        crc: The CRC-32C of the bytes that precede `data`; 0 if there are none.
    """
    result: int = crc32c(data, crc, _KEEP_GIL if len(data) < MIB else _RELEASE_GIL)
    return result


def combined_crc(crc: int, following_crc: int, following_bytes: int) -> int:
    """Return the CRC-32C of two pieces in sequence from those of the pieces, without reading them again. Cost: 20 µs.

    Args:
        crc: The CRC-32C of the first piece.
        following_crc: The CRC-32C of the second piece.
        following_bytes: Length of the second piece in bytes.
    """
    power = 0
    while following_bytes >> power:
        if following_bytes >> power & 1:
            crc = _applied(_zeros_of(power), crc)
        power += 1
    return crc ^ following_crc


def _applied(rows: tuple[int, ...], crc: int) -> int:
    result = 0
    for bit, row in enumerate(rows):
        if crc >> bit & 1:
            result ^= row
    return result


def _zeros_of(power: int) -> tuple[int, ...]:
    """Return the linear map on CRCs that 2**power zero bytes are."""
    if not _zeros:
        rows = tuple([_POLYNOMIAL] + [1 << bit for bit in range(31)])  # one zero bit
        for _ in range(3):
            rows = tuple(_applied(rows, row) for row in rows)
        _zeros.append(rows)
    while len(_zeros) <= power:
        rows = _zeros[-1]
        _zeros.append(tuple(_applied(rows, row) for row in rows))
    return _zeros[power]
