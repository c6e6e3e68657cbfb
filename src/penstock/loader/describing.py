"""``describe``: what a batch or a sample holds, a line for each field, to look at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.config import MIB
from penstock.sizes import format_bytes

VALUE_CHARACTERS_MAX = 40


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
