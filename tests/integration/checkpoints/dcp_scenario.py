"""What each rank of ``test_dcp.py`` does: ``torchrun dcp_scenario.py URL ENDPOINT ACTION...``.

The model is sharded by FSDP2. ``save=STEP``, ``thread=STEP`` and ``process=STEP`` save a state that depends on the step;
``load=STEP`` loads it into another model and compares all of it; ``fail=STEP`` saves a state of which rank 1's part cannot be
saved. Rank 0 prints ``done ACTION`` after each.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from penstock.torch.checkpoint import HexPrefixes, StorageReader, StorageWriter

dcp: Any = torch.distributed.checkpoint


def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A sharded model after two steps: sizes that no number of ranks divides, and an optimiser with moments."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(37, 101), torch.nn.ReLU(), torch.nn.Linear(101, 5))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(2):
        torch.manual_seed(number)
        model(torch.randn(8, 37)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state_of(step: int) -> dict[str, Any]:
    model, optimizer = trained(step)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer, "step": step, "note": f"step {step}"}


def full(value: Any) -> Any:
    """The whole of a sharded state, the same on all ranks."""
    if isinstance(value, dict):
        return {name: full(each) for name, each in value.items()}
    if isinstance(value, list):
        return [full(each) for each in value]
    return value.full_tensor() if isinstance(value, DTensor) else value


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[name], second[name]) for name in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(equal, first, second))
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else bool(first == second)


def perform(action: str, step: int, url: str, options: dict[str, Any]) -> None:
    state = state_of(step)
    writer = StorageWriter(url, thread_count=2, prefix_strategy=HexPrefixes(length_min=2), **options)
    match action:
        case "save":
            dcp.save(state, storage_writer=writer)
        case "thread" | "process":
            kind = AsyncCheckpointerType.THREAD if action == "thread" else AsyncCheckpointerType.PROCESS
            future = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind)
            future = getattr(future, "upload_completion", future)
            for value in state["model"].values():
                value.to_local().zero_()  # training goes on
            future.result()
        case "load":
            model, optimizer = trained(step + 1000)
            of_model, of_optimizer = get_state_dict(model, optimizer)
            target: dict[str, Any] = {"model": of_model, "optimizer": of_optimizer, "step": 0, "note": ""}
            dcp.load(target, storage_reader=StorageReader(url, **options))
            set_state_dict(model, optimizer, model_state_dict=target["model"], optim_state_dict=target["optimizer"])
            found = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            assert equal(full({**found, "step": target["step"], "note": target["note"]}), full(state))
        case "fail":
            if dist.get_rank() == 1:
                state["of rank 1"] = torch.empty(3, device="meta")
            with pytest.raises(CheckpointException, match="'of rank 1' is a tensor on the meta device"):
                dcp.save(state, storage_writer=writer)


def main() -> None:
    warnings.filterwarnings("ignore")
    url, endpoint_url, *actions = sys.argv[1:]
    dist.init_process_group("gloo")
    options = {"endpoint_url": endpoint_url} if endpoint_url else {}
    for each in actions:
        action, _, step = each.partition("=")
        perform(action, int(step), f"{url}step-{int(step):010d}/", options)
        dist.barrier()
        if dist.get_rank() == 0:
            print("done", each, flush=True)
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may abort the interpreter's end: pytorch/pytorch#179291


if __name__ == "__main__":
    main()
