"""The items of a checkpoint by name, those that a restore requests, and the memory on this rank that they land in.

Small objects are tensors as well (``encoded``, ``decoded``). They are written by ``torch.save`` and read with
``weights_only=True``, so that reading a checkpoint runs no code from it.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from penstock.errors import CheckpointError, ConfigError, DataError
from penstock.torch.checkpoint.archive import load_guarded

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_NAMED_MAX = 3


@dataclass(frozen=True, slots=True)
class ReadTarget:
    """An item that is read.

    Attributes:
        layout: A tensor of the item's shape, sharded as this rank needs it; its values are not used.
        memory: Tensor on the CPU for the values of this rank's shard.
    """

    layout: torch.Tensor
    memory: torch.Tensor


class SavedItems:
    """The items of a checkpoint, by name.

    Args:
        metadata: ``Metadata.state_dict_metadata`` of a DCP checkpoint.
        what: Name of the checkpoint for messages: its URL.
    """

    def __init__(self, metadata: Mapping[str, Any], what: str) -> None:
        self._metadata = metadata
        self.what = what

    def below(self, prefix: str) -> list[str]:
        """Return the names that begin with `prefix`, in alphabetical order."""
        return sorted(name for name in self._metadata if name.startswith(prefix))

    def __contains__(self, name: str) -> bool:
        return name in self._metadata

    def tensor(self, name: str) -> TensorStorageMetadata:
        """Return shape and dtype of an item.

        Raises:
            CheckpointError: There is no such tensor.
        """
        found = self._metadata.get(name)
        if not isinstance(found, TensorStorageMetadata):
            raise CheckpointError(
                f"the checkpoint has no tensor {name!r}",
                url=self.what,
                hint="it was not written by ps.torch.Checkpoint",
            )
        return found

    def record(self, name: str) -> ReadTarget:
        """Return a target for a record (``records.encoded``)."""
        memory = torch.empty(self.tensor(name).size, dtype=torch.uint8)
        return ReadTarget(memory, memory)

    def target(self, name: str, layout: torch.Tensor) -> ReadTarget:
        """Return a target for a tensor, with the dtype that was saved."""
        found = self.tensor(name)
        return ReadTarget(layout, torch.empty(local(layout).shape, dtype=found.properties.dtype))


def local(value: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor."""
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


def listed(names: Iterable[str]) -> str:
    """Return the first few names, and how many more there are."""
    every = list(names)
    more = f" and {len(every) - _NAMED_MAX} more" if len(every) > _NAMED_MAX else ""
    return ", ".join(every[:_NAMED_MAX]) + more


def encoded(value: Any, what: str) -> torch.Tensor:
    """uint8[n] that ``decoded`` makes equal to `value`.

    Args:
        value: Numbers, strings, None, tensors, and lists, tuples, dicts of them.
        what: Description of the value, for the message.

    Raises:
        ConfigError: The value holds an object of another class, which could not be read again.
    """
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except (pickle.PicklingError, pickle.UnpicklingError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{what} holds an object that cannot be read from a checkpoint: {_first_line(error)}",
            hint="use numbers, strings, lists, dicts and tensors; torch.serialization.add_safe_globals allows other classes",
        ) from None
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def decoded(data: torch.Tensor, what: str) -> Any:
    """Return the value that ``encoded`` was given.

    Raises:
        DataError: It is damaged, or holds a class that ``torch.load`` does not allow.
    """
    try:
        return load_guarded(data.numpy().tobytes())
    except Exception as error:
        raise DataError(f"{what} in the checkpoint cannot be read: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
