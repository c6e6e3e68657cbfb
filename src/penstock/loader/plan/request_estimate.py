"""What an epoch asks of its stores: GETs and bytes, counted from the segments that the lanes of a rank read."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.config import FetchConfig
from penstock.fetch import cut
from penstock.formats import FORMATS
from penstock.loader.lanes.ranged import RangedShard
from penstock.loader.lanes.segments import is_ranged
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.loader.lanes.segments import ReadOptions, ShardSegment
    from penstock.sources.readers import SampleReader

LOOKS_MAX = 64
"""Shards whose table of contents is read in order to count. Each costs a request or two, which thousands are not worth."""


class RequestEstimate(NamedTuple):
    """GETs and their bytes.

    Retries and hedges are left out, and what a rank reads once more to pad a batch of which every sample was dropped.
    What an epoch is sure to ask and the most that it may ask differ by what is read ahead where it ends before its last
    byte: at most the rest of one shard for each lane, and what lanes do not share of their tables of contents.
    """

    requests_min: int
    requests_max: int
    bytes_min: int
    bytes_max: int

    def __add__(self, other: RequestEstimate) -> RequestEstimate:  # type: ignore[override]
        return RequestEstimate(*(one + two for one, two in zip(self, other, strict=True)))

    def at_most(self) -> RequestEstimate:
        """The same, where none of it is sure."""
        return RequestEstimate(0, self.requests_max, 0, self.bytes_max)

    def begun(self) -> RequestEstimate:
        """The same, where only the beginning is sure."""
        return RequestEstimate(min(1, self.requests_min), self.requests_max, 0, self.bytes_max)


NOTHING = RequestEstimate(0, 0, 0, 0)


class UnknownRequestsError(Exception):
    """Only reading tells: a size was not listed, or there are too many tables of contents."""


class RequestEstimator:
    """Adds up what a rank asks.

    Args:
        reading: How its lanes read.
    """

    def __init__(self, reading: ReadOptions) -> None:
        self.total = NOTHING
        self._reading = reading
        self._looked: dict[int, RangedShard] = {}  # by shard

    def add_spans(self, spans: Iterable[ByteRange]) -> None:
        """Spans that are one GET each."""
        for span in spans:
            self.total += RequestEstimate(1, 1, span.length_bytes, span.length_bytes)

    def add_lane(
        self, segments: Sequence[ShardSegment], *, needed_count: int | None, ends_inside: bool = False
    ) -> None:
        """What a lane reads one after the other.

        Args:
            segments: All that the lane may read.
            needed_count: Samples that the epoch takes from it; None: all that there are.
            ends_inside: Whether its last sample is not the last of its shard.

        Raises:
            UnknownRequestsError: only reading tells.
            ConfigError: a unit of a shard does not fit the memory budget, as the lane says.
        """
        for number, segment in enumerate(segments):
            asks = self._ranged(segment) if is_ranged(segment) else self._streamed(segment)
            if needed_count is not None:
                count = segment.count or needed_count + 1  # without a count nobody knows where it ends
                is_last = number == len(segments) - 1
                is_cut_short = is_last and ends_inside and segment.end_bytes is None and not is_ranged(segment)
                if needed_count <= 0:
                    asks = asks.at_most()
                elif needed_count < count or is_cut_short:
                    asks = asks.begun()
                needed_count -= count
            self.total += asks

    def add_objects(self, objects: SampleReader, numbers: Iterable[int], *, needed_count: int | None = None) -> None:
        """Samples that are objects, in the order in which they are read.

        Args:
            objects: The source.
            numbers: Numbers of the source's samples, from 0, in the order in which they are read.
            needed_count: How many of them the epoch takes; None: all.

        Raises:
            UnknownRequestsError: a size was not listed.
        """
        if objects.store is None:  # the user's function reads
            return
        part_bytes = (objects.store.fetch_config or FetchConfig()).part_bytes
        requests = {}
        for at, number in enumerate(numbers):
            if number not in requests:
                requests[number] = sum(
                    (_whole(item.size_bytes, part_bytes) for item in objects.requests(number)), NOTHING
                )
            is_sure = needed_count is None or at < needed_count
            self.total += requests[number] if is_sure else requests[number].at_most()

    def _streamed(self, segment: ShardSegment) -> RequestEstimate:
        if segment.shard.size_bytes is None or segment.format is None:
            raise UnknownRequestsError
        found = NOTHING
        for item in segment.plan_items():
            span = item.span or ByteRange(0, segment.shard.size_bytes)
            requests = len(cut(span, self._reading.sizes.part_bytes))
            found += RequestEstimate(requests, requests, span.length_bytes, span.length_bytes)
        head = FORMATS[segment.format].head if segment.format in FORMATS else None
        if head is not None and segment.offset_bytes:
            first_bytes = min(next(head()).length_bytes, segment.shard.size_bytes)
            found += RequestEstimate(1, 1, first_bytes, first_bytes)
            if segment.offset_bytes > first_bytes:  # a head that is longer, and ends before it, takes a second look
                found += RequestEstimate(0, 1, 0, segment.offset_bytes)
        return found

    def _ranged(self, segment: ShardSegment) -> RequestEstimate:
        if segment.shard.size_bytes is None:
            raise UnknownRequestsError
        key = id(segment.shard)
        is_new = key not in self._looked
        if is_new and len(self._looked) == LOOKS_MAX:
            raise UnknownRequestsError
        shard = RangedShard(segment, reading=self._reading)
        try:
            items = shard.planned()
            self._looked.setdefault(key, shard)  # its table of contents is kept for other lanes
        finally:
            if is_new and key not in self._looked:
                shard.close()
        found = NOTHING
        for span in shard.looked:  # again, where the first lane is done with the shard before the second begins
            sure = int(is_new)
            found += RequestEstimate(sure, 1, sure * span.length_bytes, span.length_bytes)
        for item in items:
            assert item.span is not None
            requests = len(cut(item.span, self._reading.sizes.part_bytes))
            found += RequestEstimate(requests, requests, item.span.length_bytes, item.span.length_bytes)
        return found


def _whole(size_bytes: int | None, part_bytes: int) -> RequestEstimate:
    """An object that is read whole."""
    if size_bytes is None:
        raise UnknownRequestsError
    requests = len(cut(ByteRange(0, size_bytes), part_bytes))
    return RequestEstimate(requests, requests, size_bytes, size_bytes)
