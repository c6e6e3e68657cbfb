"""``select`` and ``redact``: the members, features, names or columns that stay, and those that do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError, DataError
from penstock.formats.writers import feature_entry
from penstock.gateway.transforms.authoring import Response, transform
from penstock.gateway.transforms.builtin.recordwise import (
    CsvRows,
    CsvText,
    SourceFormat,
    changed_examples,
    changed_tar,
    checked_names,
    content_type_of,
    format_of,
    json_line,
    objects_in,
)
from penstock.gateway.transforms.builtin.streams import compressed, compression_of, located, peek

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from penstock.formats import Sample
    from penstock.gateway.transforms.authoring import SourceReader, TransformRequest
    from penstock.types import Buffer


def _check_select(arguments: Mapping[str, Any]) -> None:
    checked_names(arguments["extensions"], "extensions")


def _check_redact(arguments: Mapping[str, Any]) -> None:
    checked_names(arguments["fields"], "fields")
    if arguments["source_format"] == "tar":
        raise ConfigError("redact takes tfrecord, jsonl and csv", hint="select(...) leaves members of a tar out")


@transform(version="1", rest="extensions", check=_check_select)
def select(
    reader: SourceReader,
    request: TransformRequest,
    *,
    extensions: tuple[str, ...],
    source_format: SourceFormat = "auto",
) -> Response:
    """Keep some members of a tar, features of TFRecords, names of JSON lines or columns of CSV, and leave out the rest.

    Args:
        reader: A tar, TFRecords of Examples, JSON lines or CSV with a header; it may be compressed as a whole, and then
            the result is, too.
        request: The request.
        extensions: Extensions of members, or names of features, columns and of values in JSON: ``jpg,cls``. ``png`` also
            keeps ``seg.png``; ``a.b`` is the value ``b`` of the object ``a``.
        source_format: Format of the source; ``auto`` decides it by the first bytes and the name.
    """
    formats = {"tar": _select_tar, "tfrecord": _select_tfrecord, "jsonl": _select_jsonl, "csv": _select_csv}
    return _rewritten(reader, source_format, formats, extensions)


def _rewritten(
    reader: SourceReader, source_format: SourceFormat, formats: Mapping[str, Callable[..., Iterator[Buffer]]], *how: Any
) -> Response:
    """Return a source whose records were changed, in its own format and compression.

    Args:
        reader: The source.
        source_format: Format of the source; ``auto`` decides it.
        formats: A function that changes the records, for each format that the transform takes.
        how: Further arguments for it.

    Raises:
        DataError: The source is damaged, or does not have what is named.

    Cost: holds one record and, of small ones, those of one chunk.
    """
    head, chunks = peek(reader)
    found, compression = format_of(source_format, head, reader.key, tuple(formats)), compression_of(head)
    body = compressed(formats[found](chunks, head, *how, reader.key), compression)
    return Response(body=body, headers={"Content-Type": content_type_of(found, compression)})


def _select_tar(chunks: Iterable[Buffer], head: bytes, names: tuple[str, ...], source: str) -> Iterator[Buffer]:
    endings = tuple(name if name.startswith(".") else f".{name}" for name in map(str.lower, names))

    def change(sample: Sample) -> dict[str, Buffer]:
        return {name: value for name, value in sample.fields.items() if f".{name}".endswith(endings)}

    return changed_tar(chunks, head, source, change)


def _select_tfrecord(chunks: Iterable[Buffer], head: bytes, names: tuple[str, ...], source: str) -> Iterator[Buffer]:
    kept, is_first = frozenset(names), True

    def change(features: Sequence[tuple[str, Buffer]]) -> list[Buffer]:
        nonlocal is_first
        if is_first:
            _require_any(kept, [name for name, _ in features])
        is_first = False
        return [data for name, data in features if name in kept]

    return changed_examples(chunks, head, source, change)


def _select_jsonl(chunks: Iterable[Buffer], head: bytes, names: tuple[str, ...], source: str) -> Iterator[Buffer]:
    is_first = True
    for group in objects_in(chunks, head, source):
        lines = []
        for sample, value in group:
            taken = _picked(value, names)
            if is_first and not taken:
                with located(source, sample):
                    _require_any(frozenset(names), list(value))
            is_first = False
            lines.append(json_line(taken))
        yield b"".join(lines)


def _select_csv(chunks: Iterable[Buffer], head: bytes, names: tuple[str, ...], source: str) -> Iterator[Buffer]:
    rows = CsvRows(chunks, head, source)
    places = sorted(_place(name, rows.header, source) for name in names)
    return _csv_of(rows, lambda row: [row[place] for place in places])


def _picked(value: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Return the values of an object that some dotted names name, in their order in the object."""
    found: dict[str, Any] = {}
    for name, item in value.items():
        inner = tuple(each[len(name) + 1 :] for each in names if each.startswith(f"{name}."))
        if name in names:
            found[name] = item
        elif inner and isinstance(item, dict) and (picked := _picked(item, inner)):
            found[name] = picked
    return found


