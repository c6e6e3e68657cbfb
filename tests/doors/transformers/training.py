"""A small training under transformers' ``Trainer`` or Accelerate, on any number of ranks, whole or resumed.

``python training.py FRAMEWORK FOLDER`` trains from the beginning with a checkpoint after each step; with ``STEP...``, it
resumes from the checkpoints of these steps, one after another. For each training, it appends a line of JSON to
``FOLDER/RANK.jsonl``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed

import penstock as ps

EPOCHS = 3


class Model(torch.nn.Module):
    """A model whose loss depends on the samples, their order and the random generator; it writes down what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 4)
        self.keys: list[list[str]] = []

    def forward(self, cls: torch.Tensor, __key__: list[str], **others: Any) -> dict[str, torch.Tensor]:
        """Return the loss of a batch."""
        self.keys.append(list(__key__))
        values = self.layer(cls.float().unsqueeze(1) / 50)
        return {"loss": torch.nn.functional.dropout(values, 0.5).square().mean()}


def with_trainer(folder: Path, step: int | None) -> tuple[Any, Any]:
    """Train with the Trainer, two batches at a time; what it logged."""
    with ps.Loader(pipeline(folder).batch(8)) as loader:
        callback = ps.huggingface.TrainerCallback(ps.torch.Tensors(loader), upload_to=f"{folder}/uploaded/")

        class Trainer(transformers.Trainer):  # type: ignore[misc]
            def get_train_dataloader(self) -> Any:
                return callback.dataloader()

        args = transformers.TrainingArguments(
            output_dir=f"{folder}/out", num_train_epochs=EPOCHS, save_steps=1, logging_steps=1, use_cpu=True,
            gradient_accumulation_steps=2, learning_rate=0.01, report_to=[], disable_tqdm=True,
        )  # fmt: skip
        set_seed(7)
        model = Model()
        trainer = Trainer(model=model, args=args, callbacks=[callback])
        trainer.train(resume_from_checkpoint=None if step is None else f"{folder}/uploaded/checkpoint-{step}")
        return model.keys, [
            [row["step"], row["epoch"], row["loss"]] for row in trainer.state.log_history if "loss" in row
        ]


def with_accelerate(folder: Path, step: int | None) -> tuple[Any, Any]:
    """Train in a loop of its own, with Accelerate's checkpoints; the losses."""
    accelerator = Accelerator(cpu=True)
    set_seed(7)
    bare = Model()
    model, optimizer = accelerator.prepare(bare, torch.optim.Adam(bare.parameters(), lr=0.01))
    losses = []
    with ps.Loader(pipeline(folder).batch(8)) as loader:
        batches = ps.torch.Prefetch(loader, device="cpu")
        accelerator.register_for_checkpointing(batches)
        if step is not None:
            accelerator.load_state(f"{folder}/step-{step}")
        done = step or 0
        for _ in loader.epochs(EPOCHS):
            for batch in batches:
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                done += 1
                if step is None:
                    accelerator.save_state(f"{folder}/step-{done}")
    return bare.keys, losses


def with_prepared(folder: Path, step: int | None) -> tuple[Any, Any]:
    """Iterate a DataLoader that Accelerate prepared, dispatched from rank 0 and on each rank: the samples, or the error."""
    found = []
    for dispatches in (None, False):
        settings = DataLoaderConfiguration(dispatch_batches=dispatches)
        accelerator = Accelerator(cpu=True, dataloader_config=settings)
        tensors_only = pipeline(folder).batch(8, collate=lambda rows: torch.tensor([row["cls"] for row in rows]))
        batches = torch.utils.data.DataLoader(ps.torch.IterableDataset(tensors_only), batch_size=None)
        try:
            found.append(sum(len(batch) for batch in accelerator.prepare(batches)))
        except ps.ConfigError as error:
            found.append(str(error))
    return [], found


def pipeline(folder: Path) -> Any:
    """The usual pipeline over counted samples."""
    return ps.shards(f"{folder}/data/").shuffle(window=16, seed=3).decode(ps.Integer("cls"))


if __name__ == "__main__":
    train = {"trainer": with_trainer, "accelerate": with_accelerate, "prepared": with_prepared}[sys.argv[1]]
    folder = Path(sys.argv[2])
    with (folder / f"{os.environ.get('RANK', '0')}.jsonl").open("a") as file:
        for step in [int(text) for text in sys.argv[3:]] or [None]:
            keys, losses = train(folder, step)
            file.write(json.dumps({"keys": keys, "losses": losses}) + "\n")
