"""``DatasetIndex``: one file that says what every shard holds, so that a start costs one read and not one per shard."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from penstock.errors import DataError
from penstock.index.shard_index import ShardRow

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.types import Buffer

VERSION = 1


class DatasetIndex:
    """The rows of a data set's shards, by key.

    It may hold more shards than a job reads: patterns that select some of a folder share the folder's index.

    Args:
        base_url: What the keys are relative to; ends with a slash.
        rows: Of shards.

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
        """Of all shards in it."""
        return sum(row.samples_count for row in self.rows.values())

    def add(self, row: ShardRow) -> None:
        """Take `row` in the place of an older one of its shard."""
        self.rows[row.key] = row

    def row_of(self, key: str, *, size_bytes: int | None, etag: str | None) -> ShardRow | None:
        """The row of a shard; None where there is none, or it is of another version."""
        row = self.rows.get(key)
        return row if row is not None and row.is_of(size_bytes, etag) else None

    def encode(self) -> bytes:
        """JSON lines: a header, then one shard per line, in key order."""
        from penstock.crc import crc32c

        rows = [self.rows[key] for key in sorted(self.rows)]
        lines = "".join(json.dumps(row._asdict(), ensure_ascii=True) + "\n" for row in rows).encode()
        head = {
            "penstock_index": VERSION,
            "base_url": self.base_url,
            "shards_count": len(rows),
            "samples_count": self.samples_count,
            "crc32c": f"{crc32c(lines):08x}",  # of all bytes after this line
        }
        return json.dumps(head).encode() + b"\n" + lines


def decode(data: Buffer, name: str) -> DatasetIndex:
    """What ``DatasetIndex.encode`` wrote.

    Args:
        data: uint8[n], the file.
        name: For errors.

    Raises:
        DataError: it is no such file, or is damaged.
    """
    from penstock.crc import crc32c

    first, _, lines = bytes(data).partition(b"\n")
    try:
        head = json.loads(first)
        version = head["penstock_index"]
        if version != VERSION:
            raise DataError(f"its version is {version}, this penstock reads {VERSION}", hint="index anew", shard=name)
        if f"{crc32c(lines):08x}" != head["crc32c"]:
            raise DataError("it does not have its checksum", hint="index anew", shard=name)
        entries: list[dict[str, Any]] = json.loads(b"[" + b",".join(lines.splitlines()) + b"]")
        rows = [ShardRow(*(entry[field] for field in ShardRow._fields)) for entry in entries]
        return DatasetIndex(head["base_url"], rows)
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"it is no index of a data set ({error})", hint="index anew", shard=name) from error
