"""Parses which fields are packed: ``image=png:pixels,label=cls:int`` takes ``image`` as ``png`` and ``label`` as ``cls``.

The name to the left of ``=`` is the field's name in the source (a file's extension, a column, a key of a dict, a position
in a tuple), or several: of ``jpg;jpeg;png``, the first that a sample has. The name to the right is the stored field's; without
``=`` it is the (first) name to the left. A type may follow after ``:``

====== ===========================================================================================================
file   the value is the path or URL of a file, whose bytes are taken (for tables; in folders every field is a file)
bytes  bytes, unchanged
text   any value, as text
int    a whole number: an Int64List in TFRecord, decimal digits in tar; text may have it in brackets: ``[6]``
float  a number: a FloatList in TFRecord, its shortest decimal digits in tar; text may have it in brackets
json   any value that JSON can express, as JSON
pixels a picture: an array uint8[H, W, 3] or uint8[H, W], a PIL image, an encoded picture, or the pixels of one
====== ===========================================================================================================

What ``pixels`` stores depends on the field's name. With the name of an image format (png, jpg, webp, ...) it is the picture in
that format; a picture that is already encoded stays as it is. With any other name it is the picture's pixels,
uint8[H, W, C] in one run of bytes, and three further fields have their shape: ``NAME/height``, ``NAME/width`` and
``NAME/channels``. An encoded picture is decoded to RGB as it is stored, so C is 3; alpha and the EXIF orientation are ignored,
and more than 8 bits per channel are refused. Such pixels become an encoded picture again by their shape.
"""

from __future__ import annotations

import io
import json
import re
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import ConfigError, DataError
from penstock.formats.sample import is_bytes
from penstock.version import install_hint

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Mapping

    from penstock.types import Buffer

TYPES = ("file", "bytes", "text", "int", "float", "json", "pixels")
IMAGE_FORMATS = {
    "jpg": "JPEG",
    "jpeg": "JPEG",
    "png": "PNG",
    "webp": "WEBP",
    "bmp": "BMP",
    "tif": "TIFF",
    "tiff": "TIFF",
}
_SPEC = re.compile(r"(?P<source>[^=:,]+)(?:=(?P<field>[^=:,]+))?(?::(?P<type>[a-z]+))?")


_COPIED_BYTES_MAX = 64 << 10
"""Largest picture whose pixels are copied to ``bytes``, which costs less than handling a view of them."""


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

    def found_in(self, names: Container[str]) -> FieldSpec:
        """Return the field with the first of its alternative sources that a sample with the fields `names` has."""
        source = next((each for each in self.source.split(";") if each in names), self.source)
        return self._replace(source=source)

    @property
    def holds_picture(self) -> bool:
        """Whether the stored field has the name of an image format, so that ``pixels`` stores an encoded picture."""
        return self.field.rpartition(".")[2] in IMAGE_FORMATS

    @property
    def pixel_fields(self) -> tuple[str, str, str, str]:
        """Names of the stored fields for the pixels of a picture: the pixels, their height, width and channels."""
        return pixel_fields(self.field)


def pixel_fields(name: str) -> tuple[str, str, str, str]:
    """Return the names of the fields that hold the pixels of a picture: the pixels, their height, width and channels."""
    return name, f"{name}/height", f"{name}/width", f"{name}/channels"


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
        specs.append(FieldSpec(match["source"], match["field"] or match["source"].split(";")[0], match["type"]))
    names = [
        name
        for spec in specs
        for name in (spec.pixel_fields if spec.type == "pixels" and not spec.holds_picture else (spec.field,))
    ]
    if len(set(names)) < len(names):
        raise ConfigError(f"fields={text!r} names a field twice")
    return tuple(specs)


def select_fields(sample: Mapping[str, Any], specs: tuple[FieldSpec, ...], key: str) -> dict[str, Any]:
    """Return the fields of `sample` that `specs` name, converted to their types.

    Raises:
        DataError: A field is missing, or its value does not have its type.
    """
    taken = {}
    for spec in (spec.found_in(sample) for spec in specs):
        if spec.source not in sample:
            raise DataError(
                f"the sample has no {spec.source!r}, only {sorted(map(str, sample))}", sample_key=key, field=spec.source
            )
        value = sample[spec.source]
        if spec.type != "pixels":
            taken[spec.field] = cast_value(value, spec, key)
        elif spec.holds_picture:
            taken[spec.field] = cast_value(_shaped(value, sample, spec, key), spec, key)
        else:
            fields = spec.pixel_fields
            taken.update(zip(fields, pixels_of(value, spec, key), strict=True))
    return taken


