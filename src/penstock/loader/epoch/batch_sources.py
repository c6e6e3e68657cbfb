"""Where the training loop gets its batches from. Each class numbers and finishes what a run delivers, in one mode.

All of them have one interface, ``BatchSource``; ``opening.py`` chooses. For ``in_order=False`` see ``out_of_order.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from penstock.loader.position import IndexPosition

if TYPE_CHECKING:
    from penstock.loader.batches.run import Delivery
    from penstock.loader.epoch.consensus import RankConsensus
    from penstock.loader.epoch.padding import Finisher
    from penstock.loader.position import Position
    from penstock.order import Batches


class NumberedBatch(NamedTuple):
    """A batch for the training loop.

    Attributes:
        batch: The batch: a dict of columns, or what the user's collate function gave.
        position: Position after this batch, for the state.
        number: Number of the batch in the epoch, from 0.
    """

    batch: Any
    position: Position
    number: int


class BatchRun(Protocol):
    """What makes the batches: ``EpochRun`` in threads, ``ProcessRun`` in worker processes."""

    def next_batch(self) -> Delivery | None:
        """The next batch; None at the end of the epoch. Blocks."""

    def has_next(self) -> bool:
        """Whether another batch or an error follows. Blocks until that is known, but not until the batch is complete."""

    def close(self) -> None:
        """End the threads or worker processes; idempotent."""


class BatchSource(ABC):
    """Gives the batches of the rest of an epoch: those of one run.

    Attributes:
        agrees_each_batch: Whether the ranks reach a consensus before each batch.
    """

    agrees_each_batch = False

    def __init__(self, run: BatchRun, finisher: Finisher) -> None:
        self._run = run
        self._finisher = finisher

    @abstractmethod
    def next(self) -> NumberedBatch | None:
        """The next batch; None at the end of the epoch. Blocks.

        Raises:
            StoreError, DataError: The next batch in order could not be made; raised again at each further call.
            ClosedError: The source was closed, or this process inherited it through ``fork``.
        """

    def close(self) -> None:
        """End the threads or worker processes; idempotent."""
        self._run.close()


class CountedBatches(BatchSource):
    """Batches whose number and sizes follow from an index by arithmetic. All ranks have equally many.

    Args:
        run: Makes the batches whose numbers are in `numbers`.
        finisher: Finishes them.
        batches: Positions of all batches from `first_number` on.
        first_number: Number, in the epoch, of the first of `batches`.
        numbers: Numbers, in the epoch, of the batches to give.
    """

    def __init__(
        self, run: BatchRun, finisher: Finisher, *, batches: Batches, first_number: int, numbers: range
    ) -> None:
        super().__init__(run, finisher)
        self._batches = batches
        self._first_number = first_number
        self._numbers = numbers
        self._taken_count = 0

    def next(self) -> NumberedBatch | None:
        """The next batch that the finisher does not skip."""
        while self._taken_count < len(self._numbers):
            number = self._numbers[self._taken_count]
            delivery = self._run.next_batch()
            self._taken_count += 1
            if not self._finisher.skips(delivery):
                index = number - self._first_number
                batch = self._finisher.finish(delivery, rows_count_of(self._batches, index))
                return NumberedBatch(batch, IndexPosition(self._batches.position_after(index)), number)
        return None


class StreamedBatches(BatchSource):
    """Batches whose number is known only after reading, on a rank that need not be in step with others.

    Args:
        run: Makes the batches whose numbers are `next_number`, `next_number` + `step`, and so on.
        finisher: Finishes them.
        rows_count: Number of rows of a full batch.
        next_number: Number, in the epoch, of the first batch that `run` makes.
        step: Difference between the numbers of two batches that follow each other.
    """

    def __init__(self, run: BatchRun, finisher: Finisher, *, rows_count: int, next_number: int, step: int = 1) -> None:
        super().__init__(run, finisher)
        self._rows_count = rows_count
        self._next_number = next_number
        self._step = step

    def next(self) -> NumberedBatch | None:
        """The next batch that the finisher does not skip."""
        while (delivery := self._run.next_batch()) is not None:
            number = self._next_number
            self._next_number += self._step
            if not self._finisher.skips(delivery):
                assert delivery.position is not None
                return NumberedBatch(self._finisher.finish(delivery, self._rows_count), delivery.position, number)
        return None


class RebatchedBatches(BatchSource):
    """Batches of a run whose stages change the number of samples: the run makes all of them, and every n-th one is given.

    Args:
        run: Makes all batches.
        finisher: Finishes them.
        rows_count: Number of rows of a full batch.
        first_number: Number, in the epoch, of the first batch that `run` makes.
        stride: ``(j, n)``: the batches whose number mod n is j are given.
    """

    def __init__(
        self, run: BatchRun, finisher: Finisher, *, rows_count: int, first_number: int, stride: tuple[int, int]
    ) -> None:
        super().__init__(run, finisher)
        self._rows_count = rows_count
        self._next_number = first_number
        self._which, self._every = stride

    def next(self) -> NumberedBatch | None:
        """The next batch of the stride; the others are dropped."""
        while (delivery := self._run.next_batch()) is not None:
            number = self._next_number
            self._next_number += 1
            if number % self._every == self._which and not self._finisher.skips(delivery):
                assert delivery.position is not None
                return NumberedBatch(self._finisher.finish(delivery, self._rows_count), delivery.position, number)
        return None


class AgreedBatches(BatchSource):
    """Batches of ranks that do not know how many the others have: before each batch they agree whether all go on.

    Args:
        run: Makes this rank's batches.
        finisher: Finishes them.
        consensus: Consensus of the ranks.
        rows_count: Number of rows of a full batch.
        first_number: Number, in the epoch, of the first batch that `run` makes.
        position: Position before the first batch.
        ends_with_last: Whether all ranks go on until the last one runs out, those that have run out with padding; otherwise
            the epoch ends when the first one runs out.
    """

    agrees_each_batch = True

    def __init__(
        self,
        run: BatchRun,
        finisher: Finisher,
        *,
        consensus: RankConsensus,
        rows_count: int,
        first_number: int,
        position: Position,
        ends_with_last: bool,
    ) -> None:
        super().__init__(run, finisher)
        self._consensus = consensus
        self._rows_count = rows_count
        self._next_number = first_number
        self._position = position
        self._ends_with_last = ends_with_last
        self._goes_on: bool | None = None  # what the ranks agreed on for the next batch; None: they have not yet

    def next(self) -> NumberedBatch | None:
        """The next batch that the finisher does not skip, if all ranks go on. They also agree on the batch after it here."""
        if self._goes_on is None:
            self._goes_on = self._agree()
        while self._goes_on:
            with self._consensus.reporting_failure():
                delivery = self._run.next_batch()
                number = self._next_number
                self._next_number += 1
                if delivery is not None and delivery.position is not None:
                    self._position = delivery.position
                skips = self._finisher.skips(delivery)
                batch = None if skips else self._finisher.finish(delivery, self._rows_count)
            self._goes_on = None  # in case the consensus fails
            self._goes_on = self._agree()
            if not skips:
                return NumberedBatch(batch, self._position, number)
        return None

    def _agree(self) -> bool:
        """Whether all ranks go on with another batch."""
        self._consensus.check()
        with self._consensus.reporting_failure():
            has_next = self._run.has_next()
        if self._ends_with_last:
            return self._consensus.smallest(int(not has_next)) == 0
        return self._consensus.smallest(int(has_next)) > 0


def rows_count_of(batches: Batches, index: int) -> int:
    """Number of rows that a batch has on every rank, those that only pad it included."""
    return -(-len(batches.span(index)) // batches.world_size)
