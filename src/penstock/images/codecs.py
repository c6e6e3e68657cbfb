"""Decoders, selected by the content of a file: libjpeg-turbo for JPEG, OpenCV for PNG and WebP, Pillow for everything else.

If a faster decoder rejects a picture, Pillow tries it again, and Pillow's error is the one that is raised. A slightly
damaged JPEG (bytes between markers) therefore decodes as it does in other programs, and a truncated one does not. OpenCV
treats damaged and animated pictures in its own way, so it only gets still pictures, and Pillow first opens every PNG with
chunks other than header, palette and pixels: Pillow verifies the chunks before the pixels, which triples the time for
a small picture.

No pixel is decoded before the size in the header has been compared with ``PIXELS_MAX``.

Many small PNGs of one size are decoded by one call (``rgb_pixels_of_many``). OpenCV needs 39 µs for a PNG of 32x32 pixels,
of which 19 are inflating and 16 undoing the filters of the rows. Several pictures are therefore inflated, put below each
other as one tall PNG that is not compressed, and decoded together: 37 µs for each. Their pixels are one array, so that
nothing else has to be done for each of them. Before each picture comes a row of zeros, because the filters of a picture's
first row refer to the row above it, which counts as zeros.
"""

from __future__ import annotations

import io
import re
import struct
import zlib
from abc import ABC, abstractmethod
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from penstock.checksums.crc32 import crc32
from penstock.config import KIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

Mode: TypeAlias = Literal["RGB", "L"]

_JPEG = b"\xff\xd8\xff"
_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG_SPACES = {"YCbCr", "Gray", "RGB"}  # CMYK and YCCK need Pillow's conversion
_WIDE_MODES = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")  # Pillow would silently clip these to 8 bits
_MASK_MODES = ("L", "P", "1")
_PIL_MODES = {b"L": 1, b"P": 1, b"LA": 2, b"RGB": 3, b"RGBA": 4, b"CMYK": 4}  # and the bytes of a pixel
_UNPACK_PIL = struct.Struct("<3I").unpack_from
_JPEG2000_SIZE = b"\xff\x4f\xff\x51"  # the two markers at the start of a codestream
_TIFF_BITS = 258  # the tag BitsPerSample
PIXELS_MAX = 178_956_970
"""Largest number of pixels of a picture, the same as Pillow's. Without a bound, a few bytes could fill the memory."""

_PNG_GROWTH_MAX = 1032  # largest ratio of deflate: a PNG that claims to expand more is damaged
# The chunks that may follow each chunk.
_BARE_PNG_ORDER = {
    b"": (b"IHDR",),
    b"IHDR": (b"PLTE", b"IDAT"),
    b"PLTE": (b"IDAT",),
    b"IDAT": (b"IDAT", b"IEND"),
}
# Bits of a pixel before compression, by Pillow's mode; at least 1 in other modes.
_PNG_BITS = {
    "RGB": 24,
    "RGBA": 32,
    "LA": 16,
}


PNG_END = b"\0\0\0\0IEND\xaeB`\x82"
PNG_START = _PNG + b"\0\0\0\rIHDR"
PNG_FRAME_BYTES = 57  # of a PNG with header, one chunk of pixels and end
_UNPACK_SMALL_PNG = struct.Struct(">16sIIB8xI4s").unpack_from

STRIP_BYTES_MAX = 0xFFFF
"""Most filtered bytes that are decoded together: one block of deflate that is not compressed. They stay in the cache, too."""

PICTURE_BYTES_MAX = 32 * KIB
"""Pixels of the largest picture for which this pays."""

_HEAD = struct.Struct(">16sIIBBBBB4s")
_HEAD_BYTES = 33
_RGB = (8, 2, 0, 0, 0)  # bits of a channel, kind of colours, compression, filters, interlacing


class Size(NamedTuple):
    """Height and width in pixels."""

    height: int
    width: int


