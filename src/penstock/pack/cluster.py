"""Carrying out a plan on a Ray cluster: one task per group of shards, which runs the same code.

The plan defines each shard, so tasks do not depend on each other, and a task that is repeated because its machine was
lost writes the same bytes under the same name. This process writes the plan before the tasks and the index after them;
if it dies itself, the next run continues as always, on a cluster or on one machine. Uploads that a lost machine had
started are dropped at the end. Every machine must be able to reach the sources and the destination: object stores, or a
shared disk.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from penstock import compose
from penstock.fetch import set_process_budget
from penstock.pack.fingerprint import modules_of
from penstock.pack.recipes import EntriesRecipe, WriteContext
from penstock.pack.shard_file import ShardFolder
from penstock.pack.verification import check_shard
from penstock.pack.workers import memory_shares

if TYPE_CHECKING:
    from penstock.index import ShardRow
    from penstock.pack.recipes import PackListener, Recipe, ShardGroup
    from penstock.pack.workers import ExecutionOptions
    from penstock.pipeline.factories import ConnectionOptions


class ClusterTask(NamedTuple):
    """Everything that a machine needs in order to write shards. It pickles.

    Attributes:
        recipe: Recipe to follow.
        url: URL of the destination.
        connection: Connection options of the destination.
        roots: URLs of the stores that are read.
        source_connection: Connection options of these stores.
        run: Name of the run that the machine belongs to.
    """

    recipe: Recipe
    url: str
    connection: ConnectionOptions
    roots: tuple[str, ...]
    source_connection: ConnectionOptions
    run: str | None
    options: ExecutionOptions


class _TaskResult(NamedTuple):
    rows: list[ShardRow]
    samples_count: int
    source_bytes: int


def write_on_cluster(groups: list[ShardGroup], task: ClusterTask, *, listener: PackListener) -> dict[str, ShardRow]:
    """Write all shards of `groups`, each group in a task of its own; return their rows by name.

    Args:
        groups: Shards in groups that are written one after the other.
        task: The part of the plan that each machine carries out, and the options of its execution.
        listener: Receives progress, a group of shards at a time.

    Raises:
        ConfigError: No cluster answers at the address.
        PenstockError: The first error of any shard; the others are given up.
        WorkerDiedError: A shard's machine was lost more than ``RETRIES_MAX`` times.
    """
    from penstock.ray.tasks import RayTasks  # here, because Ray may not be installed

    rows: dict[str, ShardRow] = {}

    def take(_: ShardGroup, result: _TaskResult) -> None:
        listener.progressed(result.samples_count, result.source_bytes)
        for row in result.rows:
            rows[row.key] = row
            listener.finished(row, known=False)
            if task.options.verify:
                listener.verified(row)

    transform = task.recipe.transform if isinstance(task.recipe, EntriesRecipe) else None
    RayTasks(address=task.options.address, tasks_max=task.options.jobs).run(
        _write_group,
        groups,
        setup=task,
        taken=take,
        describe=lambda group: f"shard {group[0].name!r}",
        modules=modules_of(transform) if transform is not None else (),
    )
    return rows


def _write_group(task: ClusterTask, group: ShardGroup) -> _TaskResult:
    """Write one group of shards; this runs as a Ray task, on any machine of the cluster."""
    if task.options.memory_bytes_max is not None:
        set_process_budget(memory_shares(task.options.memory_bytes_max, 1, task.recipe.format).reading_bytes)
    samples_count = source_bytes = 0

    def report_progress(samples: int, size_bytes: int) -> None:
        nonlocal samples_count, source_bytes
        samples_count, source_bytes = samples_count + samples, source_bytes + size_bytes

    with ExitStack() as stack:
        folder = ShardFolder(stack.enter_context(compose.connect(task.url, **task.connection)), run=task.run)
        stores = [stack.enter_context(compose.connect(url, **task.source_connection)) for url in task.roots]
        rows = []
        # Ray interrupts a task that must stop.
        for row in task.recipe.write(WriteContext(folder, stores, lambda: None, report_progress), group):
            if task.options.verify:
                check_shard(folder.store, folder.place, row)
            rows.append(row)
    return _TaskResult(rows, samples_count, source_bytes)
