"""Lightning: a Loader's tensors are the dataloader, and checkpoints hold its place, so that a run resumes inside an epoch.

Run it as `python lightning_digits.py s3://bucket/digits/train/ CHECKPOINTS`: shards of `NAME.png` (8 x 8, grey) and
`NAME.cls`, as `digits.py` writes them. Start it again, and it goes on. Needs: penstock's
extras `torch` and `image`, lightning
"""

import sys
from pathlib import Path

import lightning  # type: ignore[import-not-found]  # mypy's environment has no Lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint  # type: ignore[import-not-found]
from torch import nn

import penstock as ps


class Digits(lightning.LightningModule):  # type: ignore[misc]
    """A network of one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.normalise = ps.torch.Normalize(mean=(0.3,), std=(0.35,))

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The loss of a batch: {"png": uint8[B, 8, 8], "cls": int64[B], ...}."""
        loss = nn.functional.cross_entropy(self.model(self.normalise(batch["png"])), batch["cls"])
        self.log("loss", loss, batch_size=len(batch["cls"]))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main() -> None:
    url, folder = sys.argv[1], Path(sys.argv[2])
    pipeline = (
        ps.shards(url)
        .shuffle(window=1024, seed=0)
        .decode(ps.Image("png", mode="L"), ps.Integer("cls"))
        .batch(64, drop_last=True)
    )
    last = folder / "last.ckpt"
    checkpoints = ModelCheckpoint(folder, save_last=True, every_n_train_steps=10)
    trainer = lightning.Trainer(
        max_epochs=3, accelerator="cpu", callbacks=[checkpoints], logger=False, enable_progress_bar=False
    )
    with ps.Loader(pipeline) as loader:  # rank and world size are looked up when the first epoch begins
        trainer.fit(Digits(), ps.torch.Tensors(loader), ckpt_path=last if last.exists() else None)
        print(f"{trainer.global_step} steps, loss {trainer.callback_metrics['loss']:.3f}")


if __name__ == "__main__":
    main()
