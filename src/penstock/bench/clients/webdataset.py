"""WebDataset in a WebLoader: only how the bytes of a shard arrive differs.

``penstock`` is ``import penstock.webdataset``; ``curl`` and ``aws`` are pipes. ``connector`` is the reader of the S3 Connector
for PyTorch, with a buffer around it if there is ``buffer_bytes``, ``boto3`` its stream, ``s3fs`` a file of Python's s3fs: these
replace the opener of the scheme. Programs for WebDataset 0.1 replaced its stage ``url_opener`` for this, which the class
``WebDataset`` does not call any more; how the bytes arrive is the same.
"""

from __future__ import annotations

import importlib
import io
import os
import shlex
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import webdataset as wds

from penstock.bench.clients import dataloader, loop

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGES = {"penstock": ("penstock-data",), "connector": ("s3torchconnector",), "boto3": ("boto3",), "s3fs": ("s3fs",)}


class WebDataset(loop.Plain):
    """Batches are made in the workers, as its documentation advises."""

    def __init__(
        self,
        *,
        url: str | None,
        bucket: str,
        way: str = "curl",
        workers: int = 8,
        decoder: str | None = None,
        buffer_bytes: int = 0,
    ) -> None:
        self.url, self.bucket, self.way, self.workers = url, bucket, way, workers
        self.decoder, self.buffer_bytes = decoder, buffer_bytes
        self.packages = ("webdataset", "torch", *PACKAGES.get(way, ()))
        loop.use_endpoint(url)
        if way == "penstock":
            import penstock.webdataset

            penstock.webdataset.register(anonymous=loop.ANONYMOUS)
        elif way not in ("curl", "aws"):
            importlib.import_module(PACKAGES[way][0])  # not under the clock
            sys.modules["webdataset.gopen"].gopen_schemes["s3"] = partial(OPENERS[way], self)

    def urls(self, keys: list[str]) -> list[str]:
        if self.way == "aws":
            unsigned = "--no-sign-request " if loop.ANONYMOUS else ""
            return [f"pipe:aws s3 cp {unsigned}{shlex.quote(f's3://{self.bucket}/{key}')} -" for key in keys]
        if self.way == "curl":
            return [f"pipe:curl -s -f {shlex.quote(url)}" for url in self.plain_urls(keys)]
        return [f"s3://{self.bucket}/{key}" for key in keys]

    def plain_urls(self, keys: list[str]) -> list[str]:
        """URLs that curl can read: signed ones, unless the store answers without."""
        found = [f"{self.url}/{self.bucket}/{key}" for key in keys]
        if (
            self.url
            and not subprocess.run(
                ["curl", "-s", "-f", "-r", "0-0", "-o", os.devnull, found[0]], check=False
            ).returncode
        ):
            return found
        import penstock as ps
        from penstock.store.s3 import presigned_get

        with ps.connect(f"s3://{self.bucket}", endpoint_url=self.url, anonymous=loop.ANONYMOUS) as store:
            return [presigned_get(store, key) for key in keys]

    def epoch(self, job: dict[str, Any]) -> Iterator[loop.Batch]:
        dataset = wds.WebDataset(self.urls(job["keys"]), shardshuffle=False, empty_check=False)
        if job.get("shuffle"):
            dataset = dataset.shuffle(job["shuffle"])
        dataset = dataset.batched(job["batch"], collation_fn=dataloader.Collate(job, self.decoder))
        for images, labels in wds.WebLoader(dataset, batch_size=None, num_workers=self.workers):
            yield (images.numpy() if job.get("decode") else images), labels


def by_connector(client: WebDataset, url: str, mode: str, bufsize: int) -> Any:
    from s3torchconnector import S3IterableDataset

    reader = next(iter(S3IterableDataset.from_objects([url], region=os.environ["AWS_REGION"], endpoint=client.url)))
    return io.BufferedReader(reader, client.buffer_bytes) if client.buffer_bytes else reader


def by_boto3(client: WebDataset, url: str, mode: str, bufsize: int) -> Any:
    return loop.boto3_body(client.url, client.bucket, url.removeprefix(f"s3://{client.bucket}/"))


def by_s3fs(client: WebDataset, url: str, mode: str, bufsize: int) -> Any:
    import s3fs

    return s3fs.S3FileSystem(endpoint_url=client.url, anon=loop.ANONYMOUS).open(url, "rb")


OPENERS = {"connector": by_connector, "boto3": by_boto3, "s3fs": by_s3fs}
CLIENT = WebDataset
