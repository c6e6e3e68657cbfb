"""Batches as columns: an array if all values have one dtype and shape, otherwise a list.

The first sample fixes each column, unless the pipeline declares it. A value that does not fit raises an error; nothing is
cast silently. Arrays of unequal length are kept in a list until the batch is complete, and are then padded or concatenated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.errors import ConfigError, DecodeError
from penstock.system.tracebacks import failed

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from numpy.typing import NDArray

    from penstock.pipeline import Batch, BatchBySize, Spec

_SCALARS: dict[type, Any] = {bool: np.dtype(np.bool_), int: np.dtype(np.int64), float: np.dtype(np.float64)}
_PYTHON: dict[Any, type] = {dtype: kind for kind, dtype in _SCALARS.items()}


class Ragged(NamedTuple):
    """Arrays of unequal length, concatenated: the i-th is ``data[offsets[i]:offsets[i + 1]]``."""

    data: NDArray[Any]
    """dtype[sum of lengths, ...]: the concatenated arrays."""
    offsets: NDArray[np.int64]
    """int64[B + 1]: where each array starts in `data`; the first is 0, the last is the length of `data`."""


class BatchColumn:
    """One field of every sample: an array ``dtype[rows, *shape]``, or a list if `dtype` is None.

    Args:
        value: The field's value in the first sample, which fixes dtype and shape.
    """

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
    def of_spec(cls, spec: Spec) -> BatchColumn:
        """Return the column that a field or a user declares."""
        column = cls(None)
        if spec.dtype != "object":
            column.dtype, column.shape = np.dtype(spec.dtype), spec.shape
            column._find_scalar()
        return column

    def _find_scalar(self) -> None:
        """Find the Python type whose values the column takes besides numpy's scalars of the same dtype."""
        self.scalar = _PYTHON.get(self.dtype) if self.dtype is not None and self.shape == () else None

    def allocate(self, rows_count: int) -> NDArray[Any] | list[Any]:
        """Allocate memory for `rows_count` samples; arrays are not initialized."""
        if self.dtype is None:
            return [None] * rows_count
        return np.empty((rows_count, *self.shape), dtype=self.dtype)

    def put(self, rows: Any, row: int, value: Any) -> None:
        """Write `value` to its row.

        Raises:
            ValueError: The value's type, dtype or shape differs from the column's.
        """
        if self.dtype is None or (self.scalar is not None and type(value) is self.scalar):
            rows[row] = value
            return
        if not _is_array(value):
            raise ValueError(f"{type(value).__name__} {value!r:.40}, but the first sample had {self}")
        array = np.asarray(value)
        if array.dtype != self.dtype or array.shape != self.shape:
            raise ValueError(f"{array.dtype}{list(array.shape)}, but the first sample had {self}")
        rows[row] = array

    def finish(self, rows: Any) -> Any:
        """Return the column as it is delivered."""
        return rows

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}" if self.scalar is None else self.scalar.__name__


def _remedy(name: str, column: BatchColumn, value: Any) -> str:
    """Return a hint: what the user can do to make the value fit."""
    array = np.asarray(value) if _is_array(value) else None
    if isinstance(value, int | float | np.number) and column.dtype is not None and not column.shape:
        if column.scalar is type(value):
            return "int64 ends at 2**63 - 1: return a float or a str from .map()"
        return f"return one type of number from .map(), e.g. float(sample[{name!r}])"
    if array is None or array.dtype != column.dtype:
        return f"return {column} for every sample from .map()"
    if array.dtype == np.uint8 and array.ndim in (2, 3):
        return "give Image a height and width, or make all shapes equal in .map()"
    return f"make all shapes equal in .map(), or use .batch(pad=[{name!r}]) or .batch(ragged=[{name!r}])"


