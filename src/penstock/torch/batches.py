"""Batches as tensors that share the memory of the arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np
import torch

from penstock.errors import ConfigError
from penstock.tracebacks import boundary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_TENSOR_KINDS = "biufc"  # there are no tensors of strings, dates and objects


@runtime_checkable
class Stateful(Protocol):
    """An object that can save its position, such as ``Loader``. torchdata and Lightning look for these two methods."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position."""


def as_tensors(batch: Any) -> Any:
    """Return a batch with tensors in place of its arrays. They share memory; lists (text, bytes, keys) remain lists.

    Args:
        batch: A batch of a ``Loader``: a dict, in which a ragged column is a pair of data and offsets, or the result of the
            pipeline's ``collate``.

    Returns:
        The same dict or tuple with, for each array of numbers, a ``torch.Tensor`` on the CPU of the same dtype and shape.

    Cost: some microseconds per field; nothing is copied.
    """
    return converted(batch, _tensor)


def converted(value: Any, fn: Callable[[Any], Any]) -> Any:
    """Return a copy of `value` with `fn` applied to everything in it that is neither a dict nor a tuple."""
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
    """Iterates batches of tensors.

    It has the length and the state of the iterable, so that a trainer that saves and restores its dataloaders, such as
    Lightning, also saves and restores this one.

    A trainer that knows the length does not ask for another batch after the last one, so the loader's epoch does not end, and
    nothing is left of it. The trainer's next iteration is then the next epoch, and so is the first one after
    ``load_state_dict()`` with a state from the end of an epoch.

    Args:
        batches: An iterable of batches, usually a ``Loader``. Each iteration iterates it once.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches
        self._progress = _progress_of(batches)

    def __iter__(self) -> Iterator[Any]:
        return _TensorIterator(self.batches, self._progress)

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]  # TypeError if the length is not known, as for any iterable

    def __bool__(self) -> bool:
        return True  # even if the length is not known

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader.

        Raises:
            ConfigError: The iterable has no state.
        """
        return stateful(self.batches).state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved.

        Raises:
            ConfigError: The iterable has no state.
        """
        stateful(self.batches).load_state_dict(state)
        self._progress.may_be_at_end = True


def stateful(batches: object) -> Stateful:
    """Return `batches` if it can save its position.

    Raises:
        ConfigError: `batches` cannot save its position.
    """
    if not isinstance(batches, Stateful):
        raise ConfigError(f"{type(batches).__name__} has no state_dict()", hint="pass a ps.Loader")
    return batches


@dataclass(slots=True)
class _Progress:
    """How far the ``Tensors`` of one loader have come.

    Attributes:
        may_be_at_end: Whether the current epoch has begun and nobody has seen its end, so that nothing may be left of it.
    """

    may_be_at_end: bool = False


_progresses: WeakKeyDictionary[object, _Progress] = WeakKeyDictionary()


def _progress_of(batches: object) -> _Progress:
    """Return the progress of a loader, which all its ``Tensors`` share: each call of a trainer may be given new ones."""
    return _progresses.setdefault(batches, _Progress()) if isinstance(batches, Stateful) else _Progress()


@boundary
class _TensorIterator:
    def __init__(self, batches: Iterable[Any], progress: _Progress) -> None:
        self._source = batches
        self._batches = iter(batches)
        self._progress = progress
        self._is_first = True

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches, _END)
        if batch is _END and self._is_first and self._progress.may_be_at_end and isinstance(self._source, Stateful):
            self._batches = iter(self._source)  # the next epoch: there was nothing left of the current one
            batch = next(self._batches, _END)
        self._is_first = False
        self._progress.may_be_at_end = batch is not _END
        if batch is _END:
            raise StopIteration
        return as_tensors(batch)


_END = object()
