"""The region of a picture to use, and how it is decoded, resized and flipped into an existing array."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.images.codecs import Size, mask_pixels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.images.codecs import Mode, Picture

RANDOM_TRIES = 10  # as in torchvision's RandomResizedCrop, which then takes the centre too
SHRINK_FACTORS = (8, 4, 2)  # the factors for which libjpeg-turbo has vector code
SHORT_MIN = 0.8  # one side may be decoded to 4/5 of the target, if the other side is longer than its target
AREA_RATIO_MIN = 2.0  # source pixels per result pixel and side from which interpolating between four would alias


class Box(NamedTuple):
    """A region of a picture, in its pixels."""

    top: int
    left: int
    height: int
    width: int


def centre_box(size: Size, target: Size, *, fraction: float = 1.0) -> Box:
    """Return the largest centred region with the aspect ratio of `target`, with its sides multiplied by `fraction`."""
    scale = fraction * min(size.height / target.height, size.width / target.width)
    height = min(size.height, max(1, round(target.height * scale)))
    width = min(size.width, max(1, round(target.width * scale)))
    return Box((size.height - height) // 2, (size.width - width) // 2, height, width)


def random_box(size: Size, rng: np.random.Generator, *, scale: tuple[float, float], aspect: tuple[float, float]) -> Box:
    """Return a region of random area and aspect ratio at a random place.

    Each try draws three numbers, so that later draws of the stream depend only on the number of tries.

    Args:
        size: Size of the picture.
        rng: The sample's random numbers.
        scale: Bounds of the region's area as a share of the picture's; uniformly distributed.
        aspect: Bounds of width / height; its logarithm is uniformly distributed.

    Returns:
        The first of ten tries that fits, or else the centred region with the nearest allowed aspect ratio.
    """
    low, high = math.log(aspect[0]), math.log(aspect[1])
    for _ in range(RANDOM_TRIES):
        share, ratio, place = rng.random(), rng.random(), rng.random()
        area = size.height * size.width * (scale[0] + share * (scale[1] - scale[0]))
        width_to_height = math.exp(low + ratio * (high - low))
        width, height = round(math.sqrt(area * width_to_height)), round(math.sqrt(area / width_to_height))
        if 1 <= width <= size.width and 1 <= height <= size.height:
            places = (size.height - height + 1) * (size.width - width + 1)
            top, left = divmod(min(int(place * places), places - 1), size.width - width + 1)
            return Box(top, left, height, width)
    shape = min(max(size.width / size.height, aspect[0]), aspect[1])
    if size.width > size.height * shape:
        return centre_box(size, Size(size.height, max(1, round(size.height * shape))))
    return centre_box(size, Size(max(1, round(size.width / shape)), size.width))


def shrink_factor(box: Box, target: Size) -> int:
    """Return how many times smaller than stored a picture may be decoded so that `box` still fills `target`: 1, 2, 4 or 8.

    The geometric mean of both ratios decides. One of them may fall short by a fifth: this loses less quality in sharpness
    than skipping pixels would in aliasing.
    """
    down, across = box.height / target.height, box.width / target.width
    for factor in SHRINK_FACTORS:
        if math.sqrt(down * across) >= factor and min(down, across) >= SHORT_MIN * factor:
            return factor
    return 1


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
