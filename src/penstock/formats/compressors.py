"""Compresses shards that are written, as gzip or zstd without timestamps or names, so the same samples give the same bytes.

This holds for one version of zlib or libzstd; another version may choose other bytes. Both formats end with a checksum of
their content, which every reader verifies.
"""

from __future__ import annotations

import zlib
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import ConfigError
from penstock.version import install_hint

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.types import Buffer

GZIP_LEVEL = 6
ZSTD_LEVEL = 3
_GZIP = 31  # zlib's value for a gzip wrapper, whose header then has no name and a time of 0


class Compressor(Protocol):
    """Compresses a stream of bytes."""

    def compress(self, data: Buffer) -> bytes:
        """Add the next bytes. Returns the compressed bytes that are ready."""

    def finish(self) -> bytes:
        """End the stream. Returns the rest of its bytes."""


class Gzip:
    """Writes one gzip member.

    Args:
        level: Level of the compression, from 0 (none) to 9.
    """

    def __init__(self, level: int = GZIP_LEVEL) -> None:
        self._stream = zlib.compressobj(level, zlib.DEFLATED, _GZIP)

    def compress(self, data: Buffer) -> bytes:
        """Compress the next bytes."""
        return self._stream.compress(data)

    def finish(self) -> bytes:
        """End the stream."""
        return self._stream.flush()


class Zstd:
    """Writes one zstd frame with a checksum.

    Args:
        level: Level of the compression, from 1 to 22.

    Raises:
        ConfigError: zstandard is not installed.
    """

    def __init__(self, level: int = ZSTD_LEVEL) -> None:
        try:
            zstandard = import_module("zstandard")
        except ImportError as error:
            raise ConfigError("zstd needs zstandard", hint=install_hint("zstd")) from error
        self._stream: Any = zstandard.ZstdCompressor(level=level, write_checksum=True).compressobj()

    def compress(self, data: Buffer) -> bytes:
        """Compress the next bytes."""
        out: bytes = self._stream.compress(data)
        return out

    def finish(self) -> bytes:
        """End the stream."""
        out: bytes = self._stream.flush()
        return out


COMPRESSORS: dict[str, Callable[..., Compressor]] = {"gz": Gzip, "zst": Zstd}
"""The compressor for each suffix of compressed objects."""
