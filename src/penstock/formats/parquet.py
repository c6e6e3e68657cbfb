"""Parquet shards, through pyarrow: the footer first, then row groups by range, only the columns that are wanted.

One row is one sample, a row group is a unit: its bytes come together, its rows are decoded some thousand at a time. Columns
become fields: binary and text as bytes, slices of the decoded column; numbers and lists of numbers as typed views; a struct
as ``name.child`` each, but for what Hugging Face calls an image or audio (``bytes`` and ``path``), whose bytes are ``name``;
anything else (dates, decimals, nested lists) as JSON. A null is a field that the sample lacks.

The key is the column ``__key__``, ``key`` or ``id``, the first of them that holds texts or whole numbers; else the row's
number in the shard, twelve digits.
"""

from __future__ import annotations

import io
import json
from importlib import import_module
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.formats.jsonl import KEY_NAMES
from penstock.formats.ranged import TAIL_BYTES, Piece, ShardReader, Unit, merged
from penstock.formats.sample import RESERVED_FIELDS, Sample
from penstock.formats.thrift import Struct, read_struct
from penstock.formats.typed import view_of_array
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterator, Sequence

    from penstock.formats.parsing import OnCorrupt
    from penstock.types import Buffer

MAGIC = b"PAR1"
_TRAILER_BYTES = 8
BLOCK_BYTES_MAX = 8 << 30
"""Of a row group once decompressed; a footer that promises more is not believed."""

ROWS_MAX = 1 << 28
"""Of a row group: each is a Python object."""

PIECE_BYTES = 4 << 20
"""Decoded at a time, about; a row group may be gigabytes."""

PIECE_ROWS_MAX = 2048
"""The same in rows, each of which is some hundred bytes of Python objects besides."""

_GAP_BYTES = 64 << 10  # between columns that are read as one: less than a request costs anywhere


def is_parquet(head: bytes) -> bool:
    """Whether `head` begins as Parquet does."""
    return head.startswith(MAGIC)


class _Parts(io.RawIOBase):
    """A file of which only some spans are there, for pyarrow to seek in."""

    def __init__(self, size_bytes: int, spans: Sequence[ByteRange], views: Sequence[memoryview]) -> None:
        self._size_bytes = size_bytes
        self._parts = list(zip(spans, views, strict=True))
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size_bytes}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        end = self._size_bytes if size < 0 else min(self._at + size, self._size_bytes)
        for span, view in self._parts:
            if span.start <= self._at and end <= span.end:
                data = view[self._at - span.start : end - span.start]
                self._at = end
                return data  # type: ignore[return-value]  # pyarrow takes any buffer, and copies none
        raise OSError(f"bytes [{self._at}, {end}) are outside of the columns that the footer names")


