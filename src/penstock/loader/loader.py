"""``Loader``: runs a pipeline and hands out its batches, epoch after epoch."""

from __future__ import annotations

import os
import time
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self

from penstock.config import default_budget_bytes
from penstock.errors import ClosedError, ConfigError
from penstock.loader.lanes import read_ahead
from penstock.loader.run import EpochRun, RunPlan
from penstock.loader.samples import Steps
from penstock.loader.shards import ShardFinder
from penstock.loader.statistics import LoaderStatistics, Meter
from penstock.order import StreamOrder
from penstock.pipeline import Batch, Pipeline, Shuffle

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.config import FetchConfig

PREFETCH_BATCHES_MAX = 1024
THREADS_MAX = 256


class Loader:
    """Streams a pipeline's batches, in an order that the seed, the epoch and the shards fix, whatever runs it.

    ``for batch in loader`` is one epoch; the next ``for`` is the next epoch. After ``break`` it goes on where it
    stopped; ``restart()`` begins the epoch again. A batch is a dict: fields as ``dtype[B, ...]`` arrays (or lists of
    ``str``, ``bytes`` and other objects), ``"__key__"`` and ``"__shard__"`` as lists of ``str``, ``"__position__"`` as
    int64[B]. Its arrays belong to the caller.

    A loader is a context manager; ``close()``, and its garbage collection, end its threads.

    Args:
        pipeline: Ends with ``.batch(n)``.
        lanes: Shards read side by side, of the whole job; a multiple of the world size. Default 64 where the pipeline
            shuffles, else the world size, so that one rank sees the stored order.
        threads: Decode threads; default one per core that this process may use.
        rank: Of this process among those that share the data; default ``RANK`` from the environment, else 0.
        world_size: Default ``WORLD_SIZE`` from the environment, else 1. Read, like the rank, when iteration starts.
        prefetch_batches: Complete or nearly complete batches that may wait for the training loop.
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
        prefetch_batches: int = 2,
        fetch: FetchConfig | None = None,
    ) -> None:
        if not isinstance(pipeline, Pipeline):
            raise ConfigError(f"Loader({pipeline!r}) must be given a pipeline", hint="ps.shards(url).batch(32)")
        batch = pipeline.stage(Batch)
        if batch is None:
            raise ConfigError(f"{pipeline!r} has no .batch()", hint="end it with .batch(n)")
        if threads is not None and not 1 <= threads <= THREADS_MAX:
            raise ConfigError(f"threads={threads!r} must lie in [1, {THREADS_MAX}]")
        if not 1 <= prefetch_batches <= PREFETCH_BATCHES_MAX:
            raise ConfigError(f"prefetch_batches={prefetch_batches!r} must lie in [1, {PREFETCH_BATCHES_MAX}]")
        if (rank is None) != (world_size is None):
            raise ConfigError(f"rank={rank!r} and world_size={world_size!r}: give both, or none")
        self.pipeline = pipeline
        self._options = _Options(lanes, threads, rank, world_size, prefetch_batches, fetch)
        self._batch = batch
        self._steps = Steps(pipeline)
        self._meter = Meter()
        self._threads_count = threads or len(os.sched_getaffinity(0))
        self._epoch = 0
        self._epoch_batches = 0
        self._turn = 0  # counts epochs and restarts: an iterator of an earlier turn is exhausted
        self._left_s: float | None = None  # when the training loop got its last batch
        self._held = _Held(ShardFinder(pipeline.source, fetch=fetch))
        self._plan: tuple[RunPlan, StreamOrder] | None = None
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

    def restart(self) -> None:
        """Begin the current epoch again, also after an error ended it. Iterators made before are exhausted."""
        self._held.close_run()
        self._turn += 1
        self._epoch_batches = 0

    def statistics(self) -> LoaderStatistics:
        """What was done so far, and where the time went. Cost: none to speak of; call it at every step."""
        return self._meter.read(threads_count=self._threads_count)

    def close(self) -> None:
        """End the threads and the stores' use; idempotent. Batches handed out stay valid."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> NoReturn:
        raise TypeError(
            "this loader does not know its number of batches: shards without an index tell how many samples they hold "
            "only when they are read. Hint: iterate, or count once with loader.statistics().batches after an epoch"
        )

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self._options._asdict().items() if value is not None)
        return f"Loader({self.pipeline!r}{options})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self.pipeline, self._options)

    # ── one step ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _next(self, turn: int) -> dict[str, Any] | None:
        if turn != self._turn:
            return None
        if self._is_closed():
            raise ClosedError("the loader is closed")
        asked_s = time.perf_counter()
        run = self._held.run
        if run is None:
            run = self._held.run = self._started()
            if self._is_closed():  # closed by another thread meanwhile, which saw no run to close
                self._held.close_run()
        batch = run.next_batch()
        got_s = time.perf_counter()
        self._meter.stall_s += got_s - asked_s
        self._meter.elapsed_s += got_s - (asked_s if self._left_s is None else self._left_s)
        if batch is None:
            self._held.close_run()
            self._epoch += 1
            self._turn += 1
            self._epoch_batches = 0
            self._left_s = None
        else:
            self._epoch_batches += 1
            self._left_s = got_s
        return batch

    def _is_closed(self) -> bool:
        return not self._finalizer.alive

    def _started(self) -> EpochRun:
        if self._plan is None:
            self._plan = self._planned()
        plan, order = self._plan
        return EpochRun(plan, order=order.at_epoch(self._epoch), meter=self._meter)

    def _planned(self) -> tuple[RunPlan, StreamOrder]:
        rank, world_size = self._rank_and_world_size()
        options, fetch = self._options, self._options.fetch
        shuffle = self.pipeline.stage(Shuffle)
        shards = self._held.finder.find()
        order = StreamOrder(
            shards_count=len(shards),
            seed=shuffle.seed if shuffle else 0,
            lanes=options.lanes,
            window=shuffle.window if shuffle else 1,
            rank=rank,
            world_size=world_size,
            shuffled=shuffle is not None,
        )
        budget_bytes = (fetch.budget_bytes_max if fetch else None) or default_budget_bytes()
        plan = RunPlan(
            shards=shards,
            steps=self._steps,
            batch_size=self._batch.size,
            drop_last=self._batch.drop_last,
            threads_count=self._threads_count,
            prefetch_batches=options.prefetch_batches,
            sizes=read_ahead(len(order.lanes_owned), fetch),
            pinned_bytes_max=budget_bytes // 8,
        )
        return plan, order

    def _rank_and_world_size(self) -> tuple[int, int]:
        rank, world_size = self._options.rank, self._options.world_size
        if rank is None or world_size is None:
            rank, world_size = _from_environment("RANK", 0), _from_environment("WORLD_SIZE", 1)
        if world_size < 1 or not 0 <= rank < world_size:
            raise ConfigError(f"rank={rank} must lie in [0, world_size={world_size})")
        if world_size > 1:
            raise ConfigError(
                f"world_size={world_size}: shards without an index may give ranks different numbers of batches",
                hint="read with one rank: Loader(rank=0, world_size=1)",
            )
        return rank, world_size


class _Options(NamedTuple):
    """The keyword arguments, as given: what a pickled loader is made of."""

    lanes: int | None
    threads: int | None
    rank: int | None
    world_size: int | None
    prefetch_batches: int
    fetch: FetchConfig | None


class _Held:
    """What must be released. Refers to no loader, so that a loader can be collected while threads run."""

    def __init__(self, finder: ShardFinder) -> None:
        self.finder = finder
        self.run: EpochRun | None = None

    def close_run(self) -> None:
        run, self.run = self.run, None
        if run is not None:
            run.close()

    def close(self) -> None:
        self.close_run()
        self.finder.close()


class _Batches:
    """Iterates over the rest of one epoch. Keeps the loader alive, not the other way round."""

    def __init__(self, loader: Loader, turn: int) -> None:
        self._loader = loader
        self._turn = turn

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, Any]:
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


def _rebuilt(pipeline: Pipeline, options: _Options) -> Loader:
    return Loader(pipeline, **options._asdict())


def _from_environment(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"the environment has {name}={text!r}, not a whole number") from None
