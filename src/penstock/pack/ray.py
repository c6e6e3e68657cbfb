"""Carrying out a plan on a Ray cluster: one task per group of shards, which runs the same code. Ray is imported only here.

The plan defines each shard, so tasks do not depend on each other, and a task that is repeated because its machine was
lost writes the same bytes under the same name. This process writes the plan before the tasks and the index after them;
if it dies itself, the next run continues as always, on a cluster or on one machine. Uploads that a lost machine had
started are dropped at the end. Every machine must be able to reach the sources and the destination: object stores, or a
shared disk.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from importlib import import_module
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from penstock import compose
from penstock.errors import ConfigError, PenstockError, WorkerDiedError
from penstock.fetch import set_process_budget
from penstock.pack.fingerprint import modules_of
from penstock.pack.recipes import EntriesRecipe, WriteContext
from penstock.pack.shard_file import ShardFolder
from penstock.pack.verification import check_shard
from penstock.pack.workers import memory_shares

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import ModuleType

    from penstock.index import ShardRow
    from penstock.pack.recipes import PackListener, Recipe, ShardGroup
    from penstock.pack.workers import ExecutionOptions
    from penstock.pipeline.factories import ConnectionOptions

S = TypeVar("S")
T = TypeVar("T")
R = TypeVar("R")

RETRIES_MAX = 8
"""How often a task is repeated after its machine or process was lost. Errors of the data or a store are not repeated."""

WAITING_PER_CPU = 2
"""Tasks submitted for each CPU of the cluster: more of them would only hold their plans in its memory."""

CANCEL_S_MAX = 15.0
"""Seconds that tasks get to drop their open shards after another one failed or the user interrupted."""


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


class RayTasks:
    """Calls one function for many items, each call a task on a cluster.

    A cluster that this process has joined already is used, and stays joined. A task whose machine or process is lost is
    repeated, at most ``RETRIES_MAX`` times.

    Args:
        address: Address of the cluster; None uses the one that Ray finds, or starts one on this machine.
        tasks_max: Number of tasks at a time; None means ``WAITING_PER_CPU`` for each CPU of the cluster.
    """

    def __init__(self, *, address: str | None, tasks_max: int | None) -> None:
        self._ray: Any = import_module("ray")
        self._address = address
        self._tasks_at_once_max = tasks_max

    def run(
        self,
        function: Callable[[S, T], R],
        items: Iterable[T],
        *,
        setup: S,
        taken: Callable[[T, R], None],
        describe: Callable[[T], str],
        modules: Iterable[ModuleType] = (),
    ) -> None:
        """Call ``function(setup, item)`` for each item, and ``taken(item, result)`` here, in the order of their ends.

        Args:
            function: A function of a module that the machines of the cluster have.
            items: The items; they are taken as tasks end.
            setup: Data that all calls share; they are sent to each machine once.
            taken: Receives results.
            describe: Returns words for an item, for errors.
            modules: Modules of the user, pickled by value because the machines may not have them.

        Raises:
            ConfigError: No cluster answers at the address.
            PenstockError: The first error of any task; the others are cancelled.
            WorkerDiedError: A task's machine was lost too often.
        """
        ray = self._ray
        was_joined = ray.is_initialized()
        if not was_joined:
            try:
                ray.init(address=self._address, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
            except (ConnectionError, ValueError) as error:
                raise ConfigError(f"no Ray cluster answers at {self._address!r}: {error}") from error
        try:
            with self._modules_by_value(modules):
                task = ray.remote(num_cpus=1, max_retries=RETRIES_MAX, scheduling_strategy="SPREAD")(function)
                self._run(task, iter(items), ray.put(setup), taken, describe)
        finally:
            if not was_joined:
                ray.shutdown()

    def _modules_by_value(self, modules: Iterable[ModuleType]) -> ExitStack:
        stack, pickler = ExitStack(), self._ray.cloudpickle
        for module in modules:
            if module.__name__ != "__main__":
                pickler.register_pickle_by_value(module)
                stack.callback(pickler.unregister_pickle_by_value, module)
        return stack

    def _run(
        self, task: Any, items: Iterator[T], setup: Any, taken: Callable[[T, R], None], describe: Callable[[T], str]
    ) -> None:
        running: dict[Any, T] = {}
        waiting = True
        try:
            while waiting or running:
                while waiting and len(running) < self._tasks_max():
                    for item in islice(items, 1):
                        running[task.remote(setup, item)] = item
                        break
                    else:
                        waiting = False
                if running:
                    (ref,), _ = self._ray.wait(list(running), num_returns=1)
                    taken(running[ref], self._result(ref, describe(running[ref])))
                    del running[ref]
        except BaseException:
            self._cancel(list(running))
            raise

    def _tasks_max(self) -> int:
        if self._tasks_at_once_max is not None:
            return self._tasks_at_once_max
        return max(1, WAITING_PER_CPU * int(self._ray.cluster_resources().get("CPU", 1)))

    def _result(self, ref: Any, what: str) -> Any:
        try:
            return self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise cause if isinstance(cause, PenstockError) else error from None
        except self._ray.exceptions.RayError as error:
            raise WorkerDiedError(f"{what} was given up: {type(error).__name__}: {error}") from error

    def _cancel(self, refs: list[Any]) -> None:
        """Have the running tasks drop their unfinished shards."""
        with suppress(self._ray.exceptions.RayError):
            for ref in refs:
                self._ray.cancel(ref, recursive=False)
            if refs:
                self._ray.wait(refs, num_returns=len(refs), timeout=CANCEL_S_MAX)


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
