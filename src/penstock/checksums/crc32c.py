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

__all__ = ["crc32c", "sample_crc"]

_KEEP_GIL, _RELEASE_GIL = 0, 1


def sample_crc(data: Buffer, crc: int = 0) -> int:
    """Return the CRC-32C of a sample's bytes. Below 1 MiB it keeps the GIL.

    Releasing the GIL for the 4 to 12 µs that 100 KB take costs two context switches: with them a conversion took 2.2 s of CPU
    per GB, without them 1.8 s.
    Source: docs/development/measurements.md.

    Args:
        data: The bytes, uint8[any length].
        crc: The CRC-32C of the bytes that precede `data`; 0 if there are none.
    """
    result: int = crc32c(data, crc, _KEEP_GIL if len(data) < MIB else _RELEASE_GIL)
    return result
