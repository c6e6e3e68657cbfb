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


class Extra:
    """A state that this rank may refuse to take over."""

    def __init__(self, value: int, *, refuses: bool = False) -> None:
        self.value = value
        self._refuses = refuses

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]
        if self._refuses:
            self._refuses = False
            raise ZeroDivisionError


def restore_that_one_rank_refuses(url: str, rank: int) -> None:
    """A restore that fails on rank 1 raises on both, and both stay as they were, and the next one works."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    extra = Extra(1)
    ps.torch.Checkpoint(model=model, optimizer=optimizer, extras={"x": extra}).save(url, step=1)
    with torch.no_grad():
        model.weight.zero_()
    optimizer.param_groups[0]["lr"], extra = 5.0, Extra(2, refuses=rank == 1)
    checkpoint = ps.torch.Checkpoint(model=model, optimizer=optimizer, extras={"x": extra})
    torch.manual_seed(5)
    before = torch.get_rng_state()
    try:
        checkpoint.restore(url)
    except ZeroDivisionError:
        assert not model.weight.any()
        assert (optimizer.param_groups[0]["lr"], extra.value) == (5.0, 2)
        assert torch.equal(torch.get_rng_state(), before)
    else:
        raise AssertionError("the restore did not fail")
    assert checkpoint.restore(url) == 1
    assert model.weight.any()
    assert (optimizer.param_groups[0]["lr"], extra.value) == (1e-3, 1)


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
    restore_that_one_rank_refuses(f"{url}refused/", rank)
    print("agreed", flush=True)
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may abort a process that ends by itself (pytorch/pytorch#179291)


if __name__ == "__main__":
    main()
