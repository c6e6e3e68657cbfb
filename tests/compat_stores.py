"""Stores for tests of ``penstock.compat.s3torchconnector``: buckets in memory instead of S3."""

from __future__ import annotations

from typing import Any

import penstock as ps
from penstock.compat.s3torchconnector.stores import BucketStores
from penstock.store import Store
from penstock.store.base import Wrapper
from penstock.types import Operation, Sink, Transfer


class CountingStore(Wrapper):
    """Notes the operations that pass through it."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.operations: list[Operation] = []

    def submit(self, operation: Operation, sink: Sink) -> Transfer:
        self.operations.append(operation)
        return self.inner.submit(operation, sink)


class MemoryBuckets(BucketStores):
    """Buckets in memory, and what was asked of them."""

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        super().__init__()
        self.made = CountingStore(ps.connect("memory://"))
        for key, data in (objects or {}).items():
            self.made.write(key, data)
        self.made.operations.clear()

    def store(self, bucket: str) -> Store:
        return self.made

    def requests(self, *names: str) -> list[Any]:
        """The operations of these kinds, in order."""
        return [one for one in self.made.operations if type(one).__name__ in names]
