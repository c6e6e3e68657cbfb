"""What each process of ``test_torchrun.py`` does: read its part of the data, and write down what it got.

``torchrun torchrun_scenario.py OUT JOB...``: a job is ``DATA,TENSOR_PARALLEL,DOOR``; DOOR is ``loader``, ``dataset`` (in this
process) or ``workers`` (a DataLoader with two). ``OUT/RANK.json`` has the epochs' batches of each job, each a list of numbers.
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
    out, *jobs = sys.argv[1:]
    kept: dict[str, Any] = {"agree": ps.torch.agree, "share": ps.torch.share, "lanes": 4, "threads": 1}
    made = []
    for data, tensor_parallel, door in (job.split(",") for job in jobs):
        pipeline = ps.shards(data).shuffle(window=16, seed=3).decode(ps.Integer("cls")).batch(3)
        # A data set is made before there is a group: ranks are read when an iteration begins.
        dataset = None if door == "loader" else ps.torch.IterableDataset(pipeline, **kept)
        made.append((pipeline, dataset, int(tensor_parallel), 2 if door == "workers" else 0))
    dist.init_process_group("gloo")
    found = []
    for pipeline, dataset, tensor_parallel, workers in made:
        epochs = []
        if dataset is None:
            shape = (dist.get_world_size() // tensor_parallel, tensor_parallel)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
            with ps.Loader(pipeline, mesh=mesh["dp"], **kept) as loader:
                for _ in loader.epochs(EPOCHS):
                    epochs.append([valid(batch) for batch in loader])
        else:
            batches = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=workers)
            for _ in range(EPOCHS):
                epochs.append([valid(batch) for batch in batches])
            dataset.close()
        found.append(epochs)
    (Path(out) / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    # Not through the interpreter's end: gloo's threads drop the last work's tensors there, and torch aborts, one time in
    # twenty ("terminate called without an active exception"; pytorch/pytorch#179291).
    os._exit(0)


if __name__ == "__main__":
    main()
