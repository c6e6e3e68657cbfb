"""``dataset``: a pipeline as a ``datasets.IterableDataset`` of single samples; ``features_of``: the types of its columns.

Hugging Face's ``IterableDataset`` iterates and shards ``PipelineExamples``, and asks it for its state. Its methods are
those of the library's own sources of examples. It derives a source for each iteration, in this order: for an epoch other than
0, ``shuffle_data_sources(generator)`` and then ``shift_rngs(epoch)``; for nodes and then for workers, ``shard_data_sources(n,
j)``; and in a worker at last ``shift_rngs(worker)``. So the number that follows ``shuffle_data_sources`` is that of the epoch.
"""

from __future__ import annotations

import copy
import itertools
import json
import sys
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

import datasets
import numpy as np
import pyarrow as pa
from datasets.iterable_dataset import _BaseExamplesIterable

from penstock.config import FetchConfig, default_budget_bytes, share_machine
from penstock.errors import ConfigError
from penstock.loader import Loader
from penstock.loader.plan.source_finder import SourceFinder
from penstock.pipeline import Batch, BatchBySize, Pipeline, Sequential
from penstock.samples.transform import may_drop, rebatches
from penstock.system.tracebacks import boundary

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.loader.options import LoaderArguments


READ_SAMPLES = 32
"""Samples that are read and decoded together if the pipeline does not say how many."""

_ARRAYS: dict[int, Any] = {2: datasets.Array2D, 3: datasets.Array3D, 4: datasets.Array4D, 5: datasets.Array5D}
_SPLITTING = ("rank", "world_size", "mesh", "stride", "agree", "share", "on_epoch")


@boundary
def dataset(
    pipeline: Pipeline, *, features: datasets.Features | None = None, **options: Unpack[LoaderArguments]
) -> datasets.IterableDataset:
    """Return a pipeline as Hugging Face's ``IterableDataset``, one example per sample, in the order of a ``Loader``.

    ``set_epoch(n)`` selects the epoch of the next iteration. ``state_dict()`` is exact: the iteration continues with the
    sample after the last one. Shuffle in the pipeline, because Hugging Face's shuffle buffers lose samples when resuming.

    Nodes (``split_dataset_by_node``), ``shard()`` and DataLoader workers divide an epoch by batches: with n readers, reader j
    gets every batch k with k mod n = j, so each sample is read exactly once, for any n. With an index, a reader requests only
    the ranges that it needs; without one, each reader reads everything and decodes its own batches.

    Args:
        pipeline: A pipeline. Its ``.batch(n)`` sets how many samples are read and decoded together; the default is 32.
        features: Types of the columns. By default they are derived from the first batch, which is read for this purpose. If the
            source can be read only once, such as a pipe, they stay unknown.
        **options: Options of ``Loader``, except those that divide the data.

    Raises:
        ConfigError: An argument is invalid; or, when iterated, several nodes share the data and `index` is ``"auto"``.

    Cost: One listing and, unless `features` are given, the requests for a first batch. Each reader that iterates costs what a
        ``Loader`` does.
    """
    if not isinstance(pipeline, Pipeline):
        raise ConfigError(f"dataset({pipeline!r}) must be given a pipeline", hint="ps.shards(url).decode(...)")
    if features is not None and not isinstance(features, datasets.Features):
        raise ConfigError(f"features= must be a datasets.Features, not {type(features).__name__}")
    for name in _SPLITTING:
        if options.get(name) is not None:
            raise ConfigError(
                f"{name}= is not an option of a Hugging Face data set",
                hint="datasets.distributed.split_dataset_by_node(dataset, rank=..., world_size=...) divides it",
            )
    if pipeline.stage(Batch) is None and pipeline.stage(BatchBySize) is None:
        pipeline = pipeline.batch(READ_SAMPLES)
    Loader(pipeline, **options).close()  # refuses invalid arguments here instead of at the first example
    reading: dict[str, Any] = {**options}
    asked = reading.pop("index", "auto")
    index = _found_index(pipeline, reading) if asked == "auto" else asked
    if features is None and not isinstance(pipeline.source, Sequential):  # which can be read only once
        with Loader(pipeline, rank=0, world_size=1, index=index, **reading) as loader:
            first = next(iter(loader), None)
        features = None if first is None else features_of(first)
    examples = PipelineExamples(
        pipeline, options=reading, index=index, is_index_found=asked == "auto", features=features
    )
    return datasets.IterableDataset(examples, info=datasets.DatasetInfo(features=features))


