"""The base of all orders: positions go round the lanes, each lane belongs to a rank, and numbers lie within their bounds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self, TypeAlias

from penstock.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Integers: TypeAlias = npt.NDArray[np.int64]

WORD_MAX = (1 << 64) - 1
WINDOW_MAX = 1 << 48
RANKS_MAX = 1 << 32
LANES_DEFAULT = 64
"""The usual world sizes divide it. Each lane holds a run and keeps a shard open, so it should not be larger."""


def check_ranges(*bounds: tuple[str, int, int, int]) -> None:
    """Check that every value lies within its bounds.

    Args:
        *bounds: Tuples (name, value, low, high); value must lie in [low, high].

    Raises:
        ConfigError: A value is out of its bounds; the message names both.
    """
    for name, value, low, high in bounds:
        if not low <= value <= high:
            raise ConfigError(f"{name} {value} must be in [{low}, {high}]")


def check_lanes(lanes: int, world_size: int) -> None:
    """Check that all ranks own the same number of lanes.

    Raises:
        ConfigError: The ranks do not divide the lanes; the hint names the nearest number of lanes that they divide.
    """
    if lanes % world_size:
        below = lanes // world_size * world_size
        above = below + world_size
        nearest = below if below and lanes - below <= above - lanes else above
        raise ConfigError(
            f"world_size {world_size} does not divide lanes {lanes}",
            hint=f"to resume inside an epoch, use a number of ranks that divides {lanes}; for a new job, use lanes={nearest}",
        )


def check_lane(lane: int, lanes_count: int) -> None:
    """Check that a lane exists.

    Raises:
        ConfigError: `lane` is not in [0, `lanes_count`).
    """
    if not 0 <= lane < lanes_count:
        raise ConfigError(f"lane {lane} must be in [0, {lanes_count})")


class Location(NamedTuple):
    """Where a sample lies."""

    source: int  # number of the source in a mix, otherwise 0
    shard: int  # index of the shard in the listing of its source
    sample: int  # number of the sample in the shard, from 0


class SampleLocations(NamedTuple):
    """Where samples lie, in the order in which they leave a lane; int64[n] each."""

    sources: Integers
    shards: Integers
    samples: Integers

    def location(self, index: int) -> Location:
        """Return the location of the `index`-th sample, from 0."""
        return Location(int(self.sources[index]), int(self.shards[index]), int(self.samples[index]))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LanedOrder:
    """The base of all orders: lanes, of which rank r of W owns the lanes l with l mod W = r.

    Attributes:
        seed: Seed in [0, 2**64), the same for all ranks.
        epoch: Epoch number, from 0.
        lanes: Number of lanes of the job, a multiple of `world_size`; None: 64 if shuffled, else `world_size`.
        rank: Number of this rank, in [0, `world_size`).
        world_size: Number of data-parallel ranks.
    """

    LANES_MAX: ClassVar[int] = 1 << 32

    seed: int = 0
    epoch: int = 0
    lanes: int | None = None
    rank: int = 0
    world_size: int = 1

    if TYPE_CHECKING:

        @property
        def shuffled(self) -> bool:
            """Whether samples are permuted."""

    def check(self, *bounds: tuple[str, int, int, int]) -> None:
        """Check seed, epoch, lanes and ranks, and other numbers with their bounds, as ``check_ranges`` does.

        Raises:
            ConfigError: A number is out of range, or `world_size` does not divide `lanes`.
        """
        check_ranges(
            *bounds,
            ("seed", self.seed, 0, WORD_MAX),
            ("epoch", self.epoch, 0, WORD_MAX),
            ("world_size", self.world_size, 1, RANKS_MAX),
            ("rank", self.rank, 0, self.world_size - 1),
            ("lanes", self.lanes_configured, 1, self.LANES_MAX),
        )
        check_lanes(self.lanes_configured, self.world_size)

    @property
    def lanes_configured(self) -> int:
        """``lanes``, or its default if that is None."""
        if self.lanes is not None:
            return self.lanes
        return LANES_DEFAULT if self.shuffled else self.world_size

    @property
    def lanes_count(self) -> int:
        """L: number of lanes. Where an index counts samples and there are more lanes than samples, some lanes are empty."""
        return self.lanes_configured

    @property
    def lanes_owned(self) -> tuple[int, ...]:
        """Numbers of the rank's lanes, ascending."""
        return tuple(range(self.rank, self.lanes_count, self.world_size))

    def at_epoch(self, epoch: int) -> Self:
        """Return the order of another epoch."""
        return replace(self, epoch=epoch)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CountedOrder(LanedOrder):
    """The common part of ``IndexedOrder`` and ``MixOrder``: position p is round p // L of lane p mod L."""

    if TYPE_CHECKING:

        @property
        def samples_count(self) -> int:
            """N: number of positions in an epoch."""

        def locations(self, lane: int, first: int = 0, count: int | None = None) -> SampleLocations:
            """Return where the samples that leave a lane lie, in the order in which they leave."""

    def lane_length(self, lane: int) -> int:
        """Return the number of samples of a lane in an epoch; lanes differ by at most 1."""
        check_lane(lane, self.lanes_count)
        return self.samples_count // self.lanes_count + (lane < self.samples_count % self.lanes_count)

    def locate(self, position: int) -> Location:
        """Return where the sample at a position of the job's order lies.

        Raises:
            ConfigError: `position` is not in [0, ``samples_count``).

        Cost: O(log shards), the permutation of one run and, for a mix, 10 µs per source.
        """
        check_ranges(("position", position, 0, self.samples_count - 1))
        round_index, lane = divmod(position, self.lanes_count)
        return self.locations(lane, round_index, 1).location(0)
