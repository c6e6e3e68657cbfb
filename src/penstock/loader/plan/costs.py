"""Compares the memory of a rank's loader (window, read-ahead and batches) with its byte budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from penstock.config import FetchConfig, default_budget_bytes
from penstock.errors import ConfigError
from penstock.fetch import PARTS_PER_REQUEST, requests_count
from penstock.formats import FORMATS
from penstock.loader.lanes.ranged import RangedShard
from penstock.loader.lanes.segments import ReadAheadSizes, is_ranged, lane_read_ahead_sizes
from penstock.text.sizes import format_bytes
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.loader.lanes.segments import ReadOptions, ShardSegment
    from penstock.sources.readers import SampleReader


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The memory that a rank's loader holds at most."""

    window_bytes: int
    """The rank's share of the shuffle window: samples as stored."""
    read_ahead_bytes: int
    """Parts that are in flight or waiting, of all lanes."""
    batches_bytes: int
    """Batches that are being filled or waiting."""
    budget_bytes: int
    """Limit of its memory: ``FetchConfig.budget_bytes_max``."""

    @property
    def total_bytes(self) -> int:
        """Window, read-ahead and batches together."""
        return self.window_bytes + self.read_ahead_bytes + self.batches_bytes

    def check(self) -> None:
        """Refuse a plan that exceeds the budget.

        Raises:
            ConfigError: The plan exceeds the budget; the message has all the numbers.
        """
        if self.total_bytes > self.budget_bytes:
            raise ConfigError(
                f"this plan holds {format_bytes(self.total_bytes)} (window {format_bytes(self.window_bytes)}, read-ahead "
                f"{format_bytes(self.read_ahead_bytes)}, batches {format_bytes(self.batches_bytes)}), more than its budget "
                f"of {format_bytes(self.budget_bytes)}",
                hint="a smaller window or batch, fewer lanes, or FetchConfig(budget_bytes_max=...)",
            )


class MemoryNeeds(NamedTuple):
    """The factors of the memory of a rank's loader, besides the size of a sample, which is known later without an index.

    Attributes:
        window_count: Number of samples in the rank's share of the shuffle window; 0 if nothing is shuffled.
        rows_count: Number of rows in the batches that are being filled or waiting.
        row_bytes: Size of a row in bytes; None counts rows as samples are stored.
        readers_count: Number of lanes, of all sources.
        data_bytes: Size of all shards; None if the listing does not say it.
        fetch: Read options, with the budget.
        objects_bytes: Size of all objects that are samples themselves; None if the listing does not say it.
    """

    window_count: int
    rows_count: int
    row_bytes: int | None
    readers_count: int
    data_bytes: int | None
    fetch: FetchConfig
    objects_bytes: int | None = 0

    def read_ahead_sizes(self, sample_bytes: float) -> ReadAheadSizes:
        """How the lanes read samples of this size: they get what window and batches leave of the budget."""
        _, _, room_bytes = self._divide_budget(sample_bytes)
        return lane_read_ahead_sizes(self.readers_count, self.fetch, room_bytes=room_bytes)

    def plan(self, sample_bytes: float, sizes: ReadAheadSizes) -> MemoryPlan:
        """The memory for samples of this size, and lanes that read ahead like this."""
        window_bytes, batches_bytes, room_bytes = self._divide_budget(sample_bytes)
        ahead_bytes = self.readers_count * sizes.requests_max * PARTS_PER_REQUEST * sizes.part_bytes
        ahead_bytes = ahead_bytes if self.data_bytes is None else min(ahead_bytes, self.data_bytes)
        if not self.window_count:  # one part of one lane is enough to go on: the others wait for room
            ahead_bytes = min(ahead_bytes, room_bytes)
        objects_bytes = max(0, room_bytes - ahead_bytes)
        return MemoryPlan(
            window_bytes=window_bytes,
            read_ahead_bytes=ahead_bytes
            + (objects_bytes if self.objects_bytes is None else min(objects_bytes, self.objects_bytes)),
            batches_bytes=batches_bytes,
            budget_bytes=self._budget_bytes,
        )

    @property
    def _budget_bytes(self) -> int:
        return self.fetch.budget_bytes_max or default_budget_bytes()

    def _divide_budget(self, sample_bytes: float) -> tuple[int, int, int]:
        """Bytes of the window, bytes of the batches, and what they leave of the budget."""
        window_bytes = round(self.window_count * sample_bytes)
        if self.data_bytes is not None:
            window_bytes = min(window_bytes, self.data_bytes)
        batches_bytes = round(self.rows_count * (self.row_bytes or sample_bytes))
        return window_bytes, batches_bytes, max(0, self._budget_bytes - window_bytes - batches_bytes)


TABLES_MAX = 64
"""Number of shards whose table of contents is read for an estimate. Each costs one or two requests, so thousands would be
too many."""


class RequestEstimate(NamedTuple):
    """A number of GETs and of bytes, at least and at most.

    It leaves out retries and hedges, and the row of another rank that pads a batch whose samples were all dropped.
    Minimum and maximum differ if an epoch ends before its last byte, by what has been read ahead: at most the rest of one
    shard for each lane. They also differ by tables of contents that lanes may read once each.
    """

    requests_min: int
    requests_max: int
    bytes_min: int
    bytes_max: int

    def __add__(self, other: RequestEstimate) -> RequestEstimate:  # type: ignore[override]
        return RequestEstimate(*(one + two for one, two in zip(self, other, strict=True)))

    def none_certain(self) -> RequestEstimate:
        """The same requests, where none is certain to be made."""
        return RequestEstimate(0, self.requests_max, 0, self.bytes_max)

    def first_certain(self) -> RequestEstimate:
        """The same requests, where only the first is certain to be made, but not how many of its bytes arrive."""
        return RequestEstimate(min(1, self.requests_min), self.requests_max, 0, self.bytes_max)


