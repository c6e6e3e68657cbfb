"""CRC32C: the one module that imports its library.

Importing the library costs 10 to 30 ms, because it imports ``importlib.metadata``, ``email`` and ``argparse``. A run that
computes no checksum does without it: modules that may do without import this one inside the function that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from crc32c import crc32c

from penstock.config import MIB

if TYPE_CHECKING:
    from penstock.types import Buffer

__all__ = ["crc32c", "sample_crc"]

_KEEPS_GIL, _LETS_GO = 0, 1


def sample_crc(data: Buffer, crc: int = 0) -> int:
    """The CRC32C of a sample's bytes. Below 1 MiB it keeps the GIL.

    Releasing it for the 4 to 12 µs that 100 KB take costs two context switches: a conversion took 2.2 s of CPU per GB with
    them and 1.8 s without (docs/development/experiments.md).

    Args:
        data: The bytes, uint8[any length].
        crc: The CRC32C of the bytes that precede `data`; 0 if there are none.
    """
    result: int = crc32c(data, crc, _KEEPS_GIL if len(data) < MIB else _LETS_GO)
    return result
