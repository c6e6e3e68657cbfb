"""A worker pool on a Ray cluster: one task per group of shards, which runs the same code. Ray is imported only here.

The plan defines each shard, so tasks do not depend on each other, and a task that is repeated because its machine was
lost writes the same bytes under the same name. This process writes the plan before the tasks and the index after them;
if it dies itself, the next run continues as always, on a cluster or on one machine. Uploads that a lost machine had
started are dropped at the end. Every machine must be able to reach the sources and the destination: object stores, or a
shared disk.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock import compose
from penstock.errors import ConfigError, PenstockError, WorkerDiedError
from penstock.fetch import set_process_budget
from penstock.pack.fingerprint import modules_of
from penstock.pack.recipes import EntriesRecipe, WriteContext
from penstock.pack.shard_file import ShardFolder
from penstock.pack.verification import check_shard
from penstock.pack.workers import memory_shares

if TYPE_CHECKING:
    from penstock.index import ShardRow
    from penstock.pack.progress import PackListener
    from penstock.pack.recipes import ShardGroup, WorkerSetup
    from penstock.pack.workers import ExecutionOptions

RETRIES_MAX = 8
"""How often a task is repeated after its machine or process was lost. Errors of the data or a store are not repeated."""

WAITING_PER_CPU = 2
"""Tasks submitted for each CPU of the cluster: more of them would only hold their plans in its memory."""

CANCEL_S_MAX = 15.0
"""Seconds that tasks get to drop their open shards after another one failed or the user interrupted."""


class _TaskResult(NamedTuple):
    rows: list[ShardRow]
    samples_count: int
    source_bytes: int


class RayWorkerPool:
    """A worker pool on a cluster. A cluster that this process has joined already is used, and stays joined.

    Args:
        setup: Record that each worker is given.
        options: Address of the cluster, number of shards at a time, memory limit, and whether shards are verified.
        listener: Receives progress, a group of shards at a time.
    """

    def __init__(self, setup: WorkerSetup, *, options: ExecutionOptions, listener: PackListener) -> None:
        self._ray: Any = import_module("ray")
        self._setup = setup
        self._options = options
        self._listener = listener
        self._rows: dict[str, ShardRow] = {}
        self._running: dict[Any, ShardGroup] = {}

    def write(self, groups: list[ShardGroup]) -> dict[str, ShardRow]:
        """Write all shards; see ``WorkerPool.write``.

        Raises:
            ConfigError: No cluster answers at the address.
            PenstockError: The first error of any shard; the others are given up.
            WorkerDiedError: A shard's machine was lost more than ``RETRIES_MAX`` times.
        """
        ray = self._ray
        was_joined = ray.is_initialized()
        if not was_joined:
            try:
                ray.init(
                    address=self._options.address, log_to_driver=False, logging_level="ERROR", include_dashboard=False
                )
            except (ConnectionError, ValueError) as error:
                raise ConfigError(f"no Ray cluster answers at {self._options.address!r}: {error}") from error
        try:
            with self._modules_by_value():
                return self._run(groups)
        finally:
            if not was_joined:
                ray.shutdown()

    def _modules_by_value(self) -> ExitStack:
        """Until the stack closes, pickle by value the user's modules that the transform uses: workers may not have them."""
        stack = ExitStack()
        recipe, pickler = self._setup.recipe, self._ray.cloudpickle
        transform = recipe.transform if isinstance(recipe, EntriesRecipe) else None
        for module in modules_of(transform) if transform is not None else ():
            if module.__name__ != "__main__":
                pickler.register_pickle_by_value(module)
                stack.callback(pickler.unregister_pickle_by_value, module)
        return stack

    def _run(self, groups: list[ShardGroup]) -> dict[str, ShardRow]:
        task = self._ray.remote(num_cpus=1, max_retries=RETRIES_MAX, scheduling_strategy="SPREAD")(_write_group)
        setup = self._ray.put(self._setup)
        waiting = list(reversed(groups))
        try:
            while waiting or self._running:
                while waiting and len(self._running) < self._tasks_max():
                    group = waiting.pop()
                    ref = task.remote(setup, group, self._options.memory_bytes_max, self._options.verify)
                    self._running[ref] = group
                (ref,), _ = self._ray.wait(list(self._running), num_returns=1)
                self._take(self._result(ref))
                del self._running[ref]
        except BaseException:
            self._cancel()
            raise
        return self._rows

    def _tasks_max(self) -> int:
        if self._options.jobs is not None:
            return self._options.jobs
        return max(1, WAITING_PER_CPU * int(self._ray.cluster_resources().get("CPU", 1)))

    def _result(self, ref: Any) -> _TaskResult:
        try:
            result: _TaskResult = self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise cause if isinstance(cause, PenstockError) else error from None
        except self._ray.exceptions.RayError as error:
            name = self._running[ref][0].name
            raise WorkerDiedError(f"shard {name!r} was given up: {type(error).__name__}: {error}") from error
        return result

    def _take(self, result: _TaskResult) -> None:
        self._listener.progressed(result.samples_count, result.source_bytes)
        for row in result.rows:
            self._rows[row.key] = row
            self._listener.finished(row, known=False)
            if self._options.verify:
                self._listener.verified(row)

    def _cancel(self) -> None:
        """Have the running tasks drop the shards that they have open."""
        refs = list(self._running)
        with suppress(self._ray.exceptions.RayError):
            for ref in refs:
                self._ray.cancel(ref, recursive=False)
            if refs:
                self._ray.wait(refs, num_returns=len(refs), timeout=CANCEL_S_MAX)


def _write_group(setup: WorkerSetup, group: ShardGroup, memory_bytes_max: int | None, verify: bool) -> _TaskResult:
    """Write one group of shards; this runs as a Ray task, on any machine of the cluster."""
    if memory_bytes_max is not None:
        set_process_budget(memory_shares(memory_bytes_max, 1, setup.recipe.format).reading_bytes)
    samples_count = source_bytes = 0

    def report_progress(samples: int, size_bytes: int) -> None:
        nonlocal samples_count, source_bytes
        samples_count, source_bytes = samples_count + samples, source_bytes + size_bytes

    with ExitStack() as stack:
        folder = ShardFolder(stack.enter_context(compose.connect(setup.url, **setup.connection)), run=setup.run)
        stores = [stack.enter_context(compose.connect(url, **setup.source_connection)) for url in setup.roots]
        rows = []
        for row in setup.recipe.write(WriteContext(folder, stores, _raise_if_stopped, report_progress), group):
            if verify:
                check_shard(folder.store, folder.place, row)
            rows.append(row)
    return _TaskResult(rows, samples_count, source_bytes)


def _raise_if_stopped() -> None:
    """Do nothing: Ray interrupts a task that must stop."""
