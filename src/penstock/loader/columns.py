"""Batches as columns: an array where values have one dtype and shape, a list for everything else.

The first sample fixes each column. A later one that does not fit is an error and never a silent cast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import DecodeError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

_SCALARS: dict[type, Any] = {bool: np.dtype(np.bool_), int: np.dtype(np.int64), float: np.dtype(np.float64)}


class Column:
    """One field of every sample: ``dtype[rows, *shape]``, or a list where `dtype` is None."""

    __slots__ = ("dtype", "is_array", "scalar", "shape")

    def __init__(self, value: Any) -> None:
        self.scalar = type(value) if type(value) in _SCALARS else None
        self.is_array = self.scalar is None and _is_array(value)
        self.shape: tuple[int, ...] = ()
        self.dtype: np.dtype[Any] | None = None
        if self.scalar is not None:
            self.dtype = _SCALARS[self.scalar]
        elif self.is_array:
            array = np.asarray(value)
            if array.dtype == object:
                self.is_array = False
            else:
                self.shape, self.dtype = array.shape, array.dtype

    def allocate(self, rows_count: int) -> NDArray[Any] | list[Any]:
        """Room for so many samples, to be filled."""
        if self.dtype is None:
            return [None] * rows_count
        return np.empty((rows_count, *self.shape), dtype=self.dtype)

    def put(self, rows: Any, row: int, value: Any) -> None:
        """Write `value` to its row.

        Raises:
            ValueError: another type, dtype or shape than the first sample's.
        """
        if self.is_array:
            array = np.asarray(value)
            if array.dtype != self.dtype or array.shape != self.shape:
                raise ValueError(
                    f"{array.dtype}{list(array.shape)}, the first sample had {self.dtype}{list(self.shape)}"
                )
            rows[row] = array
        elif self.scalar is not None and type(value) is not self.scalar:
            raise ValueError(f"{type(value).__name__} {value!r:.40}, the first sample had {self.scalar.__name__}")
        else:
            rows[row] = value


class Layout:
    """The columns of every batch, fixed by the values of the first sample."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.columns = {name: Column(value) for name, value in values.items()}

    def allocate(self, rows_count: int) -> dict[str, Any]:
        """Room for a batch."""
        return {name: column.allocate(rows_count) for name, column in self.columns.items()}

    def put(self, batch: dict[str, Any], row: int, values: Mapping[str, Any], *, key: str, shard: str) -> None:
        """Write one sample to its row.

        Raises:
            DecodeError: other fields, dtypes or shapes than the first sample's.
        """
        if values.keys() != self.columns.keys():
            raise DecodeError(
                f"the sample has {sorted(values)}, the first one had {sorted(self.columns)}",
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
                    hint="give Image a height and width, or make all alike in .map()",
                    stage="batch",
                    field=name,
                    sample_key=key,
                    shard=shard,
                ) from error


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic) or (hasattr(value, "__array__") and not isinstance(value, type))
