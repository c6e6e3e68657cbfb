"""The headers inside a Parquet file: how they are parsed, and how large the pages of a row group become according to them.

Footer and headers of pages are written in Thrift's compact protocol; structs become dicts by field number. pyarrow reads
footers too, but if the description of a column is damaged, accessing that column aborts the process (``terminate called``,
pyarrow 26) instead of raising an error. This module checks what it reads.

The size of pages is determined before anything is decompressed. The footer does not state this reliably. A page of a
hundred bytes can decompress to a gigabyte, a dictionary entry that is stored once can be the value of a million rows, and
ten bytes of run lengths can stand for a list of a billion items. The first and the third are refused beyond a growth that
real data never has (``GROWTH_MAX``). The second is legitimate: such columns are read as dictionaries, which hold each entry
once, or fewer rows are decoded at a time.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

GROWTH_MAX = 1032
"""Bytes that one stored byte of a row group may become. This is the bound of deflate; other codecs exceed it for constants."""

GROWTH_BYTES = 256 << 20
"""Bytes that a row group may grow beyond that bound, and that dictionary entries may take in rows decoded together."""

ROWS_MIN = 64
"""Fewest rows decoded together. Columns whose dictionaries would allow only fewer are read as dictionaries."""

DEPTH_MAX = 32
Struct: TypeAlias = dict[int, Any]

_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)

_BYTE_ARRAY = "BYTE_ARRAY"
_DELTA_BYTE_ARRAY = 7  # encoding in which a value is a prefix of the one before it, plus some bytes
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_LEVELS_BYTES = 12  # for each item of a list: levels and offsets
_OBJECT_BYTES = 64  # for each item that becomes a Python object


class ColumnChunk(NamedTuple):
    """A column of a row group, as the footer and the schema describe it.

    Attributes:
        path: Path of the column in the schema, separated by dots.
        kind: Physical type, as pyarrow writes it.
        width: Size of a value of type FIXED_LEN_BYTE_ARRAY, in bytes.
        is_repeated: Whether it is inside a list.
        values_count: Number of values, including nulls.
        decoded_bytes: Decompressed size of the column's pages, according to the footer.
    """

    path: str
    kind: str
    width: int
    is_repeated: bool
    values_count: int
    decoded_bytes: int


class Pages(NamedTuple):
    """Totals from the headers of a column's pages.

    Attributes:
        decoded_bytes: Decompressed size of all pages.
        values_count: Number of values in all data pages.
        dictionary_bytes: Decompressed size of the dictionary.
        prefixed_bytes: Decompressed size of the largest page whose values share prefixes.
    """

    decoded_bytes: int = 0
    values_count: int = 0
    dictionary_bytes: int = 0
    prefixed_bytes: int = 0


class Reading(NamedTuple):
    """The way to read a row group in bounded memory.

    Attributes:
        decoded_bytes: Decompressed size of the wanted columns.
        rows_max: Most rows to decode together.
        dictionaries: Paths of the columns to read as dictionaries.
    """

    decoded_bytes: int
    rows_max: int
    dictionaries: list[str]


def read_pages(data: memoryview) -> Pages:
    """Read the headers of the pages in `data`, a column of a row group, up to the first damaged one.

    pyarrow reports the damaged page itself, after it has returned the rows before it.
    """
    found, at = Pages(), 0
    while at < len(data):
        try:
            header, at = read_struct_at(data, at)
            size_bytes, stored_bytes = int(header[2]), int(header[3])
            dictionary, page = header.get(7), header.get(5) or header.get(8) or {}
            values_count, encoding = int(page.get(1, 0)), page.get(2 if 5 in header else 4)
        except (ValueError, KeyError, TypeError, AttributeError):
            break
        if size_bytes < 0 or stored_bytes < 0 or values_count < 0:
            break
        at += stored_bytes
        found = Pages(
            found.decoded_bytes + size_bytes,
            found.values_count + values_count,
            max(found.dictionary_bytes, size_bytes if dictionary else 0),
            max(found.prefixed_bytes, size_bytes if encoding == _DELTA_BYTE_ARRAY else 0),
        )
    return found


def bounded_reading(chunks: Sequence[ColumnChunk], views: Sequence[memoryview], *, rows_max: int) -> Reading:
    """Plan how to read the columns `chunks`, whose bytes are `views`, at most `rows_max` rows at a time.

    Raises:
        ValueError: The columns would take more memory than their stored size justifies.
    """
    stored_bytes = sum(map(len, views))
    decoded_bytes = grown_bytes = largest_bytes = 0
    dictionaries = []
    for chunk, view in zip(chunks, views, strict=True):
        pages = read_pages(view)
        decoded_bytes += max(chunk.decoded_bytes, pages.decoded_bytes)
        grown_bytes += pages.decoded_bytes
        items_count = max(chunk.values_count, pages.values_count)
        value_bytes = _WIDTHS.get(chunk.kind, chunk.width)
        if chunk.kind == _BYTE_ARRAY:
            as_dictionary = ROWS_MIN * pages.dictionary_bytes > GROWTH_BYTES or (
                chunk.is_repeated and items_count * pages.dictionary_bytes > GROWTH_BYTES
            )
            dictionaries += [chunk.path] if as_dictionary else []
            value_bytes = max(pages.prefixed_bytes, 0 if as_dictionary else pages.dictionary_bytes)
        if chunk.is_repeated:
            each_bytes = value_bytes + _LEVELS_BYTES + (_OBJECT_BYTES if chunk.kind == _BYTE_ARRAY else 0)
            grown_bytes += items_count * each_bytes
        else:
            largest_bytes += value_bytes
    if grown_bytes > GROWTH_BYTES + GROWTH_MAX * stored_bytes:
        raise ValueError(f"its columns claim to grow from {stored_bytes} to {grown_bytes} bytes or more")
    return Reading(decoded_bytes, max(1, min(rows_max, GROWTH_BYTES // max(1, largest_bytes))), dictionaries)


# ── Thrift's compact protocol ───────────────────────────────────────────────────────────────────────────────────────


def read_struct(data: bytes) -> Struct:
    """Parse the struct at the start of `data`. Strings are bytes, lists are lists, and maps are ignored.

    Raises:
        ValueError: The struct is invalid.
    """
    return read_struct_at(data, 0)[0]


def read_struct_at(data: bytes | memoryview, at: int) -> tuple[Struct, int]:
    """Parse the struct at byte `at` of `data`. Returns it and where it ends. Strings are slices of `data`.

    Raises:
        ValueError: The struct is invalid.
    """
    try:
        return _struct(data, at, DEPTH_MAX)
    except (IndexError, struct.error):
        raise ValueError("a struct of its footer is cut off") from None


def _struct(data: bytes | memoryview, at: int, depth: int) -> tuple[Struct, int]:
    if not depth:
        raise ValueError(f"its footer is nested deeper than {DEPTH_MAX}")
    fields: Struct = {}
    number = 0
    while True:
        head = data[at]
        at += 1
        if not head:
            return fields, at
        kind, delta = head & 15, head >> 4
        if delta:
            number += delta
        else:
            number, at = _zigzag(data, at)
        if kind in {_TRUE, _FALSE}:
            fields[number] = kind == _TRUE
        else:
            fields[number], at = _value(data, at, kind, depth)


def _value(data: bytes | memoryview, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in {_I16, _I32, _I64}:
        return _zigzag(data, at)
    if kind == _BINARY:
        size, at = _varint(data, at)
        if at + size > len(data):
            raise ValueError(f"a text of {size} bytes does not fit into its footer")
        return data[at : at + size], at + size
    if kind == _STRUCT:
        return _struct(data, at, depth - 1)
    if kind in {_LIST, _SET}:
        return _list(data, at, depth)
    if kind in {_BYTE, _TRUE, _FALSE}:  # the latter in lists only
        return data[at], at + 1
    if kind == _DOUBLE:
        return struct.unpack_from("<d", data, at)[0], at + 8
    if kind == _MAP:
        return _map(data, at, depth)
    raise ValueError(f"its footer has a value of type {kind}")


def _list(data: bytes | memoryview, at: int, depth: int) -> tuple[list[Any], int]:
    head = data[at]
    count, at = (head >> 4, at + 1) if head >> 4 < 15 else _varint(data, at + 1)
    if count > len(data) - at:  # each item takes at least one byte
        raise ValueError(f"a list of {count} items does not fit into its footer")
    items = []
    for _ in range(count):
        item, at = _value(data, at, head & 15, depth)
        items.append(item)
    return items, at


def _map(data: bytes | memoryview, at: int, depth: int) -> tuple[None, int]:
    count, at = _varint(data, at)
    if count > len(data) - at:
        raise ValueError(f"a map of {count} items does not fit into its footer")
    kinds = 0
    if count:
        kinds, at = data[at], at + 1
    for _ in range(count):
        _, at = _value(data, at, kinds >> 4, depth)
        _, at = _value(data, at, kinds & 15, depth)
    return None, at


def _zigzag(data: bytes | memoryview, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return value >> 1 ^ -(value & 1), at


def _varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of its footer has more than 64 bits")
