"""Entering: the part of a shard that a lane reads, where an index says how its samples lie."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.formats import FORMATS, without_content
from penstock.loader.lanes.reading import Segment
from penstock.sources.selecting import gap_bytes_of, may_pay, wanted_spans

if TYPE_CHECKING:
    from penstock.index import IndexPlace, ShardIndex, ShardRow
    from penstock.order import Segment as Stored
    from penstock.sources.shards import Shard


def segment_of(
    stored: Stored,
    number: int,
    *,
    shard: Shard,
    row: ShardRow,
    place: IndexPlace | None,
    known: ShardIndex | None,
    fields: frozenset[str] | None,
    source: int,
) -> Segment:
    """Where in its shard to read, in bytes where they are known, else from its head, as its format allows.

    Args:
        stored: The samples.
        number: Of the segment in its lane.
        shard: In which they lie.
        row: What the index of the data set says of it.
        place: Where that lies.
        known: The shard's own index, where somebody needed it.
        fields: That the pipeline looks at; None: all.
        source: Number of the source.
    """
    first, count = stored.first, stored.samples_count
    # the index knows where samples of its own format lie; what a job says of their content changes nothing in that
    is_of_index = shard.format is None or without_content(shard.format) == without_content(row.format)
    has_bounds = is_of_index and row.has_offsets and FORMATS[row.format].unit == "sample"
    made = Segment(
        shard,
        number,
        count=count,
        bounds=partial(_bounds, place, row) if has_bounds and place is not None else None,
        format_name=row.format,
        source=source,
    )
    if not has_bounds or known is None or known.offsets is None:
        made.skip_count = first
        return made
    made.first_sample = first
    made.offset_bytes = int(known.offsets[first]) if first else 0
    made.end_bytes = int(known.offsets[first + count]) if first + count < row.samples_count else None
    if fields is not None and may_pay(shard, row, fields):
        made.spans = wanted_spans(known, first, count, fields=fields, gap_bytes=gap_bytes_of(shard))
    return made


def _bounds(place: IndexPlace, row: ShardRow) -> Any:
    """int64[samples + 1]: where the samples of a shard begin and end. Cost: a small read."""
    return place.load_shard(row).offsets
