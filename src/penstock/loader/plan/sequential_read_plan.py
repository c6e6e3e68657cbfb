"""Reading what can be read only from its first sample to its last: a position is the number of samples that were handed out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from penstock.loader.lanes.feed import LanesFeed, OpenedFeed
from penstock.loader.lanes.lane import Lane, PinnedBytes
from penstock.loader.lanes.sequential import SequentialLaneReader
from penstock.loader.plan.uncounted_read_plan import UncountedReadPlan
from penstock.loader.position import RunStart, StreamPosition

if TYPE_CHECKING:
    from penstock.loader.batching import Batching
    from penstock.loader.position import FeedPosition


@dataclass(frozen=True, slots=True, kw_only=True)
class SequentialReadPlan(UncountedReadPlan):
    """What a reader gives, as one lane of one rank. All runs of a lane have the same length, so a number is a position."""

    mode: ClassVar[str] = "sequential"

    def begin(self, epoch: int, position: FeedPosition | None, *, batching: Batching) -> OpenedFeed:
        """The samples of an epoch from a position on; None is the beginning of the epoch.

        Raises:
            ConfigError: The reader has begun this epoch before.

        Cost: reads all samples before the position, and decodes none of them.
        """
        assert not isinstance(position, StreamPosition)  # a state of another mode has been refused
        reader = self.source.reader
        assert reader is not None
        taken = 0 if position is None else position.position
        order = self.order.at_epoch(epoch)
        run_index, given_count = divmod(taken, order.run_length(0, 0))
        before_count = taken - given_count
        lane = Lane(
            0,
            runs=order,
            reader=SequentialLaneReader(reader, epoch=epoch, skip_count=before_count, reading=self.reading),
            pins=PinnedBytes(self.reading.pinned_bytes_max),
            start=RunStart(run_index, None, 0, 0, before_count),
            given_count=given_count,
        )
        feed = LanesFeed(
            [lane],
            lanes_count=1,
            round_count=taken,
            count=None if batching.take_count is None else max(0, batching.take_count - taken),
            window_bytes=lambda: self._window_bytes([lane]),
        )
        return OpenedFeed(feed, None)

    def estimate_requests(self, *, batching: Batching) -> None:
        """None, because the reader makes the requests."""

    def for_rank(self, rank: int, world_size: int) -> SequentialReadPlan:
        """The same plan: there is only one rank."""
        assert (rank, world_size) == (0, 1)  # the planner has refused other ranks
        return self
