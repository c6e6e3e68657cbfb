"""Ray Data: ``iter_batches`` of what it reads, on a local cluster that is started before the clock."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import ray
from pyarrow.fs import S3FileSystem

from penstock.bench.clients import loop

if TYPE_CHECKING:
    from collections.abc import Iterator

READERS = {
    "parquet": "read_parquet",
    "tar": "read_webdataset",
    "tfrecord": "read_tfrecords",
    "objects": "read_binary_files",
}
MORE = {"tar": {"decoder": None}, "objects": {"include_paths": True}}


class RayData:
    """`prefetch` batches."""

    packages = ("ray", "pyarrow")

    def __init__(self, *, url: str | None, bucket: str, prefetch: int = 1, store_bytes: int = 1 << 30) -> None:
        os.environ.update(RAY_DEDUP_LOGS="0", RAY_USAGE_STATS_ENABLED="0", RAY_DATA_DISABLE_PROGRESS_BARS="1")
        self.url, self.bucket, self.prefetch, self.store_bytes = url, bucket, prefetch, store_bytes

    def prepare(self, job: dict[str, Any]) -> None:
        ray.init(
            address="local", num_cpus=2, object_store_memory=self.store_bytes, include_dashboard=False,
            log_to_driver=False, configure_logging=False,
        )  # fmt: skip

    def epoch(self, job: dict[str, Any]) -> Iterator[loop.Batch]:
        files = S3FileSystem(endpoint_override=self.url, region=os.environ["AWS_REGION"], anonymous=loop.ANONYMOUS)
        format_name = job.get("format", "parquet")
        paths = [f"{self.bucket}/{key}" for key in job.get("parquet", job["keys"])]
        read = getattr(ray.data, READERS[format_name])
        dataset = read(paths, filesystem=files, **MORE.get(format_name, {}))
        shuffled = {"local_shuffle_buffer_size": job["shuffle"]} if job.get("shuffle") else {}
        batches = dataset.iter_batches(
            batch_size=job["batch"], batch_format="pyarrow", prefetch_batches=self.prefetch, **shuffled
        )
        for table in batches:
            if format_name == "objects":
                yield table["bytes"].to_pylist(), [loop.number_of(path) for path in table["path"].to_pylist()]
            else:
                yield loop.columns_of(table, job)

    def finish(self) -> None:
        ray.shutdown()


CLIENT = RayData
