"""Which part of the data is this process's, and what ranks must agree on, by ``torch.distributed``."""

from __future__ import annotations

import torch
import torch.distributed


def rank_and_world_size() -> tuple[int, int] | None:
    """(rank, world size) of the default process group, or None where there is none yet."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def agree(n: int) -> int:
    """The smallest `n` over all ranks: what ``Loader(agree=ps.torch.agree)`` asks before each batch.

    Every rank of the default process group must call it equally often. Without a group it is `n`.

    Cost: one all-reduce of 8 bytes; with NCCL it goes through the current CUDA device.
    """
    if rank_and_world_size() is None:
        return n
    device = torch.device("cuda") if torch.distributed.get_backend() == "nccl" else torch.device("cpu")
    value = torch.tensor([n], dtype=torch.int64, device=device)
    torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MIN)
    return int(value.item())
