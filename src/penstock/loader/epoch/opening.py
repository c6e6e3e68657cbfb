"""Opens an epoch: the one place that chooses how its batches are made and in which mode they are handed out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import ConfigError
from penstock.loader.batches.building import RawBatchBuilder, RowBatchBuilder
from penstock.loader.batches.run import EpochRun
from penstock.loader.epoch.out_of_order import CountedOutOfOrder, OutOfOrderTracker, StreamedOutOfOrder
from penstock.loader.epoch.padding import Padder, Trimmer
from penstock.loader.epoch.sources import AgreedBatches, CountedBatches, RebatchedBatches, StreamedBatches
from penstock.loader.lanes.feed import EpochFeed, SelectedBatchesFeed
from penstock.loader.position import RebatchedPosition, feed_position, skip_count
from penstock.loader.statistics import Meter
from penstock.pipeline import BatchBySize

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.loader.batches.run import BatchBuilder, Delivery, RunPlan
    from penstock.loader.epoch.consensus import RankConsensus
    from penstock.loader.epoch.padding import Finisher
    from penstock.loader.epoch.sources import BatchRun, BatchSource
    from penstock.loader.lanes.feed import Batching, Feed
    from penstock.loader.plan.loader_plan import LoaderPlan
    from penstock.loader.position import Position
    from penstock.loader.workers.process_pool import ProcessPool
    from penstock.loader.workers.process_run import ProcessRun
    from penstock.loader.workers.row_assignment import Division
    from penstock.order import Batches


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRequest:
    """What an epoch is opened with.

    Attributes:
        plan: What to read.
        run_plan: How to make batches of it.
        epoch: Epoch number, from 0.
        position: Position to begin at; None is the beginning of the epoch.
        first_number: Number of batches of the epoch that were handed out before `position`.
        stride: ``(j, n)``: only batches whose number mod n is j are given.
        meter: Counts samples, bytes and seconds.
    """

    plan: LoaderPlan
    run_plan: RunPlan
    epoch: int
    position: Position | None
    first_number: int
    stride: tuple[int, int]
    meter: Meter

    @property
    def first_of_stride(self) -> int:
        """Number of the first batch that is given."""
        which, every = self.stride
        return self.first_number + (which - self.first_number) % every


class WorkerOptions(NamedTuple):
    """Worker processes that make the batches.

    Attributes:
        pool: Gives the processes.
        processes_count: Number of processes; fewer are used if the rank has fewer lanes.
        restarts: Whether a process that dies is replaced.
    """

    pool: ProcessPool
    processes_count: int
    restarts: bool


class _OpenedRun(NamedTuple):
    """A run of an epoch.

    Attributes:
        run: Makes batches.
        batches: Positions of all batches from the beginning of the run on; None if only reading tells how many there are.
        position: Position at which the run begins.
    """

    run: BatchRun
    batches: Batches | None
    position: Position


def open_epoch(
    request: EpochRequest, *, consensus: RankConsensus | None = None, workers: WorkerOptions | None = None
) -> BatchSource:
    """Start to make the batches of an epoch, or of the rest of one.

    Args:
        request: What to read, from where on, and how to make batches of it.
        consensus: Consensus with the other ranks, if there are any. Batches that an index counts do not need it.
        workers: Worker processes that decode; None decodes in threads of this process.

    Raises:
        ConfigError: The options do not go together, or the position does not belong to this job.
    """
    plan = request.plan
    if plan.read_plan.mode == "index" and not plan.is_rebatched:
        consensus = None
    if consensus is not None and request.stride[1] > 1:
        raise ConfigError(f"stride={request.stride} with ranks that have to agree", hint="run `penstock index`")
    if workers is not None:
        opened = _rebatch_in_processes(request, workers) if plan.is_rebatched else _run_in_processes(request, workers)
        return _in_order(request, opened, consensus)
    if plan.is_rebatched:
        return _in_order(request, _rebatch_in_threads(request), consensus)
    if request.run_plan.in_order or consensus is not None:
        return _in_order(request, _run_in_threads(request), consensus)
    return _out_of_order(request)


def _in_order(request: EpochRequest, opened: _OpenedRun, consensus: RankConsensus | None) -> BatchSource:
    plan, first_number = request.plan, request.first_number
    finisher, rows_count = _finisher(request), plan.rows_count
    if opened.batches is not None:
        numbers = range(request.first_of_stride, first_number + len(opened.batches), request.stride[1])
        return CountedBatches(opened.run, finisher, batches=opened.batches, first_number=first_number, numbers=numbers)
    if consensus is not None:
        return AgreedBatches(
            opened.run,
            finisher,
            consensus=consensus,
            rows_count=rows_count,
            first_number=first_number,
            position=opened.position,
            ends_with_last=plan.ends_with_last,
        )
    if plan.is_rebatched:
        return RebatchedBatches(
            opened.run, finisher, rows_count=rows_count, first_number=first_number, stride=request.stride
        )
    return StreamedBatches(
        opened.run, finisher, rows_count=rows_count, first_number=request.first_of_stride, step=request.stride[1]
    )


def _out_of_order(request: EpochRequest) -> BatchSource:
    plan, first_number = request.plan, request.first_number
    feed, batches = plan.read_plan.begin(request.epoch, feed_position(request.position), batching=plan.read_batching)
    try:
        tracker = OutOfOrderTracker(
            request.position, feed_position=feed.position(), global_size=plan.batching.global_size
        )
    except BaseException:
        feed.close()
        raise
    left = SelectedBatchesFeed(feed, size=plan.rows_count, first_batch=0, chosen=tracker.is_left)
    run = _thread_run(request, left, batches, in_order=False)
    finisher = _finisher(request)
    if batches is not None:
        return CountedOutOfOrder(run, finisher, tracker=tracker, batches=batches, first_number=first_number)
    return StreamedOutOfOrder(run, finisher, tracker=tracker, rows_count=plan.rows_count, first_number=first_number)


# ── runs ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _run_in_processes(request: EpochRequest, workers: WorkerOptions) -> _OpenedRun:
    division, run = _start_workers(request, workers, request.run_plan, request.plan.read_batching)
    return _OpenedRun(run, division.batches, division.begin)


def _rebatch_in_processes(request: EpochRequest, workers: WorkerOptions) -> _OpenedRun:
    from penstock.loader.workers.remote_rebatching import Blocks, block_plan, rebatching_run

    plan, skipped_count = request.plan, skip_count(request.position)
    run_plan = block_plan(request.run_plan)
    batching = plan.read_batching._replace(global_size=run_plan.batch_size * plan.world_size)
    division, run = _start_workers(request, workers, run_plan, batching)
    blocks = Blocks(run, batches=division.batches, begin=division.begin)
    rebatching = rebatching_run(request.run_plan, blocks, skip_count=skipped_count, meter=request.meter)
    return _OpenedRun(rebatching, None, RebatchedPosition(division.begin, skipped_count))


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


def _run_in_threads(request: EpochRequest) -> _OpenedRun:
    feed, batches = _open_feed(request)
    position = feed.position()  # before the run's reader thread takes from the feed
    return _OpenedRun(_thread_run(request, feed, batches), batches, position)


def _rebatch_in_threads(request: EpochRequest) -> _OpenedRun:
    plan, skipped_count = request.plan, skip_count(request.position)
    feed = plan.read_plan.begin(request.epoch, feed_position(request.position), batching=plan.read_batching).feed
    position = RebatchedPosition(feed.position(), skipped_count)
    run = EpochRun(
        request.run_plan._replace(in_order=True),
        reads=feed,
        builder=_builder(request, feed, skipped_count=skipped_count),
        meter=request.meter,
    )
    return _OpenedRun(run, None, position)


def _thread_run(request: EpochRequest, feed: Feed, batches: Batches | None, *, in_order: bool = True) -> EpochRun:
    # a feed whose batches are counted ends where the last of them does
    drop_last = request.run_plan.drop_last and batches is None
    return EpochRun(
        request.run_plan._replace(in_order=in_order, drop_last=drop_last),
        reads=feed,
        builder=_builder(request, feed),
        meter=request.meter,
    )


def _open_feed(request: EpochRequest) -> EpochFeed:
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
    return EpochFeed(feed, batches)


def _builder(request: EpochRequest, feed: Feed, *, skipped_count: int = 0) -> Callable[[EpochRun], BatchBuilder]:
    plan, epoch = request.plan, request.epoch
    if plan.is_rebatched:
        from penstock.loader.batches.rebatching import LocalRebatcher

        return lambda run: LocalRebatcher(run, feed, epoch=epoch, skip_count=skipped_count)
    if plan.is_plain:
        return lambda run: RawBatchBuilder(run, feed)
    return lambda run: RowBatchBuilder(run, feed, epoch=epoch)


# ── finishing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _finisher(request: EpochRequest) -> Finisher:
    if not request.plan.is_masked:
        return Trimmer(request.plan.rows_count)
    return Padder(lambda: _any_delivery(request), is_variable=isinstance(request.run_plan.batch, BatchBySize))


def _any_delivery(request: EpochRequest) -> Delivery | None:
    """A batch of the epoch that has a sample: of this rank, or if it has none, of any rank. None if no rank has one.

    Cost: reads the epoch from its beginning, up to the first sample that is kept.
    """
    plan, run_plan = request.plan, request.run_plan
    transforms = tuple(transform.uncounted() for transform in run_plan.transforms)
    batching = plan.read_batching._replace(drop_last=False)
    for read_plan in (plan.read_plan, plan.read_plan.for_rank(0, 1)):
        feed = read_plan.begin(request.epoch, None, batching=batching).feed
        run = EpochRun(
            run_plan._replace(transforms=transforms, drop_last=False, in_order=True),
            reads=feed,
            builder=_builder(request, feed),
            meter=Meter(),
        )
        try:
            while (delivery := run.next_batch()) is not None:
                if not delivery.is_empty:
                    return delivery
        finally:
            run.close()
    return None
