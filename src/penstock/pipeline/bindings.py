"""Functions that lower layers call and upper layers implement; ``penstock/__init__.py`` assigns them.

``Pipeline.open`` opens a data set and a join may read another pipeline, but a layer never imports one that lies above it.
Python runs ``penstock/__init__.py`` before any other module of the package, so both functions are always assigned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

open_dataset: Callable[..., Any]
"""Opens the data set of a pipeline; takes the arguments of ``Pipeline.open`` and returns a ``penstock.Dataset``."""

iter_batches: Callable[[Any], Iterator[dict[str, Any]]]
"""Iterates the batches of a pipeline that ends with ``.batch()``, all of them on this rank, once."""
