"""The rank of this process, and agreement among ranks, by ``torch.distributed``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

if TYPE_CHECKING:
    from collections.abc import Callable


def rank_and_world_size() -> tuple[int, int] | None:
    """Return (rank, world size) of the default process group, or None if it has not been created."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def agree(n: int) -> int:
    """Return the smallest `n` of all ranks; ``Loader(agree=ps.torch.agree)`` calls it before each batch.

    Every rank of the default process group must call it equally often. Without a group it returns `n`.

    Cost: one all-reduce of 8 bytes; with NCCL it goes through the current CUDA device.
    """
    if rank_and_world_size() is None:
        return n
    value = torch.tensor([n], dtype=torch.int64, device=_device())
    torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MIN)
    return int(value.item())


def share(make: Callable[[], bytes]) -> bytes:
    """Return the result of ``make()`` on rank 0. With ``Loader(share=ps.torch.share)``, one rank lists the data set for all.

    Every rank of the default process group must call it. Without a group it calls ``make()``.

    Args:
        make: The function to call on rank 0.

    Raises:
        Exception: ``make()`` raised it on rank 0; every rank raises it.

    Cost: one broadcast, of about 60 bytes for each shard.
    """
    found = rank_and_world_size()
    if found is None:
        return make()
    box: list[Any] = [None, None]
    if found[0] == 0:
        try:
            box[0] = make()
        except Exception as error:
            box[1] = error
    torch.distributed.broadcast_object_list(box, src=0, device=_device())
    data, failure = box
    if failure is not None:
        raise failure
    assert isinstance(data, bytes)
    return data


def _device() -> torch.device:
    """Return the device of the tensors that the default group's collectives use."""
    return torch.device("cuda" if torch.distributed.get_backend() == "nccl" else "cpu")
