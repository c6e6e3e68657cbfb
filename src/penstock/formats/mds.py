"""MosaicML's MDS shards, read and written. Each shard has a header of its own, so reading needs no ``index.json``.

A shard, in little endian, consists of ``uint32 count``, ``uint32[count + 1] offsets`` in the file, a JSON object that
describes the columns and extends to the first offset, and the samples. A sample consists of the ``uint32`` sizes of the
columns that have no fixed size, and of the values of all columns. A compressed shard (``.mds.zstd``, ``.mds.gz``) is the
same file, compressed as a whole.

Numbers and arrays become typed views. Everything else is bytes as stored: ``jpeg`` and ``png`` are image files, ``str`` and
``json`` are UTF-8, ``str_int`` and the like are text, and ``pil`` is a header of three ``uint32`` (width, height, length of
the mode's name), the mode and the pixels. ``pkl`` stays bytes, because this package never loads a pickle. A sample's key is
its offset in twelve digits.

A shard begins with the bounds of all its samples. The writer therefore writes the samples first, and ``head()`` returns at
the end what belongs before them. The first sample determines the columns. The encoding of bytes follows from the field's
extension (``jpg`` becomes ``jpeg``, ``txt`` becomes ``str``; otherwise ``bytes``). Strings are ``str``, integers ``int``,
floats ``float64``, dicts and lists ``json``, and NumPy numbers and arrays keep their types. Every further sample must have
the same columns. Keys are not stored.
"""

from __future__ import annotations

import json
import re
import struct
from bisect import bisect_left
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import ConfigError
from penstock.formats.parsing import RECORD_BYTES_MAX, FramedParser, OnCorrupt
from penstock.formats.sample import ITEM_BYTES, RESERVED_FIELDS, Sample, is_bytes, typed
from penstock.formats.writers import ShardWriter
from penstock.memory.buffers import byte_view
from penstock.text.json_text import parse_json
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from penstock.types import Buffer

HEADER_BYTES_MAX = 64 << 20
"""Largest header, in bytes: enough for 16 million samples; a shard cannot exceed 4 GiB."""
DESCRIPTION_BYTES_MAX = 1 << 20

_SCALARS = {
    "int": "q", "uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q", "int8": "b", "int16": "h", "int32": "i",
    "int64": "q", "float16": "e", "float32": "f", "float64": "d",
}  # fmt: skip
_DTYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
    64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip
_SHAPE_FORMATS = "BHIQ"
INDEX_VERSION = 2
"""Version of ``index.json`` and of the description in each shard."""

SHARD_BYTES_MAX = (1 << 32) - 1
"""Largest shard, in bytes: the bounds of samples are 32 bits wide."""

_BY_EXTENSION = {"jpg": "jpeg", "jpeg": "jpeg", "png": "png", "txt": "str", "text": "str", "json": "json"}
_NDARRAY = re.compile(r"ndarray(?::(?P<dtype>[a-z0-9]+)(?::(?P<shape>\d+(?:,\d+)*))?)?").fullmatch


_HEAD_READ_BYTES = 64 << 10  # the first read of a shard's header, enough for 16 000 samples


def look_head() -> Generator[ByteRange, Buffer, Buffer]:
    """Read the header, which is needed to start inside a shard.

    A generator: it yields the spans that it needs, receives their bytes by ``send``, and returns the header.
    """
    head = yield ByteRange(0, _HEAD_READ_BYTES)
    end_bytes = int.from_bytes(head[4:8], "little")  # offset of the first sample
    if len(head) == _HEAD_READ_BYTES and _HEAD_READ_BYTES < end_bytes <= HEADER_BYTES_MAX:
        head = yield ByteRange(0, end_bytes)
    return head


class Column(NamedTuple):
    """One column: its name, MosaicML's name of its encoding, and the size of its values in bytes, or None if sizes differ."""

    name: str
    encoding: str
    size_bytes: int | None


def is_mds(head: bytes) -> bool:
    """Whether `head` may begin an MDS shard. MDS has no magic number, but the numbers in its header must be consistent."""
    if len(head) < 12:
        return False
    count, first = struct.unpack_from("<II", head)
    description = first - 8 - 4 * count
    if not 2 <= description <= DESCRIPTION_BYTES_MAX:
        return False
    offsets = struct.unpack_from(f"<{min(count + 1, len(head) // 4 - 1)}I", head, 4)
    if any(later < earlier for earlier, later in pairwise(offsets)):
        return False
    rest = head[8 + 4 * count :]
    return rest.startswith(b"{") or (bool(count) and not rest)


