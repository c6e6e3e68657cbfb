"""Converts every Arrow type to the value of a field. Only this module decides the value of a Parquet column.

``docs/reference/formats.md`` has the table. In short: binary and string values become bytes; numbers, lists of numbers and
tensors are typed views; a struct becomes one field for each child; everything else becomes JSON. In JSON, bytes are
base64, and dates, times and durations are ISO 8601 with all digits of their unit. An extension type is read as its storage
type, except for tensors. The result never depends on which other packages are installed.

This module imports pyarrow, so ``parquet.py`` imports it only when it creates a reader.
"""

from __future__ import annotations

import base64
import io
import json
import uuid
from importlib import import_module
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import UnsupportedFormatError
from penstock.formats.sample import view_of_array

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.types import Buffer

pa: Any = import_module("pyarrow")
_compute: Any = import_module("pyarrow.compute")
_types: Any = pa.types

JSON_BYTES_MAX = 256 << 20
"""Bytes that dictionary entries may take when they are repeated inside the JSON of one piece.

Without this bound a few stored bytes could become gigabytes.
"""

_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}


def fields_of_type(name: str, kind: Any) -> list[str]:
    """Return the names of the fields that the column `name` of type `kind` gives.

    Raises:
        UnsupportedFormatError: A struct in the type has two children with the same name.
    """
    if isinstance(kind, pa.BaseExtensionType):
        return [name] if isinstance(kind, pa.FixedShapeTensorType) else fields_of_type(name, kind.storage_type)
    if _types.is_dictionary(kind):
        return fields_of_type(name, kind.value_type)
    children = [kind.field(index) for index in range(kind.num_fields)]
    below = [
        field for child in children for field in fields_of_type(_child_name(name, child.name, children), child.type)
    ]
    if not _types.is_struct(kind):
        return [name]
    if len({child.name for child in children}) < len(children):
        raise UnsupportedFormatError(f"the struct {name!r} has two children of one name: {kind}")
    return below


def values_of(name: str, array: Any) -> Iterator[tuple[str, Sequence[memoryview | None]]]:
    """Yield (field, values) for a column, with one value per row. The value of a row without one is None.

    Raises:
        UnsupportedFormatError: A list of integers or booleans contains a null, or the type is unknown.
        ValueError: A string inside a list is not valid UTF-8.
    """
    kind = array.type
    if isinstance(kind, pa.FixedShapeTensorType) and _is_number(kind.value_type):
        yield name, _tensors(array)
    elif isinstance(kind, pa.BaseExtensionType):
        yield from values_of(name, array.storage)
    elif _types.is_dictionary(kind):
        indices = array.indices.to_pylist()
        for field, values in values_of(name, array.dictionary):
            yield field, [None if index is None else values[index] for index in indices]
    elif _types.is_struct(kind):
        children = [kind.field(index) for index in range(kind.num_fields)]
        for child, values in zip(children, array.flatten(), strict=True):
            yield from values_of(_child_name(name, child.name, children), values)
    elif _is_bytes(kind) or _is_text(kind):
        yield name, _slices(array)
    elif _is_number(kind):
        yield name, _masked(_cut(_number_view(array), range(len(array) + 1)), array)
    elif _is_list(kind) and _is_number(kind.value_type):
        values, ends = _flat(array)
        yield name, _masked(_cut(_number_view(_without_nulls(values)), ends), array)
    else:
        texts = (None if value is None else json.dumps(value, ensure_ascii=False) for value in _objects(array))
        yield name, [None if text is None else memoryview(text.encode("utf-8")) for text in texts]


def column_of(array: Any) -> list[bytes | None] | NDArray[Any] | None:
    """Return a column of bytes as a list, and one of numbers as an array, type[rows, count]; None for any other column.

    ``values_of`` gives the same values one by one. A null is None in a list, and undefined in an array.
    """
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return None if isinstance(kind, pa.FixedShapeTensorType) else column_of(array.storage)
    if _types.is_dictionary(kind):
        entries = column_of(array.dictionary)
        if not isinstance(entries, list):
            return None
        return [None if index is None else entries[index] for index in array.indices.to_pylist()]
    if _is_bytes(kind) or _is_text(kind):
        return [None if value is None else bytes(value) for value in _slices(array)]
    if _is_number(kind):
        return np.asarray(_number_view(array))[:, None]
    if _types.is_fixed_size_list(kind) and _is_number(kind.value_type) and not array.null_count:
        return np.asarray(_number_view(_without_nulls(array.flatten()))).reshape(len(array), -1)
    return None


