"""``MapDataset``: random access to samples for ``torch.utils.data.DataLoader(dataset, batch_size=n, shuffle=True)``."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch.utils.data

from penstock.access.dataset import PipelineDataset, transform_of
from penstock.config import SEED_MAX, check_whole
from penstock.system import forks
from penstock.system.tracebacks import boundary
from penstock.torch.epochs import EpochTable, worker_here

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from penstock.access.dataset import Index
    from penstock.cache import CacheConfig
    from penstock.config import FetchConfig
    from penstock.pipeline import Pipeline


@boundary
class MapDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """``pipeline.open()`` for a DataLoader. It opens the data at first use, and its workers agree on the epoch.

    ``dataset[i]`` is a dict of the values that the pipeline's stages make, with ``__key__``, ``__shard__`` (the URL of the
    object or shard) and ``__position__`` (i). The samples of a batch are fetched at the same time:
    ``DataLoader(dataset, batch_size=n, shuffle=True, num_workers=w)`` has the requests of w batches in flight.

    Args:
        pipeline: A source and stages that treat samples separately: ``decode``, ``map``, ``select``, ``join``. ``batch`` and
            ``shuffle`` are not allowed, since the DataLoader batches and its sampler orders the samples.
        seed: Seed of the `rng` of ``map`` functions, which depends on (seed, epoch, i).
        index: Treatment of shards without an index: ``"require"`` raises, so run ``penstock index`` before; ``"auto"`` builds
            it, but every rank and job would build its own.
        index_dir: Directory that may hold the index of the shards, besides the place of the shards themselves.
        cache: Cache on this node's disk, as for ``connect``.
        fetch: Limits of reading.

    Raises:
        ConfigError: A stage batches, drops or multiplies samples; or, at first use, the shards have no index.

    Cost: nothing before the first use; then one listing, or one read of the index, which workers inherit. Memory holds
        the names as text, 12 bytes for each sample of an indexed shard, and the samples of a batch as they are stored.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        seed: int = 0,
        index: Index = "require",
        index_dir: str | os.PathLike[str] | None = None,
        cache: CacheConfig | str | os.PathLike[str] | None = None,
        fetch: FetchConfig | None = None,
    ) -> None:
        transform_of(pipeline)  # refuses a pipeline that cannot be opened
        self.pipeline = pipeline
        self._options: dict[str, Any] = {
            "seed": seed, "index": index, "index_dir": index_dir, "cache": cache, "fetch": fetch
        }  # fmt: skip
        self._epochs = EpochTable()
        self._dataset: PipelineDataset | None = None
        self._opening = threading.Lock()
        forks.register(self)

    def __len__(self) -> int:
        return len(self._opened())

    def __getitem__(self, index: Any) -> Any:
        """Return the sample of a number or key, or several of a slice or list, as ``pipeline.open()[index]`` does.

        Raises:
            IndexError: The number is out of range.
            KeyError: The key is unknown.
            StoreError: The sample cannot be read; the message names key and shard.
            DataError: The sample cannot be decoded; the message names key and shard.

        Cost: one request, or one for each member of a group.
        """
        return self._opened().at(index, epoch=self._epoch())

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return several samples in the order of their numbers in `indices`. A number that occurs twice is read once.

        Raises:
            IndexError: A number is out of range.
            ObjectChangedError: An object or shard was replaced after it was listed or indexed.
            StoreError: A sample cannot be read; the message names key and shard.
            DataError: A sample cannot be decoded; the message names key and shard.

        Cost: one request for each sample, or for neighbouring samples of a shard, as many at a time as the store allows.
        """
        return self._opened().read_samples(indices, epoch=self._epoch())

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, so that ``map`` functions draw other random numbers. Persistent workers use it too.

        Raises:
            ConfigError: The epoch is negative or too large.
        """
        check_whole("epoch", epoch, 0, SEED_MAX)
        self._epochs.set_next(epoch, worker=worker_here())

    def close(self) -> None:
        """Close the stores; idempotent. If the dataset is used again, it opens them again."""
        dataset, self._dataset = self._dataset, None
        if dataset is not None:
            dataset.close()

    def after_fork_in_child(self) -> None:
        """Replace the lock, which another thread of the parent may have held."""
        self._opening = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opening": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._opening = threading.Lock()
        forks.register(self)

    def _epoch(self) -> int:
        return self._epochs.next(worker_here())

    def _opened(self) -> PipelineDataset:
        with self._opening:
            if self._dataset is None:
                self._dataset = PipelineDataset(self.pipeline, **self._options)
            return self._dataset
