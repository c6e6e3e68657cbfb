"""Pictures that become files again, compared with Pillow."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from penstock.images.recoding import describe_picture, encoded, resized_pixels
from transformed_sources import picture_of, png_of

_RNG = np.random.default_rng(0)
_SMOOTH = np.asarray(Image.fromarray(_RNG.integers(0, 256, (6, 9, 3), dtype=np.uint8)).resize((90, 60)))


def resized(data: bytes, **options: object) -> np.ndarray:
    return resized_pixels(memoryview(data), describe_picture(memoryview(data)), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied(orientation: int, kind: str) -> None:
    """Each of the eight orientations is turned upright as Pillow does it, and sizes count after that."""
    exif = Image.Exif()
    exif[274] = orientation
    data = picture_of(Image.fromarray(_SMOOTH), kind, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    found = resized(data).astype(int)
    assert found.shape == np.asarray(upright).shape
    assert np.abs(found - np.asarray(upright).astype(int)).max() <= 3
    assert resized(data, width=20, height=50).shape == (50, 20, 3)
    small = np.asarray(upright.resize((45 * upright.width // 90, 45 * upright.height // 90), Image.Resampling.BOX))
    assert (
        np.abs(resized(data, width=small.shape[1], height=small.shape[0], fit="stretch").astype(int) - small).mean() < 4
    )


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"width": 45}, (30, 45)),
        ({"height": 30}, (30, 45)),
        ({"width": 900}, (60, 90)),
        ({"width": 20, "height": 20}, (20, 20)),
        ({"width": 20, "height": 20, "fit": "stretch"}, (20, 20)),
        ({"width": 20, "height": 20, "fit": "inside"}, (13, 20)),
        ({"width": 200, "height": 200}, (200, 200)),
        ({"width": 200, "height": 200, "fit": "inside"}, (60, 90)),
        ({"width": 1}, (1, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
def test_sizes(options: dict[str, object], shape: tuple[int, int], mode: str) -> None:
    """The result has the promised size, whatever the channels of the picture."""
    data = picture_of(Image.fromarray(_SMOOTH).convert(mode), "PNG")
    assert resized(data, **options).shape == (*shape, *{"RGB": (3,), "L": (), "RGBA": (4,)}[mode])


def test_crop_takes_the_centre() -> None:
    """Cropping keeps the middle of the longer side."""
    pixels = np.zeros((10, 30, 3), np.uint8)
    pixels[:, 10:20] = 200
    assert (resized(png_of(pixels), width=10, height=10) == 200).all()


def test_transparent_pixels_do_not_bleed() -> None:
    """The colour of fully transparent pixels does not reach the visible ones."""
    pixels = np.zeros((20, 20, 4), np.uint8)
    pixels[:, :9] = (200, 100, 50, 255)
    pixels[:, 9:] = (0, 255, 0, 0)
    found = resized(png_of(pixels), width=5, height=5)
    visible = found[found[..., 3] > 10]
    assert np.abs(visible[:, :3].astype(int) - (200, 100, 50)).max() <= 2


@pytest.mark.parametrize("kind", ["jpg", "png", "webp"])
def test_alpha_and_grey(kind: str) -> None:
    """PNG and WebP keep alpha, a JPEG shows the picture on white, and grey stays grey where the format has it."""
    half = np.full((16, 16, 4), (100, 0, 0, 128), np.uint8)
    found = Image.open(io.BytesIO(encoded(resized(png_of(half)), kind, quality=100)))  # type: ignore[arg-type]
    if kind == "jpg":
        assert np.abs(np.asarray(found).astype(int) - (177, 127, 127)).max() <= 3
    else:
        assert (found.mode, np.asarray(found)[0, 0, 3]) == ("RGBA", 128)
    grey = Image.open(io.BytesIO(encoded(np.full((16, 16), 77, np.uint8), kind, quality=100)))  # type: ignore[arg-type]
    assert abs(int(np.asarray(grey.convert("L"))[3, 3]) - 77) <= 1
    assert kind == "webp" or grey.mode == "L"


def test_palettes_with_and_without_transparency() -> None:
    """A palette becomes colours, and its transparent entry alpha."""
    palette = Image.fromarray(_SMOOTH).quantize(8)
    assert resized(picture_of(palette, "PNG")).shape == (60, 90, 3)
    assert resized(picture_of(palette, "PNG", transparency=0)).shape == (60, 90, 4)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (png_of(np.zeros((2, 2), np.uint16)), "more than 8 bits"),
        (
            picture_of(Image.new("L", (2, 2)), "GIF", save_all=True, append_images=[Image.new("L", (2, 2), 9)]),
            "animation",
        ),
        (b"", "not known"),
        (b"text", "not known"),
        (png_of(_SMOOTH)[:-40], "trunc"),
        (picture_of(Image.fromarray(_SMOOTH), "JPEG")[:300], "."),
    ],
    ids=["16-bit", "animation", "empty", "text", "cut-png", "cut-jpeg"],
)
def test_what_is_refused(data: bytes, message: str) -> None:
    """Nothing is lost silently: deeper pictures, animations and damage are errors."""
    with pytest.raises((ValueError, OSError), match=message):
        resized(data, width=2)
