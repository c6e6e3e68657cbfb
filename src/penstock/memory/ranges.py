"""Merges near ranges of one object into one request.

Reading the gap between two ranges costs bandwidth, and a second request costs a round trip. On one connection they break
even at ``first_byte_s * bytes_per_s`` (``bench/coalesce.py`` measures both for a store); ``FetchConfig.gap_bytes_max``
is that width. Where requests run in parallel, the round trip of one is hidden behind the others, and only the cost of
sending a request is left: ``REQUEST_COST_BYTES``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from penstock.config import KIB
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

REQUEST_COST_BYTES = 64 * KIB
"""Bytes that can be read in the processor time of one request: 60 to 100 µs, at 0.7 to 1 GB/s per core."""


def near_groups(
    ranges: Iterable[tuple[int, int]], *, gap_bytes: int, length_bytes_max: int | None = None
) -> list[tuple[int, int]]:
    """Group consecutive ranges of one object that lie near each other; each group is worth one request.

    Args:
        ranges: Start and end of each range. A range that starts before its group does begins a group of its own.
        gap_bytes: The widest gap to read through.
        length_bytes_max: The longest range that a group may span; None: no limit.

    Returns:
        The index of the first range of each group, and the index after its last.
    """
    groups: list[tuple[int, int]] = []
    longest_bytes = math.inf if length_bytes_max is None else length_bytes_max
    first = stop = 0
    group_start = group_end = 0
    for start, end in ranges:
        if (
            stop
            and group_start <= start <= group_end + gap_bytes
            and end - group_start <= longest_bytes
            and group_end - group_start <= longest_bytes
        ):
            group_end = max(group_end, end)
        else:
            if stop:
                groups.append((first, stop))
            first, group_start, group_end = stop, start, end
        stop += 1
    if stop:
        groups.append((first, stop))
    return groups


def covering(ranges: Sequence[ByteRange]) -> ByteRange:
    """The shortest range that holds all of a group's ranges."""
    return ranges[0] if len(ranges) == 1 else ByteRange(ranges[0].start, max(span.end for span in ranges))


def merged_spans(ranges: Iterable[ByteRange], *, gap_bytes: int) -> tuple[ByteRange, ...]:
    """The ranges to read for some ranges of one object, in any order: ascending, and near ones merged."""
    ordered = sorted(ranges)
    if len(ordered) < 2:  # hundreds of thousands of samples of a zip are looked at when it is opened
        return tuple(ordered)
    return tuple([covering(ordered[first:stop]) for first, stop in near_groups(ordered, gap_bytes=gap_bytes)])
