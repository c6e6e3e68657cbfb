"""``PipelineDataset``: the samples of a pipeline by number and by key, as ``Pipeline.open`` returns them.

There are two ways to read. A batch (``read_samples``, ``ds[...]``) is needed as a whole: its ranges are sorted
and merged, all requests are sent at once, and samples are decoded as they arrive and returned in the order of the indices. A
stream (``iter_samples``, ``iter(ds)``) is read ahead and returned in order, in bounded memory however long it is.

A data set holds the names and versions of all objects, or the indexes of the shards that were read from, but no samples. Any
number of threads may use it at once: they share its stores and the process's event loops.
"""

from __future__ import annotations

import logging
from functools import cached_property
from operator import index as as_index
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from penstock.config import SEED_MAX, FetchConfig, check_configs, check_path, check_whole
from penstock.errors import ClosedError, ConfigError
from penstock.index import build, in_directory, lookup
from penstock.memory.ranges import REQUEST_COST_BYTES
from penstock.pipeline import (
    Dataset,
    Decode,
    Join,
    Map,
    Mix,
    Objects,
    Pipeline,
    Select,
    Sequential,
    Shards,
    check_rereadable,
)
from penstock.samples.decoding import SampleRandom
from penstock.samples.transform import SampleTransform
from penstock.sources.indexed_reader import IndexedReader
from penstock.sources.objects import FunctionReader, ObjectSampleReader
from penstock.sources.shards import ShardFinder, read_classes
from penstock.system.tracebacks import boundary

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.cache import CacheConfig
    from penstock.formats import Sample
    from penstock.index import Lookup
    from penstock.pipeline.dataset import Values
    from penstock.sources.readers import SampleReader
    from penstock.sources.shards import Shard

Index: TypeAlias = Literal["auto", "require"]

_log = logging.getLogger("penstock.access")

REQUESTS_MIN = FetchConfig().requests_max
"""Number of requests in flight from the start: a batch is needed as a whole, and a smaller window would have to grow first."""


@boundary
class PipelineDataset(Dataset):
    """The samples of a pipeline, read from its objects, its indexed shards or a user's function.

    Args:
        pipeline: A source and stages that keep samples apart: ``decode``, ``map``, ``select``, ``join``.
        seed: Seed of the `rng` of ``map`` functions, in [0, 2**64).
        index: For shards: ``"require"`` an index, or ``"auto"``: if none exists, read the shards once and build it.
        index_dir: Directory in which the index of the shards may also lie and in which ``"auto"`` builds it.
        cache: Keeps data on this node's disk once it is read, as for ``connect``.
        fetch: Bounds for reading.

    Raises:
        ConfigError: A stage batches, orders, drops or multiplies samples; shards have no index although one is required,
            or their format does not allow reading from the middle.
        ObjectMissingError: The source has no objects or shards.
        StoreError, DataError: The source cannot be listed, or its shards cannot be indexed.

    Cost: one listing, or one read of the index. Holds names as text, and 12 bytes per sample of each indexed shard that
        was read from, or 550 bytes per member of a zip.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        seed: int = 0,
        index: Index = "auto",
        index_dir: str | os.PathLike[str] | None = None,
        cache: CacheConfig | str | os.PathLike[str] | None = None,
        fetch: FetchConfig | None = None,
    ) -> None:
        check_configs(fetch=fetch)
        check_path("index_dir", index_dir)
        check_whole("seed", seed, 0, SEED_MAX)
        self.pipeline = pipeline
        self._transform = transform_of(pipeline)
        self._seed = seed
        self._closed = False
        if index not in ("auto", "require"):
            hint = "samples by number need an index; a Loader reads without one"
            raise ConfigError(f"index={index!r} must be 'auto' or 'require'", hint=hint)
        source = pipeline.source
        assert not isinstance(source, Mix | Sequential)  # checked by transform_of
        self._reader: SampleReader
        if isinstance(source, Objects) and source.read is not None:
            self._reader = FunctionReader(source)
            return
        gap_bytes = None if fetch is None else fetch.gap_bytes_max
        config = fetch or FetchConfig(requests_min=REQUESTS_MIN, gap_bytes_max=REQUEST_COST_BYTES)
        shards = ShardFinder(source, fetch=config, cache=cache).find()
        if isinstance(source, Objects):
            self._reader = ObjectSampleReader(source, shards)
        else:
            known = _indexed(source, shards, index=index, index_dir=index_dir)
            self._reader = IndexedReader(known, fields=pipeline.members(), gap_bytes=gap_bytes)

    def __len__(self) -> int:
        return len(self._reader)

    @cached_property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes; see ``Dataset.classes``."""
        return read_classes(self.pipeline)

    def read_samples(self, indices: Sequence[int | str] | NDArray[np.integer], *, epoch: int = 0) -> list[Values]:
        """Read samples by number or key; see ``Dataset.read_samples``."""
        reader = self._opened()
        numbers = [self._number(each) for each in _listed(indices)]
        rows: dict[int, list[int]] = {}  # by sample number: its rows in the result
        for row, number in enumerate(numbers):
            rows.setdefault(number, []).append(row)
        check_whole("epoch", epoch, 0, SEED_MAX)
        random = SampleRandom(seed=self._seed, epoch=epoch)
        samples: list[Any] = [None] * len(numbers)
        for number, sample, url in reader.read_batch(list(rows)):
            for row in rows[number]:
                samples[row] = self._transformed(number, sample, url, random)
        return samples

    def iter_samples(self, indices: Iterable[int | str] | None = None, *, epoch: int = 0) -> Iterator[Values]:
        """Iterate over samples in the given order; see ``Dataset.iter_samples``."""
        reader = self._opened()
        check_whole("epoch", epoch, 0, SEED_MAX)
        wanted: Iterable[Any] = range(len(self)) if indices is None else indices
        return self._iterated(reader, wanted, SampleRandom(seed=self._seed, epoch=epoch))

    def find(self, key: str) -> int | None:
        """Return the number of the first sample with this key, or None; see ``Dataset.find``."""
        return self._opened().find(key)

    def close(self) -> None:
        """Close the stores and the threads that call the user's function; idempotent."""
        if not self._closed:
            self._closed = True
            self._reader.close()

    def __repr__(self) -> str:
        return f"<Dataset {self.pipeline!r}: {'closed' if self._closed else f'{len(self)} samples'}>"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_transform": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._transform = SampleTransform(self.pipeline)

    def _opened(self) -> SampleReader:
        if self._closed:
            raise ClosedError(f"{self!r} was used after close()", hint="open it again")
        return self._reader

    def _number(self, index: Any) -> int:
        if isinstance(index, str):
            number = self.find(index)
            if number is None:
                raise KeyError(f"none of {len(self)} samples has the key {index!r}")
            return number
        if isinstance(index, bool):
            raise ConfigError(f"{index!r} is not the number of a sample", hint="to use a mask: np.flatnonzero(mask)")
        count = len(self._reader)
        number = as_index(index)
        if not -count <= number < count:
            raise IndexError(f"sample {number} of {count}: numbers range from {-count} to {count - 1}")
        return number % count

    @boundary
    def _iterated(self, reader: SampleReader, indices: Iterable[Any], random: SampleRandom) -> Iterator[Values]:
        stream = reader.stream(map(self._number, _listed(indices)))
        try:
            for number, sample, url in stream:
                yield self._transformed(number, sample, url, random)
                self._opened()
        finally:
            stream.close()

    def _transformed(self, number: int, sample: Sample, url: str, random: SampleRandom) -> Values:
        values: Values = self._transform(sample, shard=url, position=number, random=random)
        values["__key__"], values["__shard__"], values["__position__"] = sample.key, url, number
        return values


