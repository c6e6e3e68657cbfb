"""Runs, which make the batches of an epoch from a position on, in threads or in worker processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from penstock.loader.batches.building import RawBatchBuilder, RowBatchBuilder
from penstock.loader.batches.run import EpochRun
from penstock.loader.lanes.feed import OpenedFeed, SelectedBatchesFeed
from penstock.loader.position import feed_position, rebatched_position
from penstock.loader.statistics import Meter

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.loader.batches.run import BatchBuilder, Delivery, RunPlan
    from penstock.loader.batching import Batching
    from penstock.loader.epoch.batch_sources import BatchRun
    from penstock.loader.lanes.feed import Feed
    from penstock.loader.plan.loader_plan import LoaderPlan
    from penstock.loader.position import Position, RebatchedPosition
    from penstock.loader.workers.process_pool import ProcessPool
    from penstock.loader.workers.process_run import ProcessRun
    from penstock.loader.workers.row_assignment import Division
    from penstock.order import Batches


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRequest:
    """The arguments with which an epoch is opened.

    Attributes:
        plan: Plan of this rank.
        run_plan: How to make batches of it.
        epoch: Epoch number, from 0.
        position: Position to begin at; None is the beginning of the epoch.
        first_number: Number, in the epoch, of the batch at `position`, from 0. With ``in_order=False``, it is the number of
            batches that were handed out before, and the next batch gets it.
        stride: ``(j, n)``: only batches whose number mod n is j are handed out.
        in_order: Whether batches are handed out in order; False has an effect only on a run in threads.
        meter: Counts samples, bytes and seconds.
    """

    plan: LoaderPlan
    run_plan: RunPlan
    epoch: int
    position: Position | None
    first_number: int
    stride: tuple[int, int]
    in_order: bool
    meter: Meter

    @property
    def first_of_stride(self) -> int:
        """Number of the first batch that is given."""
        which, every = self.stride
        return self.first_number + (which - self.first_number) % every


class WorkerOptions(NamedTuple):
    """Worker processes that make the batches.

    Attributes:
        pool: The pool that starts the processes.
        processes_count: Number of processes; fewer are used if the rank has fewer lanes.
        restarts: Whether a process that dies is replaced.
    """

    pool: ProcessPool
    processes_count: int
    restarts: bool


class OpenedRun(NamedTuple):
    """A run of an epoch.

    Attributes:
        run: Makes batches.
        batches: Positions of all batches from the beginning of the run on; None if their number is known only after reading.
        position: Position at which the run begins.
    """

    run: BatchRun
    batches: Batches | None
    position: Position


def run_in_processes(request: EpochRequest, workers: WorkerOptions) -> OpenedRun:
    """A run in which worker processes make the batches."""
    division, run = _start_workers(request, workers, request.run_plan, request.plan.read_batching)
    return OpenedRun(run, division.batches, division.begin)


def rebatch_in_processes(request: EpochRequest, workers: WorkerOptions) -> OpenedRun:
    """A run in which worker processes decode, and a thread makes batches of the stages' outputs."""
    from penstock.loader.workers.remote_rebatching import Blocks, block_plan, rebatching_run

    run_plan = block_plan(request.run_plan)
    batching = request.plan.read_batching._replace(global_size=run_plan.batch_size * request.plan.world_size)
    division, run = _start_workers(request, workers, run_plan, batching)
    blocks = Blocks(run, batches=division.batches, begin=division.begin)
    begin = rebatched_position(request.position, division.begin)
    return OpenedRun(rebatching_run(request.run_plan, blocks, begin=begin, meter=request.meter), None, begin)


def _start_workers(
    request: EpochRequest, workers: WorkerOptions, run_plan: RunPlan, batching: Batching
) -> tuple[Division, ProcessRun]:
    from penstock.loader.workers.process_run import ProcessRun, worker_jobs
    from penstock.loader.workers.row_assignment import divide

    plan = request.plan
    division = divide(
        plan.read_plan,
        feed_position(request.position),
        epoch=request.epoch,
        batching=batching,
        run_plan=run_plan,
        processes_count=workers.processes_count,
    )
    jobs = worker_jobs(
        division, pipeline=plan.pipeline, run_plan=run_plan, epoch=request.epoch, rebatches=plan.is_rebatched
    )
    run = ProcessRun(
        run_plan,
        assigner=division.assigner,
        jobs=jobs,
        pool=workers.pool,
        restarts=workers.restarts,
        meter=request.meter,
        counts_samples=not plan.is_rebatched,
    )
    return division, run


