"""``in_order=False``: whichever batch is complete first is handed out, each exactly once; the state says which ones were."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.loader.epoch.batch_sources import BatchSource, NumberedBatch, rows_count_of
from penstock.loader.position import IndexPosition, OutOfOrderPosition, StreamPosition
from penstock.order import DeliveredBatches

if TYPE_CHECKING:
    from penstock.loader.epoch.batch_sources import BatchRun
    from penstock.loader.epoch.padding import Finisher
    from penstock.loader.position import FeedPosition, Position
    from penstock.order import Batches


class OutOfOrderTracker:
    """Keeps account of the batches that one run has handed out.

    Batches are numbered from the place where the run begins. The run does not make those that were handed out before.

    Args:
        position: Position at which the run begins; None is the beginning of the epoch.
        feed_position: Position of the feed at which the run begins.
        global_size: Number of samples in a batch of all ranks.

    Raises:
        ConfigError: Batches of another size were handed out.
    """

    def __init__(self, position: Position | None, *, feed_position: FeedPosition, global_size: int) -> None:
        self._before: tuple[int, ...] = ()
        self._global_size = global_size
        if isinstance(position, OutOfOrderPosition):
            self._before = position.handed_out
            if self._before and position.global_size != global_size:
                raise ConfigError(
                    f"the state has handed out single batches of {position.global_size} samples out of order, "
                    f"but this loader makes batches of {global_size}",
                    hint="resume with the same global batch size",
                )
        self._handed = DeliveredBatches(0, self._before)
        # after each batch, from the last one on after which reading can go on: those of `_before` are not read again
        self._positions: dict[int, FeedPosition] = {-1: feed_position}

    @property
    def before_count(self) -> int:
        """Number of batches after the run's first position that an earlier run handed out."""
        return len(self._before)

    def makes(self, number: int) -> bool:
        """Whether the run makes the batch with this number."""
        return number not in self._before

    def number_of(self, made: int) -> int:
        """Number of the batch that the run makes as its `made`-th, from 0."""
        number = made
        for handed in sorted(self._before):
            number += handed <= number
        return number

    def take(self, number: int, position: FeedPosition) -> Position:
        """Note that a batch is handed out.

        Args:
            number: Number of the batch.
            position: Position of the feed after this batch.

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


class CountedOutOfOrder(BatchSource):
    """Batches in the order in which they are complete, where an index tells how many there are.

    Args:
        run: Makes the batches that are left.
        finisher: Finishes them.
        tracker: Account of what was handed out.
        batches: Positions of all batches from the beginning of the run on.
        next_number: Number of batches of the epoch that were handed out before; the next batch gets this number.
    """

    def __init__(
        self, run: BatchRun, finisher: Finisher, *, tracker: OutOfOrderTracker, batches: Batches, next_number: int
    ) -> None:
        super().__init__(run, finisher)
        self._tracker = tracker
        self._batches = batches
        self._next_number = next_number
        self._taken_count = 0

    def next(self) -> NumberedBatch | None:
        """The next complete batch that the finisher does not skip."""
        while self._taken_count < len(self._batches) - self._tracker.before_count:
            delivery = self._run.next_batch()
            # without a delivery it is the last batch, of which this rank has no sample
            index = self._tracker.number_of(self._taken_count if delivery is None else delivery.number)
            number = self._next_number
            self._next_number += 1
            self._taken_count += 1
            position = self._tracker.take(index, IndexPosition(self._batches.position_after(index)))
            if not self._finisher.skips(delivery):
                return NumberedBatch(
                    self._finisher.finish(delivery, rows_count_of(self._batches, index)), position, number
                )
        return None


class StreamedOutOfOrder(BatchSource):
    """Batches in the order in which they are complete, where their number is known only after reading.

    Args:
        run: Makes the batches that are left.
        finisher: Finishes them.
        tracker: Account of what was handed out.
        rows_count: Number of rows of a full batch.
        next_number: Number of batches of the epoch that were handed out before; the next batch gets this number.
    """

    def __init__(
        self, run: BatchRun, finisher: Finisher, *, tracker: OutOfOrderTracker, rows_count: int, next_number: int
    ) -> None:
        super().__init__(run, finisher)
        self._tracker = tracker
        self._rows_count = rows_count
        self._next_number = next_number

    def next(self) -> NumberedBatch | None:
        """The next complete batch that the finisher does not skip."""
        while (delivery := self._run.next_batch()) is not None:
            number = self._next_number
            self._next_number += 1
            assert isinstance(delivery.position, IndexPosition | StreamPosition)
            position = self._tracker.take(self._tracker.number_of(delivery.number), delivery.position)
            if not self._finisher.skips(delivery):
                return NumberedBatch(self._finisher.finish(delivery, self._rows_count), position, number)
        return None