def _found_index(pipeline: Pipeline, options: dict[str, Any]) -> Literal["require", "stream"]:
    """Return how to read in all processes and epochs: by the index if there is one now."""
    if isinstance(pipeline.source, Sequential):
        return "stream"
    where = {name: options.get(name) for name in ("fetch", "index_dir", "cache", "share")}
    finder = SourceFinder(pipeline, **where)
    try:
        return "require" if finder.find(index="auto").is_indexed else "stream"
    finally:
        finder.close()


@boundary
def features_of(batch: dict[str, np.ndarray[Any, Any] | Sequence[Any]]) -> datasets.Features:
    """Return the types of the columns of a batch.

    An array ``dtype[B]`` is a ``Value``, ``dtype[B, n]`` a ``List`` of length n, and ``dtype[B, ...]`` with two to five more
    dimensions an ``Array2D`` to ``Array5D``. The type of a list is inferred by Arrow.

    Raises:
        ConfigError: Arrow knows no type for a column, or an array has more dimensions.
    """
    return datasets.Features({name: _feature_of(name, values) for name, values in batch.items()})


def _feature_of(name: str, values: Any) -> Any:
    hint = "pass features=, or leave the column out by .map()"
    if isinstance(values, np.ndarray) and values.dtype != object:
        kind, shape = str(values.dtype), values.shape[1:]
        if not shape:
            return datasets.Value(kind)
        if len(shape) == 1:
            return datasets.List(datasets.Value(kind), length=shape[0])
        if len(shape) not in _ARRAYS:
            raise ConfigError(
                f"column {name!r} has {len(shape)} dimensions, and Hugging Face's features have at most 5", hint=hint
            )
        return _ARRAYS[len(shape)](shape=shape, dtype=kind)
    try:
        found = pa.array([_plain(value) for value in itertools.islice(values, READ_SAMPLES)]).type
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise ConfigError(f"column {name!r} has no type in Arrow: {error}", hint=hint) from error
    return datasets.Features.from_arrow_schema(pa.schema({name: found}))[name]


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


SHARDS_COUNT = 720720
"""The number of shards that the library is told: it divides evenly by every number of nodes up to 16 and by many others, and
nobody lists them. A pipeline is divided by batches, into any number of readers."""


