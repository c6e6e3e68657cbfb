from __future__ import annotations

import io
import sys

import numpy as np
import pytest

import penstock as ps
from penstock.errors import ConfigError


def picture(mode: str, size: tuple[int, int], form: str, color: object = 0) -> memoryview:
    from PIL import Image

    out = io.BytesIO()
    Image.new(mode, size, color).save(out, form)  # type: ignore[arg-type]
    return memoryview(out.getvalue())


@pytest.mark.parametrize("text", [b"7", b"7\n", b"[7]", b" [ 7 ]\r\n", b"+7", b"007"])
def test_integer_takes_what_webdataset_writers_leave(text: bytes) -> None:
    """Every spelling of seven that writers leave is seven."""
    assert ps.Integer("cls").decode(memoryview(text)) == 7


@pytest.mark.parametrize("number", [-(2**63), 2**63 - 1, 0])
def test_integer_covers_int64(number: int) -> None:
    """The whole range of int64 decodes."""
    assert ps.Integer("cls").decode(memoryview(str(number).encode())) == number


@pytest.mark.parametrize(
    "text", [b"", b"7.0", b"[7", b"7]", b"7 8", b"seven", b"1_0", "\u0667".encode(), b"9223372036854775808"]
)
def test_integer_refuses_everything_else(text: bytes) -> None:
    """What is no int64 is an error, never a guess."""
    with pytest.raises(ValueError, match=r"not a whole number|does not fit"):
        ps.Integer("cls").decode(memoryview(text))


def test_text_json_and_bytes() -> None:
    """Text keeps its newline, JSON gives objects, Bytes gives a copy that outlives its buffer."""
    assert ps.Text("txt").decode(memoryview("né\n".encode())) == "né\n"
    assert ps.Json("json").decode(memoryview(b'{"a": [1, null]}')) == {"a": [1, None]}
    buffer = bytearray(b"abc")
    value = ps.Bytes("bin").decode(memoryview(buffer))
    buffer[:] = b"xyz"
    assert value == b"abc"


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "BMP", "GIF"])
def test_image_goes_by_content(form: str) -> None:
    """Whatever the member is called, its bytes decide how it decodes."""
    image = ps.Image("image").decode(picture("RGB", (5, 4), form, (255, 255, 255)))
    assert (image.shape, image.dtype) == ((4, 5, 3), np.uint8)
    assert image.min() >= 250


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "CMYK"])
def test_image_gives_the_mode_asked_for(mode: str) -> None:
    """Every 8-bit mode comes out as RGB or as grey, writable."""
    data = picture(mode, (3, 2), "TIFF")
    assert ps.Image("x").decode(data).shape == (2, 3, 3)
    grey = ps.Image("x", mode="L").decode(data)
    assert grey.shape == (2, 3)
    grey[0, 0] = 9


def test_image_refuses_more_than_8_bits() -> None:
    """A 16-bit picture is an error: clipping it to 8 bits would destroy it silently."""
    with pytest.raises(ValueError, match="more than 8 bits"):
        ps.Image("x").decode(picture("I;16", (3, 2), "PNG"))


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_image_resizes(form: str) -> None:
    """With height and width every picture has that size, larger or smaller."""
    image = ps.Image("x", height=24, width=40)
    assert image.decode(picture("RGB", (300, 200), form)).shape == (24, 40, 3)
    assert image.decode(picture("RGB", (7, 9), form)).shape == (24, 40, 3)


@pytest.mark.parametrize("data", [b"", b"no picture", b"\xff\xd8\xff\xe0 cut", b"\x89PNG\r\n\x1a\n"])
def test_image_refuses_garbage(data: bytes) -> None:
    """What is no picture raises, whatever it begins with."""
    with pytest.raises(Exception, match=r".+"):
        ps.Image("x").decode(memoryview(data))


def test_image_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Pillow is missing the error says what to install."""
    monkeypatch.setattr("penstock.pipeline.fields.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"penstock\[image\]"):
        ps.Image("jpg").require()
    ps.Integer("cls").require()


@pytest.mark.parametrize("name", ["", "__key__", "__x", 3, None])
def test_fields_refuse_bad_names(name: object) -> None:
    """A field has a name, and none of the loader's own."""
    with pytest.raises(ConfigError, match="named"):
        ps.Integer(name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"height": 3},
        {"width": 3},
        {"height": 0, "width": 3},
        {"height": 3, "width": 70_000},
        {"mode": "RGBA"},
        {"height": 2.5, "width": 2},
    ],
)
def test_image_refuses_bad_options(options: dict[str, object]) -> None:
    """Bad sizes and modes are refused where they are written."""
    with pytest.raises(ConfigError):
        ps.Image("x", **options)  # type: ignore[arg-type]


def test_repr_reads_like_the_code() -> None:
    """A field's repr makes an equal field."""
    for field in (ps.Image("jpg", height=2, width=3), ps.Image("png", mode="L"), ps.Integer("cls"), ps.Bytes("b")):
        assert eval(repr(field), {"Image": ps.Image, "Integer": ps.Integer, "Bytes": ps.Bytes}) == field


def test_import_is_light() -> None:
    """Describing a field imports no decoder."""
    import subprocess

    code = (
        "import sys, penstock as ps; ps.Image('jpg'); print([m for m in ('PIL', 'numpy', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
