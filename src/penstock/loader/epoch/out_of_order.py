"""Batches out of order: whichever is complete first is handed out, each exactly once; and the state that says which were."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.loader.position import OutOfOrderPosition
from penstock.order import HandedOut

if TYPE_CHECKING:
    from penstock.loader.position import FeedPosition, Position


class OutOfOrderTracker:
    """Keeps account of one run.

    Args:
        position: Where the run begins; None is the beginning of the epoch.
        feed_position: The same, as the feed says it.
        global_size: Number of samples in a batch of all ranks.

    Raises:
        ConfigError: batches of another size were handed out.
    """

    def __init__(self, position: Position | None, *, feed_position: FeedPosition, global_size: int) -> None:
        self._before: tuple[int, ...] = ()
        self._global_size = global_size
        if isinstance(position, OutOfOrderPosition):
            self._before = position.handed_out
            if self._before and position.global_size != global_size:
                raise ConfigError(
                    f"the state has handed out single batches of {position.global_size} samples out of order, "
                    f"this loader makes batches of {global_size}",
                    hint="resume with the same global batch size",
                )
        self._handed = HandedOut(0, self._before)
        # behind each batch, from the last one on behind which reading can go on: those of `_before` are not read again
        self._positions: dict[int, FeedPosition] = {-1: feed_position}

    def is_left(self, number: int) -> bool:
        """Whether a batch, counted from where the run begins, is to be given by it."""
        return number not in self._before

    def number_of(self, delivered: int) -> int:
        """Number of the `delivered`-th batch that the run makes."""
        number = delivered
        for handed in sorted(self._before):
            number += handed <= number
        return number

    def take(self, number: int, position: FeedPosition) -> Position:
        """Note that a batch is handed out.

        Args:
            number: Number of the batch, counted from where the run begins.
            position: Where the feed is behind this batch.

        Returns:
            The position to go on from.
        """
        self._handed.add(number)
        self._positions[number] = position
        lowest = self._handed.lowest
        last = max(each for each in self._positions if each < lowest)
        for done in [each for each in self._positions if each < last]:
            del self._positions[done]
        handed = (*range(last + 1, lowest), *self._handed.higher)
        base = self._positions[last]
        if not handed:
            return base
        return OutOfOrderPosition(base, tuple(each - last - 1 for each in handed), self._global_size)
