"""Ranges that lie near each other, read as one request: how near is worth it, by what the store was measured to do.

Reading a gap costs bandwidth, a second request a connection for as long as its answer takes to begin: on one connection
they break even at first_byte_s * bytes_per_s (bench/coalesce.py). But a batch's requests run side by side, and one that
hides behind others saves nothing: the gaps of 128 random samples out of a few shards are all "worth" reading by that
rule, which then reads the shards whole, sixteen times the bytes. So gaps are read through, smallest first, only until
as many requests are left as may be in flight at once. A gap that costs less than sending the request does is always read.
"""

from __future__ import annotations

import math
from itertools import groupby, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.config import KIB
from penstock.ranges import REQUEST_COST_BYTES, covering, near_groups
from penstock.store.traced import StoreStatistics

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.config import FetchConfig
    from penstock.fetch import PlanItem
    from penstock.store import Store

BREAK_EVEN_BYTES = 512 * KIB
"""Where nothing was measured yet; ``FetchConfig.gap_bytes_max``'s default."""


class Piece(NamedTuple):
    """Bytes of a sample: the piece `slot` of the one in `row` of what was asked for."""

    row: int
    slot: int
    item: PlanItem


class Read(NamedTuple):
    """One request, and the pieces that lie in it."""

    item: PlanItem
    pieces: list[Piece]


def break_even_bytes(stores: Iterable[Store]) -> int:
    """The gap that takes as long to read as the next answer takes to begin, on one connection, as measured so far.

    Of several stores, the narrowest. Cost: a few medians of 512 numbers for each.
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
    """The widest gap to read through.

    Args:
        gaps: Bytes between neighbours in one object.
        others_count: Requests that are left when every gap is read.
        break_even_bytes: See ``break_even_bytes``.
        requests_max: In flight at once.
    """
    surplus = len(gaps) + others_count - requests_max
    if surplus <= 0:
        return REQUEST_COST_BYTES
    if surplus <= len(gaps):
        break_even_bytes = min(break_even_bytes, sorted(gaps)[surplus - 1])
    return max(REQUEST_COST_BYTES, break_even_bytes)


def merged(
    pieces: Sequence[Piece], stores: Iterable[Store], config: FetchConfig, *, gap_bytes: int | None = None
) -> list[Read]:
    """The requests for some pieces, each byte asked for once.

    Args:
        pieces: In any order; of a whole object at most one.
        stores: That they lie in.
        config: How they are read.
        gap_bytes: The widest gap to read through; None: what is worth it.
    """
    reads = [Read(piece.item, [piece]) for piece in pieces if piece.item.span is None]
    ranged = sorted((piece.item.key, piece.item.span, piece) for piece in pieces if piece.item.span is not None)
    if gap_bytes is None:
        gaps = [after[1].start - before[1].end for before, after in pairwise(ranged) if before[0] == after[0]]
        others_count = len(pieces) - len(gaps)
        few = len(pieces) <= config.requests_max  # the usual case asks for no median
        gap_bytes = gap_worth_bytes(
            gaps,
            others_count=others_count,
            break_even_bytes=0 if few else break_even_bytes(stores),
            requests_max=config.requests_max,
        )
    for _, group in groupby(ranged, key=itemgetter(0)):
        here = [(span, piece) for _, span, piece in group]
        spans = [span for span, _ in here]
        for first, stop in near_groups(spans, gap_bytes=gap_bytes, length_bytes_max=config.part_bytes):
            inside = [piece for _, piece in here[first:stop]]
            reads.append(Read(inside[0].item._replace(span=covering(spans[first:stop])), inside))
    return reads
