"""Reads Thrift's compact protocol, in which the footer of Parquet is written. Structs become dicts by field number.

pyarrow reads footers too, but if the description of a column is damaged, accessing that column aborts the process
(``terminate called``, pyarrow 26) instead of raising an error. This module checks what it reads.
"""

from __future__ import annotations

import struct
from typing import Any, TypeAlias

DEPTH_MAX = 32
Struct: TypeAlias = dict[int, Any]

_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)


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
