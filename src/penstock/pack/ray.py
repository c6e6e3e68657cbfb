"""Packing on a Ray cluster: a task for each shard, the same code as here. Ray is imported nowhere else.

The plan says what each shard is, so tasks need nothing of each other, and a task that is tried again, because its
machine was lost, writes the same bytes under the same name. This process writes the plan before and the index after;
where it dies itself, the next run, on a cluster or here, goes on as always. What a lost machine was sending in parts is
dropped at the end. Sources and destination must be reachable from every machine: object stores, or a shared disk.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock import compose
from penstock.errors import ConfigError, PenstockError, WorkerDiedError
from penstock.fetch import set_process_budget
from penstock.pack.contents import modules_of
from penstock.pack.running import Desk, EntriesRecipe, shares
from penstock.pack.shelf import Shelf
from penstock.pack.verifying import check_shard

if TYPE_CHECKING:
    from penstock.index import ShardRow
    from penstock.pack.progress import Listener
    from penstock.pack.running import Crew, How, Unit

RETRIES_MAX = 8
"""Times that a shard is begun again after its machine or process was lost; errors of the data or a store are final."""

WAITING_PER_CPU = 2
"""Tasks handed to the cluster for each of its CPUs: more would hold their plans in its memory."""

CANCEL_S_MAX = 15.0
"""Seconds for tasks to drop what they had open, when another one failed or the user asked to stop."""


class _Done(NamedTuple):
    rows: list[ShardRow]
    samples_count: int
    source_bytes: int


def run_on_ray(units: list[Unit], crew: Crew, *, how: How, listener: Listener) -> dict[str, ShardRow]:
    """Write all shards of `units` on a cluster; their rows by name.

    Args:
        units: One task each.
        crew: What they need.
        how: ``address`` and ``jobs``; a cluster that this process has joined already is used, and stays joined.
        listener: Told how it goes, a shard at a time.

    Raises:
        ConfigError: there is no cluster at that address.
        PenstockError: the first error of any shard; the others are given up.
        WorkerDiedError: a shard's machine was lost more than ``RETRIES_MAX`` times.
    """
    ray: Any = import_module("ray")
    joined = ray.is_initialized()
    if not joined:
        try:
            ray.init(address=how.address, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
        except (ConnectionError, ValueError) as error:
            raise ConfigError(f"there is no Ray cluster at {how.address!r}: {error}") from error
    try:
        with _by_value(ray, crew):
            return _Tasks(ray, crew, how, listener).run(units)
    finally:
        if not joined:
            ray.shutdown()


def _by_value(ray: Any, crew: Crew) -> ExitStack:
    """Until it is left, a transform travels with the user's modules that it uses: other machines may not have them."""
    stack = ExitStack()
    transform = crew.recipe.transform if isinstance(crew.recipe, EntriesRecipe) else None
    for module in modules_of(transform) if transform is not None else ():
        if module.__name__ != "__main__":
            ray.cloudpickle.register_pickle_by_value(module)
            stack.callback(ray.cloudpickle.unregister_pickle_by_value, module)
    return stack


class _Tasks:
    """The tasks of one packing."""

    def __init__(self, ray: Any, crew: Crew, how: How, listener: Listener) -> None:
        self._ray = ray
        self._how = how
        self._listener = listener
        self._task = ray.remote(num_cpus=1, max_retries=RETRIES_MAX, scheduling_strategy="SPREAD")(_write)
        self._crew = ray.put(crew)
        self._rows: dict[str, ShardRow] = {}
        self._running: dict[Any, Unit] = {}

    def run(self, units: list[Unit]) -> dict[str, ShardRow]:
        """All of them; their rows by name."""
        waiting = list(reversed(units))
        try:
            while waiting or self._running:
                while waiting and len(self._running) < self._limit():
                    unit = waiting.pop()
                    ref = self._task.remote(self._crew, unit, self._how.memory_bytes_max, self._how.verify)
                    self._running[ref] = unit
                (ref,), _ = self._ray.wait(list(self._running), num_returns=1)
                self._note(self._result(ref))
                del self._running[ref]
        except BaseException:
            self._cancel()
            raise
        return self._rows

    def _limit(self) -> int:
        if self._how.jobs is not None:
            return self._how.jobs
        return max(1, WAITING_PER_CPU * int(self._ray.cluster_resources().get("CPU", 1)))

    def _result(self, ref: Any) -> _Done:
        try:
            done: _Done = self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise cause if isinstance(cause, PenstockError) else error from None
        except self._ray.exceptions.RayError as error:
            name = self._running[ref][0].name
            raise WorkerDiedError(f"shard {name!r} was given up: {type(error).__name__}: {error}") from error
        return done

    def _note(self, done: _Done) -> None:
        self._listener.progressed(done.samples_count, done.source_bytes)
        for row in done.rows:
            self._rows[row.key] = row
            self._listener.finished(row, known=False)
            if self._how.verify:
                self._listener.verified(row)

    def _cancel(self) -> None:
        """Have the others drop what they have open."""
        refs = list(self._running)
        with suppress(self._ray.exceptions.RayError):
            for ref in refs:
                self._ray.cancel(ref, recursive=False)
            if refs:
                self._ray.wait(refs, num_returns=len(refs), timeout=CANCEL_S_MAX)


def _write(crew: Crew, unit: Unit, memory_bytes_max: int | None, verify: bool) -> _Done:
    """One task: some shards, on whatever machine this is."""
    if memory_bytes_max is not None:
        set_process_budget(shares(memory_bytes_max, 1, crew.recipe.format).reading_bytes)
    samples_count = source_bytes = 0

    def progressed(samples: int, size_bytes: int) -> None:
        nonlocal samples_count, source_bytes
        samples_count, source_bytes = samples_count + samples, source_bytes + size_bytes

    with ExitStack() as stack:
        shelf = Shelf(stack.enter_context(compose.connect(crew.url, **crew.connection)), run=crew.run)
        stores = [stack.enter_context(compose.connect(url, **crew.to_source)) for url in crew.roots]
        rows = []
        for row in crew.recipe.write(Desk(shelf, stores, _going_on, progressed), unit):
            if verify:
                check_shard(shelf.store, shelf.place, row)
            rows.append(row)
    return _Done(rows, samples_count, source_bytes)


def _going_on() -> None:
    """Whoever stops a task interrupts it."""
