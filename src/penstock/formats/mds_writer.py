"""Writes MDS shards for MosaicML's ``StreamingDataset``; ``mds.py`` describes the format.

A shard begins with the bounds of all its samples. The writer therefore writes the samples first, and ``head()`` returns at
the end what belongs before them. The first sample determines the columns. The encoding of bytes follows from the field's
extension (``jpg`` becomes ``jpeg``, ``txt`` becomes ``str``; otherwise ``bytes``). Strings are ``str``, integers ``int``,
floats ``float64``, dicts and lists ``json``, and NumPy numbers and arrays keep their types. Every further sample must have
the same columns. Keys are not stored.
"""

from __future__ import annotations

import json
import struct
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import ConfigError
from penstock.formats.mds import Column
from penstock.formats.record_writers import RecordWriter
from penstock.formats.sample import RESERVED_FIELDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.types import Buffer

INDEX_VERSION = 2
"""Version of ``index.json`` and of the description in each shard."""

SHARD_BYTES_MAX = (1 << 32) - 1
"""Largest shard, in bytes: the bounds of samples are 32 bits wide."""

_BY_EXTENSION = {"jpg": "jpeg", "jpeg": "jpeg", "png": "png", "txt": "str", "text": "str", "json": "json"}
_NUMBERS = {
    "int": 8, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "float16": 2, "uint32": 4, "int32": 4, "float32": 4,
    "uint64": 8, "int64": 8, "float64": 8,
}  # fmt: skip
_EXTENTS = ((1 << 8, "B"), (1 << 16, "H"), (1 << 32, "I"))


class Encoded(NamedTuple):
    """A value that is already encoded, because it was copied from another shard.

    Attributes:
        encoding: MosaicML's name of the encoding. It cannot be that of an array, whose bytes begin with its shape.
        size_bytes: Size of every value of its column in bytes; None if sizes differ.
        data: The encoded bytes.
    """

    encoding: str
    size_bytes: int | None
    data: Buffer


class MdsWriter(RecordWriter):
    """Writes the samples of an MDS shard. What belongs before them is returned by ``head()``.

    Args:
        write: Function that takes the next bytes of the samples.

    Cost: holds 8 bytes a sample.
    """

    def __init__(self, write: Callable[[Buffer], object]) -> None:
        super().__init__(write)
        self._sizes: list[int] = []
        self.columns: tuple[Column, ...] = ()

    def _encode(self, sample: Mapping[str, Any]) -> list[Buffer]:
        fields = {name: value for name, value in sample.items() if name not in RESERVED_FIELDS}
        columns = self.columns or _columns_of(fields)
        if fields.keys() != {column.name for column in columns}:
            what = f"fields {sorted(fields)}, the shard's first sample had {[column.name for column in columns]}"
            raise ConfigError(what, hint="--fields takes what every sample has")
        values = [_encoded(fields[column.name], column) for column in columns]
        open_sizes = [len(value) for value, column in zip(values, columns, strict=True) if column.size_bytes is None]
        size_bytes = 4 * len(open_sizes) + sum(map(len, values))
        if self.offset_bytes + size_bytes + self._head_bytes(columns, len(self._sizes) + 1) > SHARD_BYTES_MAX:
            raise ConfigError(f"a shard of MDS has at most {SHARD_BYTES_MAX} bytes", hint="--bytes-max (bytes_max=)")
        self.columns = columns
        self._sizes.append(size_bytes)
        return [struct.pack(f"<{len(open_sizes)}I", *open_sizes), *values]

    def head(self) -> bytes:
        """Return the header that belongs before the samples: their bounds and the columns."""
        start = self._head_bytes(self.columns, len(self._sizes))
        bounds = accumulate(self._sizes, initial=start)
        numbers = struct.pack(f"<{len(self._sizes) + 2}I", len(self._sizes), *bounds)
        return numbers + _description(self.columns)

    def entry(self, basename: str, *, size_bytes: int, stored_bytes: int, compression: str | None) -> dict[str, Any]:
        """Return the shard's entry in ``index.json``.

        Args:
            basename: File name of the shard in the folder of ``index.json``, without the suffix of a compression.
            size_bytes: Size of the shard before compression.
            stored_bytes: Size of the shard as stored.
            compression: ``gz``, ``zst``, or None if the shard is not compressed.
        """
        suffix = {None: "", "gz": ".gz", "zst": ".zstd"}[compression]
        packed = {"basename": basename + suffix, "bytes": stored_bytes, "hashes": {}}
        return {
            **_config(self.columns),
            "compression": {None: None, "gz": "gz", "zst": "zstd"}[compression],
            "hashes": [],
            "raw_data": {"basename": basename, "bytes": size_bytes, "hashes": {}},
            "samples": len(self._sizes),
            "version": INDEX_VERSION,
            "zip_data": packed if compression else None,
        }

    @staticmethod
    def _head_bytes(columns: tuple[Column, ...], count: int) -> int:
        return 8 + 4 * count + len(_description(columns))


