"""``Loader``: runs a pipeline and hands out its batches, epoch after epoch."""

from __future__ import annotations

import logging
import time
import weakref
from typing import TYPE_CHECKING, Any, Literal, Self

from penstock.errors import ClosedError, ConfigError
from penstock.loader.epoch import Epoch
from penstock.loader.finding import Finder
from penstock.loader.options import Options
from penstock.loader.planning import Plan, plan_of, threads_count
from penstock.loader.run import RunPlan
from penstock.loader.samples import Steps
from penstock.loader.state import STATE_VERSION, check_same_data, check_same_job, checked
from penstock.loader.statistics import LoaderStatistics, Meter
from penstock.order import ORDER_VERSION
from penstock.pipeline import Batch, BatchBySize, Pipeline, Shuffle

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping

    from penstock.config import FetchConfig

_log = logging.getLogger("penstock.loader")


class Loader:
    """Streams a pipeline's batches, in an order that the seed, the epoch and the shards fix, whatever runs it.

    ``for batch in loader`` is one epoch; the next ``for`` is the next epoch. After ``break`` it goes on where it
    stopped; ``restart()`` begins the epoch again. A batch is a dict: fields as ``dtype[B, ...]`` arrays (or lists of
    ``str``, ``bytes`` and other objects), ``"__key__"`` and ``"__shard__"`` as lists of ``str``, ``"__position__"`` as
    int64[B]; with several ranks and ``drop_last=False`` also ``"__valid__"``, bool[B]. Its arrays belong to the caller.

    A loader is a context manager; ``close()``, and its garbage collection, end its threads.

    Args:
        pipeline: Ends with ``.batch(n)``.
        lanes: Shards read side by side, of the whole job; a multiple of the world size. Default 64 where the pipeline
            shuffles, else the world size, so that one rank sees the stored order.
        threads: Decode threads; default one per core that this process may use.
        rank: Of this process among those that share the data. Default, read when iteration starts: `mesh`, else
            ``torch.distributed`` where it is imported and initialised, else the environment of torchrun, SLURM or Open
            MPI, else 0.
        world_size: How many share the data; by default as for `rank`.
        mesh: One dimension of a device mesh, ``device_mesh["dp"]``: model-parallel peers get identical batches.
        agree: ``fn(n) -> int``, the smallest `n` of all ranks (an all-reduce). Called on the iterating thread, as often by
            every rank, one batch ahead. Needed for several ranks without an index, which then end together: with
            ``drop_last=True`` when the first runs out, else when the last does, the others' batches masked.
        prefetch_batches: Complete or nearly complete batches that may wait for the training loop.
        index: ``"auto"`` reads by an index where there is one of all shards, beside them or in `index_dir`, and streams
            whole shards where there is none; ``"require"`` refuses to, ``"stream"`` does not look. A log line says which.
            A resumed run keeps the mode it began with.
        index_dir: Default ``$XDG_CACHE_HOME/penstock/index``.
        fetch: Bounds for reading; its ``budget_bytes_max`` bounds what is read ahead.

    Raises:
        ConfigError: a bound is broken, a package for a field is missing, or the pipeline has no ``.batch()``.

    Cost: nothing until iterated; then one listing, one reading thread and the decode threads. Holds the shuffle window,
        ``prefetch_batches`` + 1 batches, and read-ahead of at most a quarter of the byte budget.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        lanes: int | None = None,
        threads: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: Any = None,
        agree: Callable[[int], int] | None = None,
        prefetch_batches: int = 2,
        index: Literal["auto", "require", "stream"] = "auto",
        index_dir: str | os.PathLike[str] | None = None,
        fetch: FetchConfig | None = None,
    ) -> None:
        if not isinstance(pipeline, Pipeline):
            raise ConfigError(f"Loader({pipeline!r}) must be given a pipeline", hint="ps.shards(url).batch(32)")
        if pipeline.stage(Batch) is None and pipeline.stage(BatchBySize) is None:
            raise ConfigError(f"{pipeline!r} has no .batch()", hint="end it with .batch(n)")
        self._options = Options(
            lanes=lanes,
            threads=threads,
            rank=rank,
            world_size=world_size,
            mesh=mesh,
            agree=agree,
            prefetch_batches=prefetch_batches,
            index=index,
            index_dir=index_dir,
            fetch=fetch,
        )
        self._options.check()
        self.pipeline = pipeline
        self._steps = tuple(Steps(leaf) for leaf in pipeline.flat().leaves)
        self._meter = Meter()
        self._threads_count = threads_count(self._options)
        self._epoch = 0
        self._batches_count = 0  # handed out in this epoch
        self._mark: Any = None  # behind the last of them
        self._cursor: dict[str, Any] | None = None  # where a loaded state began in this epoch
        self._loaded: dict[str, Any] | None = None  # a state that iteration has yet to begin from
        self._accepts_changed_data = False
        self._turn = 0  # counts epochs and restarts: an iterator of an earlier turn is exhausted
        self._left_s: float | None = None  # when the training loop got its last batch
        self._held = _Held(Finder(pipeline, fetch=fetch, index_dir=index_dir))
        self._plan: Plan | None = None
        self._finalizer = weakref.finalize(self, self._held.close)

    @property
    def epoch(self) -> int:
        """The epoch being iterated, or the next one, from 0."""
        return self._epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The rest of the current epoch; all of it where the last one was finished.

        Raises:
            ClosedError: the loader is closed.
        """
        if self._is_closed():
            raise ClosedError("the loader is closed")
        self._left_s = None
        return _Batches(self, self._turn)

    def epochs(self, n: int) -> Iterator[int]:
        """The numbers of the epochs up to `n` in all: ``for epoch in loader.epochs(90): for batch in loader: ...``.

        Begins at the current epoch. One that was left by ``break`` comes again, and goes on where it stopped.

        Raises:
            ConfigError: `n` is negative; while iterating: the loop's body did not iterate the loader.
        """
        if n < 0:
            raise ConfigError(f"epochs({n}) must not be negative")
        return _epochs(self, n)

    def restart(self, epoch: int | None = None) -> None:
        """Begin an epoch again, also after an error ended it. Iterators made before are exhausted.

        Args:
            epoch: From 0; default the current one.

        Raises:
            ConfigError: it is negative.
        """
        if epoch is not None and epoch < 0:
            raise ConfigError(f"restart({epoch}) must not be negative")
        self._begin_at(self._epoch if epoch is None else epoch)

    # ── state ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def state_dict(self) -> dict[str, Any]:
        """Where the training loop is: behind the last batch handed out, whatever was read ahead.

        Returns:
            A dict that JSON can hold, of a few hundred bytes; without an index about 150 more for each lane. Without an
            index every rank has its own.
        """
        if self._loaded is not None:
            return dict(self._loaded)
        plan = self._plan
        cursor = plan.cursor(self._mark) if plan is not None and self._mark is not None else self._cursor
        return {
            "version": STATE_VERSION,
            "order_version": ORDER_VERSION,
            "mode": plan.job.mode if plan is not None else "",
            "epoch": self._epoch,
            "batches": self._batches_count,
            "job": dict(plan.facts) if plan is not None else {},
            "data": plan.digest if plan is not None else "",
            "cursor": cursor,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, accept_changed_data: bool = False) -> None:
        """Go on where `state` was saved. The job and the data are compared when iteration starts.

        Args:
            state: What ``state_dict()`` gave, there or after JSON.
            accept_changed_data: Where the data set is another one, begin the state's epoch again instead of refusing.

        Raises:
            ConfigError: `state` is none, or of another version; at the next iteration: of another job or data set.
        """
        loaded = checked(state)
        self._begin_at(loaded["epoch"])
        self._batches_count = loaded["batches"]
        self._loaded = loaded
        self._accepts_changed_data = accept_changed_data

    def statistics(self) -> LoaderStatistics:
        """What was done so far, and where the time went. Cost: none to speak of; call it at every step."""
        dropped: dict[str, int] = {}
        for steps in self._steps:
            for stage, count in steps.dropped.items():
                dropped[stage] = dropped.get(stage, 0) + count
        return self._meter.read(threads_count=self._threads_count, dropped=dropped)

    def close(self) -> None:
        """End the threads and the stores' use; idempotent. Batches handed out stay valid."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Batches of a whole epoch, where an index tells: steps per epoch. Looks at the data if nothing has yet.

        Raises:
            TypeError: there is no index, or a stage changes the number of samples.
        """
        plan = self._planned()
        batches = plan.job.batches(self._epoch, batching=plan.batching) if not plan.carries else None
        if batches is None:
            raise TypeError(
                "this loader does not know its number of batches: shards without an index tell how many samples they "
                "hold only when they are read. Hint: run `penstock index`, or count once with "
                "loader.statistics().batches after an epoch"
            )
        return len(batches)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self._options.given().items())
        return f"Loader({self.pipeline!r}{options})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self.pipeline, self._options)

    # ── one step ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _next(self, turn: int) -> Any:
        if turn != self._turn:
            return None
        if self._is_closed():
            raise ClosedError("the loader is closed")
        asked_s = time.perf_counter()
        epoch = self._held.epoch
        if epoch is None:
            epoch = self._held.epoch = self._started()
            if self._is_closed():  # closed by another thread meanwhile, which saw no epoch to close
                self._held.close_epoch()
        found = epoch.next()
        got_s = time.perf_counter()
        self._meter.stall_s += got_s - asked_s
        self._meter.elapsed_s += got_s - (asked_s if self._left_s is None else self._left_s)
        if found is None:
            self._begin_at(self._epoch + 1)
            return None
        self._batches_count += 1
        self._mark = found.mark
        self._left_s = got_s
        return found.batch

    def _begin_at(self, epoch: int) -> None:
        self._held.close_epoch()
        self._epoch = epoch
        self._turn += 1
        self._batches_count = 0
        self._mark = self._cursor = self._loaded = None
        self._left_s = None

    def _is_closed(self) -> bool:
        return not self._finalizer.alive

    def _started(self) -> Epoch:
        plan = self._planned()
        self._cursor = self._resumed(plan)
        shuffle = self.pipeline.stage(Shuffle)
        batch = self.pipeline.stage(Batch) or self.pipeline.stage(BatchBySize)
        assert batch is not None
        run_plan = RunPlan(
            steps=self._steps,
            batch=batch,
            batch_size=plan.rows_count,
            drop_last=plan.batching.drop_last,
            threads_count=self._threads_count,
            prefetch_batches=self._options.prefetch_batches,
            seed=shuffle.seed if shuffle else 0,
        )
        epoch = Epoch(
            plan,
            run_plan=run_plan,
            number=self._epoch,
            cursor=self._cursor,
            agree=self._options.agree,
            meter=self._meter,
        )
        self._loaded = None
        return epoch

    def _planned(self) -> Plan:
        if self._plan is None:
            self._plan = plan_of(
                self.pipeline,
                options=self._options,
                finder=self._held.finder,
                meter=self._meter,
                state=self._loaded,
            )
        return self._plan

    def _resumed(self, plan: Plan) -> dict[str, Any] | None:
        """Where in the epoch a loaded state says to begin."""
        state = self._loaded
        if state is None or not state["job"]:
            return None
        if self._accepts_changed_data and state["data"] != plan.digest:
            _log.warning("the data set changed since the state was saved: epoch %d begins again", self._epoch)
            self._batches_count = 0
            return None
        check_same_data(state, plan.digest)
        cursor: dict[str, Any] | None = state["cursor"]
        if cursor is not None:  # at an epoch's beginning another job may go on
            check_same_job(state, mode=plan.job.mode, job=plan.facts)
        return cursor


class _Held:
    """What must be released. Refers to no loader, so that a loader can be collected while threads run."""

    def __init__(self, finder: Finder) -> None:
        self.finder = finder
        self.epoch: Epoch | None = None

    def close_epoch(self) -> None:
        epoch, self.epoch = self.epoch, None
        if epoch is not None:
            epoch.close()

    def close(self) -> None:
        self.close_epoch()
        self.finder.close()


class _Batches:
    """Iterates over the rest of one epoch. Keeps the loader alive, not the other way round."""

    def __init__(self, loader: Loader, turn: int) -> None:
        self._loader = loader
        self._turn = turn

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        batch = self._loader._next(self._turn)
        if batch is None:
            raise StopIteration
        return batch


def _epochs(loader: Loader, n: int) -> Iterator[int]:
    seen = None
    while loader.epoch < n:
        now = (loader.epoch, loader.statistics().batches)
        if now == seen:
            raise ConfigError(
                f"epochs({n}): the loop's body did not take a batch of epoch {loader.epoch}",
                hint="for epoch in loader.epochs(n): for batch in loader: ...",
            )
        seen = now
        yield loader.epoch


def _rebuilt(pipeline: Pipeline, options: Options) -> Loader:
    return Loader(pipeline, **options.values())
