"""The types ``pixels`` and ``int`` in conversions between shards."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image

from penstock.errors import ConfigError, DataError
from penstock.formats.tfrecord import parse_example
from penstock.pack import convert
from penstock.pack.fields import FieldSpec, cast_value, oriented, parse_fields, pixels_of, select_fields
from transformed_sources import members_of, png_of, tar_of

if TYPE_CHECKING:
    from pathlib import Path

_PIXELS = np.arange(6 * 4 * 3, dtype=np.uint8).reshape(6, 4, 3)


def test_a_tar_becomes_tfrecords_and_a_tar_again(tmp_path: Path) -> None:
    """convert decodes pictures to pixels with their shape and labels to numbers, and makes the pictures again of them."""
    (tmp_path / "tar").mkdir()
    (tmp_path / "tar" / "a.tar").write_bytes(tar_of({"0.png": png_of(_PIXELS), "0.cls": b"[6]"}))
    convert(tmp_path / "tar", tmp_path / "rec", to="tfrecord", fields="png=image:pixels,cls=label:int", allow_loss=True)
    fields = parse_example(memoryview((tmp_path / "rec" / "a.tfrecord").read_bytes())[12:-4])
    assert bytes(fields["image"]) == _PIXELS.tobytes()
    shape = [fields[f"image/{name}"].tolist() for name in ("height", "width", "channels")]
    assert (shape, fields["label"].tolist()) == ([[6], [4], [3]], [6])
    convert(tmp_path / "rec", tmp_path / "back", to="tar", fields="image=png:pixels,label=cls:int", allow_loss=True)
    found = members_of((tmp_path / "back" / "a.tar").read_bytes())
    png, label = (value for name, value in sorted(found.items(), reverse=True))
    assert label == b"6"
    assert np.asarray(Image.open(io.BytesIO(png))).tolist() == _PIXELS.tolist()


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [("[6]", "int", 6), (" 6\n", "int", 6), ("[[6]]", "int", 6), ("[-0.5]", "float", -0.5)],
)
def test_numbers_in_brackets(text: str, kind: str, value: float) -> None:
    """A list of one number is that number."""
    assert cast_value(text.encode(), FieldSpec("cls", "label", kind), "k") == value


@pytest.mark.parametrize("text", ["[1, 2]", "[]", "[", "cat", "1.5"])
def test_what_is_no_whole_number(text: str) -> None:
    """Anything else is an error that names the sample."""
    with pytest.raises(DataError, match="not of type int") as raised:
        cast_value(text.encode(), FieldSpec("cls", "label", "int"), "k")
    assert raised.value.sample_key == "k"


def test_mappings_are_turned_round_where_they_must() -> None:
    """An item whose source is missing and whose target is there is read the other way round; others stay."""
    specs = parse_fields("image=png:pixels,b=a,a=b,x=y")
    assert specs is not None
    assert oriented(specs, {"png", "a", "b"}) == (
        FieldSpec("png", "image", "pixels"), FieldSpec("b", "a", None), FieldSpec("a", "b", None), FieldSpec("x", "y", None),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        (_PIXELS, (6, 4, 3)),
        (_PIXELS[..., 0], (6, 4, 1)),
        (Image.fromarray(_PIXELS), (6, 4, 3)),
        (png_of(_PIXELS), (6, 4, 3)),
    ],
    ids=["array", "grey", "pillow", "encoded"],
)
def test_pixels_of_whatever_is_a_picture(value: object, shape: tuple[int, ...]) -> None:
    """Arrays, PIL images and encoded pictures give the same bytes and their shape."""
    data, *found = pixels_of(value, FieldSpec("png", "image", "pixels"), "k")
    assert tuple(found) == shape
    assert bytes(data) == (_PIXELS if shape[2] == 3 else _PIXELS[..., 0]).tobytes()


def test_pixels_that_do_not_fit_their_shape() -> None:
    """Pixels with another number of bytes than their shape says are an error."""
    sample = {"image": b"123", "image/height": 2, "image/width": 2, "image/channels": 3}
    with pytest.raises(DataError, match="3 bytes are not 2x2 pixels"):
        select_fields(sample, (FieldSpec("image", "png", "pixels"),), "k")


def test_fields_of_the_shape_count_as_names() -> None:
    """A mapping that names a field of the shape as well names it twice."""
    with pytest.raises(ConfigError, match="twice"):
        parse_fields("png=image:pixels,h=image/height")
