"""``IterableDataset``: a pipeline for ``torch.utils.data.DataLoader(dataset, batch_size=None)``."""

from __future__ import annotations

import os
import sys
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

import torch.utils.data

from penstock.config import SEED_MAX, FetchConfig, check_whole, default_budget_bytes, share_machine
from penstock.errors import ClosedError, ConfigError
from penstock.loader import Loader
from penstock.loader.plan.ranks import rank_and_world_size
from penstock.loader.plan.sources import SourceFinder
from penstock.loader.plan.stages import may_drop
from penstock.torch.batches import as_tensors
from penstock.torch.epochs import EpochTable, Worker, worker_here
from penstock.torch.once import Once
from penstock.tracebacks import boundary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.loader import LoaderStatistics
    from penstock.loader.options import LoaderOptions
    from penstock.pipeline import Pipeline

STATE_VERSION = 1


@boundary
class IterableDataset(torch.utils.data.IterableDataset[dict[str, Any]]):
    """Batches of tensors, ready made: give it to ``DataLoader(dataset, batch_size=None)``, or iterate it as it is.

    Each ``iter`` is one whole epoch in the ``Loader``'s order; the next ``iter``, also after ``break``, is the next
    epoch. It decodes in threads of its own and needs no workers. With ``num_workers=n``, worker j yields this rank's
    batches k with k mod n = j, so that the DataLoader's order is the ``Loader``'s. With an index, and where the gaps
    between its samples pay, a worker reads its own samples' ranges alone; else it reads all of the rank's, and decodes its
    own (where samples may be dropped, all): ``explain()`` says how often bytes are read. Prefer none, and
    ``processes=``. fork, forkserver, spawn and persistent workers work alike.

    It is stateful: torchdata's ``StatefulDataLoader`` saves and restores its place, with the same number of workers;
    without workers, ``state_dict()`` here does, which raises where workers iterate.

    Args:
        pipeline: Ends with ``.batch(n)``.
        **options: As for ``Loader``. Rank and world size are looked up when an iteration begins. In workers ``threads``
            is by default the cores' count divided by the workers', and so is the byte budget.

    Raises:
        ConfigError: as ``Loader`` does; when iterated by a DataLoader with a `batch_size`, which would make batches of batches.

    Cost: as ``Loader``, in each worker.
    """

    def __init__(self, pipeline: Pipeline, **options: Unpack[LoaderOptions]) -> None:
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
        Loader(pipeline, **options).close()  # refuses bad arguments here, not at the first batch

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self._options.items())
        return f"{type(self).__name__}({self.pipeline!r}{options})"

    def __iter__(self) -> Iterator[dict[str, Any]]:
        _check_collation(sys._getframe(2).f_locals.get("self"))  # frame 1 is the boundary's
        self._leave_parent()
        worker = worker_here()
        state, self._pending = self._pending, None
        last = self._current
        if state is not None:
            epoch = state["epoch"]
        elif worker is None and last is not None and not last.batches_count and not last.resumed:
            epoch = last.epoch  # nobody took a batch of it
        else:
            epoch = self._epochs.take(worker)
        self._current = _Iteration(self, epoch, worker, state)
        return self._current

    def __len__(self) -> int:
        """Batches per epoch of this rank, where the loader knows it; else ``TypeError``."""
        if self._loader is None:
            self._loader = self._made(worker_here())
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration this epoch.

        Raises:
            ConfigError: it is negative.
        """
        check_whole("epoch", epoch, 0, SEED_MAX)
        self._leave_parent()
        self._current = self._pending = None
        self._epochs.set_next(epoch, worker=worker_here())

    def state_dict(self) -> dict[str, Any]:
        """Where the current iteration is: its epoch and the batches handed out; a small dict of plain values.

        Raises:
            ConfigError: the iteration runs in a DataLoader's workers, and this process does not know how far they are.
        """
        if worker_here() is None and self._epochs.is_in_workers():
            raise ConfigError(
                "state_dict() of a dataset that DataLoader workers iterate: only they know how many batches they gave",
                hint="torchdata's StatefulDataLoader(dataset, batch_size=None, num_workers=n).state_dict(), or num_workers=0",
            )
        if self._current is None:
            self.__iter__()
        assert self._current is not None
        return self._current.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on behind the last batch of `state`; a finished one without workers: the next epoch.

        Raises:
            ConfigError: of another version, or another number of workers; of other data, when it is iterated.
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
        """The loader's, of this process; see there."""
        return (self._loader or self._made(None)).statistics()

    def close(self) -> None:
        """End the loader's threads; idempotent. The next ``iter`` begins with epoch 0."""
        self._current = self._pending = None
        self._epochs.set_next(0)
        loader, self._loader = self._loader, None
        if loader is not None:
            loader.close()

    def __getstate__(self) -> dict[str, Any]:
        """As configuration. What is pickled for a worker knows this process's rank: a worker is in no group."""
        options = self._options.copy()
        if get_spawning_popen() is not None:
            mesh = options.pop("mesh", None)
            found = rank_and_world_size(options.get("rank"), options.get("world_size"), mesh=mesh)
            options["rank"], options["world_size"] = found
        return {**self.__dict__, "_options": options, "_loader": None, "_current": None, "_pending": None}

    def _leave_parent(self) -> None:
        """In a forked child: what was inherited belongs to the parent."""
        if self._process_id != os.getpid():
            self._process_id = os.getpid()
            self._loader = self._current = self._pending = None

    def _index_of(self, options: LoaderOptions, state: dict[str, Any] | None) -> Literal["require", "stream"]:
        """How all workers read, in all epochs: as the first one would, or as a state does."""
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

    def _made(self, worker: Worker | None, state: dict[str, Any] | None = None) -> Loader:
        options = self._options.copy()
        if worker is not None:
            if options.get("on_epoch") is not None:
                raise ConfigError(
                    "on_epoch decides by one loader's statistics, and each DataLoader worker has its own",
                    hint="num_workers=0, or a ps.Loader",
                )
            options.pop("agree", None)  # a collective of ranks, and a worker is none
            options["share"] = self._listing.get
            options["index"] = self._index_of(options, state)
            share_machine(worker.workers_count)
            options.setdefault("fetch", FetchConfig(budget_bytes_max=default_budget_bytes() // worker.workers_count))
            # a batch of which nothing is left is not given, and nobody knows beforehand which: then all go through all
            self._is_strided = not options.get("processes") and not may_drop(self.pipeline)
            if self._is_strided:
                options["stride"], options["in_order"] = (worker.number, worker.workers_count), True
        return Loader(self.pipeline, **options)


def _check_collation(caller: Any) -> None:
    """Refuse a DataLoader that would make batches of batches.

    Args:
        caller: What called ``iter``: a DataLoader's fetcher has the DataLoader's settings, which it tells nobody else.

    Raises:
        ConfigError: it would; a `collate_fn` of the user's own may do with the batches what it likes.
    """
    collates = getattr(caller, "auto_collation", False)
    if collates and getattr(caller, "collate_fn", None) is torch.utils.data.default_collate:
        raise ConfigError(
            "this DataLoader would stack whole batches, because it has a batch_size, and these batches are ready made",
            hint="DataLoader(dataset, batch_size=None); .batch(n) of the pipeline says how many samples a batch has",
        )


@boundary
class _Iteration:
    """One epoch, or what is left of it. Reading begins with the first batch asked for."""

    def __init__(
        self, dataset: IterableDataset, epoch: int, worker: Worker | None, state: dict[str, Any] | None
    ) -> None:
        self._dataset = dataset
        self._worker = worker
        self._state = state
        self._batches: Iterator[dict[str, Any]] | None = None
        self.epoch = epoch
        self.resumed = state is not None
        self.batches_count = 0 if state is None else state["batches"]  # of the rank, those of other workers included
        self.finished = state is not None and state["finished"]

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, Any]:
        if self.finished:
            raise StopIteration
        if self._dataset._current is not self:
            raise ClosedError(
                "a later iteration of this dataset has begun", hint="one at a time; make a second dataset"
            )
        if self._batches is None:
            self._batches = self._begun()
        index, count = (0, 1) if self._worker is None else (self._worker.number, self._worker.workers_count)
        for batch in self._batches:
            if self._dataset._is_strided:  # it is the next one that is this worker's
                self.batches_count += (index - self.batches_count) % count
            self.batches_count += 1
            if (self.batches_count - 1) % count == index:
                made: dict[str, Any] = as_tensors(batch)
                return made
        self.finished = True
        raise StopIteration

    def state_dict(self) -> dict[str, Any]:
        index, count = (0, 1) if self._worker is None else (self._worker.number, self._worker.workers_count)
        loader = self._dataset._loader
        state = None if loader is None or self._batches is None else loader.state_dict()
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
        dataset = self._dataset
        if dataset._loader is None:
            dataset._loader = dataset._made(self._worker, None if self._state is None else self._state["loader"])
        if self._state is None or self._state["loader"] is None:
            dataset._loader.restart(epoch=self.epoch)
        else:
            dataset._loader.load_state_dict(self._state["loader"])
        return iter(dataset._loader)
