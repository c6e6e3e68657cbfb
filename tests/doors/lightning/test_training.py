"""The same training, resumed: Lightning's ``Trainer`` on a loader."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import penstock as ps
from loading import index_beside, pipeline, write_counted
from ranks import run_ranks

SCRIPT = Path(__file__).with_name("training.py")

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers, loggers and checkpoints


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks_count", [1, 2])
def test_a_resumed_run_is_the_run_that_was_not_interrupted(tmp_path: Path, ranks_count: int) -> None:
    """From checkpoints inside and at the end of epochs, another process sees the same samples, with the same losses."""
    write_counted(tmp_path / "data", (30, 4, 40, 1, 26))
    write_counted(tmp_path / "val", (20, 14))
    for folder in ("data", "val"):
        index_beside(tmp_path / folder)
    last = {1: 13, 2: 7}[ranks_count]  # the last batch of an epoch
    run_ranks(ranks_count, SCRIPT, str(tmp_path))
    run_ranks(ranks_count, SCRIPT, str(tmp_path), "step=3", f"step={last}", "epoch=0")
    for rank in range(ranks_count):
        runs = [json.loads(line) for line in (tmp_path / f"{rank}.jsonl").read_text().splitlines()]
        whole = {run["variant"]: run for run in runs if run["checkpoint"] is None}
        for run in runs:
            where = f"rank {rank}, {run['variant']}, {run['checkpoint']}"
            if "streamed" in run["variant"] and ranks_count > 1 and "step" in str(run["checkpoint"]):
                hint = "run `penstock index`" if rank else "another rank failed"  # Lightning saves the state of rank 0
                assert hint in run["error"], where
                continue
            every, done = whole[run["variant"]], run["resumed_at"]
            assert run["steps"] == every["steps"][done:], where
            assert run["validations"] == [each for each in every["validations"] if each[0] > done], where
    assert len(whole["without validation"]["steps"]) == 3 * last
    assert [len(keys) for _, keys, _ in whole["validated after each epoch"]["validations"]] == [34 // ranks_count] * 3
    assert {tuple(keys) for _, keys, _ in whole["streamed"]["validations"]} == {
        tuple(whole["streamed"]["validations"][0][1])
    }


class Model(lightning.LightningModule):  # type: ignore[misc]
    """A model without a purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch: dict[str, Any]) -> torch.Tensor:
        return (self.weight * batch["cls"].float().mean()) ** 2

    def validation_step(self, batch: dict[str, Any]) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(folder: Path, steps: int, *batches: Any, resumed: bool = False) -> None:
    """Train for some steps, and save a checkpoint in `folder`; or go on from there."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False, max_steps=steps
    )
    trainer.fit(Model(), *batches, ckpt_path=folder / "a.ckpt" if resumed else None)
    trainer.save_checkpoint(folder / "a.ckpt")


@pytest.mark.parametrize("steps_count", [1, 5])
@pytest.mark.parametrize("loader_type", [torch.utils.data.DataLoader, StatefulDataLoader])
def test_what_cannot_be_resumed_is_refused(tmp_path: Path, loader_type: Any, steps_count: int) -> None:
    """A DataLoader whose position Lightning does not restore is an error, and not another order of the samples."""
    write_counted(tmp_path / "data", (30, 10))
    index_beside(tmp_path / "data")
    dataset = ps.torch.IterableDataset(pipeline(tmp_path / "data"))
    fit(tmp_path, steps_count, loader_type(dataset, batch_size=None))
    dataset.close()
    dataset = ps.torch.IterableDataset(pipeline(tmp_path / "data"))
    if loader_type is StatefulDataLoader and steps_count == 1:
        fit(tmp_path, 2, loader_type(dataset, batch_size=None), resumed=True)  # inside an epoch, it is restored
    else:
        with pytest.raises(ps.ConfigError, match=r"does not restore the position.*ps\.torch\.Tensors"):
            fit(tmp_path, 7, loader_type(dataset, batch_size=None), resumed=True)
    dataset.close()


def test_one_loader_does_not_train_and_validate(tmp_path: Path) -> None:
    """Validation would begin the training's epoch again, so it needs a loader of its own."""
    write_counted(tmp_path, (30, 10))
    with ps.Loader(pipeline(tmp_path)) as loader, pytest.raises(ps.ConfigError, match="also trains on it"):
        fit(tmp_path, 7, ps.torch.Tensors(loader), ps.torch.Tensors(loader))
