"""What a pass over the shards learned about them, in one file, because a by-product must not cost one file per shard.

It has counts and extents, but no checksums, keys or members: those would cost a first pass a tenth of its time, and
``penstock index`` collects them. These files lie in ``index_dir`` under ``passes/``, one for each rank or process, and each
is written as a whole. A data set's index is what they and ``dataset.index`` say together.

A file begins with a line of JSON, which has the length and the checksum of the table that follows. The table is a JSON list
of rows, each with the position of its ``ShardIndex`` in the rest of the file. The rest are ``ShardIndex``es as they are
stored elsewhere, which have checksums of their own.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from penstock.errors import DataError
from penstock.index.shard_index import ShardRow
from penstock.text.json_text import parse_json
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.index.shard_index import ShardIndex

FOLDER = "passes/"
VERSION = 1
HEAD_BYTES_MAX = 256


def encode(indexes: Sequence[ShardIndex]) -> tuple[str, bytes]:
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


def read(path: Path) -> list[tuple[ShardRow, ByteRange]]:
    """Return the rows of a pass's file, and the range of each shard's index in it. Cost: one read of its table.

    Raises:
        DataError: The file is not such a file, or is damaged.
    """
    try:
        return _read(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"it is not an index of a pass ({error})", shard=path.name) from error


def _read(path: Path) -> list[tuple[ShardRow, ByteRange]]:
    from penstock.checksums.crc32c import crc32c

    with path.open("rb") as file:
        line = file.readline(HEAD_BYTES_MAX)
        head = parse_json(line)
        if head["penstock_pass"] != VERSION:
            raise DataError(
                f"it has version {head['penstock_pass']}, but this penstock reads version {VERSION}", shard=path.name
            )
        table = file.read(head["table_bytes"])
    if f"{crc32c(table):08x}" != head["crc32c"]:
        raise DataError("the checksum of its table is wrong", shard=path.name)
    begin = len(line) + len(table)
    return [
        (ShardRow(*row), ByteRange(begin + at, begin + at + size_bytes)) for *row, at, size_bytes in parse_json(table)
    ]