def index_json(entries: list[dict[str, Any]]) -> bytes:
    """Return the ``index.json`` of shards with these entries, in the given order."""
    return json.dumps({"shards": entries, "version": INDEX_VERSION}, sort_keys=True).encode()


def _config(columns: tuple[Column, ...]) -> dict[str, Any]:
    return {
        "column_encodings": [column.encoding for column in columns],
        "column_names": [column.name for column in columns],
        "column_sizes": [column.size_bytes for column in columns],
        "format": "mds",
        "size_limit": None,
    }


def _description(columns: tuple[Column, ...]) -> bytes:
    return json.dumps({**_config(columns), "compression": None, "hashes": []}, sort_keys=True).encode()


def _columns_of(fields: Mapping[str, Any]) -> tuple[Column, ...]:
    if not fields:
        raise ConfigError("a sample has no field")
    columns = []
    for name in sorted(fields):
        encoding = _encoding_of(name, fields[name])
        value = fields[name]
        size_bytes = value.size_bytes if isinstance(value, Encoded) else _NUMBERS.get(encoding)
        columns.append(Column(name, encoding, size_bytes or None))
    return tuple(columns)


def _encoding_of(name: str, value: Any) -> str:
    if isinstance(value, Encoded):
        return value.encoding
    if isinstance(value, str):
        return "str"
    if isinstance(value, bool | int):
        return "int"
    if isinstance(value, float):
        return "float64"
    if _is_bytes(value):
        return _BY_EXTENSION.get(name.rpartition(".")[2].lower(), "bytes")
    if isinstance(value, dict | list):
        return "json"
    array = _array_of(name, value)
    dtype = array.dtype.name
    if dtype not in _NUMBERS:
        raise ConfigError(f"field {name!r} is of type {dtype}, which MDS has not")
    return f"ndarray:{dtype}" if array.ndim else dtype


def _is_bytes(value: Any) -> bool:
    return isinstance(value, bytes | bytearray) or (isinstance(value, memoryview) and value.format in {"B", "b", "c"})


def _array_of(name: str, value: Any) -> Any:
    """Convert `value` to a little-endian NumPy array."""
    if not isinstance(value, memoryview) and not hasattr(value, "__array__"):
        raise ConfigError(f"field {name!r} must be bytes, str, a number, JSON or an array, not {type(value).__name__}")
    import numpy as np

    array = np.asarray(value)
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def _encoded(value: Any, column: Column) -> Buffer:
    found = _encoding_of(column.name, value)
    if found == "int" and column.encoding == "float64":
        value, found = float(value), "float64"
    if found != column.encoding:
        raise ConfigError(f"field {column.name!r} is {found}, in the shard's first sample it was {column.encoding}")
    if isinstance(value, Encoded):
        if column.size_bytes is not None and len(value.data) != column.size_bytes:
            raise ConfigError(
                f"field {column.name!r} has {len(value.data)} bytes, not {column.size_bytes} as its column"
            )
        return value.data
    if found == "int":
        try:
            return struct.pack("<q", value)
        except struct.error:
            raise ConfigError(f"field {column.name!r}: {value} is not an int64") from None
    if found == "float64":
        return struct.pack("<d", value)
    if found.startswith("ndarray") or found in _NUMBERS:
        return _array(column.name, value)
    if isinstance(value, dict | list):
        return _json(column.name, value)
    if isinstance(value, str):
        return value.encode("utf-8")
    return memoryview(value).cast("B") if isinstance(value, memoryview) else value


def _json(name: str, value: Any) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode("utf-8")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"field {name!r} cannot be JSON: {error}") from None


def _array(name: str, value: Any) -> bytes:
    """Encode an array whose type the column states: its shape in the narrowest integer type, then its items."""
    array = _array_of(name, value)
    if not array.ndim:
        number: bytes = array.tobytes()
        return number
    widest = max(array.shape, default=0)
    at, form = next((index, form) for index, (limit, form) in enumerate((*_EXTENTS, (1 << 64, "Q"))) if widest < limit)
    head = struct.pack(f"<B{array.ndim}{form}", array.ndim << 2 | at, *array.shape)
    data: bytes = array.tobytes()
    return head + data
