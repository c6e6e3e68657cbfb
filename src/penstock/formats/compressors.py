"""Compression of what is written: gzip and zstd streams without a clock or a name, the same bytes for the same samples.

The same bytes with the same library: other versions of zlib or libzstd may choose others. Both streams end with a
checksum of what is in them, which every reader compares.
"""

from __future__ import annotations

import zlib
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.types import Buffer

GZIP_LEVEL = 6
ZSTD_LEVEL = 3
_GZIP = 31  # zlib's word for a gzip wrapper; its header then has no name and a time of 0


class Compressor(Protocol):
    """Bytes in, compressed bytes out, in order."""

    def compress(self, data: Buffer) -> bytes:
        """The next bytes; what of the stream is ready."""

    def finish(self) -> bytes:
        """The rest of the stream."""


class Gzip:
    """One gzip member."""

    def __init__(self) -> None:
        self._stream = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, _GZIP)

    def compress(self, data: Buffer) -> bytes:
        """See ``Compressor``."""
        return self._stream.compress(data)

    def finish(self) -> bytes:
        """See ``Compressor``."""
        return self._stream.flush()


class Zstd:
    """One zstd frame, with its checksum.

    Raises:
        ConfigError: zstandard is not installed.
    """

    def __init__(self) -> None:
        try:
            zstandard = import_module("zstandard")
        except ImportError as error:
            raise ConfigError("zstd needs zstandard", hint="pip install 'penstock[zstd]'") from error
        self._stream: Any = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True).compressobj()

    def compress(self, data: Buffer) -> bytes:
        """See ``Compressor``."""
        out: bytes = self._stream.compress(data)
        return out

    def finish(self) -> bytes:
        """See ``Compressor``."""
        out: bytes = self._stream.flush()
        return out


COMPRESSORS: dict[str, Callable[[], Compressor]] = {"gz": Gzip, "zst": Zstd}
"""By the suffix of what is compressed by them."""