class UnequalColumn(BatchColumn):
    """One field whose arrays differ in length: a list of arrays until the batch is complete.

    Args:
        name: The field.
        value: The field's value in the first sample, which fixes dtype and number of dimensions.
        padding: The value to pad with; None: concatenate the arrays.

    Raises:
        DecodeError: The first value is not an array of at least one dimension.
        ConfigError: The array's dtype cannot hold the padding.
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
            raise ConfigError(f"pad={{{name!r}: {padding!r}}}: {array.dtype} cannot hold this value")

    def allocate(self, rows_count: int) -> list[Any]:
        """Return a list of `rows_count` entries, to be filled with arrays."""
        return [None] * rows_count

    def put(self, rows: Any, row: int, value: Any) -> None:
        """Keep the array of one row.

        Raises:
            ValueError: The array's dtype or number of dimensions differs from the first sample's; for concatenation,
                any dimension but the first differs.
        """
        array = _as_array(value)
        if isinstance(value, list) and not value:
            array = np.zeros((0, *self.shape[1:]), self.dtype)
        unlike = array.ndim != len(self.shape) or (self.padding is None and array.shape[1:] != self.shape[1:])
        if array.dtype != self.dtype or unlike:
            raise ValueError(f"{array.dtype}{list(array.shape)}, but the first sample had {self}")
        rows[row] = array

    def finish(self, rows: Any) -> Any:
        """Return ``Ragged``, or the padded array dtype[B, longest, ...]."""
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
        values: The values of the first sample of the epoch, by field.
        batch: The pipeline's last stage, which says what is padded, concatenated or collated.

    Raises:
        ConfigError: `batch` names a field that the sample lacks, or a padding that its dtype cannot hold.
        DecodeError: A field to pad or concatenate is not an array.
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
            name: UnequalColumn(name, value, unequal[name]) if name in unequal else BatchColumn(value)
            for name, value in values.items()
        }
        if self._collate is not None:  # which may make something of arrays of any shapes
            lists = [name for name, column in self.columns.items() if type(column) is BatchColumn and column.shape]
            self.columns |= {name: BatchColumn(None) for name in lists}

    @classmethod
    def of_specs(cls, specs: Mapping[str, Spec]) -> Layout:
        """Return the columns of a pipeline that declares all its fields, before the first sample."""
        layout = cls({})
        layout.columns = {name: BatchColumn.of_spec(spec) for name, spec in specs.items()}
        return layout

    def allocate(self, rows_count: int) -> dict[str, Any]:
        """Allocate the columns of a batch of `rows_count` rows."""
        return {name: column.allocate(rows_count) for name, column in self.columns.items()}

    def holds(self, name: str, spec: Spec | None) -> bool:
        """Whether the rows of a field are arrays of exactly this dtype and shape, so that they can be written in place."""
        column = self.columns.get(name)
        return (
            spec is not None
            and spec.shape != ()
            and column is not None
            and type(column) is BatchColumn
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
            batch: Arrays that ``allocate`` returned.
            row: Index of the row, from 0.
            values: The sample's values by field.
            key: Key of the sample, for errors.
            shard: URL of the sample's shard, for errors.
            written: Names of the fields that are already in the row.

        Raises:
            DecodeError: The sample's fields, dtypes or shapes differ from the first sample's.
        """
        if len(values) + len(written) != len(self.columns) or not values.keys() <= self.columns.keys():
            raise DecodeError(
                f"the sample has {sorted([*values, *written])}, but the first one had {sorted(self.columns)}",
                hint="a null is no field: .decode() those that all samples have, or ps.Integer('cls', default=0)",
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

    def put_columns(self, batch: dict[str, Any], first_row: int, values: Mapping[str, Any]) -> bool:
        """Write consecutive samples to their rows, if dtypes and shapes are those of the batch.

        Args:
            batch: Arrays that ``allocate`` returned.
            first_row: Index of the first row, from 0.
            values: Columns, as arrays or lists, by field.

        Returns:
            Whether they were written; if not, ``put`` of single samples raises the error.
        """
        if values.keys() != self.columns.keys():
            return False
        for name, column in self.columns.items():
            dtype, shape = getattr(values[name], "dtype", None), getattr(values[name], "shape", (0,))[1:]
            if type(column) is not BatchColumn or (column.dtype, column.shape) != (dtype, shape):
                return False
        for name, rows in values.items():
            batch[name][first_row : first_row + len(rows)] = rows
        return True

    def finish(self, batch: dict[str, Any]) -> Any:
        """Return the batch as it is delivered: padded, concatenated and collated as the pipeline says.

        Args:
            batch: All columns of the batch, without unused rows and with the reserved fields such as ``__key__``.

        Returns:
            `batch` itself if nothing is padded, concatenated or collated; with a collate function, its result.

        Raises:
            DecodeError: The collate function failed.
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
            if collated is None:  # None marks the end of an epoch
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
