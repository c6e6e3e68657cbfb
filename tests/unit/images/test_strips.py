"""Many PNGs decoded by one call: the same pixels as one by one, or no answer."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from penstock.images import rgb_pixels, rgb_pixels_of_many
from penstock.images.codecs import STRIP_BYTES_MAX


def png(height: int, width: int, seed: int, mode: str = "RGB") -> bytes:
    """Return a PNG with smooth and noisy parts, for which an encoder chooses different filters."""
    rng = np.random.default_rng(seed)
    ramp = np.linspace(0, 200, height * width * 3).reshape(height, width, 3)
    pixels = (ramp + rng.integers(0, 1 + seed % 60, (height, width, 3))).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, "PNG")
    return file.getvalue()


def filtered(kind: int, *, rows: bytes | None = None, idat: bytes | None = None) -> bytes:
    """Return a PNG of 4x5 pixels whose rows all have the filter `kind`, or whose filtered rows or stream are given."""
    made = rows or b"".join(bytes([kind]) + bytes((7 * row + x) % 256 for x in range(15)) for row in range(4))
    stream = zlib.compress(made) if idat is None else idat
    head = struct.pack(">IIBBBBB", 5, 4, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", stream), (b"IEND", b"")]
    framed = [struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


@pytest.mark.parametrize("size", [(1, 1), (4, 5), (32, 32), (100, 100)], ids=str)
@pytest.mark.parametrize("count", [1, 2, 45])
def test_same_as_one_by_one(size: tuple[int, int], count: int) -> None:
    """The pixels are those of ``rgb_pixels``, in one strip and in several."""
    pictures = [png(*size, seed) for seed in range(count)]
    found = rgb_pixels_of_many(pictures)
    assert found is not None
    assert found.shape == (count, *size, 3)
    assert (found == np.stack([rgb_pixels(memoryview(picture)) for picture in pictures])).all()


@pytest.mark.parametrize("first", range(5))
def test_every_filter_after_every_other(first: int) -> None:
    """No picture is decoded with the rows of the picture before it."""
    pictures = [filtered(kind) for pair in range(5) for kind in (first, pair)]
    found = rgb_pixels_of_many(pictures)
    assert found is not None
    assert (found == np.stack([rgb_pixels(memoryview(picture)) for picture in pictures])).all()


ROWS = b"".join(bytes([1]) + bytes(15) for _ in range(4))
OTHER: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda good: b"",
    "no_picture": lambda good: b"x" * len(good),
    "cut_off": lambda good: good[:-13],
    "bytes_after_the_end": lambda good: good + b"\0",
    "damaged_checksum_of_a_chunk": lambda good: good[:-16] + b"\0\0\0\0" + good[-12:],
    "damaged_stream": lambda good: filtered(0, idat=zlib.compress(ROWS)[:-2] + b"\0\0"),
    "stream_cut_off": lambda good: filtered(0, idat=zlib.compress(ROWS)[:-6]),
    "too_few_rows": lambda good: filtered(0, rows=ROWS[:-1]),
    "too_many_rows": lambda good: filtered(0, rows=ROWS + b"\0"),
    "grows_a_thousandfold": lambda good: filtered(0, rows=bytes(3_000_000)),
    "filter_that_does_not_exist": lambda good: filtered(9),
    "another_size": lambda good: png(5, 4, 1),
    "grey": lambda good: png(4, 5, 1, "L"),
    "palette": lambda good: png(4, 5, 1, "P"),
    "alpha": lambda good: png(4, 5, 1, "RGBA"),
}


@pytest.mark.parametrize("case", OTHER)
@pytest.mark.parametrize("at", [0, 1])
def test_anything_else(case: str, at: int) -> None:
    """A picture that is damaged or of another kind or size leaves all of them to ``rgb_pixels``."""
    pictures = [filtered(1), filtered(2), filtered(3)]
    pictures[at] = OTHER[case](pictures[at])
    assert rgb_pixels_of_many(pictures) is None


def test_larger_pictures() -> None:
    """Pictures that do not gain by it are left out, so a strip is never longer than a block of deflate."""
    assert rgb_pixels_of_many([png(200, 200, 1)] * 2) is None
    assert rgb_pixels_of_many([png(1, STRIP_BYTES_MAX // 3, 1)]) is None
