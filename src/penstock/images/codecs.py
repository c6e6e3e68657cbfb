"""Decoders: content decides, never a name. libjpeg-turbo for JPEG, OpenCV for PNG and WebP, Pillow for the rest.

Pillow also has the last word: what a faster decoder refuses is tried again with Pillow, whose error is then the one
that is raised. So a slightly damaged JPEG (bytes between markers) reads as everywhere else, and a truncated one does not.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from penstock.images.geometry import Size

if TYPE_CHECKING:
    from numpy.typing import NDArray

Mode: TypeAlias = Literal["RGB", "L"]

_JPEG = b"\xff\xd8\xff"
_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG_SPACES = {"YCbCr", "Gray", "RGB"}  # CMYK and YCCK need Pillow's conversion
_WIDE_MODES = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")  # Pillow would clip these to 8 bits without a word
_MASK_MODES = ("L", "P", "1")
PIXELS_MAX = 178_956_970  # where Pillow refuses too: a few bytes can claim a picture that fills the memory


class Picture(ABC):
    """A picture whose size is known, to be decoded once."""

    size: Size
    shrinks = False  # whether `pixels` heeds `shrink`

    @abstractmethod
    def pixels(self, mode: Mode, *, shrink: int = 1, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """All of it: uint8[H, W, 3] for ``"RGB"``, uint8[H, W] for ``"L"``.

        Args:
            mode: Which of the two.
            shrink: 1, 2, 4 or 8: sides divided by it, rounded up. 1 where the codec cannot.
            out: C-contiguous and of the result's shape: decoded into, where the codec can.

        Raises:
            ValueError, OSError: The bytes are damaged.
        """


def open_picture(data: memoryview) -> Picture:
    """The picture that `data` holds.

    Raises:
        ValueError, OSError: It holds none, or one with more than 8 bits per channel or too many pixels.
    """
    picture = _opened(data)
    if picture.size.height * picture.size.width > PIXELS_MAX:
        raise ValueError(f"{picture.size.height}x{picture.size.width} pixels are more than {PIXELS_MAX}")
    return picture


def _opened(data: memoryview) -> Picture:
    head = bytes(data[:25])
    if head.startswith(_JPEG):
        try:
            return _Jpeg(data)
        except (ValueError, KeyError):  # KeyError: a subsampling that simplejpeg has no name for
            return _Other(data)
    if head.startswith(_PNG) and not _is_wide_png(head) and len(head) > 24:
        return _Png(data)
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return _WebP(data)
    return _Other(data)


def mask_pixels(data: memoryview) -> NDArray[np.uint8]:
    """A mask as stored: the values of a grey picture, the indices of one with a palette, 0 and 1 of a bitmap.

    Returns:
        uint8[H, W].

    Raises:
        ValueError: It has several channels, or more than 8 bits.
    """
    from PIL import Image as Pillow

    with Pillow.open(io.BytesIO(data)) as picture:
        if picture.mode not in _MASK_MODES:
            raise ValueError(f"a mask has one channel of 8 bits or less, this picture is of mode {picture.mode!r}")
        return np.asarray(picture).astype(np.uint8, copy=False)


class _Jpeg(Picture):
    shrinks = True

    def __init__(self, data: memoryview) -> None:
        import simplejpeg  # type: ignore[import-untyped]

        self._data = data
        height, width, space, _ = simplejpeg.decode_jpeg_header(data, strict=False)
        if space not in _JPEG_SPACES:
            raise ValueError(f"a JPEG in {space}")
        self.size = Size(height, width)

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


class _Png(Picture):
    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.size = Size(int.from_bytes(data[20:24], "big"), int.from_bytes(data[16:20], "big"))

    def pixels(self, mode: Mode, *, shrink: int = 1, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        return _by_opencv(self._data, mode)


class _WebP(Picture):
    """Its header has several shapes, so that it is decoded at once."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._colours = _by_opencv(data, "RGB")
        self.size = Size(*self._colours.shape[:2])

    def pixels(self, mode: Mode, *, shrink: int = 1, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        return self._colours if mode == "RGB" else _Other(self._data).pixels(mode)


class _Other(Picture):
    def __init__(self, data: memoryview) -> None:
        from PIL import Image as Pillow

        self._file: Any = Pillow.open(io.BytesIO(data))
        if self._file.mode in _WIDE_MODES or _is_wide_png(bytes(data[:25])):
            raise ValueError(f"a picture of mode {self._file.mode!r} has more than 8 bits per channel")
        self.size = Size(self._file.height, self._file.width)

    def pixels(self, mode: Mode, *, shrink: int = 1, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        with self._file as picture:
            return np.array(picture.convert(mode), dtype=np.uint8)


def _is_wide_png(head: bytes) -> bool:
    return head.startswith(_PNG) and len(head) > 24 and head[24] > 8


def _by_opencv(data: memoryview, mode: Mode) -> NDArray[np.uint8]:
    if mode != "RGB":  # OpenCV weighs the colours of a PNG differently
        return _Other(data).pixels(mode)
    import cv2

    flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    try:
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except cv2.error:
        pixels = None
    return _Other(data).pixels(mode) if pixels is None else pixels  # type: ignore[return-value]
