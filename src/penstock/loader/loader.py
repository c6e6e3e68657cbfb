"""``Loader``: runs a pipeline and hands out its batches, epoch after epoch."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Literal, Self

from penstock.config import SEED_MAX, check_whole
from penstock.errors import ConfigError
from penstock.loader.options import Options
from penstock.loader.reporting import Bottleneck, bottleneck_of, prometheus, write_scalars
from penstock.pipeline import Batch, BatchBySize, Pipeline
from penstock.tracebacks import boundary

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.cache import CacheConfig
    from penstock.config import FetchConfig
    from penstock.loader.plan.loader_plan import LoaderPlan
    from penstock.loader.reporting import ScalarWriter
    from penstock.loader.statistics import LoaderStatistics


@boundary
class Loader:
    """Streams a pipeline's batches, in an order that the seed, the epoch and the shards fix, whatever runs it.

    ``for batch in loader`` is one epoch; the next ``for`` is the next epoch. After ``break`` it goes on where it
    stopped; ``restart()`` begins the epoch again. A batch is a dict: fields as ``dtype[B, ...]`` arrays (or lists of
    ``str``, ``bytes`` and other objects), ``"__key__"`` and ``"__shard__"`` as lists of ``str``, ``"__position__"`` as
    int64[B]. With several ranks it also has ``"__valid__"``, bool[B], unless ``drop_last=True`` and nothing can leave out a
    sample (``filter``, ``max_errors=``, ``on_corrupt="skip_*"``, ``join(missing="drop")``): every rank then has as many
    batches, all with B rows. Its arrays belong to the caller.

    A loader is a context manager; ``close()``, and its garbage collection, end its threads.

    Args:
        pipeline: Ends with ``.batch(n)``.
        lanes: Shards read side by side, of the whole job; a multiple of the world size. Default 64 where the pipeline
            shuffles, else the world size, so that one rank sees the stored order.
        threads: Decode threads; default one per core that this process may use; all worker processes together.
        processes: Worker processes that fetch, parse and decode into shared memory, which is mapped here without a copy:
            for training loops with Python work of their own. 0: threads of this process. The batches
            are the same.
        restart_workers: Replace a worker process that dies, without a sample lost or repeated, three times each and
            epoch; else its death is an error.
        stride: ``(j, n)``: only the rank's batches k with k mod n = j, counted from the epoch's beginning, are decoded and
            given: worker j of n of a DataLoader. Not with `processes` or `agree`.
        in_order: False hands out whichever batch is complete first, each exactly once; the state remembers which were.
            It has no effect on worker processes, on ranks that agree, and where stages change how many samples there are.
        rank: Of this process among those that share the data. Default, read when iteration starts: `mesh`, else
            ``torch.distributed`` where it is imported and initialised, else the environment of torchrun, SLURM or Open
            MPI, else 0.
        world_size: How many share the data; by default as for `rank`.
        mesh: One dimension of a device mesh, ``device_mesh["dp"]``: model-parallel peers get identical batches.
        agree: ``fn(n) -> int``, the smallest `n` of all ranks (an all-reduce of int64). Called on the iterating thread, as
            often by every rank: when an epoch opens, and without an index one batch ahead. Needed for several ranks without an
            index, which then end together: with ``drop_last=True`` when the first runs out, else when the last does, the
            others' batches masked. A rank that fails there tells the others.
        share: ``fn(make) -> bytes``: calls ``make()`` on one rank and gives all ranks what that gave, so that the data set is
            listed once per job: ``penstock.torch.share``. Called when the first rank's iteration, or ``len()``, looks at the
            data: all ranks have to do so.
        prefetch_batches: Complete or nearly complete batches that may wait for the training loop. Default 2, and in threads
            up to 16 as long as they have less than 4 MiB in all.
        index: ``"auto"`` reads by an index where there is one of all shards, beside them or in `index_dir`, and streams
            whole shards where there is none; ``"require"`` refuses to, ``"stream"`` does not look. A log line says which.
            A resumed run keeps the mode it began with. With ``"auto"`` a streamed epoch leaves an index for the next job.
        index_dir: Where an index may lie besides the data set, and is left. Default ``$XDG_CACHE_HOME/penstock/index``.
        on_epoch: ``fn(epoch, statistics)``, asked when an epoch begins, may give another pipeline: shards added or dropped,
            other weights; None goes on with what is. It must decide from its arguments, alike on every rank: a resumed
            epoch asks it again with the statistics that the state remembers.
        fetch: Bounds for reading; its ``budget_bytes_max`` bounds what is read ahead.

        cache: Keep what is read on this node's disk, as for ``penstock.connect``: ``"/nvme/penstock:200GB"``.
        progress: Draw a live line on standard error: epoch, batch, rates, stall, bottleneck.

    Raises:
        ConfigError: a bound is broken, a package for a field is missing, or the pipeline has no ``.batch()``; when
            iterated: what it would hold does not fit its byte budget.

    Cost: nothing until iterated; then one listing, one reading thread and the decode threads. Holds the shuffle window,
        ``prefetch_batches`` + 1 batches (small ones up to 4 MiB), and read-ahead of at most a quarter of the byte budget.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        lanes: int | None = None,
        threads: int | None = None,
        processes: int = 0,
        restart_workers: bool = False,
        stride: tuple[int, int] = (0, 1),
        in_order: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: Any = None,
        agree: Callable[[int], int] | None = None,
        share: Callable[[Callable[[], bytes]], bytes] | None = None,
        prefetch_batches: int | None = None,
        index: Literal["auto", "require", "stream"] = "auto",
        index_dir: str | os.PathLike[str] | None = None,
        on_epoch: Callable[[int, LoaderStatistics], Pipeline | None] | None = None,
        fetch: FetchConfig | None = None,
        cache: CacheConfig | str | os.PathLike[str] | None = None,
        progress: bool = False,
    ) -> None:
        if not isinstance(pipeline, Pipeline):
            raise ConfigError(f"Loader({pipeline!r}) must be given a pipeline", hint="ps.shards(url).batch(32)")
        if pipeline.stage(Batch) is None and pipeline.stage(BatchBySize) is None:
            raise ConfigError(f"{pipeline!r} has no .batch()", hint="end it with .batch(n)")
        options = Options(
            lanes=lanes,
            threads=threads,
            processes=processes,
            restart_workers=restart_workers,
            stride=stride,
            in_order=in_order,
            rank=rank,
            world_size=world_size,
            mesh=mesh,
            agree=agree,
            share=share,
            prefetch_batches=prefetch_batches,
            index=index,
            index_dir=index_dir,
            on_epoch=on_epoch,
            fetch=fetch,
            cache=cache,
            progress=progress,
        )
        options.check()
        # Here, so that importing `Loader` imports neither NumPy nor the engine: a pipeline can be described without them.
        from penstock.loader.session import Session

        self._session = Session(pipeline, options)
        self._finalizer = weakref.finalize(self, self._session.close)

    @property
    def pipeline(self) -> Pipeline:
        """What is read: as given, or as ``on_epoch`` gave it."""
        return self._session.pipeline

    @property
    def epoch(self) -> int:
        """The epoch being iterated, or the next one, from 0."""
        return self._session.epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The rest of the current epoch; all of it where the last one was finished.

        Raises:
            ClosedError: the loader is closed.
        """
        self._session.check_open()
        self._session.left_s = None
        return _Batches(self, self._session.generation)

    def epochs(self, n: int) -> Iterator[int]:
        """The numbers of the epochs up to `n` in all: ``for epoch in loader.epochs(90): for batch in loader: ...``.

        Begins at the current epoch. One that was left by ``break`` comes again, and goes on where it stopped.

        Raises:
            ConfigError: `n` is negative; while iterating: the loop's body did not iterate the loader.
        """
        check_whole("epochs", n, 0)
        return _epochs(self, n)

    def restart(self, epoch: int | None = None) -> None:
        """Begin an epoch again, also after an error ended it. Iterators made before are exhausted.

        Args:
            epoch: From 0; default the current one.

        Raises:
            ConfigError: it is negative.
        """
        if epoch is not None:
            check_whole("epoch", epoch, 0, SEED_MAX)
        self._session.begin_at(self._session.epoch if epoch is None else epoch)

    # ── state ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def state_dict(self) -> dict[str, Any]:
        """Where the training loop is: behind the last batch handed out, whatever was read ahead.

        Returns:
            A dict that JSON can hold, of a few hundred bytes; without an index about 150 more for each lane. Without an
            index every rank has its own.
        """
        return self._session.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, accept_changed_data: bool = False) -> None:
        """Go on where `state` was saved. The job and the data are compared when iteration starts.

        Args:
            state: What ``state_dict()`` gave, there or after JSON.
            accept_changed_data: Where the data set is another one, begin the state's epoch again instead of refusing.

        Raises:
            ConfigError: `state` is none, or of another version; at the next iteration: of another job or data set.
        """
        self._session.load_state_dict(state, accept_changed_data=accept_changed_data)

    def set_weights(self, weights: Sequence[float] | Mapping[Pipeline, float], *, from_batch: int) -> None:
        """Mix in other proportions from a batch of this epoch on; no sample is lost or repeated by it.

        Call it alike on all ranks. What was read ahead from that batch on is read again; the state remembers.

        Args:
            weights: Of the parts of the pipeline's ``mix``, by pipeline or in its order.
            from_batch: Not handed out yet, counted from the epoch's beginning.

        Raises:
            ConfigError: no mix, weights that do not fit it, or the batch was handed out.
        """
        self._session.set_weights(weights, from_batch=from_batch)

    def statistics(self) -> LoaderStatistics:
        """What was done so far, and where the time went. Cost: none to speak of; call it at every step."""
        return self._session.statistics()

    def bottleneck(self) -> Bottleneck:
        """Who sets the pace, the seconds that prove it, and what to change; print it."""
        return bottleneck_of(self.statistics())

    def metrics(self, **labels: str) -> str:
        """The statistics in Prometheus' text format, to be served or written to a file.

        Args:
            **labels: Of every number, e.g. ``rank="3"``.
        """
        return prometheus(self.statistics(), epoch=self.epoch, labels=labels)

    def write_scalars(self, writer: ScalarWriter, step: int, *, prefix: str = "loader/") -> None:
        """Rates and stalls for TensorBoard.

        Args:
            writer: A ``SummaryWriter``, or anything with ``add_scalar(tag, value, step)``.
            step: Of training.
            prefix: Of the tags.
        """
        write_scalars(self.statistics(), writer, step=step, prefix=prefix)

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
        batches = plan.batches(self.epoch)
        if batches is None:
            raise TypeError(
                "this loader does not know its number of batches: shards without an index tell how many samples they "
                "hold only when they are read. Hint: run `penstock index`, or count once with "
                "loader.statistics().batches after an epoch"
            )
        which, every = self._session.options.stride
        return len(range(which, len(batches), every))

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self._session.options.given().items())
        return f"Loader({self.pipeline!r}{options})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self._session.pipeline, self._session.options)

    # ── one step ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _next(self, generation: int) -> Any:
        return self._session.next(generation)

    def _planned(self) -> LoaderPlan:
        return self._session.planned()


@boundary
class _Batches:
    """Iterates over the rest of one epoch. Keeps the loader alive, not the other way round."""

    def __init__(self, loader: Loader, generation: int) -> None:
        self._loader = loader
        self._generation = generation

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        batch = self._loader._next(self._generation)
        if batch is None:
            raise StopIteration
        return batch


@boundary
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
