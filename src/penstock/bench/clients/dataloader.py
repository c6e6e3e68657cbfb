"""What the clients share that read in PyTorch's ``DataLoader``: shards as a stream, objects by number, and their batches."""

from __future__ import annotations

import os
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from penstock.bench.clients import decoders, loop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class Collate:
    """A batch of samples, which are dicts: lists of buffers, or one tensor of pictures, which crosses in shared memory."""

    def __init__(self, job: dict[str, Any], decoder: str | None = None) -> None:
        self.image, self.label = job["image"], job["label"]
        self.decode = decoders.DECODERS[decoder or "pillow"] if job.get("decode") else None

    def __call__(self, samples: list[dict[str, Any]]) -> tuple[Any, Any]:
        images, labels = [sample[self.image] for sample in samples], [sample.get(self.label) for sample in samples]
        if self.decode is None:
            return [bytes(image) for image in images], labels
        return torch.stack([torch.from_numpy(self.decode(image)) for image in images]), labels


class Stream(IterableDataset[dict[str, Any]]):
    """The samples of shards, as the libraries' own examples read them; `files` are those of this worker."""

    def __init__(self, files: Iterable[Any], job: dict[str, Any], buffer_bytes: int = 10240) -> None:
        self.files, self.job, self.buffer_bytes = files, job, buffer_bytes

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for file in self.files:
            if self.job.get("format") == "parquet":
                yield from loop.read_parquet(file, self.job)
            else:
                yield from loop.read_tar(file, (self.job["image"], self.job["label"]), self.buffer_bytes)


class Share:
    """The files of the keys that a worker reads: `open_file` opens a key."""

    def __init__(self, open_file: Callable[[str], Any], keys: list[str]) -> None:
        self.open_file, self.keys = open_file, keys

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        for key in self.keys[worker.id :: worker.num_workers] if worker else self.keys:
            with self.open_file(key) as file:
                yield file


class Objects(Dataset[dict[str, Any]]):
    """Objects by number; the number in a key is the label."""

    def __init__(self, open_file: Callable[[str], Any], job: dict[str, Any]) -> None:
        self.open_file, self.job = open_file, job

    def __len__(self) -> int:
        return len(self.job["keys"])

    def __getitem__(self, number: int) -> dict[str, Any]:
        key = self.job["keys"][number]
        with self.open_file(key) as file:
            return self.sample(file, key)

    def sample(self, file: Any, key: str) -> dict[str, Any]:
        return {self.job["image"]: file.read(), self.job["label"]: loop.number_of(key)}


class Chunks(Objects):
    """Ranges of ``chunk_bytes`` at random places of files."""

    def __len__(self) -> int:
        return 1 << 30  # more than a turn reads

    def __getitem__(self, number: int) -> dict[str, Any]:
        source, size = Random(number), self.job["chunk_bytes"]
        with self.open_file(source.choice(self.job["keys"])) as file:
            file.seek(source.randint(0, max(0, file.seek(0, os.SEEK_END) - size)))
            return {self.job["image"]: file.read(size)}


def batches(
    dataset: Any, job: dict[str, Any], workers: int, *, decoder: str | None = None, **options: Any
) -> Iterator[loop.Batch]:
    """The batches of a DataLoader over a dataset of such samples."""
    loader = DataLoader(
        dataset, batch_size=job["batch"], num_workers=workers, collate_fn=Collate(job, decoder), **options
    )
    for images, labels in loader:
        yield (images.numpy() if job.get("decode") else images), labels


def read(open_file: Callable[[str], Any], job: dict[str, Any], workers: int) -> Iterator[loop.Batch]:
    """Objects in random order, shards, or chunks of them, each of which `open_file` opens by its key."""
    if job.get("chunk_bytes"):
        return batches(Chunks(open_file, job), job, workers)
    if job.get("objects"):
        return batches(Objects(open_file, job), job, workers, shuffle=True)
    return batches(Stream(Share(open_file, job["keys"]), job), job, workers)
