"""Opens an epoch: the one place that chooses the backend of its batches and the mode in which they are handed out."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from penstock.errors import ConfigError, PenstockError
from penstock.loader.batches.building import RawBatchBuilder, RowBatchBuilder
from penstock.loader.batches.padding import Padder, Trimmer
from penstock.loader.batches.threads import ThreadBackend
from penstock.loader.lanes.feed import SelectedBatchesFeed
from penstock.loader.position import (
    IndexPosition,
    OutOfOrderPosition,
    StreamPosition,
    feed_position,
    rebatched_position,
)
from penstock.loader.statistics import Meter
from penstock.pipeline import BatchBySize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.loader.batches.padding import Finisher
    from penstock.loader.batches.threads import BatchBuilder, Delivery
    from penstock.loader.lanes.feed import Feed
    from penstock.loader.options import Batching, BatchPlan
    from penstock.loader.plan.loader_plan import LoaderPlan
    from penstock.loader.position import FeedPosition, Position, RebatchedPosition
    from penstock.loader.workers.process_pool import WorkerPool
    from penstock.loader.workers.process_run import ProcessBackend
    from penstock.loader.workers.row_assignment import Division
    from penstock.order import Batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """An epoch of this rank, or the rest of one, that can be opened.

    Attributes:
        plan: Plan of this rank.
        number: Epoch number, from 0.
        position: Position to begin at; None is the beginning of the epoch.
        first_batch: Number, in the epoch, of the batch at `position`, from 0. With ``in_order=False``, it is the number of
            batches that were handed out before, and the next batch gets it.
        meter: Counts samples, bytes and seconds.
    """

    plan: LoaderPlan
    number: int
    position: Position | None
    first_batch: int
    meter: Meter

    def open(self, *, consensus: RankConsensus | None = None, pool: WorkerPool | None = None) -> BatchSource:
        """Start to make the batches.

        Args:
            consensus: Consensus with the other ranks, if there are any. Batches that an index counts do not need it.
            pool: Starts the workers that decode; None decodes in threads of this process.

        Raises:
            ConfigError: The options do not go together, or the position does not belong to this job.
        """
        plan, stride = self.plan, self.plan.options.stride
        has_gaps = isinstance(self.position, OutOfOrderPosition)
        if plan.read_plan.mode == "index" and not plan.is_rebatched:
            consensus = None
        if has_gaps and (plan.is_rebatched or stride[1] > 1):
            raise ConfigError(
                "the state was saved with in_order=False, and batches after its position have been handed out",
                hint="finish the epoch without stride=, and without stages that change the number of samples",
            )
        if consensus is not None and stride[1] > 1:
            raise ConfigError(f"stride={stride} with ranks that have to agree", hint="run `penstock index`")
        in_order = consensus is not None or (plan.options.in_order and not has_gaps)
        backend: Backend
        batches: Batches | None = None
        if pool is not None and not has_gaps:  # only threads can leave out single batches
            backend, batches, position = self._start_processes(pool)
        elif plan.is_rebatched:
            feed, _ = plan.read_plan.begin(self.number, feed_position(self.position), batching=plan.read_batching)
            position = begin = rebatched_position(self.position, feed.position())
            backend = self._start_threads(feed, is_counted=False, begin=begin)
        elif in_order:
            feed, batches = self._strided_feed()
            position = feed.position()  # before the reader thread takes from the feed
            backend = self._start_threads(feed, is_counted=batches is not None)
        else:
            return self._open_out_of_order()
        if consensus is not None and batches is None:
            return AgreedBatches(
                backend=backend,
                finisher=self._finisher(),
                consensus=consensus,
                rows_count=plan.rows_count,
                first_number=self.first_batch,
                position=position,
                ends_with_last=plan.ends_with_last,
            )
        return BatchSource(
            backend=backend,
            finisher=self._finisher(),
            rows_count=plan.rows_count,
            first_number=self.first_batch,
            stride=stride,
            makes_all=plan.is_rebatched,
            batches=batches,
        )

    def any_delivery(self) -> Delivery | None:
        """A batch of the epoch that has a sample: of this rank, or if it has none, of any rank. None if no rank has one.

        Cost: reads the epoch from its beginning, up to the first sample that is kept.
        """
        plan, order = self.plan, self.plan.read_plan.order
        transforms = tuple(transform.uncounted() for transform in plan.batch_plan.transforms)
        batch_plan = plan.batch_plan._replace(transforms=transforms, drop_last=False)
        search = replace(self, plan=replace(plan, batch_plan=batch_plan), meter=Meter())
        batching = plan.read_batching._replace(drop_last=False)
        for rank, world_size in ((order.rank, order.world_size), (0, 1)):
            feed, _ = plan.read_plan.for_rank(rank, world_size).begin(self.number, None, batching=batching)
            backend = search._start_threads(feed, is_counted=False)
            try:
                while (delivery := backend.next_batch()) is not None:
                    if not delivery.is_empty:
                        return delivery
            finally:
                backend.close()
        return None

    def _finisher(self) -> Finisher:
        if not self.plan.is_masked:
            return Trimmer(self.plan.rows_count)
        return Padder(self.any_delivery, is_variable=isinstance(self.plan.batch_plan.batch, BatchBySize))

    def _open_out_of_order(self) -> BatchSource:
        """Hand out whichever batch is complete first, without those that the state says were handed out."""
        plan = self.plan
        feed, batches = plan.read_plan.begin(self.number, feed_position(self.position), batching=plan.read_batching)
        try:
            handed_out = HandedOut(self.position, feed_position=feed.position(), global_size=plan.batching.global_size)
        except BaseException:
            feed.close()
            raise
        remaining = SelectedBatchesFeed(feed, size=plan.rows_count, first_batch=0, chosen=handed_out.makes)
        return BatchSource(
            backend=self._start_threads(remaining, is_counted=batches is not None, in_order=plan.options.in_order),
            finisher=self._finisher(),
            rows_count=plan.rows_count,
            first_number=self.first_batch,
            batches=batches,
            handed_out=handed_out,
        )

    def _strided_feed(self) -> tuple[Feed, Batches | None]:
        """The samples of the batches of the stride, and all batches if an index counts them; all samples if it is (0, 1)."""
        plan, position, (which, every) = self.plan, feed_position(self.position), self.plan.options.stride
        if every > 1:
            from penstock.loader.plan.strided import begin_strided

            strided = begin_strided(
                plan.read_plan,
                self.number,
                position,
                batching=plan.read_batching,
                first_batch=self.first_batch,
                stride=(which, every),
            )
            if strided is not None:
                return strided
        feed, batches = plan.read_plan.begin(self.number, position, batching=plan.read_batching)
        if every > 1:
            feed = SelectedBatchesFeed(
                feed,
                size=plan.rows_count,
                first_batch=self.first_batch,
                chosen=lambda number: number % every == which,
            )
        return feed, batches

    def _start_threads(
        self, feed: Feed, *, is_counted: bool, in_order: bool = True, begin: RebatchedPosition | None = None
    ) -> ThreadBackend:
        """Start the threads that make batches of a feed, which is closed with them.

        Args:
            feed: Samples of the batches.
            is_counted: Whether an index determines the number of batches; `feed` then ends where the last of them does.
            in_order: Whether batches are handed out in order; otherwise whichever is complete first.
            begin: Position at which batches of the stages' outputs go on; None is the beginning of the epoch.
        """
        plan, epoch = self.plan, self.number
        builder: Callable[[ThreadBackend], BatchBuilder]
        if plan.is_rebatched:
            from penstock.loader.batches.rebatching import LocalRebatcher

            builder = lambda backend: LocalRebatcher(backend, feed, epoch=epoch, begin=begin)  # noqa: E731
        elif plan.is_plain:
            builder = lambda backend: RawBatchBuilder(backend, feed)  # noqa: E731
        else:
            builder = lambda backend: RowBatchBuilder(backend, feed, epoch=epoch)  # noqa: E731
        drop_last = plan.batch_plan.drop_last and not is_counted
        batch_plan = plan.batch_plan._replace(in_order=in_order, drop_last=drop_last)
        return ThreadBackend(batch_plan, reads=feed, builder=builder, meter=self.meter)

    def _start_processes(self, pool: WorkerPool) -> tuple[Backend, Batches | None, Position]:
        """Start worker processes. If stages change the number of samples, a thread makes batches of their outputs.

        Returns:
            What makes batches; positions of all batches, None if they are known only after reading; the first position.
        """
        plan = self.plan
        if not plan.is_rebatched:
            division, backend = self._divide(pool, plan.batch_plan, plan.read_batching)
            return backend, division.batches, division.begin
        from penstock.loader.workers.remote_rebatching import Blocks, block_plan, rebatching_backend

        blocks_plan = block_plan(plan.batch_plan)
        batching = plan.read_batching._replace(global_size=blocks_plan.batch_size * plan.read_plan.order.world_size)
        division, backend = self._divide(pool, blocks_plan, batching)
        blocks = Blocks(backend, batches=division.batches, begin=division.begin)
        begin = rebatched_position(self.position, division.begin)
        return rebatching_backend(plan.batch_plan, blocks, begin=begin, meter=self.meter), None, begin

    def _divide(self, pool: WorkerPool, batch_plan: BatchPlan, batching: Batching) -> tuple[Division, ProcessBackend]:
        from penstock.loader.workers.process_run import ProcessBackend, worker_jobs
        from penstock.loader.workers.row_assignment import divide

        plan = self.plan
        division = divide(
            plan.read_plan,
            feed_position(self.position),
            epoch=self.number,
            batching=batching,
            batch_plan=batch_plan,
            processes_count=pool.count,
        )
        jobs = worker_jobs(
            division,
            pipeline=plan.pipeline,
            batch_plan=batch_plan,
            epoch=self.number,
            rebatches=plan.is_rebatched,
            threads_count=pool.threads_count,
        )
        backend = ProcessBackend(
            batch_plan,
            assigner=division.assigner,
            jobs=jobs,
            pool=pool,
            restarts=plan.options.restart_workers or pool.restarts,
            meter=self.meter,
            counts_samples=not plan.is_rebatched,
        )
        return division, backend


FAILED = -(1 << 62)
"""The answer of a rank that failed, smaller than any other."""


class NumberedBatch(NamedTuple):
    """A batch for the training loop.

    Attributes:
        batch: The batch: a dict of columns, or the result of the user's collate function.
        position: Position after this batch, for the state.
        number: Number of the batch in the epoch, from 0.
    """

    batch: Any
    position: Position
    number: int


class Backend(Protocol):
    """The backend that makes the batches: ``ThreadBackend``, or ``ProcessBackend`` with worker processes."""

    def next_batch(self) -> Delivery | None:
        """The next batch; None at the end of the epoch. Blocks."""

    def has_next(self) -> bool:
        """Whether another batch or an error follows. Blocks until that is known, but not until the batch is complete."""

    def close(self) -> None:
        """End the threads or worker processes; idempotent."""


@dataclass(kw_only=True, eq=False, repr=False)
class BatchSource:
    """Hands out the batches of the rest of an epoch: those that one backend makes.

    Attributes:
        backend: Makes the batches.
        finisher: Finishes them.
        rows_count: Number of rows of a full batch.
        first_number: Number, in the epoch, of the batch at which the rest of the epoch begins.
        stride: ``(j, n)``: only the batches whose number mod n is j are handed out.
        makes_all: Whether the backend makes the others as well, because its stages change the number of samples.
        batches: Positions of all batches from `first_number` on; None if their number is known only after reading.
        handed_out: Account of batches that are handed out in any order; they are numbered as they come. None: in order.
        agrees_each_batch: Whether the ranks reach a consensus before each batch.
    """

    agrees_each_batch: ClassVar[bool] = False

    backend: Backend
    finisher: Finisher
    rows_count: int
    first_number: int = 0
    stride: tuple[int, int] = (0, 1)
    makes_all: bool = False
    batches: Batches | None = None
    handed_out: HandedOut | None = None

    def __post_init__(self) -> None:
        self._which, self._every = self.stride
        self._step = 1 if self.makes_all else self._every
        self._next_index = (self._which - self.first_number) % self._step  # of the next batch, from `first_number` on
        self._stop: int | None = None  # index after the last batch
        if self.batches is not None:
            self._stop = len(self.batches) - (self.handed_out.before_count if self.handed_out is not None else 0)

    def next(self) -> NumberedBatch | None:
        """The next batch that the finisher does not skip; None at the end of the epoch. Blocks.

        Raises:
            StoreError, DataError: The next batch in order could not be made; raised again at each further call.
            ClosedError: The source was closed, or this process inherited it through ``fork``.
        """
        while self._stop is None or self._next_index < self._stop:
            delivery = self.backend.next_batch()
            if delivery is None and self._stop is None:
                return None
            index = self._next_index
            number = self.first_number + index
            self._next_index += self._step
            if number % self._every != self._which:
                continue
            if self.handed_out is not None:
                # without a delivery it is the last batch, of which this rank has no sample
                index = self.handed_out.number_of(index if delivery is None else delivery.number)
            rows_count, position = self.rows_count, None if delivery is None else delivery.position
            if self.batches is not None:
                span = self.batches.span(index)
                rows_count, position = -(-len(span) // self.batches.world_size), IndexPosition(span.stop)
            if self.handed_out is not None:
                position = self.handed_out.take(index, position)
            if not self.finisher.skips(delivery):
                assert position is not None
                return NumberedBatch(self.finisher.finish(delivery, rows_count), position, number)
        return None

    def close(self) -> None:
        """End the threads or worker processes; idempotent."""
        self.backend.close()


@dataclass(kw_only=True, eq=False, repr=False)
class AgreedBatches(BatchSource):
    """Batches of ranks that do not know how many the others have: before each batch they agree whether all go on.

    Attributes:
        consensus: Consensus of the ranks.
        position: Position before the next batch.
        ends_with_last: Whether all ranks go on until the last one runs out, those that have run out with padding; otherwise
            the epoch ends when the first one runs out.
    """

    agrees_each_batch: ClassVar[bool] = True

    consensus: RankConsensus
    position: Position
    ends_with_last: bool
    _goes_on: bool | None = None  # the agreement of the ranks about the next batch; None: they have not yet

    def next(self) -> NumberedBatch | None:
        """The next batch that the finisher does not skip, if all ranks go on. They also agree on the batch after it here."""
        if self._goes_on is None:
            self._goes_on = self._agree()
        while self._goes_on:
            with self.consensus.reporting_failure():
                delivery = self.backend.next_batch()
                number = self.first_number + self._next_index
                self._next_index += 1
                if delivery is not None and delivery.position is not None:
                    self.position = delivery.position
                skips = self.finisher.skips(delivery)
                batch = None if skips else self.finisher.finish(delivery, self.rows_count)
            self._goes_on = None  # in case the consensus fails
            self._goes_on = self._agree()
            if not skips:
                return NumberedBatch(batch, self.position, number)
        return None

    def _agree(self) -> bool:
        """Whether all ranks go on with another batch."""
        self.consensus.check()
        with self.consensus.reporting_failure():
            has_next = self.backend.has_next()
        if self.ends_with_last:
            return self.consensus.smallest(int(not has_next)) == 0
        return self.consensus.smallest(int(has_next)) > 0


class RankConsensus:
    """Decisions of all ranks, from the opening of an epoch to its end. A rank that fails tells the others.

    Args:
        agree: Returns the smallest of the integers that the ranks give it. Blocks until all ranks have called it.
    """

    def __init__(self, agree: Callable[[int], int]) -> None:
        self._agree = agree
        self._has_failed = False  # some rank has, and all ranks know it

    def smallest(self, n: int) -> int:
        """The smallest `n` of all ranks. Blocks until all ranks have called it.

        Raises:
            PenstockError: A rank failed. Each further call raises it again, without waiting for the other ranks.
        """
        self.check()
        found = self._agree(n)
        self._has_failed = found == FAILED
        self.check()
        return found

    def check(self) -> None:
        """Raise an error if a rank has failed.

        Raises:
            PenstockError: A rank failed.
        """
        if self._has_failed:
            raise PenstockError("another rank failed", hint="its own error says why; restart() on all ranks")

    @contextlib.contextmanager
    def reporting_failure(self) -> Iterator[None]:
        """Tell the other ranks if the block fails, so that their next ``smallest`` raises instead of waiting for this rank."""
        try:
            yield
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                with contextlib.suppress(Exception):  # a rank may be gone; the error of the block is the one to raise
                    self._agree(FAILED)
            raise


class HandedOut:
    """The batches of a backend that were handed out, in whatever order they were complete.

    Batches are numbered from the place where the backend begins. It does not make those that were handed out before.

    Args:
        position: Position at which the backend begins; None is the beginning of the epoch.
        feed_position: Position of the feed at which the backend begins.
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
        self._numbers = set(self._before)  # without those below the lowest that has not been handed out
        self._lowest = 0
        # after each batch, from the last one on after which reading can go on: those of `_before` are not read again
        self._positions: dict[int, FeedPosition] = {-1: feed_position}

    @property
    def before_count(self) -> int:
        """Number of batches after the backend's first position that were handed out before it began."""
        return len(self._before)

    def makes(self, number: int) -> bool:
        """Whether the backend makes the batch with this number."""
        return number not in self._before

    def number_of(self, made: int) -> int:
        """Number of the batch that the backend makes as its `made`-th, from 0."""
        number = made
        for handed in sorted(self._before):
            number += handed <= number
        return number

    def take(self, number: int, position: Position | None) -> Position:
        """Note that a batch is handed out.

        Args:
            number: Number of the batch.
            position: Position of the feed after this batch.

        Returns:
            The position to go on from.
        """
        assert isinstance(position, IndexPosition | StreamPosition)
        self._positions[number] = position
        self._numbers.add(number)
        while self._lowest in self._numbers:
            self._numbers.remove(self._lowest)
            self._lowest += 1
        last = max(each for each in self._positions if each < self._lowest)
        for done in [each for each in self._positions if each < last]:
            del self._positions[done]
        handed = (*range(last + 1, self._lowest), *sorted(self._numbers))
        base = self._positions[last]
        if not handed:
            return base
        return OutOfOrderPosition(base, tuple(each - last - 1 for each in handed), self._global_size)