class PipelineExamples(_BaseExamplesIterable):  # type: ignore[misc]
    """The samples of one reader of a pipeline, in one epoch. It pickles, and each iteration has a ``Loader`` of its own.

    Args:
        pipeline: A pipeline that ends with ``.batch(n)``.
        options: Options of ``Loader``.
        index: ``"require"`` or ``"stream"``: how all readers read.
        is_index_found: Whether `index` was found out in this process, and may be another one on another node.
        features: Types of the columns; None if they are unknown.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        options: dict[str, Any],
        index: Literal["require", "stream"],
        is_index_found: bool,
        features: datasets.Features | None,
    ) -> None:
        super().__init__()
        self._pipeline = pipeline
        self._options = options
        self._index = index
        self._is_index_found = is_index_found
        self._features = features
        self._epoch = 0
        self._expects_epoch = False
        self._readers = (0, 1)  # this reader's number, and how many there are
        self._sleep_on_threads_shutdown = False

    @property
    def features(self) -> datasets.Features | None:
        """Types of the columns."""
        return self._features

    @property
    def is_typed(self) -> bool:
        """Whether examples have the types of ``features`` already."""
        return self._features is not None

    @property
    def num_shards(self) -> int:
        """A number that divides evenly by most numbers of readers."""
        return SHARDS_COUNT

    def split_shard_indices_by_worker(self, num_shards: int, index: int, contiguous: bool = True) -> list[int]:
        """Return a list that says that reader `index` of `num_shards` has something to read."""
        return list(range(index, index + 1))

    # ── what the library derives ───────────────────────────────────────────────────────────────────────────────────

    def shuffle_data_sources(self, generator: np.random.Generator) -> Self:
        """Return the same: the pipeline shuffles. The epoch may follow."""
        return self._with(_expects_epoch=True)

    def shift_rngs(self, value: int) -> Self:
        """Return the source for an epoch, if `value` is one."""
        return self._with(_epoch=value, _expects_epoch=False) if self._expects_epoch else self

    def shard_data_sources(self, num_shards: int, index: int, contiguous: bool = True) -> Self:
        """Return the source of reader `index` of `num_shards`, of this reader's batches.

        Raises:
            ConfigError: The readers are on several nodes, and may have found different indexes; or one process alone can read
                the source.
        """
        if num_shards == 1:
            return self
        if isinstance(self._pipeline.source, Sequential):
            raise ConfigError(
                f"{self._pipeline.source.reader.name} is read by one process, and cannot be divided",
                hint="num_workers=0",
            )
        if self._is_index_found and _worker() is None:
            raise ConfigError(
                "nodes that share a data set must all read it by an index, or all without one",
                hint='ps.huggingface.dataset(pipeline, index="require"), or index="stream"',
            )
        number, count = self._readers
        return self._with(_readers=(number + count * index, count * num_shards), _expects_epoch=False)

    def reshard_data_sources(self) -> Self:
        """Return the same: it can be divided into any number of readers."""
        return self

    def _with(self, **changes: Any) -> Self:
        made = copy.copy(self)
        made.__dict__.update(changes, _state_dict=None)
        return made

    # ── iterating ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _init_state_dict(self) -> dict[str, Any]:
        # The loader's state is a string, because the library copies the whole state for each one that it gives out.
        self._state_dict = {"loader": None, "batches": 0, "row": 0, "finished": False, "readers": list(self._readers)}
        return self._state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Continue after the example that was the last one when `state_dict` was saved; iterating checks it.

        A worker's state is also loaded into the source that has not been divided among the workers yet.
        """
        self._state_dict = dict(state_dict)
        return self._state_dict

    def _check_state(self, state: dict[str, Any]) -> None:
        if not {"loader", "batches", "row", "finished", "readers"} <= set(state):
            raise ConfigError(f"{state!r:.80} is not the state of a pipeline")
        if list(state["readers"]) != list(self._readers):
            raise ConfigError(
                f"the state is that of reader {state['readers']}, and this is {list(self._readers)} (number, count)",
                hint="resume with the same number of nodes and workers",
            )

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Iterate over keys and samples.

        Raises:
            ConfigError: The state that was loaded is of another source, or of another number of readers.
        """
        state: dict[str, Any] = self._state_dict if self._state_dict is not None else self._init_state_dict()
        self._check_state(state)
        if state["finished"]:
            return
        with self._loader(state["loader"]) as loader:
            for batch, before in self._own_batches(loader, state):
                state["loader"] = before
                columns = {name: _rows(values) for name, values in batch.items()}
                rows_count = len(next(iter(columns.values())))
                for row in range(state["row"], rows_count):
                    state["row"] = row + 1
                    yield f"{state['batches']}_{row}", {name: rows[row] for name, rows in columns.items()}
                state["row"] = 0
        state["finished"] = True

    def _own_batches(self, loader: Loader, state: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
        """Iterate over this reader's batches, with the loader's state before each, and count the batches in `state`."""
        number, count = self._readers
        strided = self._is_strided
        batches, before = iter(loader), json.dumps(loader.state_dict())
        is_first = True
        for batch in batches:
            if not is_first:
                state["batches"] += 1
            is_first = False
            if strided or state["batches"] % count == number:
                yield batch, before
            before = json.dumps(loader.state_dict())

    @property
    def _is_strided(self) -> bool:
        """Whether the loader leaves out the batches of other readers; if samples may be dropped, it cannot number them."""
        has_workers = self._options.get("processes") or self._options.get("workers")
        return not (has_workers or may_drop(self._pipeline) or rebatches(self._pipeline))

    def _loader(self, saved: str | None) -> Loader:
        options, state = dict(self._options), None if saved is None else json.loads(saved)
        worker = _worker()
        if worker is not None:
            share_machine(worker.num_workers)
            options.setdefault("fetch", FetchConfig(budget_bytes_max=default_budget_bytes() // worker.num_workers))
        index = self._index
        if state is not None and state["mode"]:  # an index that was made since then would be another order
            index = "require" if state["mode"] == "index" else "stream"
        loader = Loader(
            self._pipeline,
            rank=0,
            world_size=1,
            stride=self._readers if self._is_strided else (0, 1),
            index=index,
            **options,
        )
        if state is None:
            loader.restart(epoch=self._epoch)
        else:
            loader.load_state_dict(state)
        return loader


def _rows(values: Any) -> Any:
    """The rows of a column: plain Python values of numbers, views of arrays, and the items of a list."""
    return values.tolist() if isinstance(values, np.ndarray) and values.ndim == 1 else values


def _worker() -> Any:
    """PyTorch's record of the DataLoader worker that this process is; None if it is none."""
    torch = sys.modules.get("torch")
    return None if torch is None else torch.utils.data.get_worker_info()
