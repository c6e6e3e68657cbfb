"""Writing Parquet shards: one column for each field and for ``__key__``, in row groups of 16 MiB.

The first sample of a shard decides the columns: bytes become ``binary``, text ``string``, whole numbers ``int64``, other
numbers ``double``, and arrays and lists of numbers become lists of these. All further samples must have the same columns.
The same samples give the same bytes with the same version of pyarrow, whose name and version each file contains.
"""

from __future__ import annotations

from importlib import import_module
from io import RawIOBase
from typing import TYPE_CHECKING, Any

from penstock.config import MIB
from penstock.errors import ConfigError
from penstock.formats import RESERVED_FIELDS
from penstock.types import ByteRange
from penstock.version import install_hint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.types import Buffer

CODECS = {"gz": "gzip", "zst": "zstd", "snappy": "snappy"}
"""Compression of the pages, by the word after ``parquet.``."""

ROW_GROUP_BYTES = 16 * MIB
"""Bytes of values in a row group: the writer holds that many, and a reader that starts inside a shard reads that many."""

COPIES = 6
"""Copies of a row group in memory while it is written: values, Arrow's array and Parquet's pages; the last two grow by
doubling."""


class ByteSink(RawIOBase):
    """The file that pyarrow writes to.

    Args:
        write: Takes the bytes, which are valid only during the call.

    Attributes:
        size_bytes: Number of bytes written so far.
    """

    def __init__(self, write: Callable[[Buffer], object]) -> None:
        self._write = write
        self.size_bytes = 0

    def write(self, data: Any) -> int:
        """Take the next bytes. Returns their number."""
        view = memoryview(data)
        self._write(view)
        self.size_bytes += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        """Return the position."""
        return self.size_bytes

    def writable(self) -> bool:
        """Return True."""
        return True


class ParquetWriter:
    """Writes a Parquet shard; its interface is ``TarWriter``'s.

    Args:
        write: Called with the next bytes of the shard, in order.
        codec: Compression of the pages, by pyarrow's name. The default is none, because images and sounds are already
            compressed.

    Raises:
        ConfigError: pyarrow is not installed.

    Cost: holds one row group, and ``COPIES`` times its size while it is written.
    """

    def __init__(self, write: Callable[[Buffer], object], *, codec: str = "none") -> None:
        self._codec = codec
        try:
            self._pyarrow = import_module("pyarrow")
            self._parquet = import_module("pyarrow.parquet")
        except ImportError as error:
            raise ConfigError("Parquet needs pyarrow", hint=install_hint("parquet")) from error
        self._sink = ByteSink(write)
        self._schema: Any = None
        self._writer: Any = None
        self._columns: dict[str, list[Any]] = {}
        self._held_bytes = 0
        self._taken_bytes = 0

    def add(self, sample: Mapping[str, Any]) -> ByteRange:
        """Append one sample.

        Returns:
            Approximate bounds of its bytes; the exact position of a row is undefined.

        Raises:
            ConfigError: Its fields differ from the first sample's, in name or type.
        """
        row = {name: _plain(value) for name, value in sample.items() if name not in RESERVED_FIELDS - {"__key__"}}
        if self._schema is None:
            self._begin(row, sample)
        if row.keys() != self._columns.keys():
            what = f"the sample has fields {sorted(row)}, the shard's first sample had {sorted(self._columns)}"
            raise ConfigError(what, hint="--fields can select the fields that every sample has")
        for name, value in row.items():
            if isinstance(value, bytes) and self._pyarrow.types.is_binary(self._schema.field(name).type):
                continue  # bytes always fit; trying would copy them
            try:
                self._pyarrow.array([value], self._schema.field(name).type)
            except (self._pyarrow.ArrowException, OverflowError, TypeError) as error:
                raise ConfigError(f"field {name!r} is not of type {self._schema.field(name).type}: {error}") from None
        size_bytes = sum(_size_bytes(value) for value in row.values())
        if self._held_bytes + size_bytes > ROW_GROUP_BYTES:
            self._flush()
        for name, value in row.items():
            self._columns[name].append(value)
        start = self._taken_bytes
        self._taken_bytes += size_bytes
        self._held_bytes += size_bytes
        return ByteRange(start, self._taken_bytes)

    def finish(self) -> int:
        """Write the last row group and the footer; return the shard's size in bytes."""
        if self._schema is None:
            self._begin({"__key__": ""}, {})
        self._flush()
        self._writer.close()
        return self._sink.size_bytes

    def _begin(self, row: dict[str, Any], sample: Mapping[str, Any]) -> None:
        pyarrow = self._pyarrow
        names = sorted(row, key=lambda name: (name != "__key__", name))
        try:
            self._schema = pyarrow.schema([(name, self._type_of(row[name], sample.get(name))) for name in names])
        except (pyarrow.ArrowException, OverflowError) as error:
            raise ConfigError(f"a sample cannot be a row of Parquet: {error}") from None
        self._columns = {name: [] for name in names}
        self._writer = self._parquet.ParquetWriter(
            self._sink,
            self._schema,
            compression=self._codec,
            use_dictionary=False,
            write_page_checksum=True,
            # Statistics of bytes would hold whole values.
            write_statistics=[name for name in names if not isinstance(row[name], bytes)],
        )

    def _type_of(self, value: Any, given: Any) -> Any:
        """Return the type of a column from its first value; for an empty array, from its dtype."""
        if value == [] and hasattr(given, "dtype"):
            kind = given.dtype.kind
            return self._pyarrow.list_(self._pyarrow.float64() if kind == "f" else self._pyarrow.int64())
        return self._pyarrow.array([value]).type

    def _flush(self) -> None:
        if any(self._columns.values()):
            arrays = []
            for name in self._schema.names:  # each column is freed when its array exists
                arrays.append(self._pyarrow.array(self._columns[name], self._schema.field(name).type))
                self._columns[name] = []
            table = self._pyarrow.table(arrays, schema=self._schema)
            del arrays
            self._writer.write_table(table, row_group_size=table.num_rows)
        self._held_bytes = 0


def _plain(value: Any) -> Any:
    if hasattr(value, "dtype"):
        return value.tolist()
    if isinstance(value, memoryview) and value.format not in {"B", "b", "c"}:
        return value.tolist()
    return bytes(value) if isinstance(value, bytearray | memoryview) else value


def _size_bytes(value: Any) -> int:
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, list):
        return sum(map(_size_bytes, value))
    return len(value.encode()) if isinstance(value, str) else 8
