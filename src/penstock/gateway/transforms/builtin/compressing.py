"""``gzip``, ``gunzip``, ``zstd`` and ``unzstd``: an object compressed or decompressed as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError, CorruptShardError, DataError
from penstock.formats.compression import GZIP_LEVEL, ZSTD_LEVEL, Gunzip, Unzstd
from penstock.gateway.transforms.authoring import transform
from penstock.gateway.transforms.builtin.streams import compressed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from penstock.formats.compression import Decompressor
    from penstock.gateway.transforms.authoring import SourceReader, TransformRequest
    from penstock.types import Buffer

_DECOMPRESSORS: dict[str, Callable[[], Decompressor]] = {"gz": Gunzip, "zst": Unzstd}


def _check_gzip(arguments: Mapping[str, Any]) -> None:
    _check_level(arguments["level"], 0, 9)


def _check_zstd(arguments: Mapping[str, Any]) -> None:
    _check_level(arguments["level"], 1, 19)


def _check_level(level: int, lowest: int, highest: int) -> None:
    if not lowest <= level <= highest:
        raise ConfigError(f"level={level} must be from {lowest} to {highest}")


@transform(version="1", content_type="application/gzip", check=_check_gzip)
def gzip(reader: SourceReader, request: TransformRequest, *, level: int = GZIP_LEVEL) -> Iterator[Buffer]:
    """Compress an object by gzip. The header has neither a time nor a name, so equal objects give equal bytes.

    Args:
        reader: Any object.
        request: The request.
        level: From 0 (stored) to 9 (smallest).
    """
    del request
    return compressed(reader, "gz", level)


@transform(version="1", content_type="application/zstd", check=_check_zstd)
def zstd(reader: SourceReader, request: TransformRequest, *, level: int = ZSTD_LEVEL) -> Iterator[Buffer]:
    """Compress an object by zstd, as one frame with a checksum.

    Args:
        reader: Any object.
        request: The request.
        level: From 1 (fastest) to 19 (smallest).
    """
    del request
    return compressed(reader, "zst", level)


@transform(version="1")
def gunzip(reader: SourceReader, request: TransformRequest) -> Iterator[Buffer]:
    """Decompress an object that is compressed by gzip, in one or several members.

    Args:
        reader: A gzip stream. Its checksums are verified.
        request: The request.
    """
    del request
    return decompressed(reader, "gz", source=reader.key)


@transform(version="1")
def unzstd(reader: SourceReader, request: TransformRequest) -> Iterator[Buffer]:
    """Decompress an object that is compressed by zstd, in one or several frames.

    Args:
        reader: A zstd stream, with a window of at most 128 MiB. Its checksums are verified.
        request: The request.
    """
    del request
    return decompressed(reader, "zst", source=reader.key)


def decompressed(chunks: Iterable[Buffer], compression: str, *, source: str) -> Iterator[Buffer]:
    """Iterate over the decompressed bytes of an object, in pieces of about 1 MiB.

    Args:
        chunks: The object.
        compression: ``"gz"``, ``"zst"``, or ``""`` for an object that is not compressed.
        source: Key of the object, for errors.

    Raises:
        CorruptShardError: The object is damaged, cut off, or not compressed in this way.
        UnsupportedFormatError: A zstd frame needs a dictionary, or too large a window.
    """
    if not compression:
        yield from chunks
        return
    decompressor = _DECOMPRESSORS[compression]()
    offset_bytes = 0
    try:
        for chunk in chunks:
            view = memoryview(chunk)
            yield from decompressor.pieces(view)
            offset_bytes += len(view)
        decompressor.end()
        if not offset_bytes:
            raise ValueError("it has 0 bytes, which is not a compressed object")
    except DataError as error:
        error.shard, error.offset_bytes = source, offset_bytes
        raise
    except ConfigError:
        raise
    except ValueError as error:
        raise CorruptShardError(str(error), shard=source, offset_bytes=offset_bytes) from None
