"""A small training under Lightning's ``Trainer``, on any number of ranks, whole or resumed, in several variants.

``python training.py FOLDER`` trains from the beginning, with a checkpoint after each step and those that ``ModelCheckpoint``
saves by default. ``python training.py FOLDER CHECKPOINT...`` resumes from each of these. For each training, it appends a line
of JSON to ``FOLDER/RANK.jsonl``.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO

import penstock as ps
from penstock.errors import PenstockError

RANK, RANKS_COUNT = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
VARIANTS: dict[str, dict[str, Any]] = {
    "without validation": {"limit_val_batches": 0, "max_epochs": 3},
    "validated after each epoch": {"max_epochs": 3},
    "validated inside epochs": {"max_epochs": 3, "limit_val_batches": 2, "val_check_interval": 5},
    "a part of each epoch": {"max_epochs": 3, "limit_val_batches": 2, "limit_train_batches": 5},
    "by steps": {"max_epochs": -1, "max_steps": 31, "limit_val_batches": 2},
    "by steps without validation": {"max_epochs": -1, "max_steps": 31, "limit_val_batches": 0},
    "whose schedule asks for its length": {"max_epochs": 3, "limit_val_batches": 0},
    "streamed": {"max_epochs": 3, "limit_val_batches": 2},
    "streamed by steps": {"max_epochs": -1, "max_steps": 31, "limit_val_batches": 2},
}


class Model(lightning.LightningModule):
    """A model whose loss depends on the samples and their order; it writes down what it is given."""

    def __init__(self, *, is_scheduled: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 4)
        self.is_scheduled = is_scheduled
        self.resumed_at = 0
        self.steps: list[Any] = []
        self.validations: list[Any] = []
        self.keys: list[str] = []

    def loss(self, batch: dict[str, Any]) -> torch.Tensor:
        """Return the loss of a batch."""
        loss: torch.Tensor = (self.layer(batch["cls"].float().unsqueeze(1) / 50) - 1).square().mean()
        return loss

    def training_step(self, batch: dict[str, Any]) -> torch.Tensor:
        """Train on a batch."""
        loss = self.loss(batch)
        self.steps.append([batch["__key__"], loss.item()])
        return loss

    def validation_step(self, batch: dict[str, Any]) -> None:
        """Validate a batch."""
        self.log("loss", self.loss(batch), batch_size=len(batch["cls"]), sync_dist=True)
        self.keys += batch["__key__"]

    def on_validation_epoch_end(self) -> None:
        """Write down what was validated, unless it was only tried."""
        if not self.trainer.sanity_checking:
            self.validations.append([self.trainer.global_step, self.keys, self.trainer.callback_metrics["loss"].item()])
        self.keys = []

    def on_train_start(self) -> None:
        """Note from where training goes on."""
        self.resumed_at = self.trainer.global_step

    def configure_optimizers(self) -> Any:
        """Return Adam, which has a state, and perhaps a schedule, which makes Lightning look at the loader earlier."""
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        if not self.is_scheduled:
            return optimizer
        steps_count = int(self.trainer.estimated_stepping_batches)
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps_count)]


def run(folder: Path, variant: str, checkpoint: str | None) -> dict[str, Any]:
    """Train, and return what the model has written down."""
    lightning.seed_everything(7, verbose=False)
    model = Model(is_scheduled="schedule" in variant)
    out = folder / variant
    callbacks = [
        ModelCheckpoint(out, filename="{step}", every_n_train_steps=1, save_top_k=-1),
        ModelCheckpoint(out, filename="{epoch}", save_top_k=-1),
    ]
    trainer = lightning.Trainer(
        accelerator="cpu", devices=RANKS_COUNT, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=callbacks if checkpoint is None else [], enable_checkpointing=checkpoint is None,
        plugins=[AsyncCheckpointIO()] if "inside" in variant else [], **VARIANTS[variant],
    )  # fmt: skip
    options: Any = {"index": "stream", "agree": ps.torch.agree} if "streamed" in variant else {"index": "require"}
    train, held = (ps.Loader(pipeline(f"{folder}/{name}/"), **options) for name in ("data", "val"))
    with train, held:
        path = None if checkpoint is None else out / f"{checkpoint}.ckpt"
        trainer.fit(model, ps.torch.Tensors(train), ps.torch.Tensors(held), ckpt_path=path)
    return {"resumed_at": model.resumed_at, "steps": model.steps, "validations": model.validations}


def pipeline(url: str) -> Any:
    """The usual pipeline over counted samples."""
    return ps.shards(url).shuffle(window=16, seed=3).decode(ps.Integer("cls")).batch(8)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # Lightning's advice
    folder = Path(sys.argv[1])
    with (folder / f"{RANK}.jsonl").open("a") as file:
        for variant in VARIANTS:
            for checkpoint in sys.argv[2:] or [None]:
                try:
                    found = run(folder, variant, checkpoint)
                except PenstockError as error:
                    found = {"error": str(error)}
                file.write(json.dumps({"variant": variant, "checkpoint": checkpoint, **found}) + "\n")
