"""One member of all samples: ``read_column`` reads it, and ``balanced_numbers`` chooses samples by it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import ConfigError
from penstock.loader.loader import Loader
from penstock.pipeline import Pipeline, Stored, check_rereadable
from penstock.system.tracebacks import boundary

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping


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
    if not isinstance(pipeline, Pipeline):
        raise ConfigError(f"read_column({pipeline!r}) must be given a pipeline", hint="ps.shards(url)")
    check_rereadable(pipeline, "read_column")
    source = Pipeline(pipeline.source)
    if len(source.flat().leaves) > 1:
        raise ConfigError(f"read_column({source!r}): a mix has no stored order", hint="read the column of each source")
    with Loader(source.decode(Stored(name, default=None)).batch(1024), lanes=1, rank=0, world_size=1) as loader:
        return [value for batch in loader for value in batch[name]]


@boundary
def balanced_numbers(labels: Iterable[Hashable], *, weights: Mapping[Any, float] | None = None) -> list[int]:
    """Return numbers of samples of which every label has as many, or as many as its weight says, for ``Pipeline.pick``.

    Every sample of a label with a weight occurs at least once, and those of rare labels as often as it takes: the numbers
    of times that samples of one label occur differ by at most one.

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
