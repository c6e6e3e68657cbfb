"""``DatasetIndex``: one file that describes every shard, so that a job starts with one read, not one per shard.

A pass over the shards records its results in one file, too, because a by-product must not cost one file per shard. The file
has counts and extents, but no checksums, keys or members: those would cost a first pass a tenth of its time, and
``penstock index`` collects them. These files lie in ``index_dir`` under ``passes/``, one for each rank or process, and each
is written as a whole. They and ``dataset.index`` together are the data set's index.

The file of a pass begins with a line of JSON, which has the length and the checksum of the table that follows. The table is
a JSON list of rows, each with the offset of its ``ShardIndex`` in the rest of the file. The rest are ``ShardIndex``es as
they are stored elsewhere, which have checksums of their own.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from penstock.errors import DataError
from penstock.index.shard_index import ShardRow
from penstock.text.json_text import parse_json
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from penstock.index.shard_index import ShardIndex
    from penstock.types import Buffer

VERSION = 1

PASSES_PREFIX = "passes/"
PASS_HEAD_BYTES_MAX = 256


class DatasetIndex:
    """The rows of a data set's shards, by key.

    It may have more shards than a job reads, because all patterns that select shards of a folder share the folder's index.

    Args:
        base_url: URL that the keys are relative to; ends with a slash.
        rows: Rows of the shards.

    Cost: O(shards).
    """

    def __init__(self, base_url: str, rows: Iterable[ShardRow] = ()) -> None:
        self.base_url = base_url
        self.rows: dict[str, ShardRow] = {row.key: row for row in rows}

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"<DatasetIndex {self.base_url!r}: {len(self)} shards, {self.samples_count} samples>"

    @property
    def samples_count(self) -> int:
        """Number of samples in all shards of the index."""
        return sum(row.samples_count for row in self.rows.values())

    def add(self, row: ShardRow) -> None:
        """Add `row`; it replaces an older row of the same shard."""
        self.rows[row.key] = row

    def row_of(self, key: str, *, size_bytes: int | None, etag: str | None) -> ShardRow | None:
        """Return the row of a shard; None if there is none, or it describes another version."""
        row = self.rows.get(key)
        return row if row is not None and row.is_of(size_bytes, etag) else None

    def encode(self) -> bytes:
        """Return the index as JSON lines: a header, then one shard per line, in key order."""
        from penstock.checksums.crc32c import crc32c

        rows = [self.rows[key] for key in sorted(self.rows)]
        lines = "".join(json.dumps(row._asdict(), ensure_ascii=True) + "\n" for row in rows).encode()
        head = {
            "penstock_index": VERSION,
            "base_url": self.base_url,
            "shards_count": len(rows),
            "samples_count": self.samples_count,
            "crc32c": f"{crc32c(lines):08x}",  # covers all bytes after this line
        }
        return json.dumps(head).encode() + b"\n" + lines


def decode(data: Buffer, name: str) -> DatasetIndex:
    """Return the index that ``DatasetIndex.encode`` stored.

    Args:
        data: uint8[n], the file.
        name: Name of the file, for errors.

    Raises:
        DataError: The file is not such an index, or is damaged.
    """
    first, _, lines = bytes(data).partition(b"\n")
    try:
        head = _checked(parse_json(first), "penstock_index", lines, name)
        entries: list[dict[str, Any]] = parse_json(b"[" + b",".join(lines.splitlines()) + b"]")
        rows = [ShardRow(*(entry[field] for field in ShardRow._fields)) for entry in entries]
        return DatasetIndex(head["base_url"], rows)
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"it is not an index of a data set ({error})", hint="run penstock index", shard=name) from error


def _checked(head: dict[str, Any], kind: str, content: bytes, name: str) -> dict[str, Any]:
    """Return the header of a file after comparing it with this version and with the content that follows it."""
    from penstock.checksums.crc32c import crc32c

    if head[kind] != VERSION:
        raise DataError(
            f"it has version {head[kind]}, but this penstock reads version {VERSION}",
            hint="run penstock index",
            shard=name,
        )
    if f"{crc32c(content):08x}" != head["crc32c"]:
        raise DataError("its checksum is wrong", hint="run penstock index", shard=name)
    return head


def encode_pass(indexes: Sequence[ShardIndex]) -> tuple[str, bytes]:
    """Return the name and the content of a pass's file; equal contents have equal names."""
    from penstock.checksums.crc32c import crc32c

    stored = [index.encode() for index in indexes]
    entries, at = [], 0
    for index, data in zip(indexes, stored, strict=True):
        entries.append([*index.row, at, len(data)])
        at += len(data)
    table = json.dumps(entries).encode()
    head = {"penstock_pass": VERSION, "table_bytes": len(table), "crc32c": f"{crc32c(table):08x}"}
    content = b"".join([json.dumps(head).encode(), b"\n", table, *stored])
    return hashlib.blake2b(content, digest_size=10).hexdigest() + ".index", content


def read_pass(path: Path) -> list[tuple[ShardRow, ByteRange]]:
    """Return the rows of a pass's file, and the range of each shard's index in it. Cost: one read of its table.

    Raises:
        DataError: The file is not such a file, or is damaged.
    """
    try:
        with path.open("rb") as file:
            line = file.readline(PASS_HEAD_BYTES_MAX)
            head = parse_json(line)
            table = file.read(head["table_bytes"])
        _checked(head, "penstock_pass", table, path.name)
        begin = len(line) + len(table)
        return [
            (ShardRow(*row), ByteRange(begin + at, begin + at + size_bytes))
            for *row, at, size_bytes in parse_json(table)
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"it is not an index of a pass ({error})", shard=path.name) from error
