"""``resize`` and ``recode``: single pictures, and those in the members of a tar."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.config import MIB
from penstock.errors import ConfigError, DataError
from penstock.formats import FORMATS, detect
from penstock.gateway.transforms.authoring import Response, transform
from penstock.gateway.transforms.builtin.recordwise import changed_tar
from penstock.gateway.transforms.builtin.streams import compressed, compression_of, peek
from penstock.images.recoding import (
    CONTENT_TYPES,
    QUALITY,
    SIDE_MAX,
    Fit,
    Kind,
    describe_picture,
    encoded,
    resized_pixels,
)
from penstock.pack.written_formats import base_format

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from penstock.formats import Sample
    from penstock.gateway.transforms.authoring import SourceReader, TransformRequest
    from penstock.types import Buffer

PICTURE_BYTES_MAX = 256 * MIB
"""Largest single picture."""

EXTENSIONS = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff")
"""Extensions of members that are pictures."""


def _check_resize(arguments: Mapping[str, Any]) -> None:
    width, height = arguments["width"], arguments["height"]
    if not 0 <= width <= SIDE_MAX["webp"] or not 0 <= height <= SIDE_MAX["webp"] or not width + height:
        raise ConfigError(f"width={width}, height={height}: at least one from 1 to {SIDE_MAX['webp']}")
    _check_quality(arguments)


def _check_quality(arguments: Mapping[str, Any]) -> None:
    if not 1 <= arguments["quality"] <= 100:
        raise ConfigError(f"quality={arguments['quality']} must be from 1 to 100")


@transform(version="1", check=_check_resize)
def resize(
    reader: SourceReader,
    request: TransformRequest,
    *,
    width: int = 0,
    height: int = 0,
    quality: int = QUALITY,
    fit: Fit = "crop",
    extensions: tuple[str, ...] = EXTENSIONS,
) -> Response:
    """Resize a picture, or the pictures in a tar. They stay JPEG, PNG or WebP.

    Args:
        reader: A JPEG, PNG or WebP, or a tar; a tar that is compressed as a whole stays compressed.
        request: The request.
        width: Width in pixels; without it, it follows from the height.
        height: Height in pixels; without it, it follows from the width.
        quality: Quality of JPEG and WebP, from 1 to 100.
        fit: With width and height: ``crop`` cuts to their ratio, ``stretch`` distorts, ``inside`` keeps the ratio and never
            enlarges.
        extensions: Extensions of the members of a tar that are pictures; the others stay as they are.
    """

    def change(data: memoryview) -> tuple[bytes, Kind]:
        file = describe_picture(data)
        if file.kind is None:
            raise ValueError(f"resize does not write {file.format}; recode(png) does write another format")
        pixels = resized_pixels(data, file, width=width, height=height, fit=fit)
        return encoded(pixels, file.kind, quality=quality), file.kind

    return _pictures(reader, change, extensions, renames=False)


@transform(version="1", rest="format", check=_check_quality)
def recode(
    reader: SourceReader,
    request: TransformRequest,
    *,
    format: Kind,  # noqa: A002 - the word that users know
    quality: int = QUALITY,
    extensions: tuple[str, ...] = EXTENSIONS,
) -> Response:
    """Encode a picture, or the pictures in a tar, in another format. Those that have it already stay as they are.

    Args:
        reader: A picture that Pillow reads, or a tar; a tar that is compressed as a whole stays compressed.
        request: The request.
        format: ``jpg``, ``png`` or ``webp``. Members of a tar get it as their extension.
        quality: Quality of JPEG and WebP, from 1 to 100.
        extensions: Extensions of the members of a tar that are pictures; the others stay as they are.
    """

    def change(data: memoryview) -> tuple[bytes, Kind]:
        file = describe_picture(data)
        pixels = resized_pixels(data, file)
        return bytes(data) if file.kind == format else encoded(pixels, format, quality=quality), format

    return _pictures(reader, change, extensions, renames=True)


def _pictures(
    reader: SourceReader,
    change: Callable[[memoryview], tuple[bytes, Kind]],
    extensions: tuple[str, ...],
    *,
    renames: bool,
) -> Response:
    head, chunks = peek(reader)
    recognise = FORMATS["tar"].recognise
    assert recognise is not None
    if (compression_of(head) and base_format(detect(reader.key, head)) == "tar") or recognise(head):
        endings = tuple(f".{name.lstrip('.').lower()}" for name in extensions)
        members = partial(_changed_members, change=change, endings=endings, renames=renames)
        body = compressed(changed_tar(chunks, head, reader.key, members), compression_of(head))
        return Response(body=body, headers={"Content-Type": "application/x-tar"})
    data, kind = changed_picture(chunks, change, source=reader.key)
    return Response(body=data, headers={"Content-Type": CONTENT_TYPES[kind]}, size_bytes=len(data))


def changed_picture(
    chunks: Iterable[Buffer], change: Callable[[memoryview], tuple[bytes, Kind]], *, source: str
) -> tuple[bytes, Kind]:
    """Return what `change` makes of a single picture, and its kind.

    Raises:
        DataError: The picture is damaged, too large, or of a kind that is refused.

    Cost: holds the picture as stored, and its pixels.
    """
    data = bytearray()
    for chunk in chunks:
        data += chunk
        if len(data) > PICTURE_BYTES_MAX:
            raise DataError(f"a picture of more than {PICTURE_BYTES_MAX} bytes", shard=source, offset_bytes=0)
    try:
        return change(memoryview(data))
    except (ValueError, OSError) as error:
        raise DataError(f"it is not a picture that can be changed: {error}", shard=source, offset_bytes=0) from error


def _changed_members(
    sample: Sample, *, change: Callable[[memoryview], tuple[bytes, Kind]], endings: tuple[str, ...], renames: bool
) -> dict[str, Buffer]:
    """Return the members of a sample with changed pictures, which get their kind as extension if it `renames`.

    Raises:
        DataError: A picture is damaged, or two members would have one name.
    """
    fields: dict[str, Buffer] = {}
    for field, value in sample.fields.items():
        data: Buffer = value
        name = field
        if f".{field}".endswith(endings):
            try:
                data, kind = change(value)
            except (ValueError, OSError) as error:
                raise DataError(f"the picture {sample.key}.{field} cannot be changed: {error}", field=field) from error
            if renames:
                name = f".{field}".rpartition(".")[0][1:]
                name = f"{name}.{kind}" if name else kind
        if name in fields:
            raise DataError(f"two members would both be {sample.key}.{name}", field=field)
        fields[name] = data
    return fields
