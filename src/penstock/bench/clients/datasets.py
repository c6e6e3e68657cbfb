"""Hugging Face datasets, streaming Parquet or tars: batches of Arrow, or a DataLoader."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["HF_HUB_OFFLINE"] = "1"
import fsspec
import s3fs
from datasets import load_dataset

from penstock.bench.clients import dataloader, loop

if TYPE_CHECKING:
    from collections.abc import Iterator


def pack_parquet(source: str, target: str, group_bytes: int = 16 << 20, file_bytes: int = 64 << 20) -> None:
    """Files of about 64 MB, uncompressed: JPEGs do not compress. Shared with Ray's driver."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema({loop.IMAGE: pa.binary(), loop.LABEL: pa.int64()})
    Path(target).mkdir(parents=True, exist_ok=True)
    writer, number, written, images, labels = None, 0, 0, [], []

    def flush() -> None:
        if images:
            writer.write_table(pa.table({loop.IMAGE: images, loop.LABEL: labels}, schema=schema))
            images.clear()
            labels.clear()

    held = 0
    for image, label in loop.tar_samples(source):
        if writer is None:
            writer = pq.ParquetWriter(
                f"{target}/{number:05d}.parquet", schema, compression="none", use_dictionary=False
            )
            number, written = number + 1, 0
        images.append(image)
        labels.append(label)
        held, written = held + len(image), written + len(image)
        if held >= group_bytes or written >= file_bytes:
            flush()
            held = 0
        if written >= file_bytes:
            writer.close()
            writer = None
    if writer is not None:
        flush()
        writer.close()


class Datasets(loop.Plain):
    """`workers` 0: ``with_format("arrow").iter`` of Parquet; else a DataLoader over it. Tars by its builder ``webdataset``."""

    packages = ("datasets", "s3fs")

    def __init__(self, *, url: str | None, bucket: str, workers: int = 0) -> None:
        self.bucket, self.workers = bucket, workers
        self.storage = {
            "endpoint_url": url, "anon": loop.ANONYMOUS,
            "config_kwargs": {"s3": {"addressing_style": "path" if url else "auto"}},
        }  # fmt: skip

    def pack(self, source: str, target: str) -> None:
        pack_parquet(source, target)

    def epoch(self, job: dict[str, Any]) -> Iterator[loop.Batch]:
        register_s3()
        builder = "webdataset" if job.get("format") == "tar" else "parquet"
        files = [f"s3://{self.bucket}/{key}" for key in job.get("parquet", job["keys"])]
        dataset = load_dataset(builder, data_files={"train": files}, streaming=True, storage_options=self.storage)[
            "train"
        ]
        if job.get("shuffle"):
            dataset = dataset.shuffle(buffer_size=job["shuffle"])
        if self.workers or job.get("decode") or builder == "webdataset":
            if builder == "webdataset":
                dataset = dataset.decode(False).map(partial(bare, job["image"]))
            yield from dataloader.batches(dataset, job, self.workers)
            return
        for table in dataset.with_format("arrow").iter(batch_size=job["batch"]):
            yield loop.columns_of(table, job)


def register_s3() -> None:
    """The builder of tars opens them with an argument for HTTP, which s3fs does not know."""

    class S3FileSystem(s3fs.S3FileSystem):
        def __init__(self, *args: Any, block_size: int = 0, **options: Any) -> None:
            super().__init__(*args, **options)

    fsspec.register_implementation("s3", S3FileSystem, clobber=True)


def bare(name: str, sample: dict[str, Any]) -> dict[str, Any]:
    """A picture that is not decoded is a dict with its bytes."""
    image = sample[name]
    return {**sample, name: image["bytes"] if isinstance(image, dict) else image}


CLIENT = Datasets
