from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.images import Box, Size, centre_box, random_box, shrink_factor

SIDES = st.integers(1, 5000)
SIZES = st.builds(Size, SIDES, SIDES)


def inside(box: Box, size: Size) -> bool:
    return (
        box.top >= 0
        and box.left >= 0
        and box.height >= 1
        and box.width >= 1
        and box.top + box.height <= size.height
        and box.left + box.width <= size.width
    )


@given(size=SIZES, target=SIZES, fraction=st.floats(0.01, 1))
def test_centre_boxes_lie_inside(size: Size, target: Size, fraction: float) -> None:
    """Whatever the sizes, the region lies inside the picture and its margins are equal to a pixel."""
    box = centre_box(size, target, fraction=fraction)
    assert inside(box, size)
    assert 0 <= size.height - box.height - 2 * box.top <= 1
    assert 0 <= size.width - box.width - 2 * box.left <= 1


def test_centre_box_of_imagenet() -> None:
    """224 of 256 on the short side, centred: the region that everybody evaluates on."""
    assert centre_box(Size(256, 341), Size(224, 224), fraction=224 / 256) == Box(16, 58, 224, 224)


@given(size=SIZES, seed=st.integers(0, 2**32), low=st.floats(0.01, 1), aspect=st.floats(1, 4))
def test_random_boxes_lie_inside(size: Size, seed: int, low: float, aspect: float) -> None:
    """Whatever is drawn, the region lies inside the picture."""
    box = random_box(size, np.random.default_rng(seed), scale=(low, 1.0), aspect=(1 / aspect, aspect))
    assert inside(box, size)


def test_random_boxes_keep_their_bounds_and_reach_everywhere() -> None:
    """Area and aspect ratio stay in their bounds, and every corner is reached."""
    rng, size = np.random.default_rng(1), Size(400, 500)
    boxes = [random_box(size, rng, scale=(0.2, 0.5), aspect=(0.8, 1.25)) for _ in range(2000)]
    shares = [box.height * box.width / (400 * 500) for box in boxes]
    assert 0.19 < min(shares) < 0.23
    assert 0.47 < max(shares) < 0.51
    assert all(0.78 < box.width / box.height < 1.28 for box in boxes)
    assert min(box.top for box in boxes) < 5
    assert max(box.left + box.width for box in boxes) > 495


def test_impossible_aspects_give_the_nearest_centre() -> None:
    """A strip that no region of the wanted shape fits into gives its centre, in the nearest shape."""
    box = random_box(Size(1000, 10), np.random.default_rng(0), scale=(0.9, 1.0), aspect=(0.75, 4 / 3))
    assert box == Box(493, 0, 13, 10)


@pytest.mark.parametrize(
    ("size", "target", "expected"),
    [
        ((375, 500), (224, 224), 1),
        ((427, 640), (224, 224), 2),
        ((500, 500), (224, 224), 2),
        ((1000, 1000), (224, 224), 4),
        ((4000, 4000), (224, 224), 8),
        ((200, 4000), (224, 224), 1),
        ((100, 100), (224, 224), 1),
    ],
)
def test_shrink_factors(size: tuple[int, int], target: tuple[int, int], expected: int) -> None:
    """A picture is decoded smaller only where enough pixels are left in both directions."""
    assert shrink_factor(Box(0, 0, *size), Size(*target)) == expected
