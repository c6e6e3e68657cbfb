"""Which batches were handed out, where they need not come in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class HandedOut:
    """Batches that were handed out: all below ``lowest``, and a few above.

    With ``in_order=False`` a loader gives whichever batch is complete. What a state has to say is the lowest batch that
    was not handed out and the higher ones that were: as many as batches are under way at a time.

    Args:
        lowest: The lowest batch that was not handed out.
        higher: Those above it that were.
    """

    __slots__ = ("_higher", "lowest")

    def __init__(self, lowest: int = 0, higher: Sequence[int] = ()) -> None:
        if lowest < 0 or any(batch < lowest for batch in higher):
            raise ConfigError(f"batches handed out {list(higher)!r} must lie above the lowest that was not, {lowest}")
        self.lowest = lowest
        self._higher = set(higher)
        self._settle()

    @property
    def higher(self) -> tuple[int, ...]:
        """Batches above ``lowest`` that were handed out, ascending."""
        return tuple(sorted(self._higher))

    def __contains__(self, batch_index: int) -> bool:
        """Whether it was handed out."""
        return batch_index < self.lowest or batch_index in self._higher

    def add(self, batch_index: int) -> None:
        """`batch_index` is handed out now.

        Raises:
            ValueError: It was before.
        """
        if batch_index in self:
            raise ValueError(f"batch {batch_index} was handed out before")
        self._higher.add(batch_index)
        self._settle()

    def left(self, batches_count: int) -> Iterator[int]:
        """The batches of an epoch that were not handed out, ascending."""
        return (batch for batch in range(self.lowest, batches_count) if batch not in self._higher)

    def _settle(self) -> None:
        while self.lowest in self._higher:
            self._higher.remove(self.lowest)
            self.lowest += 1
