"""LitData: its own chunks, streamed to a local cache that every epoch begins without."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import litdata
import torch
from litdata.streaming import downloader
from litdata.streaming.item_loader import TokensLoader

from penstock.bench.clients import dataloader, loop

if TYPE_CHECKING:
    from collections.abc import Iterator


WORKER_BATCH = 16  # a worker reads one sample after the other: smaller pieces keep all of them busy


class ByNumber(torch.utils.data.Dataset[Any]):
    """What a DataLoader shuffles by a sampler: each sample by ``dataset[i]``, a range of its chunk."""

    def __init__(self, dataset: litdata.StreamingDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


class LitData:
    """`workers` of its StreamingDataLoader; `by_number`, of a DataLoader that shuffles and asks for ``dataset[i]``.

    `keep`: what it has copied stays, so that later epochs are warm. `block`: of so many tokens.
    """

    packages = ("litdata", "torch")

    def __init__(
        self,
        *,
        url: str | None,
        bucket: str,
        workers: int = 8,
        by_number: bool = False,
        keep: bool = False,
        block: int = 0,
        **dataset: Any,
    ) -> None:
        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # there is no option for it, and a plain URL hangs
        self.url, self.bucket, self.workers, self.dataset = url, bucket, workers, dataset
        self.by_number = by_number
        self.cache: str | None = None
        self.keep = keep
        self.block = block

    def pack(self, source: str, target: str) -> None:
        """64 MB a chunk, its usual size; or `target` says how many samples."""
        from litdata.streaming.cache import Cache

        count = Path(target).name.partition("-of-")[2]
        if self.block:
            cache = Cache(target, chunk_bytes="64MB", item_loader=TokensLoader(self.block))
            for index, (image, label) in enumerate(loop.tar_samples(source)):
                cache[index] = torch.from_numpy(loop.block_of(image, label))
        else:
            cache = Cache(target, **({"chunk_size": int(count)} if count else {"chunk_bytes": "64MB"}))
            for index, (image, label) in enumerate(loop.tar_samples(source)):
                cache[index] = {loop.IMAGE: image, loop.LABEL: label}
        cache.done()
        cache.merge()

    def prepare(self, job: dict[str, Any]) -> None:
        if self.keep and self.cache:
            return
        if self.block and "state" in job:
            self.cache = f"{job['scratch']}/litdata"  # a state names the cache, and no other one may be used
        else:
            self.cache = tempfile.mkdtemp(prefix="penstock-litdata-", dir=job["scratch"])

    def epoch(self, job: dict[str, Any]) -> Iterator[loop.Batch]:
        dataset = litdata.StreamingDataset(
            f"s3://{self.bucket}/{job.get('litdata', job['prefix'])}", cache_dir=self.cache, shuffle=bool(job.get("shuffle")),
            storage_options={"endpoint_url": self.url} if self.url else {}, drop_last=False, **self.dataset,
            **({"item_loader": TokensLoader(self.block)} if self.block else {}),
        )  # fmt: skip
        if self.block:
            loader = litdata.StreamingDataLoader(dataset, batch_size=job["batch"], num_workers=self.workers)
            for batch in loop.begun(loader, job):
                yield loop.of_blocks(batch.numpy())
            return
        collate = dataloader.Collate(
            job
        )  # of bytes: it gives memoryviews, which cannot cross from a worker (and then it hangs)
        if self.by_number:
            loader = torch.utils.data.DataLoader(
                ByNumber(dataset), batch_size=WORKER_BATCH, shuffle=True, num_workers=self.workers, collate_fn=collate
            )
            samples = (sample for images, labels in loader for sample in zip(images, labels, strict=True))
            yield from loop.batched(samples, job["batch"])
            return
        loader = litdata.StreamingDataLoader(
            dataset, batch_size=job["batch"], num_workers=self.workers, collate_fn=collate
        )
        for images, labels in loader:
            yield (images.numpy() if job.get("decode") else images), labels

    def finish(self) -> None:
        if not self.keep:
            shutil.rmtree(self.cache, ignore_errors=True)


CLIENT = LitData
