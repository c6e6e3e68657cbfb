"""JSON lines: each line holds one JSON object and is a sample whose only field, ``json``, is the bytes of the line.

There is no field per name by default, because most values would have to be encoded again to become bytes, and the
pipeline's ``Json`` decodes a whole line in one call. ``JsonColumnsParser`` gives a field per name. The parser decodes each
line anyway, to find its key and to detect garbage where its offset is known; this costs about 3 µs for 1 KB. The key is
the first of the object's ``__key__``, ``key`` and ``id`` that is a string or an integer. Without one, it is the offset of
the line in twelve digits, which, unlike a line number, does not depend on where reading began. A string with a lone
surrogate cannot be a key, since UTF-8 cannot represent it.

Blank lines are ignored. The last line may lack its newline.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from penstock.formats.parsing import SpanningParser
from penstock.formats.sample import RESERVED_FIELDS, Sample, view_of_array

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LINE_BYTES_MAX = 256 << 20
"""Longest line in bytes. Data without a newline for so long is not JSON lines, and the parser stops collecting it."""

KEY_NAMES = ("__key__", "key", "id")

_DTYPES = {bool: "?", int: "i8", float: "f8"}
_FIND_END = re.compile(b"\n").search
_decode = json.JSONDecoder().decode


def is_jsonl(head: bytes) -> bool:
    """Whether `head` appears to begin with an object on one line."""
    line, newline, _ = head.partition(b"\n")
    if not line.startswith(b"{"):
        return False
    if not newline:
        return b'"' in line[:64] or line.startswith(b"{}")
    try:
        return isinstance(_decode(line.decode()), dict)
    except (ValueError, RecursionError):
        return False


def key_of_object(value: Mapping[str, object]) -> str | None:
    """Return the key that an object contains, if any."""
    for name in KEY_NAMES:
        key = value.get(name)
        if isinstance(key, str) and key and is_text(key):
            return key
        if isinstance(key, int) and not isinstance(key, bool):
            return str(key)
    return None


def is_text(value: str) -> bool:
    """Whether UTF-8 can represent the text, which means that it has no lone surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


class JsonLinesParser(SpanningParser):
    """Samples of one shard of JSON lines.

    Args:
        shard: URL or key, for error messages.
        start_offset_bytes: Offset of the first chunk in the shard: 0, or a ``Sample.offset_bytes``.
        on_corrupt: Policy for corrupt bytes, as ``parsing.py`` describes. A line that is not a JSON object counts as one
            sample.

    Cost: holds one incomplete line; slices of a chunk keep that chunk alive.
    """

    MAY_BE_EMPTY = True

    def _parse(self, view: memoryview, samples: list[Sample]) -> None:
        at = 0
        while at < len(view):
            match = _FIND_END(view, at)
            end = match.start() if match else len(view)
            offset_bytes = self._offset_bytes + at
            line = view[at:end]
            if self._tail is not None:
                offset_bytes = self._tail_offset_bytes
                self._tail += line
                line = memoryview(self._tail)
            elif match is None:
                self._tail, self._tail_offset_bytes = bytearray(line), offset_bytes
            if len(line) > LINE_BYTES_MAX:
                raise self._corrupt(f"a line of more than {LINE_BYTES_MAX} bytes", offset_bytes)
            if match is None:
                return
            self._tail = None
            at = end + 1
            self._give(line, offset_bytes, len(line) + 1, samples)

    def _end(self, samples: list[Sample]) -> None:
        if self._tail is not None:
            tail, self._tail = self._tail, None
            self._give(memoryview(tail), self._tail_offset_bytes, len(tail), samples)

    def _give(self, line: memoryview, offset_bytes: int, size_bytes: int, samples: list[Sample]) -> None:
        raw = bytes(line)
        if not raw or raw.isspace():
            return
        try:
            value = _decode(raw.decode())
        except (ValueError, RecursionError) as error:
            hint = self._start_hint(raw, offset_bytes)
            self._skip_sample(f"not JSON lines: {error}", offset_bytes, size_bytes, hint=hint)
            return
        if not isinstance(value, dict):
            what = f"not JSON lines: a line holds a {type(value).__name__}, not an object"
            self._skip_sample(what, offset_bytes, size_bytes)
            return
        key = key_of_object(value) or f"{offset_bytes:012d}"
        try:
            fields = self._fields(line, value)
        except (ValueError, RecursionError) as error:
            self._skip_sample(f"JSON lines: {error}", offset_bytes, size_bytes)
            return
        samples.append(Sample(key, fields, offset_bytes, size_bytes))

    def _fields(self, line: memoryview, value: dict[str, Any]) -> dict[str, memoryview]:
        """Return the fields of a line; `value` is the decoded line."""
        return {"json": line}


class JsonColumnsParser(JsonLinesParser):
    """Parses JSON lines like ``JsonLinesParser``, but gives a field for each name, with the types of the columns of Parquet.

    Strings are bytes, a number or boolean is one item of int64, float64 or bool, a list of numbers is an array of int64 or
    float64 (an empty one is float64), and an object is a field ``name.child`` for each child. A null gives no field. Anything
    else, such as other lists and integers beyond 64 bits, becomes the bytes of its JSON.
    """

    def _fields(self, line: memoryview, value: dict[str, Any]) -> dict[str, memoryview]:
        fields: dict[str, memoryview] = {}
        for name, column in _named_values("", value):
            if name in fields:
                raise ValueError(f"two values are both the field {name!r}")
            if name in RESERVED_FIELDS and name != "__key__":
                raise ValueError(f"a name is {name!r}, which penstock adds itself")
            if name != "__key__":
                fields[name] = column
        return fields


def _named_values(prefix: str, value: dict[str, Any]) -> Iterator[tuple[str, memoryview]]:
    for name, item in value.items():
        if isinstance(item, dict):
            yield from _named_values(f"{prefix}{name}.", item)
        elif item is not None:
            yield prefix + name, _view(item)


def _view(value: Any) -> memoryview:
    if isinstance(value, str):
        return memoryview(value.encode("utf-8"))
    items = value if isinstance(value, list) else [value]
    kinds = {type(item) for item in items}
    kind = float if kinds == {int, float} or not items else kinds.pop() if len(kinds) == 1 else None
    if kind in _DTYPES:
        import numpy as np

        try:
            return view_of_array(np.array(items, _DTYPES[kind]))
        except OverflowError:
            pass  # integers of more than 64 bits
    return memoryview(json.dumps(value, ensure_ascii=False).encode("utf-8"))
