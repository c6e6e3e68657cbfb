"""Selecting: which bytes of a shard hold the fields that a pipeline looks at, and whether leaving out the others pays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.config import FetchConfig
from penstock.ranges import merged_spans
from penstock.types import ByteRange

if TYPE_CHECKING:
    from penstock.index import ShardIndex, ShardRow
    from penstock.sources.shards import Shard


def gap_bytes_of(shard: Shard) -> int:
    """Bytes that cost as much as a request more: what is shorter is read through."""
    return (shard.store.fetch_config or FetchConfig()).gap_bytes_max


def may_pay(shard: Shard, row: ShardRow, fields: frozenset[str] | None) -> bool:
    """Whether an index of the shard is worth a look for what can be left out: where samples are longer than the gap."""
    long_enough = row.size_bytes > gap_bytes_of(shard) * row.samples_count
    return fields is not None and long_enough and row.format == "tar" and row.has_offsets


def wanted_spans(
    index: ShardIndex, first: int, count: int, *, fields: frozenset[str], gap_bytes: int
) -> list[ByteRange] | None:
    """What to read of samples ``[first, first + count)``: members nobody wants are left out where that saves a gap.

    Returns:
        Ascending spans; None: all bytes, as little can be saved, or nobody knows where the members lie.
    """
    members = index.members
    if members is None or index.offsets is None or not fields.issubset(members.names):
        return None
    extent_bytes = int(index.offsets[first + count] - index.offsets[first])
    found = index.member_spans(first, count, sorted(fields))
    assert found is not None
    spans = merged_spans(map(ByteRange._make, found.reshape(-1, 2).tolist()), gap_bytes=gap_bytes)
    saved_bytes = extent_bytes - sum(span.length_bytes for span in spans)
    return list(spans) if saved_bytes > gap_bytes else None
