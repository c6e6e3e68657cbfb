"""MosaicML Streaming: MDS shards, copied to a local folder that every epoch begins without."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import penstock.bench.clients.without_torchvision  # noqa: F401 - before streaming
from penstock.bench.clients import dataloader, loop

# isort: split
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory

if TYPE_CHECKING:
    from collections.abc import Iterator


def as_blocks(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"tokens": np.stack([sample["tokens"] for sample in samples])}


class Mosaic:
    """`workers` of the DataLoader; `keep`: what it has copied stays, so later epochs are warm; `block`: of so many tokens."""

    packages = ("mosaicml-streaming", "torch")

    def __init__(
        self, *, url: str | None, bucket: str, workers: int = 8, keep: bool = False, block: int = 0, **dataset: Any
    ) -> None:
        loop.use_endpoint(url, "S3_ENDPOINT_URL")
        self.bucket, self.workers, self.dataset = bucket, workers, dataset
        self.local: str | None = None
        self.keep = keep
        self.block = block

    def pack(self, source: str, target: str) -> None:
        """64 MiB a shard, its usual size; or as many bytes as `target`'s name says."""
        if self.block:
            with MDSWriter(
                out=target, columns={"tokens": f"ndarray:uint16:{self.block}"}, size_limit=1 << 26
            ) as writer:
                for image, label in loop.tar_samples(source):
                    writer.write({"tokens": loop.block_of(image, label)})
            return
        size = Path(target).name.partition("-of-")[2]
        columns = {loop.IMAGE: "bytes", loop.LABEL: "int"}
        with MDSWriter(out=target, columns=columns, size_limit=int(size or 1 << 26)) as writer:
            for image, label in loop.tar_samples(source):
                writer.write({loop.IMAGE: image, loop.LABEL: label})

    def prepare(self, job: dict[str, Any]) -> None:
        clean_stale_shared_memory()
        if self.keep and self.local:
            return
        self.local = tempfile.mkdtemp(prefix="penstock-mosaic-", dir=job["scratch"])

    def epoch(self, job: dict[str, Any]) -> Iterator[loop.Batch]:
        dataset = StreamingDataset(
            remote=f"s3://{self.bucket}/{job.get('mosaicml', job['prefix'])}",
            local=f"{self.local}/copy", batch_size=job["batch"], shuffle=bool(job.get("shuffle")), **self.dataset,
        )  # fmt: skip
        if self.block:
            loader = StreamingDataLoader(
                dataset, batch_size=job["batch"], num_workers=self.workers, collate_fn=as_blocks
            )
            for batch in loop.begun(loader, job):
                yield loop.of_blocks(batch["tokens"])
            return
        yield from dataloader.batches(dataset, job, self.workers)

    def finish(self) -> None:
        if not self.keep:
            shutil.rmtree(self.local, ignore_errors=True)
        for left in Path("/dev/shm").glob(
            "[0-9][0-9][0-9][0-9][0-9][0-9]_*"
        ):  # it leaves them where workers were ended
            left.unlink(missing_ok=True)


CLIENT = Mosaic
