"""``Pipeline``: a source and the stages after it. Each method gives a new one; nothing is listed or read but by ``open``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from penstock import bindings
from penstock.errors import ConfigError
from penstock.pipeline.batching import Batch, BatchBySize, Oversize, names_of, padding_of
from penstock.pipeline.mixing import flattened
from penstock.pipeline.stages import (
    Decode,
    Evaluate,
    Filter,
    FlatMap,
    Join,
    Map,
    Select,
    Shuffle,
    Take,
    specs_of,
)
from penstock.tracebacks import boundary

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping

    from penstock.cache import CacheConfig
    from penstock.config import FetchConfig
    from penstock.pipeline.dataset import Dataset
    from penstock.pipeline.fields import Field
    from penstock.pipeline.mixing import Flat, Mix
    from penstock.pipeline.source import Objects, Shards
    from penstock.pipeline.stages import Sample, Stage

_S = TypeVar("_S", bound="Stage")


@boundary
@dataclass(frozen=True, slots=True, repr=False)
class Pipeline:
    """What a ``Loader`` is to do, and in which order; its ``repr`` reads like the code.

    Made by ``penstock.shards``, ``penstock.objects`` and ``penstock.mix``.

    Attributes:
        source: Where samples come from.
        stages: What happens to them, first to last.
    """

    source: Shards | Objects | Mix
    stages: tuple[Stage, ...] = ()

    def shuffle(self, window: int = 16_384, *, seed: int = 0) -> Pipeline:
        """Permute the shards of each epoch, and the samples within runs of ``window / lanes``.

        Args:
            window: Samples that the job holds in memory to draw from: all ranks together, each holds its share.
            seed: In [0, 2**64); the order is a pure function of it, the epoch and the shards.

        Raises:
            ConfigError: out of bounds, or the pipeline is shuffled already, or evaluates.
        """
        if self.stage(Evaluate) is not None:
            raise ConfigError(f"{self!r} evaluates, in the stored order: it takes no .shuffle()")
        return self._then(Shuffle(window=window, seed=seed), once=True)

    def decode(self, *fields: Field, max_errors: int = 0) -> Pipeline:
        """Turn the named members into values, and leave the others out; what was joined stays.

        Args:
            *fields: ``Image``, ``Integer``, ``Float``, ``Text``, ``Json``, ``Numpy``, ``Audio``, ``Bytes``,
                ``Function``; all that the samples shall have.
            max_errors: Samples that may be dropped per epoch and rank because a member is missing or does not decode;
                each is counted. One more ends the epoch.

        Raises:
            ConfigError: no field, one named twice, or the pipeline decodes already.
        """
        if any(leaf.stage(Decode) is not None for leaf in self.flat().leaves):
            raise ConfigError(f"{self!r} has a .decode() already; one says it all")
        return self._then(Decode(fields, max_errors))

    def map(
        self, fn: Callable[..., Sample], *, fields: Mapping[str, object] | None = None, max_errors: int = 0
    ) -> Pipeline:
        """Call ``fn(sample)`` or ``fn(sample, rng)`` on every sample, in the decode threads.

        Args:
            fn: Takes a dict of values, with ``__key__``, ``__shard__`` and ``__position__``, and returns one. Its first
                result fixes names, dtypes and shapes. `rng` is a ``numpy.random.Generator`` that depends on (seed,
                epoch, position) alone and is valid during the call; it is made only if the function takes it.
            fields: What it returns, so that the first sample need not tell: a dtype, or a pair of dtype and shape, or
                ``str``, ``bytes`` or ``object`` by name: ``{"jpg": ("uint8", (224, 224, 3)), "cls": "int64"}``.
            max_errors: Samples that may be dropped per epoch and rank because it fails; each is counted.

        Raises:
            ConfigError: not a function, or one of more than two required arguments; bad `fields` or bound.
        """
        return self._then(Map(fn, specs_of(fields), max_errors))

    def filter(self, fn: Callable[..., object], *, refill: bool = False, max_errors: int = 0) -> Pipeline:
        """Leave out the samples for which ``fn(sample)`` or ``fn(sample, rng)`` is false.

        Args:
            fn: As for ``map``, but its result only decides.
            refill: Fill batches up with the samples that follow. Without, a batch is what its positions yield: shorter
                with one rank, masked by ``__valid__`` with several; then order and state stay exact at any world size.
            max_errors: Samples that may be dropped per epoch and rank because it fails; each is counted.

        Raises:
            ConfigError: not a function, or one of more than two required arguments; bad bound.
        """
        return self._then(Filter(fn, refill, max_errors))

    def flat_map(self, fn: Callable[..., Iterable[Sample]], *, max_errors: int = 0) -> Pipeline:
        """Make any number of samples of one: ``fn(sample)`` or ``fn(sample, rng)`` returns or yields them.

        Args:
            fn: As for ``map``, but gives an iterable of samples, perhaps an empty one. They keep the key and position;
                each has a random stream of its own in the stages that follow.
            max_errors: Samples that may be dropped per epoch and rank because it fails; each is counted.

        Raises:
            ConfigError: not a function, or one of more than two required arguments; bad bound.
        """
        return self._then(FlatMap(fn, max_errors))

    def select(self, fields: str | Iterable[str]) -> Pipeline:
        """Keep these fields only. Before ``decode``: these members, and with an index the others are not even read.

        Raises:
            ConfigError: no name, one twice, or one that no sample has at this point.
        """
        names = names_of(fields, ".select()")
        self._check_known(names, "select")
        return self._then(Select(names))

    def take(self, count: int) -> Pipeline:
        """Read the first `count` samples of each epoch only, counted over all ranks and before any filter.

        Raises:
            ConfigError: out of bounds, or there is one already.
        """
        return self._then(Take(count), once=True)

    def join(
        self,
        other: str | Pipeline,
        *,
        on: str = "key",
        fields: str | Iterable[str] | None = None,
        missing: Literal["raise", "drop"] = "raise",
        bytes_max: int = 1024**3,
    ) -> Pipeline:
        """Add fields from a table that has a row for each sample's key: labels, captions, scores.

        Args:
            other: URL of a table in JSON lines, CSV, TSV or Parquet, or another pipeline, whose samples are rows. Read
                once per process when iteration starts, and held in memory.
            on: The column that holds the key; a pipeline's key is its ``__key__``.
            fields: Columns to take; None: all but the key's.
            missing: ``"raise"``, or ``"drop"`` samples without a row, counted.
            bytes_max: The table's size as stored, at most.

        Raises:
            ConfigError: no table by its name, a pipeline with batches, bad options.
        """
        if isinstance(other, Pipeline):
            check_part(other, "join")
        elif not isinstance(other, str):
            raise ConfigError(f".join({other!r}) must be the URL of a table, or a pipeline")
        chosen = None if fields is None else names_of(fields, ".join(fields=)")
        return self._then(Join(other, on, chosen, missing, bytes_max))

    def evaluate(self) -> Pipeline:
        """The same for evaluation: the stored order, every sample exactly once over all ranks.

        Drops ``shuffle`` and ``drop_last``. The last batches are padded, so that all ranks have equally many, and
        ``batch["__valid__"]`` (bool[B]) says which rows count. Random crops and functions stay: describe what is to be
        decoded for evaluation where it differs.
        """
        kept = [stage for stage in self.stages if not isinstance(stage, Shuffle | Evaluate)]
        ends = [replace(stage, drop_last=False) for stage in kept if isinstance(stage, Batch | BatchBySize)]
        body = [stage for stage in kept if not isinstance(stage, Batch | BatchBySize)]
        return Pipeline(self.source, (*body, Evaluate(), *ends))

    def batch(
        self,
        n: int | None = None,
        *,
        global_size: int | None = None,
        drop_last: bool = False,
        collate: Callable[[list[dict[str, Any]]], Any] | None = None,
        pad: Mapping[str, float] | str | Iterable[str] | None = None,
        ragged: str | Iterable[str] = (),
    ) -> Pipeline:
        """Deliver `n` samples at a time, per rank, or `global_size` over all ranks.

        Args:
            n: At least 1.
            global_size: Instead: a batch's samples are then the same for every number of ranks that divides it.
            drop_last: Leave out the last samples of an epoch where they do not fill a batch, instead of a shorter one.
            collate: ``fn(samples)`` makes the batch from a list of dicts. Without, batches are columns.
            pad: Fields whose arrays differ in shape, filled up to the batch's largest with 0, or with the value given:
                ``{"tokens": -1}``. ``batch["__tokens_length__"]`` (int64[B]) says how long each was.
            ragged: Fields whose arrays differ in length, put end to end: ``batch["tokens"]`` is then a pair of
                ``data`` and ``offsets`` (int64[B + 1]).

        Raises:
            ConfigError: out of bounds, both sizes or none, or the pipeline has batches already.
        """
        stage = Batch(
            size=n,
            global_size=global_size,
            drop_last=drop_last,
            collate=collate,
            pad=padding_of(pad),
            ragged=names_of(ragged, "ragged="),
        )
        self._check_known((*dict(stage.pad), *stage.ragged), "batch")
        return self._then(stage)

    def batch_by_size(
        self,
        size_max: int,
        *,
        size: str | Callable[[Mapping[str, Any]], int],
        padded: bool = False,
        samples_max: int | None = None,
        oversize: Oversize = "raise",
        drop_last: bool = False,
        collate: Callable[[list[dict[str, Any]]], Any] | None = None,
        pad: Mapping[str, float] | str | Iterable[str] | None = None,
        ragged: str | Iterable[str] = (),
    ) -> Pipeline:
        """Deliver consecutive samples until the next would pass `size_max`: so many tokens per batch, per rank.

        Args:
            size_max: In whatever `size` counts.
            size: A field, whose length counts (``"tokens"``), or a function of a sample that gives a number.
            padded: Count a batch as its longest sample times their number, as it is after padding.
            samples_max: In a batch; None: as many as fit.
            oversize: A sample larger than `size_max`: ``"raise"``, a batch ``"alone"``, or ``"drop"``, counted.
            drop_last: Leave out the last batch of an epoch.
            collate: As for ``batch``.
            pad: See there.
            ragged: See there.

        Raises:
            ConfigError: out of bounds, or the pipeline has batches already.
        """
        stage = BatchBySize(
            size_max=size_max,
            size=size,
            padded=padded,
            samples_max=samples_max,
            oversize=oversize,
            drop_last=drop_last,
            collate=collate,
            pad=padding_of(pad),
            ragged=names_of(ragged, "ragged="),
        )
        counted = (stage.size,) if isinstance(stage.size, str) else ()
        self._check_known((*dict(stage.pad), *stage.ragged, *counted), "batch_by_size")
        return self._then(stage)

    def open(
        self,
        *,
        seed: int = 0,
        index: Literal["auto", "require"] = "auto",
        index_dir: str | os.PathLike[str] | None = None,
        cache: CacheConfig | str | os.PathLike[str] | None = None,
        fetch: FetchConfig | None = None,
    ) -> Dataset:
        """Samples by number and by key: ``ds[i]``, ``ds[10:20]``, ``ds[[5, 2]]``, ``ds["key"]``, ``len(ds)``.

        Of objects, or of shards by their index. This looks: it lists, or reads the index.

        Args:
            seed: Of the `rng` of ``map`` functions, which depends on (seed, epoch, number).
            index: Of shards: ``"require"`` one, or ``"auto"``: where there is none, read the shards once and make it.
            index_dir: Where the index of shards may lie besides them, and is made.
            cache: Keep what is read on this node's disk, as for ``connect``.
            fetch: Bounds for reading; its ``gap_bytes_max`` is then the widest gap to read through, whatever was measured.

        Raises:
            ConfigError: a stage that batches, orders, drops or multiplies samples; shards without an index where it is
                required, or that cannot be entered at a sample.
            ObjectMissingError: there is nothing.
            StoreError, DataError: the source cannot be listed, or its shards cannot be indexed.

        Cost: one listing, or one read of the index.
        """
        dataset: Dataset = bindings.open_dataset(
            self, seed=seed, index=index, index_dir=index_dir, cache=cache, fetch=fetch
        )
        return dataset

    def stage(self, kind: type[_S]) -> _S | None:
        """The first stage of a kind, where there is one."""
        return next((stage for stage in self.stages if isinstance(stage, kind)), None)

    def flat(self) -> Flat:
        """The pipeline over each single source, and the shares of each; one of either where nothing is mixed."""
        return flattened(self.source, self)

    def members(self) -> frozenset[str] | None:
        """The stored members that a sample needs; None: all. What ``select`` and ``decode`` leave out is not among them."""
        for stage in self.stages:
            if isinstance(stage, Select | Decode):
                return frozenset(stage.names)
            if isinstance(stage, Map | Filter | FlatMap):
                return None
        return None

    def fields(self) -> tuple[str, ...] | None:
        """The names of what comes out, where the stages alone tell."""
        names: tuple[str, ...] | None = None
        for stage in self.stages:
            if isinstance(stage, Select | Decode):
                names = stage.names
            elif isinstance(stage, Map):
                names = None if stage.fields is None else tuple(name for name, _ in stage.fields)
            elif isinstance(stage, FlatMap):
                names = None
            elif isinstance(stage, Join):
                names = None if names is None or stage.fields is None else (*names, *stage.fields)
        return names

    def _check_known(self, names: tuple[str, ...], stage: str) -> None:
        known = self.fields()
        unknown = [name for name in names if known is not None and name not in known]
        if unknown:
            raise ConfigError(f"{self!r}: .{stage}() names {unknown[0]!r}; samples have {', '.join(known or ())}")

    def _then(self, stage: Stage, *, once: bool = False) -> Pipeline:
        name = "batch_by_size" if isinstance(stage, BatchBySize) else _snake(type(stage).__name__)
        if self.stage(Batch) is not None or self.stage(BatchBySize) is not None:
            raise ConfigError(f"{self!r}: .{name}() comes before .batch(), the last stage")
        if once and self.stage(type(stage)) is not None:
            raise ConfigError(f"{self!r} has a .{name}() already; one says it all")
        return Pipeline(self.source, (*self.stages, stage))

    def __repr__(self) -> str:
        return "".join(map(repr, (self.source, *self.stages)))

    def __iter__(self) -> NoReturn:
        raise TypeError(f"{self!r} describes samples and holds none. Hint: for batch in ps.Loader(pipeline)")


def check_part(part: object, what: str) -> None:
    """Refuse what cannot be a part of ``mix`` or ``join``.

    Raises:
        ConfigError: No pipeline, or one with stages that only the whole has.
    """
    if not isinstance(part, Pipeline):
        raise ConfigError(f"{what}() takes pipelines, not {part!r}", hint="ps.shards(url)")
    for kind in (Shuffle, Take, Evaluate, Batch, BatchBySize):
        if part.stage(kind) is not None:
            raise ConfigError(
                f"{what}() of {part!r}: .{_snake(kind.__name__)}() comes after it",
                hint=f"ps.{what}(...).{_snake(kind.__name__)}(...)" if what == "mix" else "leave it out",
            )


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")
