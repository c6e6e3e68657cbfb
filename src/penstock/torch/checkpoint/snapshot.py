"""A copy of the state in memory of the host, which a save in the background reads while training changes the state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.config import check_whole
from penstock.errors import ConfigError
from penstock.text.sizes import format_bytes
from penstock.torch.checkpoint.saved_items import local

if TYPE_CHECKING:
    from collections.abc import Mapping


class SnapshotMemory:
    """Memory for one snapshot, which every save uses again; pinned for what comes from a GPU.

    Args:
        bytes_max: The most bytes that a snapshot may take on this rank; None means no limit.

    Raises:
        ConfigError: `bytes_max` is not a positive number of bytes.
    """

    def __init__(self, *, bytes_max: int | None) -> None:
        if bytes_max is not None:
            check_whole("snapshot_bytes_max", bytes_max, 1)
        self._bytes_max = bytes_max
        self._held: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def take(self, items: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy what this rank holds of `items`, and return the copies by name. The snapshot before is overwritten.

        Raises:
            ConfigError: They take more bytes than the limit; nothing is copied.

        Cost: one copy of the state; memory is allocated at the first call.
        """
        shards = {name: local(value) for name, value in items.items()}
        size_bytes = sum(each.nbytes for each in shards.values())
        if self._bytes_max is not None and size_bytes > self._bytes_max:
            raise ConfigError(
                f"a snapshot takes {format_bytes(size_bytes)}, more than snapshot_bytes_max={self._bytes_max}",
                hint="save(wait=True) needs no snapshot",
            )
        self._held = {name: self._memory(name, shard) for name, shard in shards.items()}
        is_on_gpu = False
        for name, shard in shards.items():
            is_on_gpu = is_on_gpu or shard.is_cuda
            self._held[name].copy_(shard, non_blocking=shard.is_cuda)
        if is_on_gpu:
            torch.cuda.current_stream().synchronize()
        return self._held

    def release(self) -> None:
        """Free the memory."""
        self._held = {}

    def _memory(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        held = self._held.get(name)
        if held is not None and held.shape == shard.shape and held.dtype == shard.dtype:
            return held
        return torch.empty(shard.shape, dtype=shard.dtype, pin_memory=shard.is_cuda)