def read_columns(description: bytes) -> tuple[Column, ...]:
    """Parse the columns from a shard's own description.

    Raises:
        ValueError: The description is invalid.
    """
    try:
        config = parse_json(description)
        columns = tuple(
            Column(str(name), str(encoding), size)
            for name, encoding, size in zip(
                config["column_names"], config["column_encodings"], config["column_sizes"], strict=True
            )
        )
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"its description of columns cannot be read: {error!r}") from None
    for column in columns:
        if column.size_bytes is not None and (not isinstance(column.size_bytes, int) or column.size_bytes < 0):
            raise ValueError(f"column {column.name!r} has a size of {column.size_bytes!r}")
        if column.name in RESERVED_FIELDS:
            raise ValueError(f"a column is called {column.name!r}, a name that penstock adds itself")
    if len({column.name for column in columns}) < len(columns):
        raise ValueError("two columns have one name")
    return columns


def read_sample(view: memoryview, columns: Sequence[Column]) -> dict[str, memoryview]:
    """Return the values of the complete sample in `view`.

    Raises:
        ValueError: The sizes of its columns are inconsistent.
    """
    open_count = sum(not column.size_bytes for column in columns)  # a fixed size of 0 is stored like a variable one
    at = 4 * open_count
    if at > len(view):
        raise ValueError(f"a sample of {len(view)} bytes is too short for {open_count} sizes")
    sizes = iter(struct.unpack_from(f"<{open_count}I", view))
    fields: dict[str, memoryview] = {}
    for column in columns:
        end = at + (column.size_bytes or next(sizes))
        if end > len(view):
            raise ValueError(f"column {column.name!r} ends {end - len(view)} bytes after its sample")
        fields[column.name] = decode(view[at:end], column.encoding)
        at = end
    if at != len(view):
        raise ValueError(f"its columns end {len(view) - at} bytes before the sample does")
    return fields


def decode(value: memoryview, encoding: str) -> memoryview:
    """Return `value` with the type and shape of its encoding, or unchanged if the encoding is bytes or text.

    Raises:
        ValueError: The value does not match its encoding.
    """
    form = _SCALARS.get(encoding)
    if form is not None:
        return typed(value, form, (1,))
    match = _NDARRAY(encoding)
    return _array(value, match) if match else value


def _array(value: memoryview, match: re.Match[str]) -> memoryview:
    dtype, shape_text = match["dtype"], match["shape"]
    at = 0
    try:
        if dtype is None:
            dtype = _DTYPES[value[0]]
            at = 1
        form = _SCALARS[dtype]
        if shape_text is not None:
            shape = tuple(map(int, shape_text.split(",")))
        else:
            shape_form, count = _SHAPE_FORMATS[value[at] & 3], value[at] >> 2
            end = at + 1 + count * ITEM_BYTES[shape_form]
            shape = struct.unpack(f"<{count}{shape_form}", value[at + 1 : end])
            at = end
    except (IndexError, KeyError, struct.error):
        raise ValueError(f"an array of {len(value)} bytes has no head that can be read") from None
    return typed(value[at:], form, shape)


