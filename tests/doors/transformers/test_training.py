"""The same training, resumed: transformers' ``Trainer`` and Accelerate on a loader."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator

import penstock as ps
from loading import index_beside, pipeline, write_counted
from ranks import run_ranks

SCRIPT = Path(__file__).with_name("training.py")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks_count", [1, 2])
@pytest.mark.parametrize("framework", ["trainer", "accelerate"])
def test_a_resumed_run_is_the_run_that_was_not_interrupted(tmp_path: Path, framework: str, ranks_count: int) -> None:
    """From checkpoints inside and at the end of epochs, another process trains on the same batches with the same losses."""
    assert write_counted(tmp_path / "data", (30, 4, 40, 1, 26)) == 101
    index_beside(tmp_path / "data")
    batches_per_epoch = math.ceil(
        101 / 8 / ranks_count
    )  # odd: the last step of an epoch accumulates one batch instead of two
    accumulated = 2 if framework == "trainer" else 1
    epoch = math.ceil(batches_per_epoch / accumulated)
    steps = [2, epoch, epoch + 3, 2 * epoch, 3 * epoch - 1]
    run_ranks(ranks_count, SCRIPT, framework, str(tmp_path))
    run_ranks(ranks_count, SCRIPT, framework, str(tmp_path), *map(str, steps))
    for rank in range(ranks_count):
        whole, *resumed = map(json.loads, (tmp_path / f"{rank}.jsonl").read_text().splitlines())
        assert len(whole["keys"]) == 3 * batches_per_epoch
        for step, rest in zip(steps, resumed, strict=True):
            done = step // epoch * batches_per_epoch + step % epoch * accumulated
            assert rest["keys"] == whole["keys"][done:], f"rank {rank}, step {step}"
            logged = whole["losses"] if framework == "trainer" else whole["losses"][done:]
            assert rest["losses"] == logged, f"rank {rank}, step {step}"


def test_accelerate_does_not_divide_batches_again(tmp_path: Path) -> None:
    """A prepared DataLoader on an IterableDataset is an error on 2 ranks, instead of half of the samples."""
    write_counted(tmp_path / "data", (30, 10))
    index_beside(tmp_path / "data")
    run_ranks(2, SCRIPT, "prepared", str(tmp_path))
    for rank in range(2):
        dispatched, sharded = json.loads((tmp_path / f"{rank}.jsonl").read_text())["losses"]
        assert "DataLoaderDispatcher divides the batches among 2 ranks" in dispatched
        assert "IterableDatasetShard divides the batches among 2 ranks" in sharded


@pytest.mark.filterwarnings("ignore")
def test_accelerate_does_not_discard_a_state(tmp_path: Path) -> None:
    """A state that was loaded into an IterableDataset is not lost in a prepared DataLoader without an error."""
    write_counted(tmp_path, (30, 10))
    dataset = ps.torch.IterableDataset(pipeline(tmp_path))
    next(iter(dataset))
    dataset.load_state_dict(dataset.state_dict())
    prepared: Any = Accelerator(cpu=True).prepare(torch.utils.data.DataLoader(dataset, batch_size=None))
    with pytest.raises(ps.ConfigError, match="state that was loaded is lost"):
        next(iter(prepared))
    dataset.close()


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_resumed_is_refused(tmp_path: Path) -> None:
    """A mistake in using the callback is an error when the training begins, which says what to do."""
    write_counted(tmp_path / "data", (30, 10))
    made = pipeline(tmp_path / "data")
    with ps.Loader(made, index="stream") as loader:
        with pytest.raises(ps.ConfigError, match=r"not a Loader.*ps\.torch\.Tensors"):
            ps.huggingface.TrainerCallback(loader)
        with pytest.raises(ps.ConfigError, match="penstock index"):
            ps.huggingface.TrainerCallback(ps.torch.Tensors(loader)).dataloader()
    index_beside(tmp_path / "data")
    with ps.Loader(made) as loader:
        callback = ps.huggingface.TrainerCallback(ps.torch.Tensors(loader))
        args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
        state = transformers.TrainerState(stateful_callbacks=[])
        with pytest.raises(ps.ConfigError, match="does not read the batches"):
            callback.on_train_begin(args, state, None, train_dataloader=[])
        batches = callback.dataloader()
        callback.on_train_begin(args, state, None, train_dataloader=batches)
        state.global_step = 1
        with pytest.raises(ps.ConfigError, match="saved without this callback"):
            callback.on_train_begin(args, state, None, train_dataloader=batches)
        callback.on_step_end(args, state, None)
        args.gradient_accumulation_steps = 3
        with pytest.raises(ps.ConfigError, match="with gradient_accumulation_steps=1, and this run has 3"):
            callback.on_train_begin(args, state, None, train_dataloader=batches)
        args.ignore_data_skip = True
        with pytest.raises(ps.ConfigError, match="ignore_data_skip"):
            callback.on_train_begin(args, state, None, train_dataloader=batches)
