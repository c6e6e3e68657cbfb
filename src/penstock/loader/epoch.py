"""One epoch of one rank, as the training loop sees it: the run behind it, and agreement with the other ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.loader.delivering import delivered, masked, padding, row_to_repeat
from penstock.loader.filling import MembersFilling, RowsFilling
from penstock.loader.run import EpochRun, Filling

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.loader.planning import Plan
    from penstock.loader.run import Delivery, RunPlan
    from penstock.loader.statistics import Meter


class Found(NamedTuple):
    """A batch for the training loop, and where the feed is behind it."""

    batch: dict[str, Any]
    mark: Any


class Epoch:
    """Gives batches until the epoch ends, for all ranks at once.

    Args:
        plan: What to read.
        run_plan: How to make batches of it.
        number: Of the epoch.
        cursor: Where in it to begin; None is its beginning.
        agree: See ``Loader``.
        meter: Told of samples, bytes and seconds.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        run_plan: RunPlan,
        number: int,
        cursor: Mapping[str, Any] | None,
        agree: Callable[[int], int] | None,
        meter: Meter,
    ) -> None:
        self._plan = plan
        self._run_plan = run_plan
        self._number = number
        self._agree = agree if plan.world_size > 1 else None
        self._meter = meter
        self._is_masked = plan.world_size > 1 and not run_plan.drop_last
        self._last: dict[str, Any] | None = None  # a row to pad with
        self._goes_on: bool | None = None  # what the ranks agreed on for the next batch
        self._run = self._started(cursor)

    def next(self) -> Found | None:
        """The next batch, or None at the end. Blocks.

        Raises:
            StoreError, DataError: where the order reaches what failed; again at each further call.
            ClosedError: closed, or inherited through ``fork``.
        """
        if self._agree is None:
            delivery = self._run.next_batch()
            return None if delivery is None else self._found(delivery)
        if self._goes_on is None:
            self._goes_on = self._asked()
        if not self._goes_on:
            return None
        found = self._found(self._run.next_batch())
        self._goes_on = self._asked()
        return found

    def close(self) -> None:
        """End the threads; idempotent."""
        self._run.close()

    def _started(self, cursor: Mapping[str, Any] | None) -> EpochRun:
        feed = self._plan.job.feed(self._number, cursor)
        self._mark = feed.mark()
        return EpochRun(self._run_plan, feed=feed, filling=self._filling, meter=self._meter)

    def _filling(self, run: EpochRun) -> Filling:
        if self._run_plan.is_plain:
            return MembersFilling(run)
        return RowsFilling(run, epoch=self._number)

    def _asked(self) -> bool:
        """Whether there is one more batch for all: until the first rank runs out, or the last one where batches are masked."""
        assert self._agree is not None
        has_next = self._run.has_next()
        return self._agree(int(has_next)) > 0 if not self._is_masked else self._agree(int(not has_next)) == 0

    def _found(self, delivery: Delivery | None) -> Found:
        rows_count = self._run_plan.batch_size
        if delivery is None:
            if self._last is None:
                self._last = self._any_row()
            return Found(padding(self._last, rows_count=rows_count), self._mark)
        self._mark = delivery.mark
        if not self._is_masked:
            return Found(delivered(delivery, size=rows_count), delivery.mark)
        batch = masked(delivery, rows_count=rows_count, last=self._last)
        self._last = row_to_repeat(batch)
        return Found(batch, delivery.mark)

    def _any_row(self) -> dict[str, Any] | None:
        """A sample of this rank, where the epoch was resumed behind its last one: the first one of the epoch."""
        feed = self._plan.job.feed(self._number, None)
        run = EpochRun(self._run_plan, feed=feed, filling=self._filling, meter=self._meter)
        try:
            delivery = run.next_batch()
        finally:
            run.close()
        return row_to_repeat(delivered(delivery, size=self._run_plan.batch_size)) if delivery is not None else None