class MdsParser(FramedParser):
    """Samples of one MDS shard.

    Args:
        shard: URL or key, for error messages.
        start_offset_bytes: Offset in the shard at which the first chunk begins: 0, or a ``Sample.offset_bytes``.
        head: The first bytes of the shard, uint8[at least up to the first sample]; needed to start inside a shard.
        on_corrupt: Policy for corrupt bytes, as ``parsing.py`` describes.

    Cost: holds the offsets of the header (8 bytes a sample) and one incomplete sample.
    """

    RECORD = "sample"

    def __init__(
        self,
        shard: str,
        *,
        start_offset_bytes: int = 0,
        on_corrupt: OnCorrupt = "raise",
        head: Buffer | None = None,
    ) -> None:
        super().__init__(shard, start_offset_bytes=start_offset_bytes, on_corrupt=on_corrupt)
        self._offsets: tuple[int, ...] = ()
        self._index = 0  # index of the next sample
        self.columns: tuple[Column, ...] = ()
        if start_offset_bytes:
            self._enter(start_offset_bytes, byte_view(head or b""))

    def _enter(self, offset_bytes: int, head: memoryview) -> None:
        if not head or self._read_header(head) > len(head):
            raise ConfigError(
                f"{self._shard}: entering MDS at byte {offset_bytes} needs its header, not {len(head)} bytes of it"
            )
        self._index = bisect_left(self._offsets, offset_bytes)
        if self._index == len(self._offsets) or self._offsets[self._index] != offset_bytes:
            raise self._corrupt("no sample begins here", offset_bytes, hint="is this the same version of the shard?")

    def _scan(self, view: memoryview, at: int, samples: list[Sample]) -> tuple[int, int]:
        base, length = self._view_offset_bytes, len(view)
        if not self._offsets:
            need_bytes = self._read_header(view)
            if need_bytes > length:
                return 0, need_bytes
            at = need_bytes
        offsets, columns = self._offsets, self.columns
        while self._index < len(offsets) - 1:
            end = offsets[self._index + 1] - base
            if end > length:
                return at, end - at
            offset_bytes = base + at
            try:
                fields = read_sample(view[at:end], columns)
                samples.append(Sample(f"{offset_bytes:012d}", fields, offset_bytes, end - at))
            except ValueError as error:
                self._skip_sample(str(error), offset_bytes, end - at)
            self._index += 1
            at = end
        if at < length:
            raise self._corrupt("data after the last sample", base + at)
        return at, 1

    def _read_header(self, view: memoryview) -> int:
        """Parse the header if it is complete. Returns its length, or the number of bytes needed to know its length."""
        length = len(view)
        if length < 8:
            return 8
        count, first = struct.unpack_from("<II", view)
        start = 8 + 4 * count
        if not start <= first <= min(start + DESCRIPTION_BYTES_MAX, HEADER_BYTES_MAX):
            raise self._corrupt(f"not an MDS shard: {count} samples that begin at byte {first}", 0)
        if length < first:
            return int(first)
        offsets = struct.unpack_from(f"<{count + 1}I", view, 4)
        sizes = [later - earlier for earlier, later in pairwise(offsets)]
        if sizes and (min(sizes) < 0 or max(sizes) > RECORD_BYTES_MAX):
            raise self._corrupt("not an MDS shard: the offsets of its samples do not ascend", 0)
        try:
            self.columns = read_columns(bytes(view[start:first]))
        except ValueError as error:
            raise self._corrupt(f"not an MDS shard: {error}", 0) from None
        self._offsets = offsets
        return int(first)

    def _end(self, samples: list[Sample]) -> None:
        super()._end(samples)
        missing = max(len(self._offsets) - 1, 0) - self._index
        if missing or (not self._offsets and self._offset_bytes):
            raise self._corrupt(f"the shard is cut off: {missing} samples missing", self._offset_bytes)


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


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


class MdsWriter(ShardWriter):
    """Writes the samples of an MDS shard. ``head()`` returns the bytes that belong before them.

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
        size_bytes = value.size_bytes if isinstance(value, Encoded) else ITEM_BYTES.get(_SCALARS.get(encoding, ""))
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
    if is_bytes(value):
        return _BY_EXTENSION.get(name.rpartition(".")[2].lower(), "bytes")
    if isinstance(value, dict | list):
        return "json"
    array = _array_of(name, value)
    dtype = array.dtype.name
    if dtype not in _SCALARS:
        raise ConfigError(f"field {name!r} is of type {dtype}, which MDS has not")
    return f"ndarray:{dtype}" if array.ndim else dtype


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
    if found.startswith("ndarray") or found in _SCALARS:
        return _encoded_array(column.name, value)
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


def _encoded_array(name: str, value: Any) -> bytes:
    """Encode an array whose type the column states: its shape in the narrowest integer type, then its items."""
    array = _array_of(name, value)
    data: bytes = array.tobytes()
    if not array.ndim:
        return data
    widest = max(array.shape, default=0)
    at, form = next((at, form) for at, form in enumerate(_SHAPE_FORMATS) if widest < 1 << 8 * ITEM_BYTES[form])
    head = struct.pack(f"<B{array.ndim}{form}", array.ndim << 2 | at, *array.shape)
    return head + data
