"""Two ranks that do not agree on what they save: ``torchrun disagreeing_scenario.py RUN``. Each prints ``agreed``."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist

import penstock as ps
from penstock.errors import ConfigError


def failure(checkpoint: Any, url: str, *, step: Any, wait: bool) -> ConfigError:
    """The error of a save, whenever it is raised."""
    try:
        checkpoint.save(url, step=step, wait=wait)
        checkpoint.wait()
    except ConfigError as error:
        return error
    raise AssertionError("the save did not fail")


def main() -> None:
    url = sys.argv[1]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.Linear(3, 3)
    checkpoint = ps.torch.Checkpoint(model=model, rng=False)
    other = ps.torch.Checkpoint(model=torch.nn.Linear(3, 3 + rank, bias=bool(rank)))
    on_meta = ps.torch.Checkpoint(model=torch.nn.Linear(2, 2, device="meta" if rank else "cpu"))
    for wait in (True, False):
        assert "different steps" in str(failure(checkpoint, url, step=10 + rank, wait=wait))
        assert "step=" in str(failure(checkpoint, url, step=-1 if rank else 1, wait=wait))
        assert "different parameters" in str(failure(other, url, step=1, wait=wait))
        error = failure(on_meta, url, step=1, wait=wait)
        assert "meta" in str(error)
        assert rank or "This happened on rank 1." in error.__notes__
    assert checkpoint.latest(url) is None
    with torch.no_grad():
        model.weight.fill_(1)
        model.bias.fill_(1)
    checkpoint.save(url, step=2, wait=False)
    for _ in range(20):  # collectives of the training while those of the save run
        total = torch.ones(1000)
        dist.all_reduce(total)
        assert total.eq(2).all()
    checkpoint.wait()
    assert checkpoint.restore(url) == 2
    print("agreed", flush=True)
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may abort a process that ends by itself (pytorch/pytorch#179291)


if __name__ == "__main__":
    main()
