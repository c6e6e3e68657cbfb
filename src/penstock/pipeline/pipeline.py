"""``Pipeline``: a source and the stages after it. Each method returns a new pipeline; only ``open`` lists or reads anything."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import index as whole_number
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from penstock.errors import ConfigError
from penstock.pipeline import dataset
from penstock.pipeline.batching import Batch, BatchBySize, Oversize, TokenBlocks, names_of, padding_of
from penstock.pipeline.source import Sequential, Shards, flattened
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
from penstock.system.tracebacks import boundary
from penstock.text.html_text import code_lines

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping

    from penstock.cache import CacheConfig
    from penstock.config import FetchConfig
    from penstock.pipeline.dataset import Dataset
    from penstock.pipeline.fields import Field
    from penstock.pipeline.source import Flat, Mix, Objects
    from penstock.pipeline.stages import Sample, Stage

_S = TypeVar("_S", bound="Stage")


@boundary
@dataclass(frozen=True, slots=True, repr=False)
class Pipeline:
    """Describes where samples come from and what a ``Loader`` does with them; its ``repr`` reads like the code that made it.

    ``penstock.shards``, ``penstock.objects``, ``penstock.mix`` and ``penstock.channels.PipeReader.pipeline`` make a pipeline.

    Attributes:
        source: Source of the samples.
        stages: Stages that the samples go through, from first to last.
    """

    source: Shards | Objects | Sequential | Mix
    stages: tuple[Stage, ...] = ()

    def shuffle(self, window: int = 16_384, *, seed: int = 0) -> Pipeline:
        """Permute the shards of each epoch, and the samples within runs of ``window / lanes``.

        Args:
            window: Number of samples that the job holds in memory to draw from, over all ranks; each rank holds its share.
            seed: Seed in [0, 2**64); the order depends only on the seed, the epoch and the shards.

        Raises:
            ConfigError: An argument is out of bounds, or the pipeline already has a ``shuffle`` or an ``evaluate``.
        """
        if self.stage(Evaluate) is not None:
            raise ConfigError(f"{self!r} evaluates in stored order and cannot be shuffled")
        return self._then(Shuffle(window=window, seed=seed), once=True)

    def decode(self, *fields: Field, max_errors: int = 0) -> Pipeline:
        """Decode the named members to values. Members that are not named are left out; joined fields stay.

        Args:
            *fields: All fields that a sample has afterwards: ``Image``, ``Integer``, ``Float``, ``Text``, ``Json``,
                ``Numpy``, ``Audio``, ``Bytes`` or ``Function``.
            max_errors: Number of samples per epoch and rank that may be dropped because a member is missing or does not
                decode. Dropped samples are counted; one more raises its error.

        Raises:
            ConfigError: No field is given, a field is named twice, or the pipeline already decodes.
        """
        if any(leaf.stage(Decode) is not None for leaf in self.flat().leaves):
            raise ConfigError(f"{self!r} already has a .decode()", hint="name all fields in one .decode()")
        return self._then(Decode(fields, max_errors))

    def map(
        self, fn: Callable[..., Sample], *, fields: Mapping[str, object] | None = None, max_errors: int = 0
    ) -> Pipeline:
        """Call ``fn(sample)`` or ``fn(sample, rng)`` on every sample, in the decode threads.

        Args:
            fn: Takes a dict of values, with ``__key__``, ``__shard__`` and ``__position__``, and returns a dict. Its first
                result fixes names, dtypes and shapes. `rng` is a ``numpy.random.Generator`` that depends only on (seed,
                epoch, position) and is valid during the call; it is passed only if the function takes it.
            fields: Declares the results of `fn`, so that the first sample need not show them. By name, a dtype, a pair of
                dtype and shape, or ``str``, ``bytes`` or ``object``:
                ``{"jpg": ("uint8", (224, 224, 3)), "cls": "int64"}``.
            max_errors: Number of samples per epoch and rank that may be dropped because `fn` fails; they are counted.

        Raises:
            ConfigError: `fn` is not a function or requires more than two arguments; `fields` or the bound is not valid.
        """
        return self._then(Map(fn, specs_of(fields), max_errors=max_errors))

    def filter(self, fn: Callable[..., object], *, refill: bool = False, max_errors: int = 0) -> Pipeline:
        """Leave out the samples for which ``fn(sample)`` or ``fn(sample, rng)`` is false.

        Args:
            fn: As for ``map``, but its result only decides whether the sample stays.
            refill: Whether to fill batches up with the following samples. Otherwise a batch holds what is left of its own
                positions: it is shorter with one rank and masked by ``__valid__`` with several, and order and state
                stay exact at any world size.
            max_errors: Number of samples per epoch and rank that may be dropped because `fn` fails; they are counted.

        Raises:
            ConfigError: `fn` is not a function or requires more than two arguments; the bound is not valid.
        """
        return self._then(Filter(fn, refill, max_errors=max_errors))

    def flat_map(self, fn: Callable[..., Iterable[Sample]], *, max_errors: int = 0) -> Pipeline:
        """Make any number of samples from one: ``fn(sample)`` or ``fn(sample, rng)`` returns or yields them.

        Args:
            fn: As for ``map``, but it returns an iterable of samples, which may be empty. They keep the key and the
                position; each has a random stream of its own in the stages that follow.
            max_errors: Number of samples per epoch and rank that may be dropped because `fn` fails; they are counted.

        Raises:
            ConfigError: `fn` is not a function or requires more than two arguments; the bound is not valid.
        """
        return self._then(FlatMap(fn, max_errors=max_errors))

    def select(self, fields: str | Iterable[str]) -> Pipeline:
        """Keep the named fields only. Before ``decode`` it keeps members; with an index, the others need not be read.

        Args:
            fields: One name, or several.

        Raises:
            ConfigError: No name, a name that occurs twice, or a name that no sample has at this point.
        """
        names = names_of(fields, ".select()")
        self._check_known(names, "select")
        return self._then(Select(names))

    def pick(self, numbers: Iterable[int]) -> Pipeline:
        """Read only the samples with these numbers, each as often as it is named; without a shuffle, in this order.

        The shards need an index, and a format that can be read from any sample. ``shuffle`` then permutes all picked
        samples, without a window, and order and state hold for any number of ranks.

        Args:
            numbers: Numbers of samples in stored order, counted over all shards from 0: as ``read_column`` lists them.

        Raises:
            ConfigError: The source is not of shards or was picked from before, or there are no whole numbers of at least 0.

        Cost: a request for each sample that is not read beside its neighbour; 50 bytes for each number.
        """
        try:
            picked = tuple(map(whole_number, numbers))
        except TypeError:
            raise ConfigError(f".pick({numbers!r:.60}) must be given whole numbers") from None
        if not isinstance(self.source, Shards) or self.source.picked is not None:
            raise ConfigError(f"{self!r}: .pick() is for shards, once", hint="pick from each source of a mix")
        if not picked or min(picked) < 0:
            raise ConfigError(".pick() must be given the numbers of samples, from 0")
        return Pipeline(replace(self.source, picked=picked), self.stages)

    def take(self, count: int) -> Pipeline:
        """Read only the first `count` samples of each epoch, counted over all ranks and before any filter.

        Args:
            count: Number of samples, at least 1.

        Raises:
            ConfigError: `count` is out of bounds, or the pipeline already has a ``take``.
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
        """Add fields from a table that has a row for each sample's key, such as labels, captions or scores.

        Args:
            other: URL of a table in JSON lines, CSV, TSV or Parquet, or another pipeline whose samples are the rows. It is
                read once per process, when iteration starts, and held in memory.
            on: Column that holds the key; for a pipeline the key is always ``__key__``.
            fields: Columns to add; None: all but the key column.
            missing: Treatment of a sample without a row: ``"raise"`` an error, or ``"drop"`` and count it.
            bytes_max: Largest size of the table as stored, in bytes.

        Raises:
            ConfigError: The URL does not name a table, `other` is a pipeline with batches, or an option is not valid.
        """
        if isinstance(other, Pipeline):
            check_part(other, "join")
        elif not isinstance(other, str):
            raise ConfigError(f".join({other!r}) must be the URL of a table, or a pipeline")
        chosen = None if fields is None else names_of(fields, ".join(fields=)")
        return self._then(Join(other, on, chosen, missing, bytes_max))

    def token_blocks(
        self,
        length: int,
        *,
        field: str = "tokens",
        separator: int | None = None,
        position_ids: bool = False,
        pad: int | None = None,
        dtype: Literal["int64", "int32", "uint32", "uint16"] = "int64",
    ) -> Pipeline:
        """Concatenate the tokens of the samples, in their order, and cut them into blocks of `length` tokens.

        Blocks replace samples in ``batch``: ``{"tokens": int64[B, length]}``. Their ``__key__`` is that of the
        document in which they begin. A state lies between two blocks, perhaps in the middle of a document; as after
        ``flat_map``, each rank resumes its own state at the same world size, and on several ranks ``Loader(agree=)`` is needed.

        Args:
            length: Number of tokens in a block, at least 1.
            field: Field that holds a document's tokens, a list or an array of whole numbers. The other fields are dropped.
            separator: Token that follows each document that has tokens, usually the end of a text; None adds none.
            position_ids: Whether blocks have ``position_ids``, int64[length], which begin at 0 in each document and block;
                ``penstock.cu_seqlens`` makes the bounds of documents for attention from them.
            pad: Token that fills the last block of an epoch on each rank; None leaves out the tokens that do not fill one.
            dtype: Dtype of the tokens.

        Raises:
            ConfigError: An argument is out of bounds, or the pipeline already has ``token_blocks`` or batches.

        Cost: a few µs for each document besides its tokeniser, and one copy of the tokens.
        """
        self._check_known((field,), "token_blocks")
        stage = TokenBlocks(
            length=length, field=field, separator=separator, position_ids=position_ids, pad=pad, dtype=dtype
        )
        return self._then(stage, once=True)

    def evaluate(self) -> Pipeline:
        """Return the same pipeline for evaluation: in stored order, every sample exactly once over all ranks.

        It removes ``shuffle`` and ``drop_last``. The last batches are padded so that all ranks have the same number of
        batches, and ``batch["__valid__"]`` (bool[B]) says which rows count. Random crops and functions stay; if
        evaluation decodes differently, describe it in a pipeline of its own.
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
        """Deliver batches of `n` samples per rank, or of `global_size` samples over all ranks.

        Args:
            n: Number of samples per rank, at least 1.
            global_size: Number of samples of all ranks together, instead of `n`. A batch then has the same samples for
                every number of ranks that divides it.
            drop_last: Whether to leave out the last samples of an epoch if they do not fill a batch; otherwise the last
                batch is shorter.
            collate: ``fn(samples)`` that makes the batch from a list of dicts; None: batches are columns.
            pad: Fields whose arrays differ in shape and are padded to the largest of the batch, with 0 or the given value:
                ``{"tokens": -1}``. ``batch["__tokens_length__"]`` (int64[B]) holds the original lengths.
            ragged: Fields whose arrays differ in length and are concatenated: ``batch["tokens"]`` is then a pair of
                ``data`` and ``offsets`` (int64[B + 1]).

        Raises:
            ConfigError: A size is out of bounds, both sizes or neither are given, or the pipeline already has batches.
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
        """Deliver batches of consecutive samples, per rank; a batch is complete when the next sample would exceed `size_max`.

        Args:
            size_max: Largest size of a batch, in the unit that `size` counts, such as tokens.
            size: A field whose length counts (``"tokens"``), or a function of a sample that returns a number.
            padded: Whether the size of a batch is its longest sample times the number of samples, as it is after padding,
                instead of the sum over its samples.
            samples_max: Largest number of samples in a batch; None: as many as fit.
            oversize: Treatment of a sample larger than `size_max`: ``"raise"`` an error, deliver it ``"alone"`` in a
                batch, or ``"drop"`` and count it.
            drop_last: Whether to leave out the last batch of an epoch.
            collate: As for ``batch``.
            pad: As for ``batch``.
            ragged: As for ``batch``.

        Raises:
            ConfigError: An argument is out of bounds, or the pipeline already has batches.
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
        """Open the samples for random access: ``ds[i]``, ``ds[10:20]``, ``ds[[5, 2]]``, ``ds["key"]``, ``len(ds)``.

        The samples are objects, or lie in shards that have an index. Opening lists the objects or reads the index.

        Args:
            seed: Seed in [0, 2**64) of the `rng` of ``map`` functions, which depends on (seed, epoch, number).
            index: For shards: ``"require"`` an index, or ``"auto"``: if none exists, read the shards once and build it.
            index_dir: Directory in which the index of the shards may also lie, and in which ``"auto"`` builds it.
            cache: Keep data on this node's disk once it is read, as for ``connect``.
            fetch: Bounds for reading. Its ``gap_bytes_max`` then fixes the widest gap to read through, which otherwise
                follows from measurements.

        Raises:
            ConfigError: A stage batches, orders, drops or multiplies samples; shards have no index although one is
                required, or their format does not allow reading from the middle.
            ObjectMissingError: The source has no objects or shards.
            StoreError, DataError: The source cannot be listed, or its shards cannot be indexed.

        Cost: one listing, or one read of the index.
        """
        opened: Dataset = dataset.open_dataset(
            self, seed=seed, index=index, index_dir=index_dir, cache=cache, fetch=fetch
        )
        return opened

    def stage(self, kind: type[_S]) -> _S | None:
        """Return the first stage of a kind, or None."""
        return next((stage for stage in self.stages if isinstance(stage, kind)), None)

    def flat(self) -> Flat:
        """Return one pipeline per single source, and the share of each; a pipeline that mixes nothing has one source."""
        return flattened(self.source, self)

    def members(self) -> frozenset[str] | None:
        """Return the names of the stored members that the stages need; None: all members."""
        for stage in self.stages:
            if isinstance(stage, Select | Decode):
                return frozenset(stage.names if isinstance(stage, Select) else stage.members)
            if isinstance(stage, Map | Filter | FlatMap):
                return None
        return None

    def fields(self) -> tuple[str, ...] | None:
        """Return the names of the output fields, or None if the stages do not determine them."""
        names: tuple[str, ...] | None = None
        for stage in self.stages:
            if isinstance(stage, Select | Decode):
                names = stage.names
            elif isinstance(stage, Map):
                names = None if stage.fields is None else tuple(name for name, _ in stage.fields)
            elif isinstance(stage, FlatMap):
                names = None
            elif isinstance(stage, TokenBlocks):
                names = stage.names
            elif isinstance(stage, Join):
                names = None if names is None or stage.fields is None else (*names, *stage.fields)
        return names

    def _check_known(self, names: tuple[str, ...], stage: str) -> None:
        known = self.fields()
        unknown = [name for name in names if known is not None and name not in known]
        if unknown:
            raise ConfigError(f"{self!r}: .{stage}() names {unknown[0]!r}, but samples have {', '.join(known or ())}")

    def _then(self, stage: Stage, *, once: bool = False) -> Pipeline:
        name = "batch_by_size" if isinstance(stage, BatchBySize) else _snake(type(stage).__name__)
        if self.stage(Batch) is not None or self.stage(BatchBySize) is not None:
            raise ConfigError(f"{self!r}: .{name}() must come before .batch(), the last stage")
        if self.stage(TokenBlocks) is not None and not isinstance(
            stage, Shuffle | Take | Evaluate | TokenBlocks | Batch
        ):
            raise ConfigError(f"{self!r}: .{name}() must come before .token_blocks()", hint="then .batch()")
        if once and self.stage(type(stage)) is not None:
            raise ConfigError(f"{self!r} already has a .{name}(), and may have only one")
        return Pipeline(self.source, (*self.stages, stage))

    def __repr__(self) -> str:
        return "".join(map(repr, (self.source, *self.stages)))

    def _repr_html_(self) -> str:
        """Return what notebooks show: a line for the source and for each stage."""
        return code_lines((self.source, *(f"    {stage!r}" for stage in self.stages)))

    def __iter__(self) -> NoReturn:
        raise TypeError(f"{self!r} only describes samples. Hint: for batch in ps.Loader(pipeline)")


def check_part(part: object, what: str) -> None:
    """Check that `part` can be a part of ``mix`` or ``join``.

    Args:
        part: Value that the user passed.
        what: ``"mix"`` or ``"join"``.

    Raises:
        ConfigError: `part` is not a pipeline, or it has stages that only the whole pipeline may have.
    """
    if not isinstance(part, Pipeline):
        raise ConfigError(f"{what}() takes pipelines, not {part!r}", hint="ps.shards(url)")
    check_rereadable(part, what)
    for kind in (Shuffle, Take, Evaluate, TokenBlocks, Batch, BatchBySize):
        if part.stage(kind) is not None:
            raise ConfigError(
                f"{what}() of {part!r}: .{_snake(kind.__name__)}() must come after {what}()",
                hint=f"ps.{what}(...).{_snake(kind.__name__)}(...)" if what == "mix" else "leave it out",
            )


def check_rereadable(pipeline: Pipeline, what: str) -> None:
    """Check that the samples of a pipeline can be listed, and read more than once.

    Args:
        pipeline: The pipeline, as a user passed it.
        what: Name of the function that needs this.

    Raises:
        ConfigError: It is not a pipeline, or a reader gives the samples once per epoch.
    """
    if not isinstance(pipeline, Pipeline):
        raise ConfigError(f"{what}({pipeline!r}) must be given a pipeline", hint="ps.shards(url)")
    if any(isinstance(leaf.source, Sequential) for leaf in pipeline.flat().leaves):
        raise ConfigError(
            f"{what}() of {pipeline!r}: its samples come once per epoch, and cannot be listed or read again",
            hint=f"iterate a ps.Loader, or call {what}() with ps.shards() of the data's URL",
        )


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")
