from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from penstock.images import Box, mask_pixels, open_picture, write_mask, write_region

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
