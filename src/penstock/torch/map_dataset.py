"""``MapDataset``: samples by number, for ``torch.utils.data.DataLoader(dataset, batch_size=n, shuffle=True)``."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch.utils.data

from penstock import forks
from penstock.access.dataset import PipelineDataset, transform_of
from penstock.config import SEED_MAX, check_whole
from penstock.torch.epochs import EpochTable, worker_here
from penstock.tracebacks import boundary

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from penstock.access.dataset import Index
    from penstock.cache import CacheConfig
    from penstock.config import FetchConfig
    from penstock.pipeline import Pipeline


@boundary
class MapDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """``pipeline.open()`` for a DataLoader: opened at first use, with epochs that its workers agree on.

    ``dataset[i]`` is a dict of values as the pipeline's stages make them, with ``__key__``, ``__shard__`` (the object's
    or shard's URL) and ``__position__`` (i). Batches of numbers, which DataLoader asks for by itself, are fetched side
    by side: ``DataLoader(dataset, batch_size=n, shuffle=True, num_workers=w)`` has w batches' requests in flight.

    Args:
        pipeline: A source and stages that keep samples apart: ``decode``, ``map``, ``select``, ``join``. No ``batch``
            and no ``shuffle``: batches and order are the DataLoader's and its sampler's.
        seed: Of the `rng` of ``map`` functions, which depends on (seed, epoch, i).
        index: Of shards. ``"require"``: ranks and jobs would each make one, so run ``penstock index`` before;
            ``"auto"`` makes it where it is missing.
        index_dir: Where the index of shards may lie besides them.
        cache: Keep what is read on this node's disk, as for ``connect``.
        fetch: Bounds for reading.

    Raises:
        ConfigError: a stage that batches, drops or multiplies samples; when first used: shards without an index.

    Cost: nothing until used; then one listing, or one read of the index, which workers inherit. Names are held as
        text, 12 bytes besides for each sample of an indexed shard. A batch's samples are held as stored, once each.
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
        transform_of(pipeline)  # refuses now what could not be opened
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
        """Sample `index`, by number or key; of a slice or list, samples: as ``pipeline.open()[index]``.

        Raises:
            IndexError, KeyError: there is no such sample.
            StoreError, DataError: it cannot be read or decoded; names key and shard.

        Cost: one request (one per member of a group).
        """
        return self._opened().at(index, epoch=self._epoch())

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Samples `indices`, in this order; what is asked for twice is read once.

        Raises:
            IndexError: there is no such sample.
            ObjectChangedError: an object or shard is no longer the version that was found.
            StoreError, DataError: one cannot be read or decoded; names key and shard.

        Cost: a request for each sample, as many at a time as the store takes; ranges near each other in a shard are one.
        """
        return self._opened().read_samples(indices, epoch=self._epoch())

    def set_epoch(self, epoch: int) -> None:
        """Let ``map`` functions draw other random numbers, in workers too, those that live on included.

        Raises:
            ConfigError: it is negative.
        """
        check_whole("epoch", epoch, 0, SEED_MAX)
        self._epochs.set_next(epoch, worker=worker_here())

    def close(self) -> None:
        """Let go of stores; idempotent. Used again, it opens again."""
        dataset, self._dataset = self._dataset, None
        if dataset is not None:
            dataset.close()

    def after_fork_in_child(self) -> None:
        """See ``forks``."""
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
