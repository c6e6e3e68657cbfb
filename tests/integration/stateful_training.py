"""A small training on torchdata's ``StatefulDataLoader``, on any number of ranks, whole or resumed.

``python stateful_training.py FOLDER WORKERS`` trains from the beginning, and each rank saves a checkpoint after each step and
after each epoch; with ``CHECKPOINT...``, it resumes from each of these. For each training, it appends a line of JSON to
``FOLDER/RANK.jsonl``.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchdata.stateful_dataloader import StatefulDataLoader

import penstock as ps

EPOCHS = 3


def train(folder: Path, workers_count: int, checkpoint: str | None) -> list[Any]:
    """Train, and return the keys and the loss of each step."""
    rank = dist.get_rank()
    torch.manual_seed(7)
    layer = torch.nn.Linear(1, 4)
    model = torch.nn.parallel.DistributedDataParallel(layer)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    pipeline = ps.shards(f"{folder}/data/").shuffle(window=16, seed=3).decode(ps.Integer("cls")).batch(8)
    dataset = ps.torch.IterableDataset(pipeline, threads=1)
    batches = StatefulDataLoader(dataset, batch_size=None, num_workers=workers_count)
    first_epoch = done = 0
    steps = []

    def save(name: str, epoch: int) -> None:
        state = {"layer": layer.state_dict(), "optimizer": optimizer.state_dict(), "batches": batches.state_dict()}
        torch.save({**state, "epoch": epoch, "done": done}, folder / f"{name}-{rank}.pt")

    if checkpoint is not None:
        state = torch.load(folder / f"{checkpoint}-{rank}.pt", weights_only=False)
        layer.load_state_dict(state["layer"])
        optimizer.load_state_dict(state["optimizer"])
        batches.load_state_dict(state["batches"])
        first_epoch, done = state["epoch"], state["done"]
    for epoch in range(first_epoch, EPOCHS):
        for batch in batches:
            loss = (model(batch["cls"].float().unsqueeze(1) / 50) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
            steps.append([batch["__key__"], loss.item()])
            if checkpoint is None:
                save(f"step{done}", epoch)
        if checkpoint is None:
            save(f"epoch{epoch}", epoch + 1)
    dataset.close()
    return steps


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of fork, and what torchdata calls
    dist.init_process_group("gloo")
    folder, workers_count = Path(sys.argv[1]), int(sys.argv[2])
    with (folder / f"{dist.get_rank()}.jsonl").open("a") as file:
        for checkpoint in sys.argv[3:] or [None]:
            file.write(json.dumps(train(folder, workers_count, checkpoint)) + "\n")
    dist.destroy_process_group()
