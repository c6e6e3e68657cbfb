"""Which batches were handed out, where they need not come in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator


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

    def as_json(self) -> list[Any]:
        """``[lowest, [higher, ...]]``, for a state."""
        return [self.lowest, list(self.higher)]

    @classmethod
    def from_json(cls, value: Any) -> HandedOut:
        """The inverse of ``as_json``.

        Raises:
            ConfigError: It is none of its results.
        """
        if (
            not isinstance(value, Sequence)
            or len(value) != 2
            or type(value[0]) is not int
            or not isinstance(value[1], Sequence)
            or not all(type(batch) is int for batch in value[1])
        ):
            raise ConfigError(f"handed_out {value!r:.80} of a state must be [lowest, [higher, ...]]")
        return cls(value[0], value[1])

    def _settle(self) -> None:
        while self.lowest in self._higher:
            self._higher.remove(self.lowest)
            self.lowest += 1
