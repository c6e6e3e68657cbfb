from __future__ import annotations

import io
import pickle
import re
import sys

import numpy as np
import pytest

import penstock as ps
from penstock import pipeline
from penstock.errors import ConfigError
from penstock.version import install_hint


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


def test_image_is_resized_into_memory_that_is_there() -> None:
    """decode_into fills the array that it is given, with the same pixels that decode gives."""
    image = ps.Image("x", height=24, width=40)
    data = picture("RGB", (300, 200), "JPEG", (200, 100, 50))
    rows = np.zeros((3, 24, 40, 3), np.uint8)
    image.decode_into(data, rows[1])
    np.testing.assert_array_equal(rows[1], image.decode(data))
    assert rows[0].max() == rows[2].max() == 0
    assert image.specs == (("uint8", (24, 40, 3)),)
    assert ps.Image("x", height=2, width=3, mode="L").specs == (("uint8", (2, 3)),)
    assert ps.Image("x").specs == (None,)


def coordinates(height: int, width: int) -> memoryview:
    """A picture whose red is its row and whose green is its column."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, :, 0], pixels[:, :, 1] = np.arange(height)[:, None], np.arange(width)[None, :]
    out = io.BytesIO()
    from PIL import Image

    Image.fromarray(pixels).save(out, "PNG")
    return memoryview(out.getvalue())


def test_center_crop_keeps_the_aspect_ratio() -> None:
    """The centre of the short side's length is taken, or a fraction of it, and nothing is stretched."""
    data = coordinates(100, 200)
    whole = ps.Image("x", height=100, width=100, crop="center").decode(data)
    np.testing.assert_array_equal(whole[:, :, 1], np.broadcast_to(np.arange(50, 150), (100, 100)))
    part = ps.Image("x", height=50, width=50, crop="center", crop_fraction=0.5).decode(data)
    assert (part[0, 0, 0], part[0, 0, 1], part[-1, -1, 0], part[-1, -1, 1]) == (25, 75, 74, 124)


def test_random_geometry_depends_on_the_rng_alone() -> None:
    """The same stream gives the same region and flip, another stream others; without a stream it is refused."""
    image = ps.Image("x", height=32, width=32, crop="random", flip=True)
    assert image.takes_rng
    data, out = coordinates(200, 240), np.empty((8, 32, 32, 3), np.uint8)
    for row in range(8):
        image.decode_into(data, out[row], np.random.default_rng(row // 2))
    for row in range(0, 8, 2):
        np.testing.assert_array_equal(out[row], out[row + 1])
    assert len({out[row].tobytes() for row in range(0, 8, 2)}) == 4
    with pytest.raises(ConfigError, match="needs an rng"):
        image.decode(data)
    assert not ps.Image("x", height=32, width=32, crop="center").takes_rng


def test_masks_share_the_random_geometry() -> None:
    """Whatever is drawn, a mask's pixels are those of the picture: where the mask says 1, the picture is right of 120."""
    image = ps.Image("x", height=32, width=32, crop="random", flip=True).with_mask("m")
    data = coordinates(200, 240)
    mask = np.zeros((200, 240), np.uint8)
    mask[:, 120:] = 1
    out = io.BytesIO()
    from PIL import Image

    Image.fromarray(mask).save(out, "PNG")
    for seed in range(20):
        pixels, marks = image.decode_members([data, memoryview(out.getvalue())], np.random.default_rng(seed))
        assert (marks.shape, marks.dtype) == ((32, 32), np.uint8)
        sure = np.abs(pixels[:, :, 1].astype(int) - 120) > 8
        np.testing.assert_array_equal(marks[sure], (pixels[:, :, 1] > 120)[sure])
    assert image.names == ("x", "m")


@pytest.mark.parametrize("names", [(), ("x",), ("m", "m"), ("__m",)])
def test_masks_have_names_of_their_own(names: tuple[str, ...]) -> None:
    """A mask is another member, named once."""
    with pytest.raises(ConfigError):
        ps.Image("x").with_mask(*names)


def test_image_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Pillow is missing the error says what to install."""
    monkeypatch.setattr("penstock.pipeline.fields.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=re.escape(install_hint("image"))):
        ps.Image("jpg").require()
    ps.Integer("cls").require()


@pytest.mark.parametrize("name", ["", "__key__", "__x", 3, None])
def test_fields_refuse_bad_names(name: object) -> None:
    """A field has a name, and none of the loader's own."""
    with pytest.raises(ConfigError, match="name of a field"):
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
        {"crop": "center"},
        {"crop": "middle", "height": 3, "width": 3},
        {"crop_fraction": 0},
        {"crop_fraction": 1.1},
        {"scale": (0, 1)},
        {"scale": (0.5, 0.4)},
        {"scale": (0.5, 1.5)},
        {"aspect": (0, 1)},
        {"aspect": (2, 1)},
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


@pytest.mark.parametrize(
    ("text", "number"),
    [(b"0.5", 0.5), (b" 1e-3\n", 0.001), (b"[7]", 7.0), (b"-.5", -0.5), (b"3.", 3.0), (b"+inf", float("inf"))],
)
def test_float_takes_decimals(text: bytes, number: float) -> None:
    """Every usual spelling of a number, also as WebDataset's writers leave it."""
    assert pipeline.Float("x").decode(memoryview(text)) == number


@pytest.mark.parametrize("text", [b"", b"0x10", b"1_0", b"1,5", b"one", b"[1", b"1 2", "\u0661".encode()])
def test_float_refuses_everything_else(text: bytes) -> None:
    """What is no number is an error, never a guess."""
    with pytest.raises(ValueError, match="not a number"):
        pipeline.Float("x").decode(memoryview(text))


def test_function_decodes_by_a_function() -> None:
    """A user's own decoder sees the bytes; what it says of its arrays is held."""
    field = pipeline.Function("x", len)
    assert field.decode(memoryview(b"abc")) == 3
    pair = pipeline.Function("x", lambda data: np.frombuffer(data, np.uint8), dtype="uint8", shape=(2,))
    out = np.zeros(2, np.uint8)
    pair.decode_into(memoryview(b"\1\2"), out)
    assert out.tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"uint8\[3\], not the declared uint8\[2\]"):
        pair.decode_into(memoryview(b"\1\2\3"), out)
    with pytest.raises(ConfigError):
        pipeline.Function("x", 3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="both"):
        pipeline.Function("x", len, dtype="uint8")


def test_a_field_has_alternative_names() -> None:
    """The value has the first name; all are read; a name of another field is refused; it reads like the code."""
    image = ps.Image("jpg", "jpeg", "png", height=2, width=2)
    assert image == ps.Image("jpg;jpeg;png", height=2, width=2) == pickle.loads(pickle.dumps(image))
    assert repr(image) == "Image('jpg', 'jpeg', 'png', height=2, width=2)"
    masked = image.with_mask("seg")
    assert (masked.names, masked.alternatives) == (("jpg", "seg"), ("jpeg", "png"))
    stage = ps.shards("s3://b/").decode(masked, ps.Integer("cls;label")).stages[0]
    assert stage.names == ("jpg", "seg", "cls")
    assert stage.members == ("jpg", "seg", "jpeg", "png", "cls", "label")
    for wrong in (lambda: image.with_mask("png"), lambda: ps.Image("jpg", ""), lambda: ps.Image("jpg", "__key__")):
        with pytest.raises(ConfigError):
            wrong()
    with pytest.raises(ConfigError, match="'png' more than once"):
        ps.shards("s3://b/").decode(image, ps.Image("png"))
