"""The plan of a read: a sequence of items, each with a key, a range, and the object's size and version if they are known."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, TypeAlias

from penstock.config import KIB
from penstock.errors import ConfigError
from penstock.memory.ranges import covering, near_groups
from penstock.types import ByteRange, Key, Landing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


COPIED_BYTES_MAX = 256 * KIB
"""Ranges for the caller's memory of up to this length are merged with their neighbours, which costs a copy: 256 KiB are copied
in 25 to 50 µs, and the processor time of a request is 60 to 100 µs."""


class LandingTarget(Protocol):
    """Where the caller wants the bytes of an item.

    Attributes:
        takes_whole: Whether it is for items that are delivered whole, or for those that are delivered part by part.
    """

    takes_whole: ClassVar[bool]

    def landing(self, start: int, length_bytes: int | None) -> Landing:
        """Return where `length_bytes` bytes from offset `start` of the object go; None means all that there are."""


class BufferTarget:
    """Memory of the caller, into which the bytes of an item are written.

    Args:
        view: uint8[n], writable, for all bytes of the item.
        start: Offset in the object of the first of them.

    Attributes:
        view: The memory.
    """

    __slots__ = ("_start", "view")

    takes_whole: ClassVar[bool] = True

    def __init__(self, view: memoryview, start: int) -> None:
        self.view = view
        self._start = start

    def landing(self, start: int, length_bytes: int | None) -> Landing:
        """Return the place in the memory; see ``LandingTarget.landing``."""
        offset = start - self._start
        return Landing(self.view, offset, offset + length_bytes if length_bytes is not None else len(self.view))


class Cut(NamedTuple):
    """One of the requests that a merged read serves.

    Attributes:
        request_index: Position of the request in the input, from 0.
        span: The bytes that it wants.
        target: The caller's memory for them; None for new memory.
    """

    request_index: int
    span: ByteRange
    target: LandingTarget | None = None


class PlanItem(NamedTuple):
    """One object, or one range of it, to read.

    Attributes:
        key: Key of the object.
        span: Bytes to read; None for the whole object.
        etag: ETag of the version to read; None accepts any.
        size_bytes: Size of the object in bytes; None if it is unknown.
        request_index: Position of the request in the input, from 0.
        cuts: The requests that this read serves, if it was merged from several; else empty.
        last_modified_s: Modification time of the version to read, in seconds since the epoch, if the store has no ETags.
        target: The caller's memory or file for the bytes; None for new memory. A ``LandingFile`` takes the whole object,
            each byte at its offset, if the store has ``lands_in_files``, the size is known, and it is read part by part. A
            ``BufferTarget`` takes exactly the bytes of the item, and it is an error if the object has fewer.
    """

    key: Key
    span: ByteRange | None = None
    etag: str | None = None
    size_bytes: int | None = None
    request_index: int = 0
    cuts: tuple[Cut, ...] = ()
    last_modified_s: float | None = None
    target: LandingTarget | None = None


Request: TypeAlias = Key | tuple[Key, ByteRange | None] | PlanItem


def as_item(request: Request, index: int) -> PlanItem:
    """Turn a request, in any of its spellings, into an item.

    Args:
        request: A key, a pair of key and range, or an item.
        index: Position of the request in the input, from 0.

    Raises:
        ConfigError: `request` is of another kind, or its range is empty or negative.
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
    """Cut a span of known length into requests.

    Args:
        span: The bytes to read.
        part_bytes: Length of a part in bytes; a span of up to one and a half parts is one request.

    Returns:
        Start and length of each request; the length is None for an empty span, which is read as a whole object.
    """
    if span.length_bytes == 0:
        return [(0, None)]
    if is_one_request(span, part_bytes):
        return [(span.start, span.length_bytes)]
    return parts(span, part_bytes)


def requests_count(span: ByteRange, part_bytes: int) -> int:
    """Return how many requests ``cut`` makes of a span."""
    return 1 if is_one_request(span, part_bytes) else -(-span.length_bytes // part_bytes)


def is_one_request(span: ByteRange, part_bytes: int) -> bool:
    """Whether `span` is too short to be cut into parts of `part_bytes`."""
    return span.length_bytes <= part_bytes + part_bytes // 2


def parts(span: ByteRange, part_bytes: int) -> list[tuple[int, int | None]]:
    """Cut `span` into parts of `part_bytes`: start and length of each. The last one may be shorter."""
    return [(start, min(part_bytes, span.end - start)) for start in range(span.start, span.end, part_bytes)]


def coalesce(items: Sequence[PlanItem], *, gap_bytes: int, length_bytes_max: int) -> list[PlanItem]:
    """Merge neighbouring ranges of one object into single reads.

    Args:
        items: Items in the order of delivery; only consecutive ranges in ascending order are merged.
        gap_bytes: The widest gap to read through, in bytes; ``penstock.memory.ranges`` says which width pays.
        length_bytes_max: Length of the longest merged read, in bytes.
    """
    merged: list[PlanItem] = []
    start, count = 0, len(items)
    while start < count:
        item, stop = items[start], start + 1
        if _may_merge(item):
            while (
                stop < count and _may_merge(other := items[stop]) and other.key == item.key and other.etag == item.etag
            ):
                stop += 1
        if stop == start + 1:
            merged.append(item)
        else:
            merged += _merged(items[start:stop], gap_bytes, length_bytes_max)
        start = stop
    return merged


def _may_merge(item: PlanItem) -> bool:
    """Whether `item` may be read together with others: a range that lands in new memory, or is short enough to be copied."""
    span = item.span
    return span is not None and (item.target is None or span.length_bytes <= COPIED_BYTES_MAX)


def _merged(items: Sequence[PlanItem], gap_bytes: int, length_bytes_max: int) -> Iterator[PlanItem]:
    """Merge ranges of one version of one object."""
    spans = [item.span for item in items if item.span is not None]
    for first, stop in near_groups(spans, gap_bytes=gap_bytes, length_bytes_max=length_bytes_max):
        if stop == first + 1:
            yield items[first]
        else:
            group = items[first:stop]
            cuts = tuple(
                Cut(item.request_index, span, item.target) for item, span in zip(group, spans[first:stop], strict=True)
            )
            yield items[first]._replace(span=covering(spans[first:stop]), cuts=cuts, target=None)
