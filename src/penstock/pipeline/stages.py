"""The stages of a pipeline as frozen records, which check their arguments and do nothing else.

The stages that form batches are in ``batching.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from penstock.config import SEED_MAX, check_whole
from penstock.errors import ConfigError
from penstock.pipeline.batching import Batch, BatchBySize, TokenBlocks
from penstock.pipeline.fields import OBJECT, Field, Spec
from penstock.redaction import public_url
from penstock.system.tracebacks import function_name

if TYPE_CHECKING:
    from penstock.pipeline.pipeline import Pipeline


Sample: TypeAlias = Mapping[str, Any]
"""What ``map`` functions take and return: values by field name, with ``__key__``, ``__shard__`` and ``__position__``."""

ERRORS_MAX = 1_000_000_000
TABLE_SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
_JOIN_BYTES_MAX = 1024**3
_SCALARS: dict[object, str] = {bool: "bool", int: "int64", float: "float64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shuffle:
    """Permutes the shards, and the samples within runs of ``window / lanes``.

    Attributes:
        window: Number of samples that the whole job holds in memory to draw from.
        seed: Seed of every permutation and of the ``rng`` of ``map`` functions, in [0, 2**64).
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
    """Decodes the named members to values and leaves out the others.

    Attributes:
        fields: The fields that a sample has afterwards.
        max_errors: Number of samples per epoch that may be dropped because a member does not decode.
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
                raise ConfigError(f".decode({entry!r}) is not a field", hint=_decode_hint(entry))
        names = (*self.members, *(entry.valid for entry in self.fields if entry.valid))
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f".decode() names {', '.join(map(repr, repeated))} more than once")
        _check_max_errors(self.max_errors)

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the members that it reads, including masks and alternatives."""
        return tuple(name for entry in self.fields for name in (*entry.names, *entry.alternatives))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the values that a sample has afterwards."""
        values = (name for entry in self.fields for name in entry.names)
        return (*values, *(entry.valid for entry in self.fields if entry.valid))

    @property
    def specs(self) -> dict[str, Spec | None]:
        """Dtype and shape of each value; None if they are not known."""
        specs = [spec for entry in self.fields for spec in entry.specs]
        specs += [Spec("bool", ())] * (len(self.names) - len(specs))
        return dict(zip(self.names, specs, strict=True))

    def __repr__(self) -> str:
        return f".decode({', '.join(map(repr, self.fields))}{_errors_shown(self.max_errors)})"


@dataclass(frozen=True, slots=True)
class Call:
    """A stage that calls a user's function: ``fn(sample)`` or ``fn(sample, rng)``.

    Attributes:
        fn: The function.
        max_errors: Number of samples per epoch that may be dropped because the function fails.
    """

    METHOD: ClassVar[str] = "map"
    fn: Callable[..., Any]
    max_errors: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_function(self.fn, self.METHOD)
        _check_max_errors(self.max_errors)

    @property
    def takes_rng(self) -> bool:
        """Whether the function is passed a ``numpy.random.Generator``."""
        return takes_rng(self.fn)

    @property
    def name(self) -> str:
        """Name of the function, for messages."""
        return function_name(self.fn)


@dataclass(frozen=True, slots=True)
class Map(Call):
    """Replaces each sample by the result of ``fn(sample)`` or ``fn(sample, rng)``.

    Attributes:
        fn: The function.
        fields: Name and spec of each field that it returns, in order; None if they are not declared.
        max_errors: Number of samples per epoch that may be dropped because the function fails.
    """

    fields: tuple[tuple[str, Spec], ...] | None = None

    def __repr__(self) -> str:
        shown = ""
        if self.fields is not None:
            entries = (f"{name!r}: {'object' if spec == OBJECT else tuple(spec)}" for name, spec in self.fields)
            shown = f", fields={{{', '.join(entries)}}}"
        return f".map({self.name}{shown}{_errors_shown(self.max_errors)})"


@dataclass(frozen=True, slots=True)
class Filter(Call):
    """Leaves out the samples for which ``fn(sample)`` or ``fn(sample, rng)`` is false.

    Attributes:
        fn: The function.
        refill: Whether batches are filled up with the following samples instead of being shorter.
        max_errors: Number of samples per epoch that may be dropped because the function fails.
    """

    METHOD: ClassVar[str] = "filter"
    refill: bool = False

    def __repr__(self) -> str:
        return f".filter({self.name}{', refill=True' if self.refill else ''}{_errors_shown(self.max_errors)})"


@dataclass(frozen=True, slots=True)
class FlatMap(Call):
    """Replaces each sample by the samples that ``fn(sample)`` or ``fn(sample, rng)`` returns, of any number.

    Attributes:
        fn: The function.
        max_errors: Number of samples per epoch that may be dropped because the function fails.
    """

    METHOD: ClassVar[str] = "flat_map"

    def __repr__(self) -> str:
        return f".flat_map({self.name}{_errors_shown(self.max_errors)})"


@dataclass(frozen=True, slots=True)
class Select:
    """Keeps the named fields only. Before ``decode`` it keeps members, and the others need not be read.

    Attributes:
        names: Names of the fields or members to keep.
    """

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.names or not all(isinstance(name, str) and name for name in self.names):
            raise ConfigError(f".select({list(self.names)}) must be given the names of fields")
        if len(set(self.names)) < len(self.names):
            raise ConfigError(f".select({list(self.names)}) names a field more than once")

    def __repr__(self) -> str:
        return f".select({list(self.names)!r})"


@dataclass(frozen=True, slots=True)
class Take:
    """Reads the first samples of each epoch only.

    Attributes:
        count: Number of samples over all ranks, at least 1.
    """

    count: int

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or isinstance(self.count, bool) or self.count < 1:
            raise ConfigError(f".take({self.count!r}) must be at least 1 sample")

    def __repr__(self) -> str:
        return f".take({self.count})"


@dataclass(frozen=True, slots=True)
class Join:
    """Adds fields from a table or another pipeline that has a row for each sample's key.

    Attributes:
        other: URL of a table in JSON lines, CSV, TSV or Parquet, or a pipeline whose samples are the rows.
        on: Column of the table that holds the key.
        fields: Columns to add; None: all but the key column.
        missing: Treatment of a sample without a row: ``"raise"`` an error, or ``"drop"`` and count it.
        bytes_max: Largest size of the table as stored, in bytes. It is held in memory, once per process.
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
    """Reads in stored order, every sample exactly once over all ranks; the last batches are padded and masked."""

    def __repr__(self) -> str:
        return ".evaluate()"


