"""``jsonl2csv``: JSON lines as a table."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from penstock.errors import DataError
from penstock.gateway.transforms.authoring import transform
from penstock.gateway.transforms.builtin.recordwise import CsvText, checked_names, objects_in
from penstock.gateway.transforms.builtin.streams import located, peek

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from penstock.gateway.transforms.authoring import SourceReader, TransformRequest
    from penstock.types import Buffer


def _check(arguments: Mapping[str, Any]) -> None:
    if arguments["columns"]:
        checked_names(arguments["columns"], "columns")


@transform(version="1", content_type="text/csv; charset=utf-8", rest="columns", check=_check)
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
    del request
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
