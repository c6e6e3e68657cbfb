from __future__ import annotations

import io
import sys
import threading

import numpy as np
import pytest
from PIL import Image

from penstock.images import mask_pixels, open_picture

RNG = np.random.default_rng(0)
COLOURS = RNG.integers(0, 256, (24, 40, 3), dtype=np.uint8)


def stored(mode: str, form: str, **options: object) -> memoryview:
    out = io.BytesIO()
    Image.fromarray(COLOURS).convert(mode).save(out, form, **options)  # type: ignore[arg-type]
    return memoryview(out.getvalue())


def by_pillow(data: memoryview, mode: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert(mode))


@pytest.mark.parametrize("wanted", ["RGB", "L"])
@pytest.mark.parametrize(
    ("form", "mode"),
    [
        *(("PNG", mode) for mode in ("RGB", "RGBA", "L", "LA", "P", "1")),
        *(("WEBP", mode) for mode in ("RGB", "RGBA")),
        *(("TIFF", mode) for mode in ("RGB", "L", "CMYK")),
        ("JPEG", "CMYK"),
        ("GIF", "P"),
        ("BMP", "RGB"),
    ],
)
def test_every_decoder_gives_pillows_pixels(form: str, mode: str, wanted: str) -> None:
    """Which decoder is fast for a format changes no pixel: PNG, WebP, TIFF, GIF and CMYK are Pillow's to the bit."""
    data = stored(mode, form)
    picture = open_picture(data)
    assert picture.size == (24, 40)
    np.testing.assert_array_equal(picture.pixels(wanted), by_pillow(data, wanted))  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"quality": 30}])
def test_jpeg_is_pillows_to_a_rounding(mode: str, options: dict[str, object]) -> None:
    """JPEG, both baseline and progressive, in colour and grey, differs from Pillow by a rounding at most."""
    data = stored(mode, "JPEG", **options)
    pixels = open_picture(data).pixels("RGB")
    assert np.abs(pixels.astype(int) - by_pillow(data, "RGB")).max() <= 2


@pytest.mark.parametrize("shrink", [1, 2, 4, 8])
def test_jpeg_shrinks_while_it_is_decoded(shrink: int) -> None:
    """The sides are divided by the factor and rounded up, and the colours stay where they were."""
    out = io.BytesIO()
    Image.fromarray(np.repeat(np.repeat(COLOURS[:3, :4], 33, 0), 33, 1)).save(out, "JPEG", quality=95, subsampling=0)
    picture = open_picture(memoryview(out.getvalue()))
    pixels = picture.pixels("RGB", shrink=shrink)
    assert pixels.shape == (-(-99 // shrink), -(-132 // shrink), 3)
    for row in range(3):
        for column in range(4):
            centre = pixels[(33 * row + 16) // shrink, (33 * column + 16) // shrink]
            assert np.abs(centre.astype(int) - COLOURS[row, column]).max() < 40


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_truncated_pictures_are_errors(form: str) -> None:
    """A picture that ends early raises wherever it was cut: no half picture gets through."""
    data = stored("RGB", form)
    for length in range(0, len(data) - 12, 97):
        with pytest.raises((ValueError, OSError)):
            open_picture(data[:length]).pixels("RGB")


def test_a_jpeg_with_bytes_between_its_markers_reads_as_in_pillow() -> None:
    """A blemish that every library reads over is no error here either."""
    data = bytes(stored("RGB", "JPEG"))
    at = data.index(b"\xff\xda")
    blemished = memoryview(data[:at] + b"\0\0" + data[at:])
    np.testing.assert_array_equal(open_picture(blemished).pixels("RGB"), by_pillow(blemished, "RGB"))


def test_more_than_8_bits_are_refused() -> None:
    """16-bit PNGs, grey or in colour, are errors: half of each value would be lost without a word."""
    import cv2

    for shape in ((3, 2), (3, 2, 3)):
        data = memoryview(cv2.imencode(".png", np.full(shape, 300, np.uint16))[1].tobytes())
        with pytest.raises(ValueError, match="more than 8 bits"):
            open_picture(data)


def test_masks_keep_their_values() -> None:
    """Indices of a palette stay indices, grey stays grey, a bitmap is 0 and 1; colours are refused."""
    indices = RNG.integers(0, 7, (5, 6), dtype=np.uint8)
    palette = Image.fromarray(indices, "P")
    palette.putpalette([9, 8, 7] * 256)
    for picture, expected in (
        (palette, indices),
        (Image.fromarray(indices), indices),
        (Image.fromarray(indices > 3), indices > 3),
    ):
        out = io.BytesIO()
        picture.save(out, "PNG")
        pixels = mask_pixels(memoryview(out.getvalue()))
        assert pixels.dtype == np.uint8
        np.testing.assert_array_equal(pixels, expected)
    with pytest.raises(ValueError, match="one channel"):
        mask_pixels(stored("RGB", "PNG"))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_other_threads_run_while_a_picture_is_decoded(form: str) -> None:
    """The decoder lets go of the interpreter: although nobody is made to yield, another thread runs inside its calls."""
    out = io.BytesIO()
    Image.fromarray(RNG.integers(0, 256, (700, 900, 3), dtype=np.uint8)).save(out, form)
    data = memoryview(out.getvalue())
    open_picture(data).pixels("RGB")  # what is imported on first use is not what is measured
    inside, seen, ended = False, threading.Event(), threading.Event()

    def decode() -> None:
        nonlocal inside
        for _ in range(100):
            inside = True
            open_picture(data).pixels("RGB")
            inside = False
            if seen.is_set():
                break
        ended.set()

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(100.0)
    try:
        thread = threading.Thread(target=decode)
        thread.start()
        while not ended.is_set() and not inside:
            ended.wait(0.0001)
        if inside:
            seen.set()
        thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert seen.is_set()
