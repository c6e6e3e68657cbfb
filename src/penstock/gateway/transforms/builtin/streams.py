"""Shared parts of the built-in transforms: the first bytes of a source, its samples, output in pieces of a useful size.

The transforms ``gzip``, ``gunzip``, ``zstd`` and ``unzstd``, which treat an object as a whole, are here, too.
"""

from __future__ import annotations

from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

from penstock.config import KIB
from penstock.errors import ConfigError, CorruptShardError, DataError
from penstock.formats import HEAD_BYTES, Samples, feed_in_columns, feed_in_pieces, parser_of
from penstock.formats.compression import COMPRESSORS, GZIP_LEVEL, ZSTD_LEVEL, Gunzip, Unzstd
from penstock.gateway.transforms.authoring import transform

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.formats import Parser, Sample
    from penstock.formats.compression import Decompressor
    from penstock.gateway.transforms.authoring import SourceReader, TransformRequest
    from penstock.types import Buffer

PIECE_BYTES = 16 * KIB
"""Pieces of at least this size are passed on uncopied: a copy would cost more than one more piece."""

BLOCK_BYTES = 256 * KIB
"""Size of the blocks in which output is compressed, so that it does not depend on how the source was cut."""

COLUMNS_BYTES_MAX = 32 * KIB
"""Mean size of samples up to which they are parsed as columns. Copying a larger value costs more than handling it."""

_COMPRESSIONS = {b"\x1f\x8b": "gz", b"\x28\xb5\x2f\xfd": "zst"}


_DECOMPRESSORS: dict[str, Callable[[], Decompressor]] = {"gz": Gunzip, "zst": Unzstd}


def peek(chunks: Iterable[Buffer], size_bytes: int = HEAD_BYTES) -> tuple[bytes, Iterator[Buffer]]:
    """Return the first `size_bytes` bytes of a source, fewer if it is shorter, and all of its chunks."""
    remaining = iter(chunks)
    taken: list[Buffer] = []
    head = b""
    while len(head) < size_bytes and (chunk := next(remaining, None)) is not None:
        taken.append(chunk)
        head += bytes(memoryview(chunk)[: size_bytes - len(head)])
    return head, chain(taken, remaining)


def compression_of(head: bytes) -> str:
    """Return the compression of a source by its first bytes: a key of ``COMPRESSORS``, or ``""`` if it has none."""
    return next((name for magic, name in _COMPRESSIONS.items() if head.startswith(magic)), "")


def parser_for(format_name: str, head: bytes, source: str) -> Parser:
    """Return the parser of a source of a known format, which may be compressed as a whole.

    Args:
        format_name: Name of the format without compression.
        head: First bytes of the source.
        source: Key of the source, for errors.
    """
    compression = compression_of(head)
    return parser_of(f"{format_name}.{compression}" if compression else format_name, shard=source)


def samples_in(parser: Parser, chunks: Iterable[Buffer]) -> Iterator[Sequence[Sample]]:
    """Iterate over the samples of a source, in groups; small samples come in columns where the format allows it.

    Raises:
        CorruptShardError: The source is damaged or cut off.
    """
    by_columns = True
    for chunk in chunks:
        feed = feed_in_columns if by_columns else feed_in_pieces
        count = 0
        for group in feed(parser, chunk):
            count += len(group)
            if len(group):
                yield group
        by_columns = len(chunk) <= COLUMNS_BYTES_MAX * count
    if len(rest := parser.finish()):
        yield rest


class PieceCollector:
    """Collects output, and hands it on in pieces of a useful size.

    Attributes:
        held_bytes: Bytes that were collected and not taken.
    """

    def __init__(self) -> None:
        self._pieces: list[Buffer] = []
        self.held_bytes = 0

    def write(self, data: Buffer) -> None:
        """Append bytes, which may not be changed afterwards."""
        self._pieces.append(data)
        self.held_bytes += len(data)

    def take(self) -> Iterator[Buffer]:
        """Iterate over what was collected: small pieces are joined, large ones are not copied."""
        pieces, self._pieces = self._pieces, []
        self.held_bytes = 0
        small: list[Buffer] = []
        for piece in pieces:
            if len(piece) < PIECE_BYTES:
                small.append(piece)
                continue
            if small:
                yield b"".join(small)
                small = []
            yield piece
        if small:
            yield b"".join(small)


def blocks_of(pieces: Iterable[Buffer], size_bytes: int = BLOCK_BYTES) -> Iterator[bytes | bytearray]:
    """Iterate over the same bytes in blocks of `size_bytes`; the last one may be shorter."""
    block = bytearray()
    for piece in pieces:
        view = memoryview(piece)
        at = 0
        while at < len(view):
            taken = view[at : at + size_bytes - len(block)]
            block += taken
            at += len(taken)
            if len(block) == size_bytes:
                yield block
                block = bytearray()
    if block:
        yield block


