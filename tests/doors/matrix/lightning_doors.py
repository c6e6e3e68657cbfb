"""The door to Lightning: its trainer takes the batches."""

from __future__ import annotations

import base64
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch

import penstock as ps
from doors.matrix.data_set import Record
from doors.matrix.door import Door, Job
from doors.matrix.plain_doors import pipeline, records

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.set_num_threads(1)


class Collecting(lightning.LightningModule):
    """A model that keeps what it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.found: list[list[Record]] = []

    def training_step(self, batch: Any) -> Any:
        self.found.append(records(batch["record"]))
        return self.weight * 0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SavedAt(lightning.Callback):
    """Saves a checkpoint after some steps, and ends the training."""

    def __init__(self, path: Path, *, steps: int) -> None:
        self.path = path
        self.steps = steps

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.global_step == self.steps:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


class LightningDoor(Door):
    """``trainer.fit`` on ``ps.torch.Tensors(loader)``; the position is in Lightning's checkpoint."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.loader = self.open.enter_context(ps.Loader(pipeline(job), processes=job.workers, cache=job.node_cache))
        self.checkpoint: str | None = None

    def epoch(self) -> Iterator[list[Record]]:
        yield from self.fit()

    def head(self, batches_count: int) -> tuple[list[Record], Any]:
        path = self.folder() / "position.ckpt"
        found = self.fit(SavedAt(path, steps=batches_count))
        return [record for batch in found for record in batch], base64.b64encode(path.read_bytes()).decode()

    def restore(self, state: Any) -> None:
        path = self.folder() / "position.ckpt"
        path.write_bytes(base64.b64decode(state))
        self.checkpoint = str(path)

    def fit(self, *callbacks: lightning.Callback) -> list[list[Record]]:
        """Train for an epoch or until a callback ends it, and return the batches."""
        model = Collecting()
        trainer = lightning.Trainer(
            max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, accelerator="cpu", callbacks=list(callbacks),
        )  # fmt: skip
        trainer.fit(model, ps.torch.Tensors(self.loader), ckpt_path=self.checkpoint)
        return model.found