def _require_any(names: frozenset[str], present: list[str]) -> None:
    if names.isdisjoint(present):
        raise DataError(f"the first record has none of {sorted(names)}, only {sorted(present)}")


# ── redact ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@transform(version="1", rest="fields", check=_check_redact)
def redact(
    reader: SourceReader,
    request: TransformRequest,
    *,
    fields: tuple[str, ...],
    replacement: str | None = None,
    source_format: SourceFormat = "auto",
) -> Response:
    """Remove or replace values of JSON lines, CSV with a header, or TFRecords of Examples.

    Args:
        reader: JSON lines, CSV or TFRecords; it may be compressed as a whole, and then the result is, too.
        request: The request.
        fields: Names of values in JSON, columns or features: ``name,user.email``. With dots they name values in objects, and
            in all objects of a list.
        replacement: Text that takes the place of the values; without it, names, columns and features disappear.
        source_format: Format of the source; ``auto`` decides it by the first bytes and the name.
    """
    formats = {"tfrecord": _redact_tfrecord, "jsonl": _redact_jsonl, "csv": _redact_csv}
    return _rewritten(reader, source_format, formats, fields, replacement)


def _redact_tfrecord(
    chunks: Iterable[Buffer], head: bytes, names: tuple[str, ...], replacement: str | None, source: str
) -> Iterator[Buffer]:
    instead = {name: b"" if replacement is None else b"".join(feature_entry(name, replacement)) for name in names}

    def change(features: Sequence[tuple[str, Buffer]]) -> list[Buffer]:
        return [instead.get(name, data) for name, data in features]

    return changed_examples(chunks, head, source, change)


def _redact_jsonl(
    chunks: Iterable[Buffer], head: bytes, names: tuple[str, ...], replacement: str | None, source: str
) -> Iterator[Buffer]:
    for group in objects_in(chunks, head, source):
        lines = []
        for _, value in group:
            _strike(value, names, replacement)
            # Even a line without matches is written again: if a name occurs twice, only its last value was seen.
            lines.append(json_line(value))
        yield b"".join(lines)


def _strike(value: Any, names: tuple[str, ...], replacement: str | None) -> None:
    """Remove or replace what `names` name in `value`, and in its items if it is a list."""
    if isinstance(value, list):
        for item in value:
            _strike(item, names, replacement)
    if not isinstance(value, dict):
        return
    for name in list(value):
        if name in names:
            if replacement is None:
                del value[name]
            else:
                value[name] = replacement
        elif inner := tuple(each[len(name) + 1 :] for each in names if each.startswith(f"{name}.")):
            _strike(value[name], inner, replacement)


def _redact_csv(
    chunks: Iterable[Buffer], head: bytes, names: tuple[str, ...], replacement: str | None, source: str
) -> Iterator[Buffer]:
    rows = CsvRows(chunks, head, source)
    struck = {_place(name, rows.header, source) for name in names}
    if replacement is None:
        kept = [place for place in range(len(rows.header)) if place not in struck]
        if not kept:
            raise DataError("nothing would be left of its columns", shard=source, offset_bytes=0)
        return _csv_of(rows, lambda row: [row[place] for place in kept])
    text = replacement
    return _csv_of(
        rows,
        lambda row: [text if place in struck else field for place, field in enumerate(row)],
        header=rows.header,
    )


def _csv_of(
    rows: CsvRows, change: Callable[[list[str]], list[str]], *, header: list[str] | None = None
) -> Iterator[Buffer]:
    """Iterate over CSV text of changed rows; the header is changed in the same way unless it is given."""
    text = CsvText(rows.line_end)
    text.add(change(rows.header) if header is None else header)
    for row in rows:
        text.add(change(row))
        if text.is_full:
            yield text.take()
    yield text.take()


def _place(name: str, header: list[str], source: str) -> int:
    if name not in header:
        raise DataError(f"it has no column {name!r}, only {header}", shard=source, offset_bytes=0)
    return header.index(name)
