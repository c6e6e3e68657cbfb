"""What a rank's loader holds: window, read-ahead, batches, against its byte budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from penstock.config import FetchConfig, default_budget_bytes
from penstock.errors import ConfigError
from penstock.fetch import PARTS_PER_REQUEST
from penstock.loader.lanes.segments import ReadAheadSizes, read_ahead
from penstock.sizes import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What a rank's loader would hold, at most."""

    window_bytes: int
    """The rank's share of the shuffle window, samples as stored."""
    read_ahead_bytes: int
    """Parts on their way and waiting, of all lanes."""
    batches_bytes: int
    """Batches under way and waiting."""
    budget_bytes: int
    """What it may hold: ``FetchConfig.budget_bytes_max``."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.window_bytes + self.read_ahead_bytes + self.batches_bytes

    def check(self) -> None:
        """Refuse what does not fit.

        Raises:
            ConfigError: it does not, with all the numbers.
        """
        if self.total_bytes > self.budget_bytes:
            raise ConfigError(
                f"this plan holds {format_bytes(self.total_bytes)} (window {format_bytes(self.window_bytes)}, read-ahead "
                f"{format_bytes(self.read_ahead_bytes)}, batches {format_bytes(self.batches_bytes)}), more than its budget of "
                f"{format_bytes(self.budget_bytes)}",
                hint="a smaller window or batch, fewer lanes, or FetchConfig(budget_bytes_max=...)",
            )


class MemoryNeeds(NamedTuple):
    """What a rank's loader holds, but for the size of its samples, which is known later where there is no index.

    Attributes:
        window_count: Samples in its share of the shuffle window; 0 where nothing is shuffled.
        rows_count: Of its batches under way and waiting, all together.
        row_bytes: Of one in a batch; None: as many as of the sample.
        readers_count: Lanes, of all sources.
        data_bytes: Of all shards; None where the listing did not say.
        fetch: Has the budget.
        objects_bytes: Of all objects that are samples themselves; None where the listing did not say.
    """

    window_count: int
    rows_count: int
    row_bytes: int | None
    readers_count: int
    data_bytes: int | None
    fetch: FetchConfig
    objects_bytes: int | None = 0

    def sizes(self, sample_bytes: float) -> ReadAheadSizes:
        """How its lanes read, with samples of this size: what the window leaves of the budget is theirs."""
        _, _, room_bytes = self._held(sample_bytes)
        return read_ahead(self.readers_count, self.fetch, room_bytes=room_bytes)

    def plan(self, sample_bytes: float, sizes: ReadAheadSizes) -> MemoryPlan:
        """All that it holds, with samples of this size and lanes that read so."""
        window_bytes, batches_bytes, room_bytes = self._held(sample_bytes)
        ahead_bytes = self.readers_count * sizes.requests_max * PARTS_PER_REQUEST * sizes.part_bytes
        ahead_bytes = ahead_bytes if self.data_bytes is None else min(ahead_bytes, self.data_bytes)
        if not self.window_count:  # one part of one lane is enough to go on: the rest waits for room
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

    def _held(self, sample_bytes: float) -> tuple[int, int, int]:
        """Bytes of the window, of the batches, and what is left of the budget."""
        window_bytes = round(self.window_count * sample_bytes)
        if self.data_bytes is not None:
            window_bytes = min(window_bytes, self.data_bytes)
        batches_bytes = round(self.rows_count * (self.row_bytes or sample_bytes))
        return window_bytes, batches_bytes, max(0, self._budget_bytes - window_bytes - batches_bytes)
