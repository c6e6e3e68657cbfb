"""What to read: items in order, each a key and a span, with what is known of the object."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from penstock.errors import ConfigError
from penstock.types import ByteRange, Key

if TYPE_CHECKING:
    from collections.abc import Sequence


class Cut(NamedTuple):
    """A request inside a coalesced one."""

    request_index: int
    span: ByteRange


class PlanItem(NamedTuple):
    """One object, or one range of it, to read.

    Attributes:
        key: Of the object.
        span: None is the whole object.
        etag: The version to read, where it is known.
        size_bytes: Of the object, where it is known.
        request_index: Position in the input.
        cuts: Requests that share this read; empty where there is one.
        last_modified_s: When the object was modified, in seconds since the epoch, as an earlier ``Get`` told it. It stands
            for the version where the store gives no ETag.
    """

    key: Key
    span: ByteRange | None = None
    etag: str | None = None
    size_bytes: int | None = None
    request_index: int = 0
    cuts: tuple[Cut, ...] = ()
    last_modified_s: float | None = None


Request: TypeAlias = Key | tuple[Key, ByteRange | None] | PlanItem


def as_item(request: Request, index: int) -> PlanItem:
    """A request in any of its spellings.

    Raises:
        ConfigError: it is none of them, or its range is no range.
    """
    if isinstance(request, str):
        return PlanItem(request, request_index=index)
    if isinstance(request, PlanItem):
        return request._replace(request_index=index)
    if isinstance(request, tuple) and len(request) == 2 and isinstance(request[0], str):
        key, span = request
        if span is None:
            return PlanItem(key, request_index=index)
        if isinstance(span, tuple) and len(span) == 2:
            return PlanItem(key, ByteRange(*span).checked(), request_index=index)
    raise ConfigError(f"{request!r} is neither a key nor (key, ByteRange)")


def cut(span: ByteRange, part_bytes: int) -> list[tuple[int, int | None]]:
    """The requests for a span of known length: where each starts and its length, None for a span without a byte.

    Args:
        span: The bytes to read.
        part_bytes: The length of a part; a span of up to one and a half parts is one request.
    """
    if span.length_bytes == 0:
        return [(0, None)]
    if is_one_request(span, part_bytes):
        return [(span.start, span.length_bytes)]
    return parts(span, part_bytes)


def is_one_request(span: ByteRange, part_bytes: int) -> bool:
    """Whether `span` is too short to be cut into parts of `part_bytes`."""
    return span.length_bytes <= part_bytes + part_bytes // 2


def parts(span: ByteRange, part_bytes: int) -> list[tuple[int, int | None]]:
    """`span` in parts of `part_bytes`, the last of which may be shorter: where each starts and its length."""
    return [(start, min(part_bytes, span.end - start)) for start in range(span.start, span.end, part_bytes)]


def coalesce(items: Sequence[PlanItem], *, gap_bytes: int, length_bytes_max: int) -> list[PlanItem]:
    """Merge neighbouring ranges of one object into single reads.

    Reading a small gap costs bandwidth; a second request costs a round trip. The break-even gap is
    rate_bytes_per_s * first_byte_latency_s (bench/coalesce.py measures it for a store).

    Args:
        items: In the order of delivery; only consecutive ones, in ascending order, are merged.
        gap_bytes: The widest gap to read through.
        length_bytes_max: The longest merged read.
    """
    merged: list[PlanItem] = []
    for item in items:
        held = merged[-1] if merged else None
        span, before = item.span, held.span if held is not None else None
        if (
            held is not None
            and span is not None
            and before is not None
            and (item.key, item.etag) == (held.key, held.etag)
            and before.start <= span.start <= before.end + gap_bytes
            and max(span.end, before.end) - before.start <= length_bytes_max
        ):
            cuts = held.cuts or (Cut(held.request_index, before),)
            outer = ByteRange(before.start, max(before.end, span.end))
            merged[-1] = held._replace(span=outer, cuts=(*cuts, Cut(item.request_index, span)))
        else:
            merged.append(item)
    return merged
