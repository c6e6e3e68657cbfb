"""A training program whose runs ``test_training.py`` kills and starts again.

``python training_scenario.py DATA RUN OUT STEPS EVERY KIND``, also by torchrun. It trains on the shards below ``DATA``, saves
below ``RUN`` every ``EVERY`` steps, restores the newest checkpoint when it starts, and ends after ``STEPS`` steps. ``KIND`` is
``plain``, ``ddp`` or ``fsdp``. Each rank appends lines of JSON to ``OUT/RANK.jsonl``: its process ID and what it restored, then
the loss and the keys of each step, digests of what it saves, and at the end the files that it opened for writing.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import penstock as ps

WIDTH = 24
written: list[str] = []


def note_writes(event: str, arguments: tuple[Any, ...]) -> None:
    """Remember which files are opened for writing."""
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        written.append(os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes) else str(arguments[0]))


def model_of(kind: str, *, width: int = WIDTH) -> torch.nn.Module:
    """The network, with the same weights on every rank; dropout makes its losses depend on the random generator."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, width),
        torch.nn.Dropout(0.4),
        torch.nn.Tanh(),
        torch.nn.Linear(width, width + 1),
        torch.nn.BatchNorm1d(width + 1),
        torch.nn.Linear(width + 1, 1),
    )
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp":
        for layer in (model[0], model[3]):
            fully_shard(layer)
        fully_shard(model)
    return model


def features(batch: dict[str, Any]) -> torch.Tensor:
    """float32[B, 4] that follows from the samples, Python's and NumPy's random numbers."""
    numbers = torch.from_numpy(np.asarray(batch["cls"])).float()[:, None]
    noise = random.random() + np.random.rand()
    return torch.sin(numbers * torch.tensor([[1.0, 0.7, 0.3, 0.1]])) + 0.01 * noise


def whole(value: Any) -> torch.Tensor:
    """All of a tensor, on every rank."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def digest(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, loader: ps.Loader
) -> dict[str, str]:
    """Digests of everything that a checkpoint has to restore."""
    weights, buffers, states = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
    for value in model.parameters():
        weights.update(whole(value.detach()).numpy().tobytes())
    for value in model.buffers():  # each rank has its own
        buffers.update(value.numpy().tobytes())
    for entries in optimizer.state_dict()["state"].values():
        for _, value in sorted(entries.items()):
            states.update(whole(value).numpy().tobytes())
    rng = hashlib.sha256(repr((random.getstate(), np.random.get_state()[1].tolist())).encode())  # type: ignore[index]
    rng.update(torch.get_rng_state().numpy().tobytes())
    return {
        "weights": weights.hexdigest(),
        "buffers": buffers.hexdigest(),
        "optimizer": states.hexdigest() + repr(optimizer.state_dict()["param_groups"]),
        "scheduler": repr(sorted(scheduler.state_dict().items(), key=str)),
        "rng": rng.hexdigest(),
        "loader": json.dumps(loader.state_dict()),
    }


def main() -> None:
    data, run, out, steps, every, kind = sys.argv[1:7]
    rank = int(os.environ.get("RANK", "0"))
    if kind != "plain":
        dist.init_process_group("gloo")
    sys.addaudithook(note_writes)
    torch.set_num_threads(1)
    model = model_of(kind)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(100 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.7)
    pipeline = ps.shards(data).shuffle(window=16, seed=3).decode(ps.Integer("cls")).batch(3, drop_last=True)
    with (
        (Path(out) / f"{rank}.jsonl").open("a", buffering=1) as log,
        ps.Loader(pipeline, lanes=4, threads=1, agree=ps.torch.agree) as loader,
        ps.torch.Checkpoint(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader) as checkpoint,
    ):

        def note(**values: Any) -> None:
            log.write(json.dumps(values) + "\n")

        step = checkpoint.restore(run) or 0
        note(pid=os.getpid(), step=step, digest=digest(model, optimizer, scheduler, loader))
        while step < int(steps):
            for batch in loader:
                loss = (model(features(batch)) - 1).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                step += 1
                note(step=step, epoch=loader.epoch, loss=loss.item(), keys=batch["__key__"])
                if step % int(every) == 0:
                    note(saved=step, digest=digest(model, optimizer, scheduler, loader))
                    checkpoint.save(run, step=step, wait=False, keep_last=3)
                if step == int(steps):
                    break
        checkpoint.wait()
        note(end=digest(model, optimizer, scheduler, loader), latest=checkpoint.latest(run), written=written)
    if kind != "plain":
        dist.destroy_process_group()
    # Not through the interpreter's end: gloo's threads drop the last work's tensors there, and torch aborts, one time in
    # twenty ("terminate called without an active exception"; pytorch/pytorch#179291).
    os._exit(0)


if __name__ == "__main__":
    main()
