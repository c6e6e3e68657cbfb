"""The stages of a pipeline: frozen records of what is to be done. They check their arguments and do nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from penstock.errors import ConfigError
from penstock.pipeline.fields import Field

Sample: TypeAlias = Mapping[str, Any]
"""What ``map`` functions take and give: field names to values, with ``__key__``, ``__shard__`` and ``__position__``."""

_SEED_MAX = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Shuffle:
    """Shards are permuted, and samples within runs of ``window / lanes``.

    Attributes:
        window: Samples that the whole job holds to draw from.
        seed: Of every permutation and of ``map``'s ``rng``.
    """

    window: int = 16_384
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.window, int) or self.window < 1:
            raise ConfigError(f"window={self.window!r} must be at least 1 sample")
        if not isinstance(self.seed, int) or not 0 <= self.seed <= _SEED_MAX:
            raise ConfigError(f"seed={self.seed!r} must lie in [0, 2**64)")

    def __repr__(self) -> str:
        return f".shuffle(window={self.window}, seed={self.seed})"


@dataclass(frozen=True, slots=True)
class Decode:
    """The named members become values; other members are left out."""

    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        if not self.fields:
            raise ConfigError(
                ".decode() needs at least one field", hint="e.g. .decode(ps.Image('jpg'), ps.Integer('cls'))"
            )
        for entry in self.fields:
            if not isinstance(entry, Field):
                raise ConfigError(f".decode({entry!r}) is no field", hint="use ps.Image, Integer, Text, Json or Bytes")
        names = [entry.name for entry in self.fields]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f".decode() names {', '.join(map(repr, repeated))} more than once")

    def __repr__(self) -> str:
        return f".decode({', '.join(map(repr, self.fields))})"


@dataclass(frozen=True, slots=True)
class Map:
    """A user's function of one sample: ``fn(sample)`` or ``fn(sample, rng)``."""

    fn: Callable[..., Sample]

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise ConfigError(f".map({self.fn!r}) must be given a function of a sample")
        if _required_count(self.fn) > 2:
            raise ConfigError(
                f".map({self.name}) must take (sample) or (sample, rng), not more", hint="functools.partial"
            )

    @property
    def takes_rng(self) -> bool:
        """Whether a ``numpy.random.Generator`` is passed: the second parameter is required, or is called ``rng``."""
        parameters = _positional(self.fn)
        return len(parameters) >= 2 and (
            parameters[1].default is inspect.Parameter.empty or parameters[1].name == "rng"
        )

    @property
    def name(self) -> str:
        """The function's name, for people."""
        return getattr(self.fn, "__qualname__", None) or type(self.fn).__name__

    def __repr__(self) -> str:
        return f".map({self.name})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """`size` samples at a time, per rank."""

    size: int
    drop_last: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or isinstance(self.size, bool) or self.size < 1:
            raise ConfigError(f".batch({self.size!r}) must be at least 1 sample")

    def __repr__(self) -> str:
        return f".batch({self.size}{', drop_last=True' if self.drop_last else ''})"


Stage: TypeAlias = Shuffle | Decode | Map | Batch


def _positional(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature: it takes a sample
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter for parameter in parameters if parameter.kind in kinds]


def _required_count(fn: Callable[..., Any]) -> int:
    return sum(parameter.default is inspect.Parameter.empty for parameter in _positional(fn))
