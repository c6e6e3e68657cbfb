"""Batches as tensors, on the same memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

import numpy as np
import torch

from penstock.errors import ConfigError
from penstock.tracebacks import boundary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_TENSOR_KINDS = "biufc"  # strings, dates and objects have no tensor


@runtime_checkable
class Stateful(Protocol):
    """What can save its place: ``Loader`` here, and in torchdata and Lightning whatever has these two."""

    def state_dict(self) -> dict[str, Any]:
        """The place."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there."""


def as_tensors(batch: Any) -> Any:
    """A batch with its arrays as tensors that share their memory; lists (text, bytes, keys) stay lists.

    Args:
        batch: As a ``Loader`` gives it: a dict, in which a ragged column is a pair of data and offsets, or what the
            pipeline's ``collate`` made.

    Returns:
        The same dict (or tuple), with a ``torch.Tensor`` of the array's dtype and shape, on the CPU, for each array of
        numbers.

    Cost: no copy; some microseconds per field.
    """
    return converted(batch, _tensor)


def converted(value: Any, fn: Callable[[Any], Any]) -> Any:
    """`value` with `fn` applied to everything in it that is neither a dict nor a tuple."""
    if isinstance(value, Mapping):
        return {name: converted(each, fn) for name, each in value.items()}
    if isinstance(value, tuple):
        parts = [converted(each, fn) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)  # named tuples keep their names
    return fn(value)


def _tensor(value: Any) -> Any:
    is_numbers = isinstance(value, np.ndarray) and value.dtype.kind in _TENSOR_KINDS
    return torch.from_numpy(value) if is_numbers else value


@boundary
class Tensors:
    """Any iterable of batches, a ``Loader`` at best, as batches of tensors. Each ``iter`` is one of the iterable's.

    It has the length and the state of what it is given, so that a trainer which saves and restores its dataloaders
    (Lightning) does so here.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return _TensorIterator(iter(self.batches))

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]  # TypeError where they do not know, as with any iterable

    def __bool__(self) -> bool:
        return True  # also where the length is not known

    def state_dict(self) -> dict[str, Any]:
        """The loader's.

        Raises:
            ConfigError: what was given has no state.
        """
        return stateful(self.batches).state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken: the loader's; see there.

        Raises:
            ConfigError: what was given has no state.
        """
        stateful(self.batches).load_state_dict(state)


def stateful(batches: object) -> Stateful:
    """`batches`, which can save their place.

    Raises:
        ConfigError: they cannot.
    """
    if not isinstance(batches, Stateful):
        raise ConfigError(f"{type(batches).__name__} has no state_dict()", hint="give it a ps.Loader")
    return batches


@boundary
class _TensorIterator:
    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return as_tensors(next(self._batches))