def rows_of_table(data: Buffer) -> list[dict[str, Any]]:
    """Return the rows of a small Parquet table, such as one that is joined to samples or that lists what to pack.

    Binary values are ``bytes``. Every other value is as JSON would represent it, so dates and times are ISO 8601.

    Raises:
        ValueError: The data is not a Parquet file, or contains a type that is not supported.
    """
    try:
        table = import_module("pyarrow.parquet").read_table(io.BytesIO(data))
        columns = [[value for chunk in column.chunks for value in _cells(chunk)] for column in table.columns]
    except (pa.ArrowException, OSError) as error:
        raise ValueError(str(error)) from error
    return [dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)]


def _cells(array: Any) -> list[Any]:
    if _is_bytes(array.type):
        return [None if each is None else bytes(each) for each in _slices(array)]
    return _objects(array)


def _child_name(name: str, child: str, children: Sequence[Any]) -> str:
    """Return ``name.child``; for the bytes of what Hugging Face calls an image or audio, return ``name``."""
    is_media = child == "bytes" and {each.name for each in children} == {"bytes", "path"}
    return name if is_media else f"{name}.{child}"


def _is_number(kind: Any) -> bool:
    return bool(_types.is_integer(kind) or _types.is_floating(kind) or _types.is_boolean(kind))


def _is_bytes(kind: Any) -> bool:
    return bool(
        _types.is_binary(kind)
        or _types.is_large_binary(kind)
        or _types.is_binary_view(kind)
        or _types.is_fixed_size_binary(kind)
    )


def _is_text(kind: Any) -> bool:
    return bool(_types.is_string(kind) or _types.is_large_string(kind) or _types.is_string_view(kind))


def _is_list(kind: Any) -> bool:
    return bool(
        _types.is_list(kind)
        or _types.is_large_list(kind)
        or _types.is_fixed_size_list(kind)
        or _types.is_list_view(kind)
        or _types.is_large_list_view(kind)
    )


def is_key(kind: Any) -> bool:
    """Whether a column of this type can provide sample keys: it must hold strings or integers."""
    return bool(_types.is_integer(kind) or _is_text(kind))


def _masked(values: Sequence[Any], array: Any) -> list[Any]:
    """Return `values` with None wherever `array` is null."""
    if not array.null_count:
        return list(values)
    return [value if there else None for value, there in zip(values, array.is_valid().to_pylist(), strict=True)]


def _cut(values: Any, ends: Sequence[int]) -> list[Any]:
    return [values[start:end] for start, end in pairwise(ends)]


def _flat(array: Any) -> tuple[Any, list[int]]:
    """Return the items of all rows of a list column, and the offset at which each row ends; the first offset is 0."""
    lengths = _compute.list_value_length(array).fill_null(0).to_pylist()
    return array.flatten(), list(accumulate(lengths, initial=0))


def _slices(array: Any) -> list[memoryview | None]:
    """Return the bytes of each row, uint8[length], as slices of the column's buffer."""
    kind = array.type
    if _types.is_binary_view(kind) or _types.is_string_view(kind):
        array = array.cast(pa.large_binary() if _types.is_binary_view(kind) else pa.large_string())
        kind = array.type
    if not len(array):
        return []
    data = array.buffers()[-1]
    view = memoryview(data).cast("B") if data is not None else memoryview(b"")
    if _types.is_fixed_size_binary(kind):
        width = kind.byte_width
        ends: Sequence[int] = [(array.offset + index) * width for index in range(len(array) + 1)]
    else:
        form: Any = "q" if _types.is_large_binary(kind) or _types.is_large_string(kind) else "i"
        offsets = memoryview(array.buffers()[1]).cast("B").cast(form)
        ends = offsets[array.offset : array.offset + len(array) + 1].tolist()
    return _masked(_cut(view, ends), array)


def _number_view(array: Any) -> memoryview:
    """Return a view of the numbers, type[len(array)]. The value of a null is undefined."""
    if array.null_count:
        array = array.fill_null(False if _types.is_boolean(array.type) else 0)
    return view_of_array(array.to_numpy(zero_copy_only=False))


def _without_nulls(values: Any) -> Any:
    """Return the items of lists with nulls replaced by NaN.

    Raises:
        UnsupportedFormatError: An item is null, and its type has no NaN.
    """
    if not values.null_count:
        return values
    if not _types.is_floating(values.type):
        raise UnsupportedFormatError(
            f"a list of {values.type} has a null inside; only in lists of floats is there a value for it, NaN"
        )
    return values.fill_null(float("nan"))


