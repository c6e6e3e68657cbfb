"""What a pass over the shards found out about them, in one file: a by-product must not cost a file for each.

It has counts and extents, no checksums, keys and members: those cost a first pass a tenth of its time, and are what
``penstock index`` is for. Such files lie in ``index_dir`` under ``passes/``, as many as there were ranks and processes,
each written whole; a data set's index is what they and ``dataset.index`` say together.

A line of JSON, with the length and the checksum of the table behind it; the table, a JSON list of rows, each with where
its ``ShardIndex`` lies in what follows; the ``ShardIndex``es as they are stored elsewhere, which have checksums of their own.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from penstock.errors import DataError
from penstock.index.shard_index import ShardRow
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.index.shard_index import ShardIndex

FOLDER = "passes/"
VERSION = 1
HEAD_BYTES_MAX = 256


def encode(indexes: Sequence[ShardIndex]) -> tuple[str, bytes]:
    """Name and content of a pass's file; of equal ones it is the same."""
    from penstock.crc import crc32c

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
    """The rows of a pass's file, and where in it the index of each shard lies. Cost: a read of its table.

    Raises:
        DataError: it is none, or damaged.
    """
    try:
        return _read(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"it is no index of a pass ({error})", shard=path.name) from error


def _read(path: Path) -> list[tuple[ShardRow, ByteRange]]:
    from penstock.crc import crc32c

    with path.open("rb") as file:
        line = file.readline(HEAD_BYTES_MAX)
        head = json.loads(line)
        if head["penstock_pass"] != VERSION:
            raise DataError(f"its version is {head['penstock_pass']}, this penstock reads {VERSION}", shard=path.name)
        table = file.read(head["table_bytes"])
    if f"{crc32c(table):08x}" != head["crc32c"]:
        raise DataError("its table does not have its checksum", shard=path.name)
    begin = len(line) + len(table)
    return [
        (ShardRow(*row), ByteRange(begin + at, begin + at + size_bytes)) for *row, at, size_bytes in json.loads(table)
    ]
