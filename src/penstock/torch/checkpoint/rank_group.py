"""Collectives of a job's ranks for checkpoints, in which an error on one rank is raised on all of them.

They run over a gloo group of their own, because a save in the background must not come between the collectives of training.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from penstock.torch.ranks import rank_and_world_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")


class RankGroup:
    """All ranks of the job; a process without ``torch.distributed`` is the only one of its group.

    Every rank must make it, and call its methods in the same order. Messages are pickled objects of a few kilobytes.

    Attributes:
        rank: Number of this rank.
        size: Number of ranks.
    """

    def __init__(self) -> None:
        self.rank, self.size = rank_and_world_size() or (0, 1)
        self._group: Any = dist.new_group(backend="gloo") if self.size > 1 else None

    def each(self, call: Callable[[], T]) -> list[T]:
        """Call a function on every rank, and return the results of all ranks.

        Raises:
            BaseException: The function failed on this rank, or else on the first rank on which it did.
        """
        outcome: tuple[bool, Any]
        try:
            outcome = True, call()
        except BaseException as error:
            self._gathered((False, _picklable(error)))
            raise
        outcomes = self._gathered(outcome)
        for rank, (is_result, value) in enumerate(outcomes):
            if not is_result:
                value.add_note(f"This happened on rank {rank}.")
                raise value
        return [value for _, value in outcomes]

    def first(self, call: Callable[[], T]) -> T:
        """Call a function on rank 0, and return its result on every rank.

        Raises:
            BaseException: The function failed.
        """
        results: list[Any] = self.each(lambda: call() if self.rank == 0 else None)
        return results[0]  # type: ignore[no-any-return]

    def spread(self, call: Callable[[], Sequence[T]]) -> T:
        """Call a function on rank 0, and return on every rank the item of its result that has the rank's number.

        Raises:
            BaseException: The function failed.
        """
        if self._group is None:
            return call()[0]
        items: Any = None
        outcome: tuple[bool, Any] = True, None
        try:
            items = [(True, item) for item in call()] if self.rank == 0 else None
        except BaseException as error:
            outcome = False, error
            items = [(False, _picklable(error))] * self.size
        box: list[Any] = [None]
        dist.scatter_object_list(box, items, src=0, group=self._group)
        is_result, value = outcome if not outcome[0] else box[0]
        if not is_result:
            raise value
        return value  # type: ignore[no-any-return]

    def _gathered(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values


def _picklable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
