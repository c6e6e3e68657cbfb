"""A batch on its way from worker processes, and its columns once all of them are done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.loader.workers.shared import unpacked

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.loader.position import FeedPosition
    from penstock.loader.workers.children import WorkerProcess
    from penstock.loader.workers.row_assignment import Assignment


class WorkerResult:
    """What one worker made of its rows, besides what is in the slot."""

    __slots__ = ("about", "dropped", "packed", "position")

    def __init__(
        self, about: Mapping[str, list[str]], packed: Any, dropped: list[int], position: FeedPosition | None
    ) -> None:
        self.about = about
        self.packed = packed
        self.dropped = dropped
        self.position = position


class PendingBatch:
    """A batch on its way."""

    __slots__ = ("assignment", "error", "parts", "slot")

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.slot: int | None = None
        self.parts: dict[int, WorkerResult] = {}
        self.error: BaseException | None = None


def gathered(
    pending: PendingBatch, workers: Sequence[WorkerProcess], *, size: int, lists: Sequence[str]
) -> dict[str, Any]:
    """The columns that are lists, and the positions.

    Args:
        pending: All its workers are done.
        workers: Whose heaps have the values of any length.
        size: Rows; those that nobody fills are None.
        lists: Columns that are there in any case.
    """
    columns: dict[str, Any] = {name: [None] * size for name in lists}
    for worker in workers:
        part, own = pending.parts[worker.number], pending.assignment.rows[worker.number].tolist()
        dropped = set(part.dropped)
        kept = [row for index, row in enumerate(own) if index not in dropped] if dropped else own
        names, packs, inline = part.packed
        found = unpacked(packs, inline if inline is not None else worker.heaps[pending.slot or 0])
        for name, values in zip(names, found, strict=True):
            put_rows(columns.setdefault(name, [None] * size), kept, values)
        for name, said in part.about.items():
            put_rows(columns[name], own, said)
    positions = pending.assignment.positions
    if len(positions) < size:
        positions = np.concatenate([positions, np.zeros(size - len(positions), np.int64)])
    columns["__position__"] = positions
    return columns


def put_rows(column: list[Any], rows: Sequence[int], values: Sequence[Any]) -> None:
    """Write values to rows of a list, ascending: usually every so many-th."""
    count = len(rows)
    if not count:
        return
    first, step = rows[0], rows[1] - rows[0] if count > 1 else 1
    if rows == list(range(first, first + step * count, step)):
        column[first : first + step * count : step] = values
        return
    for row, value in zip(rows, values, strict=True):
        column[row] = value
