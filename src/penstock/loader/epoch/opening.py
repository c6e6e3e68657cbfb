"""One epoch of one rank, as the training loop sees it: the run behind it, and agreement with the other ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import ConfigError
from penstock.loader.batches.building import RawBatchBuilder, RowBatchBuilder
from penstock.loader.batches.run import BatchBuilder, EpochRun
from penstock.loader.epoch.out_of_order import OutOfOrderTracker
from penstock.loader.epoch.padding import delivered, masked, padding, row_to_repeat
from penstock.loader.lanes.feed import SelectedBatchesFeed
from penstock.loader.position import IndexPosition, RebatchedPosition, StreamPosition, feed_position, skip_count
from penstock.loader.statistics import Meter
from penstock.pipeline import BatchBySize

if TYPE_CHECKING:
    from penstock.loader.batches.run import Delivery, RunPlan
    from penstock.loader.epoch.consensus import RankConsensus
    from penstock.loader.lanes.feed import EpochFeed
    from penstock.loader.plan.loader_plan import LoaderPlan
    from penstock.loader.position import Position
    from penstock.loader.workers.children import ProcessPool
    from penstock.loader.workers.processes import ProcessRun
    from penstock.order import Batches
    from penstock.samples.columns import Layout


class NumberedBatch(NamedTuple):
    """A batch for the training loop, the position behind it, and its number in the epoch."""

    batch: Any
    position: Position
    number: int


class Epoch:
    """Gives batches until the epoch ends, for all ranks at once.

    Args:
        plan: What to read.
        run_plan: How to make batches of it.
        number: Of the epoch.
        position: Where in it to begin; None is its beginning.
        agree: With the other ranks; None: there are none, or nobody has to.
        processes: See ``Loader``.
        restarts: See there.
        workers: Where worker processes wait between epochs.
        first_batch: Batches of the epoch before `position`.
        stride: ``(j, n)``: only batches k with k mod n = j are given.
        meter: Told of samples, bytes and seconds.
    """

    def __init__(
        self,
        plan: LoaderPlan,
        *,
        run_plan: RunPlan,
        number: int,
        position: Position | None,
        agree: RankConsensus | None,
        meter: Meter,
        processes: int = 0,
        restarts: bool = False,
        workers: ProcessPool | None = None,
        first_batch: int = 0,
        stride: tuple[int, int] = (0, 1),
    ) -> None:
        self._plan = plan
        self._number = number
        self._meter = meter
        self._last: dict[str, Any] | None = None  # a row to pad with
        self._tracker: OutOfOrderTracker | None = None
        self._came_count = 0  # batches out of the run, where they come in any order
        self._first_batch = first_batch
        self._stride = stride
        self._batch_number = first_batch - 1  # of the last one that came
        self._goes_on: bool | None = None  # what the ranks agreed on for the next batch
        self._skip_count = skip_count(position)
        self._layout: Layout | None = None
        self._batching = plan.read_batching
        self._is_by_size = isinstance(run_plan.batch, BatchBySize)
        self._batches: Batches | None
        self._position: Position  # behind the last batch
        self._run: EpochRun | ProcessRun
        if processes:
            from penstock.loader.workers.dividing import divided

            assert workers is not None

            self._batches, self._run, self._position = divided(
                plan,
                run_plan,
                position,
                epoch=number,
                batching=self._batching,
                processes=processes,
                restarts=restarts,
                workers=workers,
                meter=meter,
            )
            self._agree = agree if plan.world_size > 1 and self._batches is None else None
            self._run_plan = run_plan if self._batches is None else run_plan._replace(drop_last=False)
            return
        begun = None
        if stride[1] > 1 and not plan.carries:
            from penstock.loader.plan.strided import begin_strided

            begun = begin_strided(
                plan.read_plan,
                number,
                feed_position(position),
                batching=self._batching,
                first_batch=first_batch,
                stride=stride,
            )
        self._is_chosen = begun is not None  # the feed gives the stride's batches alone
        begun = begun or plan.read_plan.begin(number, feed_position(position), batching=self._batching)
        self._batches = begun.batches if not plan.carries else None
        self._agree = agree if plan.world_size > 1 and self._batches is None else None
        # where batches are counted, the feed ends where the last of them does
        self._run_plan = run_plan if self._batches is None else run_plan._replace(drop_last=False)
        first = begun.feed.mark()
        self._position = RebatchedPosition(first, self._skip_count) if plan.carries else first
        if stride[1] > 1 and self._agree is not None:
            raise ConfigError(f"stride={stride} with ranks that have to agree", hint="run `penstock index`")
        if not run_plan.in_order and not plan.carries and self._agree is None:
            self._tracker = OutOfOrderTracker(position, feed_position=first, global_size=plan.batching.global_size)
        else:
            self._run_plan = self._run_plan._replace(in_order=True)
        self._run = self._started(begun)

    def next(self) -> NumberedBatch | None:
        """The next batch, or None at the end. Blocks.

        Raises:
            StoreError, DataError: where the order reaches what failed; again at each further call.
            ClosedError: closed, or inherited through ``fork``.
        """
        if self._tracker is not None:
            return self._next_out_of_order(self._tracker)
        if self._batches is not None:
            return self._next_counted(self._batches)
        if self._agree is None:
            while (delivery := self._run.next_batch()) is not None:
                self._batch_number = self._next_number()
                if self._plan.carries and not self._is_ours(self._batch_number):
                    continue
                if self._plan.is_masked or not delivery.is_empty:
                    assert delivery.mark is not None
                    return self._found(delivery, self._plan.rows_count, delivery.mark)
            return None
        return self._next_agreed()

    def _next_agreed(self) -> NumberedBatch | None:
        """The next batch, if all ranks have one; asked one batch ahead."""
        assert self._agree is not None
        if self._goes_on is None:
            self._goes_on = self._asked()
        if not self._goes_on:
            return None
        with self._agree.told():
            delivery = self._run.next_batch()
            self._batch_number += 1
            if delivery is not None and delivery.mark is not None:
                self._position = delivery.mark
            found = self._found(delivery, self._plan.rows_count, self._position)
        self._goes_on = None  # unless all say so
        self._goes_on = self._asked()
        return found

    @property
    def asks(self) -> bool:
        """Whether the ranks ask each other before each batch."""
        return self._agree is not None

    def close(self) -> None:
        """End the threads; idempotent."""
        self._run.close()

    def _next_out_of_order(self, tracker: OutOfOrderTracker) -> NumberedBatch | None:
        """Whichever batch is complete, where order does not matter."""
        batches = self._batches
        while (delivery := self._run.next_batch()) is not None or (batches is not None and self._lacks_one(batches)):
            number = tracker.number_of(self._came_count if delivery is None else delivery.number)
            self._came_count += 1
            rows_count, behind = self._plan.rows_count, delivery.mark if delivery is not None else None
            if batches is not None:
                rows_count = -(-len(batches.span(number)) // self._plan.world_size)
                behind = IndexPosition(batches.position_after(number))
            assert isinstance(behind, IndexPosition | StreamPosition)
            self._batch_number += 1
            position = tracker.take(number, behind)
            if self._plan.is_masked or (delivery is not None and not delivery.is_empty):
                return self._found(delivery, rows_count, position)
        return None

    def _lacks_one(self, batches: Batches) -> bool:
        """Whether the last batch has rows on other ranks only, and is still to be padded here."""
        assert self._tracker is not None
        return self._plan.is_masked and self._tracker.number_of(self._came_count) < len(batches)

    def _next_counted(self, batches: Batches) -> NumberedBatch | None:
        """The next batch, where arithmetic says how many rows it has."""
        while (number := self._next_number()) < self._first_batch + len(batches):
            index = number - self._first_batch
            rows_count = -(-len(batches.span(index)) // self._plan.world_size)
            delivery = self._run.next_batch()
            self._batch_number = number
            if self._plan.is_masked or (delivery is not None and not delivery.is_empty):
                return self._found(delivery, rows_count, IndexPosition(batches.position_after(index)))
        return None

    def _is_ours(self, number: int) -> bool:
        return number % self._stride[1] == self._stride[0]

    def _next_number(self) -> int:
        """Of the batch that comes next out of the run: where nothing is carried, the others are not in it."""
        number = self._batch_number + 1
        return number if self._plan.carries else number + (self._stride[0] - number) % self._stride[1]

    def _started(self, begun: EpochFeed) -> EpochRun:
        feed = begun.feed
        chosen = None
        if self._tracker is not None:
            first, chosen = 0, self._tracker.is_left
        elif self._stride[1] > 1 and not self._plan.carries and not self._is_chosen:
            first, chosen = self._first_batch, self._is_ours
        if chosen is not None:
            feed = SelectedBatchesFeed(feed, size=self._plan.rows_count, first_batch=first, chosen=chosen)
        return EpochRun(self._run_plan, feed=feed, builder=self._builder, meter=self._meter)

    def _builder(self, run: EpochRun) -> BatchBuilder:
        if self._plan.carries:
            from penstock.loader.batches.rebatching import Rebatcher

            return Rebatcher(run, epoch=self._number, skip_count=self._skip_count)
        if self._plan.is_plain:
            return RawBatchBuilder(run)
        return RowBatchBuilder(run, epoch=self._number)

    def _asked(self) -> bool:
        """Whether there is one more batch for all: until the first rank runs out, or the last one."""
        assert self._agree is not None
        self._agree.check()
        with self._agree.told():
            has_next = self._run.has_next()
        agreed = self._agree.smallest(int(has_next if not self._plan.ends_with_last else not has_next))
        return agreed == 0 if self._plan.ends_with_last else agreed > 0

    def _found(self, delivery: Delivery | None, rows_count: int, position: Position) -> NumberedBatch:
        if delivery is not None:
            self._layout = delivery.layout
            rows_count = delivery.rows if self._is_by_size else rows_count  # which are as long as they come out
        if not self._plan.is_masked:
            assert delivery is not None
            return NumberedBatch(
                self._finished(delivered(delivery, size=self._plan.rows_count)), position, self._batch_number
            )
        if self._last is None and (delivery is None or delivery.is_empty):
            self._last = self._any_row()
        if delivery is None:
            return NumberedBatch(
                self._finished(padding(self._last, rows_count=rows_count)), position, self._batch_number
            )
        batch = masked(delivery, rows_count=rows_count, last=self._last)
        self._last = row_to_repeat(batch)
        return NumberedBatch(self._finished(batch), position, self._batch_number)

    def _finished(self, batch: dict[str, Any]) -> Any:
        return batch if self._layout is None else self._layout.finish(batch)

    def _any_row(self) -> dict[str, Any] | None:
        """A sample to pad with: of this rank, where the epoch was resumed behind its last one; else of any other."""
        transforms = tuple(transform.uncounted() for transform in self._run_plan.transforms)
        run_plan = self._run_plan._replace(transforms=transforms, drop_last=False)
        batching = self._batching._replace(drop_last=False)
        for job in (self._plan.read_plan, self._plan.read_plan.divided(0, 1)):
            feed = job.begin(self._number, None, batching=batching).feed
            run = EpochRun(run_plan, feed=feed, builder=self._builder, meter=Meter())
            try:
                while (delivery := run.next_batch()) is not None:
                    if not delivery.is_empty:
                        self._layout = delivery.layout
                        return row_to_repeat(delivered(delivery, size=self._plan.rows_count))
            finally:
                run.close()
        return None
