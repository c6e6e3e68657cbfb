"""Samples as columns: the result of a parser whose caller wants values as ``bytes`` and handles no single samples.

A ``Sample`` is three objects that the garbage collector visits repeatedly while they wait to be shuffled. A thousand
samples in columns are only a few lists, and a loop over them runs inside the interpreter. The functions below handle both
forms, ``list[Sample]`` and ``Samples``, so the rest of the loader treats them alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from penstock.buffers import is_typed
from penstock.formats.sample import Sample
from penstock.formats.typed import typed

if TYPE_CHECKING:
    from collections.abc import Iterable


class Kind(NamedTuple):
    """The fields of samples in columns. ``kind_of`` creates it, so that equal kinds are the same object.

    Attributes:
        names: Field names, in stored order.
        integers: Names of the fields whose value is one ``int``, for int64[1]; the other values are ``bytes``.
    """

    names: tuple[str, ...]
    integers: frozenset[str]


@lru_cache(maxsize=256)
def kind_of(names: tuple[str, ...], integers: frozenset[str]) -> Kind:
    """Return the one ``Kind`` object with these fields."""
    return Kind(names, integers)


class Samples(Sequence[Sample]):
    """Samples that all have the same fields.

    Attributes:
        kind: The fields that all samples have.
        columns: Keys, offsets and sizes (as in ``Sample``), then the values of each field, as lists of equal length.
    """

    __slots__ = ("columns", "kind")

    def __init__(self, kind: Kind, columns: list[list[Any]]) -> None:
        self.kind = kind
        self.columns = columns

    @property
    def names(self) -> tuple[str, ...]:
        """Field names, in stored order."""
        return self.kind.names

    @property
    def keys(self) -> list[str]:
        """The key of each sample."""
        return self.columns[0]

    def array(self, name: str) -> Any:
        """Return a field in the form that a batch has: a list of ``bytes``, or int64[n, 1].

        Raises:
            ValueError: There is no field with this name.
        """
        values = self.columns[3 + self.kind.names.index(name)]
        if name not in self.kind.integers:
            return values
        import numpy as np

        return np.array(values, np.int64)[:, None]

    def __len__(self) -> int:
        return len(self.columns[0])

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Samples: ...
    def __getitem__(self, index: int | slice) -> Sample | Samples:
        if isinstance(index, slice):
            return Samples(self.kind, [column[index] for column in self.columns])
        key, offset_bytes, size_bytes, *values = map(itemgetter(index), self.columns)
        fields = {name: self._view(name, value) for name, value in zip(self.kind.names, values, strict=True)}
        return Sample(key, fields, offset_bytes, size_bytes)

    def _view(self, name: str, value: Any) -> memoryview:
        if name in self.kind.integers:
            return typed(memoryview(value.to_bytes(8, "little", signed=True)), "q")
        return memoryview(value)

    def __repr__(self) -> str:
        return f"<{len(self)} samples of {', '.join(self.kind.names)}>"


def as_columns(samples: Sequence[Sample]) -> Samples | None:
    """Return the samples as columns, with values copied.

    Returns None if the samples have different fields, or values other than bytes and single int64s.
    """
    if isinstance(samples, Samples):
        return samples
    names = tuple(samples[0].fields)
    if not names or any(tuple(sample.fields) != names for sample in samples):
        return None
    columns: list[list[Any]] = [
        [sample.key for sample in samples],
        [sample.offset_bytes for sample in samples],
        [sample.size_bytes for sample in samples],
    ]
    integers = []
    for name in names:
        values = [sample.fields[name] for sample in samples]
        if not any(map(is_typed, values)):
            columns.append(list(map(bytes, values)))
        elif all(value.format == "q" and value.shape == (1,) for value in values):
            columns.append([value[0] for value in values])
            integers.append(name)
        else:
            return None
    return Samples(kind_of(names, frozenset(integers)), columns)


def joined(first: Sequence[Sample], second: Sequence[Sample]) -> Sequence[Sample]:
    """Concatenate two groups of samples. `first` belongs to the caller and may be extended in place."""
    if not first:
        return second
    if isinstance(first, Samples) and isinstance(second, Samples) and first.kind is second.kind:
        for column, more in zip(first.columns, second.columns, strict=True):
            column.extend(more)
        return first
    found = first if isinstance(first, list) else list(first)
    found.extend(second)
    return found


def reordered(samples: Sequence[Sample], order: list[int]) -> Sequence[Sample]:
    """Reorder samples: the k-th sample of the result is ``samples[order[k]]``."""
    if not isinstance(samples, Samples):
        return [samples[index] for index in order]
    return Samples(samples.kind, [[column[at] for at in order] for column in samples.columns])


def interleaved(parts: Sequence[Sequence[Sample]], count: int) -> Sequence[Sample]:
    """Take one sample from each part in turn, `count` in total. The first parts may hold one more than the others."""
    if set(map(type, parts)) != {Samples}:
        return _woven(parts, count)
    alike: Sequence[Samples] = parts  # type: ignore[assignment]
    kind, columns = alike[0].kind, [part.columns for part in alike]
    if any(part.kind is not kind for part in alike):
        return _woven(parts, count)
    return alike[0] if len(alike) == 1 else Samples(kind, [_woven(each, count) for each in zip(*columns, strict=True)])


def _woven(parts: Sequence[Iterable[Any]], count: int) -> list[Any]:
    """Interleave plain lists, in the order of ``interleaved``."""
    step = len(parts)
    if count <= step:
        return list(chain.from_iterable(parts))
    found: list[Any] = [None] * count
    for at, part in enumerate(parts):
        found[at::step] = part
    return found
