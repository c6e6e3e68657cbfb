"""``Door``: one way to read the data set. Each is opened for one job, read for one or more epochs, and closed."""

from __future__ import annotations

import json
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from doors.matrix.data_set import Record
from penstock.cache import CacheConfig

BATCH = 4


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a door is asked to read, and how.

    Attributes:
        url: Folder of the shards, ``s3://bucket/prefix/``. Endpoint and keys are in the environment.
        files: Names of the shards below it, in order.
        seed: Seed of a shuffle; None reads in the stored order.
        workers: Worker processes.
        cache: Directory of a cache on this node's disk, and what keeps files there between jobs.
    """

    url: str
    files: tuple[str, ...]
    seed: int | None = None
    workers: int = 0
    cache: str | None = None

    @property
    def bucket(self) -> str:
        """Name of the bucket."""
        return self.url.split("/")[2]

    @property
    def prefix(self) -> str:
        """Prefix of the keys, with a slash at its end."""
        return self.url.split("/", 3)[3]

    @property
    def node_cache(self) -> CacheConfig | None:
        """The cache, as penstock's ``cache=`` takes it; a machine whose disk is nearly full would not keep anything."""
        return None if self.cache is None else CacheConfig(self.cache, bytes_max=1 << 30, free_ratio_min=0.0)

    @property
    def urls(self) -> list[str]:
        """URL of each shard."""
        return [self.url + name for name in self.files]


class ProgramError(Exception):
    """A program that a door started has failed.

    Args:
        code: Its exit code.
        text: What it wrote to its standard error.
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"exit code {code}: {text}")
        self.code = code


class Door(ABC):
    """Base of the doors. What a subclass opens, it enters into ``self.open``."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.open = ExitStack()

    @abstractmethod
    def epoch(self) -> Iterator[list[Record]]:
        """Yield the batches of the next epoch."""

    def state(self) -> Any:
        """Return the position after the last batch, if the door has one."""
        raise LookupError("this door has no state")

    def restore(self, state: Any) -> None:
        """Continue at a position in the next epoch."""
        raise LookupError("this door has no state")

    def head(self, batches_count: int) -> tuple[list[Record], Any]:
        """Return the records of the first batches of an epoch, and the position after them, as JSON would keep it."""
        records: list[Record] = []
        batches = self.epoch()
        for _ in range(batches_count):
            records += next(batches)
        return records, json.loads(json.dumps(self.state()))

    def close(self) -> None:
        """End everything that the door has opened."""
        self.open.close()

    def folder(self) -> Path:
        """Return a new directory that is removed at the end."""
        return Path(self.open.enter_context(tempfile.TemporaryDirectory(prefix="penstock-door-")))

    def environment(self, **more: str) -> dict[str, str]:
        """Return the environment for programs that the door starts."""
        return {**os.environ, **more}


def in_batches(records: Iterator[Record]) -> Iterator[list[Record]]:
    """Yield records one at a time, for doors that have no batches."""
    for record in records:
        yield [record]
