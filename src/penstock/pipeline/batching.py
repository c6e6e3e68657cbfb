"""How samples become batches: so many at a time, or so many tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from penstock.errors import ConfigError
from penstock.tracebacks import function_name

Oversize = Literal["raise", "alone", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """`size` samples at a time per rank, or `global_size` over all ranks.

    Attributes:
        size: Samples per rank; None where the global size is given.
        global_size: Samples of all ranks together, whatever their number; None where `size` is given.
        drop_last: Leave out what does not fill a batch at the end of an epoch.
        collate: ``fn(list of samples)`` gives the batch; None: columns.
        pad: Fields whose arrays differ in length, and the value that fills them up to the batch's longest.
        ragged: Fields whose arrays differ in length, put end to end with offsets.
    """

    size: int | None = None
    global_size: int | None = None
    drop_last: bool = False
    collate: Callable[[list[dict[str, Any]]], Any] | None = None
    pad: tuple[tuple[str, float], ...] = ()
    ragged: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.size is None) == (self.global_size is None):
            raise ConfigError(
                f".batch(n={self.size!r}, global_size={self.global_size!r}): give one of them",
                hint=".batch(128) is per rank, .batch(global_size=1024) is for all ranks together",
            )
        for count in (self.size, self.global_size):
            if count is not None and not _is_positive(count):
                raise ConfigError(f".batch({count!r}) must be a whole number of samples, at least 1")
        _check_shapes(self.collate, self.pad, self.ragged)

    def __repr__(self) -> str:
        size = f"{self.size}" if self.size is not None else f"global_size={self.global_size}"
        return f".batch({size}{_shown(self)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchBySize:
    """Consecutive samples until the next would pass a size: tokens, frames, bytes.

    Attributes:
        size_max: Of a batch, in whatever `size` counts.
        size: A field, whose length counts, or ``fn(sample)`` that gives a number.
        padded: A batch's size is its longest sample's times their number, as it is after padding, not their sum.
        samples_max: In a batch; None: as many as fit.
        oversize: A sample larger than `size_max` is an error, a batch of its own, or dropped and counted.
        drop_last: Leave out the last batch of an epoch.
        collate: As for ``Batch``.
        pad: See there.
        ragged: See there.
    """

    size_max: int
    size: str | Callable[[Mapping[str, Any]], int]
    padded: bool = False
    samples_max: int | None = None
    oversize: Oversize = "raise"
    drop_last: bool = False
    collate: Callable[[list[dict[str, Any]]], Any] | None = None
    pad: tuple[tuple[str, float], ...] = ()
    ragged: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _is_positive(self.size_max):
            raise ConfigError(f".batch_by_size({self.size_max!r}) must be at least 1")
        if not (isinstance(self.size, str) and self.size) and not callable(self.size):
            raise ConfigError(f".batch_by_size(size={self.size!r}) must be a field, or a function of a sample")
        if self.samples_max is not None and not _is_positive(self.samples_max):
            raise ConfigError(f".batch_by_size(samples_max={self.samples_max!r}) must be at least 1")
        if self.oversize not in ("raise", "alone", "drop"):
            raise ConfigError(f".batch_by_size(oversize={self.oversize!r}) must be 'raise', 'alone' or 'drop'")
        _check_shapes(self.collate, self.pad, self.ragged)

    def size_of(self, sample: Mapping[str, Any]) -> int:
        """What one sample counts: the length of a field, or what the function says."""
        if not isinstance(self.size, str):
            return int(self.size(sample))
        if self.size not in sample:
            raise ValueError(f"it has no field {self.size!r}, but {', '.join(sample)}")
        return len(sample[self.size])

    def budget(self) -> SizeBudget:
        """A new one, empty."""
        return SizeBudget(self)

    def __repr__(self) -> str:
        size = repr(self.size) if isinstance(self.size, str) else function_name(self.size)
        options = ", padded=True" if self.padded else ""
        options += "" if self.samples_max is None else f", samples_max={self.samples_max}"
        options += "" if self.oversize == "raise" else f", oversize={self.oversize!r}"
        return f".batch_by_size({self.size_max}, size={size}{options}{_shown(self)})"


class SizeBudget:
    """Says where a batch ends. Pure: integers in, a verdict out.

    Attributes:
        samples: In the batch so far.
        size: Of the batch so far.
    """

    __slots__ = ("_longest", "_stage", "_total", "samples")

    def __init__(self, stage: BatchBySize) -> None:
        self._stage = stage
        self.samples = 0
        self._total = 0
        self._longest = 0

    @property
    def size(self) -> int:
        """Of the batch so far, as it counts against the bound."""
        return self._longest * self.samples if self._stage.padded else self._total

    def add(self, size: int) -> Literal["same", "new", "drop"]:
        """Add the next sample.

        Returns:
            ``"same"``: to the batch so far. ``"new"``: it begins the next batch; the batch so far is complete.
            ``"drop"``: to none.

        Raises:
            ValueError: the sample alone is larger than a batch may be, or its size is negative.
        """
        stage = self._stage
        if size < 0:
            raise ValueError(f"a sample's size is {size}, less than 0")
        if size > stage.size_max and stage.oversize != "alone":
            if stage.oversize == "drop":
                return "drop"
            raise ValueError(f"a sample of size {size} is larger than a batch may be, {stage.size_max}")
        longest, total, samples = max(self._longest, size), self._total + size, self.samples + 1
        after = longest * samples if stage.padded else total
        fits = after <= stage.size_max and samples <= (stage.samples_max or samples)
        if fits or not self.samples:
            self._longest, self._total, self.samples = longest, total, samples
            return "same"
        self._longest = self._total = size
        self.samples = 1
        return "new"


def names_of(fields: object, what: str) -> tuple[str, ...]:
    """One name, or several, as a tuple.

    Args:
        fields: As the user gave them.
        what: Takes them, for the message.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(fields, str):
        return (fields,)
    if not isinstance(fields, Iterable):
        raise ConfigError(f"{what} takes a name or a list of names, not {fields!r}")
    return tuple(fields)


def padding_of(pad: Mapping[str, float] | str | Iterable[str] | None) -> tuple[tuple[str, float], ...]:
    """``{"tokens": 0}``, or names alone, which are filled with 0, as records."""
    if pad is None:
        return ()
    if isinstance(pad, Mapping):
        return tuple(pad.items())
    return tuple((name, 0) for name in names_of(pad, "pad="))


def _check_shapes(collate: object, pad: tuple[tuple[str, float], ...], ragged: tuple[str, ...]) -> None:
    if collate is not None and not callable(collate):
        raise ConfigError(f"collate={collate!r} must be a function of a list of samples")
    names = [*(name for name, _ in pad), *ragged]
    for name in names:
        if not isinstance(name, str) or not name or name.startswith("__"):
            raise ConfigError(f"pad= and ragged= take names of fields, not {name!r}")
    if len(set(names)) < len(names):
        raise ConfigError(f"pad= and ragged= name a field more than once: {names}")


def _shown(stage: Batch | BatchBySize) -> str:
    options = ", drop_last=True" if stage.drop_last else ""
    options += "" if stage.collate is None else f", collate={function_name(stage.collate)}"
    options += f", pad={dict(stage.pad)!r}" if stage.pad else ""
    return options + (f", ragged={list(stage.ragged)!r}" if stage.ragged else "")


def _is_positive(count: object) -> bool:
    return isinstance(count, int) and not isinstance(count, bool) and count >= 1
