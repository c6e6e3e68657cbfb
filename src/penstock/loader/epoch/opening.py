"""Opens an epoch: the one place that chooses how its batches are made and in which mode they are handed out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.loader.epoch.batch_sources import AgreedBatches, CountedBatches, RebatchedBatches, StreamedBatches
from penstock.loader.epoch.out_of_order import CountedOutOfOrder, OutOfOrderTracker, StreamedOutOfOrder
from penstock.loader.epoch.padding import Padder, Trimmer
from penstock.loader.epoch.runs import (
    any_delivery,
    rebatch_in_processes,
    rebatch_in_threads,
    run_in_processes,
    run_in_threads,
    thread_run,
)
from penstock.loader.lanes.feed import SelectedBatchesFeed
from penstock.loader.position import OutOfOrderPosition, feed_position
from penstock.pipeline import BatchBySize

if TYPE_CHECKING:
    from penstock.loader.epoch.batch_sources import BatchSource
    from penstock.loader.epoch.consensus import RankConsensus
    from penstock.loader.epoch.padding import Finisher
    from penstock.loader.epoch.runs import EpochRequest, OpenedRun, WorkerOptions


def open_epoch(
    request: EpochRequest, *, consensus: RankConsensus | None = None, workers: WorkerOptions | None = None
) -> BatchSource:
    """Start to make the batches of an epoch, or of the rest of one.

    Args:
        request: The plan, the position to begin at, and how to make batches.
        consensus: Consensus with the other ranks, if there are any. Batches that an index counts do not need it.
        workers: Worker processes that decode; None decodes in threads of this process.

    Raises:
        ConfigError: The options do not go together, or the position does not belong to this job.
    """
    plan, has_gaps = request.plan, isinstance(request.position, OutOfOrderPosition)
    if plan.read_plan.mode == "index" and not plan.is_rebatched:
        consensus = None
    if has_gaps and (plan.is_rebatched or request.stride[1] > 1):
        raise ConfigError(
            "the state was saved with in_order=False, and batches after its position have been handed out",
            hint="finish the epoch without stride=, and without stages that change the number of samples",
        )
    if consensus is not None and request.stride[1] > 1:
        raise ConfigError(f"stride={request.stride} with ranks that have to agree", hint="run `penstock index`")
    if workers is not None and not has_gaps:  # only threads can leave out single batches
        opened = rebatch_in_processes(request, workers) if plan.is_rebatched else run_in_processes(request, workers)
        return _in_order(request, opened, consensus)
    if plan.is_rebatched:
        return _in_order(request, rebatch_in_threads(request), consensus)
    if consensus is not None or (request.in_order and not has_gaps):
        return _in_order(request, run_in_threads(request), consensus)
    return _out_of_order(request)


def _in_order(request: EpochRequest, opened: OpenedRun, consensus: RankConsensus | None) -> BatchSource:
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
        opened.run, finisher, rows_count=rows_count, next_number=request.first_of_stride, step=request.stride[1]
    )


def _out_of_order(request: EpochRequest) -> BatchSource:
    plan = request.plan
    feed, batches = plan.read_plan.begin(request.epoch, feed_position(request.position), batching=plan.read_batching)
    try:
        tracker = OutOfOrderTracker(
            request.position, feed_position=feed.position(), global_size=plan.batching.global_size
        )
    except BaseException:
        feed.close()
        raise
    remaining = SelectedBatchesFeed(feed, size=plan.rows_count, first_batch=0, chosen=tracker.makes)
    run = thread_run(request, remaining, is_counted=batches is not None, in_order=request.in_order)
    finisher = _finisher(request)
    if batches is not None:
        return CountedOutOfOrder(run, finisher, tracker=tracker, batches=batches, next_number=request.first_number)
    return StreamedOutOfOrder(
        run, finisher, tracker=tracker, rows_count=plan.rows_count, next_number=request.first_number
    )


def _finisher(request: EpochRequest) -> Finisher:
    if not request.plan.is_masked:
        return Trimmer(request.plan.rows_count)
    return Padder(lambda: any_delivery(request), is_variable=isinstance(request.run_plan.batch, BatchBySize))
