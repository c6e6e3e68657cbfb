"""Makes new picture files: decodes pictures with their alpha, turns them upright, resizes and encodes them.

The loader needs only pixels in colour. A picture that becomes a file again keeps its appearance: alpha stays if the new format
has it and is otherwise laid over white, grey stays grey, and the EXIF orientation is applied, because the new file has no EXIF.
Colour profiles and all other metadata are dropped. Pictures with more than 8 bits per channel and animations are refused,
because a part of them would be lost silently.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from penstock.images.codecs import Size, open_picture, pillow_errors
from penstock.images.regions import Box, centre_box, write_region

if TYPE_CHECKING:
    from numpy.typing import NDArray

Kind: TypeAlias = Literal["jpg", "png", "webp"]
Fit: TypeAlias = Literal["crop", "stretch", "inside"]

KINDS: dict[str, Kind] = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}
"""Kinds of pictures that can be encoded, by Pillow's names."""

CONTENT_TYPES: dict[Kind, str] = {"jpg": "image/jpeg", "png": "image/png", "webp": "image/webp"}

QUALITY = 90
SIDE_MAX = {"jpg": 65_535, "png": 65_535, "webp": 16_383}
"""Longest side of a picture of each kind, in pixels."""

_ORIENTATION = 274  # the EXIF tag
_SWAPPING = (5, 6, 7, 8)  # orientations that swap height and width
_GREY = ("L", "1")


class PictureFile(NamedTuple):
    """The facts in the header of a picture.

    Attributes:
        kind: Kind of the picture; None if it is one that is only decoded.
        format: Name of its format, for messages.
        is_grey: Whether it has one channel, and no alpha.
        has_alpha: Whether some of its pixels may be transparent.
        orientation: EXIF orientation, from 1 to 8; 1 is upright.
    """

    kind: Kind | None
    format: str
    is_grey: bool
    has_alpha: bool
    orientation: int


def describe_picture(data: memoryview) -> PictureFile:
    """Read the header of a picture.

    Raises:
        ValueError, OSError: It is no picture, or an animation.
    """
    from PIL import Image as Pillow
    from PIL import UnidentifiedImageError

    with pillow_errors():
        try:
            opened = Pillow.open(io.BytesIO(data))
        except UnidentifiedImageError:  # its text is an address in memory
            raise ValueError("its format is not known") from None
        with opened as file:
            if getattr(file, "n_frames", 1) > 1:
                raise ValueError("an animation is not supported")
            exif = file.getexif() if file.format in KINDS or file.format == "TIFF" else {}
            orientation = exif.get(_ORIENTATION, 1)
            has_alpha = file.mode in {"RGBA", "LA", "PA", "La", "RGBa"} or "transparency" in file.info
            return PictureFile(
                KINDS.get(file.format or ""),
                file.format or "?",
                file.mode in _GREY and not has_alpha,
                has_alpha,
                orientation if orientation in range(1, 9) else 1,
            )


def resized_pixels(
    data: memoryview, file: PictureFile, *, width: int = 0, height: int = 0, fit: Fit = "crop"
) -> NDArray[np.uint8]:
    """Decode a picture upright, and resize it.

    Args:
        data: The picture.
        file: Header of the picture.
        width: Width of the result in pixels; 0 follows from the height and, without both, is the picture's own.
        height: Height of the result; 0 as for `width`.
        fit: With both: ``"crop"`` cuts the picture to their ratio, ``"stretch"`` distorts it, ``"inside"`` keeps its ratio and
            is never larger than they or the picture are. With one of them it is always as ``"inside"``.

    Returns:
        uint8[H, W] if it is grey, otherwise uint8[H, W, 3], or uint8[H, W, 4] with alpha.

    Raises:
        ValueError, OSError: The picture is damaged, has more than 8 bits per channel or too many pixels.
    """
    picture = open_picture(data)
    stored = picture.size
    wanted = Size(width, height) if file.orientation in _SWAPPING else Size(height, width)
    target, box = _plan(stored, wanted, fit)
    if file.has_alpha:
        pixels = _resized_alpha(_alpha_pixels(data), target, box)
    else:
        shape = target if file.is_grey else (*target, 3)
        pixels = np.empty(shape, np.uint8)
        shrinks = box.height * box.width > target.height * target.width
        write_region(picture, box, pixels, mode="L" if file.is_grey else "RGB", antialias=shrinks)
    return np.ascontiguousarray(_upright(pixels, file.orientation))


