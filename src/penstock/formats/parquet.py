"""Parquet shards, with pyarrow: read, first the footer and then the wanted columns of row groups by range, and written.

One row is one sample, and a row group is a unit: its bytes are fetched together, and its rows are decoded a few thousand at
a time. ``arrow_values.py`` defines the fields of a row, and ``parquet_headers.py`` bounds the memory that they take.

The key of a sample is taken from the first of the columns ``__key__``, ``key`` and ``id`` that holds strings or integers.
Without such a column it is the row's number in the shard, in twelve digits.

A shard that is written has one column for each field and for ``__key__``, in row groups of 16 MiB. The first sample decides
the columns: bytes become ``binary``, text ``string``, whole numbers ``int64``, other numbers ``double``, and arrays and
lists of numbers become lists of these. All further samples must have the same columns. The same samples give the same bytes
with the same version of pyarrow, whose name and version each file contains.
"""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from io import RawIOBase
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from penstock.config import MIB
from penstock.errors import ConfigError, UnsupportedFormatError
from penstock.formats.columnar import Samples, kind_of
from penstock.formats.jsonl import KEY_NAMES
from penstock.formats.parquet_headers import ColumnChunk, Struct, bounded_reading, read_struct
from penstock.formats.ranged import TAIL_BYTES, DecodedPiece, RangedReader, Unit
from penstock.formats.sample import RESERVED_FIELDS, Sample, is_bytes
from penstock.memory.buffers import byte_view
from penstock.memory.ranges import REQUEST_COST_BYTES, merged_spans
from penstock.memory.raw_file import RawFile
from penstock.types import ByteRange
from penstock.version import install_hint

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence

    from penstock.types import Buffer

MAGIC = b"PAR1"
_TRAILER_BYTES = 8
BLOCK_BYTES_MAX = 8 << 30
"""Largest row group after decompression. A footer that announces more is treated as corrupt."""

ROWS_MAX = 1 << 28
"""Most rows of a row group, because each becomes a Python object."""

PIECE_BYTES = 4 << 20
"""Approximate number of bytes decoded at a time, because a row group may have gigabytes."""

PIECE_ROWS_MAX = 2048
"""Most rows decoded at a time, because each also takes a few hundred bytes of Python objects."""

CODECS = {"gz": "gzip", "zst": "zstd", "snappy": "snappy"}
"""Compression of the pages, by the word after ``parquet.``."""

ROW_GROUP_BYTES = 16 * MIB
"""Bytes of values in a row group: the writer holds that many, and a reader that starts inside a shard reads that many."""

COPIES = 6
"""Copies of a row group in memory while it is written: values, Arrow's array and Parquet's pages; the last two grow by
doubling."""

_LZO = 3  # a codec that pyarrow does not support


def is_parquet(head: bytes) -> bool:
    """Whether `head` begins like a Parquet file."""
    return head.startswith(MAGIC)


class _Parts(RawFile):
    """A seekable file for pyarrow of which only some spans are present."""

    def __init__(self, size_bytes: int, spans: Sequence[ByteRange], views: Sequence[memoryview]) -> None:
        self._size_bytes = size_bytes
        self._parts = list(zip(spans, views, strict=True))

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def view(self, span: ByteRange) -> memoryview:
        """Return the bytes of `span`, which must lie in one of the present spans."""
        within, view = next(part for part in self._parts if part[0].start <= span.start and span.end <= part[0].end)
        return view[span.start - within.start : span.end - within.start]

    def read(self, size: int = -1) -> bytes:
        end = self._size_bytes if size < 0 else min(self._position + size, self._size_bytes)
        for span, view in self._parts:
            if span.start <= self._position and end <= span.end:
                data = view[self._position - span.start : end - span.start]
                self._position = end
                return data  # type: ignore[return-value]  # pyarrow takes any buffer, and copies none
        raise OSError(f"bytes [{self._position}, {end}) are outside of the columns that the footer names")


