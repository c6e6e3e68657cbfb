"""Sources whose samples, records, lines or rows are changed one by one: their formats, and ``jsonl2csv``."""

from __future__ import annotations

import codecs
import csv
import io
import json
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from penstock.config import MIB
from penstock.errors import ConfigError, CorruptShardError, DataError, UnsupportedFormatError
from penstock.formats import TarWriter, TFRecordWriter, detect
from penstock.formats.tfrecord import stored_features
from penstock.gateway.transforms.authoring import transform
from penstock.gateway.transforms.builtin.streams import (
    PIECE_BYTES,
    PieceCollector,
    compression_of,
    decompressed,
    located,
    parser_for,
    peek,
    plain_key,
    samples_in,
    singly,
)
from penstock.pack.written_formats import base_format

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from penstock.formats.sample import Sample
    from penstock.gateway.transforms.authoring import SourceReader, TransformRequest
    from penstock.types import Buffer

SourceFormat: TypeAlias = Literal["auto", "tar", "tfrecord", "jsonl", "csv"]

CONTENT_TYPES = {
    "tar": "application/x-tar",
    "tfrecord": "application/x-tfrecord",
    "jsonl": "application/x-ndjson",
    "csv": "text/csv; charset=utf-8",
}

CSV_FIELD_BYTES_MAX = 16 * MIB
"""Largest field of a CSV row."""

_CSV_SUFFIXES = (".csv", ".csv.gz", ".csv.zst")


def content_type_of(format_name: str, compression: str) -> str:
    """Return the content type of an object of a format."""
    return {"": CONTENT_TYPES[format_name], "gz": "application/gzip", "zst": "application/zstd"}[compression]


def format_of(said: SourceFormat, head: bytes, source: str, known: tuple[str, ...]) -> str:
    """Return the format of a source without its compression.

    Args:
        said: The format, or ``"auto"`` to decide it by the first bytes and the name.
        head: First bytes of the source.
        source: Key of the source.
        known: The formats that the transform takes.

    Raises:
        UnsupportedFormatError: It is of no format that the transform takes.
    """
    found: str = said
    if said == "auto":
        found = "csv" if source.lower().endswith(_CSV_SUFFIXES) else base_format(detect(source, head))
    if found not in known:
        raise UnsupportedFormatError(
            f"its format is {found}, but this transform takes {', '.join(known)}", shard=source, offset_bytes=0
        )
    return found


# ── tar ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def changed_tar(
    chunks: Iterable[Buffer], head: bytes, source: str, change: Callable[[Sample], dict[str, Buffer]]
) -> Iterator[Buffer]:
    """Iterate over a tar whose samples have other members.

    Args:
        chunks: The tar.
        head: The first bytes of the source.
        source: Key of the source, for errors.
        change: Returns the members of a sample, by name; a sample without members is left out.

    Raises:
        DataError: The tar is damaged, or the members cannot be written.
    """
    output = PieceCollector()
    writer = TarWriter(output.write)
    for group in samples_in(parser_for("tar", head, source), chunks):
        for sample in singly(group):
            with located(source, sample):
                if members := change(sample):
                    writer.add({"__key__": plain_key(sample.key), **members})
            if output.held_bytes >= PIECE_BYTES:
                yield from output.take()
        yield from output.take()
    writer.finish()
    yield from output.take()


# ── TFRecord ────────────────────────────────────────────────────────────────────────────────────────────────────────


def changed_examples(
    chunks: Iterable[Buffer], head: bytes, source: str, change: Callable[[Sequence[tuple[str, Buffer]]], list[Buffer]]
) -> Iterator[Buffer]:
    """Iterate over TFRecords whose Examples have other features; those that stay keep their bytes.

    Args:
        chunks: TFRecords of Examples.
        head: The first bytes of the source.
        source: Key of the source, for errors.
        change: Returns the serialised features of an Example; its argument has them with their names.

    Raises:
        DataError: The TFRecords are damaged, or a record is not an Example.
    """
    output = PieceCollector()
    writer = TFRecordWriter(output.write)
    for group in samples_in(parser_for("tfrecord-raw", head, source), chunks):
        for sample in singly(group):
            with located(source, sample):
                try:
                    features = list(stored_features(sample.fields["record"]))
                except ValueError as error:
                    raise DataError(str(error)) from None
                writer.add({"record": joined_example(change(features))})
        yield from output.take()


