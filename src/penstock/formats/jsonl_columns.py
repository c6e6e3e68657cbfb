"""JSON lines with a field for each name of the object, and the same types as the columns of Parquet.

`JsonLinesParser` gives each line as one field, which the pipeline's ``Json`` decodes. This parser gives the values
themselves: strings are bytes, a number or boolean is one item of int64, float64 or bool, a list of numbers is an array of
int64 or float64 (an empty one is float64), and an object is a field ``name.child`` for each child. A null gives no field.
Anything else, such as other lists and integers beyond 64 bits, becomes the bytes of its JSON.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.formats.jsonl import JsonLinesParser
from penstock.formats.sample import RESERVED_FIELDS
from penstock.formats.typed import view_of_array

if TYPE_CHECKING:
    from collections.abc import Iterator

_DTYPES = {bool: np.bool_, int: np.int64, float: np.float64}


class JsonColumnsParser(JsonLinesParser):
    """Parses JSON lines like ``JsonLinesParser``, but gives a field for each name of the object."""

    def _fields(self, line: memoryview, value: dict[str, Any]) -> dict[str, memoryview]:
        fields: dict[str, memoryview] = {}
        for name, column in _columns("", value):
            if name in fields:
                raise ValueError(f"two values are both the field {name!r}")
            if name in RESERVED_FIELDS and name != "__key__":
                raise ValueError(f"a name is {name!r}, which penstock adds itself")
            if name != "__key__":
                fields[name] = column
        return fields


def _columns(prefix: str, value: dict[str, Any]) -> Iterator[tuple[str, memoryview]]:
    for name, item in value.items():
        if isinstance(item, dict):
            yield from _columns(f"{prefix}{name}.", item)
        elif item is not None:
            yield prefix + name, _view(item)


def _view(value: Any) -> memoryview:
    if isinstance(value, str):
        return memoryview(value.encode("utf-8"))
    items = value if isinstance(value, list) else [value]
    kinds = {type(item) for item in items}
    kind = float if kinds == {int, float} or not items else kinds.pop() if len(kinds) == 1 else None
    if kind in _DTYPES:
        try:
            return view_of_array(np.array(items, _DTYPES[kind]))
        except OverflowError:
            pass  # integers of more than 64 bits
    return memoryview(json.dumps(value, ensure_ascii=False).encode("utf-8"))
