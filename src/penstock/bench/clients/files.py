"""Files: a bucket that penstock, rclone or s3fs mounts, files that were downloaded first, or pipes from ``penstock cat``."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.bench.clients import dataloader, loop, programs

if TYPE_CHECKING:
    from collections.abc import Iterator

PIPED_KEYS = 64


class PipeShare(dataloader.Share):
    """A worker's keys, many of them in one pipe."""

    def __iter__(self) -> Iterator[Any]:
        worker = dataloader.get_worker_info()
        keys = self.keys[worker.id :: worker.num_workers] if worker else self.keys
        for start in range(0, len(keys), PIPED_KEYS):
            with self.open_file(keys[start : start + PIPED_KEYS]) as file:
                yield file


def opened(directory: str, key: str) -> Any:
    return Path(directory, key).open("rb")


class Files:
    """`way` is ``mount``, ``rclone``, ``s3fs``, ``file`` or ``pipe``; `workers` of a DataLoader."""

    def __init__(self, *, url: str | None, bucket: str, way: str, workers: int = 8) -> None:
        self.url, self.bucket, self.way, self.workers = url, bucket, way, workers
        self.packages = ("torch",) if way in ("rclone", "s3fs") else ("penstock-data", "torch")
        self.stack = ExitStack()

    def prepare(self, job: dict[str, Any]) -> None:
        self.directory = self.stack.enter_context(tempfile.TemporaryDirectory(dir=job["scratch"]))
        if self.way in ("mount", "rclone", "s3fs"):
            self.stack.enter_context(programs.mounted(self.way, self.url, self.bucket, self.directory))

    def epoch(self, job: dict[str, Any]) -> Iterator[loop.Batch]:
        if self.way == "pipe":
            share = PipeShare(partial(programs.piped, self.url, self.bucket), job["keys"])
            yield from dataloader.batches(dataloader.Stream(share, job), job, self.workers)
            return
        if self.way == "file":
            programs.download(self.url, self.bucket, job, self.directory)
        yield from dataloader.read(partial(opened, self.directory), job, self.workers)

    def finish(self) -> None:
        self.stack.close()


CLIENT = Files
