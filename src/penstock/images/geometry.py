"""Which part of a picture is taken, and how much of it has to be decoded: integers in, integers out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

RANDOM_TRIES = 10  # as in torchvision's RandomResizedCrop; after them the centre
SHRINK_FACTORS = (8, 4, 2)  # those for which libjpeg-turbo has vector code
SHORT_MAX = 0.8  # one side may be decoded to 4/5 of what is wanted, if the other has more than enough


class Size(NamedTuple):
    """Pixels."""

    height: int
    width: int


class Box(NamedTuple):
    """A region of a picture, in its pixels."""

    top: int
    left: int
    height: int
    width: int


def centre_box(size: Size, target: Size, *, fraction: float = 1.0) -> Box:
    """The largest centred region with the target's aspect ratio, its sides times `fraction`."""
    scale = fraction * min(size.height / target.height, size.width / target.width)
    height = min(size.height, max(1, round(target.height * scale)))
    width = min(size.width, max(1, round(target.width * scale)))
    return Box((size.height - height) // 2, (size.width - width) // 2, height, width)


def random_box(size: Size, rng: np.random.Generator, *, scale: tuple[float, float], aspect: tuple[float, float]) -> Box:
    """A region of random area and aspect ratio at a random place.

    Draws three numbers per try, so that what follows in the stream depends on the tries alone.

    Args:
        size: Of the picture.
        rng: Of the sample.
        scale: Bounds of its share of the picture's area; uniform.
        aspect: Bounds of width / height; uniform in the logarithm.

    Returns:
        The first of ten tries that fits, else the centred region with the nearest aspect ratio that is allowed.
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
    """How many times smaller than stored a picture may be decoded, so that `box` still fills `target`: 1, 2, 4 or 8.

    The mean of both ratios decides; each alone may fall short by a fifth, which costs less sharpness than skipping
    pixels costs in aliases.
    """
    down, across = box.height / target.height, box.width / target.width
    for factor in SHRINK_FACTORS:
        if math.sqrt(down * across) >= factor and min(down, across) >= SHORT_MAX * factor:
            return factor
    return 1
