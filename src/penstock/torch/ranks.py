"""Which part of the data is this process's, as ``torch.distributed`` says."""

from __future__ import annotations

import torch.distributed


def rank_and_world_size() -> tuple[int, int] | None:
    """(rank, world size) of the default process group, or None where there is none yet."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return torch.distributed.get_rank(), torch.distributed.get_world_size()
