"""Samples as columns: what a parser gives where their values are wanted as ``bytes`` and nobody looks at single ones.

A ``Sample`` is three objects that the garbage collector visits again and again while they wait to be shuffled; a thousand
samples in columns are a few lists, and what would be a loop over them is a loop inside the interpreter. Both kinds go
through the loader by the same functions, below: samples come as ``list[Sample]`` or as ``Samples``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, overload

from penstock.formats.sample import Sample
from penstock.formats.typed import typed

if TYPE_CHECKING:
    from collections.abc import Iterable


class Samples(Sequence[Sample]):
    """Samples that all have the same fields.

    Attributes:
        names: Of the fields, in stored order.
        integers: Those whose value is one ``int``, for int64[1]; the others are ``bytes``.
        columns: Keys, offsets, sizes (see ``Sample``), then the values of each field; lists of one length.
    """

    __slots__ = ("columns", "integers", "names")

    def __init__(
        self, names: tuple[str, ...], columns: list[list[Any]], integers: frozenset[str] = frozenset()
    ) -> None:
        self.names = names
        self.columns = columns
        self.integers = integers

    @property
    def keys(self) -> list[str]:
        """Of each sample."""
        return self.columns[0]

    def array(self, name: str) -> Any:
        """A field as a batch has it: a list of ``bytes``, or int64[n, 1].

        Raises:
            ValueError: There is none of this name.
        """
        values = self.columns[3 + self.names.index(name)]
        if name not in self.integers:
            return values
        import numpy as np

        return np.array(values, np.int64)[:, None]

    def is_like(self, other: object) -> bool:
        """Whether both can be one."""
        return isinstance(other, Samples) and self.names == other.names and self.integers == other.integers

    def __len__(self) -> int:
        return len(self.columns[0])

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Samples: ...
    def __getitem__(self, index: int | slice) -> Sample | Samples:
        if isinstance(index, slice):
            return Samples(self.names, [column[index] for column in self.columns], self.integers)
        key, offset_bytes, size_bytes, *values = map(itemgetter(index), self.columns)
        fields = {name: self._view(name, value) for name, value in zip(self.names, values, strict=True)}
        return Sample(key, fields, offset_bytes, size_bytes)

    def _view(self, name: str, value: Any) -> memoryview:
        if name in self.integers:
            return typed(memoryview(value.to_bytes(8, "little", signed=True)), "q")
        return memoryview(value)

    def __repr__(self) -> str:
        return f"<{len(self)} samples of {', '.join(self.names)}>"


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
        if all(value.format == "B" for value in values):
            columns.append(list(map(bytes, values)))
        elif all(value.format == "q" and value.shape == (1,) for value in values):
            columns.append([value[0] for value in values])
            integers.append(name)
        else:
            return None
    return Samples(names, columns, frozenset(integers))


def joined(first: Sequence[Sample], second: Sequence[Sample]) -> Sequence[Sample]:
    """Both, one behind the other. `first` is the caller's own, and may be grown."""
    if not first:
        return second
    if isinstance(first, Samples) and first.is_like(second):
        assert isinstance(second, Samples)
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
    return Samples(samples.names, [[column[at] for at in order] for column in samples.columns], samples.integers)


def interleaved(parts: Sequence[Sequence[Sample]], count: int) -> Sequence[Sample]:
    """One of each part in turn: `count` in all, the first parts may hold one more than the others."""
    first, step = parts[0], len(parts)
    if not isinstance(first, Samples) or not all(map(first.is_like, parts)):
        found: list[Any] = [None] * count
        for at, part in enumerate(parts):
            found[at::step] = part
        return found
    if step == 1:
        return first
    columns = [_woven([part.columns[number] for part in parts], count) for number in range(len(first.columns))]  # type: ignore[attr-defined]
    return Samples(first.names, columns, first.integers)


def _woven(parts: Sequence[Iterable[Any]], count: int) -> list[Any]:
    """As ``interleaved``, one column."""
    step = len(parts)
    if count <= step:
        return list(chain.from_iterable(parts))
    found: list[Any] = [None] * count
    for at, part in enumerate(parts):
        found[at::step] = part
    return found
