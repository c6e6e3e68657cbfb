"""Merges ranges of a batch that lie near each other in a shard into one request, where that is faster.

Reading a gap costs bandwidth; a second request occupies a connection until its response starts. On one connection they
break even at ``first_byte_s * bytes_per_s`` (``bench/coalesce.py``). The requests of a batch run side by side, however,
and a request that runs beside others costs no time: by the break-even rule all gaps between 128 random samples of a few
shards would be read, which reads the shards completely, sixteen times the bytes. Gaps are therefore read through,
narrowest first, only until no more requests are left than may be in flight at once. A gap that costs less than sending a
request is always read through.
"""

from __future__ import annotations

import math
from itertools import groupby, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.config import KIB
from penstock.memory.ranges import REQUEST_COST_BYTES, covering, near_groups
from penstock.store.traced import StoreStatistics

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.config import FetchConfig
    from penstock.fetch import PlanItem
    from penstock.store import Store

BREAK_EVEN_BYTES = 512 * KIB
"""The break-even gap before anything is measured, in bytes: the default of ``FetchConfig.gap_bytes_max``."""


class RequestedRange(NamedTuple):
    """One range of a sample.

    Attributes:
        row: Index of the sample in the batch.
        slot: Index of the range among those of the sample.
        item: The object and the range to read.
    """

    row: int
    slot: int
    item: PlanItem


class MergedRead(NamedTuple):
    """One request, and the ranges that it contains."""

    item: PlanItem
    ranges: list[RequestedRange]


def break_even_bytes(stores: Iterable[Store]) -> int:
    """Return the gap in bytes that takes as long to read, on one connection, as the next response takes to start.

    Args:
        stores: The stores to read from, which have measured both; the narrowest gap counts.

    Cost: a few medians of 512 numbers for each store.
    """
    return min(map(_break_even_bytes, stores))


def _break_even_bytes(store: Store) -> int:
    layer: Any = store
    while layer is not None:
        found = layer.statistics()
        if isinstance(found, StoreStatistics):
            product = found.first_byte_p50_s * found.body_p50_bytes_per_s
            return int(product) if math.isfinite(product) else BREAK_EVEN_BYTES
        layer = getattr(layer, "inner", None)
    return BREAK_EVEN_BYTES


def gap_worth_bytes(gaps: Sequence[int], *, others_count: int, break_even_bytes: int, requests_max: int) -> int:
    """Return the widest gap to read through, in bytes.

    Args:
        gaps: Numbers of bytes between neighbouring ranges of one object.
        others_count: Number of requests that are left if every gap is read through.
        break_even_bytes: The gap at which reading and a second request cost the same, on one connection.
        requests_max: Largest number of requests in flight at once.
    """
    surplus = len(gaps) + others_count - requests_max
    if surplus <= 0:
        return REQUEST_COST_BYTES
    if surplus <= len(gaps):
        break_even_bytes = min(break_even_bytes, sorted(gaps)[surplus - 1])
    return max(REQUEST_COST_BYTES, break_even_bytes)


def merged_reads(
    ranges: Sequence[RequestedRange], stores: Iterable[Store], config: FetchConfig, *, gap_bytes: int | None = None
) -> list[MergedRead]:
    """Return the requests for some ranges; together they read no byte twice.

    Args:
        ranges: The ranges in any order; an object that is read as a whole may occur once only.
        stores: The stores that hold the objects.
        config: How the stores are read.
        gap_bytes: The widest gap to read through; None: as ``gap_worth_bytes`` says.
    """
    reads = [MergedRead(each.item, [each]) for each in ranges if each.item.span is None]
    ordered = sorted((each.item.key, each.item.span, each) for each in ranges if each.item.span is not None)
    if gap_bytes is None:
        gaps = [after[1].start - before[1].end for before, after in pairwise(ordered) if before[0] == after[0]]
        is_few = len(ranges) <= config.requests_max  # the usual case, which needs no medians
        gap_bytes = gap_worth_bytes(
            gaps,
            others_count=len(ranges) - len(gaps),
            break_even_bytes=0 if is_few else break_even_bytes(stores),
            requests_max=config.requests_max,
        )
    for _, group in groupby(ordered, key=itemgetter(0)):
        of_object = [(span, each) for _, span, each in group]
        spans = [span for span, _ in of_object]
        for first, stop in near_groups(spans, gap_bytes=gap_bytes, length_bytes_max=config.part_bytes):
            inside = [each for _, each in of_object[first:stop]]
            reads.append(MergedRead(inside[0].item._replace(span=covering(spans[first:stop])), inside))
    return reads
