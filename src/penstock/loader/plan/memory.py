"""The memory of a rank's loader against its byte budget: window, read-ahead and batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from penstock.config import FetchConfig, default_budget_bytes
from penstock.errors import ConfigError
from penstock.fetch import PARTS_PER_REQUEST
from penstock.loader.lanes.segments import ReadAheadSizes, lane_read_ahead_sizes
from penstock.text.sizes import format_bytes


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
    """What it may hold: ``FetchConfig.budget_bytes_max``."""

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
    """What the memory of a rank's loader depends on, besides the size of a sample: without an index that is known later.

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
