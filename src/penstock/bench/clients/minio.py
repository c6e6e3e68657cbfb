"""MinIO's SDK for Python: objects in a map-style data set, tars through ``tarfile``."""

from __future__ import annotations

import os
from contextlib import closing
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import minio
from minio.credentials import AWSConfigProvider, ChainedProvider, EnvAWSProvider, IamAwsProvider

from penstock.bench.clients import dataloader, loop

if TYPE_CHECKING:
    from collections.abc import Iterator


@cache
def client(url: str, _process_id: int) -> Any:
    """The client of this process."""
    scheme, _, host = url.partition("://")
    credentials = None if loop.ANONYMOUS else ChainedProvider([EnvAWSProvider(), AWSConfigProvider(), IamAwsProvider()])
    return minio.Minio(host, secure=scheme == "https", region=os.environ["AWS_REGION"], credentials=credentials)


def opened(url: str, bucket: str, key: str) -> Any:
    return closing(client(url, os.getpid()).get_object(bucket, key))


class Minio(loop.Plain):
    """`workers` of a DataLoader."""

    packages = ("minio", "torch")

    def __init__(self, *, url: str | None, bucket: str, workers: int = 8) -> None:
        self.open_file = partial(opened, url or "https://s3.amazonaws.com", bucket)
        self.workers = workers

    def epoch(self, job: dict[str, Any]) -> Iterator[loop.Batch]:
        return dataloader.read(self.open_file, job, self.workers)


CLIENT = Minio
