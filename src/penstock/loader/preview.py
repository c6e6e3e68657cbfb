"""Functions to inspect data: ``peek`` gives the first samples of a pipeline, ``describe`` says what a batch holds."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.config import MIB, FetchConfig, check_whole
from penstock.errors import ConfigError
from penstock.formats import RESERVED_FIELDS
from penstock.loader.loader import Loader
from penstock.memory.buffers import is_typed
from penstock.pipeline import Batch, BatchBySize, Evaluate, Pipeline, Shuffle, Stored, TokenBlocks, check_rereadable
from penstock.system.tracebacks import boundary
from penstock.text.html_text import figure, grid
from penstock.text.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable


PEEK_MAX = 10_000
GRID_MAX = 64
"""Samples in the grid of a notebook, which holds their pictures."""
_PICTURES = ((b"\xff\xd8\xff", "jpeg"), (b"\x89PNG\r\n", "png"), (b"GIF8", "gif"))
VALUE_CHARACTERS_MAX = 40
_FIELDS = "fields"
_SMALL = FetchConfig(part_bytes=256 * 1024, requests_min=1, requests_max=2)  # a preview needs little read-ahead


class Samples(list[dict[str, Any]]):
    """A list of samples, which a notebook shows as a grid of their pictures and values."""

    def _repr_html_(self) -> str:
        figures = [figure(filter(None, map(_picture, sample.values())), describe(sample)) for sample in self[:GRID_MAX]]
        return grid(figures) + (f"<p>{len(self) - GRID_MAX} more</p>" if len(self) > GRID_MAX else "")


def picture_kind(value: bytes) -> str | None:
    """Return the kind of a stored picture by its first bytes, e.g. ``"jpeg"``; None if it is none that is known."""
    if value[8:12] == b"WEBP":
        return "webp"
    return next((kind for head, kind in _PICTURES if value.startswith(head)), None)


def _picture(value: Any) -> tuple[str, bytes] | None:
    """Return the kind and bytes of a picture: as stored, or a PNG of decoded pixels; None if the value is neither."""
    if isinstance(value, bytes):
        return (kind, value) if (kind := picture_kind(value)) else None
    if (
        not isinstance(value, np.ndarray)
        or value.dtype != np.uint8
        or value.ndim < 2
        or value.shape[2:] not in ((), (3,))
    ):
        return None
    try:
        from PIL import Image
    except ImportError:
        return None
    out = io.BytesIO()
    Image.fromarray(value).save(out, "PNG")
    return "png", out.getvalue()


@boundary
def peek(pipeline: Pipeline, n: int = 3) -> list[dict[str, Any]]:
    """Return the first samples in the stored order, as the last stage before the batch gives them.

    Args:
        pipeline: A pipeline with or without ``.batch()``. Its shuffle is ignored, so that one shard is enough. From a mix,
            the first samples of each source come in turn.
        n: Number of samples, in [1, 10000]; fewer are returned if there are fewer.

    Returns:
        Dicts of values, with ``__key__``, ``__shard__`` and ``__position__``. A notebook shows the list as a grid of pictures.

    Raises:
        ConfigError: An argument is out of bounds, or ``Loader`` refuses the pipeline.
        StoreError, DataError: The data cannot be read, as for a ``Loader``.

    Cost: the listing, and the beginning of the shards that hold the samples, in parts of 256 KiB.
    """
    check_rereadable(pipeline, "peek")
    check_whole("n", n, 1, PEEK_MAX)
    found = [_first(leaf, n) for leaf in pipeline.flat().leaves[:n]]
    return Samples([samples[row] for row in range(n) for samples in found if row < len(samples)][:n])


def _first(pipeline: Pipeline, n: int) -> list[dict[str, Any]]:
    left_out = Shuffle | Evaluate | TokenBlocks | Batch | BatchBySize
    stages = [stage for stage in pipeline.stages if not isinstance(stage, left_out)]
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
    """The fields of a sample as a single field, so that samples may have different fields."""
    return {_FIELDS: {name: _copied(value) for name, value in sample.items() if name not in RESERVED_FIELDS}}


def _copied(value: Any) -> Any:
    """`value`, copied if it is a slice of a larger buffer."""
    if not isinstance(value, memoryview):
        return value
    return np.array(value) if is_typed(value) else bytes(value)


def describe(batch: Any) -> str:
    """Describe the fields of a batch or a sample: dtypes, shapes and bytes. ``print(ps.describe(batch))``.

    Args:
        batch: A batch of a ``Loader``, or a sample of ``peek`` or a ``Dataset``. Arrays may be tensors of any framework. The
            result of ``collate=`` is described by its type.

    Returns:
        A line for each field; the fields that the loader adds come last.
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
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a ragged column: data and offsets
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
    """The device of a tensor, unless it is the CPU."""
    device = str(getattr(value, "device", "cpu"))
    return "" if device == "cpu" else f" on {device}"


@boundary
def read_column(pipeline: Pipeline, name: str) -> list[Any]:
    """Return one member of all samples, in stored order: text as ``str``, numbers as the format stores them, None for nulls.

    Args:
        pipeline: Pipeline over one source, which is read; its stages are ignored.
        name: Name of the member.

    Raises:
        ConfigError: The source is a mix or a pipe, or `name` is not a name.
        StoreError, DataError: The data cannot be read, or the member is neither text nor one number.

    Cost: a pass over the data set, which reads that member only where the format allows it, and the list.
    """
    check_rereadable(pipeline, "read_column")
    source = Pipeline(pipeline.source)
    if len(source.flat().leaves) > 1:
        raise ConfigError(f"read_column({source!r}): a mix has no stored order", hint="read the column of each source")
    with Loader(source.decode(Stored(name, default=None)).batch(1024), lanes=1, rank=0, world_size=1) as loader:
        return [value for batch in loader for value in batch[name]]


@boundary
def balanced_numbers(labels: Iterable[Hashable], *, weights: Mapping[Any, float] | None = None) -> list[int]:
    """Return numbers of samples for ``Pipeline.pick``, the same number for every label, or in proportion to weights.

    Every sample of a label with a weight occurs at least once, and samples of rare labels as often as necessary: how often
    the samples of one label occur differs by at most one.

    Args:
        labels: The label of each sample, in stored order, e.g. from ``read_column``.
        weights: Weight of each label, on any positive scale; others have none, and are left out. None: all the same.

    Raises:
        ConfigError: No sample has a label with a weight above 0.
    """
    found: dict[Any, list[int]] = {}
    for number, label in enumerate(labels):
        found.setdefault(label, []).append(number)
    shares = {label: 1.0 if weights is None else weights.get(label, 0.0) for label in found}
    scale = max((len(found[label]) / share for label, share in shares.items() if share > 0), default=0)
    if not scale:
        raise ConfigError(f"balanced_numbers(weights={weights!r}): no sample has a label with a weight")
    picked = [np.resize(found[label], round(share * scale)) for label, share in shares.items() if share > 0]
    numbers: list[int] = np.concatenate(picked).tolist()
    return numbers
