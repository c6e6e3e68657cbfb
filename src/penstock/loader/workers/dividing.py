"""An epoch divided among worker processes: who is told what."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from penstock.fetch import process_budget
from penstock.loader.plan.indexed import IndexedReadPlan
from penstock.loader.position import IndexPosition, RebatchedPosition, feed_position, skip_count
from penstock.loader.workers.processes import ProcessRun
from penstock.loader.workers.remote_rebatching import Blocks, block_plan, rebatching_run
from penstock.loader.workers.row_assignment import IndexedRowAssigner, StreamRowAssigner, worker_position
from penstock.loader.workers.worker_job import WorkerJob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.loader.batches.run import EpochRun, RunPlan
    from penstock.loader.lanes.feed import Batching
    from penstock.loader.plan.loader_plan import LoaderPlan
    from penstock.loader.position import FeedPosition, Position
    from penstock.loader.statistics import Meter
    from penstock.loader.workers.children import ProcessPool
    from penstock.loader.workers.row_assignment import RowAssigner
    from penstock.order import Batches

_log = logging.getLogger("penstock.loader")


def divided(
    plan: LoaderPlan,
    run_plan: RunPlan,
    position: Position | None,
    *,
    epoch: int,
    batching: Batching,
    processes: int,
    restarts: bool,
    workers: ProcessPool,
    meter: Meter,
) -> tuple[Batches | None, EpochRun | ProcessRun, Position]:
    """Start workers for an epoch.

    Args:
        plan: What to read.
        run_plan: How to make batches of it; the threads are divided.
        position: Where in the epoch to begin; None is its beginning.
        epoch: Number.
        batching: How much at a time.
        processes: ProcessPool; fewer where the rank has fewer lanes.
        restarts: Whether one that dies is replaced.
        workers: Where they come from.
        meter: Told of samples, bytes and seconds.

    Returns:
        The rank's batches, where an index tells and nothing is carried; the run; and the position where it begins.
    """
    order = plan.read_plan.order.at_epoch(epoch)
    count = usable_count(len(order.lanes_owned), processes, evenly=isinstance(plan.read_plan, IndexedReadPlan))
    made = block_plan(run_plan) if plan.carries else run_plan
    batches: Batches | None = None
    assigner: RowAssigner
    begin: FeedPosition
    positions: Sequence[FeedPosition]
    if isinstance(plan.read_plan, IndexedReadPlan):
        begin = feed_position(position) or IndexPosition(0)
        assert isinstance(begin, IndexPosition)
        if plan.carries:
            batching = batching._replace(global_size=made.batch_size * plan.world_size)
        batches = plan.read_plan.batches(epoch, batching=batching, origin=begin.position)
        made = made._replace(drop_last=False)  # the last batch is the last that counts
        assigner = IndexedRowAssigner(batches, workers_count=count)
        positions = [begin] * count
    else:
        read_from = feed_position(position)
        assert not isinstance(read_from, IndexPosition)
        assigner = StreamRowAssigner(
            order, read_from, take=batching.take, size=made.batch_size, drop_last=made.drop_last, workers_count=count
        )
        positions = [worker_position(read_from, order.lanes_owned, number, count) for number in range(count)]
        begin = assigner.begin
    job = WorkerJob(
        job=plan.read_plan,
        pipeline=plan.pipeline,
        plan=made._replace(
            transforms=(),
            drop_last=False,
            threads_count=max(1, made.threads_count // count),
            prefetch_batches=made.prefetch_batches + 1,
            prefetch_bytes=0,
        ),
        epoch=epoch,
        first_batch=0,
        position=begin,
        global_size=0 if batches is None else batching.global_size,
        stop=0 if batches is None else batches.stop,
        number=0,
        workers_count=count,
        budget_bytes=process_budget().bytes_max // count,
        meter=meter,
        carries=plan.carries,
    )
    told = [job._replace(number=number, position=each) for number, each in enumerate(positions)]
    run = ProcessRun(
        made, assigner=assigner, told=told, workers=workers, restarts=restarts, meter=meter, counts=not plan.carries
    )
    if not plan.carries:
        return batches, run, begin
    skipped = skip_count(position)
    blocks = Blocks(run, batches=batches, mark=begin)
    run_of_all = rebatching_run(run_plan, blocks, skip_count=skipped, meter=meter)
    return None, run_of_all, RebatchedPosition(begin, skipped)


def usable_count(lanes_count: int, processes: int, *, evenly: bool) -> int:
    """ProcessPool that can own lanes: at most as many as asked for.

    Args:
        lanes_count: The rank's.
        processes: Asked for.
        evenly: Whether all must own equally many.
    """
    count = min(processes, max(1, lanes_count))
    while evenly and lanes_count % count:
        count -= 1
    if count < processes:
        text = "%d of %d worker processes are used: each has lanes of its own, and this rank has %d; see Loader(lanes=)"
        _log.warning(text, count, processes, lanes_count)
    return count
