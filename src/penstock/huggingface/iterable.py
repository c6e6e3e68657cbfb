"""``dataset``: a pipeline as a ``datasets.IterableDataset`` of single samples; ``features_of``: the types of its columns."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Literal, Unpack

import datasets
import numpy as np
import pyarrow as pa

from penstock.errors import ConfigError
from penstock.huggingface.examples import PipelineExamples
from penstock.loader import Loader
from penstock.loader.plan.source_finder import SourceFinder
from penstock.pipeline import Batch, BatchBySize, Pipeline, Sequential
from penstock.system.tracebacks import boundary

if TYPE_CHECKING:
    from collections.abc import Sequence

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
