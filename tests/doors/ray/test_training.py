"""The same training under Ray Train, killed and resumed."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train
import torch
from ray.cluster_utils import Cluster
from ray.train.torch import TorchTrainer, prepare_model

import penstock as ps
from loading import index_beside, write_counted

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's advice
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not find this module


def train(settings: dict[str, Any]) -> None:
    """Train three epochs, and after some steps save a checkpoint and die; write down the keys and the loss of each step."""
    folder, name = settings["folder"], settings["name"]
    torch.manual_seed(7)
    model = prepare_model(torch.nn.Linear(1, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    made = ps.shards(f"{folder}/data/").shuffle(window=16, seed=3).decode(ps.Integer("cls")).batch(8)
    rank = ray.train.get_context().get_world_rank()
    workers = ps.ray.Workers(count=1, cpus=0.5) if settings["on_cluster"] else None
    with ps.Loader(made, workers=workers) as loader, Path(f"{folder}/{name}-{rank}.jsonl").open("a") as steps:
        batches = ps.torch.Tensors(loader)
        done = 0
        if (checkpoint := ray.train.get_checkpoint()) is not None:
            with checkpoint.as_directory() as directory:
                saved = torch.load(Path(directory) / "state.pt")
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            batches.load_state_dict(saved["loader"])
            done = saved["done"]
        for _ in loader.epochs(3):
            for batch in batches:
                loss = (model(batch["cls"].float().unsqueeze(1) / 50) - 1).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                done += 1
                print(json.dumps([batch["__key__"], loss.item()]), file=steps, flush=True)
                if done not in settings["dies_at"]:
                    continue
                with tempfile.TemporaryDirectory() as directory:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": done}
                    torch.save({**state, "loader": batches.state_dict()}, Path(directory) / "state.pt")
                    kept = ray.train.Checkpoint.from_directory(directory) if rank == 0 else None
                    ray.train.report({"loss": loss.item()}, checkpoint=kept)
                    ray.train.get_all_reported_checkpoints()  # waits until they are stored
                os._exit(1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("workers_count", [1, 2])
def test_a_killed_run_is_the_run_that_was_not_interrupted(cluster: Cluster, tmp_path: Path, workers_count: int) -> None:
    """Workers that die inside and at the end of an epoch are replaced, and train on the same batches with the same losses.

    If two are killed, each has its samples decoded by a worker on the cluster.
    """
    write_counted(tmp_path / "data", (30, 4, 40, 1, 26))
    index_beside(tmp_path / "data")
    batches_per_epoch = {1: 13, 2: 7}[workers_count]
    for name, dies_at in {"whole": [], "killed": [3, batches_per_epoch]}.items():
        TorchTrainer(
            train,
            train_loop_config={
                "folder": str(tmp_path),
                "name": name,
                "dies_at": dies_at,
                "on_cluster": bool(dies_at) and workers_count == 2,
            },
            scaling_config=ray.train.ScalingConfig(num_workers=workers_count),
            run_config=ray.train.RunConfig(
                name=name,
                storage_path=f"{tmp_path}/storage",
                failure_config=ray.train.FailureConfig(max_failures=len(dies_at)),
            ),
        ).fit()
    for rank in range(workers_count):
        whole, killed = ((tmp_path / f"{name}-{rank}.jsonl").read_text() for name in ("whole", "killed"))
        assert killed == whole
        assert len(whole.splitlines()) == 3 * batches_per_epoch
