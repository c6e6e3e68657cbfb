"""The Amazon S3 Connector for PyTorch in a DataLoader: tars through ``tarfile``, or single objects."""

from __future__ import annotations

import os
import tarfile
from typing import TYPE_CHECKING, Any

import torch
from s3torchconnector import S3ClientConfig, S3IterableDataset, S3MapDataset
from torch.utils.data import DataLoader, IterableDataset

from penstock.bench.clients import decoders, loop

if TYPE_CHECKING:
    from collections.abc import Iterator


class Tars(IterableDataset):
    """(image, label) of each sample; a worker reads its share of the shards."""

    def __init__(self, objects: S3IterableDataset, buffer_bytes: int, decode: Any) -> None:
        self.objects, self.buffer_bytes, self.decode = objects, buffer_bytes, decode

    def __iter__(self) -> Iterator[tuple[Any, bytes]]:
        for reader in self.objects:
            with tarfile.open(fileobj=reader, mode="r|", bufsize=self.buffer_bytes) as archive:
                members = iter(archive)
                for image in members:
                    data = archive.extractfile(image).read()
                    label = archive.extractfile(next(members)).read()
                    yield (self.decode(data) if self.decode else data), label
                    archive.members.clear()  # tarfile keeps them all otherwise


class Whole:
    """A reader's bytes, or their picture, and the number in its key."""

    def __init__(self, decode: Any) -> None:
        self.decode = decode

    def __call__(self, reader: Any) -> tuple[Any, str]:
        data = reader.read()
        return (self.decode(data) if self.decode else data), reader.key.rsplit("/", 1)[-1].split(".")[0]


def as_lists(samples: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Of buffers: lists."""
    images, labels = zip(*samples, strict=True)
    return list(images), list(labels)


def as_tensor(samples: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Of pictures: one tensor, which crosses in shared memory."""
    images, labels = zip(*samples, strict=True)
    return torch.stack([torch.from_numpy(image) for image in images]), list(labels)


class Connector(loop.Plain):
    """`decoder` names one of ``decoders.py``.

    A job's `objects` stands for the map dataset in random order, `stream` for single objects through the iterable one.
    """

    packages = ("s3torchconnector", "s3torchconnectorclient", "torch")

    def __init__(
        self,
        *,
        url: str,
        bucket: str,
        workers: int = 8,
        decoder: str | None = None,
        buffer_bytes: int = 10240,  # tarfile's own
        throughput_target_gbps: float | None = None,
        part_bytes: int = 8 << 20,
        prefetch: int = 2,
    ) -> None:
        tuned = {} if throughput_target_gbps is None else {"throughput_target_gbps": throughput_target_gbps}
        config = S3ClientConfig(force_path_style=True, part_size=part_bytes, **tuned)
        self.options = {"region": os.environ["AWS_REGION"], "endpoint": url, "s3client_config": config}
        self.bucket, self.workers, self.decoder = bucket, workers, decoder
        self.buffer_bytes, self.prefetch = buffer_bytes, prefetch

    def epoch(self, job: dict[str, Any]) -> Iterator[loop.Batch]:
        uris = [f"s3://{self.bucket}/{key}" for key in job["keys"]]
        decode = decoders.DECODERS[self.decoder or "pillow"] if job.get("decode") else None
        dataset: Any
        if job.get("objects"):
            dataset = S3MapDataset.from_objects(uris, transform=Whole(decode), **self.options)
        elif job.get("stream"):
            prefix = f"s3://{self.bucket}/{job['prefix']}/"
            dataset = S3IterableDataset.from_prefix(
                prefix, transform=Whole(decode), enable_sharding=True, **self.options
            )
        else:
            objects = S3IterableDataset.from_objects(uris, enable_sharding=True, **self.options)
            dataset = Tars(objects, self.buffer_bytes, decode)
        loader = DataLoader(
            dataset, batch_size=job["batch"], num_workers=self.workers, shuffle=True if job.get("objects") else None,
            collate_fn=as_tensor if decode else as_lists, prefetch_factor=self.prefetch if self.workers else None,
        )  # fmt: skip
        for images, labels in loader:
            yield (images.numpy() if decode else images), labels


CLIENT = Connector
