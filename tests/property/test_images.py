from __future__ import annotations

import contextlib
import io
import random
import warnings
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from penstock.images import mask_pixels, open_picture

COLOURS = np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)
SIGNATURE = b"\x89PNG\r\n\x1a\n"


def stored(form: str, mode: str, **options: object) -> bytes:
    out = io.BytesIO()
    Image.fromarray(COLOURS).convert(mode).save(out, form, **options)  # type: ignore[arg-type]
    return out.getvalue()


PNGS = [
    *(stored("PNG", mode) for mode in ("RGB", "RGBA", "L", "LA", "P", "1")),
    stored("PNG", "RGB", dpi=(72, 72), icc_profile=b"x" * 50, transparency=(1, 2, 3)),
]
PICTURES = [
    *PNGS,
    stored("JPEG", "RGB"), stored("JPEG", "L", progressive=True), stored("JPEG", "CMYK"),
    stored("WEBP", "RGB"), stored("WEBP", "RGBA", lossless=True), stored("GIF", "P"), stored("BMP", "RGB"),
    stored("TIFF", "RGB"), stored("TIFF", "RGB", compression="tiff_lzw"), stored("PPM", "RGB"), stored("SGI", "RGB"),
    stored("WEBP", "RGB", save_all=True, append_images=[Image.fromarray(COLOURS[::-1])]),
    stored("PNG", "RGB", save_all=True, append_images=[Image.fromarray(COLOURS[::-1])]),
]  # fmt: skip


def chunks(png: bytes) -> list[tuple[bytes, bytes]]:
    found, at = [], len(SIGNATURE)
    while at < len(png):
        length = int.from_bytes(png[at : at + 4], "big")
        found.append((png[at + 4 : at + 8], png[at + 8 : at + 8 + length]))
        at += 12 + length
    return found


def written(parts: list[tuple[bytes, bytes]], *, bad: int | None = None) -> bytes:
    """A PNG of these chunks; of the one numbered `bad`, the CRC is wrong."""
    out = bytearray(SIGNATURE)
    for index, (kind, body) in enumerate(parts):
        out += len(body).to_bytes(4, "big") + kind + body
        out += (zlib.crc32(kind + body) ^ (index == bad)).to_bytes(4, "big")
    return bytes(out)


def damaged_png(png: bytes, chance: random.Random) -> bytes:
    """One chunk's CRC is wrong; or it is cut, changed, left out, doubled, and its CRC is right."""
    parts = chunks(png)
    at = chance.randrange(len(parts))
    kind, body = parts[at]
    way = chance.choice(["crc", "cut", "change", "drop", "double", "shuffle"])
    if way == "crc":
        return written(parts, bad=at)
    if way == "cut":
        parts[at] = kind, body[: chance.randrange(len(body) + 1)]
    elif way == "change" and body:
        spot = chance.randrange(len(body))
        parts[at] = kind, body[:spot] + bytes([body[spot] ^ 1 << chance.randrange(8)]) + body[spot + 1 :]
    elif way == "drop":
        del parts[at]
    elif way == "double":
        parts.insert(chance.randrange(len(parts) + 1), parts[at])
    else:
        chance.shuffle(parts)
    return written(parts)


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Some bits flipped near one another, or the end cut off."""
    out = bytearray(data)
    if chance.random() < 0.3:
        return bytes(out[: chance.randrange(len(out))])
    spot = chance.randrange(len(out))
    for _ in range(chance.randrange(1, 4)):
        out[min(len(out) - 1, spot + chance.randrange(8))] ^= 1 << chance.randrange(8)
    return bytes(out)


def by_pillow(data: bytes, mode: str) -> np.ndarray | None:
    """None where Pillow refuses it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(data)) as picture:
                return np.array(picture.convert(mode))
        except Exception:
            return None


def by_us(data: bytes, mode: str) -> np.ndarray | ValueError | OSError:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of what it does not know in a header
        try:
            return open_picture(memoryview(data)).pixels(mode)  # type: ignore[arg-type]
        except (ValueError, OSError) as error:
            return error


@pytest.mark.parametrize("mode", ["RGB", "L"])
@settings(max_examples=200, deadline=None)
@given(st.sampled_from(PNGS), st.randoms(use_true_random=False))
def test_a_damaged_png_is_what_pillow_says(mode: str, png: bytes, chance: random.Random) -> None:
    """Whatever is wrong with a PNG's chunks: what Pillow refuses is refused, what it reads has the same pixels."""
    data = damaged_png(png, chance)
    ours, theirs = by_us(data, mode), by_pillow(data, mode)
    if isinstance(ours, np.ndarray):
        np.testing.assert_array_equal(ours, theirs)
    elif "cannot hold" not in str(ours) and "are more than" not in str(ours):
        assert theirs is None, ours


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(PICTURES), st.randoms(use_true_random=False))
def test_damaged_pictures_are_pixels_or_an_error(data: bytes, chance: random.Random) -> None:
    """Flipped bits and lost ends, in any format: pixels where Pillow has some, else ``ValueError`` or ``OSError``."""
    bad = damaged(data, chance)
    for mode in ("RGB", "L"):
        ours = by_us(bad, mode)
        if isinstance(ours, np.ndarray):
            theirs = by_pillow(bad, mode)
            assert theirs is not None
            assert ours.shape == theirs.shape
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(ValueError, OSError):
            assert mask_pixels(memoryview(bad)).ndim == 2
