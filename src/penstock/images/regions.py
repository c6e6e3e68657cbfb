"""Decodes, resizes and flips a region of a picture into an existing array."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from penstock.images.codecs import mask_pixels
from penstock.images.geometry import Box, Size, shrink_factor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.images.codecs import Mode, Picture

AREA_RATIO_MIN = 2.0  # source pixels per result pixel and side from which interpolating between four would alias


def write_region(
    picture: Picture, box: Box, out: NDArray[np.uint8], *, mode: Mode, flip: bool = False, antialias: bool = False
) -> None:
    """Decode the region `box` of a picture and resize it into `out`.

    Args:
        picture: A picture that was not decoded yet.
        box: A region inside the picture.
        out: uint8[H, W, 3], or uint8[H, W] for mode ``"L"``; C-contiguous.
        mode: ``"RGB"`` or ``"L"``.
        flip: Whether to mirror it left to right.
        antialias: Whether to average over all pixels at any ratio. Otherwise pixels are interpolated linearly after the
            JPEG decoder's own scaling, and averaged from a ratio of 2 on.

    Raises:
        ValueError, OSError: The picture is damaged.
    """
    target = Size(*out.shape[:2])
    if box == (0, 0, *picture.size) and picture.size == target and not flip:
        pixels = picture.pixels(mode, out=out)
        if not np.shares_memory(pixels, out):
            np.copyto(out, pixels)
        return
    shrink = 1 if antialias or not picture.shrinks else shrink_factor(box, target)
    pixels = picture.pixels(mode, shrink=shrink)
    if pixels.shape[0] >= picture.size.height:  # the decoder did not shrink the picture after all
        shrink = 1
    _resize(_cut(pixels, box, shrink), out, flip=flip, antialias=antialias)


def write_mask(data: memoryview, size: Size, box: Box, out: NDArray[np.uint8], *, flip: bool = False) -> None:
    """Decode the region `box` of a mask and resize it into `out` by nearest values, never by averages.

    Args:
        data: The mask as stored.
        size: Size of the picture that it belongs to.
        box: A region inside the picture.
        out: uint8[H, W]; C-contiguous.
        flip: Whether to mirror it left to right.

    Raises:
        ValueError: The mask differs in size from its picture, has several channels, or has more than 8 bits.
    """
    import cv2

    pixels = mask_pixels(data)
    if Size(*pixels.shape) != size:
        raise ValueError(
            f"the mask has {pixels.shape[0]}x{pixels.shape[1]} pixels, but its picture has {size[0]}x{size[1]}"
        )
    region = _cut(pixels, box, 1)
    if region.shape != out.shape:
        region = cv2.resize(region, out.shape[::-1], interpolation=cv2.INTER_NEAREST_EXACT)  # type: ignore[assignment]
    np.copyto(out, region[:, ::-1] if flip else region)


def _cut(pixels: NDArray[np.uint8], box: Box, shrink: int) -> NDArray[np.uint8]:
    """Return a view of `box` in a picture that was decoded `shrink` times smaller; at least one pixel."""
    top, left = box.top // shrink, box.left // shrink
    bottom = max(top + 1, (box.top + box.height) // shrink)
    right = max(left + 1, (box.left + box.width) // shrink)
    return pixels[top:bottom, left:right]


def _resize(pixels: NDArray[np.uint8], out: NDArray[np.uint8], *, flip: bool, antialias: bool) -> None:
    import cv2

    height, width = out.shape[:2]
    if pixels.shape != out.shape:
        ratio = math.sqrt(pixels.shape[0] / height * pixels.shape[1] / width)
        method = cv2.INTER_AREA if antialias or ratio >= AREA_RATIO_MIN else cv2.INTER_LINEAR
        if not flip:
            cv2.resize(pixels, (width, height), dst=out, interpolation=method)
            return
        pixels = cv2.resize(pixels, (width, height), interpolation=method)  # type: ignore[assignment]
    if flip:
        cv2.flip(pixels, 1, dst=out)
    else:
        np.copyto(out, pixels)
