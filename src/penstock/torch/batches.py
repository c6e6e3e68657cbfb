"""Batches as tensors that share the memory of the arrays."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np
import torch

from penstock.errors import ConfigError
from penstock.loader import Loader
from penstock.system.tracebacks import boundary
from penstock.torch.lightning import calling_loop, is_evaluation, is_limited, trains_on, unrestored_state

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

    A trainer that knows the length does not ask for another batch after the last one, so the loader's epoch does not end,
    although no batch is left. The trainer's next iteration is then the next epoch, and so is the first iteration after
    ``load_state_dict()`` with a state from the end of an epoch. When Lightning validates, tests or predicts, each iteration is
    epoch 0 from its beginning.

    Args:
        batches: An iterable of batches, usually a ``Loader``. Each iteration iterates it once.
    """

    batch_sampler = None
    """Lightning asks for it and for `sampler`, as if this were a ``DataLoader`` without a batch size."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches
        # shared by all `Tensors` of a loader: each call of a trainer may be given new ones
        progress = _Progress()
        self._progress = _progresses.setdefault(batches, progress) if isinstance(batches, Stateful) else progress
        self._use = _LightningUse()

    def __repr__(self) -> str:
        return f"Tensors({self.batches!r})"

    def __iter__(self) -> Iterator[Any]:
        if not self._use.is_ahead:
            self._use.state_before = None
        return _TensorIterator(self.batches, self._progress, self._use)

    def __len__(self) -> int:
        self._restore(calling_loop(sys._getframe(1)))
        return len(self.batches)  # type: ignore[arg-type]  # TypeError if the length is not known, as for any iterable

    def __bool__(self) -> bool:
        return True  # even if the length is not known

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader. If Lightning has taken a batch ahead of its step, it is the state before this batch.

        Raises:
            ConfigError: The iterable has no state.
        """
        if self._use.is_ahead and self._use.state_before is not None:
            return self._use.state_before
        return stateful(self.batches).state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved.

        Raises:
            ConfigError: The iterable has no state.
        """
        stateful(self.batches).load_state_dict(state)
        self._progress.may_be_at_end = True
        self._use.state_before = None

    @property
    def sampler(self) -> _Sampler:
        """An object whose ``set_epoch()`` Lightning calls before each epoch of training, and before each validation."""
        return _Sampler(self)

    def _begin(self, loop: Any) -> None:
        """Note that a loop of Lightning begins an epoch. Which one it is, the loader counts itself."""
        use = self._use
        use.begins_again = is_evaluation(loop)
        if use.begins_again and trains_on(loop, self.batches):
            raise ConfigError(
                "validation would begin the epoch of this loader again, and the trainer also trains on it",
                hint="ps.Loader(pipeline) for each of the two",
            )
        use.goes_on = is_limited(loop)
        if use.is_ahead is None:
            use.is_ahead = use.state_before is not None
        self._restore(loop)

    def _restore(self, loop: Any) -> None:
        """Load the state that a loop of Lightning has read from a checkpoint, if it has not done so itself."""
        state = unrestored_state(loop, self)
        if state is not None and state is not self._use.restored:
            self._use.restored = state
            self.load_state_dict(state)


class _Sampler:
    """The object that Lightning takes for the sampler of a dataloader."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def set_epoch(self, epoch: int) -> None:
        self._tensors._begin(calling_loop(sys._getframe(1)))


@dataclass(slots=True)
class _LightningUse:
    """The way in which Lightning uses one ``Tensors``.

    Attributes:
        begins_again: Whether the next iteration is epoch 0 from its beginning.
        goes_on: Whether an iteration goes on with the next epoch: Lightning ends its epochs by ``limit_train_batches``.
        is_ahead: Whether Lightning takes each batch one step ahead, as it does if it does not know the length; the first one
            before it says that an epoch begins. None: it has not said so yet.
        state_before: State of the loader before its last batch, if that may have been taken ahead.
        restored: The state that was loaded in Lightning's place.
    """

    begins_again: bool = False
    goes_on: bool = False
    is_ahead: bool | None = None
    state_before: dict[str, Any] | None = None
    restored: dict[str, Any] | None = None


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
    """The progress of the ``Tensors`` of one loader.

    Attributes:
        may_be_at_end: Whether the current epoch has begun and nobody has seen its end, so that nothing may be left of it.
    """

    may_be_at_end: bool = False


_progresses: WeakKeyDictionary[object, _Progress] = WeakKeyDictionary()


@boundary
class _TensorIterator:
    def __init__(self, batches: Iterable[Any], progress: _Progress, use: _LightningUse) -> None:
        self._source = batches
        self._batches = iter(batches)
        self._progress = progress
        self._use = use
        self._is_first = True

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        use, source = self._use, self._source
        if isinstance(source, Loader):
            if self._is_first:
                if use.begins_again:
                    source.restart(0)
                elif use.is_ahead and use.state_before is not None:  # no step was made on the last batch
                    source.load_state_dict(use.state_before)
                self._batches = iter(source)  # again, as a state may have been loaded
            may_be_ahead = use.is_ahead or (use.is_ahead is None and self._is_first)
            use.state_before = source.state_dict() if may_be_ahead else None
        batch = next(self._batches, _END)
        goes_on = use.goes_on or (self._is_first and self._progress.may_be_at_end)
        if batch is _END and goes_on and isinstance(source, Stateful):
            self._batches = iter(source)  # the next epoch: there was nothing left of the current one
            batch = next(self._batches, _END)
        self._is_first = False
        self._progress.may_be_at_end = batch is not _END
        if batch is _END:
            use.state_before = None  # the current state is the one after the last step
            raise StopIteration
        return as_tensors(batch)


_END = object()
