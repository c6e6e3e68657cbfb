"""``penstock peek``: shows the first samples of a data set."""

from __future__ import annotations

import io
import json
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.completing import formats
from penstock.cli.options import AS_JSON, ConnectionGroup, argument, expand_groups, option
from penstock.cli.output import counted, print_message, print_result, shown_classes
from penstock.errors import ConfigError, ObjectMissingError, UnsupportedFormatError
from penstock.redaction import printable
from penstock.text.html_text import TILE_PIXELS, figure, grid
from penstock.version import install_hint

if TYPE_CHECKING:
    from collections.abc import Mapping

PNG_COLUMNS = 8
_IMAGES = {"jpg": "jpeg", "jpeg": "jpeg", "png": "png", "webp": "webp", "gif": "gif", "bmp": "bmp"}
_ADDED = ("__key__", "__shard__", "__position__")
_TEXT_MAX = 40


@expand_groups
def peek(
    url: str = argument("URL", "Shards: a prefix, a pattern, or one shard; or objects that are samples themselves."),
    *,
    count: int = option("N", "Number of samples.", names=("--count", "-n"), default=5),
    output: str | None = option(
        "FILE", "Write a contact sheet of the images: x.png or x.html.", names=("--output", "-o")
    ),
    source_format: str | None = option(
        "NAME",
        "Format of the shards, if their names and first bytes do not show it.",
        names=("--format",),
        values=formats,
    ),
    as_json: bool = AS_JSON,
    connection: ConnectionGroup,
) -> None:
    """Show the first samples at URL: keys, fields, sizes and values.

    No more of the first shards is read than the samples need. If there are no shards, each object is a sample. A contact
    sheet is one self-contained file.

    For example:

        penstock peek s3://bucket/train/
        penstock peek s3://bucket/photos/cat.jpg
        penstock peek -n 64 -o sheet.html "s3://bucket/train-{000..009}.tar"
    """
    sheet = None if output is None else _sheet_of(output)
    samples = _samples(url, count, source_format, connection)
    if sheet is not None:
        assert output is not None
        images = [image for sample in samples for image in _images(sample)]
        if not images:
            raise ConfigError(
                f"none of {counted(len(samples), 'sample')} has an image", hint=f"fields called {', '.join(_IMAGES)}"
            )
        Path(output).write_bytes(sheet(images))
        print_message(f"{counted(len(images), 'image')} of {counted(len(samples), 'sample')}: {output}")
    elif as_json:
        for sample in samples:
            print(json.dumps(_record(sample)))
    else:
        _print_table(samples)
        if (classes := _classes(url, source_format, connection)) is not None:
            print_result(shown_classes(classes))


def _classes(url: str, source_format: str | None, connection: ConnectionGroup) -> tuple[str, ...] | None:
    from penstock.pipeline import shards
    from penstock.sources.shards import read_classes

    return read_classes(shards(url, format=source_format, **connection.options()))


def _samples(url: str, count: int, source_format: str | None, connection: ConnectionGroup) -> list[dict[str, Any]]:
    """Return the first samples of shards; if there are none, of the object that the URL names, or of those below it."""
    from penstock.loader.preview import peek as first_samples
    from penstock.pipeline import objects, shards

    try:
        return first_samples(shards(url, format=source_format, **connection.options()), count)
    except (ObjectMissingError, UnsupportedFormatError) as error:
        if source_format is not None:
            raise
        missing = error
    for named in ([url], url):
        with suppress(ObjectMissingError):
            return first_samples(objects(named, **connection.options()), count)
    raise missing


def _sheet_of(output: str) -> Any:
    kind = output.lower().rpartition(".")[2]
    if kind not in ("png", "html"):
        raise ConfigError(f"-o {output!r} must end with .png or .html")
    return _as_png if kind == "png" else _as_html


def _fields(sample: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sample.items() if name not in _ADDED}


def _size_bytes(value: Any) -> int:
    return int(value.nbytes) if hasattr(value, "nbytes") else len(value)


def _value(name: str, value: Any) -> str:
    """Return a short text for the value of a field."""
    return _picture(bytes(value)) if _kind(name, value) is not None else _shown(value)


def _shown(value: Any) -> str:
    """Return a short text for a value; "" if it is not text or a number."""
    if hasattr(value, "dtype") or (isinstance(value, memoryview) and value.format not in ("B", "b", "c")):
        numbers = value.tolist()
        return _cut(str(numbers[0] if isinstance(numbers, list) and len(numbers) == 1 else numbers))
    data = bytes(value[: 4 * _TEXT_MAX])
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        if error.start < len(data) - 4 or error.start < 4:
            return ""
        text = data[: error.start].decode()
    return _cut(text) if text.isprintable() or text.replace("\n", " ").isprintable() else ""


