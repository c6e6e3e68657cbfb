"""Reading tables that describe samples: CSV or TSV with a header, JSON lines, and Parquet."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError, DataError
from penstock.pack.fields import FieldSpec
from penstock.redaction import public_url
from penstock.text.json_text import parse_json
from penstock.version import install_hint

if TYPE_CHECKING:
    from penstock.types import Buffer

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
_FILE_COLUMNS = ("file", "path", "url", "uri", "filename", "file_name", "image", "image_path")


def is_table_name(url: str) -> bool:
    """Return whether an object of this name is a table."""
    return public_url(url).lower().endswith(SUFFIXES)


def read_table(data: Buffer, *, url: str) -> list[dict[str, Any]]:
    """Return the rows of a table in its order; the name's suffix decides how it is read.

    Raises:
        DataError: The data is not such a table; the message names the line if one is at fault.
        ConfigError: The table is Parquet, and pyarrow is not installed.
    """
    name = public_url(url).lower()
    if name.endswith(".parquet"):
        return _parquet(data, url)
    try:
        text = bytes(data).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"the table is not UTF-8 ({error})", shard=url) from error
    if name.endswith((".csv", ".tsv")):
        return _csv(text, "\t" if name.endswith(".tsv") else ",", url)
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise DataError(f"line {number} of the table is not JSON ({error})", shard=url) from error
        if not isinstance(row, dict):
            raise DataError(f"line {number} of the table is not a JSON object", shard=url)
        rows.append(row)
    return rows


def _csv(text: str, delimiter: str, url: str) -> list[dict[str, Any]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows = []
    try:
        for row in reader:
            if None in row or None in row.values():
                raise DataError(
                    f"line {reader.line_num} of the table does not have as many values as the header", shard=url
                )
            rows.append(dict(row))
    except csv.Error as error:
        raise DataError(f"line {reader.line_num} of the table: {error}", shard=url) from error
    return rows


def _parquet(data: Buffer, url: str) -> list[dict[str, Any]]:
    try:
        from penstock.formats.arrow_values import rows_of_table
    except ImportError as error:
        raise ConfigError("Parquet needs pyarrow", hint=install_hint("parquet")) from error
    try:
        return rows_of_table(data)
    except ValueError as error:
        raise DataError(f"the table cannot be read as Parquet ({error})", shard=url) from error


def guess_specs(row: dict[str, Any], *, url: str) -> tuple[FieldSpec, ...]:
    """Return the fields of a table for which none were given: the file from a column with a usual name, and all others.

    Args:
        row: First row of the table.
        url: URL of the table, for errors.

    Raises:
        ConfigError: No column has a usual name for files.
    """
    column = next((name for name in _FILE_COLUMNS if name in row), None)
    if column is None:
        raise ConfigError(
            f"no column of {url} ({', '.join(map(str, row))}) has a usual name for files",
            hint="name it: --fields path=jpg:file,label=cls:int",
        )
    base = str(row[column]).rpartition("/")[2]
    extension = base.partition(".")[2].lower() or "data"
    others = [FieldSpec(name, name.lower(), None) for name in row if name not in (column, "__key__")]
    return (FieldSpec(column, extension, "file"), *others)
