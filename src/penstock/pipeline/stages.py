"""The stages of a pipeline: frozen records of what is to be done. They check their arguments and do nothing.

What gathers samples into batches is in `batching`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from penstock.config import SEED_MAX, check_whole
from penstock.errors import ConfigError
from penstock.pipeline.batching import Batch, BatchBySize
from penstock.pipeline.fields import OBJECT, Field, Spec
from penstock.pipeline.functions import check_function, takes_rng
from penstock.redaction import public_url
from penstock.tracebacks import function_name

if TYPE_CHECKING:
    from penstock.pipeline.pipeline import Pipeline

Sample: TypeAlias = Mapping[str, Any]
"""What ``map`` functions take and give: field names to values, with ``__key__``, ``__shard__`` and ``__position__``."""

ERRORS_MAX = 1_000_000_000
TABLE_SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
_JOIN_BYTES_MAX = 1024**3
_SCALARS: dict[object, str] = {bool: "bool", int: "int64", float: "float64"}


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
        if not isinstance(self.seed, int) or not 0 <= self.seed <= SEED_MAX:
            raise ConfigError(f"seed={self.seed!r} must lie in [0, 2**64)")

    def __repr__(self) -> str:
        return f".shuffle(window={self.window}, seed={self.seed})"


@dataclass(frozen=True, slots=True)
class Decode:
    """The named members become values; other members are left out.

    Attributes:
        fields: What a sample shall have.
        max_errors: Samples that may be dropped, per epoch, because a member does not decode.
    """

    fields: tuple[Field, ...]
    max_errors: int = 0

    def __post_init__(self) -> None:
        if not self.fields:
            raise ConfigError(
                ".decode() needs at least one field", hint="e.g. .decode(ps.Image('jpg'), ps.Integer('cls'))"
            )
        for entry in self.fields:
            if not isinstance(entry, Field):
                raise ConfigError(f".decode({entry!r}) is no field", hint=_decode_hint(entry))
        if repeated := sorted({name for name in self.names if self.names.count(name) > 1}):
            raise ConfigError(f".decode() names {', '.join(map(repr, repeated))} more than once")
        _check_max_errors(self.max_errors)

    @property
    def names(self) -> tuple[str, ...]:
        """Members that it reads, masks included."""
        return tuple(name for entry in self.fields for name in entry.names)

    def __repr__(self) -> str:
        return f".decode({', '.join(map(repr, self.fields))}{_errors_shown(self.max_errors)})"


@dataclass(frozen=True, slots=True)
class Call:
    """A stage that calls a user's function of a sample: ``fn(sample)`` or ``fn(sample, rng)``."""

    METHOD: ClassVar[str] = "map"
    fn: Callable[..., Any]

    def __post_init__(self) -> None:
        check_function(self.fn, self.METHOD)

    @property
    def takes_rng(self) -> bool:
        """Whether a ``numpy.random.Generator`` is passed."""
        return takes_rng(self.fn)

    @property
    def name(self) -> str:
        """The function's name, for people."""
        return function_name(self.fn)


@dataclass(frozen=True, slots=True)
class Map(Call):
    """A user's function of one sample: ``fn(sample)`` or ``fn(sample, rng)``.

    Attributes:
        fn: The function.
        fields: What it gives, in its order, where that was said.
        max_errors: Samples that may be dropped, per epoch, because it fails.
    """

    fields: tuple[tuple[str, Spec], ...] | None = None
    max_errors: int = 0

    def __post_init__(self) -> None:
        Call.__post_init__(self)
        _check_max_errors(self.max_errors)

    def __repr__(self) -> str:
        shown = ""
        if self.fields is not None:
            entries = (f"{name!r}: {'object' if spec == OBJECT else tuple(spec)}" for name, spec in self.fields)
            shown = f", fields={{{', '.join(entries)}}}"
        return f".map({self.name}{shown}{_errors_shown(self.max_errors)})"


@dataclass(frozen=True, slots=True)
class Filter(Call):
    """Samples for which ``fn(sample)`` or ``fn(sample, rng)`` is false are left out.

    Attributes:
        fn: The function.
        refill: Batches are filled up with the samples that follow, instead of being shorter.
        max_errors: Samples that may be dropped, per epoch, because it fails.
    """

    METHOD: ClassVar[str] = "filter"
    refill: bool = False
    max_errors: int = 0

    def __post_init__(self) -> None:
        Call.__post_init__(self)
        _check_max_errors(self.max_errors)

    def __repr__(self) -> str:
        return f".filter({self.name}{', refill=True' if self.refill else ''}{_errors_shown(self.max_errors)})"


@dataclass(frozen=True, slots=True)
class FlatMap(Call):
    """``fn(sample)`` or ``fn(sample, rng)`` gives any number of samples for one.

    Attributes:
        fn: The function.
        max_errors: Samples that may be dropped, per epoch, because it fails.
    """

    METHOD: ClassVar[str] = "flat_map"
    max_errors: int = 0

    def __post_init__(self) -> None:
        Call.__post_init__(self)
        _check_max_errors(self.max_errors)

    def __repr__(self) -> str:
        return f".flat_map({self.name}{_errors_shown(self.max_errors)})"


