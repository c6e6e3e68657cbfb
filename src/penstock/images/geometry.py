"""The region of a picture to use, and how much smaller it may be decoded: arithmetic on integers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

RANDOM_TRIES = 10  # as in torchvision's RandomResizedCrop, which then takes the centre too
SHRINK_FACTORS = (8, 4, 2)  # the factors for which libjpeg-turbo has vector code
SHORT_MIN = 0.8  # one side may be decoded to 4/5 of the target, if the other side is longer than its target


class Size(NamedTuple):
    """Height and width in pixels."""

    height: int
    width: int


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

    Each try draws three numbers, so that later draws of the stream depend on the number of tries alone.

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
