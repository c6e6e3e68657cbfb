"""Doors for PyTorch's ``DataLoader``, and those of libraries that are used with it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from typing import Any

import torch.utils.data

import penstock as ps
from doors.matrix.data_set import Record, as_record, record_of
from doors.matrix.door import BATCH, Door, Job, in_batches
from doors.matrix.plain_doors import pipeline, records
from doors.matrix.streams import records_of_tar

torch.set_num_threads(1)


class IterableDoor(Door):
    """``ps.torch.IterableDataset`` in torchdata's ``StatefulDataLoader``, which is a ``DataLoader`` with a state."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        from torchdata.stateful_dataloader import StatefulDataLoader

        self.dataset = ps.torch.IterableDataset(pipeline(job), cache=job.node_cache)
        self.open.callback(self.dataset.close)
        self.loader = StatefulDataLoader(self.dataset, batch_size=None, num_workers=job.workers)

    def epoch(self) -> Iterator[list[Record]]:
        for batch in self.loader:
            yield records(batch["record"])

    def state(self) -> Any:
        return self.loader.state_dict()

    def restore(self, state: Any) -> None:
        self.loader.load_state_dict(state)


class MapDoor(Door):
    """``ps.torch.MapDataset`` in a ``DataLoader``."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.dataset = ps.torch.MapDataset(ps.shards(job.url).map(as_record), index="auto", cache=job.node_cache)
        self.open.callback(self.dataset.close)
        generator = torch.Generator()
        generator.manual_seed(job.seed or 0)
        self.loader = torch.utils.data.DataLoader(
            self.dataset, batch_size=BATCH, shuffle=job.seed is not None, generator=generator, collate_fn=list,
            num_workers=job.workers,
        )  # fmt: skip

    def epoch(self) -> Iterator[list[Record]]:
        for batch in self.loader:
            yield records(sample["record"] for sample in batch)


class WebDatasetDoor(Door):
    """``webdataset.WebDataset`` on ``s3://`` after ``import penstock.webdataset``."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        import penstock.webdataset

        penstock.webdataset.register(cache=job.node_cache)

    def urls(self) -> list[str]:
        """Return the URLs of the shards, as WebDataset opens them."""
        return self.job.urls

    def epoch(self) -> Iterator[list[Record]]:
        import webdataset

        dataset = webdataset.WebDataset(self.urls(), shardshuffle=False, empty_check=False)
        if self.job.seed is not None:
            dataset = dataset.shuffle(32, seed=self.job.seed)
        loader = torch.utils.data.DataLoader(
            dataset.map(_webdataset_record), batch_size=None, num_workers=self.job.workers
        )
        yield from in_batches(iter(loader))


class WebDatasetPipeDoor(WebDatasetDoor):
    """``webdataset.WebDataset`` on ``pipe:penstock cat``."""

    def urls(self) -> list[str]:
        program = f"{shlex.quote(sys.executable)} -m penstock cat"
        return [f"pipe:{program} {url}" for url in self.job.urls]


def _webdataset_record(sample: dict[str, Any]) -> Record:
    return record_of(sample["__key__"], sample)


class ConnectorIterableDoor(Door):
    """``S3IterableDataset`` of ``penstock.compat.s3torchconnector``; Python's ``tarfile`` reads its objects in the workers."""

    def epoch(self) -> Iterator[list[Record]]:
        from penstock.compat.s3torchconnector import S3IterableDataset

        dataset = S3IterableDataset.from_prefix(
            self.job.url, transform=_records_of_object, enable_sharding=True, s3client_config=_few_attempts()
        )
        yield from torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=self.job.workers)


class ConnectorMapDoor(Door):
    """``S3MapDataset`` of ``penstock.compat.s3torchconnector``."""

    def epoch(self) -> Iterator[list[Record]]:
        from penstock.compat.s3torchconnector import S3MapDataset

        dataset = S3MapDataset.from_prefix(self.job.url, transform=_records_of_object, s3client_config=_few_attempts())
        generator = torch.Generator()
        generator.manual_seed(self.job.seed or 0)
        loader = torch.utils.data.DataLoader(
            dataset, batch_size=2, shuffle=self.job.seed is not None, generator=generator, collate_fn=list,
            num_workers=self.job.workers,
        )  # fmt: skip
        for objects in loader:
            yield from objects


class HuggingFaceDoor(Door):
    """``penstock.huggingface.dataset`` in torchdata's ``StatefulDataLoader``."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        import datasets
        from torchdata.stateful_dataloader import StatefulDataLoader

        dataset = ps.huggingface.dataset(
            pipeline(job), features=datasets.Features({"record": datasets.Value("binary")}), cache=job.node_cache
        )
        self.loader = StatefulDataLoader(dataset, batch_size=BATCH, collate_fn=list, num_workers=job.workers)

    def epoch(self) -> Iterator[list[Record]]:
        for batch in self.loader:
            yield records(example["record"] for example in batch)

    def state(self) -> Any:
        return self.loader.state_dict()

    def restore(self, state: Any) -> None:
        self.loader.load_state_dict(state)


def _few_attempts() -> Any:
    from penstock.compat.s3torchconnector import S3ClientConfig

    return S3ClientConfig(max_attempts=3)  # ten, the connector's default, take half a minute to give up


def _records_of_object(reader: Any) -> list[Record]:
    return list(records_of_tar(reader, name=reader.key))
