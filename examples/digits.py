"""Handwritten digits in object storage: write them as shards, stream them back shuffled, train, and check every sample.

Run it as `python digits.py s3://bucket/digits/`: credentials, region and endpoint follow the AWS conventions. A plain
path works as well, and `embedded_store.py` brings a store. Needs: penstock's extras `torch` and `image`, scikit-learn
"""

import argparse
import io
import json
import sys
from collections import Counter
from typing import Any

import numpy as np
import PIL.Image
import torch
from sklearn.datasets import load_digits
from torch import nn

import penstock as ps
from penstock.formats import TarWriter

SHARDS = {"train": 12, "test": 3}


def write_shards(store: ps.Store, split: str, digits: Any, indices: list[int]) -> None:
    """In WebDataset's layout: `0042.png` and `0042.cls`, neighbours in a tar file, are one sample."""
    for shard in range(SHARDS[split]):
        with store.writer(f"{split}/digits-{shard:03d}.tar") as output:
            tar = TarWriter(output.write)
            for index in indices[shard :: SHARDS[split]]:
                png = io.BytesIO()
                PIL.Image.fromarray((digits.images[index] * 15).astype(np.uint8)).save(png, "PNG")
                tar.add({"__key__": f"{index:04d}", "png": png.getvalue(), "cls": str(digits.target[index])})
            tar.finish()


def fainter(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Write with less ink. `rng` is the sample's own, whichever thread runs this."""
    sample["png"] = (sample["png"] * rng.uniform(0.7, 1)).astype(np.uint8)
    return sample


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(64 * 4 * 4, 10),
    )  # fmt: skip


def pixels(png: torch.Tensor) -> torch.Tensor:
    """uint8[B, 8, 8] as float32[B, 1, 8, 8] in [0, 1]."""
    return png.unsqueeze(1).float() / 255


def train(model: nn.Module, loader: ps.Loader, epochs: int, expected: Counter[str]) -> bool:
    """Train, with a line for each epoch; whether each epoch brought every key exactly once."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    exact = True
    for epoch in loader.epochs(epochs):
        seen = Counter[str]()
        for batch in ps.torch.Tensors(loader):
            loss = nn.functional.cross_entropy(model(pixels(batch["png"])), batch["cls"])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            seen.update(batch["__key__"])
        schedule.step()
        exact &= seen == expected
        done = loader.statistics()
        rates = f"{done.samples_per_s:6.0f} samples/s  {done.bytes_per_s / 1e6:5.2f} MB/s"
        print(f"epoch {epoch + 1:2d}  {rates}  waited for data {done.stall_ratio:4.0%}", file=sys.stderr, flush=True)
    return exact


@torch.no_grad()
def test(model: nn.Module, loader: ps.Loader, expected: Counter[str]) -> tuple[float, bool]:
    """Accuracy on the held-out digits, and whether each was there once."""
    model.eval()
    hits, seen = 0, Counter[str]()
    for batch in ps.torch.Tensors(loader):
        hits += int((model(pixels(batch["png"])).argmax(1) == batch["cls"]).sum())
        seen.update(batch["__key__"])
    return hits / seen.total(), seen == expected


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="where the shards go, e.g. s3://bucket/digits/")
    parser.add_argument("--endpoint-url", help="default: the AWS variables and files")
    parser.add_argument("--epochs", type=int, default=16)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # for a network this small, more threads wait for each other
    digits = load_digits()
    indices = {"test": list(range(0, 1797, 5)), "train": [i for i in range(1797) if i % 5]}  # every fifth is held out
    keys = {split: Counter(f"{index:04d}" for index in indices[split]) for split in SHARDS}
    with ps.connect(args.url, endpoint_url=args.endpoint_url) as store:
        for split in SHARDS:
            write_shards(store, split, digits, indices[split])
    fields = ps.Image("png", mode="L"), ps.Integer("cls")
    shards = {split: ps.shards(f"{args.url.rstrip('/')}/{split}/", endpoint_url=args.endpoint_url) for split in SHARDS}
    model = network()
    with ps.Loader(shards["train"].shuffle(window=1024, seed=0).decode(*fields).map(fainter).batch(64)) as loader:
        exact = train(model, loader, args.epochs, keys["train"])
        done = loader.statistics()
    with ps.Loader(shards["test"].decode(*fields).batch(128)) as loader:
        accuracy, exact_test = test(model, loader, keys["test"])
    verified = exact and exact_test
    rates = {"samples_per_s": round(done.samples_per_s), "bytes": done.bytes, "stall_ratio": round(done.stall_ratio, 4)}
    print(json.dumps({"samples": done.samples, **rates, "accuracy": round(accuracy, 4), "verified": verified}))
    return 0 if verified and accuracy >= 0.97 else 1


if __name__ == "__main__":
    sys.exit(main())