def oriented(specs: tuple[FieldSpec, ...], names: Collection[str]) -> tuple[FieldSpec, ...]:
    """Return `specs` such that each takes a field that a sample with the fields `names` has.

    A mapping that names the fields of a TFRecord on the left and the members of a tar on the right describes the way back as
    well. An item is turned round if the sample lacks its source and has its target.

    Raises:
        ConfigError: Two fields would have the same name then.
    """
    turned = tuple(
        FieldSpec(spec.field, spec.source.split(";")[0], spec.type)
        if spec.found_in(names).source not in names and spec.field in names
        else spec
        for spec in specs
    )
    if len({spec.field for spec in turned}) < len(turned):
        raise ConfigError(f"two fields become one among {[spec.field for spec in turned]}")
    return turned


def pixels_of(value: Any, spec: FieldSpec, key: str) -> tuple[Buffer, int, int, int]:
    """Return the pixels of a picture, uint8[H * W * C], and H, W and C.

    Args:
        value: An encoded picture, a PIL image, or an array uint8[H, W, C] or uint8[H, W].
        spec: The field of the picture, for errors.
        key: The key of its sample, for errors.

    Raises:
        DataError: It is damaged, has more than 8 bits per channel, or is no picture.
    """
    import numpy as np

    from penstock.images import rgb_pixels

    try:
        if isinstance(value, memoryview) and not is_bytes(value):
            raise ValueError("numbers are not a picture")  # one place names the field
        is_encoded = isinstance(value, memoryview | bytes | bytearray)
        array = rgb_pixels(memoryview(value)) if is_encoded else np.asarray(value)
        if array.dtype != np.uint8 or array.ndim not in {2, 3}:
            raise ValueError(f"{array.dtype}{list(array.shape)} is not uint8[H, W, C]")
    except (ValueError, OSError, TypeError, AttributeError) as error:
        raise DataError(f"{spec.source!r} is not of type pixels: {error}", sample_key=key, field=spec.source) from error
    height, width, channels = array.shape if array.ndim == 3 else (*array.shape, 1)
    flat = array.reshape(-1)
    return flat.tobytes() if flat.nbytes < _COPIED_BYTES_MAX else flat.data, height, width, channels


def _shaped(value: Any, sample: Mapping[str, Any], spec: FieldSpec, key: str) -> Any:
    """Return pixels that have fields with their shape as an array, and any other picture as it is."""
    names = pixel_fields(spec.source)[1:]
    if not isinstance(value, memoryview | bytes | bytearray) or not all(name in sample for name in names):
        return bytes(value) if isinstance(value, memoryview) else value
    import numpy as np

    wanted = [cast_value(sample[name], FieldSpec(name, name, "int"), key) for name in names]
    height, width, channels = wanted
    pixels = np.frombuffer(value, np.uint8)
    if min(wanted) < 1 or pixels.size != height * width * channels or channels not in {1, 3, 4}:
        raise DataError(
            f"{pixels.size} bytes are not {height}x{width} pixels of {channels} channels",
            sample_key=key,
            field=spec.source,
        )
    return pixels.reshape(height, width) if channels == 1 else pixels.reshape(height, width, channels)


def cast_value(value: Any, spec: FieldSpec, key: str) -> Any:
    """Convert `value` to the type of `spec`.

    Raises:
        DataError: The value cannot be converted.
    """
    try:
        if isinstance(value, memoryview | bytes | bytearray) and spec.type in ("int", "float", "text"):
            value = _read(value)
        if isinstance(value, str) and spec.type in ("int", "float"):
            value = _without_brackets(value)
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
    if is_bytes(value):
        return bytes(value).decode("utf-8")
    return numbers_of(value)


def numbers_of(value: Any) -> Any:
    """Return the numbers of an array or a view, as nested lists; a list of one number is the number."""
    numbers = value.tolist()
    return numbers[0] if isinstance(numbers, list) and len(numbers) == 1 else numbers


def _without_brackets(text: str) -> str:
    """Return the only item of a list of one number, as ``[6]`` or ``[[6]]``, and any other text as it is."""
    text = text.strip()
    while text.startswith("[") and text.endswith("]"):
        text = text[1:-1].strip()
    return text


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
        if extension in IMAGE_FORMATS:
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
    if extension not in IMAGE_FORMATS:
        raise ValueError(f"{extension!r} is not one of the image formats {', '.join(IMAGE_FORMATS)}")
    if not hasattr(value, "save"):
        try:
            image_of = import_module("PIL.Image").fromarray
        except ImportError as error:
            raise ConfigError("writing images needs Pillow", hint=install_hint("image")) from error
        value = image_of(value)
    out = io.BytesIO()
    value.save(out, format=IMAGE_FORMATS[extension])
    return out.getvalue()
