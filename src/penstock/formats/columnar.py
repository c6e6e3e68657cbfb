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
from typing import Any, NamedTuple, overload

from penstock.formats.sample import Sample, typed
from penstock.memory.buffers import is_typed


class Kind(NamedTuple):
    """The fields of samples in columns. ``kind_of`` creates it, so that equal kinds are the same object.

    Attributes:
        names: Field names, in stored order.
        integers: Names of the fields whose value is one ``int``, for int64[1]; the other values are ``bytes``.
        arrays: Dtype and shape of the values of fields whose column is an array instead of a list.
        optional: Names of the fields with such a column in which values may be null.
    """

    names: tuple[str, ...]
    integers: frozenset[str]
    arrays: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    optional: tuple[str, ...] = ()


kind_of = lru_cache(maxsize=256)(Kind)
"""Return the one ``Kind`` object with these fields."""


class Samples(Sequence[Sample]):
    """Samples that all have the same fields.

    Attributes:
        kind: The fields that all samples have.
        columns: Keys, offsets and sizes (as in ``Sample``), then the values of each field, as lists of equal length or as
            arrays, dtype[n, *shape]; then for each of ``kind.optional`` a bool[n]: whether the value is there. A null is
            None in a list, and undefined in an array.
    """

    __slots__ = ("columns", "kind")

    def __init__(self, kind: Kind, columns: list[Any]) -> None:
        self.kind = kind
        self.columns = columns

    @property
    def names(self) -> tuple[str, ...]:
        """Field names, in stored order."""
        return self.kind.names

    @property
    def keys(self) -> list[str]:
        """The key of each sample."""
        keys: list[str] = self.columns[0]
        return keys

    def valid(self, name: str) -> Any:
        """Return which values of a field are there, bool[n]; None if all are.

        Raises:
            ValueError: There is no field with this name.
        """
        import numpy as np

        if name in self.kind.optional:
            there = self.columns[3 + len(self.kind.names) + self.kind.optional.index(name)]
            return None if there.all() else there
        values = self.columns[3 + self.kind.names.index(name)]
        if type(values) is not list or None not in values:
            return None
        return np.array([value is not None for value in values])

    def array(self, name: str) -> Any:
        """Return a field in the form that a batch has: a list of ``bytes``, or an array such as int64[n, 1].

        Raises:
            ValueError: There is no field with this name.
        """
        values = self.columns[3 + self.kind.names.index(name)]
        if name not in self.kind.integers:
            return values if type(values) is list else values.copy()
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
        there = dict(zip(self.kind.optional, values[len(self.kind.names) :], strict=True))
        fields = {
            name: self._view(name, value)
            for name, value in zip(self.kind.names, values, strict=False)
            if value is not None and there.get(name, True)
        }
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
        for at, more in enumerate(second.columns):
            column = first.columns[at]
            if type(column) is list:
                column.extend(more)
            else:
                first.columns[at] = _concatenated([column, more])
        return first
    found = first if isinstance(first, list) else list(first)
    found.extend(second)
    return found


def reordered(samples: Sequence[Sample], order: list[int]) -> Sequence[Sample]:
    """Reorder samples: the k-th sample of the result is ``samples[order[k]]``."""
    if not isinstance(samples, Samples):
        return [samples[index] for index in order]
    return Samples(
        samples.kind,
        [[column[at] for at in order] if type(column) is list else column[order] for column in samples.columns],
    )


def interleaved(parts: Sequence[Sequence[Sample]], count: int) -> Sequence[Sample]:
    """Take one sample from each part in turn, `count` in total. The first parts may hold one more than the others."""
    kind = parts[0].kind if isinstance(parts[0], Samples) else None
    if kind is None or any(not isinstance(part, Samples) or part.kind is not kind for part in parts):
        woven: list[Sample] = _woven(parts, count)
        return woven
    alike: Sequence[Samples] = parts  # type: ignore[assignment]
    columns = zip(*(part.columns for part in alike), strict=True)
    return alike[0] if len(alike) == 1 else Samples(kind, [_woven(each, count) for each in columns])


def _woven(parts: Sequence[Any], count: int) -> Any:
    """Interleave plain lists, or arrays, in the order of ``interleaved``."""
    step, is_list = len(parts), not hasattr(parts[0], "dtype")
    if count <= step:
        return list(chain.from_iterable(parts)) if is_list else _concatenated(parts)
    found: Any = [None] * count if is_list else _concatenated(parts)
    for at, part in enumerate(parts):
        found[at::step] = part
    return found


def _concatenated(arrays: Sequence[Any]) -> Any:
    import numpy as np  # a job that reads only lists does without

    return np.concatenate(arrays)
