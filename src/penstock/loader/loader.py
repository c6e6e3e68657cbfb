"""``Loader``: runs a pipeline and yields its batches, epoch after epoch."""

from __future__ import annotations

import inspect
import weakref
from contextlib import ExitStack
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, Unpack

from penstock.config import SEED_MAX, check_names, check_whole
from penstock.errors import ConfigError
from penstock.loader.options import LoaderOptions
from penstock.loader.statistics import Bottleneck, bottleneck_of, prometheus, write_scalars
from penstock.pipeline import Batch, BatchBySize, Pipeline
from penstock.system.tracebacks import boundary

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.loader.metrics_server import MetricsServer
    from penstock.loader.options import LoaderArguments
    from penstock.loader.session import Session
    from penstock.loader.statistics import LoaderStatistics, ScalarWriter


@boundary
class Loader:
    """Streams the batches of a pipeline in an order that threads, processes and timing do not change.

    ``for batch in loader`` is one epoch; the next ``for`` is the next epoch. After ``break``, the next ``for`` continues
    where the loop stopped; ``restart()`` begins the epoch again. A batch is a dict: fields are ``dtype[B, ...]`` arrays (or
    lists of ``str``, ``bytes`` and other objects), ``"__key__"`` and ``"__shard__"`` are lists of ``str``,
    ``"__position__"`` is int64[B]. With several ranks a batch also has ``"__valid__"``, bool[B], unless ``drop_last=True``
    and nothing can leave out a sample (``filter``, ``max_errors=``, ``on_corrupt="skip_*"``, ``join(missing="drop")``):
    then every rank has the same number of batches, all with B rows. The arrays of a batch belong to the caller.

    A loader is a context manager. ``close()`` ends its threads, and so does garbage collection.

    Args:
        pipeline: A pipeline that ends with ``.batch(n)``.
        lanes: Number of lanes, the sequences of samples that the whole job reads in parallel; a multiple of the world size.
            Default: 64 if the pipeline shuffles, otherwise the world size, so that one rank sees the stored order.
        threads: Number of decode threads, in all worker processes together. Default: one for each core that this process may
            use.
        processes: Number of worker processes; 0 fetches, parses and decodes in threads of this process. The workers write to
            shared memory, which is mapped here without a copy. They help training loops with Python work of their own. The
            batches are the same.
        restart_workers: Replace a worker process that dies, up to three times in a row without a finished batch; no
            sample is lost or repeated. Without it, the death of a worker is an error.
        workers: Workers on a cluster, ``penstock.ray.Workers(count=8)``, which fetch, parse, decode and map there. The batches
            and the state are the same, also when machines of the cluster are lost. It excludes `processes`.
        stride: ``(j, n)`` decodes and yields only the rank's batches whose number mod n is j, counted from the beginning of
            the epoch: the batches of worker j of n of a DataLoader. It excludes `processes`, `workers` and `agree`.
        in_order: False yields whichever batch is complete first, each exactly once; the state remembers which ones, and
            threads finish an epoch that such a state has begun. It has no effect with worker processes, in the workers of a
            DataLoader, on several ranks without an index, or with stages that change the number of samples.
        rank: Rank of this process among those that share the data. The default is looked up when iteration starts: from
            `mesh`; otherwise from ``torch.distributed`` if it is imported and initialised; otherwise from the environment of
            torchrun, SLURM or Open MPI; otherwise it is 0.
        world_size: Number of ranks that share the data; the default comes from where `rank` comes from.
        mesh: One dimension of a device mesh, ``device_mesh["dp"]``: model-parallel peers get identical batches.
        agree: ``fn(n) -> int`` returns the smallest `n` of all ranks (an all-reduce of int64). Every rank calls it equally
            often, on the iterating thread: when an epoch opens, and without an index for each batch, one batch ahead. Without
            an index, several ranks need it. They then end together: with ``drop_last=True`` when the first rank has no more
            samples, otherwise when the last one has none, and the other ranks' batches are masked. If a rank fails, all ranks
            stop.
        share: ``fn(make) -> bytes`` calls ``make()`` on one rank and returns the result on all, so that a job lists its data
            once: ``penstock.torch.share``. It is called when iteration, or ``len()``, first looks at the data: all ranks
            have to do so.
        prefetch_batches: Number of complete or nearly complete batches that may wait for the training loop. Default: 2, and
            with threads up to 15 as long as they hold less than 4 MiB together.
        index: ``"auto"`` uses an index if there is one that knows all shards, beside them or in `index_dir`; otherwise it
            streams whole shards and writes an index for the next job. ``"require"`` refuses to stream, ``"stream"`` ignores
            indexes. A log line says which mode is used. A resumed run keeps the mode that it began with.
        index_dir: Directory that may hold an index, and where one is written. Default: ``$XDG_CACHE_HOME/penstock/index``.
        on_epoch: ``fn(epoch, statistics)`` is called when an epoch begins, and may return another pipeline: with shards
            added or dropped, or other weights. None keeps the current one. It must depend only on its arguments, and return
            the same on every rank: a resumed epoch calls it again with the statistics that the state remembers.
        fetch: Limits for reading; its ``budget_bytes_max`` bounds the bytes that are read ahead.
        cache: Keeps data on this node's disk once it is read, as in ``penstock.connect``: ``"/nvme/penstock:200GB"``.
        progress: Whether to draw a live line on standard error: epoch, batch, rates, stall, bottleneck.

    Raises:
        ConfigError: An argument is out of bounds, a package for a field is missing, or the pipeline has no ``.batch()``. When
            the loader is iterated: its window and batches do not fit its byte budget.

    Cost: nothing until it is iterated. Then one listing, one reading thread and the decode threads. It holds the shuffle
        window, ``prefetch_batches`` + 1 batches (small ones up to 4 MiB), and read-ahead: the smaller of a quarter of the
        byte budget and 256 MiB, but at least a part or two for each lane.
    """

    __signature__ = inspect.Signature(
        [
            inspect.Parameter("pipeline", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="Pipeline"),
            *inspect.signature(LoaderOptions).parameters.values(),
        ]
    )

    def __init__(self, pipeline: Pipeline, **options: Unpack[LoaderArguments]) -> None:
        check_names("Loader", options, LoaderOptions.__dataclass_fields__)
        if not isinstance(pipeline, Pipeline):
            raise ConfigError(f"Loader({pipeline!r}) must be given a pipeline", hint="ps.shards(url).batch(32)")
        if pipeline.stage(Batch) is None and pipeline.stage(BatchBySize) is None:
            raise ConfigError(f"{pipeline!r} has no .batch()", hint="end it with .batch(n)")
        checked = LoaderOptions(**options)
        # Imported here, so that importing `Loader` imports neither NumPy nor the engine: pipelines can do without them.
        from penstock.loader.session import Session

        self._session = Session(pipeline, checked)
        self._held = ExitStack()
        self._held.callback(self._session.close)
        self._finalizer = weakref.finalize(self, self._held.close)

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline that is read: the given one, or the one that ``on_epoch`` returned."""
        return self._session.pipeline

    @property
    def epoch(self) -> int:
        """Number of the epoch that is iterated, or of the next one, from 0."""
        return self._session.epoch

    @cached_property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes, in the order of their numbers, if ``pack(labels=)`` made the shards of words; otherwise None.

        Cost: one request for each source, at the first use.
        """
        from penstock.sources.shards import read_classes

        return read_classes(self.pipeline)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The rest of the current epoch; all of the next one if the last one was finished.

        Raises:
            ClosedError: The loader is closed.
        """
        return _Batches(self, self._session)

    def epochs(self, n: int) -> Iterator[int]:
        """Iterate over the epoch numbers from the current one to `n` - 1.

        Use it as ``for epoch in loader.epochs(90): for batch in loader: ...``. An epoch that was left by ``break`` is repeated,
        and continues where it stopped.

        Args:
            n: Number of epochs, at least 0.

        Raises:
            ConfigError: `n` is negative. While iterating: the body of the loop did not iterate over the loader.
        """
        check_whole("epochs", n, 0)
        return _epochs(self, n)

    def restart(self, epoch: int | None = None) -> None:
        """Begin an epoch again, also after an error ended it. Earlier iterators are then exhausted.

        Args:
            epoch: Epoch number, from 0; None is the current epoch.

        Raises:
            ConfigError: `epoch` is negative.
        """
        if epoch is not None:
            check_whole("epoch", epoch, 0, SEED_MAX)
        self._session.begin_at(self._session.epoch if epoch is None else epoch)

    # ── state ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def state_dict(self) -> dict[str, Any]:
        """The position of the training loop: after the last batch that it received, regardless of read-ahead.

        Returns:
            A dict that can be stored as JSON, in a few hundred bytes. Without an index it has about 150 more for each lane, and
            every rank has a state of its own.
        """
        return self._session.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, accept_changed_data: bool = False) -> None:
        """Continue where `state` was saved. The job and the data are compared when iteration starts.

        Args:
            state: The result of ``state_dict()``, which may have been stored as JSON.
            accept_changed_data: Whether to start the state's epoch again if the data set changed, rather than refuse the state.

        Raises:
            ConfigError: `state` is not a state, or has another version. At the next iteration: it belongs to another job or
                data set.
        """
        self._session.load_state_dict(state, accept_changed_data=accept_changed_data)

    def set_weights(self, weights: Sequence[float] | Mapping[Pipeline, float], *, from_batch: int) -> None:
        """Mix in other proportions from a batch of this epoch on. No sample is lost or repeated.

        All ranks must call it with the same arguments. Batches from `from_batch` on that were read ahead are read again. The
        weights also hold in later epochs, until `on_epoch` returns another pipeline, and states remember them. If stages change
        the number of samples, it is not known in advance which samples fill a batch. The weights then hold from where
        `from_batch` would begin without these stages, but not before the 64 samples that each rank may have passed to them.

        Args:
            weights: Weights of the parts of the pipeline's ``mix``, by pipeline or in its order.
            from_batch: Number of a batch that was not handed out yet, counted from the beginning of the epoch.

        Raises:
            ConfigError: The pipeline has no mix, the weights do not fit the mix, or the batch was already handed out.
        """
        self._session.set_weights(weights, from_batch=from_batch)

    # ── statistics ─────────────────────────────────────────────────────────────────────────────────────────────────

    def statistics(self) -> LoaderStatistics:
        """Statistics so far, and where the time went. Cost: some microseconds, so it can be called at every step."""
        return self._session.statistics()

    def bottleneck(self) -> Bottleneck:
        """The part that sets the pace, the seconds that prove it, and what to change. Print it."""
        return bottleneck_of(self.statistics())

    def metrics(self, **labels: str) -> str:
        """The statistics in Prometheus' text format, to be served or written to a file.

        Args:
            **labels: Labels of every number, e.g. ``rank="3"``.
        """
        return prometheus(self.statistics(), epoch=self.epoch, labels=labels)

    def serve_metrics(self, port: int = 0, *, host: str = "127.0.0.1", **labels: str) -> MetricsServer:
        """Serve ``metrics()`` over HTTP until the loader is closed, for Prometheus to scrape.

        Args:
            port: Port to listen on; 0 takes a free one, which the result's ``url`` has. Each rank of a host needs its own.
            host: Address to listen on. Whoever reaches it can read the numbers; they hold no URL and no secret.
            **labels: Labels of every number, e.g. ``rank="3"``.

        Raises:
            ConfigError: The port is taken, or the address is not one of this machine.
            ClosedError: The loader is closed.

        Cost: one thread, and some microseconds for each scrape.
        """
        from penstock.loader.metrics_server import MetricsServer

        session = self._session
        session.check_open()

        def read() -> str:
            return prometheus(session.statistics(), epoch=session.epoch, labels=labels)

        server = MetricsServer(read, host=host, port=port)
        self._held.callback(server.close)
        return server

    def write_scalars(self, writer: ScalarWriter, step: int, *, prefix: str = "loader/") -> None:
        """Write rates and stalls for TensorBoard, Weights & Biases or MLflow.

        Args:
            writer: TensorBoard's ``SummaryWriter``, or anything with ``add_scalar(tag, value, step)``.
            step: Number of the training step.
            prefix: Text before each tag.
        """
        write_scalars(self.statistics(), writer, step=step, prefix=prefix)

    def close(self) -> None:
        """End the threads and close the stores; idempotent. Batches that were handed out stay valid."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Number of batches in a whole epoch, if there is an index. The first call may list the data.

        Raises:
            TypeError: No index knows all shards, or a stage changes the number of samples.
        """
        batches = self._session.planned().batches(self.epoch)
        if batches is None:
            why, index = (
                "without an index, the number of samples in a shard is known only after reading it",
                "run `penstock index`, or ",
            )
            if self._session.planned().is_rebatched:
                why, index = "a stage changes the number of samples", ""
            raise TypeError(
                f"this loader does not know its number of batches: {why}. Hint: {index}count once with "
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


@boundary
class _Batches:
    """Iterates over the rest of one epoch. It keeps the loader alive; the session does not."""

    def __init__(self, loader: Loader, session: Session) -> None:
        self._loader = loader
        self._session = session
        self._generation = session.begin_iteration()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        batch = self._session.next(self._generation)
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


def _rebuilt(pipeline: Pipeline, options: LoaderOptions) -> Loader:
    return Loader(pipeline, **options.given())
