"""Tells which shards carry checksums of their contents, so that reading them detects damage without an index."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.formats.thrift import read_struct

if TYPE_CHECKING:
    from penstock.types import Buffer

HEAD_BYTES = 64 * 1024
"""Bytes from the start of a shard that are enough to decide.

The header of a Parquet page can be long because it holds the smallest and the largest value.
"""

_ALWAYS = ("tfrecord", "zip")
_ZSTD_FLAG_AT, _ZSTD_CHECKSUM = 4, 0b100
_PARQUET_PAGE_AT, _PAGE_CRC = 4, 4


def has_checksums(format_name: str, head: Buffer) -> bool:
    """Whether every value of a shard is covered by a checksum that its parser verifies.

    Args:
        format_name: A key of ``FORMATS``.
        head: uint8[up to HEAD_BYTES], the shard's first bytes. Only the first zstd frame, or the first page of a
            Parquet file, is examined.
    """
    if format_name.endswith(".gz") or format_name.startswith(_ALWAYS):
        return True
    if format_name.endswith(".zst"):
        return len(head) > _ZSTD_FLAG_AT and bool(head[_ZSTD_FLAG_AT] & _ZSTD_CHECKSUM)
    if format_name.startswith("parquet"):
        try:
            return _PAGE_CRC in read_struct(bytes(head[_PARQUET_PAGE_AT:]))
        except ValueError:
            return False
    return False
