"""TorchData's pipes, of which 0.9 is the last version: ``open_files_by_fsspec``, ``load_from_tar``, ``webdataset``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import s3fs  # noqa: F401 - not under the clock
from torchdata.datapipes.iter import IterableWrapper

from penstock.bench.clients import dataloader, loop

if TYPE_CHECKING:
    from collections.abc import Iterator


def content(item: tuple[str, Any]) -> tuple[str, bytes]:
    """Members are read in sequence: their stream does not go back."""
    return item[0], item[1].read()


def sample(fields: dict[str, Any]) -> dict[str, Any]:
    return {name.removeprefix("."): value for name, value in fields.items()}


def of_object(image: str, label: str | None, item: tuple[str, bytes]) -> dict[str, Any]:
    return {image: item[1], label: loop.number_of(item[0])}


class TorchData(loop.Plain):
    """`workers` of a DataLoader."""

    packages = ("torchdata", "torch", "s3fs")

    def __init__(self, *, url: str | None, bucket: str, workers: int = 8) -> None:
        self.url, self.bucket, self.workers = url, bucket, workers

    def epoch(self, job: dict[str, Any]) -> Iterator[loop.Batch]:
        pipe = IterableWrapper([f"s3://{self.bucket}/{key}" for key in job["keys"]])
        pipe = pipe.sharding_filter().open_files_by_fsspec(mode="rb", endpoint_url=self.url, anon=loop.ANONYMOUS)
        if job.get("objects"):
            pipe = pipe.map(content).map(partial(of_object, job["image"], job["label"]))
        else:
            pipe = pipe.load_from_tar(mode="r|").map(content).webdataset().map(sample)
        if job.get("shuffle"):
            pipe = pipe.shuffle(buffer_size=job["shuffle"])
        return dataloader.batches(pipe, job, self.workers)


CLIENT = TorchData
