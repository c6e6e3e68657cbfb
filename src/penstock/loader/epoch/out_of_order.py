"""Batches out of order: whichever is complete first is handed out, each exactly once; and the state that says which were."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import ConfigError
from penstock.order import HandedOut

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.loader.plan.loader_plan import LoaderPlan


class OutOfOrderMark(NamedTuple):
    """Where a loader is that hands out batches as they come.

    Attributes:
        mark: In front of the lowest batch that was not handed out.
        handed: Batches behind that one that were, counted from it.
    """

    mark: Any
    handed: tuple[int, ...]


def cursor_of(plan: LoaderPlan, mark: Any) -> dict[str, Any]:
    """Any mark as JSON."""
    if isinstance(mark, OutOfOrderMark):
        size = plan.batching.global_size
        return {**plan.cursor(mark.mark), "handed": list(mark.handed), "handed_size": size}
    return plan.cursor(mark)


class OutOfOrderTracker:
    """Keeps account of one run.

    Args:
        cursor: Where the run begins.
        mark: The same, as the feed says it.
        plan: Whose batches.

    Raises:
        ConfigError: batches of another size were handed out.
    """

    def __init__(self, cursor: Mapping[str, Any] | None, *, mark: Any, plan: LoaderPlan) -> None:
        self._before = tuple(cursor.get("handed", ())) if cursor is not None else ()
        if self._before and cursor is not None and cursor["handed_size"] != plan.batching.global_size:
            raise ConfigError(
                f"the state has handed out single batches of {cursor['handed_size']} samples out of order, "
                f"this loader makes batches of {plan.batching.global_size}",
                hint="resume with the same global batch size",
            )
        self._handed = HandedOut(0, self._before)
        self._marks = {-1: mark}  # behind each batch, from the one before the lowest that was not handed out

    def is_left(self, number: int) -> bool:
        """Whether a batch, counted from where the run begins, is to be given by it."""
        return number not in self._before

    def number_of(self, delivered: int) -> int:
        """Number of the `delivered`-th batch that the run makes."""
        number = delivered
        for handed in sorted(self._before):
            number += handed <= number
        return number

    def take(self, number: int, mark: Any) -> Any:
        """A batch is handed out, behind which the feed is at `mark`; what to remember of the run now."""
        self._handed.add(number)
        self._marks[number] = mark
        lowest = self._handed.lowest
        for done in [each for each in self._marks if each < lowest - 1]:
            del self._marks[done]
        base = self._marks.get(lowest - 1)
        higher = tuple(each - lowest for each in self._handed.higher)
        return OutOfOrderMark(base, higher) if higher else base
