from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from penstock.images import (
    Box,
    Size,
    centre_box,
    mask_pixels,
    open_picture,
    random_box,
    shrink_factor,
    write_mask,
    write_region,
)

RAMP = np.stack(np.broadcast_arrays(np.arange(200)[:, None], np.arange(240)[None, :], np.uint8(0)), 2).astype(np.uint8)


def stored(pixels: np.ndarray, form: str, **options: object) -> memoryview:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, form, **options)
    return memoryview(out.getvalue())


def region(data: memoryview, box: Box, size: tuple[int, int], **options: bool) -> np.ndarray:
    out = np.full((*size, 3), 77, np.uint8)
    write_region(open_picture(data), box, out, mode="RGB", **options)
    return out


def test_the_whole_picture_is_decoded_in_place() -> None:
    """A picture that has its size already lands in the row as it is, in both modes."""
    for form in ("PNG", "JPEG"):
        data = stored(RAMP, form)
        np.testing.assert_array_equal(region(data, Box(0, 0, 200, 240), (200, 240)), open_picture(data).pixels("RGB"))
        grey = np.zeros((200, 240), np.uint8)
        write_region(open_picture(data), Box(0, 0, 200, 240), grey, mode="L")
        np.testing.assert_array_equal(grey, open_picture(data).pixels("L"))


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("form", ["PNG", "JPEG"])
@pytest.mark.parametrize(
    ("box", "size"),
    [
        (Box(0, 0, 200, 240), (100, 120)),
        (Box(40, 60, 100, 120), (100, 120)),
        (Box(40, 60, 100, 120), (25, 30)),
        (Box(40, 60, 100, 120), (150, 160)),
        (Box(0, 0, 200, 240), (20, 24)),
        (Box(199, 239, 1, 1), (4, 5)),
    ],
)
def test_a_region_holds_what_lies_there(box: Box, size: tuple[int, int], form: str, antialias: bool) -> None:
    """On a picture whose colours are its coordinates, every pixel of the result names the place it came from."""
    out = region(stored(RAMP, form, **({"quality": 100, "subsampling": 0} if form == "JPEG" else {})), box, size,
                 antialias=antialias)  # fmt: skip
    rows = box.top + (np.arange(size[0]) + 0.5) * box.height / size[0] - 0.5
    columns = box.left + (np.arange(size[1]) + 0.5) * box.width / size[1] - 0.5
    limit = 3 + max(box.height / size[0], box.width / size[1])  # a shrunk JPEG is cut at multiples of its factor
    assert np.abs(out[:, :, 0] - rows[:, None]).max() <= limit
    assert np.abs(out[:, :, 1] - columns[None, :]).max() <= limit


@pytest.mark.parametrize("size", [(200, 240), (64, 80), (300, 300)])
def test_flipping_mirrors(size: tuple[int, int]) -> None:
    """Flipped is the mirror image of not flipped, resized or not."""
    data, box = stored(RAMP, "PNG"), Box(0, 0, 200, 240)
    np.testing.assert_array_equal(region(data, box, size, flip=True), region(data, box, size)[:, ::-1])


def test_fine_stripes_do_not_alias() -> None:
    """Stripes finer than a pixel of the result become grey, not other stripes."""
    stripes = np.zeros((600, 600, 3), np.uint8)
    stripes[:, ::2] = 255
    out = region(stored(stripes, "PNG"), Box(0, 0, 600, 600), (70, 70))
    assert np.abs(out.astype(int) - 127).max() < 25


def test_masks_keep_values_and_place() -> None:
    """A mask cut, resized and flipped like its picture marks the same pixels, with values that were there before."""
    values = (RAMP[:, :, 1] > 120).astype(np.uint8) * 5
    data, mask, box = stored(RAMP, "PNG"), stored(values, "PNG"), Box(20, 30, 160, 180)
    for flip in (False, True):
        picture = region(data, box, (80, 90), flip=flip)
        out = np.full((80, 90), 9, np.uint8)
        write_mask(mask, open_picture(data).size, box, out, flip=flip)
        assert set(np.unique(out)) == {0, 5}
        edge = np.abs(picture[:, :, 1].astype(int) - 120) <= 3
        np.testing.assert_array_equal((out == 5) | edge, (picture[:, :, 1] > 120) | edge)
    whole = np.empty((200, 240), np.uint8)
    write_mask(mask, open_picture(data).size, Box(0, 0, 200, 240), whole)
    np.testing.assert_array_equal(whole, mask_pixels(mask))


def test_a_mask_of_another_size_is_refused() -> None:
    """Geometry is shared, so sizes must be equal; the error gives both."""
    with pytest.raises(ValueError, match="10x10 pixels, but its picture has 200x240"):
        write_mask(stored(np.zeros((10, 10), np.uint8), "PNG"), open_picture(stored(RAMP, "PNG")).size,
                   Box(0, 0, 5, 5), np.empty((5, 5), np.uint8))  # fmt: skip


# ── boxes ───────────────────────────────────────────────────────────────────────────────────────────────────────────

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
