"""A training run that may be killed at any moment: started again by the same command, it goes on as if nothing had happened.

    torchrun --nproc-per-node=2 resumable_training.py s3://bucket/train/ s3://bucket/run/ --steps 1000

Expects shards with members `NAME.png` and `NAME.cls` below the first URL, as `digits.py` writes them, with an index (`penstock
index URL`) if the number of processes is to change. Checkpoints lie below the second one: the model sharded by FSDP2, the
optimizer, the schedule, the random generators and the place in the data. They are uploaded behind the training loop.
Needs: penstock's extras `torch` and `image`
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import penstock as ps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="URL of the shards")
    parser.add_argument("run", help="URL for the checkpoints")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100, help="steps between two checkpoints")
    options = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.manual_seed(0)  # the same weights on every rank
    model = torch.nn.Sequential(
        torch.nn.Flatten(),
        torch.nn.Linear(3 * 8 * 8, 128),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(128, 10),
    ).to(device)
    fully_shard(model)
    torch.manual_seed(1 + dist.get_rank())  # other dropout on every rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)

    pipeline = (
        ps.shards(options.data)
        .shuffle(window=1024, seed=0)
        .decode(ps.Image("png", height=8, width=8), ps.Integer("cls"))
        .batch(16, drop_last=True)
    )
    normalise = ps.torch.Normalize().to(device)
    with ps.Loader(pipeline, agree=ps.torch.agree, share=ps.torch.share) as loader:
        batches = ps.torch.Prefetch(loader, device=device)
        with ps.torch.Checkpoint(model=model, optimizer=optimizer, scheduler=scheduler, loader=batches) as checkpoint:
            step = checkpoint.restore(options.run) or 0
            print(f"rank {dist.get_rank()} begins at step {step}", flush=True)
            while step < options.steps:
                for batch in batches:
                    loss = torch.nn.functional.cross_entropy(model(normalise(batch["png"])), batch["cls"])
                    optimizer.zero_grad()
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    scheduler.step()
                    step += 1
                    if step % options.every == 0 or step == options.steps:
                        checkpoint.save(options.run, step=step, wait=False, keep_last=3)
                        print(f"rank {dist.get_rank()} step {step} loss {loss.item():.6f}", flush=True)
                    if step == options.steps:
                        break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
