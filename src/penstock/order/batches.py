"""The positions of each batch, and each rank's share of them.

Global batch k consists of the positions [origin + k * G, origin + (k + 1) * G). Rank r of W has those with p mod W = r, at
which the samples of its lanes lie, because W divides L. G is a multiple of W, so all ranks have the same number of
samples in every batch: no rank waits for another, and the set of samples of a global batch does not depend on W.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.errors import ConfigError
from penstock.order.indexed import SAMPLES_MAX
from penstock.order.laned import RANKS_MAX, check_ranges

if TYPE_CHECKING:
    import numpy.typing as npt

GLOBAL_SIZE_MAX = 1 << 32


class BatchPositions(NamedTuple):
    """One rank's share of a global batch.

    Attributes:
        positions: int64[n], ascending. Positions from `valid_count` on pad the last batch: they repeat the last position of
            the epoch, which may lie in a lane of another rank. Any row may stand there, because ``__valid__`` masks it.
        valid_count: Number of positions that are samples of the batch.
    """

    positions: npt.NDArray[np.int64]
    valid_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """The global batches of one epoch, as one rank sees them.

    Attributes:
        samples_count: Number of positions of the epoch, e.g. ``IndexedOrder.samples_count``.
        global_size: G, the number of samples in a global batch; a multiple of `world_size`.
        rank: Number of this rank, in [0, `world_size`).
        world_size: Number of data-parallel ranks.
        drop_last: Whether positions that do not fill a global batch are dropped. Otherwise the last batch holds the rest,
            padded to a multiple of `world_size`.
        take: First position that is left out of the epoch; None: all positions are read.
        origin: Position at which batch 0 starts: that of a state, if the rest of an epoch is read with another G.

    Raises:
        ConfigError: A number is out of range, or `world_size` does not divide `global_size`.
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
        """First position that is in no batch."""
        stop = self.samples_count if self.take is None else min(self.samples_count, self.take)
        if self.drop_last:
            stop -= max(0, stop - self.origin) % self.global_size
        return stop

    @property
    def batch_size(self) -> int:
        """Number of samples per rank in every batch; the last one may have fewer."""
        return self.global_size // self.world_size

    def __len__(self) -> int:
        """Number of batches, the same on every rank: the steps of an epoch."""
        return max(0, self.stop - self.origin + self.global_size - 1) // self.global_size

    def span(self, batch_index: int) -> range:
        """Return the positions of a global batch, without padding.

        Raises:
            ConfigError: The epoch has no batch of this number.
        """
        check_ranges(("batch_index", batch_index, 0, len(self) - 1))
        first = self.origin + batch_index * self.global_size
        return range(first, min(first + self.global_size, self.stop))

    def batch(self, batch_index: int) -> BatchPositions:
        """Return the rank's positions of a batch: ``batch_size`` positions, or fewer in the last batch.

        Raises:
            ConfigError: The epoch has no batch of this number.
        """
        span = self.span(batch_index)
        rows = -(-len(span) // self.world_size)
        first = span.start + (self.rank - span.start) % self.world_size
        positions = first + np.arange(rows, dtype=np.int64) * self.world_size
        valid_count = int(np.searchsorted(positions, span.stop))
        return BatchPositions(np.minimum(positions, span.stop - 1), valid_count)

    def position_after(self, batch_index: int) -> int:
        """Return the position that a state holds after all batches up to and including `batch_index` were delivered."""
        return self.span(batch_index).stop
