"""The parts of a training's state, each of which knows how it is saved and restored.

A restore has three phases, and all ranks finish one before the next begins: ``request`` compares the checkpoint with the
training's objects, ``check`` decodes the items that were read, and only ``apply`` changes anything. So a checkpoint that does
not fit, or that cannot be read, leaves the training as it was. If an object refuses its state in ``apply``, the functions that
``undo`` returned before restore everything.
"""

from __future__ import annotations

import copy
import logging
import random
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from penstock.errors import CheckpointError, ConfigError, DataError
from penstock.torch.checkpoint.saved_items import decoded, encoded, local

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.torch.batches import Stateful
    from penstock.torch.checkpoint.saved_items import ReadTarget, SavedItems

logger = logging.getLogger("penstock")


class StatePart(Protocol):
    """A part of the state. Names of its items begin with the name of the part."""

    def items(self) -> dict[str, torch.Tensor]:
        """Return what this rank contributes to a checkpoint, by name; nothing is copied."""

    def request(self, saved: SavedItems) -> dict[str, ReadTarget]:
        """Return the items to read.

        Raises:
            CheckpointError: The checkpoint does not fit what is here.
        """

    def check(self, targets: Mapping[str, ReadTarget]) -> None:
        """Decode the items that were read.

        Raises:
            CheckpointError: The checkpoint does not fit what is here.
            DataError: A record is damaged.
        """

    def undo(self) -> Callable[[], None]:
        """Return what puts everything back after ``apply``, which may have failed half-way."""

    def apply(self, targets: Mapping[str, ReadTarget]) -> None:
        """Take the state over."""


class RecordPart:
    """An object with ``state_dict()`` whose state is small and the same on all ranks, such as a scheduler: rank 0 saves it."""

    def __init__(self, name: str, target: Stateful, *, rank: int) -> None:
        self._name = name
        self._target = target
        self._rank = rank
        self._state: Any = None

    def items(self) -> dict[str, torch.Tensor]:
        """Return the state as a record, on rank 0."""
        if self._rank:
            return {}
        return {self._name: encoded(self._target.state_dict(), f"the state of {self._name}")}

    def request(self, saved: SavedItems) -> dict[str, ReadTarget]:
        """Request the record."""
        if self._name not in saved:
            raise missing_part(self._name, saved)
        return {self._name: saved.record(self._name)}

    def check(self, targets: Mapping[str, ReadTarget]) -> None:
        """Decode the record."""
        self._state = decoded(targets[self._name].memory, f"the state of {self._name}")

    def undo(self) -> Callable[[], None]:
        """Keep the state that it has."""
        return undo_of(self._target)

    def apply(self, targets: Mapping[str, ReadTarget]) -> None:
        """Load the state."""
        self._target.load_state_dict(self._state)


class LoaderPart(RecordPart):
    """The place in the data: each rank saves its own state, and another world size takes one that is common to all ranks."""

    def __init__(self, loader: Stateful, *, rank: int, size: int) -> None:
        super().__init__("loader", loader, rank=rank)
        self._size = size
        self._what = ""

    def items(self) -> dict[str, torch.Tensor]:
        """Return the state of this rank's loader."""
        return {f"loader.{self._rank}": encoded(self._target.state_dict(), "the state of loader")}

    def request(self, saved: SavedItems) -> dict[str, ReadTarget]:
        """Request the state of this rank, or those of all ranks if there were more or fewer of them."""
        names = saved.below("loader.")
        self._what = saved.what
        if not names:
            raise missing_part("loader", saved)
        if len(names) == self._size:
            names = [f"loader.{self._rank}"]
        return {name: saved.record(name) for name in names}

    def check(self, targets: Mapping[str, ReadTarget]) -> None:
        """Choose the state to go on with."""
        names = sorted((name for name in targets if name.startswith("loader.")), key=_rank_of)
        states = [decoded(targets[name].memory, f"the state of {name}") for name in names]
        if len(states) > 1 or _rank_of(names[0]) != self._rank:
            self._check_common(states)
        self._state = states[0]

    def _check_common(self, states: list[Any]) -> None:
        first = states[0]
        if isinstance(first, dict) and isinstance(first.get("job"), dict) and "mode" in first:
            cursor = first.get("cursor") or {}
            is_common = "world_size" not in first["job"] and "handed" not in cursor
        else:
            is_common = all(state == first for state in states)
        if not is_common:
            raise CheckpointError(
                f"it was saved by {len(states)} ranks, each with a place of its own in the data, but this job has {self._size}",
                url=self._what,
                hint="with an index (`penstock index`) a job can go on with another number of ranks",
            )


