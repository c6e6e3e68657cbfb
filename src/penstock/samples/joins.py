"""Tables that are joined to samples by key: each is read once per process, held in memory and shared by all threads."""

from __future__ import annotations

import csv
import io
import os
import re
import threading
import weakref
from typing import TYPE_CHECKING, Any

from penstock import compose
from penstock.errors import ConfigError, DecodeError
from penstock.pipeline import Objects, Pipeline, Shards, dataset
from penstock.redaction import public_url
from penstock.text.json_text import parse_json
from penstock.version import install_hint

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.pipeline import Join

_ROWS_BATCH = 256
_NUMBERS = (
    (int, re.compile(r"[+-]?[0-9]{1,18}")),
    (float, re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|nan|inf|-inf")),
)
_shared: weakref.WeakValueDictionary[tuple[Any, ...], Table] = weakref.WeakValueDictionary()
_shared_lock = threading.Lock()


class Table:
    """The rows of one joined table, read when they are first needed.

    Args:
        join: The stage that describes the table.
        pipeline: The pipeline that joins it. A table on the same kind of store as its source is read with the connection
            options of that source.
    """

    def __init__(self, join: Join, pipeline: Pipeline) -> None:
        self._join = join
        self._pipeline = pipeline
        self._lock = threading.Lock()
        self._rows: dict[str, dict[str, Any]] | None = None

    def open(self) -> dict[str, dict[str, Any]]:
        """Return the rows by key; the first call reads them.

        Raises:
            StoreError: The table cannot be read.
            ConfigError: The table is larger than its bound, or lacks a column.
            DecodeError: The object is not a table, or two rows have the same key.
        """
        if self._rows is None:
            with self._lock:
                if self._rows is None:
                    self._rows = _loaded(self._join, self._pipeline)
        return self._rows

    def row(self, key: str) -> Mapping[str, Any] | None:
        """Return the columns of the row for `key`, or None if no row has this key."""
        return self.open().get(key)


def table_of(join: Join, pipeline: Pipeline) -> Table:
    """Return the table of a join. Everything in this process that joins the table shares it, such as the sources of a mix."""
    source = pipeline.source
    connection = source.connection if isinstance(source, Shards | Objects) else None
    with _shared_lock:
        # A forked child reads the table again: the fork may have happened while another thread was reading it.
        return _shared.setdefault((os.getpid(), join, connection), Table(join, pipeline))


def _loaded(join: Join, pipeline: Pipeline) -> dict[str, dict[str, Any]]:
    if isinstance(join.other, Pipeline):
        rows: Iterable[dict[str, Any]] = _rows_of_pipeline(join.other)
        on = "__key__"
    else:
        rows, on = _rows_of_table(join, _read(join, pipeline)), join.on
    table: dict[str, dict[str, Any]] = {}
    for row in rows:
        if on not in row:
            raise ConfigError(f"{join!r}: the table has no column {on!r}, but {', '.join(row)}")
        key = str(row.pop(on))
        if key in table:
            raise DecodeError(f"{join!r}: the table has two rows for one key", stage="join", sample_key=key)
        if join.fields is not None:
            if missing := [name for name in join.fields if name not in row]:
                raise ConfigError(f"{join!r}: a row lacks {missing[0]!r}; it has {', '.join(row)}")
            row = {name: row[name] for name in join.fields}  # noqa: PLW2901 - only the requested columns
        table[key] = row
    return table


def _read(join: Join, pipeline: Pipeline) -> bytes:
    url = join.other
    assert isinstance(url, str)
    root, key = compose.split(url)
    source = pipeline.source
    options = {}
    if isinstance(source, Shards | Objects):
        beside = next(iter(source.urls), "")
        options = source.connection.given() if beside and _scheme(beside) == _scheme(url) else {}
    with compose.connect(root, **options) as store:
        size_bytes = store.stat(key).size_bytes
        if size_bytes is not None and size_bytes > join.bytes_max:
            raise ConfigError(
                f"{join!r}: the table has {size_bytes} bytes, more than bytes_max={join.bytes_max}",
                hint="raise bytes_max=, or store the fields in the shards",
            )
        return bytes(store.read(key).data)


def _scheme(url: str) -> str:
    return url.partition("://")[0] if "://" in url else "file"


def _rows_of_table(join: Join, data: bytes) -> Iterable[dict[str, Any]]:
    url = str(join.other)
    name = public_url(url).lower()
    try:
        if name.endswith(".parquet"):
            return _rows_of_parquet(data)
        if name.endswith((".jsonl", ".ndjson")):
            rows: list[dict[str, Any]] = [parse_json(line) for line in data.splitlines() if line.strip()]
            if bad := [row for row in rows if not isinstance(row, dict)]:
                raise ValueError(f"the row {bad[0]!r:.40} is not a JSON object")
            return rows
        return _rows_of_csv(data, "\t" if name.endswith(".tsv") else ",", text=join.on)
    except (ValueError, csv.Error) as error:
        raise DecodeError(f"the table cannot be read: {error}", stage="join", shard=url) from error


def _rows_of_parquet(data: bytes) -> list[dict[str, Any]]:
    try:
        from penstock.formats.arrow_values import rows_of_table
    except ImportError:
        raise ConfigError(
            "a Parquet table needs pyarrow, which is not installed", hint=install_hint("parquet")
        ) from None
    return rows_of_table(data)


def _rows_of_csv(data: bytes, delimiter: str, *, text: str) -> list[dict[str, Any]]:
    """Parse CSV. It has no types, so a column whose values are all numbers becomes numbers; the key column stays text."""
    reader = csv.DictReader(io.StringIO(data.decode("utf-8-sig"), newline=""), delimiter=delimiter, strict=True)
    rows: list[dict[str, Any]] = list(reader)
    names = reader.fieldnames or ()
    if twice := [name for name in names if list(names).count(name) > 1]:
        raise ValueError(f"two columns are called {twice[0]!r}")
    if any(None in row or None in row.values() for row in rows):
        raise ValueError("a row has more or fewer columns than the first")
    for name in names:
        values = [row[name] for row in rows]
        kind = next((kind for kind, pattern in _NUMBERS if all(map(pattern.fullmatch, values))), None)
        if name != text and kind is not None:
            for row in rows:
                row[name] = kind(row[name])
    return rows


def _rows_of_pipeline(pipeline: Pipeline) -> Iterable[dict[str, Any]]:
    for batch in dataset.iter_batches(pipeline.batch(_ROWS_BATCH)):
        names = [name for name in batch if name not in ("__shard__", "__position__", "__valid__")]
        for values in zip(*(batch[name] for name in names), strict=True):
            yield dict(zip(names, values, strict=True))
