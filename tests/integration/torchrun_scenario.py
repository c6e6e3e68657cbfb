"""What each process of ``test_torchrun.py`` does: read its part of the data, and write down what it got.

``torchrun torchrun_scenario.py DATA OUT TENSOR_PARALLEL DOOR``: DOOR is ``loader``, ``dataset`` (in this process) or
``workers`` (a DataLoader with two). The file ``OUT/RANK.json`` has the epochs' batches, each a list of numbers.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.utils.data
from torch.distributed.device_mesh import init_device_mesh

import penstock as ps

EPOCHS = 2


def valid(batch: dict[str, Any]) -> list[int]:
    """The batch's numbers, without padding."""
    rows = batch["cls"].tolist()
    return [row for row, counts in zip(rows, batch.get("__valid__", [True] * len(rows)), strict=True) if counts]


def main() -> None:
    warnings.filterwarnings("ignore", message=".*use of fork.*")
    data, out, tensor_parallel, door = sys.argv[1:]
    pipeline = ps.shards(data).shuffle(window=16, seed=3).decode(ps.Integer("cls")).batch(3)
    kept: dict[str, Any] = {"agree": ps.torch.agree, "share": ps.torch.share, "lanes": 4, "threads": 1}
    dataset = None
    if door != "loader":  # made before there is a group: ranks are read when an iteration begins
        dataset = ps.torch.IterableDataset(pipeline, **kept)
    dist.init_process_group("gloo")
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size() // int(tensor_parallel), int(tensor_parallel)), mesh_dim_names=("dp", "tp")
    )
    epochs = []
    if dataset is None:
        with ps.Loader(pipeline, mesh=mesh["dp"], **kept) as loader:
            for _ in loader.epochs(EPOCHS):
                epochs.append([valid(batch) for batch in loader])
    else:
        workers = 2 if door == "workers" else 0
        batches = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=workers)
        for _ in range(EPOCHS):
            epochs.append([valid(batch) for batch in batches])
        dataset.close()
    (Path(out) / f"{os.environ['RANK']}.json").write_text(json.dumps(epochs))
    dist.destroy_process_group()
    # Not through the interpreter's end: gloo's threads drop the last work's tensors there, and torch aborts, one time in
    # twenty ("terminate called without an active exception"; pytorch/pytorch#179291).
    os._exit(0)


if __name__ == "__main__":
    main()
