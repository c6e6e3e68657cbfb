"""The parts of a training's state, each of which knows how it is saved and restored.

A restore has three phases, and all ranks finish one before the next begins: ``request`` compares the checkpoint with what
is here, ``check`` decodes what was read, and only ``apply`` changes anything. So a checkpoint that does not fit, or that
cannot be read, leaves the training as it was.
"""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from penstock.errors import CheckpointError, ConfigError
from penstock.torch.checkpoint.records import decoded, encoded
from penstock.torch.checkpoint.saved_items import local

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        """Decode what was read.

        Raises:
            CheckpointError: The checkpoint does not fit what is here.
            DataError: A record is damaged.
        """

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

    def apply(self, targets: Mapping[str, ReadTarget]) -> None:
        """Load the state."""
        self._target.load_state_dict(self._state)


class LoaderPart:
    """The place in the data: each rank saves its own state, and another world size takes one that is common to all ranks."""

    def __init__(self, loader: Stateful, *, rank: int, size: int) -> None:
        self._loader = loader
        self._rank = rank
        self._size = size
        self._what = ""
        self._state: Any = None

    def items(self) -> dict[str, torch.Tensor]:
        """Return the state of this rank's loader."""
        return {f"loader.{self._rank}": encoded(self._loader.state_dict(), "the state of loader")}

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

    def apply(self, targets: Mapping[str, ReadTarget]) -> None:
        """Load the state."""
        self._loader.load_state_dict(self._state)


class RandomPart:
    """The states of the random generators of this rank: Python's, NumPy's, and PyTorch's on the CPU and the current GPU."""

    def __init__(self, *, rank: int) -> None:
        self._name = f"rng.{rank}"
        self._state: dict[str, Any] = {}

    def items(self) -> dict[str, torch.Tensor]:
        """Return the states as one record."""
        kind, keys, *rest = np.random.get_state(legacy=True)
        state = {
            "python": random.getstate(),
            "numpy": [str(kind), np.asarray(keys).tolist(), *map(float, rest)],
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state() if _has_cuda() else None,
        }
        return {self._name: encoded(state, "the state of the random generators")}

    def request(self, saved: SavedItems) -> dict[str, ReadTarget]:
        """Request this rank's record; a rank that did not exist when it was saved has none."""
        if not saved.below("rng."):
            raise missing_part("rng", saved)
        if self._name not in saved:
            logger.info("%s has no random states for %s, which keeps its own", saved.what, self._name)
            return {}
        return {self._name: saved.record(self._name)}

    def check(self, targets: Mapping[str, ReadTarget]) -> None:
        """Decode the record."""
        if self._name in targets:
            self._state = decoded(targets[self._name].memory, "the state of the random generators")

    def apply(self, targets: Mapping[str, ReadTarget]) -> None:
        """Set the generators."""
        if not self._state:
            return
        kind, keys, *rest = self._state["numpy"]
        random.setstate(self._state["python"])
        position, has_gauss, gauss = rest
        np.random.set_state((kind, np.array(keys, np.uint32), int(position), int(has_gauss), gauss))
        torch.set_rng_state(self._state["torch"])
        if self._state["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self._state["cuda"])


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


def _has_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch's


def _rank_of(name: str) -> int:
    return int(name.rpartition(".")[2])