class ParquetReader(ShardReader):
    """Rows of one Parquet shard, a row group at a time; see ``ranged.py``.

    Cost: one read for the footer, two where it is larger than 64 KiB; a unit holds its row group as stored, and
        ``PIECE_BYTES`` or so of it decoded.
    """

    def __init__(
        self,
        shard: str,
        *,
        size_bytes: int,
        fields: Collection[str] | None = None,
        on_corrupt: OnCorrupt = "raise",
    ) -> None:
        super().__init__(shard, size_bytes=size_bytes, fields=fields, on_corrupt=on_corrupt)
        try:
            self._arrow: Any = import_module("pyarrow")
            self._parquet: Any = import_module("pyarrow.parquet")
        except ImportError:
            raise ConfigError(
                "reading Parquet needs the package pyarrow", hint="pip install 'penstock[parquet]'"
            ) from None
        self._metadata: Any = None
        self._columns: list[str] = []  # read, of the top level
        self._key_column: str | None = None
        self._first_rows: list[int] = []
        self._decoded_bytes: list[int] = []  # of the wanted columns of each row group, as the footer says

    def _look(self) -> Generator[ByteRange, Buffer, None]:
        start = max(0, self._size_bytes - TAIL_BYTES)
        tail = bytes((yield ByteRange(start, self._size_bytes)))
        if tail[-4:] != MAGIC or len(tail) < _TRAILER_BYTES + 4:
            encrypted = " (it is encrypted)" if tail[-4:] == b"PARE" else ""
            raise self._corrupt(f"no Parquet: it does not end in {MAGIC!r}{encrypted}", max(0, self._size_bytes - 4))
        footer_bytes = int.from_bytes(tail[-_TRAILER_BYTES:-4], "little") + _TRAILER_BYTES
        if footer_bytes > self._size_bytes - len(MAGIC):
            raise self._corrupt(f"no Parquet: a footer of {footer_bytes} bytes", self._size_bytes - _TRAILER_BYTES)
        begin_bytes = self._size_bytes - footer_bytes
        footer = (
            tail[begin_bytes - start :]
            if begin_bytes >= start
            else bytes((yield ByteRange(begin_bytes, self._size_bytes)))
        )
        try:
            self._metadata = self._parquet.read_metadata(self._arrow.BufferReader(MAGIC + footer))
            schema = self._metadata.schema.to_arrow_schema()
            self._choose(schema)
            groups = read_struct(footer).get(4) or []
            self.units = tuple(self._unit(group, begin_bytes) for group in groups)
            if len(groups) != self._metadata.num_row_groups:
                raise ValueError(f"{len(groups)} row groups, pyarrow says {self._metadata.num_row_groups}")
        except ConfigError:
            raise
        except (self._arrow.ArrowException, OSError, ValueError) as error:
            raise self._corrupt(f"no Parquet: {error}", begin_bytes) from None
        counts = (unit.samples_count or 0 for unit in self.units)
        self._first_rows = list(accumulate(counts, initial=0))

    def _choose(self, schema: Any) -> None:
        types = self._arrow.types
        names = schema.names
        if len(set(names)) < len(names):
            raise ValueError("two columns have one name")
        for name in KEY_NAMES:
            kind = schema.field(name).type if name in names else None
            if kind is not None and (types.is_integer(kind) or types.is_string(kind) or types.is_large_string(kind)):
                self._key_column = name
                break
        if bad := sorted(set(names) & RESERVED_FIELDS - {"__key__"}):
            raise ValueError(f"a column is called {bad[0]!r}, a name that penstock adds itself")
        wanted = self._fields
        self._columns = [name for name in names if wanted is None or _holds(name, wanted) or name == self._key_column]
        if not self._columns:
            raise ConfigError(f"{self._shard} has none of the columns {sorted(wanted or ())}", hint=f"it has {names}")

    def _unit(self, group: Struct, end_bytes: int) -> Unit:
        """A row group, as the footer describes it: ``RowGroup`` of parquet.thrift, by the numbers of its fields."""
        try:
            columns, size_bytes, rows_count = group[1], int(group[2]), int(group[3])
            if not 0 <= size_bytes <= BLOCK_BYTES_MAX or not 0 <= rows_count <= ROWS_MAX:
                raise ValueError(f"a row group of {rows_count} rows in {size_bytes} bytes")
            if not rows_count:
                self._decoded_bytes.append(0)
                return Unit((), 0, 0)  # an empty table has one, whose columns lie nowhere
            extents = [
                (column[3][3][0].decode("utf-8", "replace"), self._span(column[3], end_bytes), int(column[3][6]))
                for column in columns
            ]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"its footer describes no row group: {error!r}") from None
        wanted = [span for name, span, _ in extents if name in self._columns]
        self._decoded_bytes.append(sum(decoded_bytes for name, _, decoded_bytes in extents if name in self._columns))
        return Unit(merged(wanted, _GAP_BYTES), rows_count, sum(span.length_bytes for _, span, _ in extents))

    def _span(self, column: Struct, end_bytes: int) -> ByteRange:
        """Where a column of a row group lies. ``ColumnMetaData``."""
        start = min(column[9], column.get(11) or column[9])
        end = start + column[7]
        if not len(MAGIC) <= start <= end <= end_bytes:
            raise ValueError(f"a column lies at bytes [{start}, {end})")
        return ByteRange(start, end)

    def _pieces(self, unit_index: int, views: list[memoryview], first: int) -> Iterator[Piece]:
        unit, end = self.units[unit_index], 0
        for batch in self._batches(unit_index, views) if unit.samples_count else ():
            begin, end = end, end + batch.num_rows
            if end > first:  # what is passed over is decoded, and becomes no object
                rows = batch.slice(max(0, first - begin))
                yield Piece(self._samples(unit_index, rows, end - rows.num_rows), rows.nbytes)
        if end != unit.samples_count:
            raise ValueError(f"row group {unit_index} has {end} rows, and not the {unit.samples_count} of the footer")

    def _batches(self, unit_index: int, views: list[memoryview]) -> Iterator[Any]:
        """The wanted columns of a row group, decoded some rows at a time."""
        unit = self.units[unit_index]
        source = self._arrow.PythonFile(_Parts(self._size_bytes, unit.spans, views), mode="r")
        rows_max = max(
            1, min(PIECE_ROWS_MAX, PIECE_BYTES * unit.samples_count // max(1, self._decoded_bytes[unit_index]))
        )
        try:
            file = self._parquet.ParquetFile(
                source, metadata=self._metadata, pre_buffer=False, page_checksum_verification=True
            )
            yield from file.iter_batches(rows_max, row_groups=[unit_index], columns=self._columns, use_threads=False)
        except (self._arrow.ArrowException, OSError) as error:
            why = "; ".join(str(error).splitlines())
            raise ValueError(f"row group {unit_index} cannot be read: {why}") from None

    def _samples(self, unit_index: int, batch: Any, first: int) -> list[Sample]:
        """Rows that were decoded; the first of them is the row group's `first`-th."""
        rows: list[dict[str, memoryview]] = [{} for _ in range(batch.num_rows)]
        for name in self._columns:
            if name != "__key__" and (self._fields is None or _holds(name, self._fields)):
                for field, values in self._values(name, batch.column(name)):
                    for row, value in zip(rows, values, strict=True):
                        if value is not None:
                            row[field] = value
        offset_bytes = self.units[unit_index].spans[0].start
        keys = self._keys(self._first_rows[unit_index] + first, batch)
        return [Sample(key, row, offset_bytes) for key, row in zip(keys, rows, strict=True)]

    def _keys(self, first: int, batch: Any) -> Iterator[str]:
        stored = [None] * batch.num_rows if self._key_column is None else batch.column(self._key_column).to_pylist()
        return (f"{first + index:012d}" if key is None else str(key) for index, key in enumerate(stored))

    def _values(self, name: str, array: Any) -> Iterator[tuple[str, list[memoryview | None]]]:
        """(field, value of each row) of a column."""
        types, kind = self._arrow.types, array.type
        if types.is_dictionary(kind):
            array = array.dictionary_decode()
            kind = array.type
        if types.is_struct(kind):
            names = [kind.field(index).name for index in range(kind.num_fields)]
            for child, values in zip(names, array.flatten(), strict=True):
                media = child == "bytes" and set(names) == {"bytes", "path"}
                yield from self._values(name if media else f"{name}.{child}", values)
        elif (
            types.is_binary(kind) or types.is_string(kind) or types.is_large_binary(kind) or types.is_large_string(kind)
        ):
            yield name, _slices(array)
        elif _is_number(types, kind):
            yield name, _numbers(array)
        elif _is_list(types, kind) and _is_number(types, kind.value_type):
            yield name, _lists(array)
        else:
            yield name, [None if value is None else _as_json(value) for value in array.to_pylist()]


def _holds(column: str, fields: Collection[str]) -> bool:
    """Whether a column of the top level gives one of `fields`: by its own name, or that of a child."""
    return column in fields or any(field.startswith(f"{column}.") for field in fields)


def _is_number(types: Any, kind: Any) -> bool:
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _is_list(types: Any, kind: Any) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _valid(array: Any) -> list[bool] | None:
    """Of each row whether it is there; None: all are."""
    return array.is_valid().to_pylist() if array.null_count else None


def _masked(values: list[memoryview], array: Any) -> list[memoryview | None]:
    valid = _valid(array)
    if valid is None:
        return list(values)
    return [value if there else None for value, there in zip(values, valid, strict=True)]


def _slices(array: Any) -> list[memoryview | None]:
    """uint8[length] of each row, slices of the column's buffer."""
    if not len(array):
        return []
    wide = str(array.type).startswith("large")
    _, offsets_buffer, data = array.buffers()
    offsets = memoryview(offsets_buffer).cast("B").cast("q" if wide else "i")
    view = memoryview(data).cast("B") if data is not None else memoryview(b"")
    return _masked(_cut(view, offsets[array.offset : array.offset + len(array) + 1].tolist()), array)


def _numbers(array: Any) -> list[memoryview | None]:
    """type[1] of each row."""
    return _masked(_cut(_number_view(array), range(len(array) + 1)), array)


def _lists(array: Any) -> list[memoryview | None]:
    """type[count] of each row."""
    if str(array.type).startswith("fixed_size_list"):
        size = array.type.list_size
        ends: Sequence[int] = [(array.offset + index) * size for index in range(len(array) + 1)]
    else:
        ends = array.offsets.to_pylist()
    values = array.values
    if values.null_count:
        if str(values.type) not in {"float", "double", "halffloat"}:
            raise ValueError(f"a list of {values.type} has a null inside; only lists of floats may, as NaN")
        values = values.fill_null(float("nan"))
    return _masked(_cut(_number_view(values), ends), array)


def _number_view(array: Any) -> memoryview:
    """type[len(array)]; what is null is any number."""
    if array.null_count:
        array = array.fill_null(False if str(array.type) == "bool" else 0)
    return view_of_array(array.to_numpy(zero_copy_only=False))


def _cut(view: memoryview, ends: Sequence[int]) -> list[memoryview]:
    return [view[start:end] for start, end in pairwise(ends)]


def _as_json(value: Any) -> memoryview:
    return memoryview(json.dumps(value, default=str, ensure_ascii=False).encode("utf-8"))
