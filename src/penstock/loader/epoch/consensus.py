"""What ranks ask each other, and how the others hear of one that failed: by an answer that is smaller than any other."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FAILED = -(1 << 62)
"""Said instead of an answer."""


class RankConsensus:
    """The ranks of an epoch, from its opening to its end.

    Args:
        agree: See ``Loader``.
    """

    def __init__(self, agree: Callable[[int], int]) -> None:
        self._agree = agree
        self._has_failed = False  # some rank, and all know

    def smallest(self, n: int) -> int:
        """The smallest `n` of all ranks. Blocks for them.

        Raises:
            PenstockError: one of them failed; again at each further call, without asking.
        """
        self.check()
        found = self._agree(n)
        self._has_failed = found == FAILED
        self.check()
        return found

    def check(self) -> None:
        """Refuse to go on where a rank failed.

        Raises:
            PenstockError: one did.
        """
        if self._has_failed:
            raise PenstockError("another rank failed", hint="its own error says why; restart() on all ranks")

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Of what fails inside, the other ranks hear where they ask next, and wait for nobody."""
        try:
            yield
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                with contextlib.suppress(Exception):  # a rank may be gone: what failed here is to be said
                    self._agree(FAILED)
            raise
