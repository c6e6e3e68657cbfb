"""The last step of a batch: it is cut to its samples, or padded to the length that all ranks have agreed on, and collated.

A single rank hands out the samples that it has (``Trimmer``). Ranks that train in step must hand out the same number of
batches, of the same length. So the last sample is repeated where a rank has none, and ``__valid__`` says which rows count
(``Padder``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.loader.batches.threads import Delivery
    from penstock.samples.columns import Layout


class Trimmer:
    """Finishes the batches of a rank that need not be in step: as many rows as there are samples.

    Args:
        full_rows_count: Number of rows of a full batch.
    """

    def __init__(self, full_rows_count: int) -> None:
        self._full_rows_count = full_rows_count

    def skips(self, delivery: Delivery | None) -> bool:
        """Whether the training loop gets nothing for this delivery: a batch without a sample is left out.

        It is called once for each delivery; None: the backend ended before this rank's last batch.
        """
        return delivery is None or delivery.is_empty

    def finish(self, delivery: Delivery | None, rows_count: int) -> Any:
        """The batch for the training loop: the samples that were kept. `rows_count` is ignored.

        Raises:
            DataError: The user's collate function failed.
        """
        del rows_count
        assert delivery is not None
        return _finished(delivery.layout, self._trimmed(delivery))

    def _trimmed(self, delivery: Delivery) -> dict[str, Any]:
        if delivery.dropped:
            return _selected(delivery.values, _kept(delivery))
        if delivery.rows == self._full_rows_count:
            return delivery.values
        return {name: column[: delivery.rows] for name, column in delivery.values.items()}


class Padder:
    """Finishes the batches of ranks in step: always all their rows, and ``__valid__: bool[B]`` says which of them count.

    Args:
        find_any: Finds a delivery with at least one sample, from anywhere in the epoch; None if there is none. It is called
            once, if this rank must pad before it has had a sample.
        is_variable: Whether each batch is as long as it is delivered (``batch_by_size``), whatever its length on other ranks.
    """

    def __init__(self, find_any: Callable[[], Delivery | None], *, is_variable: bool) -> None:
        self._find_any = find_any
        self._is_variable = is_variable
        self._layout: Layout | None = None
        self._row: dict[str, Any] | None = None  # the last sample, in columns of one row
        self._has_searched = False

    def skips(self, delivery: Delivery | None) -> bool:
        """Whether the training loop gets nothing for this delivery, as on all other ranks: the epoch has no sample at all.

        It is called once for each delivery; None: the backend ended before this rank's last batch.
        """
        if self._row is None and not self._has_searched and (delivery is None or delivery.is_empty):
            self._has_searched = True
            found = self._find_any()
            if found is not None:
                self._layout = found.layout
                self._row = _selected(found.values, _kept(found)[-1:])
        return self._row is None and self._has_searched

    def finish(self, delivery: Delivery | None, rows_count: int) -> Any:
        """The batch for the training loop: the samples that were kept, each in its row, and the last one in all other rows.

        Args:
            delivery: Batch that the backend delivered and that is not skipped; None if this rank has no sample of this batch.
            rows_count: Number of rows that the batch has on every rank.

        Raises:
            DataError: The user's collate function failed.
        """
        if delivery is not None and self._is_variable:
            rows_count = delivery.rows
        if delivery is None or delivery.is_empty:  # it only keeps this rank in step with the others
            assert self._row is not None
            row = _selected(self._row, np.zeros(rows_count, dtype=np.int64))
            return _finished(self._layout, {**row, "__valid__": np.zeros(rows_count, dtype=np.bool_)})
        batch = _masked(delivery, rows_count)
        self._layout = delivery.layout
        self._row = {
            name: column[-1:].copy() if isinstance(column, np.ndarray) else column[-1:]
            for name, column in batch.items()
        }
        return _finished(self._layout, batch)


def _masked(delivery: Delivery, rows_count: int) -> dict[str, Any]:
    """A delivery as `rows_count` rows; those without a sample repeat the last sample that was kept."""
    kept = _kept(delivery)
    valid = np.zeros(rows_count, dtype=np.bool_)
    if len(kept) == rows_count:
        valid[:] = True
        return {**_cut(delivery.values, rows_count), "__valid__": valid}
    source = np.arange(rows_count)
    source[: delivery.rows][delivery.dropped] = kept[-1]
    source[delivery.rows :] = kept[-1]
    valid[kept] = True
    return {**_selected(delivery.values, source), "__valid__": valid}


def _kept(delivery: Delivery) -> Any:
    """Rows whose sample was kept, ascending; int64[n]."""
    kept = np.ones(delivery.rows, dtype=np.bool_)
    kept[delivery.dropped] = False
    return np.flatnonzero(kept)


def _cut(values: dict[str, Any], rows_count: int) -> dict[str, Any]:
    if len(values["__key__"]) == rows_count:
        return values
    return {name: column[:rows_count] for name, column in values.items()}


def _selected(values: dict[str, Any], rows: Any) -> dict[str, Any]:
    chosen = rows.tolist()
    return {
        name: column[rows] if isinstance(column, np.ndarray) else [column[row] for row in chosen]
        for name, column in values.items()
    }


def _finished(layout: Layout | None, batch: dict[str, Any]) -> Any:
    return batch if layout is None else layout.finish(batch)


Finisher: TypeAlias = Trimmer | Padder
"""Turns a delivered batch into the batch for the training loop."""