def compressed(pieces: Iterable[Buffer], compression: str, level: int | None = None) -> Iterator[Buffer]:
    """Compress output by gzip or zstd; the same bytes always give the same bytes.

    Args:
        pieces: The output.
        compression: A key of ``COMPRESSORS``, or ``""`` for none.
        level: Level of the compression; None takes the default.
    """
    if not compression:
        yield from pieces
        return
    compressor = COMPRESSORS[compression]() if level is None else COMPRESSORS[compression](level)
    for block in blocks_of(pieces):
        if data := compressor.compress(block):
            yield data
    yield compressor.flush()


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


def converted(
    groups: Iterable[Sequence[Sample]],
    convert: Callable[[Sequence[Sample]], Iterator[None]],
    output: PieceCollector,
    finish: Callable[[], Any],
) -> Iterator[Buffer]:
    """Iterate over the output of a conversion that writes into `output`.

    Args:
        groups: The samples of the source.
        convert: Converts a group, and yields after each part of it that may be handed on by itself.
        output: The result, to which `convert` and `finish` write.
        finish: Called after the last group.
    """
    for group in groups:
        for _ in convert(group):
            if output.held_bytes >= BLOCK_BYTES:  # a sample may be much larger than its source
                yield from output.take()
        yield from output.take()
    finish()
    yield from output.take()


def singly(samples: Sequence[Sample]) -> Iterator[Sample]:
    """Iterate over samples one by one, whatever their form."""
    return (samples[index] for index in range(len(samples))) if isinstance(samples, Samples) else iter(samples)


def plain_key(key: str) -> str:
    """Return a key without the ``./`` that ``tar -C DIR .`` puts before every name."""
    while key.startswith("./"):
        key = key[2:]
    return key


@contextmanager
def located(source: str, sample: Sample) -> Iterator[None]:
    """Add the source and the offset of a sample to errors that its content causes.

    Raises:
        DataError: Instead of a ``ConfigError`` of a writer, which the sample caused and not the caller.
    """
    try:
        yield
    except DataError as error:
        error.shard = error.shard or source
        error.offset_bytes = sample.offset_bytes if error.offset_bytes is None else error.offset_bytes
        error.sample_key = error.sample_key or sample.key
        raise
    except ConfigError as error:
        raise DataError(
            error.what, hint=error.hint, shard=source, offset_bytes=sample.offset_bytes, sample_key=sample.key
        ) from None


# ── gzip, gunzip, zstd, unzstd ──────────────────────────────────────────────────────────────────────────────────────


def _check_level(level: int, lowest: int, highest: int) -> None:
    if not lowest <= level <= highest:
        raise ConfigError(f"level={level} must be from {lowest} to {highest}")


@transform(version="1", content_type="application/gzip", check=lambda arguments: _check_level(arguments["level"], 0, 9))
def gzip(reader: SourceReader, request: TransformRequest, *, level: int = GZIP_LEVEL) -> Iterator[Buffer]:
    """Compress an object by gzip. The header has neither a time nor a name, so equal objects give equal bytes.

    Args:
        reader: Any object.
        request: The request.
        level: From 0 (stored) to 9 (smallest).
    """
    return compressed(reader, "gz", level)


@transform(
    version="1", content_type="application/zstd", check=lambda arguments: _check_level(arguments["level"], 1, 19)
)
def zstd(reader: SourceReader, request: TransformRequest, *, level: int = ZSTD_LEVEL) -> Iterator[Buffer]:
    """Compress an object by zstd, as one frame with a checksum.

    Args:
        reader: Any object.
        request: The request.
        level: From 1 (fastest) to 19 (smallest).
    """
    return compressed(reader, "zst", level)


@transform(version="1")
def gunzip(reader: SourceReader, request: TransformRequest) -> Iterator[Buffer]:
    """Decompress an object that is compressed by gzip, in one or several members.

    Args:
        reader: A gzip stream. Its checksums are verified.
        request: The request.
    """
    return decompressed(reader, "gz", source=reader.key)


@transform(version="1")
def unzstd(reader: SourceReader, request: TransformRequest) -> Iterator[Buffer]:
    """Decompress an object that is compressed by zstd, in one or several frames.

    Args:
        reader: A zstd stream, with a window of at most 128 MiB. Its checksums are verified.
        request: The request.
    """
    return decompressed(reader, "zst", source=reader.key)