def _plan(stored: Size, wanted: Size, fit: Fit) -> tuple[Size, Box]:
    """Return the size of the result and the region of the picture that it shows."""
    whole = Box(0, 0, *stored)
    if not wanted.height and not wanted.width:
        return stored, whole
    if wanted.height and wanted.width and fit == "crop":
        return wanted, centre_box(stored, wanted)
    if wanted.height and wanted.width and fit == "stretch":
        return wanted, whole
    ratios = [want / have for want, have in zip(wanted, stored, strict=True) if want]
    scale = min(1.0, *ratios)
    return Size(*(max(1, round(side * scale)) for side in stored)), whole


def _alpha_pixels(data: memoryview) -> NDArray[np.uint8]:
    from PIL import Image as Pillow

    with pillow_errors(), Pillow.open(io.BytesIO(data)) as file:
        return np.array(file.convert("RGBA"), dtype=np.uint8)


def _resized_alpha(pixels: NDArray[np.uint8], target: Size, box: Box) -> NDArray[np.uint8]:
    """Resize a region with colours weighted by alpha, so that the colour of transparent pixels does not bleed."""
    import cv2

    region = pixels[box.top : box.top + box.height, box.left : box.left + box.width]
    if Size(*region.shape[:2]) == target:
        return region
    weighted = region.astype(np.float32)
    weighted[..., :3] *= weighted[..., 3:] / 255
    shrinks = box.height * box.width > target.height * target.width
    method = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    scaled: NDArray[np.float32] = np.asarray(cv2.resize(weighted, target[::-1], interpolation=method), np.float32)
    scaled[..., :3] *= 255 / np.maximum(scaled[..., 3:], 1e-3)
    found: NDArray[np.uint8] = np.clip(np.rint(scaled), 0, 255).astype(np.uint8)
    return found


def _upright(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    if orientation in _SWAPPING:
        pixels = pixels.swapaxes(0, 1)
    flips_rows, flips_columns = orientation in {3, 4, 7, 8}, orientation in {2, 3, 6, 7}
    if flips_rows:
        pixels = pixels[::-1]
    return pixels[:, ::-1] if flips_columns else pixels


def encoded(pixels: NDArray[np.uint8], kind: Kind, *, quality: int = QUALITY) -> bytes:
    """Encode pixels as a picture without metadata; the same pixels always give the same bytes with the same libraries.

    Args:
        pixels: uint8[H, W], uint8[H, W, 3] or uint8[H, W, 4]; a JPEG has no alpha, so it shows the picture on white.
        kind: Kind of the picture.
        quality: From 1 to 100, for JPEG and WebP.

    Raises:
        ValueError: It has too many pixels for its kind.
    """
    if max(pixels.shape[:2]) > SIDE_MAX[kind]:
        raise ValueError(f"{pixels.shape[0]}x{pixels.shape[1]} pixels; a side of a {kind} has at most {SIDE_MAX[kind]}")
    if kind == "jpg":
        return _jpeg(pixels, quality)
    from PIL import Image as Pillow

    out = io.BytesIO()
    options: dict[str, Any] = {"quality": quality} if kind == "webp" else {}
    Pillow.fromarray(pixels).save(out, {"png": "PNG", "webp": "WEBP"}[kind], **options)
    return out.getvalue()


def _jpeg(pixels: NDArray[np.uint8], quality: int) -> bytes:
    import simplejpeg  # type: ignore[import-untyped]

    if pixels.ndim == 3 and pixels.shape[2] == 4:
        alpha = pixels[..., 3:].astype(np.uint16)
        mixed = pixels[..., :3] * alpha + np.uint16(255) * (255 - alpha)
        pixels = ((mixed + 127) // 255).astype(np.uint8)
    if pixels.ndim == 2:
        grey: bytes = simplejpeg.encode_jpeg(np.ascontiguousarray(pixels[:, :, None]), quality, "GRAY", "Gray")
        return grey
    found: bytes = simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality, "RGB", "420")
    return found
