"""The user's own pipeline by penstock's ``Loader``: a ``ps.Pipeline`` with a batch, or a function that returns one."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock import Loader
from penstock.bench.clients import programs, steps

if TYPE_CHECKING:
    from collections.abc import Iterator


class OwnBatch:
    """The largest field, and the numbers of the samples; ``own`` is what the pipeline gave, for a step of the user's."""

    def __init__(self, own: dict[str, Any]) -> None:
        fields = [bytes_of(column) for name, column in own.items() if not name.startswith("__")]
        self.own, self._largest = own, max(fields, key=lambda rows: getattr(rows, "nbytes", 0) or sum(map(len, rows)))

    def __getitem__(self, number: int) -> Any:
        return (self._largest, range(len(self._largest)))[number]


class UsersPipeline:
    """The job names it: ``pipeline``, which is ``module:name``. `cluster`: number of workers on a Ray cluster."""

    packages = ("penstock-data", "numpy")

    def __init__(self, *, url: str | None, bucket: str, cluster: int = 0, **loader: Any) -> None:
        self.cluster, self.loader = cluster, loader
        self.fetched_bytes = 0
        self.stack = ExitStack()

    def prepare(self, job: dict[str, Any]) -> None:
        self.loader |= programs.cluster_workers(self.stack, self.cluster)

    def finish(self) -> None:
        self.stack.close()

    def epoch(self, job: dict[str, Any]) -> Iterator[OwnBatch]:
        pipeline = steps.users_object(job["pipeline"])
        with Loader(pipeline() if callable(pipeline) else pipeline, **self.loader) as loader:
            try:
                for batch in loader:
                    yield OwnBatch(batch)
                    del batch
            finally:
                self.fetched_bytes = loader.statistics().bytes

    def about(self) -> dict[str, Any]:
        """Bytes that came from the store."""
        return {"fetched_bytes": self.fetched_bytes}


def bytes_of(column: Any) -> Any:
    """The samples of a field as rows of bytes; pictures stay arrays, which steps read."""
    if isinstance(column, np.ndarray) and column.dtype != object:
        return column if column.ndim == 4 else np.ascontiguousarray(column).reshape(len(column), -1).view(np.uint8)
    rows = [np.ravel(each).view(np.uint8) if isinstance(each, np.ndarray) else each for each in column]
    return [row if hasattr(row, "__len__") else b"" for row in rows]


CLIENT = UsersPipeline
