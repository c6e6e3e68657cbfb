"""The batches that were delivered so far, when they need not be delivered in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


class DeliveredBatches:
    """The set of batches that were delivered: all below ``lowest``, and a few above it.

    With ``in_order=False`` a loader delivers whichever batch is complete. A state then has to hold the lowest batch that
    was not delivered, and the higher ones that were: at most as many as are in progress at a time.

    Args:
        lowest: Index of the lowest batch that was not delivered, from 0.
        higher: Indices of the batches above it that were delivered.

    Attributes:
        lowest: Index of the lowest batch that was not delivered.

    Raises:
        ConfigError: `lowest` is negative, or an index in `higher` is below it.
    """

    __slots__ = ("_higher", "lowest")

    def __init__(self, lowest: int = 0, higher: Sequence[int] = ()) -> None:
        if lowest < 0 or any(batch < lowest for batch in higher):
            raise ConfigError(
                f"delivered batches {list(higher)!r} must lie above the lowest that was not delivered, {lowest}"
            )
        self.lowest = lowest
        self._higher = set(higher)
        self._advance_lowest()

    @property
    def higher(self) -> tuple[int, ...]:
        """Indices of the delivered batches above ``lowest``, ascending."""
        return tuple(sorted(self._higher))

    def __contains__(self, batch_index: int) -> bool:
        """Whether the batch was delivered."""
        return batch_index < self.lowest or batch_index in self._higher

    def add(self, batch_index: int) -> None:
        """Record that a batch was delivered.

        Raises:
            ValueError: The batch was already delivered.
        """
        if batch_index in self:
            raise ValueError(f"batch {batch_index} was already delivered")
        self._higher.add(batch_index)
        self._advance_lowest()

    def _advance_lowest(self) -> None:
        while self.lowest in self._higher:
            self._higher.remove(self.lowest)
            self.lowest += 1
