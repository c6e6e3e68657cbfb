"""Samples as columns: what a parser gives where their values are wanted as ``bytes`` and nobody looks at single ones.

A ``Sample`` is three objects that the garbage collector visits again and again while they wait to be shuffled; a thousand
samples in columns are a few lists, and what would be a loop over them is a loop inside the interpreter. Both kinds go
through the loader by the same functions, below: samples come as ``list[Sample]`` or as ``Samples``.
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
    """What samples in columns have; made by ``kind_of``, so that equal ones are one object.

    Attributes:
        names: Of the fields, in stored order.
        integers: Those whose value is one ``int``, for int64[1]; the others are ``bytes``.
    """

    names: tuple[str, ...]
    integers: frozenset[str]


@lru_cache(maxsize=256)
def kind_of(names: tuple[str, ...], integers: frozenset[str]) -> Kind:
    """The one ``Kind`` with these."""
    return Kind(names, integers)


class Samples(Sequence[Sample]):
    """Samples that all have the same fields.

    Attributes:
        kind: Of all of them.
        columns: Keys, offsets, sizes (see ``Sample``), then the values of each field; lists of one length.
    """

    __slots__ = ("columns", "kind")

    def __init__(self, kind: Kind, columns: list[list[Any]]) -> None:
        self.kind = kind
        self.columns = columns

    @property
    def names(self) -> tuple[str, ...]:
        """Of the fields, in stored order."""
        return self.kind.names

    @property
    def keys(self) -> list[str]:
        """Of each sample."""
        return self.columns[0]

    def array(self, name: str) -> Any:
        """A field as a batch has it: a list of ``bytes``, or int64[n, 1].

        Raises:
            ValueError: There is none of this name.
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
    """The same as columns, values copied; None where they differ in their fields, or hold others than bytes and one int64."""
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
    """Both, one behind the other. `first` is the caller's own, and may be grown."""
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
    """The k-th is ``samples[order[k]]``."""
    if not isinstance(samples, Samples):
        return [samples[index] for index in order]
    return Samples(samples.kind, [[column[at] for at in order] for column in samples.columns])


def interleaved(parts: Sequence[Sequence[Sample]], count: int) -> Sequence[Sample]:
    """One of each part in turn: `count` in all, the first parts may hold one more than the others."""
    if set(map(type, parts)) != {Samples}:
        return _woven(parts, count)
    alike: Sequence[Samples] = parts  # type: ignore[assignment]
    kind, columns = alike[0].kind, [part.columns for part in alike]
    if any(part.kind is not kind for part in alike):
        return _woven(parts, count)
    return alike[0] if len(alike) == 1 else Samples(kind, [_woven(each, count) for each in zip(*columns, strict=True)])


def _woven(parts: Sequence[Iterable[Any]], count: int) -> list[Any]:
    """As ``interleaved``, of single things."""
    step = len(parts)
    if count <= step:
        return list(chain.from_iterable(parts))
    found: list[Any] = [None] * count
    for at, part in enumerate(parts):
        found[at::step] = part
    return found