NOTHING = RequestEstimate(0, 0, 0, 0)


class UnknownRequestsError(Exception):
    """The requests are known only after reading: a size was not listed, or there are too many tables of contents."""


class RequestEstimator:
    """Adds up the requests of a rank.

    Args:
        reading: Options of its lanes.
    """

    def __init__(self, reading: ReadOptions) -> None:
        self.total = NOTHING
        self._reading = reading
        self._tables: dict[int, RangedShard] = {}  # by the identity of the shard

    def add_spans(self, spans: Iterable[ByteRange]) -> None:
        """Add spans that are one GET each."""
        for span in spans:
            self.total += RequestEstimate(1, 1, span.length_bytes, span.length_bytes)

    def add_lane(
        self, segments: Sequence[ShardSegment], *, needed_count: int | None, ends_inside: bool = False
    ) -> None:
        """Add the reads of a lane.

        Args:
            segments: All segments that the lane may read, in order.
            needed_count: Number of samples that the epoch takes from the lane; None takes all.
            ends_inside: Whether the last of these samples is not the last of its shard.

        Raises:
            UnknownRequestsError: The requests are known only after reading.
            ConfigError: A unit of a shard does not fit the memory budget.
        """
        for number, segment in enumerate(segments):
            requests = self._ranged(segment) if is_ranged(segment) else self._streamed(segment)
            if needed_count is not None:
                count = segment.count or needed_count + 1  # without a count nobody knows where the segment ends
                is_last = number == len(segments) - 1
                is_cut_short = is_last and ends_inside and segment.end_bytes is None and not is_ranged(segment)
                if needed_count <= 0:
                    requests = requests.none_certain()
                elif needed_count < count or is_cut_short:
                    requests = requests.first_certain()
                needed_count -= count
            self.total += requests

    def add_objects(self, objects: SampleReader, numbers: Iterable[int], *, needed_count: int | None = None) -> None:
        """Add samples that are objects.

        Args:
            objects: The source.
            numbers: Numbers of samples of the source, from 0, in the order in which they are read.
            needed_count: Number of these samples that the epoch takes; None takes all.

        Raises:
            UnknownRequestsError: The listing does not state a size.
        """
        if objects.store is None:  # a function of the user reads
            return
        part_bytes = (objects.store.fetch_config or FetchConfig()).part_bytes
        requests: dict[int, RequestEstimate] = {}
        for at, number in enumerate(numbers):
            if number not in requests:
                requests[number] = sum(
                    (
                        _whole(item.size_bytes if item.span is None else item.span.length_bytes, part_bytes)
                        for item in objects.requests(number)
                    ),
                    NOTHING,
                )
            is_certain = needed_count is None or at < needed_count
            self.total += requests[number] if is_certain else requests[number].none_certain()

    def _streamed(self, segment: ShardSegment) -> RequestEstimate:
        if segment.shard.size_bytes is None or segment.format is None:
            raise UnknownRequestsError
        estimate = NOTHING
        for item in segment.plan_items():
            span = item.span or ByteRange(0, segment.shard.size_bytes)
            requests = requests_count(span, self._reading.sizes.part_bytes)
            estimate += RequestEstimate(requests, requests, span.length_bytes, span.length_bytes)
        head = FORMATS[segment.format].head if segment.format in FORMATS else None
        if head is not None and segment.offset_bytes:
            first_bytes = min(next(head()).length_bytes, segment.shard.size_bytes)
            estimate += RequestEstimate(1, 1, first_bytes, first_bytes)
            if segment.offset_bytes > first_bytes:  # a longer head, which ends before the segment, takes a second GET
                estimate += RequestEstimate(0, 1, 0, segment.offset_bytes)
        return estimate

    def _ranged(self, segment: ShardSegment) -> RequestEstimate:
        if segment.shard.size_bytes is None:
            raise UnknownRequestsError
        key = id(segment.shard)
        is_new = key not in self._tables
        if is_new and len(self._tables) == TABLES_MAX:
            raise UnknownRequestsError
        shard = RangedShard(segment, reading=self._reading)
        try:
            items = shard.planned()
            self._tables.setdefault(key, shard)  # keeps the table of contents for other lanes
        finally:
            if is_new and key not in self._tables:
                shard.close()
        estimate = NOTHING
        for span in shard.probed:  # read again if the first lane has finished the shard before the second one begins it
            certain = int(is_new)
            estimate += RequestEstimate(certain, 1, certain * span.length_bytes, span.length_bytes)
        for item in items:
            assert item.span is not None
            requests = requests_count(item.span, self._reading.sizes.part_bytes)
            estimate += RequestEstimate(requests, requests, item.span.length_bytes, item.span.length_bytes)
        return estimate


def _whole(size_bytes: int | None, part_bytes: int) -> RequestEstimate:
    """The requests for an object that is read whole."""
    if size_bytes is None:
        raise UnknownRequestsError
    requests = requests_count(ByteRange(0, size_bytes), part_bytes)
    return RequestEstimate(requests, requests, size_bytes, size_bytes)
