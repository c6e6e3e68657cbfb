"""The Amazon S3 Connector for PyTorch in a DataLoader: tars through ``tarfile``, or single objects."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from s3torchconnector import S3ClientConfig, S3IterableDataset, S3MapDataset

from penstock.bench.clients import dataloader, loop

if TYPE_CHECKING:
    from collections.abc import Iterator


class Whole:
    """A reader's bytes, and the number in its key."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job

    def __call__(self, reader: Any) -> dict[str, Any]:
        return {self.job["image"]: reader.read(), self.job["label"]: loop.number_of(reader.key)}


class Connector(loop.Plain):
    """`decoder` names one of ``decoders.py``.

    A job's `objects` stands for the map dataset in random order, `stream` for single objects through the iterable one.
    """

    packages = ("s3torchconnector", "s3torchconnectorclient", "torch")

    def __init__(
        self,
        *,
        url: str | None,
        bucket: str,
        workers: int = 8,
        decoder: str | None = None,
        buffer_bytes: int = 10240,  # tarfile's own
        throughput_target_gbps: float | None = None,
        part_bytes: int = 8 << 20,
        prefetch: int = 2,
    ) -> None:
        tuned = {} if throughput_target_gbps is None else {"throughput_target_gbps": throughput_target_gbps}
        config = S3ClientConfig(force_path_style=bool(url), part_size=part_bytes, unsigned=loop.ANONYMOUS, **tuned)
        self.options = {"region": os.environ["AWS_REGION"], "endpoint": url, "s3client_config": config}
        self.bucket, self.workers, self.decoder = bucket, workers, decoder
        self.buffer_bytes, self.prefetch = buffer_bytes, prefetch

    def epoch(self, job: dict[str, Any]) -> Iterator[loop.Batch]:
        uris = [f"s3://{self.bucket}/{key}" for key in job["keys"]]
        dataset: Any
        if job.get("stream"):
            prefix = f"s3://{self.bucket}/{job['prefix']}/"
            dataset = S3IterableDataset.from_prefix(prefix, transform=Whole(job), enable_sharding=True, **self.options)
        elif job.get("objects"):
            dataset = S3MapDataset.from_objects(uris, transform=Whole(job), **self.options)
        else:
            objects = S3IterableDataset.from_objects(uris, enable_sharding=True, **self.options)
            dataset = dataloader.Stream(objects, job, self.buffer_bytes)
        return dataloader.batches(
            dataset, job, self.workers, decoder=self.decoder, prefetch_factor=self.prefetch if self.workers else None,
            shuffle=True if isinstance(dataset, S3MapDataset) else None,
        )  # fmt: skip


CLIENT = Connector
