"""What the ranks of a job decide together. A rank that fails tells the others by an answer smaller than any other."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FAILED = -(1 << 62)
"""The answer of a rank that failed."""


class RankConsensus:
    """Decisions of all ranks, from the opening of an epoch to its end.

    Args:
        agree: Returns the smallest of the integers that the ranks give it. Blocks until all ranks have called it.
    """

    def __init__(self, agree: Callable[[int], int]) -> None:
        self._agree = agree
        self._has_failed = False  # some rank has, and all ranks know it

    def smallest(self, n: int) -> int:
        """The smallest `n` of all ranks. Blocks until all ranks have called it.

        Raises:
            PenstockError: A rank failed. Each further call raises it again, without waiting for the other ranks.
        """
        self.check()
        found = self._agree(n)
        self._has_failed = found == FAILED
        self.check()
        return found

    def check(self) -> None:
        """Raise an error if a rank has failed.

        Raises:
            PenstockError: A rank failed.
        """
        if self._has_failed:
            raise PenstockError("another rank failed", hint="its own error says why; restart() on all ranks")

    @contextlib.contextmanager
    def reporting_failure(self) -> Iterator[None]:
        """Tell the other ranks if the block fails, so that their next ``smallest`` raises instead of waiting for this rank."""
        try:
            yield
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                with contextlib.suppress(Exception):  # a rank may be gone; the error of the block is the one to raise
                    self._agree(FAILED)
            raise
