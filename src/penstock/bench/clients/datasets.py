"""Hugging Face datasets, streaming Parquet; ``batch`` of Arrow, or a DataLoader's workers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.bench.clients import loop

if TYPE_CHECKING:
    from collections.abc import Iterator


def pack_parquet(source: str, target: str, group_bytes: int = 16 << 20, file_bytes: int = 64 << 20) -> None:
    """Files of about 64 MB, uncompressed: JPEGs do not compress. Shared with Ray's driver."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema({"image": pa.binary(), "label": pa.int64()})
    Path(target).mkdir(parents=True, exist_ok=True)
    writer, number, written, images, labels = None, 0, 0, [], []

    def flush() -> None:
        if images:
            writer.write_table(pa.table({"image": images, "label": labels}, schema=schema))
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


def as_lists(samples: list[dict[str, Any]]) -> tuple[Any, Any]:
    return [sample["image"] for sample in samples], [sample["label"] for sample in samples]


class Datasets(loop.Plain):
    """`workers` 0: ``with_format("arrow").iter``; else a DataLoader over it."""

    packages = ("datasets", "s3fs")

    def __init__(self, *, url: str, bucket: str, workers: int = 0) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        self.bucket, self.workers = bucket, workers
        self.storage = {"endpoint_url": url, "config_kwargs": {"s3": {"addressing_style": "path"}}}

    def pack(self, source: str, target: str) -> None:
        pack_parquet(source, target)

    def epoch(self, job: dict[str, Any]) -> Iterator[loop.Batch]:
        from datasets import load_dataset

        files = [f"s3://{self.bucket}/{key}" for key in job["parquet"]]
        found = load_dataset("parquet", data_files={"train": files}, streaming=True, storage_options=self.storage)
        dataset = found["train"]
        if self.workers:
            from torch.utils.data import DataLoader

            yield from DataLoader(dataset, batch_size=job["batch"], num_workers=self.workers, collate_fn=as_lists)
            return
        for table in dataset.with_format("arrow").iter(batch_size=job["batch"]):
            yield table["image"].to_pylist(), table["label"].to_pylist()


CLIENT = Datasets
