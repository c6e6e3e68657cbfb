"""``DatasetIndex``: one file that describes every shard, so that a job starts with one read, not one per shard."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from penstock.errors import DataError
from penstock.index.shard_index import ShardRow
from penstock.text.json_text import parse_json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.types import Buffer

VERSION = 1


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
    from penstock.checksums.crc32c import crc32c

    first, _, lines = bytes(data).partition(b"\n")
    try:
        head = parse_json(first)
        version = head["penstock_index"]
        if version != VERSION:
            raise DataError(
                f"it has version {version}, but this penstock reads version {VERSION}",
                hint="run penstock index",
                shard=name,
            )
        if f"{crc32c(lines):08x}" != head["crc32c"]:
            raise DataError("its checksum is wrong", hint="run penstock index", shard=name)
        entries: list[dict[str, Any]] = parse_json(b"[" + b",".join(lines.splitlines()) + b"]")
        rows = [ShardRow(*(entry[field] for field in ShardRow._fields)) for entry in entries]
        return DatasetIndex(head["base_url"], rows)
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"it is not an index of a data set ({error})", hint="run penstock index", shard=name) from error