def run_in_threads(request: EpochRequest) -> OpenedRun:
    """A run whose threads make the batches of the stride, in order."""
    feed, batches = _open_feed(request)
    position = feed.position()  # before the run's reader thread takes from the feed
    return OpenedRun(thread_run(request, feed, is_counted=batches is not None), batches, position)


def rebatch_in_threads(request: EpochRequest) -> OpenedRun:
    """A run whose threads make batches of the stages' outputs. It makes all batches, even for a stride."""
    plan = request.plan
    feed = plan.read_plan.begin(request.epoch, feed_position(request.position), batching=plan.read_batching).feed
    begin = rebatched_position(request.position, feed.position())
    return OpenedRun(thread_run(request, feed, is_counted=False, begin=begin), None, begin)


def thread_run(
    request: EpochRequest,
    feed: Feed,
    *,
    is_counted: bool,
    in_order: bool = True,
    begin: RebatchedPosition | None = None,
) -> EpochRun:
    """A run of threads over a feed.

    Args:
        request: How to make batches.
        feed: Samples of the batches; it is closed with the run.
        is_counted: Whether an index determines the number of batches; `feed` then ends where the last of them does.
        in_order: Whether batches are handed out in order; otherwise whichever is complete first.
        begin: Position at which batches of the stages' outputs go on; None is the beginning of the epoch.
    """
    drop_last = request.run_plan.drop_last and not is_counted
    return EpochRun(
        request.run_plan._replace(in_order=in_order, drop_last=drop_last),
        reads=feed,
        builder=_builder(request, feed, begin),
        meter=request.meter,
    )


def _open_feed(request: EpochRequest) -> OpenedFeed:
    """The samples of the batches of the stride; all samples if the stride is (0, 1)."""
    plan, position, (which, every) = request.plan, feed_position(request.position), request.stride
    if every > 1:
        from penstock.loader.plan.strided import begin_strided

        strided = begin_strided(
            plan.read_plan,
            request.epoch,
            position,
            batching=plan.read_batching,
            first_batch=request.first_number,
            stride=request.stride,
        )
        if strided is not None:
            return strided
    feed, batches = plan.read_plan.begin(request.epoch, position, batching=plan.read_batching)
    if every > 1:
        feed = SelectedBatchesFeed(
            feed,
            size=plan.rows_count,
            first_batch=request.first_number,
            chosen=lambda number: number % every == which,
        )
    return OpenedFeed(feed, batches)


def _builder(request: EpochRequest, feed: Feed, begin: RebatchedPosition | None) -> Callable[[EpochRun], BatchBuilder]:
    plan, epoch = request.plan, request.epoch
    if plan.is_rebatched:
        from penstock.loader.batches.rebatching import LocalRebatcher

        return lambda run: LocalRebatcher(run, feed, epoch=epoch, begin=begin)
    if plan.is_plain:
        return lambda run: RawBatchBuilder(run, feed)
    return lambda run: RowBatchBuilder(run, feed, epoch=epoch)


def any_delivery(request: EpochRequest) -> Delivery | None:
    """A batch of the epoch that has a sample: of this rank, or if it has none, of any rank. None if no rank has one.

    Cost: reads the epoch from its beginning, up to the first sample that is kept.
    """
    plan = request.plan
    transforms = tuple(transform.uncounted() for transform in request.run_plan.transforms)
    search = replace(request, run_plan=request.run_plan._replace(transforms=transforms, drop_last=False), meter=Meter())
    batching = plan.read_batching._replace(drop_last=False)
    for rank, world_size in ((plan.rank, plan.world_size), (0, 1)):
        feed = plan.read_plan.for_rank(rank, world_size).begin(request.epoch, None, batching=batching).feed
        run = thread_run(search, feed, is_counted=False)
        try:
            while (delivery := run.next_batch()) is not None:
                if not delivery.is_empty:
                    return delivery
        finally:
            run.close()
    return None
