"""Sources for the built-in transforms, made by libraries that penstock does not use for them."""

from __future__ import annotations

import io
import itertools
import tarfile
from typing import Any

from PIL import Image


def tar_of(members: dict[str, bytes]) -> bytes:
    """A tar as ``tarfile`` writes it in GNU format, the way WebDataset does."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, value in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(value)
            archive.addfile(info, io.BytesIO(value))
    return out.getvalue()


def members_of(data: bytes) -> dict[str, bytes]:
    """The members of a tar, as ``tarfile`` reads them."""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]


def png_of(pixels: Any, **options: Any) -> bytes:
    """A PNG by Pillow."""
    return picture_of(Image.fromarray(pixels), "PNG", **options)


def picture_of(picture: Image.Image, kind: str, **options: Any) -> bytes:
    """A picture in Pillow's format `kind`."""
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    """`data`, cut at these positions."""
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]
