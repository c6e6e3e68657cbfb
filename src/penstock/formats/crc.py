"""CRC32C of samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crc32c import crc32c

from penstock.config import MIB

if TYPE_CHECKING:
    from penstock.types import Buffer

_KEEPS_GIL, _LETS_GO = 0, 1


def sample_crc(data: Buffer, crc: int = 0) -> int:
    """CRC32C of `data` behind bytes of which it was `crc`. Below 1 MiB it keeps the GIL.

    To let go of the interpreter for the 4 to 12 µs that 100 KB take costs two context switches: 2.2 s of CPU for each GB
    of a conversion, 1.8 without (docs/LOG.md).
    """
    result: int = crc32c(data, crc, _KEEPS_GIL if len(data) < MIB else _LETS_GO)
    return result