def joined_example(features: list[Buffer]) -> bytes:
    """Return an Example that has these serialised features."""
    from penstock.formats.writers import features_head

    return b"".join([features_head(sum(map(len, features))), *features])


# ── JSON lines ──────────────────────────────────────────────────────────────────────────────────────────────────────


def objects_in(chunks: Iterable[Buffer], head: bytes, source: str) -> Iterator[list[tuple[Sample, dict[str, Any]]]]:
    """Iterate over the objects of JSON lines, each with its line, in groups.

    Raises:
        CorruptShardError: A line is not a JSON object.
    """
    for group in samples_in(parser_for("jsonl", head, source), chunks):
        yield [(sample, json.loads(bytes(sample.fields["json"]))) for sample in singly(group)]


def json_line(value: dict[str, Any]) -> bytes:
    """Return an object as one line of JSON."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate, which only an escape can express
        return json.dumps(value, separators=(",", ":")).encode() + b"\n"


# ── CSV ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class CsvRows:
    """The rows of a CSV object in UTF-8 whose first row names the columns. Every row has as many fields as the first.

    Args:
        chunks: The object, which may be compressed as a whole.
        head: First bytes of the source.
        source: Key of the source, for errors.

    Attributes:
        header: Names of the columns.
        line_end: Line ends of the object: that of its first line.
    """

    def __init__(self, chunks: Iterable[Buffer], head: bytes, source: str) -> None:
        csv.field_size_limit(CSV_FIELD_BYTES_MAX)
        self._source = source
        self._chunks = decompressed(chunks, compression_of(head), source=source)
        self._offset_bytes = 0  # of the last line
        self._next_bytes = 0
        self.line_end = "\n"
        self._rows = csv.reader(self._lines(), strict=True)
        self.header: list[str] = next(self._read(), [])
        if not self.header:
            raise self._corrupt("it has no header")
        if len(set(self.header)) < len(self.header):
            raise self._corrupt("its header names a column twice")

    def __iter__(self) -> Iterator[list[str]]:
        """Iterate over the rows after the header.

        Raises:
            CorruptShardError: A row is malformed or of another length, or the text is not UTF-8.
        """
        for row in self._read():
            if len(row) != len(self.header):
                raise self._corrupt(f"a row has {len(row)} fields, and the header {len(self.header)}")
            yield row

    def _read(self) -> Iterator[list[str]]:
        try:
            for row in self._rows:
                if row:
                    yield row
        except csv.Error as error:
            raise self._corrupt(f"not CSV: {error}") from None
        except UnicodeDecodeError as error:
            raise self._corrupt(f"not UTF-8: {error.reason}") from None

    def _lines(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        tail: list[str] = []
        tail_length = 0
        for chunk in self._chunks:
            *lines, rest = decoder.decode(bytes(chunk)).split("\n")
            for line in lines:
                whole = "".join([*tail, line, "\n"])
                tail, tail_length = [], 0
                yield self._counted(whole)
            tail.append(rest)
            tail_length += len(rest)
            if tail_length > CSV_FIELD_BYTES_MAX:
                raise self._corrupt(f"a line of more than {CSV_FIELD_BYTES_MAX} characters")
        tail.append(decoder.decode(b"", final=True))
        if last := "".join(tail):
            yield self._counted(last)

    def _counted(self, line: str) -> str:
        if not self._next_bytes and line.endswith("\r\n"):
            self.line_end = "\r\n"
        self._offset_bytes, self._next_bytes = self._next_bytes, self._next_bytes + len(line.encode())
        return line

    def _corrupt(self, what: str) -> CorruptShardError:
        return CorruptShardError(what, shard=self._source, offset_bytes=self._offset_bytes)


class CsvText:
    """Rows written as CSV text in UTF-8, with quotes only where they are needed.

    Args:
        line_end: End of each line.
    """

    def __init__(self, line_end: str = "\n") -> None:
        self._text = io.StringIO()
        self._write = csv.writer(self._text, lineterminator=line_end).writerow

    def add(self, row: list[str]) -> None:
        """Append a row."""
        self._write(row)

    @property
    def is_full(self) -> bool:
        """Whether enough text was collected for one piece."""
        return self._text.tell() >= MIB // 4

    def take(self) -> bytes:
        """Return the text so far, as bytes."""
        data = self._text.getvalue().encode("utf-8", "surrogatepass")
        self._text.seek(0)
        self._text.truncate()
        return data


# ── names ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def checked_names(names: tuple[str, ...], argument: str) -> tuple[str, ...]:
    """Return the names that an argument lists.

    Raises:
        ConfigError: The list is empty, or a name occurs twice.
    """
    if not names or not all(names):
        raise ConfigError(f"{argument} must name at least one field", hint=f"{argument}=a,b.c")
    if len(set(names)) < len(names):
        raise ConfigError(f"{argument}={','.join(names)!r} names a field twice")
    return names


# ── jsonl2csv ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _check_columns(arguments: Mapping[str, Any]) -> None:
    if arguments["columns"]:
        checked_names(arguments["columns"], "columns")


@transform(version="1", content_type="text/csv; charset=utf-8", rest="columns", check=_check_columns)
def jsonl2csv(
    reader: SourceReader, request: TransformRequest, *, columns: tuple[str, ...] = (), header: bool = True
) -> Iterator[Buffer]:
    """Turn JSON lines into CSV. Objects become columns with dotted names; lists stay JSON; null is an empty field.

    Args:
        reader: JSON lines, which may be compressed as a whole by gzip or zstd.
        request: The request.
        columns: Columns and their order: ``id,user.name``; other names are left out. Without it, the first object decides,
            and a name that it lacks is an error.
        header: Whether the first line names the columns.
    """
    return jsonl_to_csv(reader, source=reader.key, columns=columns, header=header)


def jsonl_to_csv(
    chunks: Iterable[Buffer], *, source: str, columns: tuple[str, ...] = (), header: bool = True
) -> Iterator[Buffer]:
    """Iterate over the CSV of JSON lines; the arguments are those of ``jsonl2csv``.

    Raises:
        DataError: A line is not a JSON object, or has a name that the first one lacks.

    Cost: holds the lines of one chunk.
    """
    head, chunks = peek(chunks)
    text, names, is_first = CsvText(), columns, True
    for group in objects_in(chunks, head, source):
        for sample, value in group:
            with located(source, sample):
                cells = _cells(value)
                if is_first:
                    names = columns or tuple(cells)
                if is_first and header:
                    text.add(list(names))
                if not columns and not cells.keys() <= set(names):
                    raise DataError(
                        f"it has the names {sorted(cells.keys() - set(names))}, which the first object lacks",
                        hint="columns= names those that are taken",
                    )
            is_first = False
            text.add([cells.get(name, "") for name in names])
            if text.is_full:
                yield text.take()
    if is_first and columns and header:
        text.add(list(columns))
    yield text.take()


def _cells(value: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the values of an object as text, by dotted names."""
    found: dict[str, str] = {}
    for name, item in value.items():
        inner = _cells(item, f"{prefix}{name}.") if isinstance(item, dict) else {prefix + name: _cell(item)}
        if both := found.keys() & inner.keys():
            raise DataError(f"two values are both the column {min(both)!r}")
        found.update(inner)
    return found


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
