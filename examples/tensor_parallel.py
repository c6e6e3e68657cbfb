"""Tensor parallelism: the ranks that share one model replica need the same batches, so a process's own rank is the wrong one.

Run it as `torchrun --nproc-per-node 4 tensor_parallel.py s3://bucket/digits/train/`: pairs of processes hold the halves of one
network, and each pair has its part of the data. Shards hold `NAME.png` (8 x 8, grey) and `NAME.cls`, as `digits.py`
writes them. Needs: penstock's extras `torch` and `image`
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import penstock as ps

EPOCHS = 2


def average_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Over the replicas, each rank for the part of the network that it holds."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            dist.all_reduce(gradient, group=group)
            gradient /= dist.get_world_size(group)


def main() -> None:
    dist.init_process_group("gloo")
    halves = 2 if dist.get_world_size() % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (dist.get_world_size() // halves, halves), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    parallelize_module(model, mesh["tp"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline = (
        ps.shards(sys.argv[1])
        .shuffle(window=1024, seed=0)
        .decode(ps.Image("png", mode="L"), ps.Integer("cls"))
        .batch(16, drop_last=True)
    )
    # mesh["dp"] says which part of the data is this replica's; agree lets ranks end an epoch together without an index
    with ps.Loader(pipeline, mesh=mesh["dp"], agree=ps.torch.agree) as loader:
        for epoch in loader.epochs(EPOCHS):
            for batch in ps.torch.Tensors(loader):
                loss = nn.functional.cross_entropy(model(batch["png"].float() / 255), batch["cls"])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                average_gradients(model, mesh.get_group("dp"))
                optimizer.step()
            place = f"replica {mesh['dp'].get_local_rank()} part {mesh['tp'].get_local_rank()}"
            print(f"{place} epoch {epoch} last keys {batch['__key__'][:3]} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
