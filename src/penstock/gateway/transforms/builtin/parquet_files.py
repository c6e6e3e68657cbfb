"""``parquet``: some columns and some rows of a Parquet file, read by ranges, row group by row group."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from penstock.errors import ConfigError, DataError
from penstock.formats.parquet import ROW_GROUP_BYTES, ByteSink, ParquetReader
from penstock.formats.ranged import look_into
from penstock.gateway.transforms.authoring import transform
from penstock.gateway.transforms.builtin.filters import RowFilter
from penstock.gateway.transforms.builtin.recordwise import checked_names
from penstock.gateway.transforms.builtin.streams import PieceCollector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from penstock.gateway.transforms.authoring import SourceReader, TransformRequest
    from penstock.types import Buffer, ByteRange

ROWS_MAX = 1 << 20
"""Most rows of a row group that is written."""

_COMPARED = ("BOOLEAN", "INT32", "INT64", "DOUBLE", "BYTE_ARRAY")
# Types whose statistics are compared. Of float32, pyarrow rounds the constant; decimals and times differ from Python's numbers.


def _check(arguments: Mapping[str, Any]) -> None:
    if arguments["columns"]:
        checked_names(arguments["columns"], "columns")
    if arguments["filter"]:
        RowFilter(arguments["filter"])


@transform(version="1", content_type="application/vnd.apache.parquet", rest="columns", check=_check)
def parquet(
    reader: SourceReader,
    request: TransformRequest,
    *,
    columns: tuple[str, ...] = (),
    filter: str = "",  # noqa: A002 - the word that users know
    compression: Literal["snappy", "zstd", "gzip", "none"] = "snappy",
) -> Iterator[Buffer]:
    """Keep some columns and some rows of a Parquet file. Only what they need is read.

    Args:
        reader: A Parquet file, which must be readable by ranges: the source itself, and not the result of another transform.
        request: The request.
        columns: Top-level columns that remain, in this order; empty keeps all.
        filter: Rows that remain: ``split == "train" and width >= 256``. Row groups whose statistics exclude it are not read.
        compression: Compression of the pages that are written.
    """
    if not reader.seekable() or reader.size_bytes is None:
        raise ConfigError("parquet reads by ranges, so it must be the first transform of a pipeline")
    return projected(
        lambda span: reader.read_range(span.start, span.end),
        source=reader.key,
        size_bytes=reader.size_bytes,
        columns=columns,
        row_filter=RowFilter(filter) if filter else None,
        compression=compression,
    )


def projected(
    read: Callable[[ByteRange], Buffer],
    *,
    source: str,
    size_bytes: int,
    columns: tuple[str, ...] = (),
    row_filter: RowFilter | None = None,
    compression: str = "snappy",
) -> Iterator[Buffer]:
    """Iterate over a Parquet file with some columns and rows of another.

    Args:
        read: Returns the bytes of a span of the source.
        source: Key of the source, for errors.
        size_bytes: Size in bytes.
        columns: Top-level columns that remain; empty for all.
        row_filter: Rows that remain; None for all.
        compression: Compression of the pages.

    Raises:
        CorruptShardError: The source is damaged.
        DataError: It lacks a column.

    Cost: two reads for the footer, then one or a few for each row group; holds one row group as stored, and 16 MiB of rows
        several times.
    """
    needed = None if not columns else {*columns, *(row_filter.columns if row_filter else ())}
    file = ParquetReader(source, size_bytes=size_bytes, fields=needed)
    try:
        look_into(file, read)
    except ConfigError as error:
        raise DataError(error.what, hint=error.hint, shard=source, offset_bytes=0) from None
    schema = file.metadata.schema.to_arrow_schema()
    missing = [name for name in (*columns, *(row_filter.columns if row_filter else ())) if name not in schema.names]
    if missing:
        raise DataError(f"it has no column {missing[0]!r}, only {schema.names}", shard=source, offset_bytes=0)
    writer = _Writer(schema, columns or tuple(schema.names), compression)
    for unit_index, unit in enumerate(file.units):
        if row_filter is not None and not row_filter.may_match(lambda path: _bounds(file.metadata, unit_index, path)):  # noqa: B023
            continue
        parts = [read(span) for span in unit.spans]
        for batch in file.record_batches(unit_index, parts):
            writer.add(batch, row_filter, source)
            yield from writer.output.take()
    writer.finish()
    yield from writer.output.take()


class _Writer:
    """Writes record batches as a Parquet file with row groups of about 16 MiB.

    Args:
        schema: Schema of the source.
        columns: Names of the columns that are written, in order.
        compression: Compression of the pages.

    Attributes:
        output: Bytes of the Parquet file that were written.
    """

    def __init__(self, schema: Any, columns: tuple[str, ...], compression: str) -> None:
        self._arrow: Any = import_module("pyarrow")
        self.output = PieceCollector()
        self._schema = self._arrow.schema([schema.field(name) for name in columns], metadata=None)
        self._waiting: list[Any] = []
        self._waiting_bytes = 0
        self._file = import_module("pyarrow.parquet").ParquetWriter(
            ByteSink(lambda data: self.output.write(bytes(data))),
            self._schema,
            compression=compression,
            write_page_checksum=True,
        )

    def add(self, batch: Any, row_filter: RowFilter | None, source: str) -> None:
        """Append the rows of a batch that match."""
        table = self._arrow.Table.from_batches([batch])
        if row_filter is not None:
            try:
                table = table.filter(row_filter.expression())
            except self._arrow.ArrowException as error:
                raise DataError(f"the filter does not fit the columns: {error}", shard=source, offset_bytes=0) from None
        table = table.select(self._schema.names).cast(self._schema)
        if not table.num_rows:
            return
        self._waiting.append(table)
        self._waiting_bytes += table.nbytes
        if self._waiting_bytes >= ROW_GROUP_BYTES:
            self._flush()

    def finish(self) -> None:
        """Write the last row group and the footer."""
        self._flush()
        self._file.close()

    def _flush(self) -> None:
        if self._waiting:
            self._file.write_table(self._arrow.concat_tables(self._waiting), row_group_size=ROWS_MAX)
        self._waiting, self._waiting_bytes = [], 0


def _bounds(metadata: Any, group_index: int, path: tuple[str, ...]) -> tuple[Any, Any] | None:
    """Return the smallest and the largest value of a column in a row group; None if they are not known."""
    group = metadata.row_group(group_index)
    wanted = ".".join(path)
    for index in range(group.num_columns):
        column = group.column(index)
        if column.path_in_schema == wanted:
            found = column.statistics
            if found is None or not found.has_min_max or column.physical_type not in _COMPARED:
                return None
            low, high = found.min, found.max
            is_known = type(low) in {int, float, str, bool} and low <= high  # NaN is neither
            return (low, high) if is_known else None
    return None