class ParquetReader(RangedReader):
    """Reads the rows of one Parquet shard, a row group at a time, with the interface of ``ranged.py``.

    Cost: one read for the footer, or two if it is larger than 64 KiB. Reading a unit holds its row group as stored, and
        about ``PIECE_BYTES`` of decoded rows.
    """

    def __init__(self, shard: str, **options: Any) -> None:
        super().__init__(shard, **options)
        self._arrow, self._parquet = _pyarrow("reading Parquet needs the package pyarrow")
        self._table: Any = import_module("penstock.formats.arrow_values")
        self._metadata: Any = None
        self._columns: list[str] = []  # names of the top-level columns to read
        self._value_columns: list[str] = []  # those of them that give fields
        self._key_column: str | None = None
        self._first_rows: list[int] = []
        self._chunks: list[list[tuple[ColumnChunk, ByteRange]]] = []  # for each row group, the wanted columns

    def _look(self) -> Generator[ByteRange, Buffer, None]:
        if not self._size_bytes:
            raise self._corrupt("not a Parquet file: it has 0 bytes", 0)
        start = max(0, self._size_bytes - TAIL_BYTES)
        tail = bytes((yield ByteRange(start, self._size_bytes)))
        if tail[-4:] == b"PARE":
            raise self._unsupported("the Parquet shard is encrypted", self._size_bytes - 4)
        if tail[-4:] != MAGIC or len(tail) < len(MAGIC) + _TRAILER_BYTES:
            raise self._corrupt(f"not a Parquet file: it does not end in {MAGIC!r}", max(0, self._size_bytes - 4))
        footer_bytes = int.from_bytes(tail[-_TRAILER_BYTES:-4], "little") + _TRAILER_BYTES
        if footer_bytes > self._size_bytes - len(MAGIC):
            raise self._corrupt(
                f"not a Parquet file: a footer of {footer_bytes} bytes", self._size_bytes - _TRAILER_BYTES
            )
        begin_bytes = self._size_bytes - footer_bytes
        footer = (
            tail[begin_bytes - start :]
            if begin_bytes >= start
            else bytes((yield ByteRange(begin_bytes, self._size_bytes)))
        )
        try:
            # Parsed before pyarrow sees it, because pyarrow does not limit the nesting depth.
            groups = read_struct(footer).get(4) or []
            self._metadata = self._parquet.read_metadata(self._arrow.BufferReader(MAGIC + footer))
            self._choose(self._metadata.schema.to_arrow_schema())
            self.units = tuple(self._unit(group, begin_bytes) for group in groups)
            if len(groups) != self._metadata.num_row_groups:
                raise ValueError(f"{len(groups)} row groups, pyarrow says {self._metadata.num_row_groups}")
        except (ConfigError, UnsupportedFormatError):
            raise
        except (self._arrow.ArrowException, OSError, ValueError) as error:
            raise self._corrupt(f"not a Parquet file: {error}", begin_bytes) from None
        counts = (unit.samples_count or 0 for unit in self.units)
        self._first_rows = list(accumulate(counts, initial=0))

    def _choose(self, schema: Any) -> None:
        """Choose the columns to read and the column of the key.

        Raises:
            ConfigError: The shard has none of the wanted fields.
            UnsupportedFormatError: Two columns would give the same field, or a field has a name that penstock reserves.
        """
        names = schema.names
        if bad := sorted(set(names) & RESERVED_FIELDS - {"__key__"}):
            raise self._unsupported(f"a column is called {bad[0]!r}, a name that penstock adds itself", None)
        self._key_column = next(
            (name for name in KEY_NAMES if name in names and self._table.is_key(schema.field(name).type)), None
        )
        wanted = self._fields
        self._columns = [name for name in names if wanted is None or _holds(name, wanted) or name == self._key_column]
        self._value_columns = [name for name in names if name != "__key__" and (wanted is None or _holds(name, wanted))]
        if not self._columns:
            raise ConfigError(f"{self._shard} has none of the columns {sorted(wanted or ())}", hint=f"it has {names}")
        fields = Counter(
            field
            for each in schema
            if each.name in self._columns
            for field in self._table.fields_of_type(each.name, each.type)
        )
        field, count = fields.most_common(1)[0]
        if count > 1:
            raise self._unsupported(
                f"{count} columns give the field {field!r}",
                None,
                hint="the child c of a struct s is the field s.c; rename one, or .select() other fields",
            )

    def _unit(self, group: Struct, end_bytes: int) -> Unit:
        """Parse the footer's description of a row group: ``RowGroup`` of parquet.thrift, by field number."""
        schema = self._metadata.schema
        try:
            columns, size_bytes, rows_count = group[1], int(group[2]), int(group[3])
            if not 0 <= size_bytes <= BLOCK_BYTES_MAX or not 0 <= rows_count <= ROWS_MAX:
                raise ValueError(f"a row group of {rows_count} rows in {size_bytes} bytes")
            if not rows_count:
                self._chunks.append([])
                return Unit((), 0, 0)  # an empty table has one row group, whose columns have no offset
            if len(columns) != len(schema):
                raise ValueError(f"a row group of {len(columns)} columns, and a schema of {len(schema)}")
            chunks = [
                (name, *self._chunk(column, schema.column(index), end_bytes))
                for index, column in enumerate(columns)
                for name in [column[3][3][0].decode("utf-8", "replace")]
            ]
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"its footer describes no row group: {error!r}") from None
        wanted = [(chunk, span) for name, chunk, span in chunks if name in self._columns]
        self._chunks.append(wanted)
        spans = [span for _, span in wanted]
        return Unit(
            merged_spans(spans, gap_bytes=REQUEST_COST_BYTES),
            rows_count,
            sum(span.length_bytes for _, _, span in chunks),
        )

    def _chunk(self, column: Struct, described: Any, end_bytes: int) -> tuple[ColumnChunk, ByteRange]:
        """Return a column of a row group and its span, from ``ColumnChunk`` and ``ColumnMetaData``."""
        if column.get(1):
            raise self._unsupported(
                "its columns lie in other files", end_bytes, hint="read those files, and not this one"
            )
        if column.get(8):
            raise self._unsupported(f"the column {described.path!r} is encrypted", end_bytes)
        data = column[3]
        if data[4] == _LZO:
            raise self._unsupported(f"the column {described.path!r} is compressed by LZO", end_bytes)
        start = min(data[9], data.get(11) or data[9])
        end = start + data[7]
        if not len(MAGIC) <= start <= end <= end_bytes:
            raise ValueError(f"a column lies at bytes [{start}, {end})")
        is_repeated = described.max_repetition_level > 0
        width = described.length if described.physical_type == "FIXED_LEN_BYTE_ARRAY" else 0
        chunk = ColumnChunk(described.path, described.physical_type, width, is_repeated, data[5], data[6])
        return chunk, ByteRange(start, end)

    def _pieces(self, unit_index: int, views: list[memoryview], first: int) -> Iterator[DecodedPiece]:
        end = 0
        for batch in self._batches(unit_index, views):
            begin, end = end, end + batch.num_rows
            if end > first:  # rows before `first` are decoded, but no samples are made of them
                rows = batch.slice(max(0, first - begin))
                at = end - rows.num_rows
                columns = self._columns_of(unit_index, rows, at) if self._in_columns else None
                if columns is not None:
                    yield DecodedPiece(columns, 0)
                else:
                    yield DecodedPiece(self._samples(unit_index, rows, at), rows.nbytes)

    @property
    def metadata(self) -> Any:
        """The footer, as pyarrow's ``FileMetaData``; None before ``look`` has ended."""
        return self._metadata

    def record_batches(self, unit_index: int, parts: Sequence[Buffer]) -> Iterator[Any]:
        """Yield the rows of a row group as pyarrow's ``RecordBatch`` with the wanted columns, some rows at a time.

        The column of the key is among them, as for ``pieces``.

        Args:
            unit_index: Index in ``units``.
            parts: The bytes of each of the unit's spans.

        Raises:
            CorruptShardError: The row group is damaged. The rows before the damage have been yielded.
        """
        try:
            yield from self._batches(unit_index, [byte_view(part) for part in parts])
        except UnsupportedFormatError as error:
            error.shard = error.shard or self._shard
            raise
        except ValueError as error:
            raise self._corrupt(str(error), self.units[unit_index].spans[0].start) from None

    def _batches(self, unit_index: int, views: list[memoryview]) -> Iterator[Any]:
        """Decode the wanted columns of a row group, some rows at a time."""
        unit, rows_count = self.units[unit_index], 0
        if not unit.samples_count:
            return
        parts = _Parts(self._size_bytes, unit.spans, views)
        chunks = self._chunks[unit_index]
        reading = bounded_reading(
            [chunk for chunk, _ in chunks], [parts.view(span) for _, span in chunks], rows_max=PIECE_ROWS_MAX
        )
        rows_max = min(reading.rows_max, PIECE_BYTES * unit.samples_count // max(1, reading.decoded_bytes))
        try:
            file = self._parquet.ParquetFile(
                self._arrow.PythonFile(parts, mode="r"),
                metadata=self._metadata,
                read_dictionary=reading.dictionaries,
                pre_buffer=False,
                page_checksum_verification=True,
            )
            batches = file.iter_batches(
                max(1, rows_max), row_groups=[unit_index], columns=self._columns, use_threads=False
            )
            for batch in batches:
                rows_count += batch.num_rows
                yield batch
        except (self._arrow.ArrowException, OSError) as error:
            why = "; ".join(str(error).splitlines())
            raise ValueError(f"row group {unit_index} cannot be read: {why}") from None
        if rows_count != unit.samples_count:
            what = f"row group {unit_index} has {rows_count} rows, and not the {unit.samples_count} of the footer"
            raise ValueError(what)

    def _samples(self, unit_index: int, batch: Any, first: int) -> list[Sample]:
        """Make samples of decoded rows; the first of them is row `first` of the row group."""
        rows: list[dict[str, memoryview]] = [{} for _ in range(batch.num_rows)]
        for name in self._value_columns:
            for field, values in self._table.values_of(name, batch.column(name)):
                for row, value in zip(rows, values, strict=True):
                    if value is not None:
                        row[field] = value
        offset_bytes = self.units[unit_index].spans[0].start
        keys = self._keys(self._first_rows[unit_index] + first, batch)
        return [Sample(key, row, offset_bytes) for key, row in zip(keys, rows, strict=True)]

    def _columns_of(self, unit_index: int, batch: Any, first: int) -> Samples | None:
        """Return what ``_samples`` does, in columns; None if a column is neither of bytes nor of numbers."""
        names = self._value_columns
        columns = [self._table.column_of(batch.column(name)) for name in names]
        if not names or any(column is None for column in columns):
            return None
        arrays = {name: column for name, column in zip(names, columns, strict=True) if not isinstance(column, list)}
        optional = tuple(name for name in arrays if batch.schema.field(name).nullable)
        columns += [batch.column(name).is_valid().to_numpy(zero_copy_only=False) for name in optional]
        described = tuple((name, column.dtype.str, column.shape[1:]) for name, column in arrays.items())
        keys = list(self._keys(self._first_rows[unit_index] + first, batch))
        places = [[self.units[unit_index].spans[0].start] * len(keys), [None] * len(keys)]
        return Samples(kind_of(tuple(names), frozenset(), described, optional), [keys, *places, *columns])

    def _keys(self, first: int, batch: Any) -> Iterator[str]:
        stored = [None] * batch.num_rows if self._key_column is None else batch.column(self._key_column).to_pylist()
        return (f"{first + index:012d}" if key is None else str(key) for index, key in enumerate(stored))


def _holds(column: str, fields: Collection[str]) -> bool:
    """Whether a top-level column gives one of `fields`, by its own name or by that of a child."""
    return column in fields or any(field.startswith(f"{column}.") for field in fields)


def _pyarrow(refusal: str) -> tuple[Any, Any]:
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise ConfigError(refusal, hint=install_hint("parquet")) from None


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


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
        """Return the current offset."""
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
        self._pyarrow, self._parquet = _pyarrow("Parquet needs pyarrow")
        self._sink = ByteSink(write)
        self._schema: Any = None
        self._writer: Any = None
        self._columns: dict[str, list[Any]] = {}
        self._held_bytes = 0
        self._taken_bytes = 0

    def add(self, sample: Mapping[str, Any]) -> ByteRange:
        """Append one sample.

        Returns:
            Approximate bounds of its bytes; the exact offset of a row is undefined.

        Raises:
            ConfigError: The sample's fields differ from the first sample's, in name or type.
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
    if hasattr(value, "dtype") or (isinstance(value, memoryview) and not is_bytes(value)):
        return value.tolist()
    return bytes(value) if isinstance(value, bytearray | memoryview) else value


def _size_bytes(value: Any) -> int:
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, list):
        return sum(map(_size_bytes, value))
    return len(value.encode()) if isinstance(value, str) else 8
