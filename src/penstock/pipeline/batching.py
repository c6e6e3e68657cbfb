"""The stages that form batches: by number of samples, or by their size, such as tokens; and blocks of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from penstock.config import check_whole
from penstock.errors import ConfigError
from penstock.system.tracebacks import function_name

Oversize = Literal["raise", "alone", "drop"]
_TOKEN_MAX = {"int64": (1 << 63) - 1, "int32": (1 << 31) - 1, "uint32": (1 << 32) - 1, "uint16": (1 << 16) - 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class _BatchStage:
    """The common part of all stages that form batches; ``Batch`` describes the fields."""

    drop_last: bool = False
    collate: Callable[[list[dict[str, Any]]], Any] | None = None
    pad: tuple[tuple[str, float], ...] = ()
    ragged: tuple[str, ...] = ()

    def check_shapes(self) -> None:
        """Check the fields of this class.

        Raises:
            ConfigError: One is not valid.
        """
        if self.collate is not None and not callable(self.collate):
            raise ConfigError(f"collate={self.collate!r} must be a function of a list of samples")
        names = [*(name for name, _ in self.pad), *self.ragged]
        for name in names:
            if not isinstance(name, str) or not name or name.startswith("__"):
                raise ConfigError(f"pad= and ragged= take names of fields, not {name!r}")
        if len(set(names)) < len(names):
            raise ConfigError(f"pad= and ragged= name a field more than once: {names}")

    def shown(self) -> str:
        """Return the fields of this class that differ from their defaults, as ``repr`` shows them."""
        options = ", drop_last=True" if self.drop_last else ""
        options += "" if self.collate is None else f", collate={function_name(self.collate)}"
        options += f", pad={dict(self.pad)!r}" if self.pad else ""
        return options + (f", ragged={list(self.ragged)!r}" if self.ragged else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(_BatchStage):
    """Batches of `size` samples per rank, or of `global_size` samples over all ranks.

    Attributes:
        size: Number of samples per rank; None if `global_size` is given.
        global_size: Number of samples of all ranks together; None if `size` is given.
        drop_last: Whether the last samples of an epoch are left out if they do not fill a batch.
        collate: ``fn(list of samples)`` that returns the batch; None: batches are columns.
        pad: Pairs of a field whose arrays differ in length and the value that pads them to the longest of the batch.
        ragged: Fields whose arrays differ in length and are concatenated, with offsets.
    """

    size: int | None = None
    global_size: int | None = None

    def __post_init__(self) -> None:
        if (self.size is None) == (self.global_size is None):
            raise ConfigError(
                f".batch(n={self.size!r}, global_size={self.global_size!r}): give exactly one of them",
                hint=".batch(128) is per rank, .batch(global_size=1024) is for all ranks together",
            )
        for count in (self.size, self.global_size):
            if count is not None and not _is_positive(count):
                raise ConfigError(f".batch({count!r}) must be a whole number of samples, at least 1")
        self.check_shapes()

    def __repr__(self) -> str:
        size = f"{self.size}" if self.size is not None else f"global_size={self.global_size}"
        return f".batch({size}{self.shown()})"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchBySize(_BatchStage):
    """Batches of consecutive samples that are complete when the next sample would exceed a size in tokens, frames or bytes.

    Attributes:
        size_max: Largest size of a batch, in the unit that `size` counts.
        size: A field whose length counts, or ``fn(sample)`` that returns a number.
        padded: Whether the size of a batch is its longest sample times the number of samples, as it is after padding,
            instead of the sum over its samples.
        samples_max: Largest number of samples in a batch; None: as many as fit.
        oversize: Treatment of a sample larger than `size_max`: ``"raise"`` an error, ``"alone"`` in a batch, or
            ``"drop"`` and count it.
        drop_last: Whether the last batch of an epoch is left out.
        collate: As in ``Batch``.
        pad: As in ``Batch``.
        ragged: As in ``Batch``.
    """

    size_max: int
    size: str | Callable[[Mapping[str, Any]], int]
    padded: bool = False
    samples_max: int | None = None
    oversize: Oversize = "raise"

    def __post_init__(self) -> None:
        if not _is_positive(self.size_max):
            raise ConfigError(f".batch_by_size({self.size_max!r}) must be at least 1")
        if not (isinstance(self.size, str) and self.size) and not callable(self.size):
            raise ConfigError(f".batch_by_size(size={self.size!r}) must be a field, or a function of a sample")
        if self.samples_max is not None and not _is_positive(self.samples_max):
            raise ConfigError(f".batch_by_size(samples_max={self.samples_max!r}) must be at least 1")
        if self.oversize not in ("raise", "alone", "drop"):
            raise ConfigError(f".batch_by_size(oversize={self.oversize!r}) must be 'raise', 'alone' or 'drop'")
        self.check_shapes()

    def size_of(self, sample: Mapping[str, Any]) -> int:
        """Return the size of one sample: the length of a field, or the result of the function.

        Raises:
            ValueError: The sample lacks the field.
        """
        if not isinstance(self.size, str):
            return int(self.size(sample))
        if self.size not in sample:
            raise ValueError(f"the sample has no field {self.size!r}, only {', '.join(sample)}")
        return len(sample[self.size])

    def budget(self) -> SizeBudget:
        """Return a new, empty ``SizeBudget``."""
        return SizeBudget(self)

    def __repr__(self) -> str:
        size = repr(self.size) if isinstance(self.size, str) else function_name(self.size)
        options = ", padded=True" if self.padded else ""
        options += "" if self.samples_max is None else f", samples_max={self.samples_max}"
        options += "" if self.oversize == "raise" else f", oversize={self.oversize!r}"
        return f".batch_by_size({self.size_max}, size={size}{options}{self.shown()})"


class SizeBudget:
    """Decides where a batch ends, only from the sizes of its samples.

    Args:
        stage: The bounds.

    Attributes:
        samples: Number of samples in the current batch.
        size: Size of the current batch, as it counts against the bound.
    """

    __slots__ = ("_longest", "_stage", "_total", "samples")

    def __init__(self, stage: BatchBySize) -> None:
        self._stage = stage
        self.samples = 0
        self._total = 0
        self._longest = 0

    @property
    def size(self) -> int:
        """Size of the current batch, as it counts against the bound."""
        return self._longest * self.samples if self._stage.padded else self._total

    def add(self, size: int) -> Literal["same", "new", "drop"]:
        """Add the next sample.

        Args:
            size: Size of the sample, at least 0.

        Returns:
            ``"same"``: the sample belongs to the current batch. ``"new"``: the current batch is complete and the sample
            starts the next one. ``"drop"``: the sample belongs to no batch.

        Raises:
            ValueError: The sample by itself exceeds the bound, or its size is negative.
        """
        stage = self._stage
        if size < 0:
            raise ValueError(f"a sample's size is {size}, less than 0")
        if size > stage.size_max and stage.oversize != "alone":
            if stage.oversize == "drop":
                return "drop"
            raise ValueError(f"a sample of size {size} exceeds the largest size of a batch, {stage.size_max}")
        longest, total, samples = max(self._longest, size), self._total + size, self.samples + 1
        after = longest * samples if stage.padded else total
        fits = after <= stage.size_max and samples <= (stage.samples_max or samples)
        if fits or not self.samples:
            self._longest, self._total, self.samples = longest, total, samples
            return "same"
        self._longest = self._total = size
        self.samples = 1
        return "new"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBlocks:
    """Concatenates the tokens of documents, and cuts them into blocks.

    Attributes:
        length: Number of tokens in a block, at least 1.
        field: The field of a document that holds its tokens.
        separator: Token that follows each document; None adds none.
        position_ids: Whether a block has ``position_ids``, which count from 0 in each document and block.
        pad: Token that fills the last block of an epoch; None leaves out what does not fill a block.
        dtype: Dtype of the tokens in a block.
    """

    length: int
    field: str = "tokens"
    separator: int | None = None
    position_ids: bool = False
    pad: int | None = None
    dtype: str = "int64"

    def __post_init__(self) -> None:
        check_whole(".token_blocks length", self.length, 1)
        if not isinstance(self.field, str) or not self.field:
            raise ConfigError(f".token_blocks(field={self.field!r}) must be the name of the field with the tokens")
        if self.dtype not in _TOKEN_MAX:
            raise ConfigError(f".token_blocks(dtype={self.dtype!r}) must be one of {', '.join(_TOKEN_MAX)}")
        for name, token in (("separator", self.separator), ("pad", self.pad)):
            if token is not None:
                check_whole(f".token_blocks {name}", token, 0, _TOKEN_MAX[self.dtype])

    @property
    def names(self) -> tuple[str, ...]:
        """The fields of a block."""
        return (self.field, "position_ids") if self.position_ids else (self.field,)

    def __repr__(self) -> str:
        options = "" if self.separator is None else f", separator={self.separator}"
        options += ", position_ids=True" if self.position_ids else ""
        options += "" if self.pad is None else f", pad={self.pad}"
        options += "" if self.dtype == "int64" else f", dtype={self.dtype!r}"
        return f".token_blocks({self.length}, field={self.field!r}{options})"


def names_of(fields: object, what: str) -> tuple[str, ...]:
    """Return one name or several names as a tuple.

    Args:
        fields: A name or an iterable of names.
        what: The method or option that takes them, for the message.

    Raises:
        ConfigError: `fields` is neither.
    """
    if isinstance(fields, str):
        return (fields,)
    if not isinstance(fields, Iterable):
        raise ConfigError(f"{what} takes a name or a list of names, not {fields!r}")
    return tuple(fields)


def padding_of(pad: Mapping[str, float] | str | Iterable[str] | None) -> tuple[tuple[str, float], ...]:
    """Return ``pad=`` as pairs of a field and its padding; names alone are padded with 0."""
    if pad is None:
        return ()
    if isinstance(pad, Mapping):
        return tuple(pad.items())
    return tuple((name, 0) for name in names_of(pad, "pad="))


def _is_positive(count: object) -> bool:
    return isinstance(count, int) and not isinstance(count, bool) and count >= 1