def _picture(data: bytes) -> str:
    """Return the size and the kind of a picture, ``64 x 48 RGB``, by its header; "" if it cannot be read."""
    try:
        with _pillow()[0].open(io.BytesIO(data)) as image:
            return f"{image.width} x {image.height} {image.mode}"
    except (ConfigError, OSError, ValueError, SyntaxError):  # Pillow is not installed, or it is no picture
        return ""


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _TEXT_MAX else text[: _TEXT_MAX - 3] + "..."


def _record(sample: Mapping[str, Any]) -> dict[str, Any]:
    fields = {
        name: {"size_bytes": _size_bytes(value), "value": _value(name, value)}
        for name, value in _fields(sample).items()
    }
    return {"key": sample["__key__"], "shard": sample["__shard__"], "fields": fields}


def _print_table(samples: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from penstock.text.sizes import format_bytes

    table = Table(box=None, pad_edge=False)
    for heading in ("key", "field", "size", "value"):
        table.add_column(heading, justify="right" if heading == "size" else "left", overflow="fold")
    for sample in samples:
        for number, (name, value) in enumerate(_fields(sample).items()):
            size = format_bytes(_size_bytes(value))
            key = "" if number else str(sample["__key__"])
            # Text, so that markup in data is not interpreted.
            table.add_row(Text(printable(key)), Text(printable(name)), size, Text(_value(name, value)))
    Console().print(table)


# ── contact sheets ──────────────────────────────────────────────────────────────────────────────────────────────────


def _images(sample: Mapping[str, Any]) -> list[tuple[str, str, bytes]]:
    """Return the caption, kind and bytes of each image in a sample."""
    words = [
        f"{name}={text}"
        for name, value in _fields(sample).items()
        if _kind(name, value) is None and (text := _shown(value))
    ]
    caption = " ".join([str(sample["__key__"]), *words])
    return [
        (caption, kind, bytes(value))
        for name, value in _fields(sample).items()
        if (kind := _kind(name, value)) is not None
    ]


def _kind(name: str, value: Any) -> str | None:
    """Return the image's kind, by its first bytes or its field's name; None if the value is not an image."""
    from penstock.loader.preview import picture_kind

    head = bytes(value[:12]) if isinstance(value, bytes | memoryview) else b""
    return picture_kind(head) or (_IMAGES.get(name.rpartition(".")[2].lower()) if head else None)


def _pillow() -> Any:
    try:
        return import_module("PIL.Image"), import_module("PIL.ImageDraw")
    except ImportError as error:
        raise ConfigError("a contact sheet needs Pillow", hint=install_hint("image")) from error


def _tile(data: bytes) -> Any:
    """Return an image whose longest side is at most ``TILE_PIXELS``; a grey one if the bytes cannot be decoded."""
    image_module, _ = _pillow()
    try:
        image = image_module.open(io.BytesIO(data))
        image.draft("RGB", (TILE_PIXELS, TILE_PIXELS))
        image = image.convert("RGB")
    except (OSError, ValueError, image_module.DecompressionBombError):
        return image_module.new("RGB", (TILE_PIXELS, TILE_PIXELS), "grey")
    image.thumbnail((TILE_PIXELS, TILE_PIXELS))
    return image


def _as_png(images: list[tuple[str, str, bytes]]) -> bytes:
    image_module, draw_module = _pillow()
    columns = min(PNG_COLUMNS, len(images))
    lines = -(-len(images) // columns)
    step = (TILE_PIXELS + 8, TILE_PIXELS + 24)
    sheet = image_module.new("RGB", (columns * step[0], lines * step[1]), "white")
    draw = draw_module.Draw(sheet)
    for number, (caption, _, data) in enumerate(images):
        left, top = number % columns * step[0] + 4, number // columns * step[1] + 4
        tile = _tile(data)
        sheet.paste(tile, (left, top))
        text = caption.encode("ascii", "replace").decode()  # the characters of Pillow's own font
        draw.text((left, top + tile.height + 4), text[:26], fill="black")
    out = io.BytesIO()
    sheet.save(out, format="PNG")
    return out.getvalue()


def _as_html(images: list[tuple[str, str, bytes]]) -> bytes:
    figures = []
    for caption, _, data in images:
        out = io.BytesIO()
        _tile(data).save(out, format="JPEG", quality=85)
        figures.append(figure([("jpeg", out.getvalue())], caption))
    head = '<meta charset="utf-8"><title>penstock peek</title><style>body{font:13px system-ui,sans-serif;margin:1rem}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{grid(figures)}</body></html>\n'.encode()
