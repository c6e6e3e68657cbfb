"""Which fields are packed: ``image=png:pixels,label=cls:int`` takes ``image`` as ``png`` and ``label`` as ``cls``.

The name to the left of ``=`` is the field's name in the source (a file's extension, a column, a key of a dict, a position
in a tuple). The name to the right is the stored field's; without ``=`` the two are the same. A type may follow after ``:``

====== ===========================================================================================================
file   the value is the path or URL of a file, whose bytes are taken (for tables; in folders every field is a file)
bytes  bytes, unchanged
text   any value, as text
int    a whole number: an Int64List in TFRecord, decimal digits in tar
float  a number: a FloatList in TFRecord, its shortest decimal digits in tar
json   any value that JSON can express, as JSON
pixels an array uint8[H, W, 3], uint8[H, W], or a PIL image, encoded in the field's own format (png, jpg, webp, ...)
====== ===========================================================================================================
"""

from __future__ import annotations

import io
import json
import re
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

TYPES = ("file", "bytes", "text", "int", "float", "json", "pixels")
_IMAGES = {"jpg": "JPEG", "jpeg": "JPEG", "png": "PNG", "webp": "WEBP", "bmp": "BMP", "tif": "TIFF", "tiff": "TIFF"}
_SPEC = re.compile(r"(?P<source>[^=:,]+)(?:=(?P<field>[^=:,]+))?(?::(?P<type>[a-z]+))?")


class FieldSpec(NamedTuple):
    """One field.

    Attributes:
        source: Name of the field in the source.
        field: Name of the stored field.
        type: One of ``TYPES``; None if none was given.
    """

    source: str
    field: str
    type: str | None


def parse_fields(text: str | None) -> tuple[FieldSpec, ...] | None:
    """Parse `text`; None gives None.

    Raises:
        ConfigError: The text does not have the syntax above, or two fields have the same name.
    """
    if text is None:
        return None
    specs = []
    for item in text.split(","):
        match = _SPEC.fullmatch(item.strip())
        if match is None:
            raise ConfigError(f"fields={text!r}: {item!r} is not SOURCE=FIELD:TYPE", hint="image=png,label=cls:int")
        if match["type"] is not None and match["type"] not in TYPES:
            raise ConfigError(f"fields={text!r}: {match['type']!r} is not one of {', '.join(TYPES)}")
        specs.append(FieldSpec(match["source"], match["field"] or match["source"], match["type"]))
    if len({spec.field for spec in specs}) < len(specs):
        raise ConfigError(f"fields={text!r} names a field twice")
    return tuple(specs)


def select_fields(sample: Mapping[str, Any], specs: tuple[FieldSpec, ...], key: str) -> dict[str, Any]:
    """Return the fields of `sample` that `specs` name, converted to their types.

    Raises:
        DataError: A field is missing, or its value does not have its type.
    """
    taken = {}
    for spec in specs:
        if spec.source not in sample:
            raise DataError(
                f"the sample has no {spec.source!r}, only {sorted(map(str, sample))}", sample_key=key, field=spec.source
            )
        taken[spec.field] = cast_value(sample[spec.source], spec, key)
    return taken


def cast_value(value: Any, spec: FieldSpec, key: str) -> Any:
    """Convert `value` to the type of `spec`.

    Raises:
        DataError: The value cannot be converted.
    """
    try:
        if isinstance(value, memoryview | bytes | bytearray) and spec.type in ("int", "float", "text"):
            value = _read(value)
        if spec.type == "int":
            number = float(value) if not isinstance(value, str) else None
            if number is not None and number != int(number):
                raise ValueError(f"{value!r} is not a whole number")
            return int(value)
        if spec.type == "float":
            return float(value)
        if spec.type == "text":
            return value if isinstance(value, str) else str(value)
        if spec.type == "json" and not isinstance(value, memoryview | bytes | bytearray):
            return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()
        if spec.type == "pixels":
            return _image(value, spec.field)
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{spec.source!r} is not of type {spec.type}: {error}", sample_key=key, field=spec.field
        ) from error
    return value


def _read(value: memoryview | bytes | bytearray) -> Any:
    """Decode a field of a shard: text, a number, or a list of numbers."""
    if not isinstance(value, memoryview) or value.format in {"B", "b", "c"}:
        return bytes(value).decode("utf-8")
    numbers = value.tolist()
    return numbers[0] if isinstance(numbers, list) and len(numbers) == 1 else numbers


def as_bytes(field: str, value: Any, key: str) -> bytes | bytearray | memoryview:
    """Return `value` as the bytes of a file called `field`, for formats that hold only bytes.

    Numbers become decimal digits; dicts and lists become JSON. Arrays become ``.npy`` files if the field's extension is
    ``npy``. Arrays and PIL images are encoded as images if the extension is an image format's.

    Raises:
        DataError: The value is of another type.
    """
    if isinstance(value, bytes | bytearray):
        return value
    if isinstance(value, str):
        return value.encode("utf-8")
    if isinstance(value, memoryview):
        return value.cast("B") if value.c_contiguous else value.tobytes()
    if isinstance(value, bool | int | float):
        return repr(int(value) if isinstance(value, bool) else value).encode()
    extension = field.rpartition(".")[2]
    try:
        if isinstance(value, dict | list) or (extension == "json" and value is None):
            return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()
        if extension in _IMAGES:
            return _image(value, field)
        if extension == "npy" and hasattr(value, "__array__"):
            return _npy(value)
        if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
            return repr(value.item()).encode()
    except (ValueError, TypeError) as error:
        raise DataError(f"it cannot be stored as .{extension}: {error}", sample_key=key, field=field) from error
    raise DataError(
        f"a value of type {type(value).__name__} cannot be stored as {field!r}",
        hint="name the field x.npy, x.json or x.png, or give it a type with fields=",
        sample_key=key,
        field=field,
    )


def _npy(value: Any) -> bytes:
    import numpy as np

    out = io.BytesIO()
    np.save(out, np.asarray(value), allow_pickle=False)
    return out.getvalue()


def _image(value: Any, field: str) -> bytes:
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    extension = field.rpartition(".")[2]
    if extension not in _IMAGES:
        raise ValueError(f"{extension!r} is not one of the image formats {', '.join(_IMAGES)}")
    if not hasattr(value, "save"):
        try:
            image_of = import_module("PIL.Image").fromarray
        except ImportError as error:
            raise ConfigError("writing images needs Pillow", hint="pip install 'penstock[image]'") from error
        value = image_of(value)
    out = io.BytesIO()
    value.save(out, format=_IMAGES[extension])
    return out.getvalue()
