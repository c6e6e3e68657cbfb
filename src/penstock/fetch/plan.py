"""What to read: items in order, each a key and a span, with what is known of the object."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from penstock.errors import ConfigError
from penstock.ranges import covering, near_groups
from penstock.types import ByteRange, Key

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


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

    Args:
        items: In the order of delivery; only consecutive ones, in ascending order, are merged.
        gap_bytes: The widest gap to read through; see ``penstock.ranges``.
        length_bytes_max: The longest merged read.
    """
    merged: list[PlanItem] = []
    start, count = 0, len(items)
    while start < count:
        item, stop = items[start], start + 1
        if item.span is not None:
            while (
                stop < count
                and (other := items[stop]).span is not None
                and other.key == item.key
                and other.etag == item.etag
            ):
                stop += 1
        if stop == start + 1:
            merged.append(item)
        else:
            merged += _merged(items[start:stop], gap_bytes, length_bytes_max)
        start = stop
    return merged


def _merged(items: Sequence[PlanItem], gap_bytes: int, length_bytes_max: int) -> Iterator[PlanItem]:
    """Ranges of one version of one object, merged."""
    spans = [item.span for item in items if item.span is not None]
    for first, stop in near_groups(spans, gap_bytes=gap_bytes, length_bytes_max=length_bytes_max):
        if stop == first + 1:
            yield items[first]
        else:
            cuts = tuple(Cut(items[index].request_index, spans[index]) for index in range(first, stop))
            yield items[first]._replace(span=covering(spans[first:stop]), cuts=cuts)
