"""What ``IndexedOrder`` and ``MixOrder`` share: positions go round the lanes, and each lane belongs to a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.order.bounds import check_lane


class LanedOrder:
    """Position p is round p // L of lane p mod L; rank r of W owns the lanes l with l mod W = r."""

    __slots__ = ()

    if TYPE_CHECKING:
        rank: int
        world_size: int

        @property
        def samples_count(self) -> int:
            """N: number of positions in an epoch."""

        @property
        def lanes_count(self) -> int:
            """L: number of lanes."""

    @property
    def lanes_owned(self) -> tuple[int, ...]:
        """Numbers of the rank's lanes, ascending; all ranks own the same number of lanes."""
        return tuple(range(self.rank, self.lanes_count, self.world_size))

    def lane_length(self, lane: int) -> int:
        """Return the number of samples of a lane in an epoch; lanes differ by at most 1."""
        check_lane(lane, self.lanes_count)
        return self.samples_count // self.lanes_count + (lane < self.samples_count % self.lanes_count)
