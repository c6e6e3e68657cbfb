"""Fields by one spelling: ``image=png:pixels,label=cls:int`` takes ``image`` as ``png`` and ``label`` as ``cls``.

Left of ``=`` stands what the source calls it (a file's extension, a column, a key of a dict, a number in a tuple), right
of it the field as it is stored; without ``=`` the two are the same. After ``:`` stands its type:

====== ===========================================================================================================
file   the value is the path or URL of a file, whose bytes are taken (tables; in folders everything is one)
bytes  bytes as they are
text   anything, as text
int    a whole number: an Int64List in TFRecord, decimal digits in tar
float  a number: a FloatList in TFRecord, its shortest decimal digits in tar
json   anything that JSON can say, as JSON
pixels an array uint8[H, W, 3], uint8[H, W], or a PIL image, written in the field's own format (png, jpg, webp, ...)
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


class Spec(NamedTuple):
    """One field: what the source calls it, as what it is stored, and its type where that was said."""

    source: str
    field: str
    type: str | None


def parse_fields(text: str | None) -> tuple[Spec, ...] | None:
    """`text` taken apart; None for None.

    Raises:
        ConfigError: it is not in this module's spelling, or two fields have one name.
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
        specs.append(Spec(match["source"], match["field"] or match["source"], match["type"]))
    if len({spec.field for spec in specs}) < len(specs):
        raise ConfigError(f"fields={text!r} gives one field twice")
    return tuple(specs)


def take(sample: Mapping[str, Any], specs: tuple[Spec, ...], key: str) -> dict[str, Any]:
    """The fields of `sample` that `specs` name, typed as they say.

    Raises:
        DataError: one is not there, or is not of its type.
    """
    taken = {}
    for spec in specs:
        if spec.source not in sample:
            raise DataError(
                f"there is no {spec.source!r}, only {sorted(map(str, sample))}", sample_key=key, field=spec.source
            )
        taken[spec.field] = cast(sample[spec.source], spec, key)
    return taken


def cast(value: Any, spec: Spec, key: str) -> Any:
    """`value` as `spec` types it.

    Raises:
        DataError: it is not of that type.
    """
    try:
        if isinstance(value, memoryview | bytes | bytearray) and spec.type in ("int", "float", "text"):
            value = _read(value)
        if spec.type == "int":
            number = float(value) if not isinstance(value, str) else None
            if number is not None and number != int(number):
                raise ValueError(f"{value!r} is no whole number")
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
        raise DataError(f"{spec.source!r} is no {spec.type}: {error}", sample_key=key, field=spec.field) from error
    return value


def _read(value: memoryview | bytes | bytearray) -> Any:
    """What is in a field of a shard: text, a number, or a list of numbers."""
    if not isinstance(value, memoryview) or value.format in {"B", "b", "c"}:
        return bytes(value).decode("utf-8")
    numbers = value.tolist()
    return numbers[0] if isinstance(numbers, list) and len(numbers) == 1 else numbers


def as_bytes(field: str, value: Any, key: str) -> bytes | bytearray | memoryview:
    """`value` as the bytes of a file called `field`, for formats that hold nothing else.

    Numbers become decimal digits, dicts and lists JSON; arrays ``.npy`` files where the field is called so, and images
    by their format, as PIL images do.

    Raises:
        DataError: it is of no such type.
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
        raise DataError(f"it cannot be a .{extension}: {error}", sample_key=key, field=field) from error
    raise DataError(
        f"a value of type {type(value).__name__} cannot be stored as {field!r}",
        hint="call the field x.npy, x.json or x.png, or type it by fields=",
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
        raise ValueError(f"{extension!r} is no format of images, one of {', '.join(_IMAGES)}")
    if not hasattr(value, "save"):
        try:
            image_of = import_module("PIL.Image").fromarray
        except ImportError as error:
            raise ConfigError("writing images needs Pillow", hint="pip install 'penstock[image]'") from error
        value = image_of(value)
    out = io.BytesIO()
    value.save(out, format=_IMAGES[extension])
    return out.getvalue()
