"""Determines how large the pages of a row group become, from their headers, before anything is decompressed.

The footer does not state this reliably. A page of a hundred bytes can decompress to a gigabyte, a dictionary entry that is
stored once can be the value of a million rows, and ten bytes of run lengths can stand for a list of a billion items. The
first and the third are refused beyond a growth that real data never has (``GROWTH_MAX``). The second is legitimate: such
columns are read as dictionaries, which hold each entry once, or fewer rows are decoded at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.formats.thrift import read_struct_at

if TYPE_CHECKING:
    from collections.abc import Sequence

GROWTH_MAX = 1032
"""Bytes that one stored byte of a row group may become. This is the bound of deflate; other codecs exceed it for constants."""

GROWTH_BYTES = 256 << 20
"""Bytes that a row group may grow beyond that bound, and that dictionary entries may take in rows decoded together."""

ROWS_MIN = 64
"""Fewest rows decoded together. Columns whose dictionaries would allow only fewer are read as dictionaries."""

_BYTE_ARRAY = "BYTE_ARRAY"
_DELTA_BYTE_ARRAY = 7  # encoding in which a value is a prefix of the one before it, plus some bytes
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_LEVELS_BYTES = 12  # for each item of a list: levels and offsets
_OBJECT_BYTES = 64  # for each item that becomes a Python object


class ColumnChunk(NamedTuple):
    """A column of a row group, as the footer and the schema describe it.

    Attributes:
        path: Path of the column in the schema, separated by dots.
        kind: Physical type, as pyarrow writes it.
        width: Size of a value of type FIXED_LEN_BYTE_ARRAY, in bytes.
        is_repeated: Whether it is inside a list.
        values_count: Number of values, including nulls.
        decoded_bytes: Decompressed size of the column's pages, according to the footer.
    """

    path: str
    kind: str
    width: int
    is_repeated: bool
    values_count: int
    decoded_bytes: int


class Pages(NamedTuple):
    """Totals from the headers of a column's pages.

    Attributes:
        decoded_bytes: Decompressed size of all pages.
        values_count: Number of values in all data pages.
        dictionary_bytes: Decompressed size of the dictionary.
        prefixed_bytes: Decompressed size of the largest page whose values share prefixes.
    """

    decoded_bytes: int = 0
    values_count: int = 0
    dictionary_bytes: int = 0
    prefixed_bytes: int = 0


class Reading(NamedTuple):
    """How a row group can be read in bounded memory.

    Attributes:
        decoded_bytes: Decompressed size of the wanted columns.
        rows_max: Most rows to decode together.
        dictionaries: Paths of the columns to read as dictionaries.
    """

    decoded_bytes: int
    rows_max: int
    dictionaries: list[str]


def read_pages(data: memoryview) -> Pages:
    """Read the headers of the pages in `data`, a column of a row group, up to the first damaged one.

    pyarrow reports the damaged page itself, after it has returned the rows before it.
    """
    found, at = Pages(), 0
    while at < len(data):
        try:
            header, at = read_struct_at(data, at)
            size_bytes, stored_bytes = int(header[2]), int(header[3])
            dictionary, page = header.get(7), header.get(5) or header.get(8) or {}
            values_count, encoding = int(page.get(1, 0)), page.get(2 if 5 in header else 4)
        except (ValueError, KeyError, TypeError, AttributeError):
            break
        if size_bytes < 0 or stored_bytes < 0 or values_count < 0:
            break
        at += stored_bytes
        found = Pages(
            found.decoded_bytes + size_bytes,
            found.values_count + values_count,
            max(found.dictionary_bytes, size_bytes if dictionary else 0),
            max(found.prefixed_bytes, size_bytes if encoding == _DELTA_BYTE_ARRAY else 0),
        )
    return found


def bounded_reading(chunks: Sequence[ColumnChunk], views: Sequence[memoryview], *, rows_max: int) -> Reading:
    """Plan how to read the columns `chunks`, whose bytes are `views`, at most `rows_max` rows at a time.

    Raises:
        ValueError: The columns would take more memory than their stored size justifies.
    """
    stored_bytes = sum(map(len, views))
    decoded_bytes = grown_bytes = largest_bytes = 0
    dictionaries = []
    for chunk, view in zip(chunks, views, strict=True):
        pages = read_pages(view)
        decoded_bytes += max(chunk.decoded_bytes, pages.decoded_bytes)
        grown_bytes += pages.decoded_bytes
        items_count = max(chunk.values_count, pages.values_count)
        value_bytes = _WIDTHS.get(chunk.kind, chunk.width)
        if chunk.kind == _BYTE_ARRAY:
            as_dictionary = ROWS_MIN * pages.dictionary_bytes > GROWTH_BYTES or (
                chunk.is_repeated and items_count * pages.dictionary_bytes > GROWTH_BYTES
            )
            dictionaries += [chunk.path] if as_dictionary else []
            value_bytes = max(pages.prefixed_bytes, 0 if as_dictionary else pages.dictionary_bytes)
        if chunk.is_repeated:
            each_bytes = value_bytes + _LEVELS_BYTES + (_OBJECT_BYTES if chunk.kind == _BYTE_ARRAY else 0)
            grown_bytes += items_count * each_bytes
        else:
            largest_bytes += value_bytes
    if grown_bytes > GROWTH_BYTES + GROWTH_MAX * stored_bytes:
        raise ValueError(f"its columns claim to grow from {stored_bytes} to {grown_bytes} bytes or more")
    return Reading(decoded_bytes, max(1, min(rows_max, GROWTH_BYTES // max(1, largest_bytes))), dictionaries)
