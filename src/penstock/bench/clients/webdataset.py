"""WebDataset: ``pipe:curl`` of each shard, in a WebLoader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import webdataset as wds

from penstock.bench.clients import decoders, loop

if TYPE_CHECKING:
    from collections.abc import Iterator


class Collate:
    """Lists of buffers, or one tensor of pictures."""

    def __init__(self, decode: Any) -> None:
        self.decode = decode

    def __call__(self, samples: list[tuple[bytes, bytes]]) -> tuple[Any, Any]:
        images, labels = zip(*samples, strict=True)
        if self.decode is None:
            return list(images), list(labels)
        return torch.stack([torch.from_numpy(self.decode(image)) for image in images]), list(labels)


class WebDataset(loop.Plain):
    """Batches are made in the workers, as its documentation advises."""

    packages = ("webdataset", "torch")

    def __init__(self, *, url: str, bucket: str, workers: int = 8, decoder: str | None = None) -> None:
        self.url, self.bucket, self.workers, self.decoder = url, bucket, workers, decoder

    def epoch(self, job: dict[str, Any]) -> Iterator[loop.Batch]:
        urls = [f"pipe:curl -s -f {self.url}/{self.bucket}/{key}" for key in job["keys"]]
        decode = decoders.DECODERS[self.decoder or "pillow"] if job.get("decode") else None
        dataset = wds.WebDataset(urls, shardshuffle=False, empty_check=False).to_tuple(job["image"], "cls")
        dataset = dataset.batched(job["batch"], collation_fn=Collate(decode))
        for images, labels in wds.WebLoader(dataset, batch_size=None, num_workers=self.workers):
            yield (images.numpy() if decode else images), labels


CLIENT = WebDataset
