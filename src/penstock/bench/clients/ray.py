"""Ray Data: ``read_parquet`` and ``iter_batches`` on a local cluster, started before the clock."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.bench.clients import loop


class RayData:
    """`prefetch` batches."""

    packages = ("ray", "pyarrow")

    def __init__(self, *, url: str, bucket: str, prefetch: int = 1, store_bytes: int = 1 << 30) -> None:
        os.environ.update(RAY_DEDUP_LOGS="0", RAY_USAGE_STATS_ENABLED="0", RAY_DATA_DISABLE_PROGRESS_BARS="1")
        self.url, self.bucket, self.prefetch, self.store_bytes = url, bucket, prefetch, store_bytes

    def prepare(self, job: dict[str, Any]) -> None:
        import ray

        ray.init(
            num_cpus=2, object_store_memory=self.store_bytes, include_dashboard=False, log_to_driver=False,
            configure_logging=False,
        )  # fmt: skip

    def epoch(self, job: dict[str, Any]) -> Iterator[loop.Batch]:
        import ray
        from pyarrow.fs import S3FileSystem

        files = S3FileSystem(
            endpoint_override=self.url, region=os.environ["AWS_REGION"],
        )  # fmt: skip
        paths = [f"{self.bucket}/{key}" for key in job["parquet"]]
        dataset = ray.data.read_parquet(paths, filesystem=files)
        batches = dataset.iter_batches(batch_size=job["batch"], batch_format="pyarrow", prefetch_batches=self.prefetch)
        for table in batches:
            yield table["image"].to_pylist(), table["label"].to_pylist()

    def finish(self) -> None:
        import ray

        ray.shutdown()


CLIENT = RayData
