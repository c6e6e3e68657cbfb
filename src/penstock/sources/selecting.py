"""Chooses the bytes of a shard to read: only the members that a pipeline needs, if skipping the others saves enough."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.config import FetchConfig
from penstock.memory.ranges import merged_spans
from penstock.types import ByteRange

if TYPE_CHECKING:
    from penstock.index import ShardIndex, ShardRow
    from penstock.sources.shards import Shard


def gap_bytes_of(shard: Shard) -> int:
    """Return the widest gap to read through, in bytes: up to this size reading it costs less than another request."""
    return (shard.store.fetch_config or FetchConfig()).gap_bytes_max


def may_pay(shard: Shard, row: ShardRow, fields: frozenset[str] | None) -> bool:
    """Whether skipping members may save anything: only if the average sample is longer than the gap to read through.

    Args:
        shard: The shard.
        row: Row of the shard in the index of the data set.
        fields: Members that the pipeline needs; None: all.
    """
    long_enough = row.size_bytes > gap_bytes_of(shard) * row.samples_count
    return fields is not None and long_enough and row.format == "tar" and row.has_offsets


def wanted_spans(
    index: ShardIndex, first: int, count: int, *, fields: frozenset[str], gap_bytes: int
) -> list[ByteRange] | None:
    """Return the spans to read of samples ``[first, first + count)``: the members in `fields`, and gaps not worth skipping.

    Args:
        index: The index of the shard.
        first: Number of the first sample in the shard, from 0.
        count: Number of samples.
        fields: Members that the pipeline needs.
        gap_bytes: The widest gap to read through.

    Returns:
        Spans in ascending order; None: read all bytes, because skipping saves at most `gap_bytes` or the index does not
        say where the members lie.
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
