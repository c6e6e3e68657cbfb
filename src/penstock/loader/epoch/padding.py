"""From a complete batch to what the training loop gets: cut to its rows, without those dropped, padded and masked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import DataError

if TYPE_CHECKING:
    from penstock.loader.batches.run import Delivery


def delivered(delivery: Delivery, *, size: int) -> dict[str, Any]:
    """The batch of one rank alone: as many rows as there are samples."""
    values, rows = delivery.values, delivery.rows
    if delivery.dropped:
        return _selected(values, _kept(delivery))
    if rows == size:
        return values
    return {name: column[:rows] for name, column in values.items()}


def masked(delivery: Delivery, *, rows_count: int, last: dict[str, Any] | None) -> dict[str, Any]:
    """The batch of one rank of several: always `rows_count` rows, and ``__valid__: bool[B]`` says which count.

    Args:
        delivery: May have fewer rows, or dropped ones; they repeat the last sample that is there.
        rows_count: Of every rank's batch.
        last: A batch before, to repeat from where this one is empty.
    """
    kept = _kept(delivery)
    valid = np.zeros(rows_count, dtype=np.bool_)
    if len(kept) == rows_count:
        valid[:] = True
        return {**_trimmed(delivery.values, rows_count), "__valid__": valid}
    if not len(kept):
        return padding(last, rows_count=rows_count)
    source = np.arange(rows_count)
    source[: delivery.rows][delivery.dropped] = kept[-1]
    source[delivery.rows :] = kept[-1]
    valid[kept] = True
    return {**_selected(delivery.values, source), "__valid__": valid}


def padding(last: dict[str, Any] | None, *, rows_count: int) -> dict[str, Any]:
    """A batch that only keeps a rank in step with the others: the last sample again, and nothing valid.

    Raises:
        DataError: the epoch has no sample to repeat.
    """
    if last is None:
        raise DataError(
            "this epoch has not a single sample to pad this rank's batches with",
            hint="does .filter() or on_corrupt= leave out all of them? Else use fewer ranks, or drop_last=True",
        )
    rows = np.full(rows_count, len(last["__key__"]) - 1)
    return {**_selected(last, rows), "__valid__": np.zeros(rows_count, dtype=np.bool_)}


def _kept(delivery: Delivery) -> Any:
    kept = np.ones(delivery.rows, dtype=np.bool_)
    kept[delivery.dropped] = False
    return np.flatnonzero(kept)


def _trimmed(values: dict[str, Any], rows: int) -> dict[str, Any]:
    return values if len(values["__key__"]) == rows else {name: column[:rows] for name, column in values.items()}


def _selected(values: dict[str, Any], rows: Any) -> dict[str, Any]:
    chosen = rows.tolist()
    return {
        name: column[rows] if isinstance(column, np.ndarray) else [column[row] for row in chosen]
        for name, column in values.items()
    }


def row_to_repeat(batch: dict[str, Any]) -> dict[str, Any]:
    """The last sample of a batch, copied."""
    return {
        name: column[-1:].copy() if isinstance(column, np.ndarray) else column[-1:] for name, column in batch.items()
    }
