"""``IterableDataset`` and ``MapDataset``: a pipeline for ``torch.utils.data.DataLoader``."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

import torch.utils.data

from penstock.access.dataset import PipelineDataset, transform_of
from penstock.config import SEED_MAX, FetchConfig, check_whole, default_budget_bytes, share_machine
from penstock.errors import ClosedError, ConfigError
from penstock.loader import Loader
from penstock.loader.plan.ranks import rank_and_world_size
from penstock.loader.plan.source_finder import SourceFinder
from penstock.pipeline import Sequential
from penstock.samples.transform import may_drop
from penstock.store.reachability import ReachedEndpoints
from penstock.system import forks
from penstock.system.tracebacks import boundary
from penstock.torch.batches import as_tensors
from penstock.torch.epochs import EpochTable, Once, Worker, worker_here
from penstock.torch.lightning import calling_loop, is_lost_on_resuming

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.access.dataset import Index
    from penstock.cache import CacheConfig
    from penstock.loader import LoaderStatistics
    from penstock.loader.options import LoaderArguments
    from penstock.pipeline import Pipeline

STATE_VERSION = 1


@boundary
class IterableDataset(torch.utils.data.IterableDataset[dict[str, Any]]):
    """Iterates complete batches of tensors, directly or in ``DataLoader(dataset, batch_size=None)``.

    Each iteration is one whole epoch in the ``Loader``'s order; the next iteration is the next epoch, even after ``break``. The
    dataset decodes in its own threads and needs no workers; prefer ``processes=`` to workers. With ``num_workers=n``, worker j
    yields this rank's batches k with k mod n = j, so the DataLoader's order is the ``Loader``'s. If there is an index and the
    gaps between its samples are large enough, a worker reads only the ranges of its own samples. Otherwise it reads all samples
    of the rank and decodes its own, or all if samples may be dropped; ``explain()`` tells how often bytes are read. All start
    methods and persistent workers are supported.

    torchdata's ``StatefulDataLoader`` saves and restores the position, with the same number of workers. Without workers,
    ``state_dict()`` of the dataset does so; it raises if workers iterate.

    Args:
        pipeline: A pipeline that ends with ``.batch(n)``.
        **options: The same options as for ``Loader``. Rank and world size are determined when an iteration begins. In workers,
            the defaults of ``threads`` and of the byte budget are divided by the number of workers.

    Raises:
        ConfigError: An option is invalid, as for ``Loader``; or, when iterated, a DataLoader with a `batch_size` would make
            batches of batches.

    Cost: that of a ``Loader`` in each worker.
    """

    def __init__(self, pipeline: Pipeline, **options: Unpack[LoaderArguments]) -> None:
        self.pipeline = pipeline
        self._options = options
        self._epochs = EpochTable()
        self._listing = Once()
        self._mode = Once()
        self._loader: Loader | None = None
        self._current: _Iteration | None = None
        self._pending: dict[str, Any] | None = None
        self._process_id = os.getpid()
        self._is_strided = False
        Loader(pipeline, **options).close()  # refuses invalid arguments here instead of at the first batch

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self._options.items())
        return f"{type(self).__name__}({self.pipeline!r}{options})"

    def __iter__(self) -> Iterator[dict[str, Any]]:
        _check_collation(sys._getframe(2).f_locals.get("self"))  # frame 1 belongs to the boundary
        self._leave_parent()
        worker = worker_here()
        state, self._pending = self._pending, None
        last = self._current
        if state is not None:
            epoch = state["epoch"]
        elif worker is None and last is not None and not (last.batches_count or last.finished or last.resumed):
            epoch = last.epoch  # no batch of it was taken
        else:
            epoch = self._epochs.take(worker)
        self._current = _Iteration(
            epoch, worker, state, open_loader=self._opened, is_current=lambda iteration: self._current is iteration
        )
        return self._current

    def __len__(self) -> int:
        """Return the number of batches per epoch of this rank.

        Raises:
            TypeError: The loader does not know it.
            ConfigError: Lightning asks, and is about to resume without the position of the ``DataLoader``.
        """
        count = None
        try:
            count = len(self._opened(worker_here(), None)[0])
        finally:
            if is_lost_on_resuming(calling_loop(sys._getframe(1)), self, is_sized=count is not None):
                raise ConfigError(
                    "Lightning does not restore the position of this DataLoader here, and would resume with other samples",
                    hint="train on ps.torch.Tensors(ps.Loader(pipeline))",
                )
        return count

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration.

        Raises:
            ConfigError: The epoch is negative or too large; or one of Accelerate's dataloaders calls, which would divide the
                rank's own batches among the ranks, or discard the state that was loaded.
        """
        check_whole("epoch", epoch, 0, SEED_MAX)
        _check_accelerate(sys._getframe(2).f_locals.get("self"), has_state=self._pending is not None)  # as in __iter__
        self._leave_parent()
        self._current = self._pending = None
        self._epochs.set_next(epoch, worker=worker_here())

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the current iteration: its epoch and the number of batches, as a small dict of plain values.

        Raises:
            ConfigError: Workers of a DataLoader iterate, so this process does not know the position.
        """
        if worker_here() is None and self._epochs.is_in_workers():
            raise ConfigError(
                "state_dict() of a dataset that DataLoader workers iterate: only they know how many batches they returned",
                hint="torchdata's StatefulDataLoader(dataset, batch_size=None, num_workers=n).state_dict(), or num_workers=0",
            )
        if self._current is None:
            self.__iter__()
        assert self._current is not None
        return self._current.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last batch of `state` in the next iteration, or with the next epoch if `state` is at its end.

        Raises:
            ConfigError: The state has another version or number of workers; or, when iterated, it belongs to other data.
        """
        self._leave_parent()
        worker = worker_here()
        if state.get("version") != STATE_VERSION:
            raise ConfigError(f"state of version {state.get('version')!r}, not {STATE_VERSION}: is it a dataset's?")
        ours = (0, 1) if worker is None else (worker.number, worker.workers_count)
        if (state["worker"], state["workers"]) != ours:
            raise ConfigError(
                f"state of worker {state['worker']} of {state['workers']}, loaded in {ours[0]} of {ours[1]}",
                hint="resume with the same num_workers, or use ps.Loader, whose state has no workers",
            )
        self._epochs.set_next(state["epoch"] + 1, worker=worker)
        self._current = None
        self._pending = None if state["finished"] and worker is None else dict(state)

    def statistics(self) -> LoaderStatistics:
        """Return the statistics of the loader in this process."""
        return (self._loader or self._made(None)).statistics()

    def close(self) -> None:
        """End the loader's threads; idempotent. The next iteration begins with epoch 0."""
        self._current = self._pending = None
        self._epochs.set_next(0)
        loader, self._loader = self._loader, None
        if loader is not None:
            loader.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return the configuration. For a worker, which is in no process group, it includes this process's rank."""
        options = self._options.copy()
        if get_spawning_popen() is not None:
            mesh = options.pop("mesh", None)
            found = rank_and_world_size(options.get("rank"), options.get("world_size"), mesh=mesh)
            options["rank"], options["world_size"] = found
        own = {"_options": options, "_loader": None, "_current": None, "_pending": None}
        return {**self.__dict__, **own, "_reached": ReachedEndpoints()}

    def _leave_parent(self) -> None:
        """Forget the parent's state, if this is a forked child."""
        if self._process_id != os.getpid():
            self._process_id = os.getpid()
            self._loader = self._current = self._pending = None

    def _shared(self, make: Callable[[], bytes]) -> bytes:
        """Return the listing that the first worker makes. Those of later epochs know from it that the store was reached."""
        data: bytes = pickle.loads(self._listing.get(lambda: pickle.dumps((make(), ReachedEndpoints()))))[0]
        return data

    def _index_of(self, options: LoaderArguments, state: dict[str, Any] | None) -> Literal["require", "stream"]:
        """Return how all workers read in all epochs: the mode of the state, or the one that the first worker finds."""
        asked = options.get("index", "auto")

        def found() -> bytes:
            if asked != "auto":
                return asked.encode()
            if state is not None and state["mode"]:
                return b"require" if state["mode"] == "index" else b"stream"
            where: Any = {name: options.get(name) for name in ("fetch", "index_dir", "cache", "share")}
            finder = SourceFinder(self.pipeline, **where)
            try:
                return b"require" if finder.find(index="auto").is_indexed else b"stream"
            finally:
                finder.close()

        return "require" if self._mode.get(found) == b"require" else "stream"

    def _opened(self, worker: Worker | None, state: dict[str, Any] | None) -> tuple[Loader, bool]:
        """Return the loader of this process, created if necessary, and whether it reads only this worker's batches."""
        if self._loader is None:
            self._loader = self._made(worker, state)
        return self._loader, self._is_strided

    def _made(self, worker: Worker | None, state: dict[str, Any] | None = None) -> Loader:
        options = self._options.copy()
        if worker is not None:
            if isinstance(self.pipeline.source, Sequential):
                raise ConfigError(
                    f"{self.pipeline.source.reader.name} is read by one process, not by DataLoader workers",
                    hint="num_workers=0, or a ps.Loader: both decode in threads",
                )
            if options.get("on_epoch") is not None:
                raise ConfigError(
                    "on_epoch decides by one loader's statistics, and each DataLoader worker has its own",
                    hint="num_workers=0, or a ps.Loader",
                )
            if options.get("workers") is not None:
                raise ConfigError(
                    "workers= are those of one loader, and each DataLoader worker has its own",
                    hint="num_workers=0, or a ps.Loader",
                )
            options.pop("agree", None)  # it is a collective of ranks, and a worker is not a rank
            options["share"] = self._shared
            options["index"] = self._index_of(options, state)
            share_machine(worker.workers_count)
            options.setdefault("fetch", FetchConfig(budget_bytes_max=default_budget_bytes() // worker.workers_count))
            options["in_order"] = True  # workers divide the batches by their numbers
            # if samples may be dropped, whole batches may vanish; only workers that read all batches number them alike
            self._is_strided = not options.get("processes") and not may_drop(self.pipeline)
            if self._is_strided:
                options["stride"] = (worker.number, worker.workers_count)
        return Loader(self.pipeline, **options)


def _check_collation(caller: Any) -> None:
    """Refuse a DataLoader that would make batches of batches. A user's own `collate_fn` may treat batches as it likes.

    Args:
        caller: The object that iterates: a DataLoader's fetcher, which alone knows the DataLoader's settings.

    Raises:
        ConfigError: The DataLoader would stack batches.
    """
    collates = getattr(caller, "auto_collation", False)
    if collates and getattr(caller, "collate_fn", None) is torch.utils.data.default_collate:
        raise ConfigError(
            "this DataLoader has a batch_size, so it would stack batches that are complete already",
            hint="DataLoader(dataset, batch_size=None); .batch(n) of the pipeline sets the number of samples in a batch",
        )


def _check_accelerate(caller: Any, *, has_state: bool) -> None:
    """Refuse a dataloader of Hugging Face's Accelerate that would leave samples out. It calls ``set_epoch`` before it iterates.

    Args:
        caller: The object that calls ``set_epoch``.
        has_state: Whether a state was loaded that the epoch would replace.

    Raises:
        ConfigError: The dataloader takes the batches of one rank for those of all ranks, or counts epochs from 0 again.
    """
    name = type(caller).__name__
    hint = "iterate ps.torch.Tensors(loader), and pass only model and optimizer to accelerator.prepare()"
    if name in ("DataLoaderDispatcher", "IterableDatasetShard"):
        ranks_count = caller.num_processes if name == "IterableDatasetShard" else caller.state.num_processes
        if ranks_count > 1:
            raise ConfigError(
                f"Accelerate's {name} divides the batches among {ranks_count} ranks, and this dataset did so already",
                hint=hint,
            )
    if has_state and name in ("DataLoaderDispatcher", "DataLoaderShard"):
        raise ConfigError(
            "Accelerate's dataloaders begin with epoch 0, so the state that was loaded is lost", hint=hint
        )


@boundary
class _Iteration:
    """One epoch, or the rest of it. Reading begins when the first batch is taken.

    Args:
        epoch: Epoch number, from 0.
        worker: The DataLoader worker that this process is, or None.
        state: A state of the dataset to continue at, or None.
        open_loader: Returns the loader for `worker` and the loader's state, and whether it reads only the worker's batches.
        is_current: Tells whether this is still the dataset's latest iteration.
    """

    def __init__(
        self,
        epoch: int,
        worker: Worker | None,
        state: dict[str, Any] | None,
        *,
        open_loader: Callable[[Worker | None, dict[str, Any] | None], tuple[Loader, bool]],
        is_current: Callable[[_Iteration], bool],
    ) -> None:
        self._open_loader = open_loader
        self._is_current = is_current
        self._worker = worker
        self._state = state
        self._loader: Loader | None = None
        self._is_strided = False
        self._batches: Iterator[dict[str, Any]] | None = None
        self.epoch = epoch
        self.resumed = state is not None
        self.batches_count = 0 if state is None else state["batches"]  # of the rank, including those of other workers
        self.finished = state is not None and state["finished"]

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, Any]:
        if self.finished:
            raise StopIteration
        if not self._is_current(self):
            raise ClosedError(
                "a later iteration of this dataset has begun", hint="iterate once at a time, or create a second dataset"
            )
        if self._batches is None:
            self._batches = self._begun()
        index, count = (0, 1) if self._worker is None else (self._worker.number, self._worker.workers_count)
        for batch in self._batches:
            if self._is_strided:  # the next batch of this worker
                self.batches_count += (index - self.batches_count) % count
            self.batches_count += 1
            if (self.batches_count - 1) % count == index:
                made: dict[str, Any] = as_tensors(batch)
                return made
        self.finished = True
        raise StopIteration

    def state_dict(self) -> dict[str, Any]:
        index, count = (0, 1) if self._worker is None else (self._worker.number, self._worker.workers_count)
        state = None if self._loader is None else self._loader.state_dict()
        if self._batches is None and self._state is not None:
            state = self._state["loader"]
        return {
            "version": STATE_VERSION,
            "epoch": self.epoch,
            "batches": self.batches_count,
            "finished": self.finished,
            "worker": index,
            "workers": count,
            "loader": state,
        }

    def _begun(self) -> Iterator[dict[str, Any]]:
        state = None if self._state is None else self._state["loader"]
        loader, self._is_strided = self._open_loader(self._worker, state)
        if state is None:
            loader.restart(epoch=self.epoch)
        else:
            loader.load_state_dict(state)
        batches = iter(loader)
        self._loader = loader
        return batches


@boundary
class MapDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """``pipeline.open()`` for a DataLoader. It opens the data at first use, and its workers agree on the epoch.

    ``dataset[i]`` is a dict of the values that the pipeline's stages make, with ``__key__``, ``__shard__`` (the URL of the
    object or shard) and ``__position__`` (i). The samples of a batch are fetched at the same time:
    ``DataLoader(dataset, batch_size=n, shuffle=True, num_workers=w)`` has the requests of w batches in flight.

    Args:
        pipeline: A source and stages that treat samples separately: ``decode``, ``map``, ``select``, ``join``. ``batch`` and
            ``shuffle`` are not allowed, since the DataLoader batches and its sampler orders the samples.
        seed: Seed of the `rng` of ``map`` functions, which depends on (seed, epoch, i).
        index: Treatment of shards without an index: ``"require"`` raises, so run ``penstock index`` before; ``"auto"`` builds
            it, but every rank and job would build its own.
        index_dir: Directory that may hold the index of the shards, besides the place of the shards themselves.
        cache: Cache on this node's disk, as for ``connect``.
        fetch: Limits of reading.

    Raises:
        ConfigError: A stage batches, drops or multiplies samples; or, at first use, the shards have no index.

    Cost: nothing before the first use; then one listing, or one read of the index, which workers inherit. Memory holds
        the names as text, 12 bytes for each sample of an indexed shard, and the samples of a batch as they are stored.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        seed: int = 0,
        index: Index = "require",
        index_dir: str | os.PathLike[str] | None = None,
        cache: CacheConfig | str | os.PathLike[str] | None = None,
        fetch: FetchConfig | None = None,
    ) -> None:
        transform_of(pipeline)  # refuses a pipeline that cannot be opened
        self.pipeline = pipeline
        self._options: dict[str, Any] = {
            "seed": seed, "index": index, "index_dir": index_dir, "cache": cache, "fetch": fetch
        }  # fmt: skip
        self._epochs = EpochTable()
        self._dataset: PipelineDataset | None = None
        self._opening = threading.Lock()
        forks.register(self)

    def __len__(self) -> int:
        return len(self._opened())

    def __repr__(self) -> str:
        return f"MapDataset({self.pipeline!r})"

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes, as ``pipeline.open().classes``."""
        return self._opened().classes

    def __getitem__(self, index: Any) -> Any:
        """Return the sample of a number or key, or several of a slice or list, as ``pipeline.open()[index]`` does.

        Raises:
            IndexError: The number is out of range.
            KeyError: The key is unknown.
            StoreError: The sample cannot be read; the message names key and shard.
            DataError: The sample cannot be decoded; the message names key and shard.

        Cost: one request, or one for each member of a group.
        """
        return self._opened().at(index, epoch=self._epoch())

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return several samples in the order of their numbers in `indices`. A number that occurs twice is read once.

        Raises:
            IndexError: A number is out of range.
            ObjectChangedError: An object or shard was replaced after it was listed or indexed.
            StoreError: A sample cannot be read; the message names key and shard.
            DataError: A sample cannot be decoded; the message names key and shard.

        Cost: one request for each sample, or for neighbouring samples of a shard, as many at a time as the store allows.
        """
        return self._opened().read_samples(indices, epoch=self._epoch())

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, so that ``map`` functions draw other random numbers. Persistent workers use it too.

        Raises:
            ConfigError: The epoch is negative or too large.
        """
        check_whole("epoch", epoch, 0, SEED_MAX)
        self._epochs.set_next(epoch, worker=worker_here())

    def close(self) -> None:
        """Close the stores; idempotent. If the dataset is used again, it opens them again."""
        dataset, self._dataset = self._dataset, None
        if dataset is not None:
            dataset.close()

    def after_fork_in_child(self) -> None:
        """Replace the lock, which another thread of the parent may have held."""
        self._opening = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opening": None, "_reached": ReachedEndpoints()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._opening = threading.Lock()
        forks.register(self)

    def _epoch(self) -> int:
        return self._epochs.next(worker_here())

    def _opened(self) -> PipelineDataset:
        with self._opening:
            if self._dataset is None:
                self._dataset = PipelineDataset(self.pipeline, **self._options)
            return self._dataset
