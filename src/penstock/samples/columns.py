"""Batches as columns: an array where values have one dtype and shape, a list for everything else.

The first sample fixes each column, or what the pipeline says of it. A value that does not fit is an error and never a
silent cast. Columns of unequal lengths are lists until the batch is complete, and then padded or put end to end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.errors import ConfigError, DecodeError
from penstock.tracebacks import failed

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from numpy.typing import NDArray

    from penstock.pipeline import Batch, BatchBySize, Spec

_SCALARS: dict[type, Any] = {bool: np.dtype(np.bool_), int: np.dtype(np.int64), float: np.dtype(np.float64)}
_PYTHON: dict[Any, type] = {dtype: kind for kind, dtype in _SCALARS.items()}


class Ragged(NamedTuple):
    """Arrays of unequal lengths, end to end: the i-th is ``data[offsets[i]:offsets[i + 1]]``."""

    data: NDArray[Any]
    """dtype[sum of lengths, ...]"""
    offsets: NDArray[np.int64]
    """int64[B + 1], from 0."""


class Column:
    """One field of every sample: ``dtype[rows, *shape]``, or a list where `dtype` is None."""

    __slots__ = ("dtype", "scalar", "shape")

    def __init__(self, value: Any) -> None:
        self.shape: tuple[int, ...] = ()
        self.dtype: np.dtype[Any] | None = _SCALARS.get(type(value))
        if self.dtype is None and _is_array(value):
            array = np.asarray(value)
            if array.dtype != object:
                self.shape, self.dtype = array.shape, array.dtype
        self._find_scalar()

    @classmethod
    def of_spec(cls, spec: Spec) -> Column:
        """The column that a field or a user says it is."""
        column = cls(None)
        if spec.dtype != "object":
            column.dtype, column.shape = np.dtype(spec.dtype), spec.shape
            column._find_scalar()
        return column

    def _find_scalar(self) -> None:
        """A number may come as Python's or as numpy's, where both are the same."""
        self.scalar = _PYTHON.get(self.dtype) if self.dtype is not None and self.shape == () else None

    def allocate(self, rows_count: int) -> NDArray[Any] | list[Any]:
        """Room for so many samples, to be filled."""
        if self.dtype is None:
            return [None] * rows_count
        return np.empty((rows_count, *self.shape), dtype=self.dtype)

    def put(self, rows: Any, row: int, value: Any) -> None:
        """Write `value` to its row.

        Raises:
            ValueError: another type, dtype or shape than the column's.
        """
        if self.dtype is None or (self.scalar is not None and type(value) is self.scalar):
            rows[row] = value
            return
        if not _is_array(value):
            raise ValueError(f"{type(value).__name__} {value!r:.40}, the first sample had {self}")
        array = np.asarray(value)
        if array.dtype != self.dtype or array.shape != self.shape:
            raise ValueError(f"{array.dtype}{list(array.shape)}, the first sample had {self}")
        rows[row] = array

    def finish(self, rows: Any) -> Any:
        """The column as it is delivered."""
        return rows

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}" if self.scalar is None else self.scalar.__name__


def _remedy(name: str, column: Column, value: Any) -> str:
    """What makes a value fit that does not."""
    array = np.asarray(value) if _is_array(value) else None
    if isinstance(value, int | float | np.number) and column.dtype is not None and not column.shape:
        if column.scalar is type(value):
            return "int64 ends at 2**63 - 1: give a float or a str in .map()"
        return f"give one type of number in .map(), e.g. float(sample[{name!r}])"
    if array is None or array.dtype != column.dtype:
        return f"give {column} for every sample in .map()"
    if array.dtype == np.uint8 and array.ndim in (2, 3):
        return "give Image a height and width, or make all alike in .map()"
    return f"make all alike in .map(), or .batch(pad=[{name!r}]), or .batch(ragged=[{name!r}])"


class UnequalColumn(Column):
    """One field whose arrays differ in length: a list of them, until the batch is complete.

    Raises:
        DecodeError: the first value is no array of at least one dimension.
        ConfigError: the padding is no value of that array's dtype.
    """

    __slots__ = ("name", "padding")

    def __init__(self, name: str, value: Any, padding: float | None) -> None:
        self.name = name
        self.padding = padding
        array = _as_array(value)
        if array.dtype == object or not array.ndim:
            raise DecodeError(f"pad= and ragged= need arrays, not {type(value).__name__}", stage="batch", field=name)
        self.dtype, self.shape, self.scalar = array.dtype, array.shape, None
        if padding is not None and not _holds(array.dtype, padding):
            raise ConfigError(f"pad={{{name!r}: {padding!r}}}: {array.dtype} has no such value")

    def allocate(self, rows_count: int) -> list[Any]:
        """A list."""
        return [None] * rows_count

    def put(self, rows: Any, row: int, value: Any) -> None:
        """Keep the array of one row.

        Raises:
            ValueError: another dtype or number of dimensions; to be put end to end, another shape but for the length.
        """
        array = _as_array(value)
        if isinstance(value, list) and not value:
            array = np.zeros((0, *self.shape[1:]), self.dtype)
        unlike = array.ndim != len(self.shape) or (self.padding is None and array.shape[1:] != self.shape[1:])
        if array.dtype != self.dtype or unlike:
            raise ValueError(f"{array.dtype}{list(array.shape)}, the first sample had {self}")
        rows[row] = array

    def finish(self, rows: Any) -> Any:
        """``Ragged``, or dtype[B, longest, ...]."""
        if self.padding is None:
            offsets = np.zeros(len(rows) + 1, np.int64)
            np.cumsum([len(array) for array in rows], out=offsets[1:])
            empty = np.zeros((0, *self.shape[1:]), self.dtype)
            return Ragged(np.concatenate([empty, *rows]), offsets)
        shapes = np.array([array.shape for array in rows] or [(0,) * len(self.shape)], np.int64)
        padded = np.full((len(rows), *shapes.max(axis=0)), self.padding, self.dtype)
        for row, array in zip(padded, rows, strict=True):
            row[tuple(map(slice, array.shape))] = array
        return padded


class Layout:
    """The columns of every batch.

    Args:
        values: Of the epoch's first sample.
        batch: The pipeline's last stage: what is padded, put end to end or collated.
    """

    def __init__(self, values: Mapping[str, Any], batch: Batch | BatchBySize | None = None) -> None:
        unequal: dict[str, float | None] = {}
        if batch is not None:
            unequal.update(batch.pad)
            unequal.update(dict.fromkeys(batch.ragged))
        if missing := unequal.keys() - values.keys():
            raise ConfigError(f"pad= and ragged= name {sorted(missing)}; samples have {', '.join(values)}")
        self._collate = None if batch is None else batch.collate
        self._plain = not unequal and self._collate is None
        self.columns = {
            name: UnequalColumn(name, value, unequal[name]) if name in unequal else Column(value)
            for name, value in values.items()
        }

    @classmethod
    def of_specs(cls, specs: Mapping[str, Spec]) -> Layout:
        """The columns of a pipeline that says what its samples are, before there is one."""
        layout = cls({})
        layout.columns = {name: Column.of_spec(spec) for name, spec in specs.items()}
        return layout

    def allocate(self, rows_count: int) -> dict[str, Any]:
        """Room for a batch."""
        return {name: column.allocate(rows_count) for name, column in self.columns.items()}

    def holds(self, name: str, spec: Spec | None) -> bool:
        """Whether the field's rows are arrays of exactly this dtype and shape, to be written in place."""
        column = self.columns.get(name)
        return (
            spec is not None
            and spec.shape != ()
            and column is not None
            and type(column) is Column
            and column.shape == spec.shape
            and column.dtype == spec.dtype
        )

    def put(
        self,
        batch: dict[str, Any],
        row: int,
        values: Mapping[str, Any],
        *,
        key: str,
        shard: str,
        written: Collection[str] = (),
    ) -> None:
        """Write one sample to its row.

        Args:
            batch: As ``allocate`` made it.
            row: Of the sample.
            values: By field.
            key: Of the sample, for errors.
            shard: See `key`.
            written: Fields that are in the row already.

        Raises:
            DecodeError: other fields, dtypes or shapes than the first sample's.
        """
        if len(values) + len(written) != len(self.columns) or not values.keys() <= self.columns.keys():
            raise DecodeError(
                f"the sample has {sorted([*values, *written])}, the first one had {sorted(self.columns)}",
                hint="name what every sample has: .decode(ps.Image('jpg'), ...)",
                stage="batch",
                sample_key=key,
                shard=shard,
            )
        for name, value in values.items():
            try:
                self.columns[name].put(batch[name], row, value)
            except (ValueError, OverflowError, TypeError) as error:
                raise DecodeError(
                    f"does not fit into the batch: {error}",
                    hint=_remedy(name, self.columns[name], value),
                    stage="batch",
                    field=name,
                    sample_key=key,
                    shard=shard,
                ) from error

    def finish(self, batch: dict[str, Any]) -> Any:
        """The batch as it is delivered: padded, put end to end, collated.

        Args:
            batch: Complete: rows that do not count are cut off, and ``__key__`` and the like are there.

        Returns:
            `batch` itself where nothing of this was asked for; what the user's collate function gives, if there is one.

        Raises:
            DecodeError: the user's function failed.
        """
        if self._plain:
            return batch
        finished = dict(batch)
        for name, column in self.columns.items():
            finished[name] = column.finish(batch[name])
            if isinstance(column, UnequalColumn) and column.padding is not None:
                finished[f"__{name}_length__"] = np.array([len(array) for array in batch[name]], np.int64)
        if self._collate is None:
            return finished
        samples = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
        try:
            collated = self._collate(samples)
            if collated is None:  # what ends an epoch
                raise TypeError("it returned None, not a batch")
        except Exception as error:
            first_key = batch["__key__"][0] if batch.get("__key__") else None
            raise failed(self._collate, error, stage="collate", sample_key=first_key) from error
        return collated


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic) or (hasattr(value, "__array__") and not isinstance(value, type))


def _as_array(value: Any) -> NDArray[Any]:
    return np.asarray(value) if _is_array(value) or isinstance(value, list) else np.asarray(None)


def _holds(dtype: np.dtype[Any], value: float) -> bool:
    try:
        return bool(np.array(value, dtype=dtype) == value) or value != value  # noqa: PLR0124 - nan
    except (OverflowError, ValueError, TypeError):
        return False
