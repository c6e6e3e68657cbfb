"""Many small PNGs of one size, decoded by one call.

OpenCV needs 39 µs for a PNG of 32x32 pixels, of which 19 are inflating and 16 undoing the filters of the rows. Several
pictures are therefore inflated, put below each other as one tall PNG that is not compressed, and decoded together: 37 µs for
each. Their pixels are one array, so that nothing else has to be done for each of them. Before each picture comes a row of
zeros, because the filters of a picture's first row refer to the row above it, which counts as zeros.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np

from penstock.checksums.crc32 import crc32
from penstock.config import KIB
from penstock.images.codecs import PNG_END, PNG_FRAME_BYTES, PNG_START, Size, decode_by_opencv

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

STRIP_BYTES_MAX = 0xFFFF
"""Most filtered bytes that are decoded together: one block of deflate that is not compressed. They stay in the cache, too."""

PICTURE_BYTES_MAX = 32 * KIB
"""Pixels of the largest picture for which this pays."""

_HEAD = struct.Struct(">16sIIBBBBB4s")
_HEAD_BYTES = 33
_RGB = (8, 2, 0, 0, 0)  # bits of a channel, kind of colours, compression, filters, interlacing


def rgb_pixels_of_many(pictures: Sequence[bytes]) -> NDArray[np.uint8] | None:
    """Decode small PNGs of one size: as ``rgb_pixels`` for each of them.

    Args:
        pictures: At least one file.

    Returns:
        uint8[N, H, W, 3]; None if they are not all whole PNGs of one size with 8 bits per channel, without an alpha channel, a
        palette or other chunks than those for the pixels. ``rgb_pixels`` tells what else they are.
    """
    head = pictures[0][:_HEAD_BYTES]
    if len(head) < _HEAD_BYTES:
        return None
    start, width, height, *form, head_crc = _HEAD.unpack(head)
    row_bytes = 1 + 3 * width
    is_known = start == PNG_START and tuple(form) == _RGB and crc32(head[12:29]) == int.from_bytes(head_crc, "big")
    if not is_known or not 0 < height * row_bytes <= PICTURE_BYTES_MAX or not width:
        return None
    if not all(_is_alike(picture, head) for picture in pictures):  # before anything is inflated in vain
        return None
    size = Size(height, width)
    count = STRIP_BYTES_MAX // (height * row_bytes + row_bytes)
    pixels = np.empty((len(pictures), height, width, 3), np.uint8)
    for at in range(0, len(pictures), count):
        rows = _inflated(pictures[at : at + count], size)
        if rows is None or not _decode_into(rows, pixels[at : at + count]):
            return None
    return pixels


def _is_alike(picture: bytes, head: bytes) -> bool:
    """Whether a picture has this head, one chunk of pixels, and no other chunks."""
    chunk = (len(picture) - PNG_FRAME_BYTES).to_bytes(4, "big", signed=True) + b"IDAT"
    return picture.startswith(head) and picture[33:41] == chunk and picture.endswith(PNG_END)


def _inflated(pictures: Sequence[bytes], size: Size) -> list[bytes] | None:
    """Return the filtered rows of pictures, each after a row of zeros; None if one is damaged."""
    size_bytes = size.height * (1 + 3 * size.width)
    above = bytes(1 + 3 * size.width)
    rows: list[bytes] = []
    inflater, number = zlib.decompressobj, int.from_bytes
    for picture in pictures:
        view = memoryview(picture)
        if crc32(view[37:-16]) != number(picture[-16:-12], "big"):
            return None
        stream = inflater()
        try:
            raw = stream.decompress(view[41:-16], size_bytes)  # never more, whatever the picture claims
            is_whole = stream.eof or (not stream.decompress(stream.unconsumed_tail, 1) and stream.eof)
        except zlib.error:
            return None
        if len(raw) != size_bytes or not is_whole:
            return None
        rows += (above, raw)
    return rows


def _decode_into(rows: list[bytes], target: NDArray[np.uint8]) -> bool:
    """Decode inflated pictures into uint8[N, H, W, 3]; whether OpenCV could."""
    count, height, width, _ = target.shape
    tall = Size(count * (height + 1), width)
    pixels = decode_by_opencv(memoryview(_stored_png(rows, tall)), tall)
    if pixels is None:
        return False
    target[:] = pixels.reshape(count, height + 1, width, 3)[:, 1:]
    return True


def _stored_png(rows: list[bytes], size: Size) -> bytes:
    """Return a PNG with these filtered rows as one block of deflate that is not compressed."""
    data = b"".join(rows)
    header = struct.pack(">IIBBBBB", size.width, size.height, *_RGB)
    block = struct.pack("<2sBHH", b"\x78\x01", 1, len(data), len(data) ^ 0xFFFF)
    check = struct.pack(">I", zlib.adler32(data))
    return b"".join([PNG_START[:8], *_chunk(b"IHDR", header), *_chunk(b"IDAT", block, data, check), PNG_END])


def _chunk(kind: bytes, *parts: bytes) -> list[bytes]:
    crc = crc32(kind)
    for part in parts:
        crc = crc32(part, crc)
    return [struct.pack(">I", sum(map(len, parts))), kind, *parts, struct.pack(">I", crc)]
