"""Which part of the data is this process's, and what ranks must agree on, by ``torch.distributed``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

if TYPE_CHECKING:
    from collections.abc import Callable


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
    value = torch.tensor([n], dtype=torch.int64, device=_device())
    torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MIN)
    return int(value.item())


def share(make: Callable[[], bytes]) -> bytes:
    """What ``make()`` gives on rank 0: ``Loader(share=ps.torch.share)`` lists a data set once, whatever the number of ranks.

    Every rank of the default process group must call it. Without a group it is ``make()``.

    Raises:
        Exception: what ``make()`` raised on rank 0, on every rank.

    Cost: one broadcast, of 60 bytes or so for each shard.
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
    """Where the default group's collectives find their tensors."""
    return torch.device("cuda" if torch.distributed.get_backend() == "nccl" else "cpu")