def _tensors(array: Any) -> list[memoryview | None]:
    """Return the tensor of each row, type[*shape]."""
    kind = array.type
    values, ends = _flat(array.storage)
    items = np.asarray(_number_view(_without_nulls(values)))
    order = kind.permutation or range(len(kind.shape))
    tensors = [items[start:end] for start, end in pairwise(ends)]
    there = array.is_valid().to_pylist()
    return [
        view_of_array(np.ascontiguousarray(tensor.reshape(kind.shape).transpose(order))) if is_there else None
        for tensor, is_there in zip(tensors, there, strict=True)
    ]


def _objects(array: Any) -> list[Any]:
    """Return each row as JSON represents it; a null is None."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        if kind.extension_name == "arrow.uuid":
            return [None if each is None else str(uuid.UUID(bytes=bytes(each))) for each in _slices(array.storage)]
        return _objects(array.storage)
    if _types.is_dictionary(kind):
        return _repeated(_objects(array.dictionary), array.indices.to_pylist())
    if _types.is_struct(kind):
        names = [kind.field(index).name for index in range(kind.num_fields)]
        children = [_objects(child) for child in array.flatten()]
        return _masked([dict(zip(names, row, strict=True)) for row in zip(*children, strict=True)], array)
    if _types.is_map(kind):
        ends = array.offsets.to_pylist()
        halves = (_objects(each.slice(ends[0], ends[-1] - ends[0])) for each in (array.keys, array.items))
        pairs = [list(pair) for pair in zip(*halves, strict=True)]
        return _masked(_cut(pairs, [end - ends[0] for end in ends]), array)
    if _is_list(kind):
        values, ends = _flat(array)
        return _masked(_cut(_objects(values), ends), array)
    if _is_bytes(kind):
        return [None if each is None else base64.b64encode(each).decode() for each in _slices(array)]
    if _types.is_temporal(kind):
        return _masked(_times(array), array)
    if _types.is_decimal(kind):
        return [None if each is None else str(each) for each in array.to_pylist()]
    if _is_number(kind) or _is_text(kind) or _types.is_null(kind):
        found: list[Any] = array.to_pylist()
        return found
    raise UnsupportedFormatError(f"a column of type {kind} is not read")


def _repeated(values: list[Any], indices: list[int | None]) -> list[Any]:
    """Return the entries of a dictionary column, repeated as often as they occur.

    Raises:
        ValueError: The repeated strings have more than ``JSON_BYTES_MAX`` bytes in total.
    """
    lengths = [len(value) if isinstance(value, str) else 0 for value in values]
    if sum(lengths[index] for index in indices if index is not None) > JSON_BYTES_MAX:
        raise ValueError(f"lists repeat texts of a dictionary to more than {JSON_BYTES_MAX} bytes")
    return [None if index is None else values[index] for index in indices]


def _times(array: Any) -> list[str]:
    """Format as ISO 8601 with all digits of the unit. A null gives an undefined text; any number can be formatted."""
    kind = array.type
    if _types.is_interval(kind):
        raise UnsupportedFormatError(f"a column of type {kind} is not read")
    stored = array.cast(pa.int32() if kind.bit_width == 32 else pa.int64()).fill_null(0)
    if _types.is_date(kind) or _types.is_timestamp(kind):
        unit = kind.unit if _types.is_timestamp(kind) else "D" if _types.is_date32(kind) else "ms"
        moments = stored.to_numpy().astype(f"M8[{unit}]")
        if _types.is_date(kind):
            moments = moments.astype("M8[D]")
        zone = "Z" if _types.is_timestamp(kind) and kind.tz is not None else ""
        return [text + zone for text in np.datetime_as_string(moments).tolist()]
    write = _duration if _types.is_duration(kind) else _clock
    return [write(count, _DIGITS[kind.unit]) for count in stored.to_pylist()]


def _clock(count: int, digits: int) -> str:
    """Format a time of day, such as ``12:34:56.789``. In a damaged file it may exceed 24 hours."""
    seconds, part = divmod(abs(count), 10**digits)
    text = f"{'-' * (count < 0)}{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return text + _fraction(part, digits)


def _duration(count: int, digits: int) -> str:
    """Format a duration in seconds, such as ``PT90061.500S``."""
    seconds, part = divmod(abs(count), 10**digits)
    return f"{'-' * (count < 0)}PT{seconds}{_fraction(part, digits)}S"


def _fraction(part: int, digits: int) -> str:
    return f".{part:0{digits}d}" if digits else ""
