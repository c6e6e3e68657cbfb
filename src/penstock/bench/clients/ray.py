"""Ray Data: ``iter_batches``, or ``iter_torch_batches`` of decoded pictures, on a cluster that is started before the clock."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from pyarrow.fs import S3FileSystem

from penstock.bench.clients import decoders, loop, programs

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
    """`prefetch` batches; pictures are decoded by the `decoder` of this name in ``map_batches``."""

    packages = ("ray", "pyarrow")

    def __init__(
        self,
        *,
        url: str | None,
        bucket: str,
        prefetch: int = 1,
        store_bytes: int = 1 << 30,
        decoder: str = "pillow",
    ) -> None:
        os.environ["RAY_DATA_DISABLE_PROGRESS_BARS"] = "1"
        self.url, self.bucket, self.prefetch, self.store_bytes = url, bucket, prefetch, store_bytes
        self.decoder = decoder
        self.stack = ExitStack()

    def prepare(self, job: dict[str, Any]) -> None:
        self.stack.enter_context(programs.ray_cluster(2, store_bytes=self.store_bytes))

    def epoch(self, job: dict[str, Any]) -> Iterator[loop.Batch]:
        files = S3FileSystem(endpoint_override=self.url, region=os.environ["AWS_REGION"], anonymous=loop.ANONYMOUS)
        format_name = job.get("format", "parquet")
        paths = [f"{self.bucket}/{key}" for key in job.get("parquet", job["keys"])]
        read = getattr(ray.data, READERS[format_name])
        dataset = read(paths, filesystem=files, **MORE.get(format_name, {}))
        shuffled = {"local_shuffle_buffer_size": job["shuffle"]} if job.get("shuffle") else {}
        options = {"batch_size": job["batch"], "prefetch_batches": self.prefetch, **shuffled}
        if job.get("decode"):
            pictures = dataset.map_batches(partial(_decoded, job, self.decoder), batch_size=job["batch"])
            for batch in pictures.iter_torch_batches(**options):
                yield batch["image"].numpy(), batch["label"].numpy()
            return
        for table in dataset.iter_batches(batch_format="pyarrow", **options):
            if format_name == "objects":
                yield table["bytes"].to_pylist(), [loop.number_of(path) for path in table["path"].to_pylist()]
            else:
                yield loop.columns_of(table, job)

    def finish(self) -> None:
        self.stack.close()


def _decoded(job: dict[str, Any], decoder: str, batch: dict[str, Any]) -> dict[str, Any]:
    """Pictures and numbers of a batch of columns, in a worker of the cluster."""
    import numpy as np

    if job.get("objects"):
        labels, images = [loop.number_of(path) for path in batch["path"]], batch["bytes"]
    else:
        labels, images = (
            batch[job["label"]] if job["label"] else np.zeros(len(batch[job["image"]])),
            batch[job["image"]],
        )
    decode = decoders.DECODERS[decoder]
    return {
        "image": np.stack([decode(data) for data in images]),
        "label": np.array([loop.label_of(label) for label in labels]),
    }


CLIENT = RayData
