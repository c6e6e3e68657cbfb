"""Looking at data by hand: ``peek`` gives the first samples of a pipeline, ``describe`` says what a batch holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.buffers import is_typed
from penstock.config import MIB, FetchConfig, check_whole
from penstock.errors import ConfigError
from penstock.formats import RESERVED_FIELDS
from penstock.loader.loader import Loader
from penstock.pipeline import Batch, BatchBySize, Evaluate, Pipeline, Shuffle
from penstock.sizes import format_bytes
from penstock.tracebacks import boundary

PEEK_MAX = 10_000
VALUE_CHARACTERS_MAX = 40
_FIELDS = "fields"
_SMALL = FetchConfig(part_bytes=256 * 1024, requests_min=1, requests_max=2)  # a look should not read a gigabyte ahead


@boundary
def peek(pipeline: Pipeline, n: int = 3) -> list[dict[str, Any]]:
    """The first `n` samples in the stored order, as they come out of the last stage before the batch.

    Args:
        pipeline: With or without ``.batch()``; its shuffle is left out, so that one shard is enough. Of a mix, each
            source's first samples in turn.
        n: In [1, 10000]; fewer come where there are fewer.

    Returns:
        Dicts of values, with ``__key__``, ``__shard__`` and ``__position__``.

    Raises:
        ConfigError: out of bounds, or as ``Loader`` says.
        StoreError, DataError: as iterating a loader does.

    Cost: the listing, and of the shards what the samples lie in, read in parts of 256 KiB.
    """
    if not isinstance(pipeline, Pipeline):
        raise ConfigError(f"peek({pipeline!r}) must be given a pipeline", hint="ps.shards(url)")
    check_whole("n", n, 1, PEEK_MAX)
    found = [_first(leaf, n) for leaf in pipeline.flat().leaves[:n]]
    return [samples[row] for row in range(n) for samples in found if row < len(samples)][:n]


def _first(pipeline: Pipeline, n: int) -> list[dict[str, Any]]:
    stages = [stage for stage in pipeline.stages if not isinstance(stage, Shuffle | Evaluate | Batch | BatchBySize)]
    single = Pipeline(pipeline.source, tuple(stages)).map(_together).batch(1)
    samples: list[dict[str, Any]] = []
    with Loader(single, lanes=1, threads=1, prefetch_batches=1, rank=0, world_size=1, fetch=_SMALL) as loader:
        for batch in loader:
            (fields,) = batch[_FIELDS]
            added = {name: values[0] for name, values in batch.items() if name != _FIELDS}
            samples.append({**fields, **added})
            if len(samples) >= n:
                break
    return samples[:n]


def _together(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample's fields as one: to look at them, those of one sample need not be those of another."""
    return {_FIELDS: {name: _copied(value) for name, value in sample.items() if name not in RESERVED_FIELDS}}


def _copied(value: Any) -> Any:
    """`value`, not a slice of what was read."""
    if not isinstance(value, memoryview):
        return value
    return np.array(value) if is_typed(value) else bytes(value)


def describe(batch: Any) -> str:
    """Fields, dtypes, shapes and bytes of a batch or a sample: ``print(ps.describe(batch))``.

    Args:
        batch: What a ``Loader``, ``peek`` or a ``Dataset`` gives; arrays may be tensors of any framework. What ``collate=``
            made is described by its type.

    Returns:
        A line for each field, those that the loader adds last.
    """
    if not isinstance(batch, Mapping):
        return _kind(batch)
    names = sorted(batch, key=lambda name: str(name).startswith("__"))
    width = max((len(str(name)) for name in names), default=0)
    return "\n".join(f"{name!s:<{width}}  {_kind(batch[name])}" for name in names)


def _kind(value: Any) -> str:
    if isinstance(value, np.generic):
        return f"{value.dtype} {value}"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        dtype = str(value.dtype).rpartition(".")[2]  # torch.uint8 is uint8
        size_bytes = getattr(value, "nbytes", None)
        size = f", {format_bytes(size_bytes)}" if size_bytes is not None and size_bytes >= MIB else ""
        return f"{dtype}[{', '.join(map(str, value.shape))}]{size}{_place(value)}"
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # put end to end: data and offsets
        return ", ".join(f"{name} {_kind(getattr(value, name))}" for name in value._fields)
    if isinstance(value, list | tuple):
        if not value:
            return f"{type(value).__name__} of 0"
        kinds = sorted({type(each).__name__ for each in value})
        return f"{type(value).__name__} of {len(value)} {' or '.join(kinds)}, first {_kind(value[0])}"
    if isinstance(value, str | bytes | memoryview):
        shown = repr(
            bytes(value[:VALUE_CHARACTERS_MAX]) if isinstance(value, memoryview) else value[:VALUE_CHARACTERS_MAX]
        )
        return f"{shown}{'...' if len(value) > VALUE_CHARACTERS_MAX else ''} ({len(value)})"
    shown = repr(value)
    return shown if len(shown) <= VALUE_CHARACTERS_MAX else f"{type(value).__name__} {shown[:VALUE_CHARACTERS_MAX]}..."


def _place(value: Any) -> str:
    """Where a tensor lies, unless in ordinary memory."""
    device = str(getattr(value, "device", "cpu"))
    return "" if device == "cpu" else f" on {device}"
