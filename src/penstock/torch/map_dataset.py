"""``MapDataset``: samples by number, for ``torch.utils.data.DataLoader(dataset, batch_size=n, shuffle=True)``."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch.utils.data

from penstock.config import FetchConfig
from penstock.errors import ConfigError
from penstock.loader.samples import SampleRandom, Steps
from penstock.pipeline import Decode, Join, Map, Mix, Pipeline, Select
from penstock.torch.epochs import EpochTable, worker_here
from penstock.torch.places import Fetched, Places, look

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

REQUESTS_MIN = 64


class MapDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Samples by number: of objects, one each or grouped by stem, or of shards that have an index.

    ``dataset[i]`` is a dict of values as the pipeline's stages make them, with ``__key__``, ``__shard__`` (the object's
    or shard's URL) and ``__position__`` (i). Batches of numbers, which DataLoader asks for by itself, are fetched side
    by side: ``DataLoader(dataset, batch_size=n, shuffle=True, num_workers=w)`` has w batches' requests in flight.

    Args:
        pipeline: A source and stages that keep samples apart: ``decode``, ``map``, ``select``, ``join``. No ``batch``
            and no ``shuffle``: batches and order are the DataLoader's and its sampler's.
        seed: Of the `rng` of ``map`` functions, which depends on (seed, epoch, i).
        index_dir: Where the index of shards may lie besides them.
        fetch: Bounds for reading. Default: 64 requests at once from the start, because a batch is wanted whole.

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
        index_dir: str | os.PathLike[str] | None = None,
        fetch: FetchConfig | None = None,
    ) -> None:
        _check(pipeline)
        self.pipeline = pipeline
        self._steps = Steps(pipeline)
        if self._steps.may_drop:
            raise ConfigError(
                f"{pipeline!r} may drop samples, and then a number would have none",
                hint="max_errors=0, missing='raise'",
            )
        self._seed = seed
        self._index_dir = index_dir
        # 8, the usual beginning, doubles while one starves: a batch of 128 took 1.4 times as long (30 ms to a first byte)
        self._fetch = fetch or FetchConfig(requests_min=REQUESTS_MIN)
        self._epochs = EpochTable()
        self._places: Places | None = None
        self._looking = threading.Lock()

    def __len__(self) -> int:
        return len(self._found())

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Sample `index`; negative numbers count from the end.

        Raises:
            IndexError: there is no such sample.
            StoreError, DataError: it cannot be read or decoded; names key and shard.

        Cost: one request (one per member of a group).
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Samples `indices`, in this order; what is asked for twice is read once.

        Raises:
            IndexError: there is no such sample.
            StoreError, DataError: one cannot be read or decoded; names key and shard.

        Cost: a request for each sample, as many at a time as the store takes; ranges of one shard that adjoin are one.
        """
        places = self._found()
        asked = [self._number(int(index), len(places)) for index in indices]
        random = SampleRandom(seed=self._seed, epoch=self._epochs.next(worker_here()))
        uses = Counter(asked)
        held: dict[int, Fetched] = {}
        fetched = places.fetch(list(uses))  # in the order of their first use
        samples = []
        for index in asked:
            if index not in held:
                held[index] = next(fetched)
            uses[index] -= 1
            samples.append(self._made(index, held[index] if uses[index] else held.pop(index), random))
        return samples

    def set_epoch(self, epoch: int) -> None:
        """Let ``map`` functions draw other random numbers, in workers too, those that live on included.

        Raises:
            ConfigError: it is negative.
        """
        if epoch < 0:
            raise ConfigError(f"set_epoch({epoch}) must not be negative")
        self._epochs.set_next(epoch, worker=worker_here())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_steps": None, "_looking": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._steps = Steps(self.pipeline)
        self._looking = threading.Lock()

    def _found(self) -> Places:
        with self._looking:
            if self._places is None:
                source = self.pipeline.source
                assert not isinstance(source, Mix)  # _check
                self._places = look(source, fetch=self._fetch, index_dir=self._index_dir)
            return self._places

    @staticmethod
    def _number(index: int, count: int) -> int:
        if not -count <= index < count:
            raise IndexError(f"sample {index} of {count}")
        return index % count

    def _made(self, index: int, fetched: Fetched, random: SampleRandom) -> dict[str, Any]:
        sample, url = fetched
        values = self._steps(sample, shard=url, position=index, random=random)
        return {**values, "__key__": sample.key, "__shard__": url, "__position__": index}


def _check(pipeline: Pipeline) -> None:
    if not isinstance(pipeline, Pipeline):
        raise ConfigError(f"MapDataset({pipeline!r}) must be given a pipeline", hint="ps.objects(url).decode(...)")
    if isinstance(pipeline.source, Mix):
        raise ConfigError(f"{pipeline!r} mixes sources, which has an order", hint="torch.utils.data.ConcatDataset")
    for stage in pipeline.stages:
        if not isinstance(stage, Decode | Map | Select | Join):
            raise ConfigError(
                f"{pipeline!r} has a {stage!r}, and MapDataset gives samples by number, one by one",
                hint="DataLoader(dataset, batch_size=, shuffle=, drop_last=) batches and orders; IterableDataset takes it",
            )