class Picture(ABC):
    """A picture whose header was read and that can be decoded once.

    Attributes:
        size: Height and width in pixels, as stored.
        shrinks: Whether ``pixels`` can decode to a smaller size.
    """

    size: Size
    shrinks = False

    @abstractmethod
    def pixels(self, mode: Mode, *, shrink: int = 1, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """Decode the whole picture.

        Args:
            mode: ``"RGB"`` or ``"L"``.
            shrink: 1, 2, 4 or 8: factor by which the sides are divided, rounded up. Ignored unless ``shrinks``.
            out: C-contiguous array of the result's shape; a codec that can decodes into it.

        Returns:
            uint8[H, W, 3] for ``"RGB"``, uint8[H, W] for ``"L"``.

        Raises:
            ValueError, OSError: The picture is damaged.
        """


def open_picture(data: memoryview) -> Picture:
    """Open the picture in `data` without decoding its pixels.

    Raises:
        ValueError, OSError: `data` is not a picture, or the picture has more than 8 bits per channel or too many pixels.
    """
    head = bytes(data[:12])
    if head.startswith(_JPEG):
        try:
            return _Jpeg(data)
        except (ValueError, KeyError):  # KeyError: a subsampling that simplejpeg does not know
            return _Other(data)
    if head.startswith(_PNG):
        size = _bare_png_size(data)
        return _Still(data, size) if size is not None else _Png(data)
    webp = _webp_header(data)
    return _Still(data, webp.size) if webp is not None and webp.is_plain else _Other(data)


def rgb_pixels(data: memoryview) -> NDArray[np.uint8]:
    """Decode a whole picture in colour: as ``open_picture(data).pixels("RGB")``, in 1 µs less for a small PNG.

    Returns:
        uint8[H, W, 3].

    Raises:
        ValueError, OSError: As for ``open_picture`` and ``pixels``.
    """
    size = _small_png_size(data)
    pixels = None if size is None else decode_by_opencv(data, size)
    return open_picture(data).pixels("RGB") if pixels is None else pixels


def mask_pixels(data: memoryview) -> NDArray[np.uint8]:
    """Decode a mask to its stored values: those of a grey picture, the indices into a palette, or 0 and 1 of a bitmap.

    Returns:
        uint8[H, W].

    Raises:
        ValueError, OSError: The mask has several channels, more than 8 bits or too many pixels, or it is damaged.
    """
    return _Other(data).mask()


class _Jpeg(Picture):
    shrinks = True

    def __init__(self, data: memoryview) -> None:
        import simplejpeg  # type: ignore[import-untyped]

        self._data = data
        height, width, space, _ = simplejpeg.decode_jpeg_header(data, strict=False)
        if space not in _JPEG_SPACES:
            raise ValueError(f"a JPEG in {space}")
        self.size = _checked(Size(height, width))

    def pixels(self, mode: Mode, *, shrink: int = 1, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        import simplejpeg

        space = "RGB" if mode == "RGB" else "GRAY"
        size = Size(-(-self.size.height // shrink), -(-self.size.width // shrink))
        try:
            pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(
                self._data,
                space,
                min_height=size.height if shrink > 1 else 0,
                min_width=size.width if shrink > 1 else 0,
                min_factor=shrink,
                buffer=out,
            )
        except ValueError:
            pixels = _Other(self._data).pixels(mode)
        return pixels if mode == "RGB" or pixels.ndim == 2 else pixels[:, :, 0]


class _Other(Picture):
    def __init__(self, data: memoryview) -> None:
        from PIL import Image as Pillow
        from PIL import UnidentifiedImageError

        webp = _webp_header(data)
        if webp is not None:
            _checked(webp.size)  # Pillow allocates two pictures of this size when it opens the file
        with pillow_errors():
            try:
                self._file: Any = _stored_pixels(data) or Pillow.open(io.BytesIO(data))
            except UnidentifiedImageError:  # its text is an address in memory
                raise ValueError("Pillow does not recognise the format of the picture") from None
            bits = _bits_per_channel(self._file, data)
        if bits > 8:
            raise ValueError(f"a picture with {bits} bits per channel: more than 8 bits are not supported")
        self.size = size = _checked(Size(self._file.height, self._file.width))
        if self._file.format == "PNG":
            grown_bits = size.height * size.width * _PNG_BITS.get(self._file.mode, 1)
            if grown_bits > 8 * _PNG_GROWTH_MAX * len(data):
                raise ValueError(f"{len(data)} bytes cannot hold a PNG of {size.height}x{size.width} pixels")

    def pixels(self, mode: Mode, *, shrink: int = 1, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        with pillow_errors(), self._file as picture:
            return np.array(picture if picture.mode == mode else picture.convert(mode), dtype=np.uint8)

    def mask(self) -> NDArray[np.uint8]:
        """Decode a mask to its stored values, as ``mask_pixels``."""
        with pillow_errors(), self._file as picture:
            if picture.mode not in _MASK_MODES:
                raise ValueError(
                    f"a mask has one channel of at most 8 bits, but this picture has mode {picture.mode!r}"
                )
            return np.asarray(picture).astype(np.uint8, copy=False)


def _stored_pixels(data: memoryview) -> Any:
    """Return the Pillow image that MosaicML's encoding ``pil`` stores; None if `data` is anything else.

    It consists of three ``uint32`` (width, height, length of the mode's name), Pillow's name of the mode, and the pixels.
    """
    from PIL import Image as Pillow

    width, height, length = _UNPACK_PIL(data) if len(data) > 12 else (0, 0, 0)
    mode = bytes(data[12 : 12 + length]) if length <= 4 else b""
    if len(data) - 12 - length != width * height * _PIL_MODES.get(mode, 0) or not width * height:
        return None
    _checked(Size(height, width))
    return Pillow.frombytes(mode.decode(), (width, height), data[12 + length :])


class _Png(_Other):
    def __init__(self, data: memoryview) -> None:
        super().__init__(data)
        self._data = data

    def pixels(self, mode: Mode, *, shrink: int = 1, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        # OpenCV weights the colours of grey pictures differently
        pixels = decode_by_opencv(self._data, self.size) if mode == "RGB" and _is_plain_png(self._data) else None
        return super().pixels(mode) if pixels is None else pixels


class _Still(Picture):
    """A still PNG or WebP of a kind in which OpenCV itself detects all damage."""

    def __init__(self, data: memoryview, size: Size) -> None:
        self._data = data
        self.size = _checked(size)

    def pixels(self, mode: Mode, *, shrink: int = 1, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        pixels = decode_by_opencv(self._data, self.size) if mode == "RGB" else None
        return _Other(self._data).pixels(mode) if pixels is None else pixels


class _WebPHeader(NamedTuple):
    size: Size
    is_plain: bool  # not animated, and its chunks fill the file exactly; OpenCV would ignore that they do not


def _webp_header(data: memoryview) -> _WebPHeader | None:
    """Parse the header of a WebP file in any of its three variants; None if `data` is not a WebP file."""
    head = bytes(data[:30])
    if not (head.startswith(b"RIFF") and head[8:15] == b"WEBPVP8" and len(head) == 30):
        return None
    is_plain, kind = _is_whole_riff(data), head[15:16]
    if kind == b"X":
        size = Size(int.from_bytes(head[27:30], "little") + 1, int.from_bytes(head[24:27], "little") + 1)
        return _WebPHeader(size, is_plain and not head[20] & 2)
    if kind == b"L":
        sides = int.from_bytes(head[21:25], "little")
        return _WebPHeader(Size((sides >> 14 & 0x3FFF) + 1, (sides & 0x3FFF) + 1), is_plain)
    height, width = int.from_bytes(head[28:30], "little"), int.from_bytes(head[26:28], "little")
    return _WebPHeader(Size(height & 0x3FFF, width & 0x3FFF), is_plain)


def _bare_png_size(data: memoryview) -> Size | None:
    """Return the size in the header of a PNG, or None if it has more than 8 bits or chunks that are not essential."""
    if (small := _small_png_size(data)) is not None:
        return small
    at, kind, before = len(_PNG), b"", b""
    while at + 12 <= len(data) and kind != b"IEND":
        length, before, kind = int.from_bytes(data[at : at + 4], "big"), kind, bytes(data[at + 4 : at + 8])
        if kind not in _BARE_PNG_ORDER.get(before, ()):
            return None
        at += 12 + length
    if kind != b"IEND" or at > len(data) or data[24] > 8:
        return None
    height, width = int.from_bytes(data[20:24], "big"), int.from_bytes(data[16:20], "big")
    return Size(height, width) if 0 < height * width <= _PNG_GROWTH_MAX * len(data) else None


def _small_png_size(data: memoryview) -> Size | None:
    """Return the size of a PNG with one chunk of pixels and no others, as nearly all small ones are, in 1 µs; else None."""
    if len(data) <= PNG_FRAME_BYTES:
        return None
    start, width, height, bits, length, first = _UNPACK_SMALL_PNG(data)
    is_small = start == PNG_START and first == b"IDAT" and length + PNG_FRAME_BYTES == len(data)
    if not is_small or bits > 8 or data[-12:] != PNG_END:
        return None
    pixels_count = height * width
    return Size(height, width) if 0 < pixels_count <= min(PIXELS_MAX, _PNG_GROWTH_MAX * len(data)) else None


def _is_plain_png(data: memoryview) -> bool:
    """Whether a PNG is not animated and its chunks end within it: OpenCV would allocate whatever length a chunk claims."""
    at, kind = len(_PNG), b""
    while at < len(data) and kind not in {b"IEND", b"acTL"}:
        kind = bytes(data[at + 4 : at + 8])
        at += 12 + int.from_bytes(data[at : at + 4], "big")
    return at <= len(data) and kind == b"IEND"


def _is_whole_riff(data: memoryview) -> bool:
    """Whether the chunks of a RIFF file end exactly where its header says."""
    at, end = 12, 8 + int.from_bytes(data[4:8], "little")
    while at < end <= len(data):
        length = int.from_bytes(data[at + 4 : at + 8], "little")
        at += 8 + length + length % 2
    return at == end <= len(data)


def _checked(size: Size) -> Size:
    if size.height * size.width > PIXELS_MAX:
        raise ValueError(f"{size.height}x{size.width} pixels are more than {PIXELS_MAX}")
    return size


def _bits_per_channel(file: Any, data: memoryview) -> int:
    """Return the stored bits per channel of a file that Pillow has opened, at least 8. Its mode tells them for grey only."""
    if file.mode in _WIDE_MODES:
        return 16
    kind = file.format
    bits = [8]
    if kind == "TIFF":
        bits += file.tag_v2.get(_TIFF_BITS, ())
    elif kind == "SGI":
        bits.append(8 * data[3])
    elif kind == "JPEG2000":
        at = bytes(data).index(_JPEG2000_SIZE) + 40
        bits += [(each & 127) + 1 for each in data[at + 2 : at + 2 + 3 * data[at + 1] : 3]]
    elif kind == "AVIF":
        bits.append(10 if data[bytes(data).index(b"av1C") + 6] & 64 else 8)
    elif kind == "PPM":  # ("RGB", 65535): the last argument of the decoder of a tile is the largest value
        bits += [each.bit_length() for tile in file.tile for each in tile[3] if isinstance(each, int)]
    elif kind in {"PNG", "DDS"}:  # "RGB;16B", or the DDS codec for floats
        bits.append(16 if re.search(";16|BC6", str([tile[3] for tile in file.tile])) else 8)
    return max(bits)


@contextmanager
def pillow_errors() -> Iterator[None]:
    """Turn the various errors that Pillow raises for damaged files (such as ``SyntaxError``) into ``ValueError``."""
    try:
        yield
    except (ValueError, OSError, MemoryError):
        raise
    except Exception as error:
        raise ValueError(f"the picture is damaged: {error or type(error).__name__}") from error


@cache
def _opencv() -> Any:
    import cv2

    return cv2, cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION


def decode_by_opencv(data: memoryview, size: Size) -> NDArray[np.uint8] | None:
    """Decode to uint8[H, W, 3] by OpenCV; None if it rejects the picture."""
    cv2, flags = _opencv()
    try:
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except cv2.error:
        return None
    return None if pixels is None or pixels.shape[:2] != size else pixels


# ── many small PNGs ─────────────────────────────────────────────────────────────────────────────────────────────────


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
