"""What a checkpoint offers and what a restore asks of it: items by name, and the memory on this rank that they land in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from penstock.errors import CheckpointError

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
