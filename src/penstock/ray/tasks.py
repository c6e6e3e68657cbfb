"""Tasks on a Ray cluster, for packing and for the gateway's fill; and joining a cluster."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from penstock.errors import ConfigError, PenstockError, WorkerDiedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import ModuleType

S = TypeVar("S")
T = TypeVar("T")
R = TypeVar("R")

RETRIES_MAX = 8
"""How often a task is repeated after its machine or process was lost. Errors of the data or a store are not repeated."""

WAITING_PER_CPU = 2
"""Tasks submitted for each CPU of the cluster: more of them would only hold their plans in its memory."""

CANCEL_S_MAX = 15.0
"""Seconds that tasks get to drop their open shards after another one failed or the user interrupted."""


def join(address: str | None, **options: Any) -> None:
    """Join a cluster.

    Args:
        address: Address of the cluster; None uses the one that Ray finds, or starts one on this machine.
        **options: More options of ``ray.init``.

    Raises:
        ConfigError: No cluster answers.
    """
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "include_dashboard": False}
    try:
        ray.init(address=address, **quiet, **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        token = "" if address is None else " (one with token authentication needs RAY_AUTH_MODE=token)"
        raise ConfigError(f"no Ray cluster answers at {address!r}{token}: {error}") from error


class RayTasks:
    """Calls one function for many items, each call a task on a cluster.

    A cluster that this process has joined already is used, and stays joined. A task whose machine or process is lost is
    repeated, at most ``RETRIES_MAX`` times.

    Args:
        address: Address of the cluster; None uses the one that Ray finds, or starts one on this machine.
        tasks_max: Number of tasks at a time; None means ``WAITING_PER_CPU`` for each CPU of the cluster.
    """

    def __init__(self, *, address: str | None, tasks_max: int | None) -> None:
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
        was_joined = ray.is_initialized()
        if not was_joined:
            join(self._address)
        try:
            with self._modules_by_value(modules):
                task = ray.remote(num_cpus=1, max_retries=RETRIES_MAX, scheduling_strategy="SPREAD")(function)
                self._run(task, iter(items), ray.put(setup), taken, describe)
        finally:
            if not was_joined:
                ray.shutdown()

    def _modules_by_value(self, modules: Iterable[ModuleType]) -> ExitStack:
        stack, pickler = ExitStack(), ray.cloudpickle
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
                    (ref,), _ = ray.wait(list(running), num_returns=1)
                    taken(running[ref], self._result(ref, describe(running[ref])))
                    del running[ref]
        except BaseException:
            self._cancel(list(running))
            raise

    def _tasks_max(self) -> int:
        if self._tasks_at_once_max is not None:
            return self._tasks_at_once_max
        return max(1, WAITING_PER_CPU * int(ray.cluster_resources().get("CPU", 1)))

    def _result(self, ref: Any, what: str) -> Any:
        try:
            return ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise cause if isinstance(cause, PenstockError) else error from None
        except ray.exceptions.RayError as error:
            raise WorkerDiedError(f"{what} was given up: {type(error).__name__}: {error}") from error

    def _cancel(self, refs: list[Any]) -> None:
        """Have the running tasks drop their unfinished shards."""
        with suppress(ray.exceptions.RayError):
            for ref in refs:
                ray.cancel(ref, recursive=False)
            if refs:
                ray.wait(refs, num_returns=len(refs), timeout=CANCEL_S_MAX)
