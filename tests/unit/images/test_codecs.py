from __future__ import annotations

import io
import struct
import sys
import threading
import zlib

import numpy as np
import pytest
from PIL import Image

from bounded import run_bounded
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


def wide_pictures() -> dict[str, bytes]:
    """Pictures with more than 8 bits per channel, of every kind that Pillow reads."""
    import cv2

    colours, grey = (RNG.integers(256, 1 << 16, shape, dtype=np.uint16) for shape in ((40, 48, 3), (40, 48)))
    made = {
        "png": (".png", colours, []),
        "grey png": (".png", grey, []),
        "tiff": (".tiff", colours, [cv2.IMWRITE_TIFF_COMPRESSION, 1]),
        "tiff, lzw": (".tiff", colours, [cv2.IMWRITE_TIFF_COMPRESSION, 5]),
        "grey tiff": (".tiff", grey, []),
        "ppm": (".ppm", colours, []),
        "jp2": (".jp2", colours, []),
        "avif": (".avif", colours >> 6, [cv2.IMWRITE_AVIF_DEPTH, 10]),
    }
    wide = {name: cv2.imencode(ext, pixels, way)[1].tobytes() for name, (ext, pixels, way) in made.items()}
    sgi = (struct.pack(">HBBHHHHII", 474, rle, 2, 3, 2, 2, 3, 0, 65535).ljust(512, b"\0") + bytes(99) for rle in (0, 1))
    return wide | dict(zip(("sgi", "sgi, rle"), sgi, strict=True)) | {
        "ppm of 10 bits": b"P6 2 1 1023\n" + bytes(12), "ppm in text": b"P3 2 1 300\n1 2 3 4 5 6\n",
        "pgm": b"P5 2 1 300\n" + bytes(4), "pfm": b"Pf\n2 1\n-1.0\n" + bytes(8),
    }  # fmt: skip


@pytest.mark.parametrize(("name", "data"), wide_pictures().items(), ids=str)
def test_more_than_8_bits_are_refused(name: str, data: bytes) -> None:
    """A picture with more than 8 bits per channel is an error in any format: the rest of each value would be lost."""
    for read in (open_picture, mask_pixels):
        with pytest.raises(ValueError, match="more than 8 bits"):
            read(memoryview(data))


@pytest.mark.parametrize("wanted", ["RGB", "L"])
@pytest.mark.parametrize("options", [{}, {"default_image": True}, {"lossless": True}])
@pytest.mark.parametrize("form", ["PNG", "WEBP", "GIF"])
def test_an_animation_is_its_first_picture_in_every_mode(form: str, options: dict[str, bool], wanted: str) -> None:
    """In colour as in grey it is what Pillow shows first, for an APNG its default image, animated or not."""
    frames = [Image.fromarray(RNG.integers(0, 256, (24, 40, 4), dtype=np.uint8), "RGBA") for _ in range(3)]
    out = io.BytesIO()
    frames[0].save(out, form, save_all=True, append_images=frames[1:], **options)
    data = memoryview(out.getvalue())
    np.testing.assert_array_equal(open_picture(data).pixels(wanted), by_pillow(data, wanted))  # type: ignore[arg-type]


def test_fewer_values_than_256_are_no_16_bits() -> None:
    """A PPM whose largest value is 200 is read, and scaled as Pillow does."""
    data = memoryview(b"P6 2 1 200\n" + bytes(range(6)))
    np.testing.assert_array_equal(open_picture(data).pixels("RGB"), by_pillow(data, "RGB"))


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def claims(side: int, kind: str) -> bytes:
    """A few bytes that claim a square picture, or a chunk of more than a gigabyte."""
    if kind == "PNG chunk":
        data = bytearray(stored("RGB", "PNG"))
        data[33] ^= 0x60
        return bytes(data)
    if kind == "PNG":
        header = struct.pack(">2I5B", side, side, 8, 0, 0, 0, 0)
        return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")
    sides = (side - 1) | (side - 1) << 14
    if kind == "WEBP lossless":
        body = b"VP8L" + struct.pack("<I", 18) + b"\x2f" + sides.to_bytes(4, "little") + b"\x88\x88\x08" + bytes(10)
    elif kind == "WEBP":
        body = b"VP8 " + struct.pack("<I", 18) + b"\x10\0\0\x9d\x01\x2a" + struct.pack("<HH", side, side) + bytes(8)
    else:
        side_bytes = (side - 1).to_bytes(3, "little")
        body = b"VP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + side_bytes * 2 + b"ANIM" + struct.pack("<IIH", 6, 0, 0)
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


READS = ("open_picture(data).pixels('RGB')", "open_picture(data).pixels('L')", "mask_pixels(data)")


@pytest.mark.parametrize(
    ("kind", "side"),
    [
        ("PNG", 13_377),
        ("PNG", 60_000),
        ("PNG chunk", 0),
        ("WEBP", 16_383),
        ("WEBP lossless", 16_384),
        ("WEBP animated", 16_384),
    ],
)
def test_a_claim_costs_no_memory(kind: str, side: int) -> None:
    """A few bytes that claim more pixels than are allowed, or than they can hold, are refused by their header."""
    code = f"""
        from penstock.images import mask_pixels, open_picture
        import cv2
        from PIL import Image
        Image.init()
        begin()
        data = memoryview(bytes.fromhex({claims(side, kind).hex()!r}))
        for read in {tuple(f"lambda data: {read}" for read in READS)!r}:
            try:
                eval(read)(data)
            except (ValueError, OSError) as error:
                print(error)
    """
    said = run_bounded(code, memory_bytes_max=64 << 20).splitlines()
    assert kind == "PNG chunk" or ["pixels" in line for line in said] == [True] * len(READS)  # Pillow reads that chunk


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


@pytest.mark.parametrize("mode", ["L", "P", "LA", "RGB", "RGBA", "CMYK"])
def test_pixels_of_mosaicml_decode(mode: str) -> None:
    """MosaicML's encoding `pil` (sizes, mode, pixels) decodes as the picture that it was made of; a cut one is none."""
    pixels = COLOURS[:, :37]  # 40 is how a bitmap begins
    picture = Image.fromarray(pixels).convert("L" if mode == "P" else mode)
    picture = Image.frombytes(mode, picture.size, picture.tobytes())
    data = struct.pack("<3I", *picture.size, len(mode)) + mode.encode() + picture.tobytes()
    assert np.array_equal(open_picture(memoryview(data)).pixels("RGB"), np.asarray(picture.convert("RGB")))
    with pytest.raises(ValueError, match="does not recognise"):
        open_picture(memoryview(data[:-1]))