Stage: TypeAlias = (
    Shuffle | Decode | Map | Filter | FlatMap | Select | Take | Join | Evaluate | TokenBlocks | Batch | BatchBySize
)


def specs_of(fields: Mapping[str, object] | None) -> tuple[tuple[str, Spec], ...] | None:
    """Return ``fields=`` of ``map`` as pairs of a name and a spec.

    Args:
        fields: By name, a dtype, a pair of dtype and shape, or a type: ``("uint8", (224, 224, 3))``, ``"int64"``, ``str``.

    Raises:
        ConfigError: An entry is not a dtype, a pair or a type.
    """
    if fields is None:
        return None
    if not isinstance(fields, Mapping):
        raise ConfigError(
            f"fields={fields!r} must be a dict of field names and their types",
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
    import numpy as np  # imported here, so that describing a pipeline imports nothing large

    if name == OBJECT.dtype:
        return True
    try:
        return np.dtype(name) != object
    except TypeError:
        return False


def _decode_hint(entry: object) -> str:
    """Guess what the user meant by an argument of ``decode`` that is not a field."""
    if isinstance(entry, type) and issubclass(entry, Field):
        return f"name the member that it reads: ps.{entry.__name__}('ext')"
    if isinstance(entry, list | tuple):
        return "pass the fields as separate arguments: .decode(*fields)"
    name = entry if isinstance(entry, str) else "txt"
    return f"name its type: ps.Text({name!r}), or ps.Image, Integer, Float, Json, Numpy, Audio or Bytes"


def _check_max_errors(count: object) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= ERRORS_MAX:
        raise ConfigError(f"max_errors={count!r} must lie in [0, {ERRORS_MAX}]")


def _errors_shown(count: int) -> str:
    return f", max_errors={count}" if count else ""


def check_function(fn: object, stage: str) -> None:
    """Check that `fn` can be called with (sample) or (sample, rng).

    Args:
        fn: The user's function.
        stage: Name of the method that takes it, for the message.

    Raises:
        ConfigError: `fn` is not callable, or it requires more than two arguments.
    """
    if not callable(fn):
        raise ConfigError(f".{stage}({fn!r}) must be given a function of a sample")
    if sum(parameter.default is inspect.Parameter.empty for parameter in _positional(fn)) > 2:
        raise ConfigError(
            f".{stage}({function_name(fn)}) must take (sample) or (sample, rng), not more",
            hint="bind further arguments by functools.partial",
        )


def takes_rng(fn: Callable[..., Any]) -> bool:
    """Whether `fn` is passed a ``numpy.random.Generator``: its second parameter is required, or is named ``rng``."""
    parameters = _positional(fn)
    return len(parameters) >= 2 and (parameters[1].default is inspect.Parameter.empty or parameters[1].name == "rng")


def _positional(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature is called with only the sample
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter for parameter in parameters if parameter.kind in kinds]