def _listed(indices: Any) -> Iterable[Any]:
    """Return an iterable of Python numbers or keys; the numbers of an array are converted.

    Raises:
        ConfigError: `indices` is a single key, or bytes.
    """
    if isinstance(indices, str | bytes | bytearray | memoryview):
        hint = "a key is a str: dataset[key], or read_samples([key])"
        raise ConfigError(f"{indices!r:.80} is {type(indices).__name__}, not numbers or keys", hint=hint)
    listed: Iterable[Any] = indices.tolist() if hasattr(indices, "tolist") else indices
    return listed


def transform_of(pipeline: Pipeline) -> SampleTransform:
    """Return the transform of a pipeline whose samples can be read by number.

    Raises:
        ConfigError: The pipeline mixes sources, or a stage batches, orders, drops or multiplies samples.
    """
    if not isinstance(pipeline, Pipeline):
        raise ConfigError(f"{pipeline!r} is not a pipeline", hint="ps.objects(url).decode(...)")
    check_rereadable(pipeline, "open")
    if isinstance(pipeline.source, Mix):
        raise ConfigError(
            f"{pipeline!r} mixes sources, and samples of a mix have an order but no numbers",
            hint="open each source, or iterate a Loader",
        )
    if isinstance(pipeline.source, Shards) and pipeline.source.picked is not None:
        raise ConfigError(f"{pipeline!r} is opened without .pick()", hint="dataset[numbers]")
    for stage in pipeline.stages:
        if not isinstance(stage, Decode | Map | Select | Join):
            raise ConfigError(
                f"{pipeline!r} has {stage!r}, but random access returns single samples by number",
                hint="leave batches and order to a sampler: DataLoader(ps.torch.MapDataset(...)); a Loader takes all stages",
            )
    transform = SampleTransform(pipeline)
    if transform.may_drop:
        hint = "max_errors=0, missing='raise'"
        raise ConfigError(f"{pipeline!r} may drop samples, and then some numbers would have no sample", hint=hint)
    return transform


def _indexed(
    source: Shards, shards: Sequence[Shard], *, index: Index, index_dir: str | os.PathLike[str] | None
) -> Lookup:
    """Look up all `shards` in their index; build it if it is missing or incomplete, unless it is required."""
    known = lookup(shards, index_dir=index_dir)
    missing_count = known.rows.count(None)
    if not missing_count:
        return known
    problem = f"{missing_count} of {len(shards)} shards of {source!r} are not indexed"
    if index == "require":
        raise ConfigError(
            problem, hint="run `penstock index URL`, or use index='auto' to read the shards once and build it"
        )
    _log.info("%s: reading them once to build the index", problem)
    built = build(shards, in_directory(shards, index_dir), on_corrupt=source.on_corrupt)
    if built.failed:
        raise built.failed[0][1]
    return lookup(shards, index_dir=index_dir)
