"""What read plans have in common that do not know the number of samples before they read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.loader.batching import Batching
    from penstock.loader.lanes.lane import Lane
    from penstock.loader.lanes.segments import ReadOptions
    from penstock.loader.plan.memory import MemoryNeeds
    from penstock.order import StreamOrder
    from penstock.sources.data_source import DataSource

SIZED_COUNT = 8
"""Number of samples of each lane from which the size of all samples is estimated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UncountedReadPlan:
    """The part of a data set of unknown length that this rank reads; the base of ``ReadPlan`` classes.

    Attributes:
        source: The data set.
        order: Order of epoch 0.
        reading: Options of the lanes.
        needs: Memory that reading needs, once the size of a sample is known.
    """

    source: DataSource
    order: StreamOrder
    reading: ReadOptions
    needs: MemoryNeeds

    @property
    def sources(self) -> Sequence[DataSource]:
        """The source, as a list."""
        return [self.source]

    @property
    def memory(self) -> None:
        """None: only the first samples tell."""

    def batches(self, epoch: int, *, batching: Batching) -> None:
        """None, because the batches are known only after reading."""

    def _window_bytes(self, lanes: Sequence[Lane]) -> int:
        """Bytes that the window of these lanes holds, estimated from their first samples.

        Raises:
            ConfigError: The memory that the rank needs exceeds its budget.
        """
        plan = self.needs.plan(mean_bytes(lanes), self.reading.sizes)
        plan.check()
        return plan.window_bytes * len(lanes) // self.needs.readers_count


def mean_bytes(lanes: Sequence[Lane]) -> float:
    """Mean size of the first samples of all lanes as stored, of those that have arrived."""
    samples = [sample for lane in lanes for sample in lane.first(SIZED_COUNT)]
    return sum(value.nbytes for sample in samples for value in sample.fields.values()) / max(1, len(samples))
