"""Which positions are a batch, and which of them a rank's: arithmetic on the positions of one epoch.

Global batch k is positions [origin + k * G, origin + (k + 1) * G); rank r of W has those with p mod W = r, which is where
its lanes' samples lie, because W divides L. G is a multiple of W, so all ranks have equally many, in every batch:
no rank waits for another, and the set of samples of a global batch does not depend on W.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.errors import ConfigError
from penstock.order.bounds import RANKS_MAX, check_ranges
from penstock.order.indexed import SAMPLES_MAX

if TYPE_CHECKING:
    import numpy.typing as npt

GLOBAL_SIZE_MAX = 1 << 32


class BatchPositions(NamedTuple):
    """One rank's share of a global batch.

    The first `valid_count` positions are samples; those after pad the last batch and repeat the epoch's last position,
    which may lie in another rank's lane: any row will do in its place, for ``__valid__`` masks it.
    """

    positions: npt.NDArray[np.int64]
    valid_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """The global batches of one epoch, as one rank sees them.

    Attributes:
        samples_count: Positions of the epoch, e.g. ``IndexedOrder.samples_count``.
        global_size: G, samples of a global batch, a multiple of `world_size`.
        rank: Of `world_size`.
        world_size: Data-parallel ranks.
        drop_last: Drop the positions that do not fill a global batch. False: the last batch has what is left, padded to
            a multiple of `world_size` (with one rank: not at all).
        take: Positions from this one on are left out, of the epoch as a whole, before batches are counted.
        origin: Where batch 0 begins: the position of a state, where the rest of an epoch is read with another G.

    Raises:
        ConfigError: Numbers out of range, or a G that the ranks do not divide.
    """

    samples_count: int
    global_size: int
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False
    take: int | None = None
    origin: int = 0

    def __post_init__(self) -> None:
        check_ranges(
            ("samples_count", self.samples_count, 0, SAMPLES_MAX),
            ("global_size", self.global_size, 1, GLOBAL_SIZE_MAX),
            ("world_size", self.world_size, 1, RANKS_MAX),
            ("rank", self.rank, 0, self.world_size - 1),
            ("take", self.samples_count if self.take is None else self.take, 0, SAMPLES_MAX),
            ("origin", self.origin, 0, SAMPLES_MAX),
        )
        if self.global_size % self.world_size:
            nearest = max(1, round(self.global_size / self.world_size)) * self.world_size
            raise ConfigError(
                f"world_size {self.world_size} does not divide global_size {self.global_size}",
                hint=f"use global_size={nearest}",
            )

    @property
    def stop(self) -> int:
        """Positions from here on are in no batch."""
        stop = self.samples_count if self.take is None else min(self.samples_count, self.take)
        if self.drop_last:
            stop -= max(0, stop - self.origin) % self.global_size
        return stop

    @property
    def batch_size(self) -> int:
        """Samples per rank, of every batch but perhaps the last."""
        return self.global_size // self.world_size

    def __len__(self) -> int:
        """Batches, the same number on every rank: steps per epoch."""
        return max(0, self.stop - self.origin + self.global_size - 1) // self.global_size

    def span(self, batch_index: int) -> range:
        """Positions of a global batch, without padding.

        Raises:
            ConfigError: There is no such batch.
        """
        check_ranges(("batch_index", batch_index, 0, len(self) - 1))
        first = self.origin + batch_index * self.global_size
        return range(first, min(first + self.global_size, self.stop))

    def batch(self, batch_index: int) -> BatchPositions:
        """The rank's positions of a batch, ascending: ``batch_size`` of them, or fewer in the last.

        Raises:
            ConfigError: There is no such batch.
        """
        span = self.span(batch_index)
        rows = -(-len(span) // self.world_size)
        first = span.start + (self.rank - span.start) % self.world_size
        positions = first + np.arange(rows, dtype=np.int64) * self.world_size
        valid_count = int(np.searchsorted(positions, span.stop))
        return BatchPositions(np.minimum(positions, span.stop - 1), valid_count)

    def position_after(self, batch_index: int) -> int:
        """The position that a state holds when all batches up to `batch_index` were handed out."""
        return self.span(batch_index).stop
