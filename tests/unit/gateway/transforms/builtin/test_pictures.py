"""``resize`` and ``recode`` of single pictures and of members of a tar, compared with Pillow and tarfile."""

from __future__ import annotations

import gzip
import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from penstock.errors import ConfigError, DataError
from penstock.gateway.transforms.authoring import Response, declaration_of
from penstock.gateway.transforms.builtin.pictures import EXTENSIONS, recode, resize
from transformed_sources import members_of, picture_of, pieces, png_of, tar_of

_RNG = np.random.default_rng(0)
_PIXELS = np.asarray(Image.fromarray(_RNG.integers(0, 256, (5, 8, 3), dtype=np.uint8)).resize((80, 50)))
_JPEG = picture_of(Image.fromarray(_PIXELS), "JPEG")
_TAR = tar_of(
    {
        "./0.jpg": _JPEG, "./0.seg.png": png_of(_PIXELS[..., 0]), "./0.cls": b"3",
        "./1.JPG": _JPEG, "./1.txt": b"x" * 700,
    }
)  # fmt: skip


class Chunks(list[bytes]):
    """A source in chunks; of the reader, these transforms use only the key and the iteration."""

    key = "dir/shard.tar"


def result(transform: Any, data: bytes, cuts: list[int] | None = None, **arguments: Any) -> tuple[bytes, str]:
    response = transform(Chunks(pieces(data, cuts or [])), None, **arguments)
    assert isinstance(response, Response)
    body = response.body if isinstance(response.body, bytes) else b"".join(response.body)
    assert response.size_bytes in {None, len(body)}
    return body, response.headers["Content-Type"]


def size_of(data: bytes) -> tuple[str | None, int, int]:
    with Image.open(io.BytesIO(data)) as picture:
        picture.load()
        return picture.format, picture.width, picture.height


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_picture_keeps_its_format(kind: str) -> None:
    """A single picture is resized in its own format, with its content type."""
    data, content_type = result(resize, picture_of(Image.fromarray(_PIXELS), kind), width=20, height=20)
    assert (size_of(data), content_type) == ((kind, 20, 20), f"image/{kind.lower()}")


def test_members_of_a_tar() -> None:
    """Members that are pictures are resized, others keep their bytes, and names stay."""
    data, content_type = result(resize, _TAR, width=16)
    found = members_of(data)
    assert content_type == "application/x-tar"
    assert set(found) == {"0.jpg", "0.seg.png", "0.cls", "1.jpg", "1.txt"}
    assert {name: size_of(found[name]) for name in ("0.jpg", "0.seg.png", "1.jpg")} == {
        "0.jpg": ("JPEG", 16, 10), "0.seg.png": ("PNG", 16, 10), "1.jpg": ("JPEG", 16, 10),
    }  # fmt: skip
    assert (found["0.cls"], found["1.txt"]) == (b"3", b"x" * 700)


def test_only_some_members() -> None:
    """Members whose extension is not listed stay as they are, such as masks."""
    found = members_of(result(resize, _TAR, width=16, extensions=("jpg",))[0])
    assert size_of(found["0.seg.png"]) == ("PNG", 80, 50)


def test_recoding_members_renames_them() -> None:
    """Recoded members get the new extension behind the rest of their field; those of the format stay byte for byte."""
    found = members_of(result(recode, _TAR, format="jpg")[0])
    assert set(found) == {"0.jpg", "0.seg.jpg", "0.cls", "1.jpg", "1.txt"}
    assert found["0.jpg"] == _JPEG
    assert size_of(found["0.seg.jpg"]) == ("JPEG", 80, 50)


def test_two_members_of_one_name() -> None:
    """Recoding that would give two members one name is an error."""
    data = tar_of({"0.jpg": _JPEG, "0.png": png_of(_PIXELS)})
    with pytest.raises(DataError, match=r"two members would both be 0\.jpg"):
        result(recode, data, format="jpg")


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 1 << 16), max_size=6))
def test_cuts_change_nothing(cuts: list[int]) -> None:
    """The output does not depend on where the source is cut; a compressed tar stays compressed."""
    whole = result(resize, _TAR, width=16)[0]
    assert result(resize, _TAR, cuts, width=16)[0] == whole
    assert gzip.decompress(result(resize, gzip.compress(_TAR), cuts, width=16)[0]) == whole
    assert result(recode, _JPEG, cuts, format="webp") == result(recode, _JPEG, format="webp")


@pytest.mark.parametrize(
    ("member", "message"),
    [(_JPEG[:300], ""), (b"", "not known"), (png_of(np.zeros((2, 2), np.uint16)), "8 bits"), (b"GIF89a", "not known")],
    ids=["cut", "empty", "16-bit", "no-gif"],
)
def test_a_bad_picture_is_named(member: bytes, message: str) -> None:
    """A picture that cannot be changed is an error with shard, offset, member and reason."""
    with pytest.raises(DataError, match=rf"picture a/1\.png cannot be changed: .*{message}") as raised:
        result(resize, tar_of({"a/0.png": png_of(_PIXELS), "a/1.png": member}), width=2)
    assert (raised.value.shard, raised.value.sample_key, raised.value.field) == ("dir/shard.tar", "a/1", "png")
    assert raised.value.offset_bytes
    with pytest.raises(DataError, match="not a picture"):
        result(resize, member, width=2)


@pytest.mark.parametrize(
    ("transform", "arguments"),
    [
        (resize, {"width": 0, "height": 0, "quality": 90}),
        (resize, {"width": -1, "height": 5, "quality": 90}),
        (resize, {"width": 1 << 20, "height": 5, "quality": 90}),
        (recode, {"quality": 0}),
        (recode, {"quality": 101}),
    ],
    ids=["no-size", "negative", "huge", "quality-0", "quality-101"],
)
def test_arguments_are_checked_at_start(transform: Any, arguments: dict[str, Any]) -> None:
    """Sizes and qualities out of bounds are refused before anything is read."""
    check = declaration_of(transform).check
    assert check is not None
    with pytest.raises(ConfigError):
        check({"extensions": EXTENSIONS, **arguments})
