"""A training loop that saves its state in one way: ``train_saving.py '{"way": "penstock", "endpoint": ..., ...}'``.

A step is a wait of ``step_s``, as a CPU waits for a GPU. The state is a model and what AdamW keeps for it, ``state_bytes``
together. It prints one line of JSON: how long each save waited for the one before, and how long it stopped the loop then; how
long the loop took, and what was still under way at its end; and how long a copy of the state to memory that was used before
takes, measured as often at the end.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LAYER_WIDTH = 2048


def state_of(state_bytes: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model whose parameters are a third of `state_bytes`, and its optimizer after a step."""
    width = min(LAYER_WIDTH, max(16, int((state_bytes / 12 / 4) ** 0.5)))
    layers = max(1, state_bytes // (12 * width * width))
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    for each in model.parameters():
        each.grad = torch.zeros_like(each)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict | list | tuple):
        return [each for item in (value.values() if isinstance(value, dict) else value) for each in tensors_of(item)]
    return []


class Saving:
    """A way to save: ``save(step)`` stops the loop, ``end()`` waits for what is under way."""

    def __init__(self, job: dict[str, Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.job, self.model, self.optimizer = job, model, optimizer

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def save(self, step: int) -> None:
        """Save nothing."""

    def end(self) -> None:
        """Wait for nothing."""


class Penstock(Saving):
    wait = False

    def __init__(self, job: dict[str, Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(job, model, optimizer)
        import penstock as ps

        self.url = f"s3://{job['bucket']}/{job['way']}/"
        self.checkpoint = ps.torch.Checkpoint(model=model, optimizer=optimizer, endpoint_url=job["endpoint"])

    def save(self, step: int) -> None:
        self.checkpoint.save(self.url, step=step, wait=self.wait)

    def end(self) -> None:
        self.checkpoint.wait()


class PenstockWaiting(Penstock):
    wait = True


class Connector(Saving):
    """``S3Checkpoint`` of the S3 Connector for PyTorch."""

    def __init__(self, job: dict[str, Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(job, model, optimizer)
        from s3torchconnector import S3Checkpoint, S3ClientConfig

        self.checkpoint = S3Checkpoint(
            region="us-east-1", endpoint=job["endpoint"], s3client_config=S3ClientConfig(force_path_style=True)
        )

    def save(self, step: int) -> None:
        with self.checkpoint.writer(f"s3://{self.job['bucket']}/connector/{step:06d}.pt") as file:
            torch.save(self.state(), file)


class Boto3(Saving):
    """``torch.save`` into memory, then ``upload_fileobj``."""

    def __init__(self, job: dict[str, Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(job, model, optimizer)
        import boto3

        self.client = boto3.client("s3", endpoint_url=job["endpoint"], region_name="us-east-1")

    def save(self, step: int) -> None:
        file = io.BytesIO()
        torch.save(self.state(), file)
        file.seek(0)
        self.client.upload_fileobj(file, self.job["bucket"], f"boto3/{step:06d}.pt")


class DiskThenBoto3(Boto3):
    """``torch.save`` to a file of this machine, then ``upload_file``."""

    def save(self, step: int) -> None:
        path = Path(self.job["folder"]) / "state.pt"
        torch.save(self.state(), path)
        self.client.upload_file(str(path), self.job["bucket"], f"disk/{step:06d}.pt")
        path.unlink()


WAYS: dict[str, Callable[..., Saving]] = {
    "none": Saving, "penstock": Penstock, "penstock_wait": PenstockWaiting, "connector": Connector, "boto3": Boto3,
    "disk_boto3": DiskThenBoto3,
}  # fmt: skip


def main() -> None:
    job = json.loads(sys.argv[1])
    os.environ.update(AWS_ACCESS_KEY_ID="id", AWS_SECRET_ACCESS_KEY="secret", AWS_REGION="us-east-1")
    torch.set_num_threads(job["threads"])
    model, optimizer = state_of(job["state_bytes"])
    saving = WAYS[job["way"]](job, model, optimizer)
    tensors = tensors_of(saving.state())
    copies = [each.clone() for each in tensors]
    waits, stalls, copied = [], [], []
    saving.save(0)  # connections, and memory that is used again
    saving.end()
    begin = time.perf_counter()
    for step in range(1, job["steps"] + 1):
        time.sleep(job["step_s"])
        if step % job["every"] == 0:
            start = time.perf_counter()
            saving.end()
            waits.append(time.perf_counter() - start)
            saving.save(step)
            stalls.append(time.perf_counter() - start - waits[-1])
    loop_s = time.perf_counter() - begin
    start = time.perf_counter()
    saving.end()
    end_s = time.perf_counter() - start
    for _ in stalls:
        start = time.perf_counter()
        for target, source in zip(copies, tensors, strict=True):
            target.copy_(source)
        copied.append(time.perf_counter() - start)
    versions = {"torch": torch.__version__}
    answer = {
        "waits_s": waits,
        "stalls_s": stalls,
        "loop_s": loop_s,
        "end_s": end_s,
        "copies_s": copied,
        "versions": versions,
    }
    print(json.dumps({**answer, "state_bytes": sum(each.nbytes for each in tensors)}), flush=True)


if __name__ == "__main__":
    main()
