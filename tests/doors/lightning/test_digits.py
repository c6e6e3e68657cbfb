from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from loading import index_beside, pipeline, write_counted
from pages import write_pictures

lightning = pytest.importorskip("lightning")
import torch  # noqa: E402 - Lightning brings it

EXAMPLE = Path(__file__).parents[3] / "examples" / "lightning_digits.py"

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers, loggers and checkpoints


class Recorder(lightning.LightningModule):  # type: ignore[misc]
    """Writes down the samples that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[int] = []

    def training_step(self, batch: dict[str, Any]) -> torch.Tensor:
        self.seen += batch["cls"].tolist()
        return (self.weight * batch["cls"].float().mean()) ** 2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trainer(**options: Any) -> Any:
    return lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, **options
    )


@pytest.mark.parametrize("indexed", [False, True])
def test_fit_trains_on_every_sample_of_every_epoch(tmp_path: Path, *, indexed: bool) -> None:
    """trainer.fit with a Loader's tensors sees the Loader's samples in its order, epoch after epoch, and fit after fit."""
    total = write_counted(tmp_path, (9, 4, 7))
    if indexed:  # the loader has a length, so that Lightning counts batches
        index_beside(tmp_path)
    model = Recorder()
    with ps.Loader(pipeline(tmp_path, batch=3)) as loader:
        for _ in range(2):
            trainer(max_epochs=2, enable_checkpointing=False).fit(model, ps.torch.Tensors(loader))
    with ps.Loader(pipeline(tmp_path, batch=3)) as loader:
        expected = [int(number) for _ in range(4) for batch in loader for number in batch["cls"]]
    assert model.seen == expected
    assert len(model.seen) == 4 * total


@pytest.mark.parametrize("workers", [0, 2])
def test_fit_with_a_dataloader(tmp_path: Path, workers: int) -> None:
    """The same through DataLoader(IterableDataset), with and without workers."""
    write_counted(tmp_path, (9, 4, 7))
    dataset = ps.torch.IterableDataset(pipeline(tmp_path, batch=3), threads=1)
    model = Recorder()
    batches = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=workers)
    trainer(max_epochs=2, enable_checkpointing=False).fit(model, batches)
    dataset.close()
    with ps.Loader(pipeline(tmp_path, batch=3)) as loader:
        assert model.seen == [int(number) for _ in range(2) for batch in loader for number in batch["cls"]]


def test_the_example_runs_and_goes_on(tmp_path: Path) -> None:
    """It trains its three epochs; started again on a checkpoint of its middle, it does the steps that are left."""
    write_pictures(tmp_path / "data", samples=320, shards=4)
    command = [sys.executable, str(EXAMPLE), f"{tmp_path}/data/", f"{tmp_path}/checkpoints"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"^15 steps, loss [01]\.\d+$", done.stdout, re.MULTILINE)
    middle = tmp_path / "checkpoints/last.ckpt"
    assert torch.load(middle, weights_only=False)["global_step"] == 10
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert re.search(r"^15 steps, loss [01]\.\d+$", done.stdout, re.MULTILINE), done.stderr[-2000:]