class RandomPart:
    """The states of the random generators of this rank: Python's, NumPy's, and PyTorch's on the CPU and the current GPU."""

    def __init__(self, *, rank: int) -> None:
        self._name = f"rng.{rank}"
        self._state: dict[str, Any] = {}

    def items(self) -> dict[str, torch.Tensor]:
        """Return the states as one record."""
        return {self._name: encoded(_random_states(), "the state of the random generators")}

    def request(self, saved: SavedItems) -> dict[str, ReadTarget]:
        """Request this rank's record; a rank that did not exist when it was saved has none."""
        if not saved.below("rng."):
            raise missing_part("rng", saved)
        if self._name not in saved:
            logger.info("%s has no random states for %s, which keeps its own", saved.what, self._name)
            return {}
        return {self._name: saved.record(self._name)}

    def check(self, targets: Mapping[str, ReadTarget]) -> None:
        """Decode the record, and try it on other generators."""
        if self._name in targets:
            self._state = decoded(targets[self._name].memory, "the state of the random generators")
            try:
                _set_random_states(self._state, random.Random(), np.random.RandomState(), torch.Generator())
            except Exception as error:
                raise DataError(f"the state of the random generators cannot be used: {error}") from None

    def undo(self) -> Callable[[], None]:
        """Keep the states that they have."""
        states = _random_states()
        return lambda: _set_random_states(states)

    def apply(self, targets: Mapping[str, ReadTarget]) -> None:
        """Set the generators."""
        if self._state:
            _set_random_states(self._state)


def _random_states() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [str(kind), np.asarray(keys).tolist(), *map(float, rest)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,  # type: ignore[no-untyped-call]
    }


def _set_random_states(
    states: dict[str, Any],
    python: Any = random,
    numpy: Any = np.random,
    generator: torch.Generator | None = None,
) -> None:
    kind, keys, position, has_gauss, gauss = states["numpy"]
    python.setstate(states["python"])
    numpy.set_state((kind, np.array(keys, np.uint32), int(position), int(has_gauss), gauss))
    (generator or torch.default_generator).set_state(states["torch"])
    if generator is None and states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def undo_of(target: Any) -> Callable[[], None]:
    """Return what gives an object the state that it has now, whatever has been loaded into it meanwhile.

    Args:
        target: An object with ``state_dict()`` and ``load_state_dict()``. An optimizer or a ``DataLoader`` replaces its
            attributes when it loads a state, so those are kept: a state of the one need not be loaded by code that may fail
            again, and the other starts its processes to tell its state.
    """
    if not isinstance(target, torch.optim.Optimizer | torch.utils.data.DataLoader):
        state = copy.deepcopy(target.state_dict())
        return lambda: target.load_state_dict(state)
    changed = [target, *(each for each in vars(target).values() if isinstance(each, torch.optim.Optimizer))]  # wrapped
    kept = [(vars(each), dict(vars(each))) for each in changed]

    def undo() -> None:
        for attributes, before in kept:
            attributes.clear()
            attributes.update(before)

    return undo


def missing_part(name: str, saved: SavedItems) -> CheckpointError:
    """Return the error for a checkpoint that lacks a part that is asked for."""
    argument = "rng=False" if name == "rng" else f"Checkpoint() without {name}="
    return CheckpointError(
        f"the checkpoint has no state of {name}", url=saved.what, hint=f"{argument} restores the other parts"
    )


def check_savable(name: str, value: torch.Tensor) -> None:
    """Refuse tensors that have no values in memory.

    Raises:
        ConfigError: The tensor is on ``meta``, or is sparse or quantized.
    """
    shard = local(value)
    if shard.is_meta:
        raise ConfigError(f"{name} is on the device 'meta' and has no values", hint="model.to_empty(device=...) first")
    if shard.layout is not torch.strided or shard.is_quantized:
        raise ConfigError(f"{name} is sparse or quantized; only dense tensors can be saved", hint=f"{name}.to_dense()")


def _rank_of(name: str) -> int:
    return int(name.rpartition(".")[2])
