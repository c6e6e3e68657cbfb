"""An epoch divided among worker processes: who is told what."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.fetch import process_budget
from penstock.loader.dealing import IndexedDeal, StreamDeal, part_of_cursor
from penstock.loader.indexed import IndexedJob
from penstock.loader.processes import ProcessRun
from penstock.loader.told import WorkerJob

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.loader.dealing import Deal
    from penstock.loader.feed import Batching
    from penstock.loader.planning import Plan
    from penstock.loader.run import RunPlan
    from penstock.loader.statistics import Meter
    from penstock.loader.workers import Workers
    from penstock.order import Batches

_log = logging.getLogger("penstock.loader")


def divided(
    plan: Plan,
    run_plan: RunPlan,
    cursor: Mapping[str, Any] | None,
    *,
    epoch: int,
    batching: Batching,
    processes: int,
    restarts: bool,
    workers: Workers,
    meter: Meter,
) -> tuple[Batches | None, ProcessRun]:
    """Start workers for an epoch.

    Args:
        plan: What to read.
        run_plan: How to make batches of it; the threads are divided.
        cursor: Where in the epoch to begin; None is its beginning.
        epoch: Number.
        batching: How much at a time.
        processes: Workers; fewer where the rank has fewer lanes.
        restarts: Whether one that dies is replaced.
        workers: Where they come from.
        meter: Told of samples, bytes and seconds.

    Returns:
        The rank's batches, where an index tells; and the run.

    Raises:
        ConfigError: stages that change how many samples there are.
    """
    if plan.carries:
        raise ConfigError("refill, flat_map and batch_by_size are not divided among processes", hint="processes=0")
    order = plan.job.order.at_epoch(epoch)
    count = usable_count(len(order.lanes_owned), processes, evenly=isinstance(plan.job, IndexedJob))
    batches: Batches | None = None
    deal: Deal
    if isinstance(plan.job, IndexedJob):
        cursor = {"position": 0} if cursor is None else cursor
        batches = plan.job.batches(epoch, batching=batching, origin=cursor["position"])
        run_plan = run_plan._replace(drop_last=False)  # the last batch is the last that counts
        deal = IndexedDeal(batches, workers_count=count)
    else:
        deal = StreamDeal(
            order,
            cursor,
            take=batching.take,
            size=run_plan.batch_size,
            drop_last=run_plan.drop_last,
            workers_count=count,
        )
    cursors = (
        [part_of_cursor(cursor, order.lanes_owned, number, count) for number in range(count)]
        if batches is None or cursor is None
        else [cursor] * count
    )
    told = [
        WorkerJob(
            job=plan.job,
            pipeline=plan.pipeline,
            plan=run_plan._replace(
                steps=(),
                drop_last=False,
                threads_count=max(1, run_plan.threads_count // count),
                prefetch_batches=run_plan.prefetch_batches + 1,
            ),
            epoch=epoch,
            first_batch=0,
            cursor=cursors[number],
            global_size=0 if batches is None else batching.global_size,
            stop=0 if batches is None else batches.stop,
            number=number,
            workers_count=count,
            budget_bytes=process_budget().bytes_max // count,
            meter=meter,
        )
        for number in range(count)
    ]
    return batches, ProcessRun(run_plan, deal=deal, told=told, workers=workers, restarts=restarts, meter=meter)


def usable_count(lanes_count: int, processes: int, *, evenly: bool) -> int:
    """Workers that can own lanes: at most as many as asked for.

    Args:
        lanes_count: The rank's.
        processes: Asked for.
        evenly: Whether all must own equally many.
    """
    count = min(processes, max(1, lanes_count))
    while evenly and lanes_count % count:
        count -= 1
    if count < processes:
        _log.warning("%d of %d worker processes are used: a rank has %d lanes", count, processes, lanes_count)
    return count