@dataclass(frozen=True, slots=True)
class Select:
    """Of every sample these fields only; before ``decode`` these members, so that others need not be read."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.names or not all(isinstance(name, str) and name for name in self.names):
            raise ConfigError(f".select({list(self.names)}) must be given names of fields")
        if len(set(self.names)) < len(self.names):
            raise ConfigError(f".select({list(self.names)}) names a field more than once")

    def __repr__(self) -> str:
        return f".select({list(self.names)!r})"


@dataclass(frozen=True, slots=True)
class Take:
    """The first samples of the epoch only, counted over all ranks."""

    count: int

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or isinstance(self.count, bool) or self.count < 1:
            raise ConfigError(f".take({self.count!r}) must be at least 1 sample")

    def __repr__(self) -> str:
        return f".take({self.count})"


@dataclass(frozen=True, slots=True)
class Join:
    """Fields from a table, or another source, that has a row for each sample's key.

    Attributes:
        other: URL of a table (JSON lines, CSV, TSV, Parquet), or a pipeline.
        on: The table's column that holds the key.
        fields: Columns to take; None: all but the key's.
        missing: What to do with a sample that has no row.
        bytes_max: What the table may take as stored; it is held in memory, once per process.
    """

    other: str | Pipeline
    on: str = "key"
    fields: tuple[str, ...] | None = None
    missing: Literal["raise", "drop"] = "raise"
    bytes_max: int = _JOIN_BYTES_MAX

    def __post_init__(self) -> None:
        if isinstance(self.other, str) and not public_url(self.other).lower().endswith(TABLE_SUFFIXES):
            raise ConfigError(f".join({self.other!r}) must be a table", hint=f"one of {', '.join(TABLE_SUFFIXES)}")
        if not isinstance(self.on, str) or not self.on:
            raise ConfigError(f".join(on={self.on!r}) must be the name of the column that holds the key")
        if self.missing not in ("raise", "drop"):
            raise ConfigError(f".join(missing={self.missing!r}) must be 'raise' or 'drop'")
        check_whole(".join bytes_max", self.bytes_max, 1)

    def __repr__(self) -> str:
        options = "" if self.fields is None else f", fields={list(self.fields)!r}"
        options += "" if self.missing == "raise" else f", missing={self.missing!r}"
        options += "" if self.bytes_max == _JOIN_BYTES_MAX else f", bytes_max={self.bytes_max}"
        other = public_url(self.other) if isinstance(self.other, str) else self.other
        return f".join({other!r}, on={self.on!r}{options})"


@dataclass(frozen=True, slots=True)
class Evaluate:
    """The stored order, and every sample exactly once over all ranks, whose last batches are padded and masked."""

    def __repr__(self) -> str:
        return ".evaluate()"


Stage: TypeAlias = Shuffle | Decode | Map | Filter | FlatMap | Select | Take | Join | Evaluate | Batch | BatchBySize


def specs_of(fields: Mapping[str, object] | None) -> tuple[tuple[str, Spec], ...] | None:
    """What a user says a function gives, as records: ``("uint8", (224, 224, 3))``, ``"int64"``, ``int``, ``str``.

    Raises:
        ConfigError: An entry is none of these.
    """
    if fields is None:
        return None
    if not isinstance(fields, Mapping):
        raise ConfigError(
            f"fields={fields!r} must be a dict of names and what they hold",
            hint="e.g. fields={'cls': 'int64', 'text': str}",
        )
    return tuple((name, _spec(name, entry)) for name, entry in fields.items())


def _spec(name: str, entry: object) -> Spec:
    dtype, shape = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, ())
    if dtype in _SCALARS:
        dtype = _SCALARS[dtype]
    elif isinstance(dtype, type) and dtype.__module__ == "numpy":
        dtype = dtype.__name__
    elif dtype in (str, bytes, object, list, dict):
        dtype = OBJECT.dtype
    else:
        dtype = getattr(dtype, "name", dtype)  # numpy.dtype
    is_shape = isinstance(shape, tuple | list) and all(isinstance(side, int) and side >= 0 for side in shape)
    if not isinstance(dtype, str) or not _is_dtype(dtype) or not is_shape:
        raise ConfigError(
            f"fields={{{name!r}: {entry!r}}} must be a dtype, a pair of dtype and shape, or str, bytes or object",
            hint="e.g. fields={'jpg': ('uint8', (224, 224, 3)), 'cls': 'int64', 'text': str}",
        )
    return Spec(dtype, tuple(shape))


def _is_dtype(name: str) -> bool:
    import numpy as np  # only here: describing a pipeline imports nothing large

    if name == OBJECT.dtype:
        return True
    try:
        return np.dtype(name) != object
    except TypeError:
        return False


def _decode_hint(entry: object) -> str:
    """What was probably meant by an argument of ``decode`` that is no field."""
    if isinstance(entry, type) and issubclass(entry, Field):
        return f"say which member it reads: ps.{entry.__name__}('ext')"
    if isinstance(entry, list | tuple):
        return "give the fields one by one: .decode(*fields)"
    name = entry if isinstance(entry, str) else "txt"
    return f"say what it is: ps.Text({name!r}), or ps.Image, Integer, Float, Json, Numpy, Audio or Bytes"


def _check_max_errors(count: object) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= ERRORS_MAX:
        raise ConfigError(f"max_errors={count!r} must lie in [0, {ERRORS_MAX}]")


def _errors_shown(count: int) -> str:
    return f", max_errors={count}" if count else ""
