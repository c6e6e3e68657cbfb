"""WebDataset over S3 by several ways, in a WebLoader: only how the bytes of a shard arrive differs.

``penstock`` is ``import penstock.webdataset`` of this tree; ``curl`` and ``aws`` are pipes; ``connector`` is the reader of the
S3 Connector for PyTorch, registered for a scheme of its own, with a buffer around it if there is ``buffer_bytes``.
"""

from __future__ import annotations

import io
import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import webdataset as wds

from penstock.bench.clients import loop

if TYPE_CHECKING:
    from collections.abc import Iterator


def listed(samples: list[tuple[bytes, bytes]]) -> tuple[Any, Any]:
    """Images and labels as lists, which cross to the training process as they are."""
    images, labels = zip(*samples, strict=True)
    return list(images), list(labels)


class WebDatasetS3(loop.Plain):
    """Batches are made in the workers."""

    packages = ("webdataset", "s3torchconnector", "torch")

    def __init__(self, *, url: str, bucket: str, way: str, workers: int = 4, buffer_bytes: int = 0) -> None:
        self.url, self.bucket, self.workers, self.buffer_bytes = url, bucket, workers, buffer_bytes
        os.environ["AWS_ENDPOINT_URL"] = url
        prefix, end = f"s3://{bucket}/", ""
        if way == "penstock":
            import penstock.webdataset  # noqa: F401 - registers s3://
        elif way == "curl":
            prefix = f"pipe:curl -s -f {url}/{bucket}/"
        elif way == "aws":
            prefix, end = f"pipe:aws s3 cp {prefix}", " -"
        else:
            sys.modules["webdataset.gopen"].gopen_schemes["connector"] = partial(opened, self)
            prefix = f"connector://{bucket}/"
        self.urls = lambda keys: [f"{prefix}{key}{end}" for key in keys]

    def epoch(self, job: dict[str, Any]) -> Iterator[loop.Batch]:
        dataset = wds.WebDataset(self.urls(job["keys"]), shardshuffle=False, empty_check=False)
        dataset = dataset.to_tuple(job["image"], "cls").batched(job["batch"], collation_fn=listed)
        yield from wds.WebLoader(dataset, batch_size=None, num_workers=self.workers)


def opened(client: WebDatasetS3, url: str, mode: str, bufsize: int) -> Any:
    """Open a shard by the connector."""
    from s3torchconnector import S3IterableDataset

    uri = url.replace("connector://", "s3://")
    reader = next(iter(S3IterableDataset.from_objects([uri], region=os.environ["AWS_REGION"], endpoint=client.url)))
    return io.BufferedReader(reader, client.buffer_bytes) if client.buffer_bytes else reader


CLIENT = WebDatasetS3
